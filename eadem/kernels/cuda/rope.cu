// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/attention/kv_codes.cuh"
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

// Rotates pair `pair` of one head, back if `inverse`. `write(i, value)` stores element i of the head.
template <typename T, typename Write>
__device__ void rotate_pair(const T* x,          // [head_dim]
                            const float* table,  // [2 * half]: cosines, sines
                            int64_t half, int64_t pair, RopeStyle style, bool inverse, Write write) {
  const int64_t first = style == RopeStyle::rotate_half ? pair : 2 * pair;
  const int64_t second = style == RopeStyle::rotate_half ? pair + half : 2 * pair + 1;
  const float a = load(x + first), b = load(x + second);
  const float cosine = table[pair], sine = inverse ? -table[half + pair] : table[half + pair];
  const float2 result = rotated(a, b, cosine, sine);
  write(first, result.x);
  write(second, result.y);
}

// Rotates pairs [first, first + kPairs) of one head. The style is rotate_half, and every element of the head is
// rotated.
constexpr int kPairs = 8;
template <typename T>
__device__ void rotate_pairs(float (&a)[kPairs], float (&b)[kPairs],  // the first and the second elements
                             const T* x,                              // [2 * half]
                             const float* table,                      // [2 * half]: cosines, sines
                             int half, int first, bool inverse) {
  float cosines[kPairs], sines[kPairs];
  load_vector(a, x + first);
  load_vector(b, x + half + first);
  load_vector(cosines, table + first);
  load_vector(sines, table + half + first);
#pragma unroll
  for (int n = 0; n < kPairs; ++n) {
    const float2 result = rotated(a[n], b[n], cosines[n], inverse ? -sines[n] : sines[n]);
    a[n] = rounded<T>(result.x), b[n] = rounded<T>(result.y);
  }
}
template <typename T, typename Y>
__device__ void rotate_pairs(const T* x, const float* table,
                             Y* y,  // [2 * half]
                             int half, int first, bool inverse) {
  float a[kPairs], b[kPairs];
  rotate_pairs(a, b, x, table, half, first, inverse);
  store_vector(y + first, a);
  store_vector(y + half + first, b);
}

// Copies the elements that rotate_pairs would rotate.
template <typename T, typename Y>
__device__ void copy_pairs(const T* x, Y* y, int half, int first) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float values[kPairs];
    load_vector(values, x + h * half + first);
    store_vector(y + h * half + first, values);
  }
}

// Whether rotate_pairs can rotate heads, and 32 bits count their elements.
bool takes_pairs(RopeStyle style, int64_t head_dim, int64_t rotary_dim, int64_t elements) {
  return style == RopeStyle::rotate_half && head_dim == rotary_dim && rotary_dim % (2 * kPairs) == 0 &&
         elements < (int64_t{1} << 31);
}

// One thread per (token, head, kPairs pairs).
template <typename T>
__global__ void __launch_bounds__(kThreads) rope_vectors(RopeParams p) {
  allow_next_kernel();
  wait_for_earlier_kernels();
  const int half = static_cast<int>(p.rotary_dim / 2), vectors = half / kPairs;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int head = i / vectors, token = head / static_cast<int>(p.heads);  // head counts over all tokens
  if (token >= p.tokens) return;
  const int64_t from = int64_t{head} * p.head_dim;
  rotate_pairs(static_cast<const T*>(p.x) + from, p.table + token * p.rotary_dim, static_cast<T*>(p.y) + from, half,
               i % vectors * kPairs, p.inverse);
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

// One thread per (token, head, kPairs pairs), where the heads of q come first, then those of k. The threads of k also
// store the same elements of v. As append_items.
template <typename T, typename C>
__global__ void __launch_bounds__(kThreads) append_vectors(KvAppendParams p) {
  allow_next_kernel();
  const int half = static_cast<int>(p.head_dim / 2), vectors = half / kPairs, kv_heads = static_cast<int>(p.kv_heads);
  const int heads = static_cast<int>(p.heads), all_heads = heads + kv_heads;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int row = i / vectors, token = row / all_heads, head = row % all_heads - heads, first = i % vectors * kPairs;
  if (token >= p.tokens) return;
  const int64_t slot = head < 0 ? 0 : p.slots[token], block = slot / p.block_size, position = slot % p.block_size;
  wait_for_earlier_kernels();
  if (head < 0) {
    const int64_t at = (int64_t{token} * heads + head + heads) * p.head_dim;
    rotate_pairs(static_cast<const T*>(p.q) + at, p.table + token * p.head_dim, static_cast<T*>(p.y) + at, half, first,
                 false);
    return;
  }
  if (slot < 0) return;
  const int64_t from = (int64_t{token} * kv_heads + head) * p.head_dim;
  const int64_t to = ((block * kv_heads + head) * p.block_size + position) * p.head_dim;
  const T* k = static_cast<const T*>(p.k) + from;  // [head_dim]
  C* cache_k = static_cast<C*>(p.cache_k) + to;    // [head_dim]
  if (p.table != nullptr) {
    rotate_pairs(k, p.table + token * p.head_dim, cache_k, half, first, false);
  } else {
    copy_pairs(k, cache_k, half, first);
  }
  copy_pairs(static_cast<const T*>(p.v) + from, static_cast<C*>(p.cache_v) + to, half, first);
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

// As append_items, into a cache of codes: one warp per (token, head, one of k and v), whose lanes have every 32nd
// element.
template <typename T, typename Code>
__global__ void __launch_bounds__(kThreads) append_codes(KvAppendParams p) {
  constexpr int kMost = static_cast<int>(kMaxHeadDim) / kWarp;
  allow_next_kernel();
  const int lane = threadIdx.x % kWarp, head_dim = static_cast<int>(p.head_dim);
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / kWarp;
  const bool is_value = row % 2 == 1;
  const int64_t token = row / 2 / p.kv_heads, head = row / 2 % p.kv_heads;
  if (token >= p.tokens) return;
  const int64_t slot = p.slots[token];
  if (slot < 0) return;
  wait_for_earlier_kernels();
  const T* x = static_cast<const T*>(is_value ? p.v : p.k) + (token * p.kv_heads + head) * head_dim;  // [head_dim]
  const float* table = p.table + token * p.rotary_dim;                                                // [rotary_dim]
  const int rotary = p.table == nullptr || is_value ? 0 : static_cast<int>(p.rotary_dim), half = rotary / 2;

  float values[kMost];
  uint32_t most = 0;  // magnitudes as integers, whose order is theirs; NaN is the largest
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
    const int e = lane + n * kWarp;
    if (e >= head_dim) break;
    if (e < rotary) {
      const bool halves = p.style == RopeStyle::rotate_half;
      const int pair = halves ? e % half : e / 2;
      const bool is_second = halves ? e >= half : e % 2 == 1;
      const float a = load(x + (halves ? pair : 2 * pair)), b = load(x + (halves ? pair + half : 2 * pair + 1));
      const float2 result = rotated(a, b, table[pair], table[half + pair]);
      values[n] = rounded<T>(is_second ? result.y : result.x);
    } else {
      values[n] = load(x + e);
    }
    most = max(most, __float_as_uint(values[n]) & 0x7fffffffu);
  }
  const float scale = row_scale<Code>(__reduce_max_sync(kAllLanes, most));
  const int64_t to = (slot / p.block_size * p.kv_heads + head) * p.block_size + slot % p.block_size;
  if (lane == 0) (is_value ? p.v_scales : p.k_scales)[to] = scale;
  uint8_t* codes = static_cast<uint8_t*>(is_value ? p.cache_v : p.cache_k) + to * head_dim;
#pragma unroll
  for (int n = 0; n < kMost; ++n) {
    const int e = lane + n * kWarp;
    if (e < head_dim) codes[e] = static_cast<uint8_t>(row_code<Code>(values[n], scale));
  }
}

// As append_vectors, into a cache of codes. The threads of a head follow one another in a warp.
template <typename T, typename Code>
__global__ void __launch_bounds__(kThreads) append_code_vectors(KvAppendParams p) {
  allow_next_kernel();
  const int half = static_cast<int>(p.head_dim / 2), vectors = half / kPairs, kv_heads = static_cast<int>(p.kv_heads);
  const int heads = static_cast<int>(p.heads), all_heads = heads + kv_heads;
  const int i = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  const int row = i / vectors, token = row / all_heads, head = row % all_heads - heads, first = i % vectors * kPairs;
  const bool of_query = head < 0, there = token < p.tokens;
  const int64_t slot = of_query || !there ? -1 : p.slots[token];
  wait_for_earlier_kernels();
  if (of_query && there) {
    const int64_t at = (int64_t{token} * heads + head + heads) * p.head_dim;
    rotate_pairs(static_cast<const T*>(p.q) + at, p.table + token * p.head_dim, static_cast<T*>(p.y) + at, half, first,
                 false);
  }
  // All threads of the warp meet to find the largest magnitudes; of keys, then of values.
  float elements[2][2][kPairs] = {};  // [of values][half of the head]
  if (slot >= 0) {
    const int64_t from = (int64_t{token} * kv_heads + head) * p.head_dim;
    const T *k = static_cast<const T*>(p.k) + from + first, *v = static_cast<const T*>(p.v) + from + first;
    if (p.table != nullptr) {
      rotate_pairs(elements[0][0], elements[0][1], k - first, p.table + token * p.head_dim, half, first, false);
    } else {
      load_vector(elements[0][0], k);
      load_vector(elements[0][1], k + half);
    }
    load_vector(elements[1][0], v);
    load_vector(elements[1][1], v + half);
  }
#pragma unroll
  for (int of_values = 0; of_values < 2; ++of_values) {
    uint32_t most = 0;
#pragma unroll
    for (int n = 0; n < 2 * kPairs; ++n)
      most = max(most, __float_as_uint(elements[of_values][n / kPairs][n % kPairs]) & 0x7fffffffu);
    for (int lanes = vectors / 2; lanes > 0; lanes /= 2) most = max(most, __shfl_xor_sync(kAllLanes, most, lanes));
    if (slot < 0) continue;
    const float scale = row_scale<Code>(most);
    const int64_t to = (slot / p.block_size * kv_heads + head) * p.block_size + slot % p.block_size;
    if (first == 0) (of_values == 1 ? p.v_scales : p.k_scales)[to] = scale;
    uint8_t* codes = static_cast<uint8_t*>(of_values == 1 ? p.cache_v : p.cache_k) + to * p.head_dim + first;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      uint32_t words[2] = {};
#pragma unroll
      for (int n = 0; n < kPairs; ++n) words[n / 4] |= row_code<Code>(elements[of_values][h][n], scale) << (n % 4 * 8);
      *reinterpret_cast<uint2*>(codes + h * half) = make_uint2(words[0], words[1]);
    }
  }
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
    if (takes_pairs(p.style, p.head_dim, p.rotary_dim, p.tokens * p.heads * p.head_dim))
      return launch_overlapped(rope_vectors<decltype(x)>, dim3(num_blocks(size / kPairs)), kThreads, 0, stream, p);
    return launch_overlapped(rope_items<decltype(x)>, dim3(num_blocks(size)), kThreads, 0, stream, p);
  });
}

cudaError_t launch_kv_append(const KvAppendParams& p, cudaStream_t stream) {
  const int64_t size = p.tokens * p.kv_heads * p.head_dim, all = size + p.tokens * p.heads * p.head_dim;
  if (all == 0) return cudaSuccess;
  const bool vectors = takes_pairs(p.table == nullptr ? RopeStyle::rotate_half : p.style, p.head_dim,
                                   p.table == nullptr ? p.head_dim : p.rotary_dim, all) &&
                       (p.code == KvCode::none || kWarp % (p.head_dim / (2 * kPairs)) == 0);
  if (p.q != nullptr && !vectors) {
    const cudaError_t error = launch_rope({.x = p.q,
                                           .table = p.table,
                                           .y = p.y,
                                           .tokens = p.tokens,
                                           .heads = p.heads,
                                           .head_dim = p.head_dim,
                                           .rotary_dim = p.rotary_dim,
                                           .style = p.style,
                                           .dtype = p.dtype,
                                           .inverse = false},
                                          stream);
    if (error != cudaSuccess) return error;
  }
  if (p.code != KvCode::none) {
    return with_f32_or_bf16(p.dtype, [&](auto k) {
      return with_code(p.code, [&](auto code) {
        using T = decltype(k);
        using Code = decltype(code);
        if (vectors)
          return launch_overlapped(append_code_vectors<T, Code>, dim3(num_blocks(all / (2 * kPairs))), kThreads, 0,
                                   stream, p);
        return launch_overlapped(append_codes<T, Code>, dim3(num_blocks(2 * p.tokens * p.kv_heads * kWarp)), kThreads,
                                 0, stream, p);
      });
    });
  }
  return with_f32_or_bf16(p.dtype, [&](auto k) {
    return with_float_type(p.cache_dtype, [&](auto cache) {
      using T = decltype(k);
      using C = decltype(cache);
      if (vectors)
        return launch_overlapped(append_vectors<T, C>, dim3(num_blocks(all / (2 * kPairs))), kThreads, 0, stream, p);
      return launch_overlapped(append_items<T, C>, dim3(num_blocks(size)), kThreads, 0, stream, p);
    });
  });
}

}  // namespace eadem::kernels::cuda
