// SPDX-License-Identifier: Apache-2.0
//
// Backend: one kind of device, with the kernels that run on it. A backend is a folder below kernels/ and one line of
// the list in backend.cc. An op that a backend has no kernel for is reported when a program for its devices compiles.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/kernels/kernel.h"

namespace eadem::kernels {

struct Backend {
  std::string_view name;  // "cuda"; its devices are called "cuda" or "cuda:1", and Device::backend() says "cuda"
  // Names of the devices that can be opened here and are worth proposing, best last.
  std::vector<std::string> (*list)();
  // `index` is 1 for "cuda:1" and 0 for "cuda". Throws NotFound for a device that is not there.
  std::shared_ptr<Device> (*open)(int index, const DeviceOptions& options);
  // The kernels of an op or a fusion, by its name; empty if there are none.
  KernelList (*kernels)(std::string_view op);
};

// The backends of this build.
std::span<const Backend* const> backends();
const Backend& backend_of(const Device& device);

// A line of a backend's table of kernels.
struct OpKernels {
  std::string_view op;
  KernelList (*kernels)();
};
KernelList find_kernels(std::span<const OpKernels> table, std::string_view op);

}  // namespace eadem::kernels

namespace eadem {

// Opens the device named `name`: "cpu", "cuda", "cuda:1". Throws InvalidArgument for a name nobody knows, NotFound
// for a device that is not there (with what was looked for), Unsupported for a backend that is not in this build.
std::shared_ptr<Device> open_device(std::string_view name, const DeviceOptions& options = {});

// The devices that the backends of this build propose, by name, best last. For `doctor`.
std::vector<std::string> list_devices();

// The names of the backends of this build.
std::vector<std::string> backend_names();

}  // namespace eadem
