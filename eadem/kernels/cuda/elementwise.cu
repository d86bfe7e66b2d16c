// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

__device__ float activate(ActivationKind kind, float x) {
  switch (kind) {
    case ActivationKind::silu: return x / (1.0f + expf(-x));
    // normcdf and the logistic form keep a small relative error in the lower tail, where 1 + erf and 1 + tanh cancel.
    case ActivationKind::gelu: return x * normcdff(x);
    case ActivationKind::gelu_tanh:
      return x / (1.0f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));  // 2 sqrt(2 / pi)
    case ActivationKind::relu: return x > 0.0f || isnan(x) ? x : 0.0f;
    case ActivationKind::relu2: return x > 0.0f || isnan(x) ? x * x : 0.0f;
  }
  return x;
}

struct Add {
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Mul {
  __device__ float operator()(float a, float b) const { return a * b; }
};
struct Gate {
  ActivationKind kind;
  __device__ float operator()(float gate, float up) const { return activate(kind, gate) * up; }
};
struct Activate {
  ActivationKind kind;
  __device__ float operator()(float x) const { return activate(kind, x); }
};
struct Same {
  __device__ float operator()(float x) const { return x; }
};

// One thread per element.
template <typename T, typename F>
__global__ void map_pairs(const T* a,  // [size]
                          const T* b,  // [size]
                          T* y,        // [size], may be a
                          int64_t size, F f) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size) store(y + i, f(load(a + i), load(b + i)));
}

template <typename X, typename Y, typename F>
__global__ void map_elements(const X* x,  // [size]
                             Y* y,        // [size], may be x
                             int64_t size, F f) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < size) store(y + i, f(load(x + i)));
}

unsigned num_blocks(int64_t size) { return static_cast<unsigned>(ceil_div(size, kThreads)); }

template <typename F>
cudaError_t launch_pairs(const BinaryParams& p, F f, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto element) {
    using T = decltype(element);
    map_pairs<<<num_blocks(p.size), kThreads, 0, stream>>>(static_cast<const T*>(p.a), static_cast<const T*>(p.b),
                                                           static_cast<T*>(p.y), p.size, f);
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t launch_add(const BinaryParams& p, cudaStream_t stream) { return launch_pairs(p, Add{}, stream); }
cudaError_t launch_mul(const BinaryParams& p, cudaStream_t stream) { return launch_pairs(p, Mul{}, stream); }
cudaError_t launch_gated_activation(const BinaryParams& p, ActivationKind kind, cudaStream_t stream) {
  return launch_pairs(p, Gate{kind}, stream);
}

cudaError_t launch_activation(const UnaryParams& p, ActivationKind kind, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  return with_f32_or_bf16(p.x_dtype, [&](auto element) {
    using T = decltype(element);
    map_elements<<<num_blocks(p.size), kThreads, 0, stream>>>(static_cast<const T*>(p.x), static_cast<T*>(p.y), p.size,
                                                              Activate{kind});
    return cudaGetLastError();
  });
}

cudaError_t launch_cast(const UnaryParams& p, cudaStream_t stream) {
  if (p.size == 0) return cudaSuccess;
  return with_float_type(p.x_dtype, [&](auto x) {
    return with_float_type(p.y_dtype, [&](auto y) {
      map_elements<<<num_blocks(p.size), kThreads, 0, stream>>>(static_cast<const decltype(x)*>(p.x),
                                                                static_cast<decltype(y)*>(p.y), p.size, Same{});
      return cudaGetLastError();
    });
  });
}

}  // namespace eadem::kernels::cuda
