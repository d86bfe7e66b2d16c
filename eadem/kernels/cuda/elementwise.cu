// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "eadem/kernels/cuda/activation.cuh"
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Mul {
  __device__ float operator()(float a, float b) const { return a * b; }
};
template <ActivationKind kKind>
struct Gate {
  __device__ float operator()(float gate, float up) const { return activate(kKind, gate) * up; }
};
template <ActivationKind kKind>
struct Activate {
  __device__ float operator()(float x) const { return activate(kKind, x); }
};
struct Same {
  __device__ float operator()(float x) const { return x; }
};

struct Scale {
  ScaleAttrs attrs;
  __device__ float operator()(float x) const {
    const auto [factor, softcap, limit] = attrs;
    if (softcap > 0.0f) return softcap * tanhf(factor * x / softcap);
    return limit > 0.0f ? clamp(factor * x, limit) : factor * x;
  }
  // NaN stays NaN.
  static __device__ float clamp(float x, float limit) { return fabsf(x) > limit ? copysignf(limit, x) : x; }
};
struct ScaleGradient {
  ScaleAttrs attrs;
  __device__ float operator()(float x, float dy) const {
    const auto [factor, softcap, limit] = attrs;
    if (limit > 0.0f && fabsf(factor * x) > limit) return 0.0f;
    if (softcap == 0.0f) return factor * dy;
    const float t = tanhf(factor * x / softcap);
    return dy * factor * (1.0f - t * t);
  }
};

template <ActivationKind kKind>
struct ActivateGradient {
  __device__ float operator()(float x, float dy) const { return dy * activation_slope(kKind, x); }
};

// The gradients of a and b.
struct MulGradients {
  __device__ float2 operator()(float a, float b, float dy) const { return {dy * b, dy * a}; }
};
template <ActivationKind kKind>
struct GateGradients {
  __device__ float2 operator()(float gate, float up, float dy) const {
    return {dy * up * activation_slope(kKind, gate), dy * activate(kKind, gate)};
  }
};

// Each thread computes kWidth elements.
template <int kWidth, typename T, typename F>
__global__ void map_pairs(const T* a,  // [size]
                          const T* b,  // [size]
                          T* y,        // [size], may be a or b
                          int64_t size, F f) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (i >= size) return;
  float left[kWidth], right[kWidth];
  load_vector(left, a + i);
  load_vector(right, b + i);
#pragma unroll
  for (int n = 0; n < kWidth; ++n) left[n] = f(left[n], right[n]);
  store_vector(y + i, left);
}

template <int kWidth, typename X, typename Y, typename F>
__global__ void map_elements(const X* x,  // [size]
                             Y* y,        // [size], may be x
                             int64_t size, F f) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (i >= size) return;
  float values[kWidth];
  load_vector(values, x + i);
#pragma unroll
  for (int n = 0; n < kWidth; ++n) values[n] = f(values[n]);
  store_vector(y + i, values);
}

template <int kWidth, typename T, typename F>
__global__ void map_gradients(const T* a,   // [size]
                              const T* b,   // [size]
                              const T* dy,  // [size]
                              T* da,        // [size], or null
                              T* db,        // [size], or null
                              int64_t size, F f) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kWidth;
  if (i >= size) return;
  float left[kWidth], right[kWidth], gradient[kWidth];
  load_vector(left, a + i);
  load_vector(right, b + i);
  load_vector(gradient, dy + i);
#pragma unroll
  for (int n = 0; n < kWidth; ++n) {
    const float2 gradients = f(left[n], right[n], gradient[n]);
    left[n] = gradients.x, right[n] = gradients.y;
  }
  if (da != nullptr) store_vector(da + i, left);
  if (db != nullptr) store_vector(db + i, right);
}

constexpr int kVector = 8;

dim3 num_blocks(int64_t size, int width) {
  return dim3(static_cast<unsigned>(ceil_div(size, int64_t{kThreads} * width)));
}

// Whether `size` elements at these addresses can be processed kVector at a time.
template <typename... Pointers>
bool takes_vectors(int64_t size, Pointers... pointers) {
  return size % kVector == 0 && ((reinterpret_cast<uintptr_t>(pointers) % kVectorAlignment == 0) && ...);
}

template <typename F>
cudaError_t launch_pairs(const BinaryParams& p, F f, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
      return launch_overlapped(map_pairs<kWidth, T, F>, num_blocks(p.size, kWidth), kThreads, 0, stream,
                               static_cast<const T*>(p.a), static_cast<const T*>(p.b), static_cast<T*>(p.y), p.size, f);
    };
    return takes_vectors(p.size, p.a, p.b, p.y) ? launch(std::integral_constant<int, kVector>())
                                                : launch(std::integral_constant<int, 1>());
  });
}

template <typename F>
cudaError_t launch_gradients(const BinaryGradientParams& p, F f, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto element) {
    using T = decltype(element);
    const auto launch = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
      return launch_overlapped(map_gradients<kWidth, T, F>, num_blocks(p.size, kWidth), kThreads, 0, stream,
                               static_cast<const T*>(p.a), static_cast<const T*>(p.b), static_cast<const T*>(p.dy),
                               static_cast<T*>(p.da), static_cast<T*>(p.db), p.size, f);
    };
    return takes_vectors(p.size, p.a, p.b, p.dy, p.da, p.db) ? launch(std::integral_constant<int, kVector>())
                                                             : launch(std::integral_constant<int, 1>());
  });
}

template <typename X, typename Y, typename F>
cudaError_t launch_elements(const UnaryParams& p, F f, cudaStream_t stream) {
  const auto launch = [&]<int kWidth>(std::integral_constant<int, kWidth>) {
    return launch_overlapped(map_elements<kWidth, X, Y, F>, num_blocks(p.size, kWidth), kThreads, 0, stream,
                             static_cast<const X*>(p.x), static_cast<Y*>(p.y), p.size, f);
  };
  return takes_vectors(p.size, p.x, p.y) ? launch(std::integral_constant<int, kVector>())
                                         : launch(std::integral_constant<int, 1>());
}

}  // namespace

cudaError_t launch_add(const BinaryParams& p, cudaStream_t stream) { return launch_pairs(p, Add{}, stream); }
cudaError_t launch_mul(const BinaryParams& p, cudaStream_t stream) { return launch_pairs(p, Mul{}, stream); }
cudaError_t launch_gated_activation(const BinaryParams& p, ActivationKind kind, cudaStream_t stream) {
  return launch_for_activation(
      kind, [&](auto constant) { return launch_pairs(p, Gate<decltype(constant)::value>{}, stream); });
}

cudaError_t launch_mul_backward(const BinaryGradientParams& p, cudaStream_t stream) {
  return launch_gradients(p, MulGradients{}, stream);
}
cudaError_t launch_gated_activation_backward(const BinaryGradientParams& p, ActivationKind kind, cudaStream_t stream) {
  return launch_for_activation(
      kind, [&](auto constant) { return launch_gradients(p, GateGradients<decltype(constant)::value>{}, stream); });
}
cudaError_t launch_activation_backward(const BinaryParams& p, ActivationKind kind, cudaStream_t stream) {
  return launch_for_activation(
      kind, [&](auto constant) { return launch_pairs(p, ActivateGradient<decltype(constant)::value>{}, stream); });
}

cudaError_t launch_scale(const UnaryParams& p, const ScaleAttrs& attrs, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  return with_f32_or_bf16(p.x_dtype, [&](auto element) {
    using T = decltype(element);
    return launch_elements<T, T>(p, Scale{attrs}, stream);
  });
}
cudaError_t launch_scale_backward(const BinaryParams& p, const ScaleAttrs& attrs, cudaStream_t stream) {
  return launch_pairs(p, ScaleGradient{attrs}, stream);
}

cudaError_t launch_activation(const UnaryParams& p, ActivationKind kind, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  return with_f32_or_bf16(p.x_dtype, [&](auto element) {
    using T = decltype(element);
    return launch_for_activation(
        kind, [&](auto constant) { return launch_elements<T, T>(p, Activate<decltype(constant)::value>{}, stream); });
  });
}

cudaError_t launch_cast(const UnaryParams& p, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  return with_float_type(p.x_dtype, [&](auto x) {
    return with_float_type(p.y_dtype,
                           [&](auto y) { return launch_elements<decltype(x), decltype(y)>(p, Same{}, stream); });
  });
}

}  // namespace eadem::kernels::cuda
