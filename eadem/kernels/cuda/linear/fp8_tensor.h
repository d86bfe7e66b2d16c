// SPDX-License-Identifier: Apache-2.0
//
// The interface of fp8_tensor.cu; conventions as in launch.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "eadem/core/dtype.h"

namespace eadem::kernels::cuda {

// A matrix in Fp8TensorEncoding.
struct QuantizeTensorParams {
  const void* x;        // [rows, columns] dtype; columns are a multiple of 16
  uint8_t* codes;       // [rows, columns]
  uint8_t* transposed;  // [columns, rows rounded up to a multiple of 16], or null: not wanted
  float* scale;         // [1]
  float* scaling;       // [2], or null: the scale is that of x (kernels/quantize.h)
  bool records;         // scaling[1] becomes the largest magnitude
  uint32_t* parts;      // [kTensorParts]: scratch
  int64_t rows, columns;
  DType dtype;
  bool is_e5m2;  // else e4m3
};
inline constexpr int kTensorParts = 1024;
[[nodiscard]] cudaError_t launch_quantize_tensor(const QuantizeTensorParams& params, cudaStream_t stream);

}  // namespace eadem::kernels::cuda
