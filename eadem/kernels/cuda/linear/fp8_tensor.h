// SPDX-License-Identifier: Apache-2.0
//
// The interface of fp8_tensor.cu and training/cross_entropy_codes.cu; conventions as in launch.h.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "eadem/core/dtype.h"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

// A matrix [rows, columns] in Fp8TensorEncoding, and what its scale comes from; columns are a multiple of 16.
struct TensorCodes {
  uint8_t* codes;       // [rows, columns]
  uint8_t* transposed;  // [columns, rows rounded up to a multiple of 16], or null: not wanted
  float* scale;         // [1]
  float* scaling;       // [2], or null: the scale is that of the values (kernels/quantize.h)
  bool records;         // scaling[1] becomes the largest magnitude
  uint32_t* parts;      // [kTensorParts]: scratch
};
inline constexpr int kTensorParts = 1024;

struct QuantizeTensorParams {
  const void* x;  // [rows, columns] dtype
  TensorCodes to;
  int64_t rows, columns;
  DType dtype;
  bool is_e5m2;  // else e4m3
};
[[nodiscard]] cudaError_t launch_quantize_tensor(const QuantizeTensorParams& params, cudaStream_t stream);

// A gated activation in codes, or its gradients (kernels/elementwise.h), rounded to dtype before.
struct GatedCodesParams {
  const void *gate, *up;  // [rows, columns] dtype
  const void* dy;         // likewise; null: the activation itself
  TensorCodes to[2];      // the activation; or dgate and dup
  int64_t rows, columns;
  DType dtype;
  ActivationKind kind;
  bool is_e5m2;  // else e4m3
};
[[nodiscard]] cudaError_t launch_gated_codes(const GatedCodesParams& params, cudaStream_t stream);

struct TransposeCodesParams {
  const uint8_t* codes;  // [rows, columns]; columns are a multiple of 16
  uint8_t* transposed;   // [columns, rows rounded up to a multiple of 16], `pitch` codes apart; what is added is 0
  int64_t rows, columns, pitch;
};
[[nodiscard]] cudaError_t launch_transpose_codes(const TransposeCodesParams& params, cudaStream_t stream);

// *scale = the largest |x| over the largest number of e5m2; NaN if a value is not finite.
struct ScaleParams {
  const float* x;  // [size]
  int64_t size;
  float* scale;
};
[[nodiscard]] cudaError_t launch_e5m2_scale(const ScaleParams& params, cudaStream_t stream);

// The loss, and codes of its gradient in e5m2.
struct CrossEntropyCodesParams {
  CrossEntropyParams loss;  // of logits in f32, in rows of a multiple of 16; dlogits is null
  const float* scale;       // [1]
  uint8_t* codes;           // [rows, vocab]
};
[[nodiscard]] cudaError_t launch_cross_entropy_codes(const CrossEntropyCodesParams& params, cudaStream_t stream);

}  // namespace eadem::kernels::cuda
