// SPDX-License-Identifier: Apache-2.0
//
// rope_table, rope, kv_append, rope_kv_append and latent_append.
#include "eadem/kernels/attention/rope.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/attention/kv_append.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/rope.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/encode_row-inl.h"
#include "eadem/kernels/cpu/simd-inl.h"

#ifndef EADEM_KERNELS_CPU_ROPE_PARAMS_
#define EADEM_KERNELS_CPU_ROPE_PARAMS_
namespace eadem::kernels::cpu {
namespace {

struct RopeTokens {
  float* y;            // [tokens, heads, head_dim]
  const float* x;      // [tokens, heads, head_dim]; may be y
  const float* table;  // [tokens, rotary_dim]
  int64_t heads, head_dim;
  RopeAttrs rope;
};
using RotateTokens = void (*)(const RopeTokens& p, int64_t begin, int64_t end);

struct KvAppend {
  const float* k;      // [tokens, kv_heads, head_dim]
  const float* v;      // [tokens, kv_heads, value_dim], or null: there is one cache, k's
  const float* table;  // [tokens, rotary_dim], or null: k is not rotated
  RopeAttrs rope;
  const int64_t* slots;        // [tokens]
  void *cache_k, *cache_v;     // [num_blocks, kv_heads, block_size, head_dim or value_dim]
  float *scales_k, *scales_v;  // encoded: [num_blocks, kv_heads, block_size]
  float largest;               // encoded: the largest code
  int64_t kv_heads, head_dim, value_dim, block_size;
  int64_t stride, block_rows;  // tokens of a row, and rows of a block

  // Whether a row is written when the token at `slot` is there.
  bool ends_row(int64_t slot) const { return slot >= 0 && (slot % block_size + 1) % stride == 0; }
  int64_t row(int64_t slot, int64_t kv_head) const {
    return (slot / block_size * kv_heads + kv_head) * block_rows + slot % block_size / stride;
  }
};
using AppendTokens = void (*)(const KvAppend& p, int64_t begin, int64_t end);

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
void rotate_head(Y* y, const float* x, const float* table, const RopeAttrs& rope, int64_t head_dim) {
  const int64_t half = rope.rotary_dim / 2, rest = head_dim - rope.rotary_dim;
  const auto copy = [](Y* to, const float* from, int64_t n) {
    map(
        to, n, [](Vec v) { return v; }, from);
  };
  if (rope.last) {
    copy(y, x, rest);
    y += rest, x += rest;
  }
  const float *cos = table, *sin = table + half;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = std::min(kLanes, half - i);
    const bool full = n == kLanes;
    const Vec c = full ? load(cos + i) : load_n(cos + i, n);
    const Vec s = full ? load(sin + i) : load_n(sin + i, n);
    if (rope.style == RopeStyle::rotate_half) {
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
      copy(y + 2 * i, pairs, 2 * n);
    }
  }
  if (!rope.last) copy(y + rope.rotary_dim, x + rope.rotary_dim, rest);
}

template <bool kInverse>
void rope_tokens(const RopeTokens& p, int64_t begin, int64_t end) {
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t h = 0; h < p.heads; ++h) {
      const int64_t at = (t * p.heads + h) * p.head_dim;
      rotate_head<kInverse>(p.y + at, p.x + at, p.table + t * p.rope.rotary_dim, p.rope, p.head_dim);
    }
  }
}

RotateTokens rope_tokens_of(bool inverse) { return inverse ? rope_tokens<true> : rope_tokens<false>; }

template <typename Code>
void append_encoded_tokens(const KvAppend& p, int64_t begin, int64_t end) {
  Code *cache_k = static_cast<Code*>(p.cache_k), *cache_v = static_cast<Code*>(p.cache_v);
  float rotated[kMostEncodedDim];
  for (int64_t t = begin; t < end; ++t) {
    if (!p.ends_row(p.slots[t])) continue;
    for (int64_t g = 0; g < p.kv_heads; ++g) {
      const int64_t from = t * p.kv_heads + g;
      const int64_t to = p.row(p.slots[t], g);
      const float* k = p.k + from * p.head_dim;
      if (p.table != nullptr) {
        rotate_head<false>(rotated, k, p.table + t * p.rope.rotary_dim, p.rope, p.head_dim);
        k = rotated;
      }
      encode_row(cache_k + to * p.head_dim, p.scales_k + to, k, p.head_dim, p.largest);
      if (p.v == nullptr) continue;
      encode_row(cache_v + to * p.value_dim, p.scales_v + to, p.v + from * p.value_dim, p.value_dim, p.largest);
    }
  }
}

template <typename Cache>
void append_tokens(const KvAppend& p, int64_t begin, int64_t end) {
  Cache *cache_k = static_cast<Cache*>(p.cache_k), *cache_v = static_cast<Cache*>(p.cache_v);
  const auto same = [](Vec v) { return v; };
  for (int64_t t = begin; t < end; ++t) {
    if (!p.ends_row(p.slots[t])) continue;
    for (int64_t g = 0; g < p.kv_heads; ++g) {
      const int64_t from = t * p.kv_heads + g;
      const int64_t to = p.row(p.slots[t], g);
      Cache* const k = cache_k + to * p.head_dim;
      if (p.table != nullptr)
        rotate_head<false>(k, p.k + from * p.head_dim, p.table + t * p.rope.rotary_dim, p.rope, p.head_dim);
      else
        map(k, p.head_dim, same, p.k + from * p.head_dim);
      if (p.v == nullptr) continue;
      map(cache_v + to * p.value_dim, p.value_dim, same, p.v + from * p.value_dim);
    }
  }
}

// Returns the routine for a cache that `encoding` stores; null: for plain values of `dtype`.
AppendTokens append_tokens_of(DType dtype, const RowEncoding* encoding) {
  if (encoding != nullptr)
    return encoding->code() == RowEncoding::Code::int8 ? append_encoded_tokens<int8_t> : append_encoded_tokens<e4m3_t>;
  return with_dtype(dtype, [](auto* type) -> AppendTokens { return append_tokens<ElementOf<decltype(type)>>; });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(rope_tokens_of);
EADEM_CPU_EXPORT(append_tokens_of);

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
      .verdict();
}

PlanPtr prepare_rope_table(const KernelRequest& r, Context&) {
  const auto [factor, stride] = r.attrs.get<RopeTableAttrs>();
  return make_plan([scale = double{factor}, stride = stride](const KernelCall& call) {
    const int32_t* positions = elements<const int32_t>(call.inputs[0]);
    const float* inv_freq = elements<const float>(call.inputs[1]);
    float* table = elements<float>(call.outputs[0]);
    const int64_t half = call.inputs[1].shape[0];
    cpu_device(call).pool().parallel_ranges(call.inputs[0].shape[0], 16, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        float* row = table + t * 2 * half;
        for (int64_t i = 0; i < half; ++i) {
          const double angle = static_cast<double>(positions[t] / stride * stride) * static_cast<double>(inv_freq[i]);
          row[i] = static_cast<float>(scale * std::cos(angle));
          row[half + i] = static_cast<float>(scale * std::sin(angle));
        }
      }
    });
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
      .verdict();
}

Verdict can_rope(const KernelRequest& r) { return can_rotate(r, r.inputs[0], r.inputs[1]); }
Verdict can_rope_backward(const KernelRequest& r) { return can_rotate(r, r.inputs[1], r.inputs[0]); }

PlanPtr prepare_rotate(const KernelRequest& r, size_t x_port, size_t table_port, bool inverse) {
  const RopeAttrs attrs = r.attrs.get<RopeAttrs>();
  const RotateTokens task = EADEM_CPU_DISPATCH(rope_tokens_of, cpu_device(r).isa())(inverse);
  return make_plan([=](const KernelCall& call) {
    const TensorView& x = call.inputs[x_port];
    const RopeTokens params{.y = elements<float>(call.outputs[0]),
                            .x = elements<const float>(x),
                            .table = elements<const float>(call.inputs[table_port]),
                            .heads = x.shape[1],
                            .head_dim = x.shape[2],
                            .rope = attrs};
    if (params.y == nullptr) return;
    cpu_device(call).pool().parallel_ranges(x.shape[0], token_grain(params.heads * params.head_dim),
                                            [&](int64_t begin, int64_t end) { task(params, begin, end); });
  });
}

PlanPtr prepare_rope(const KernelRequest& r, Context&) { return prepare_rotate(r, 0, 1, false); }
PlanPtr prepare_rope_backward(const KernelRequest& r, Context&) { return prepare_rotate(r, 1, 0, true); }

// ---- kv_append, rope_kv_append

enum KvAppendInput { kAppendK, kAppendV, kAppendSlots, kAppendCacheK, kAppendCacheV };
enum RopeKvAppendInput { kRopeK, kRopeTable, kRopeV, kRopeSlots, kRopeCacheK, kRopeCacheV };

// The inputs of a step that both ops have; the caches are its outputs.
struct AppendInputs {
  const TensorView &k, &v, &slots;
  const float* table;  // null: k is not rotated
};

// The routines of an append to one kind of cache.
class Append {
 public:
  Append(const KernelRequest& r, const TensorType& cache_k) {
    const RowEncoding* encoding = RowEncoding::of(cache_k.encoding);
    task_ = EADEM_CPU_DISPATCH(append_tokens_of, cpu_device(r).isa())(cache_k.dtype, encoding);
    if (encoding != nullptr) params_.largest = encoding->largest();
    params_.stride = 1;
  }
  void set_stride(const LatentAppendAttrs& attrs) {
    params_.stride = attrs.stride;
    params_.block_size = attrs.block_size;
  }
  void set_rope(const RopeAttrs& attrs) { params_.rope = attrs; }

  void run(const KernelCall& call, const AppendInputs& in) const {
    const TensorView& cache_v = call.outputs[1];
    EADEM_CHECK(cache_v.is_contiguous(), "cache {} is not contiguous", to_string(cache_v));
    KvAppend params = params_;
    params.v = elements<const float>(in.v);
    params.table = in.table;
    params.cache_v = cache_v.data;
    params.scales_v = static_cast<float*>(cache_v.plane(1));
    params.value_dim = in.v.shape[2];
    run(call, in.k, in.slots, params);
  }
  // Rows of one cache.
  void run(const KernelCall& call, const TensorView& rows, const TensorView& slots) const {
    run(call, rows, slots, params_);
  }

 private:
  void run(const KernelCall& call, const TensorView& k, const TensorView& slots, KvAppend params) const {
    const TensorView& cache_k = call.outputs[0];
    EADEM_CHECK(cache_k.is_contiguous(), "cache {} is not contiguous", to_string(cache_k));
    params.k = elements<const float>(k);
    params.slots = elements<const int64_t>(slots);
    params.cache_k = cache_k.data;
    params.scales_k = static_cast<float*>(cache_k.plane(1));
    params.kv_heads = k.shape[1];
    params.head_dim = k.shape[2];
    params.block_rows = cache_k.shape[2];
    if (params.stride == 1) params.block_size = params.block_rows;
    cpu_device(call).pool().parallel_ranges(k.shape[0],
                                            token_grain(params.kv_heads * std::max(params.head_dim, params.value_dim)),
                                            [&](int64_t begin, int64_t end) { task_(params, begin, end); });
  }

  AppendTokens task_;
  KvAppend params_{};
};

Requirements& require_caches(Requirements& requirements, const TensorType& k, const TensorType& v) {
  const Encoding* encoding = RowEncoding::of(k.encoding);
  return requirements.packed("cache_k", k, kStorageDTypes, encoding)
      .packed("cache_v", v, {k.dtype}, encoding)
      .require(encoding == nullptr || std::max(k.fixed(3), v.fixed(3)) <= kMostEncodedDim,
               "rounds rows of at most 1024 with a scale");
}

Verdict can_kv_append(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("k", r.inputs[kAppendK])
      .f32("v", r.inputs[kAppendV])
      .one_of("slots", r.inputs[kAppendSlots], {DType::i64});
  return require_caches(requirements, r.inputs[kAppendCacheK], r.inputs[kAppendCacheV]).verdict();
}

PlanPtr prepare_kv_append(const KernelRequest& r, Context&) {
  return make_plan([append = Append(r, r.inputs[kAppendCacheK])](const KernelCall& call) {
    append.run(call, {call.inputs[kAppendK], call.inputs[kAppendV], call.inputs[kAppendSlots], nullptr});
  });
}

Verdict can_rope_kv_append(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("k", r.inputs[kRopeK])
      .f32("table", r.inputs[kRopeTable])
      .f32("v", r.inputs[kRopeV])
      .one_of("slots", r.inputs[kRopeSlots], {DType::i64})
      .require(r.attrs.get<RopeKvAppendAttrs>().rope.rotary_dim % 2 == 0, "rotates pairs; rotary_dim is odd");
  return require_caches(requirements, r.inputs[kRopeCacheK], r.inputs[kRopeCacheV]).verdict();
}

PlanPtr prepare_rope_kv_append(const KernelRequest& r, Context&) {
  Append append(r, r.inputs[kRopeCacheK]);
  append.set_rope(r.attrs.get<RopeKvAppendAttrs>().rope);
  return make_plan([append](const KernelCall& call) {
    append.run(call, {call.inputs[kRopeK], call.inputs[kRopeV], call.inputs[kRopeSlots],
                      elements<const float>(call.inputs[kRopeTable])});
  });
}

// ---- latent_append

enum LatentAppendInput { kLatentRows, kLatentSlots, kLatentCache };

Verdict can_latent_append(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("rows", r.inputs[kLatentRows]).one_of("slots", r.inputs[kLatentSlots], {DType::i64});
  return require_caches(requirements, r.inputs[kLatentCache], r.inputs[kLatentCache]).verdict();
}

PlanPtr prepare_latent_append(const KernelRequest& r, Context&) {
  Append append(r, r.inputs[kLatentCache]);
  append.set_stride(r.attrs.get<LatentAppendAttrs>());
  return make_plan(
      [append](const KernelCall& call) { append.run(call, call.inputs[kLatentRows], call.inputs[kLatentSlots]); });
}

constexpr Kernel kTable{"cpu_double_angle", Pass::forward, can_rope_table, prepare_rope_table};
constexpr Kernel kTableInference{"cpu_double_angle", Pass::inference, can_rope_table, prepare_rope_table};
constexpr Kernel kForward{"cpu_heads", Pass::forward, can_rope, prepare_rope};
constexpr Kernel kInference{"cpu_heads", Pass::inference, can_rope, prepare_rope};
constexpr Kernel kBackward{"cpu_heads", Pass::backward, can_rope_backward, prepare_rope_backward};
constexpr Kernel kAppend{"cpu_heads", Pass::inference, can_kv_append, prepare_kv_append};
constexpr Kernel kLatentAppend{"cpu_heads", Pass::inference, can_latent_append, prepare_latent_append};
constexpr Kernel kRopeAppend{"cpu_heads", Pass::inference, can_rope_kv_append, prepare_rope_kv_append};

}  // namespace

KernelList rope_table_kernels() { return {&kTable, &kTableInference}; }
KernelList rope_kernels() { return {&kForward, &kInference, &kBackward}; }
KernelList kv_append_kernels() { return {&kAppend}; }
KernelList latent_append_kernels() { return {&kLatentAppend}; }
KernelList rope_kv_append_kernels() { return {&kRopeAppend}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
