// SPDX-License-Identifier: Apache-2.0
//
// The CUDA device behind an interface without CUDA headers, which builds without CUDA also have. cuda_context.h
// declares the device class that kernels use (stream, cuBLASLt handle); only builds with CUDA include it.
#pragma once

#include <memory>

namespace eadem {

class Device;

// The number of CUDA devices; 0 without a driver or in a build without CUDA.
int num_cuda_devices();

// Throws NotFound (no such device; the message says how many there are) or Unsupported (a build without CUDA).
std::shared_ptr<Device> open_cuda_device(int index);

}  // namespace eadem
