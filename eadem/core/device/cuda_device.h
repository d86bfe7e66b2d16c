// SPDX-License-Identifier: Apache-2.0
//
// The CUDA device, without a CUDA header: what a build without CUDA also has. The device class that kernels
// use (stream, cuBLASLt handle) is in cuda_context.h, which only builds with CUDA include.
#pragma once

#include <memory>

namespace eadem {

class Device;

// 0 without a driver or in a build without CUDA.
int num_cuda_devices();

// Throws NotFound (no such device, with how many there are) or Unsupported (not in this build).
std::shared_ptr<Device> open_cuda_device(int index);

}  // namespace eadem
