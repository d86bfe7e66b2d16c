// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/device_math.cuh"
#include "eadem/kernels/cuda/instructions/overlap.cuh"
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda {

namespace {

constexpr int kThreads = 256;

unsigned num_blocks(int64_t size) { return static_cast<unsigned>(ceil_div(size, kThreads)); }

// One thread per (token, frequency). The angle, its cosine and its sine are computed in double precision.
__global__ void rope_angles(RopeTableParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.tokens * p.half) return;
  const int64_t t = i / p.half, frequency = i % p.half;
  double sine, cosine;
  sincos(static_cast<double>(p.positions[t]) * static_cast<double>(p.inv_freq[frequency]), &sine, &cosine);
  float* row = p.table + t * 2 * p.half;  // [2 * half]
  row[frequency] = static_cast<float>(p.scale * cosine);
  row[p.half + frequency] = static_cast<float>(p.scale * sine);
}

// Rotates pair `pair` of one head, back if `inverse`. `write(i, value)` stores element i of the head. Products are
// rounded or fused as written here, so that every kernel that rotates gives the same bits.
template <typename T, typename Write>
__device__ void rotate_pair(const T* x,          // [head_dim]
                            const float* table,  // [2 * half]: cosines, sines
                            int64_t half, int64_t pair, RopeStyle style, bool inverse, Write write) {
  const int64_t first = style == RopeStyle::rotate_half ? pair : 2 * pair;
  const int64_t second = style == RopeStyle::rotate_half ? pair + half : 2 * pair + 1;
  const float a = load(x + first), b = load(x + second);
  const float cosine = table[pair], sine = inverse ? -table[half + pair] : table[half + pair];
  write(first, __fmaf_rn(-b, sine, __fmul_rn(a, cosine)));
  write(second, __fmaf_rn(a, sine, __fmul_rn(b, cosine)));
}

// One thread per (token, head, item). Items are the pairs of the head, then the elements that are copied unrotated.
template <typename T>
__global__ void rope_items(RopeParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t half = p.rotary_dim / 2;
  const int64_t items = p.head_dim - half;
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.tokens * p.heads * items) return;
  const int64_t head = i / items, item = i % items;             // head counts over all tokens
  const T* x = static_cast<const T*>(p.x) + head * p.head_dim;  // [head_dim]
  T* y = static_cast<T*>(p.y) + head * p.head_dim;              // [head_dim]
  if (item < half) {
    const float* table = p.table + head / p.heads * p.rotary_dim;  // [rotary_dim]
    rotate_pair(x, table, half, item, p.style, p.inverse, [&](int64_t e, float value) { store(y + e, value); });
  } else {
    y[item + half] = x[item + half];
  }
}

// One thread per (token, head, element of v). The first head_dim - half threads of each head also store k, divided into
// items as in rope_items. A rotated key is rounded to the dtype of k before it is rounded to the cache's dtype, so the
// bits equal those of separate rope and kv_append.
template <typename T, typename C>
__global__ void append_items(KvAppendParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.tokens * p.kv_heads * p.head_dim) return;
  const int64_t item = i % p.head_dim;
  const int64_t head = i / p.head_dim % p.kv_heads;
  const int64_t t = i / p.head_dim / p.kv_heads;
  const int64_t from = (t * p.kv_heads + head) * p.head_dim;
  if (p.slots[t] < 0) return;
  const int64_t block = p.slots[t] / p.block_size, position = p.slots[t] % p.block_size;
  const int64_t to = ((block * p.kv_heads + head) * p.block_size + position) * p.head_dim;
  const T* k = static_cast<const T*>(p.k) + from;  // [head_dim]
  const T* v = static_cast<const T*>(p.v) + from;  // [head_dim]
  C* cache_k = static_cast<C*>(p.cache_k) + to;    // [head_dim]
  C* cache_v = static_cast<C*>(p.cache_v) + to;    // [head_dim]

  store(cache_v + item, load(v + item));
  const int64_t half = p.table != nullptr ? p.rotary_dim / 2 : 0;
  if (item < half)
    rotate_pair(k, p.table + t * p.rotary_dim, half, item, p.style, false,
                [&](int64_t e, float value) { store(cache_k + e, rounded<T>(value)); });
  else if (item + half < p.head_dim)
    store(cache_k + item + half, load(k + item + half));
}

}  // namespace

cudaError_t launch_rope_table(const RopeTableParams& p, cudaStream_t stream) {
  if (p.tokens * p.half == 0) return cudaSuccess;
  return launch_overlapped(rope_angles, dim3(num_blocks(p.tokens * p.half)), kThreads, 0, stream, p);
}

cudaError_t launch_rope(const RopeParams& p, cudaStream_t stream) {
  const int64_t size = p.tokens * p.heads * (p.head_dim - p.rotary_dim / 2);
  if (size == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto x) {
    return launch_overlapped(rope_items<decltype(x)>, dim3(num_blocks(size)), kThreads, 0, stream, p);
  });
}

cudaError_t launch_kv_append(const KvAppendParams& p, cudaStream_t stream) {
  const int64_t size = p.tokens * p.kv_heads * p.head_dim;
  if (size == 0) return cudaSuccess;
  return with_f32_or_bf16(p.dtype, [&](auto k) {
    return with_float_type(p.cache_dtype, [&](auto cache) {
      return launch_overlapped(append_items<decltype(k), decltype(cache)>, dim3(num_blocks(size)), kThreads, 0, stream,
                               p);
    });
  });
}

}  // namespace eadem::kernels::cuda
