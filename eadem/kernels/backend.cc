// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/backend.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

namespace eadem {

namespace kernels {

namespace cpu {
extern const Backend kBackend;
}
namespace cuda {
extern const Backend kBackend;
}
namespace reference {
extern const Backend kBackend;
}

namespace {

constexpr const Backend* kBackends[] = {
    &cpu::kBackend,
#ifdef EADEM_CUDA
    &cuda::kBackend,
#endif
    &reference::kBackend,
};

// The n of "cuda:n", 0 without one, -1 if it is no number.
int index_of(std::string_view name, std::string_view kind) {
  if (name.size() == kind.size()) return 0;
  const std::string_view digits = name.substr(kind.size() + 1);
  int index = -1;
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  return code == std::errc() && end == digits.data() + digits.size() ? index : -1;
}

}  // namespace

std::span<const Backend* const> backends() { return kBackends; }

const Backend& backend_of(const Device& device) {
  const auto found = std::find_if(std::begin(kBackends), std::end(kBackends),
                                  [&](const Backend* backend) { return backend->name == device.backend(); });
  EADEM_CHECK(found != std::end(kBackends), "{} belongs to no backend", device.description());
  return **found;
}

KernelList find_kernels(std::span<const OpKernels> table, std::string_view op) {
  const auto found = std::find_if(table.begin(), table.end(), [&](const OpKernels& line) { return line.op == op; });
  return found == table.end() ? KernelList() : found->kernels();
}

}  // namespace kernels

std::shared_ptr<Device> open_device(std::string_view name, const DeviceOptions& options) {
  const std::string_view kind = name.substr(0, name.find(':'));
  const int index = kernels::index_of(name, kind);
  for (const kernels::Backend* backend : kernels::backends()) {
    if (backend->name != kind || index < 0) continue;
    if (!options.isa.empty() && kind != "cpu")
      throw InvalidArgument("instruction set '{}' was asked for, but device '{}' is not a CPU", options.isa, name);
    return backend->open(index, options);
  }
#ifndef EADEM_CUDA
  if (kind == "cuda" && index >= 0)
    throw Unsupported("device '{}': this build has no CUDA backend; configure with -DEADEM_CUDA=ON", name);
#endif
  throw InvalidArgument("unknown device '{}'; expected one of {}, or cuda:N", name, fmt::join(backend_names(), ", "));
}

std::vector<std::string> list_devices() {
  std::vector<std::string> result;
  for (const kernels::Backend* backend : kernels::backends())
    for (std::string& name : backend->list()) result.push_back(std::move(name));
  return result;
}

std::vector<std::string> backend_names() {
  std::vector<std::string> result;
  for (const kernels::Backend* backend : kernels::backends()) result.emplace_back(backend->name);
  return result;
}

}  // namespace eadem
