// SPDX-License-Identifier: Apache-2.0
//
// The gradients of attention (attention_backward.cc) by products of bf16: q, k, v, dy, the weights p and the gradients
// of the scores are rounded before they are multiplied, sums are f32. A block of queries meets its chunks of keys in
// order. Scores are computed with keys as rows and queries as columns, so that p and ds, as they are computed, are rows
// of an operand whose k are queries:
//   s^T = k q^T,   dp^T = v dy^T,   dv += p^T dy,   dk += ds^T q,   dq^T += k^T ds^T
#include <algorithm>
#include <utility>

#include "eadem/kernels/cpu/attention/attention_call.h"
#include "eadem/kernels/cpu/linear/bf16_dots.h"
#include "eadem/kernels/cpu/linear/bf16_operands.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/attention_backward_bf16.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/dispatch.h"

#ifndef EADEM_KERNELS_CPU_ATTENTION_BACKWARD_BF16_SCRATCH_
#define EADEM_KERNELS_CPU_ATTENTION_BACKWARD_BF16_SCRATCH_
namespace eadem::kernels::cpu {
namespace {

// Rows of queries of a task, or one token of more: a chunk of keys is rounded once for all of them.
constexpr int64_t kBf16BlockRows = 384;
// Query rows whose p and ds for a chunk of keys are computed and rounded together: both stay in the first-level cache.
constexpr int64_t kPartRows = 64;
int64_t bf16_block_tokens(const Attention& a) { return std::max<int64_t>(1, kBf16BlockRows / a.group()); }

// Panels of b, each of `tiles` tiles of k.
struct Panels {
  char* data;
  int64_t tiles;

  static int64_t bytes(int64_t outputs, int64_t tiles) { return ceil_div(outputs, kPanelWidth) * tiles * kTileBytes; }
  char* tile(int64_t panel, int64_t t) const { return data + (panel * tiles + t) * kTileBytes; }
  TilePanels from(int64_t panel, int64_t t) const { return {tile(panel, t), tiles * kTileBytes}; }
};

// The memory of a task. Rows of queries are padded to whole tiles of k.
struct Bf16Scratch {
  int64_t rows, width, value_width;  // padded
  // A block of queries: its rows, its gradient, and its operands.
  float *q, *dy;          // [rows, width or value_width]
  float *lse, *along;     // [rows]; along: dy . y
  int32_t *before, *end;  // [rows]: a query sees the keys behind `before` and before `end`
  float* dq_t;            // [head_dim, rows]
  Panels q_rows, dy_rows, q_columns, dy_columns;
  // One chunk of keys with that block: scores, their gradients, and operands.
  float *weights, *dscores;  // [kChunk, kPartRows], of a part of the queries
  float* product;            // [kChunk, width or value_width] or [head_dim, rows]
  TileRows keys, values, keys_t, weight_rows, dscore_rows;
  Panels dscore_columns;

  // Without memory it says how much is needed.
  Bf16Scratch(const Attention& a, char* memory) : memory_(memory) {
    const int64_t tokens_rows = bf16_block_tokens(a) * a.group();
    rows = round_up(tokens_rows, kPartRows), width = a.width(), value_width = a.value_width();
    const int64_t row_tiles = rows / kVnniTile, key_tiles = kChunk / kVnniTile, dim_tiles = ceil_div(width, kVnniTile),
                  value_tiles = ceil_div(value_width, kVnniTile);
    take(q, tokens_rows * width), take(dy, tokens_rows * value_width);
    take(lse, rows), take(along, rows), take(before, rows), take(end, rows);
    take(dq_t, width * rows);
    take(weights, kChunk * kPartRows), take(dscores, kChunk * kPartRows);
    take(product, std::max(kChunk * std::max(width, value_width), width * rows));
    q_rows = panels(rows, dim_tiles), dy_rows = panels(rows, value_tiles);
    q_columns = panels(width, row_tiles), dy_columns = panels(value_width, row_tiles);
    dscore_columns = panels(rows, key_tiles);
    keys = tile_rows(kChunk, dim_tiles), values = tile_rows(kChunk, value_tiles);
    keys_t = tile_rows(width, key_tiles);
    weight_rows = tile_rows(kChunk, row_tiles), dscore_rows = tile_rows(kChunk, row_tiles);
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* take_bytes(int64_t bytes) {
    const int64_t at = std::exchange(bytes_, bytes_ + round_up(bytes, kTileLine));
    return memory_ == nullptr ? nullptr : memory_ + at;
  }
  template <typename T>
  void take(T*& p, int64_t n) {
    p = reinterpret_cast<T*>(take_bytes(n * static_cast<int64_t>(sizeof(T))));
  }
  Panels panels(int64_t outputs, int64_t tiles) { return {take_bytes(Panels::bytes(outputs, tiles)), tiles}; }
  TileRows tile_rows(int64_t n, int64_t tiles) {
    return TileRows::in_pairs(take_bytes(TileRows::bytes_in_pairs(n, tiles)), tiles);
  }

  char* memory_;
  int64_t bytes_ = 0;
};

// The tiles of k from t on, of rows in pairs.
TileRows from_tile(TileRows rows, int64_t t) {
  rows.data = rows.line(0, t);
  return rows;
}

// Rows of a whose k are columns: `count` rows of `dim` floats, `stride` apart. Rows up to `all` are zeros.
void round_rows(const TileRows& to, const float* rows, int64_t stride, int64_t count, int64_t all, int64_t dim) {
  for (int64_t r = 0; r < count; ++r) round_to_tiles(to, r, rows + r * stride, dim);
  for (int64_t r = count; r < all; ++r)
    for (int64_t t = 0; t < ceil_div(dim, kVnniTile); ++t) std::fill_n(to.line(r, t), kTileLine, '\0');
}

// Both operands b that `count` rows of `dim` floats make, `width` apart: with them as outputs and as k.
void round_queries(const Panels& as_outputs, const Panels& as_k, const float* rows, int64_t width, int64_t count,
                   int64_t dim) {
  const int64_t k_tiles = ceil_div(count, kVnniTile);
  for (int64_t r = 0; r < count; r += kPanelWidth)
    for (int64_t t = 0; t < as_outputs.tiles; ++t)
      pack_b_of_rows(as_outputs.tile(r / kPanelWidth, t), rows + r * width + t * kVnniTile, width, count - r,
                     dim - t * kVnniTile);
  for (int64_t d = 0; d < dim; d += kPanelWidth)
    for (int64_t t = 0; t < k_tiles; ++t)
      pack_b_of_columns(as_k.tile(d / kPanelWidth, t), rows + t * kVnniTile * width + d, width, count - t * kVnniTile,
                        dim - d);
}

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Turns the products k . q of the keys from `start` on and of the queries from `row` on into the weights p, and v . dy
// into the gradients of k . q.
void weigh(const Attention& a, const Bf16Scratch& s, int64_t start, int64_t row) {
  const hn::RebindToSigned<Lanes> indices;
  const Vec scale = set(a.scale), one = set(1.0f);
  for (int64_t r = 0; r < kPartRows; r += kLanes) {
    const Vec lse = load(s.lse + row + r), along = load(s.along + row + r);
    const auto before = hn::LoadU(indices, s.before + row + r), end = hn::LoadU(indices, s.end + row + r);
    for (int64_t j = 0; j < kChunk; ++j) {
      float *weights = s.weights + j * kPartRows + r, *dscores = s.dscores + j * kPartRows + r;
      Vec score = hn::Mul(load(weights), scale), ds = hn::Mul(hn::Sub(load(dscores), along), scale);
      if (a.softcap > 0) {
        const Vec t = tanh(hn::Mul(score, set(1.0f / a.softcap)));
        score = hn::Mul(set(a.softcap), t);
        ds = hn::Mul(ds, hn::Mul(hn::Sub(one, t), hn::Add(one, t)));
      }
      const auto key = hn::Set(indices, static_cast<int32_t>(start + j));
      const Mask seen = hn::RebindMask(Lanes(), hn::And(hn::Gt(key, before), hn::Lt(key, end)));
      const Vec weight = hn::IfThenElseZero(seen, exp(hn::Sub(score, lse)));
      store(weight, weights);
      store(hn::IfThenElseZero(seen, hn::Mul(weight, ds)), dscores);
    }
  }
}

// Computes p and ds of the queries from `row` on, and rounds them to operands.
void compute_part(const Attention& a, const Bf16Scratch& s, int64_t start, int64_t row, Bf16Product multiply) {
  constexpr int64_t kPanels = kPartRows / kPanelWidth, kTiles = kPartRows / kVnniTile;
  const int64_t panel = row / kPanelWidth;
  multiply(s.weights, kPartRows, s.keys, s.q_rows.from(panel, 0), kChunk, kPanels, s.q_rows.tiles);
  multiply(s.dscores, kPartRows, s.values, s.dy_rows.from(panel, 0), kChunk, kPanels, s.dy_rows.tiles);
  weigh(a, s, start, row);
  round_rows(from_tile(s.weight_rows, row / kVnniTile), s.weights, kPartRows, kChunk, kChunk, kPartRows);
  round_rows(from_tile(s.dscore_rows, row / kVnniTile), s.dscores, kPartRows, kChunk, kChunk, kPartRows);
  static_assert(kChunk % kVnniTile == 0 && kTiles * kVnniTile == kPartRows);
  for (int64_t t = 0; t < kChunk / kVnniTile; ++t)
    for (int64_t p = 0; p < kPanels; ++p)
      pack_b_of_columns(s.dscore_columns.tile(panel + p, t), s.dscores + t * kVnniTile * kPartRows + p * kPanelWidth,
                        kPartRows, kVnniTile, kPanelWidth);
}

// to += from, for the first `dim` columns of `count` rows.
void add_rows(float* to, int64_t to_stride, const float* from, int64_t from_stride, int64_t count, int64_t dim) {
  for (int64_t r = 0; r < count; ++r)
    map(
        to + r * to_stride, dim, [](Vec sum, Vec v) { return hn::Add(sum, v); },
        static_cast<const float*>(to + r * to_stride), static_cast<const float*>(from + r * from_stride));
}

// Loads a block of queries.
void load_queries(const Attention& a, const Bf16Scratch& s, const TokenBlock& b, int64_t kv_head) {
  const int64_t group = a.group(), rows = (b.end - b.begin) * group;
  load_rows(s.q, a, a.q, a.head_dim, b, kv_head);
  load_rows(s.dy, a, a.dy, a.value_dim, b, kv_head);
  round_queries(s.q_rows, s.q_columns, s.q, s.width, rows, a.head_dim);
  round_queries(s.dy_rows, s.dy_columns, s.dy, s.value_width, rows, a.value_dim);
  for (int64_t r = 0; r < s.rows; ++r) {
    const bool is_there = r < rows;
    const int64_t position = b.position + r / group;
    const int64_t row = (a.query_start[b.sequence] + b.begin + r / group) * a.heads + kv_head * group + r % group;
    s.lse[r] = is_there ? a.saved_lse[row] : 0.0f;
    s.along[r] = is_there ? dot(a.dy + row * a.value_dim, a.out + row * a.value_dim, a.value_dim) : 0.0f;
    s.before[r] = is_there ? static_cast<int32_t>(a.first_key(position) - 1) : 0;
    s.end[r] = is_there ? static_cast<int32_t>(position + 1) : 0;
  }
}

// Computes the gradients of one sequence and one kv head.
void attention_backward_bf16(const Attention& a, int64_t sequence, int64_t kv_head, Bf16Product multiply,
                             void* scratch) {
  const Bf16Scratch s(a, static_cast<char*>(scratch));
  const int64_t head_dim = a.head_dim, value_dim = a.value_dim, group = a.group();
  const int64_t first_token = a.query_start[sequence], tokens = a.query_start[sequence + 1] - first_token;
  const int64_t key_stride = a.kv_heads * head_dim, value_stride = a.kv_heads * a.value_row;
  const int64_t first_key_at = first_token * key_stride + kv_head * head_dim,
                first_value_at = first_token * value_stride + kv_head * a.value_row;
  for (int64_t j = 0; j < tokens; ++j) {
    if (a.dk != nullptr) std::fill_n(a.dk + first_key_at + j * key_stride, head_dim, 0.0f);
    if (a.dv != nullptr) std::fill_n(a.dv + first_value_at + j * value_stride, a.value_row, 0.0f);
  }

  for (int64_t begin = 0; begin < tokens; begin += bf16_block_tokens(a)) {
    const TokenBlock b{sequence, begin, std::min(tokens, begin + bf16_block_tokens(a)), begin};
    const int64_t rows = (b.end - b.begin) * group, row_tiles = ceil_div(rows, kVnniTile),
                  row_panels = ceil_div(rows, kPanelWidth);
    load_queries(a, s, b, kv_head);
    std::fill_n(s.dq_t, head_dim * s.rows, 0.0f);

    for (int64_t start = first_chunk(a, b.position) * kChunk; start < b.end; start += kChunk) {
      const int64_t count = std::min(kChunk, tokens - start);
      const float* k = static_cast<const float*>(a.k) + first_key_at + start * key_stride;
      const float* v = static_cast<const float*>(a.v) + first_value_at + start * value_stride;

      // 1. Scores and dp, then p and ds.
      round_rows(s.keys, k, key_stride, count, kChunk, head_dim);
      round_rows(s.values, v, value_stride, count, kChunk, value_dim);
      const int64_t first = std::max<int64_t>(0, start - begin) * group / kPartRows * kPartRows;  // earlier see no key
      for (int64_t row = first; row < rows; row += kPartRows) compute_part(a, s, start, row, multiply);

      const int64_t t0 = first / kVnniTile, p0 = first / kPanelWidth;

      // 2. dv += p^T dy, dk += ds^T q.
      if (a.dv != nullptr) {
        multiply(s.product, s.value_width, from_tile(s.weight_rows, t0), s.dy_columns.from(0, t0), kChunk,
                 s.value_width / kPanelWidth, row_tiles - t0);
        add_rows(a.dv + first_value_at + start * value_stride, value_stride, s.product, s.value_width, count,
                 value_dim);
      }
      if (a.dk != nullptr) {
        multiply(s.product, s.width, from_tile(s.dscore_rows, t0), s.q_columns.from(0, t0), kChunk,
                 s.width / kPanelWidth, row_tiles - t0);
        add_rows(a.dk + first_key_at + start * key_stride, key_stride, s.product, s.width, count, head_dim);
      }

      // 3. dq^T += k^T ds^T.
      if (a.dq == nullptr) continue;
      for (int64_t t = 0; t < kChunk / kVnniTile; ++t)
        for (int64_t d = 0; d < head_dim; d += kTileRows)
          pack_a_of_columns(s.keys_t.line(d, t), k + t * kVnniTile * key_stride + d, key_stride, count - t * kVnniTile,
                            head_dim - d);
      multiply(s.product, s.rows, s.keys_t, s.dscore_columns.from(p0, 0), head_dim, row_panels - p0,
               s.dscore_columns.tiles);
      add_rows(s.dq_t + first, s.rows, s.product, s.rows, head_dim, rows - first);
    }

    if (a.dq == nullptr) continue;
    for (int64_t r = 0; r < rows; ++r) {
      float* dq = a.dq + ((first_token + begin + r / group) * a.heads + kv_head * group + r % group) * head_dim;
      for (int64_t d = 0; d < head_dim; ++d) dq[d] = s.dq_t[d * s.rows + r];
    }
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(attention_backward_bf16);

namespace {

Verdict can_backward_bf16(const KernelRequest& r) {
  const MatmulInput limit = r.attrs.get<AttentionAttrs>().backward_input;
  return backward_requirements(r)
      .require(has_bf16_products(cpu_device(r).isa()), "is for processors with instructions for bf16")
      .require(may_round_to(MatmulInput::bf16, limit),
               fmt::format("rounds what it multiplies to bf16; backward_input is {}", matmul_input_name(limit)))
      .verdict({.flops_share = 2.0, .reason = "products of bf16"});
}

PlanPtr prepare_backward_bf16(const KernelRequest& r, Context&) {
  const Isa isa = cpu_device(r).isa();
  const auto task = EADEM_CPU_DISPATCH(attention_backward_bf16, isa);
  const int64_t bytes = Bf16Scratch(shape_of(r.attrs.get<AttentionAttrs>()), nullptr).bytes();
  const Bf16Product multiply = bf16_product_of(isa);
  return plan_backward(r, bytes, [=](const Attention& a, int64_t sequence, int64_t kv_head, void* scratch) {
    task(a, sequence, kv_head, multiply, scratch);
  });
}

}  // namespace

const Kernel kAttentionBackwardBf16{"cpu_bf16_recompute", Pass::backward, can_backward_bf16, prepare_backward_bf16};

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
