// SPDX-License-Identifier: Apache-2.0
//
// rope_table, rope, kv_append and rope_kv_append.
#include "eadem/kernels/rope.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/backends.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/kv_append.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/rope.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/encode_row-inl.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_ROPE_PARAMS_
#define EADEM_KERNELS_CPU_ROPE_PARAMS_
namespace eadem::kernels::cpu {
namespace {

struct RopeTokens {
  float* y;            // [tokens, heads, head_dim]
  const float* x;      // [tokens, heads, head_dim]; may be y
  const float* table;  // [tokens, rotary_dim]
  int64_t heads, head_dim, rotary_dim;
  RopeStyle style;
  bool inverse;
};

struct KvAppend {
  const float* k;      // [tokens, kv_heads, head_dim]
  const float* v;      // [tokens, kv_heads, head_dim]
  const float* table;  // [tokens, rotary_dim], or null: k is not rotated
  int64_t rotary_dim;
  RopeStyle style;
  const int64_t* slots;     // [tokens]
  void *cache_k, *cache_v;  // [num_blocks, kv_heads, block_size, head_dim]
  DType cache_dtype;
  const RowEncoding* cache_encoding;  // null: plain
  float *scales_k, *scales_v;         // encoded: [num_blocks, kv_heads, block_size]
  int64_t kv_heads, head_dim, block_size;
};

// Rows that are rounded with a scale go through a buffer on the stack.
constexpr int64_t kMostEncodedDim = 1024;

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Two products and a sum, without FMA: both elements of a pair round in the same way, and so does every code path.
template <bool kInverse>
HWY_INLINE void rotate(Vec& first, Vec& second, Vec cos, Vec sin) {
  const Vec a = first, b = second;
  if constexpr (kInverse) {
    first = hn::Add(hn::Mul(a, cos), hn::Mul(b, sin));
    second = hn::Sub(hn::Mul(b, cos), hn::Mul(a, sin));
  } else {
    first = hn::Sub(hn::Mul(a, cos), hn::Mul(b, sin));
    second = hn::Add(hn::Mul(b, cos), hn::Mul(a, sin));
  }
}

template <bool kInverse, typename Y>
void rotate_head(Y* y, const float* x, const float* table, RopeStyle style, int64_t rotary_dim, int64_t head_dim) {
  const int64_t half = rotary_dim / 2;
  const float *cos = table, *sin = table + half;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = std::min(kLanes, half - i);
    const bool full = n == kLanes;
    const Vec c = full ? load(cos + i) : load_n(cos + i, n);
    const Vec s = full ? load(sin + i) : load_n(sin + i, n);
    if (style == RopeStyle::rotate_half) {
      Vec first = full ? load(x + i) : load_n(x + i, n);
      Vec second = full ? load(x + half + i) : load_n(x + half + i, n);
      rotate<kInverse>(first, second, c, s);
      if (full) {
        store(first, y + i);
        store(second, y + half + i);
      } else {
        store_n(first, y + i, n);
        store_n(second, y + half + i, n);
      }
    } else {
      float pairs[2 * kLanes] = {};
      std::copy(x + 2 * i, x + 2 * (i + n), pairs);
      Vec first, second;
      hn::LoadInterleaved2(Lanes(), pairs, first, second);
      rotate<kInverse>(first, second, c, s);
      hn::StoreInterleaved2(first, second, Lanes(), pairs);
      map(
          y + 2 * i, 2 * n, [](Vec v) { return v; }, static_cast<const float*>(pairs));
    }
  }
  map(
      y + rotary_dim, head_dim - rotary_dim, [](Vec v) { return v; }, x + rotary_dim);
}

void rope_tokens(const RopeTokens& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t at = (t * p.heads + h) * p.head_dim;
      const float* table = p.table + t * p.rotary_dim;
      if (p.inverse)
        rotate_head<true>(p.y + at, p.x + at, table, p.style, p.rotary_dim, p.head_dim);
      else
        rotate_head<false>(p.y + at, p.x + at, table, p.style, p.rotary_dim, p.head_dim);
    }
  }
}

template <typename Code>
void append_encoded_tokens(const KvAppend& p, Code* cache_k, Code* cache_v, int64_t begin, int64_t end) {
  float rotated[kMostEncodedDim];
  const float largest = p.cache_encoding->largest();
  for (int64_t t = begin; t < end; ++t) {
    const int64_t block = p.slots[t] / p.block_size, offset = p.slots[t] % p.block_size;
    for (int64_t g = 0; g < p.kv_heads; ++g) {
      const int64_t from = (t * p.kv_heads + g) * p.head_dim;
      const int64_t to = (block * p.kv_heads + g) * p.block_size + offset;
      const float* k = p.k + from;
      if (p.table != nullptr) {
        rotate_head<false>(rotated, k, p.table + t * p.rotary_dim, p.style, p.rotary_dim, p.head_dim);
        k = rotated;
      }
      encode_row(cache_k + to * p.head_dim, p.scales_k + to, k, p.head_dim, largest);
      encode_row(cache_v + to * p.head_dim, p.scales_v + to, p.v + from, p.head_dim, largest);
    }
  }
}

template <typename Cache>
void append_tokens(const KvAppend& p, Cache* cache_k, Cache* cache_v, int64_t begin, int64_t end) {
  const auto same = [](Vec v) { return v; };
  for (int64_t t = begin; t < end; ++t) {
    const int64_t block = p.slots[t] / p.block_size, offset = p.slots[t] % p.block_size;
    for (int64_t g = 0; g < p.kv_heads; ++g) {
      const int64_t from = (t * p.kv_heads + g) * p.head_dim;
      const int64_t to = ((block * p.kv_heads + g) * p.block_size + offset) * p.head_dim;
      if (p.table != nullptr)
        rotate_head<false>(cache_k + to, p.k + from, p.table + t * p.rotary_dim, p.style, p.rotary_dim, p.head_dim);
      else
        map(cache_k + to, p.head_dim, same, p.k + from);
      map(cache_v + to, p.head_dim, same, p.v + from);
    }
  }
}

void kv_append_tokens(const KvAppend& p, int64_t begin, int64_t end) {
  if (p.cache_encoding != nullptr)
    return p.cache_encoding->code() == RowEncoding::Code::int8
               ? append_encoded_tokens(p, static_cast<int8_t*>(p.cache_k), static_cast<int8_t*>(p.cache_v), begin, end)
               : append_encoded_tokens(p, static_cast<e4m3_t*>(p.cache_k), static_cast<e4m3_t*>(p.cache_v), begin, end);
  switch (p.cache_dtype) {
    case DType::bf16:
      return append_tokens(p, static_cast<bf16_t*>(p.cache_k), static_cast<bf16_t*>(p.cache_v), begin, end);
    case DType::f16:
      return append_tokens(p, static_cast<f16_t*>(p.cache_k), static_cast<f16_t*>(p.cache_v), begin, end);
    default: return append_tokens(p, static_cast<float*>(p.cache_k), static_cast<float*>(p.cache_v), begin, end);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(rope_tokens);
HWY_EXPORT(kv_append_tokens);

namespace {

int64_t token_grain(int64_t elements_per_token) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(elements_per_token, 1));
}

// ---- rope_table: it uses no vectors, because the precision of the angle matters and it runs once a step.

Verdict can_rope_table(const KernelRequest& r) {
  return Requirements(r)
      .one_of("positions", r.inputs[0], {DType::i32})
      .f32("inv_freq", r.inputs[1])
      .f32("table", r.outputs[0])
      .at_cost(50 * elements_of(r, r.outputs[0]));
}

void run_rope_table(const KernelCall& call) {
  const int32_t* positions = elements<const int32_t>(call.inputs[0]);
  const float* inv_freq = elements<const float>(call.inputs[1]);
  float* table = elements<float>(call.outputs[0]);
  const int64_t half = call.inputs[1].shape[0];
  const double scale = call.attrs.get<RopeTableAttrs>().scale;
  cpu_device(call).pool().parallel_ranges(call.inputs[0].shape[0], 16, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = table + t * 2 * half;
      for (int64_t i = 0; i < half; ++i) {
        const double angle = static_cast<double>(positions[t]) * static_cast<double>(inv_freq[i]);
        row[i] = static_cast<float>(scale * std::cos(angle));
        row[half + i] = static_cast<float>(scale * std::sin(angle));
      }
    }
  });
}

// ---- rope

Verdict can_rotate(const KernelRequest& r, const TensorType& x, const TensorType& table) {
  const int64_t rotary_dim = r.attrs.get<RopeAttrs>().rotary_dim;
  return Requirements(r)
      .f32("x", x)
      .f32("table", table)
      .f32("y", r.outputs[0])
      .require(rotary_dim % 2 == 0, "rotates pairs; rotary_dim is odd")
      .at_cost(3 * elements_of(r, x));
}

Verdict can_rope(const KernelRequest& r) { return can_rotate(r, r.inputs[0], r.inputs[1]); }
Verdict can_rope_backward(const KernelRequest& r) { return can_rotate(r, r.inputs[1], r.inputs[0]); }

void run_rotate(const KernelCall& call, const TensorView& x, const TensorView& table, bool inverse) {
  const RopeAttrs& attrs = call.attrs.get<RopeAttrs>();
  const RopeTokens params{.y = elements<float>(call.outputs[0]),
                          .x = elements<const float>(x),
                          .table = elements<const float>(table),
                          .heads = x.shape[1],
                          .head_dim = x.shape[2],
                          .rotary_dim = attrs.rotary_dim,
                          .style = attrs.style,
                          .inverse = inverse};
  if (params.y == nullptr) return;
  const auto task = EADEM_CPU_DISPATCH(rope_tokens, cpu_device(call).isa());
  cpu_device(call).pool().parallel_ranges(x.shape[0], token_grain(params.heads * params.head_dim),
                                          [&](int64_t begin, int64_t end) { task(params, begin, end); });
}

void run_rope(const KernelCall& call) { run_rotate(call, call.inputs[0], call.inputs[1], false); }
void run_rope_backward(const KernelCall& call) { run_rotate(call, call.inputs[1], call.inputs[0], true); }

// ---- kv_append, rope_kv_append

void run_append(const KernelCall& call, KvAppend params, const TensorView& k, const TensorView& cache_k) {
  EADEM_CHECK(cache_k.is_contiguous() && call.outputs[1].is_contiguous(), "cache {} is not contiguous",
              to_string(cache_k));
  params.k = elements<const float>(k);
  params.cache_k = call.outputs[0].data;
  params.cache_v = call.outputs[1].data;
  params.cache_dtype = cache_k.dtype;
  params.cache_encoding = RowEncoding::of(cache_k.encoding);
  params.scales_k = static_cast<float*>(call.outputs[0].plane(1));
  params.scales_v = static_cast<float*>(call.outputs[1].plane(1));
  params.kv_heads = k.shape[1];
  params.head_dim = k.shape[2];
  params.block_size = cache_k.shape[2];
  const auto task = EADEM_CPU_DISPATCH(kv_append_tokens, cpu_device(call).isa());
  cpu_device(call).pool().parallel_ranges(k.shape[0], token_grain(params.kv_heads * params.head_dim),
                                          [&](int64_t begin, int64_t end) { task(params, begin, end); });
}

Requirements& require_caches(Requirements& requirements, const TensorType& k, const TensorType& v) {
  const Encoding* encoding = RowEncoding::of(k.encoding);
  return requirements.packed("cache_k", k, {DType::f32, DType::bf16, DType::f16}, encoding)
      .packed("cache_v", v, {k.dtype}, encoding)
      .require(encoding == nullptr || k.fixed(3) <= kMostEncodedDim, "rounds rows of at most 1024 with a scale");
}

// The caches are large but mostly untouched: only the traffic of the new keys and values counts.
Verdict append_cost(const KernelRequest& r, const Requirements& requirements, size_t num_new) {
  const Verdict verdict = requirements.at_cost(0);
  if (!verdict.accepted) return verdict;
  const KernelRequest written{r.op,    r.pass, r.device, r.attrs, r.inputs.first(num_new), r.inputs.first(num_new),
                              r.bounds};
  return Requirements(written).at_cost(elements_of(r, r.inputs[0]));
}

Verdict can_kv_append(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("k", r.inputs[0]).f32("v", r.inputs[1]).one_of("slots", r.inputs[2], {DType::i64});
  return append_cost(r, require_caches(requirements, r.inputs[3], r.inputs[4]), 3);
}

void run_kv_append(const KernelCall& call) {
  KvAppend params{};
  params.v = elements<const float>(call.inputs[1]);
  params.slots = elements<const int64_t>(call.inputs[2]);
  run_append(call, params, call.inputs[0], call.inputs[3]);
}

Verdict can_rope_kv_append(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("k", r.inputs[0])
      .f32("table", r.inputs[1])
      .f32("v", r.inputs[2])
      .one_of("slots", r.inputs[3], {DType::i64})
      .require(r.attrs.get<RopeKvAppendAttrs>().rope.rotary_dim % 2 == 0, "rotates pairs; rotary_dim is odd");
  return append_cost(r, require_caches(requirements, r.inputs[4], r.inputs[5]), 4);
}

void run_rope_kv_append(const KernelCall& call) {
  const RopeAttrs& attrs = call.attrs.get<RopeKvAppendAttrs>().rope;
  KvAppend params{};
  params.table = elements<const float>(call.inputs[1]);
  params.rotary_dim = attrs.rotary_dim;
  params.style = attrs.style;
  params.v = elements<const float>(call.inputs[2]);
  params.slots = elements<const int64_t>(call.inputs[3]);
  run_append(call, params, call.inputs[0], call.inputs[4]);
}

constexpr Kernel kTable{"cpu_double_angle", Pass::forward, can_rope_table, run_rope_table};
constexpr Kernel kTableInference{"cpu_double_angle", Pass::inference, can_rope_table, run_rope_table};
constexpr Kernel kForward{"cpu_heads", Pass::forward, can_rope, run_rope};
constexpr Kernel kInference{"cpu_heads", Pass::inference, can_rope, run_rope};
constexpr Kernel kBackward{"cpu_heads", Pass::backward, can_rope_backward, run_rope_backward};
constexpr Kernel kAppend{"cpu_heads", Pass::inference, can_kv_append, run_kv_append};
constexpr Kernel kRopeAppend{"cpu_heads", Pass::inference, can_rope_kv_append, run_rope_kv_append};

}  // namespace

KernelList rope_table_kernels() { return {&kTable, &kTableInference}; }
KernelList rope_kernels() { return {&kForward, &kInference, &kBackward}; }
KernelList kv_append_kernels() { return {&kAppend}; }
KernelList rope_kv_append_kernels() { return {&kRopeAppend}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
