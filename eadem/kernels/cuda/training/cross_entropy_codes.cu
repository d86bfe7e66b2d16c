// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/linear/fp8_tensor.cuh"
#include "eadem/kernels/cuda/linear/fp8_tensor.h"
#include "eadem/kernels/cuda/training/cross_entropy.cuh"

namespace eadem::kernels::cuda {

namespace {

// The gradient in e5m2.
struct GradientCodes {
  static constexpr bool kTakesRegisters = true;
  const float* scale;  // [1]
  uint8_t* codes;      // [rows, vocab]

  template <typename Logits>
  __device__ void operator()(const Logits& logits, const RowLoss& loss) const {
    const Rounder<true> rounder(*scale);
    uint8_t* to = codes + loss.row * loss.vocab;
    // No logit exceeds lse, so probabilities are 1 at most, and gradients dloss.
    const uint32_t largest = __float_as_uint(fabsf(loss.dloss));
    const auto codes_of_four = [&](const float(&gradients)[4]) {
      uint32_t word[1];
      rounder.round(word, gradients, largest);
      return word[0];
    };
    if constexpr (Logits::kInRegisters) {
      logits.store_gradient(to, loss, [&](uint8_t(&results)[4], const float(&gradients)[4]) {
        const uint32_t word = codes_of_four(gradients);
#pragma unroll
        for (int k = 0; k < 4; ++k) results[k] = static_cast<uint8_t>(word >> 8 * k);
      });
    } else {
      logits.each_four([&](int32_t column, const float(&four)[4]) {
        float gradients[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) gradients[n] = loss.gradient_of(four[n], column + n == loss.label);
        *reinterpret_cast<uint32_t*>(to + column) = codes_of_four(gradients);
      });
    }
  }
};

}  // namespace

cudaError_t launch_cross_entropy_codes(const CrossEntropyCodesParams& p, cudaStream_t stream) {
  if (p.loss.vocab % 16 != 0 || p.loss.dtype != DType::f32 || p.loss.dlogits != nullptr) return cudaErrorInvalidValue;
  return launch_rows<float>(p.loss, GradientCodes{p.scale, p.codes}, stream);
}

}  // namespace eadem::kernels::cuda
