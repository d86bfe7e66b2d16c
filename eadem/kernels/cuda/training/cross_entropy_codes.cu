// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/linear/fp8_tensor.cuh"
#include "eadem/kernels/cuda/linear/fp8_tensor.h"
#include "eadem/kernels/cuda/training/cross_entropy.cuh"

namespace eadem::kernels::cuda {

namespace {

// The gradient in e5m2, four codes at a time. No value exceeds the largest code by more than rounding, and what does
// becomes the largest.
struct GradientCodes {
  const float* scale;  // [1]
  uint8_t* codes;      // [rows, vocab]

  __device__ void operator()(const RowLogits<float>& logits, const RowLoss& loss) const {
    const Divisor divided(*scale);
    uint8_t* to = codes + loss.row * loss.vocab;
    logits.each_four([&](int32_t column, const float(&four)[4]) {
      float quotients[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) quotients[n] = quotient_of(loss.gradient_of(four[n], column + n), INFINITY, divided);
      *reinterpret_cast<uint32_t*>(to + column) =
          codes_of<true>(quotients[0], quotients[1]) | codes_of<true>(quotients[2], quotients[3]) << 16;
    });
  }
};

}  // namespace

cudaError_t launch_cross_entropy_codes(const CrossEntropyCodesParams& p, cudaStream_t stream) {
  if (p.loss.vocab % 16 != 0 || p.loss.dtype != DType::f32 || p.loss.dlogits != nullptr) return cudaErrorInvalidValue;
  return launch_rows<float>(p.loss, GradientCodes{p.scale, p.codes}, stream);
}

}  // namespace eadem::kernels::cuda
