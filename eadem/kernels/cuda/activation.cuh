// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/elementwise.h"

namespace eadem::kernels::cuda {

// 1 / (1 + exp(-x)) of a number, and exp(-x) times that in `rest`: without the branches of a division, for which many
// values would wait. The reciprocal is within 2^-24 of its size; from x = -88 down, results below 2^-120 are 0.
__device__ inline float logistic(float x, float& rest) {
  const float exponential = fminf(expf(-x), 0x1p126f), sum = 1.0f + exponential;
  const float about = fast_reciprocal(sum);
  const float result = x < -88.0f ? 0.0f : fmaf(about, fmaf(-sum, about, 1.0f), about);
  rest = exponential * result;
  return result;
}

__device__ inline float activate(ActivationKind kind, float x) {
  [[maybe_unused]] float rest;
  switch (kind) {
    case ActivationKind::silu: return x * logistic(x, rest);
    // normcdf and the logistic form keep a small relative error in the lower tail, where 1 + erf and 1 + tanh cancel.
    case ActivationKind::gelu: return x * normcdff(x);
    case ActivationKind::gelu_tanh:
      return x * logistic(1.5957691216057308f * (x + 0.044715f * x * x * x), rest);  // 2 sqrt(2 / pi)
    case ActivationKind::relu: return x > 0.0f || isnan(x) ? x : 0.0f;
    case ActivationKind::sigmoid: return 1.0f / (1.0f + expf(-x));
    case ActivationKind::relu2: return x > 0.0f || isnan(x) ? x * x : 0.0f;
  }
  return x;
}

// Calls f with the kind as an integral constant, so that what it does for many values has one branch.
template <typename F>
__device__ inline void with_activation(ActivationKind kind, F&& f) {
  using enum ActivationKind;
  switch (kind) {
    case silu: return f(std::integral_constant<ActivationKind, silu>());
    case gelu: return f(std::integral_constant<ActivationKind, gelu>());
    case gelu_tanh: return f(std::integral_constant<ActivationKind, gelu_tanh>());
    case relu: return f(std::integral_constant<ActivationKind, relu>());
    case sigmoid: return f(std::integral_constant<ActivationKind, sigmoid>());
    case relu2: return f(std::integral_constant<ActivationKind, relu2>());
  }
}

// On the host: calls f with the kind as an integral constant. f launches a kernel that is compiled for this kind, which
// has no branch for it and needs fewer registers.
template <typename F>
cudaError_t launch_for_activation(ActivationKind kind, F&& f) {
  using enum ActivationKind;
  switch (kind) {
    case silu: return f(std::integral_constant<ActivationKind, silu>());
    case gelu: return f(std::integral_constant<ActivationKind, gelu>());
    case gelu_tanh: return f(std::integral_constant<ActivationKind, gelu_tanh>());
    case relu: return f(std::integral_constant<ActivationKind, relu>());
    case sigmoid: return f(std::integral_constant<ActivationKind, sigmoid>());
    case relu2: return f(std::integral_constant<ActivationKind, relu2>());
  }
  return cudaErrorInvalidValue;
}

// `activate` of neighbouring values.
template <int kWidth>
__device__ inline void activate(ActivationKind kind, float (&values)[kWidth]) {
  with_activation(kind, [&](auto constant) {
#pragma unroll
    for (int n = 0; n < kWidth; ++n) values[n] = activate(decltype(constant)::value, values[n]);
  });
}

// The derivative of `activate`.
__device__ inline float activation_slope(ActivationKind kind, float x) {
  constexpr float kTwoRootTwoOverPi = 1.5957691216057308f, kRootHalfOverPi = 0.3989422804014327f;
  switch (kind) {
    case ActivationKind::silu: {
      float rest;
      const float sigmoid = logistic(x, rest);
      return sigmoid * (1.0f + x * rest);
    }
    case ActivationKind::gelu: return normcdff(x) + x * kRootHalfOverPi * expf(-0.5f * x * x);
    case ActivationKind::gelu_tanh: {
      const float w = kTwoRootTwoOverPi * (x + 0.044715f * x * x * x);
      float rest;
      const float sigmoid = logistic(w, rest);
      return sigmoid * (1.0f + x * rest * kTwoRootTwoOverPi * (1.0f + 3.0f * 0.044715f * x * x));
    }
    case ActivationKind::relu: return x > 0.0f ? 1.0f : 0.0f;
    case ActivationKind::sigmoid: return 1.0f / (1.0f + expf(-x)) * (1.0f / (1.0f + expf(x)));
    case ActivationKind::relu2: return x > 0.0f ? 2.0f * x : 0.0f;
  }
  return 1.0f;
}

}  // namespace eadem::kernels::cuda
