// SPDX-License-Identifier: Apache-2.0
#ifndef EADEM_CUDA

#include "eadem/core/device/cuda_device.h"
#include "eadem/core/device/device.h"

namespace eadem {

int num_cuda_devices() { return 0; }

std::shared_ptr<Device> open_cuda_device(int index) {
  throw Unsupported("device 'cuda:{}': this build has no CUDA backend; configure with -DEADEM_CUDA=ON", index);
}

}  // namespace eadem

#endif  // EADEM_CUDA
