// SPDX-License-Identifier: Apache-2.0
//
// Products of bf16 by cuBLASLt as it is, to measure against: any algorithm that it offers, those that split k among
// them, whose bits depend on the number of rows.
#pragma once

#include <memory>
#include <vector>

#include "eadem/kernels/cuda/cuda_device.h"

namespace eadem {

// y [rows, out] = x [rows, in] weight [out, in]^T, all bf16, sums in f32.
class LibraryProduct {
 public:
  // `workspace_bytes`: what an algorithm may use. Throws DeviceError.
  LibraryProduct(CudaDevice& device, int64_t rows, int64_t in, int64_t out, int64_t workspace_bytes);
  ~LibraryProduct();

  // The algorithms that the library offers, best first by its own estimate.
  size_t algorithms() const;
  bool splits_k(size_t algorithm) const;
  void run(size_t algorithm, void* y, const void* x, const void* weight) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace eadem
