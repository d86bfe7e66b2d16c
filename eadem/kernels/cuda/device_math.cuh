// SPDX-License-Identifier: Apache-2.0
//
// Helpers of the CUDA kernels. `load` widens a stored element to f32; `store` rounds once, to nearest even. Reductions
// add in an order that depends on the block size alone.
//
// Device sources include only headers of the standard library, of CUDA and of kernels/<op>.h. nvcc cannot compile fmt,
// so everything that can throw is in the .cc files beside them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "eadem/core/dtype.h"

namespace eadem::kernels::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

// --- Elements.

__device__ inline float load(const float* p) { return *p; }
__device__ inline float load(const bf16_t* p) { return __uint_as_float(static_cast<uint32_t>(p->bits) << 16); }
__device__ inline float load(const f16_t* p) { return __half2float(__ushort_as_half(p->bits)); }

__device__ inline void store(float* p, float value) { *p = value; }
__device__ inline void store(bf16_t* p, float value) { p->bits = __bfloat16_as_ushort(__float2bfloat16_rn(value)); }
__device__ inline void store(f16_t* p, float value) { p->bits = __half_as_ushort(__float2half_rn(value)); }

// Rounds a value to T and back: the result of `load` after `store`.
template <typename T>
__device__ inline float rounded(float value) {
  T stored;
  store(&stored, value);
  return load(&stored);
}

// Packs two values rounded to bf16; `low` goes to the lower half.
__device__ inline uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The values of such a pair.
__device__ inline float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// kWidth neighbouring elements as they are in memory: 1, or 4 or 8 at an address aligned to their size, but at most to
// kVectorAlignment. Of bf16 they are words of two, which take one instruction a value to widen; elements take two.
inline constexpr size_t kVectorAlignment = 32;
template <typename T, int kWidth>
struct alignas(sizeof(T) * kWidth < kVectorAlignment ? sizeof(T) * kWidth : kVectorAlignment) Vector {
  static constexpr bool kPairs = std::is_same_v<T, bf16_t> && kWidth % 2 == 0;
  std::conditional_t<kPairs, uint32_t, T> elements[kPairs ? kWidth / 2 : kWidth];
};
template <typename T, int kWidth>
__device__ inline void widen(float (&values)[kWidth], const Vector<T, kWidth>& vector) {
#pragma unroll
  for (int n = 0; n < kWidth; ++n)
    if constexpr (Vector<T, kWidth>::kPairs)
      values[n] = n % 2 == 0 ? low_bf16(vector.elements[n / 2]) : high_bf16(vector.elements[n / 2]);
    else
      values[n] = load(&vector.elements[n]);
}
template <typename T, int kWidth>
__device__ inline Vector<T, kWidth> narrowed(const float (&values)[kWidth]) {
  Vector<T, kWidth> vector;
#pragma unroll
  for (int n = 0; n < kWidth; ++n)
    if constexpr (!Vector<T, kWidth>::kPairs)
      store(&vector.elements[n], values[n]);
    else if (n % 2 == 0)
      vector.elements[n / 2] = pack_bf16(values[n], values[n + 1]);
  return vector;
}

template <typename T, int kWidth>
__device__ inline Vector<T, kWidth> vector_at(const T* p) {
  return *reinterpret_cast<const Vector<T, kWidth>*>(p);
}
template <typename T, int kWidth>
__device__ inline void load_vector(float (&values)[kWidth], const T* p) {
  widen(values, vector_at<T, kWidth>(p));
}
template <typename T, int kWidth>
__device__ inline void store_vector(T* p, const float (&values)[kWidth]) {
  *reinterpret_cast<Vector<T, kWidth>*>(p) = narrowed<T>(values);
}

// Loads element `i` of an array whose dtype is known only at run time; for operands off the hot path.
__device__ inline float load_any(const void* p, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::f32: return load(static_cast<const float*>(p) + i);
    case DType::bf16: return load(static_cast<const bf16_t*>(p) + i);
    default: return load(static_cast<const f16_t*>(p) + i);
  }
}
__device__ inline void store_any(void* p, DType dtype, int64_t i, float value) {
  switch (dtype) {
    case DType::f32: return store(static_cast<float*>(p) + i, value);
    case DType::bf16: return store(static_cast<bf16_t*>(p) + i, value);
    default: return store(static_cast<f16_t*>(p) + i, value);
  }
}

// 2^x by one instruction: within 2 units of the last place; results below 2^-126 become 0.
__device__ inline float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x by one instruction: within a unit of the last place; results below 2^-126 become 0.
__device__ inline float fast_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- Rotary embedding.

// Rotates a pair of elements. Products are rounded or fused as written here, so that every kernel that rotates gives
// the same bits.
__device__ inline float2 rotated(float a, float b, float cosine, float sine) {
  return {__fmaf_rn(-b, sine, __fmul_rn(a, cosine)), __fmaf_rn(a, sine, __fmul_rn(b, cosine))};
}

// --- Reductions. Every thread gets the result.

struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

template <typename T, typename Combine>
__device__ inline T warp_reduce(T value, Combine combine) {
#pragma unroll
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = combine(value, __shfl_xor_sync(kAllLanes, value, lanes));
  return value;
}

// Reduces over a block of whole warps, at most 32 of them. All threads must call it. Combining a value with `identity`
// must not change it.
template <typename T, typename Combine>
__device__ inline T block_reduce(T value, T identity, Combine combine) {
  __shared__ T warps[kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  value = warp_reduce(value, combine);
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  value = warp_reduce(lane < blockDim.x / kWarp ? warps[lane] : identity, combine);
  __syncthreads();  // the next call overwrites `warps`
  return value;
}

template <typename T>
__device__ inline T block_sum(T value) {
  return block_reduce(value, T{0}, Sum{});
}
__device__ inline float block_max(float value) { return block_reduce(value, -INFINITY, Max{}); }
__device__ inline uint64_t block_max(uint64_t value) { return block_reduce(value, uint64_t{0}, Max{}); }
// The largest 32-bit integer of a block, which takes half of the instructions that 64 bits take.
__device__ inline uint32_t block_max(uint32_t value) {
  __shared__ uint32_t warps[kWarp];
  value = __reduce_max_sync(kAllLanes, value);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = value;
  __syncthreads();
  const uint32_t lane = threadIdx.x % kWarp;
  value = __reduce_max_sync(kAllLanes, lane < blockDim.x / kWarp ? warps[lane] : 0);
  __syncthreads();  // the next call overwrites `warps`
  return value;
}

// --- Launching.

__host__ __device__ constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f(T{}) with the element type of `dtype`. can_handle refuses other dtypes, so they are an error here.
template <typename Function>
cudaError_t with_f32_or_bf16(DType dtype, Function&& f) {
  switch (dtype) {
    case DType::f32: return f(float{});
    case DType::bf16: return f(bf16_t{});
    default: return cudaErrorInvalidValue;
  }
}
template <typename Function>
cudaError_t with_float_type(DType dtype, Function&& f) {
  return dtype == DType::f16 ? f(f16_t{}) : with_f32_or_bf16(dtype, f);
}

}  // namespace eadem::kernels::cuda
