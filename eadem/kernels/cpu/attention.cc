// SPDX-License-Identifier: Apache-2.0
//
// Attention of packed sequences by blocks of queries and chunks of keys.
//
// A task is a block of tokens of one sequence and one kv head; its rows are the queries of those tokens for all heads
// of the group, so that keys and values are brought in once for all of them. A chunk of kAttentionChunk keys, wherever
// they are kept, is widened into scratch (keys transposed, so that lanes are keys), and both products are the blocks
// of matmul-inl.h. Every score is one chain over head_dim, every output one chain over the chunk's positions, and
// chunks follow the absolute position: a row's bits know nothing of the rows beside it.
//
// A masked score has weight exactly 0 and adds 0 * v, which changes nothing as long as v is finite; the sign of a zero
// that this could leave is cleared at the end.
#include "eadem/kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/matmul-inl.h"

#ifndef EADEM_KERNELS_CPU_ATTENTION_PARAMS_
#define EADEM_KERNELS_CPU_ATTENTION_PARAMS_
namespace eadem::kernels::cpu {
namespace {

constexpr int64_t kChunk = kAttentionChunk;
static_assert(kChunk % kPanelWidth == 0);
constexpr int64_t kBlockRows = 96;  // rows of a task: a multiple of every tile's rows; the chunk is read once for all
constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Attention {
  const float* q;     // [tokens, heads, head_dim]
  const void *k, *v;  // direct [tokens, kv_heads, head_dim], cached [num_blocks, kv_heads, block_size, head_dim]
  DType kv_dtype;
  const int32_t* query_start;  // [sequences + 1]
  const int32_t* kv_length;    // [sequences]
  const int32_t* block_table;  // [sequences, max_blocks]; null: direct
  int64_t max_blocks, block_size;
  int64_t sequences, heads, kv_heads, head_dim, window;
  float scale;
  float* y;    // [tokens, heads, head_dim]
  float* lse;  // [tokens, heads] or null

  // Backward only.
  const float *out, *saved_lse, *dy;
  float *dq, *dk, *dv;

  int64_t group() const { return heads / kv_heads; }
  // head_dim rounded up to whole panels: the row size of everything in scratch.
  int64_t width() const { return (head_dim + kPanelWidth - 1) / kPanelWidth * kPanelWidth; }
  int64_t block_tokens() const { return std::max<int64_t>(1, kBlockRows / group()); }
  int64_t block_rows() const { return block_tokens() * group(); }
};

// The tokens [begin, end) of a sequence, as indices into its tokens of this step, and the position of the first.
struct TokenBlock {
  int64_t sequence, begin, end, position;
};

struct ForwardScratch {
  float *q, *out;                         // [rows, width]
  float* scores;                          // [rows, kChunk]
  float *keys, *values;                   // [kChunk, width]
  float* keys_t;                          // [head_dim, kChunk]
  float *most, *sum, *new_most, *shrink;  // [rows]

  static int64_t floats(const Attention& a) {
    return round_up(a.block_rows() * (2 * a.width() + kChunk + 4) + 3 * kChunk * a.width(), kPanelWidth);
  }
  ForwardScratch(const Attention& a, float* p) {
    const int64_t rows = a.block_rows(), width = a.width();
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    q = take(rows * width), out = take(rows * width), scores = take(rows * kChunk);
    keys = take(kChunk * width), values = take(kChunk * width), keys_t = take(kChunk * width);
    most = take(rows), sum = take(rows), new_most = take(rows), shrink = take(rows);
  }
};

struct BackwardScratch {
  float *q, *dy, *dq;        // [rows, width]
  float *weights, *dscores;  // [rows, kChunk]
  float *keys, *values;      // [kChunk, width]
  float *keys_t, *values_t;  // [head_dim, kChunk]
  float *dkeys, *dvalues;    // [kChunk, width]
  float* along;              // [rows]: dy . y

  static int64_t floats(const Attention& a) {
    return round_up(a.block_rows() * (3 * a.width() + 2 * kChunk + 1) + 6 * kChunk * a.width(), kPanelWidth);
  }
  BackwardScratch(const Attention& a, float* p) {
    const int64_t rows = a.block_rows(), width = a.width();
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    q = take(rows * width), dy = take(rows * width), dq = take(rows * width);
    weights = take(rows * kChunk), dscores = take(rows * kChunk);
    keys = take(kChunk * width), values = take(kChunk * width);
    keys_t = take(kChunk * width), values_t = take(kChunk * width);
    dkeys = take(kChunk * width), dvalues = take(kChunk * width);
    along = take(rows);
  }
};

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// ---- Moving rows between tensors and scratch.

template <typename T>
HWY_INLINE void widen_row(float* to, const T* from, int64_t n, int64_t width) {
  map(
      to, n, [](Vec v) { return v; }, from);
  for (int64_t i = n; i < width; ++i) to[i] = 0.0f;
}

// Keys or values at positions [first, first + count) of a sequence into rows of scratch; the rest of the chunk is 0.
template <typename T>
void load_chunk(float* rows, const Attention& a, const T* base, int64_t sequence, int64_t kv_head, int64_t first,
                int64_t count, int64_t first_token) {
  const int64_t width = a.width();
  for (int64_t j = 0; j < count; ++j) {
    const int64_t position = first + j;
    int64_t row;
    if (a.block_table == nullptr) {
      row = (first_token + position) * a.kv_heads + kv_head;
    } else {
      const int64_t block = a.block_table[sequence * a.max_blocks + position / a.block_size];
      row = (block * a.kv_heads + kv_head) * a.block_size + position % a.block_size;
    }
    widen_row(rows + j * width, base + row * a.head_dim, a.head_dim, width);
  }
  std::fill(rows + count * width, rows + kChunk * width, 0.0f);
}

void load_keys_or_values(float* rows, const Attention& a, const void* base, int64_t sequence, int64_t kv_head,
                         int64_t first, int64_t count, int64_t first_token) {
  switch (a.kv_dtype) {
    case DType::bf16:
      return load_chunk(rows, a, static_cast<const bf16_t*>(base), sequence, kv_head, first, count, first_token);
    case DType::f16:
      return load_chunk(rows, a, static_cast<const f16_t*>(base), sequence, kv_head, first, count, first_token);
    default: return load_chunk(rows, a, static_cast<const float*>(base), sequence, kv_head, first, count, first_token);
  }
}

// t [width, kChunk] = transpose of rows [kChunk, width]; width is a multiple of 4.
void transpose_chunk(float* t, const float* rows, int64_t width) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t j = 0; j < kChunk; ++j)
    for (int64_t i = 0; i < width; ++i) t[i * kChunk + j] = rows[j * width + i];
#else
  // 4 x 4 blocks: pairs of rows are interleaved, then pairs of pairs.
  const hn::FixedTag<float, 4> d;
  const hn::Repartition<double, decltype(d)> d64;
  for (int64_t i = 0; i < width; i += 4) {
    for (int64_t j = 0; j < kChunk; j += 4) {
      const float* from = rows + j * width + i;
      const auto r0 = hn::LoadU(d, from), r1 = hn::LoadU(d, from + width);
      const auto r2 = hn::LoadU(d, from + 2 * width), r3 = hn::LoadU(d, from + 3 * width);
      const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
      const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
      const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
      const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
      float* to = t + i * kChunk + j;
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)), d, to);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)), d, to + kChunk);
      hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)), d, to + 2 * kChunk);
      hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)), d, to + 3 * kChunk);
    }
  }
#endif
}

// Rows of a block: row (token, head of the group) of x [tokens, heads, head_dim].
void load_rows(float* rows, const Attention& a, const float* x, const TokenBlock& b, int64_t kv_head) {
  for (int64_t t = b.begin; t < b.end; ++t)
    for (int64_t h = 0; h < a.group(); ++h, rows += a.width())
      widen_row(rows, x + ((a.query_start[b.sequence] + t) * a.heads + kv_head * a.group() + h) * a.head_dim,
                a.head_dim, a.width());
}

// The keys of a chunk that a token at `position` sees: [first, last) relative to the chunk's start.
struct Seen {
  int64_t first, last;
};

HWY_INLINE Seen seen(const Attention& a, int64_t position, int64_t chunk_start) {
  const int64_t oldest = a.window > 0 ? std::max<int64_t>(0, position - a.window + 1) : 0;
  return {std::clamp<int64_t>(oldest - chunk_start, 0, kChunk),
          std::clamp<int64_t>(position + 1 - chunk_start, 0, kChunk)};
}

int64_t first_chunk(const Attention& a, int64_t first_position) {
  return a.window > 0 ? std::max<int64_t>(0, first_position - a.window + 1) / kChunk : 0;
}

// ---- Forward and inference.

// Scores of a chunk [rows, kChunk] become weights; each row's maximum and sum move on, its output is rescaled. A row
// that sees no key of this chunk gives it no weight and stays as it is. Pass by pass over the rows, so that the long
// dependencies within a row (maximum, exponential, sum) overlap those of its neighbours.
void online_softmax(const Attention& a, const TokenBlock& b, int64_t chunk_start, int64_t rows,
                    const ForwardScratch& s) {
  const int64_t group = a.group(), width = a.width();

  // 1. Scale, mask, and the new maximum of every row.
  for (int64_t r = 0; r < rows; ++r) {
    const Seen keys = seen(a, b.position + r / group, chunk_start);
    float* scores = s.scores + r * kChunk;
    s.new_most[r] = s.most[r];
    if (keys.first >= keys.last) {
      std::fill(scores, scores + kChunk, 0.0f);
      continue;
    }
    std::fill(scores, scores + keys.first, -kInfinity);
    std::fill(scores + keys.last, scores + kChunk, -kInfinity);
    Vec largest = set(s.most[r]);
    for (int64_t j = 0; j < kChunk; j += kLanes) {
      const Vec score = hn::Mul(load(scores + j), set(a.scale));
      store(score, scores + j);
      largest = hn::Max(largest, score);
    }
    s.new_most[r] = max_lanes(largest);
  }

  // 2. What came before shrinks by exp(old maximum - new maximum); before the first chunk that is exp(-infinity) = 0.
  map(
      s.shrink, rows, [](Vec old_most, Vec new_most) { return exp(hn::Sub(old_most, new_most)); },
      static_cast<const float*>(s.most), static_cast<const float*>(s.new_most));

  // 3. Weights, their sums, and the rescaled outputs.
  for (int64_t r = 0; r < rows; ++r) {
    const Seen keys = seen(a, b.position + r / group, chunk_start);
    if (keys.first >= keys.last) continue;
    float* scores = s.scores + r * kChunk;
    float* out = s.out + r * width;
    Vec total = zero();
    for (int64_t j = 0; j < kChunk; j += kLanes) {
      const Vec weight = exp(hn::Sub(load(scores + j), set(s.new_most[r])));
      store(weight, scores + j);
      total = hn::Add(total, weight);
    }
    s.sum[r] = s.sum[r] * s.shrink[r] + sum_lanes(total);
    s.most[r] = s.new_most[r];
    map(
        out, width, [shrink = set(s.shrink[r])](Vec v) { return hn::Mul(v, shrink); }, static_cast<const float*>(out));
  }
}

void attention_block(const Attention& a, const TokenBlock& b, int64_t kv_head, float* scratch) {
  const ForwardScratch s(a, scratch);
  const int64_t width = a.width(), group = a.group();
  const int64_t rows = (b.end - b.begin) * group;
  const int64_t last_position = b.position + (b.end - b.begin) - 1;
  load_rows(s.q, a, a.q, b, kv_head);
  std::fill(s.out, s.out + rows * width, 0.0f);
  std::fill(s.most, s.most + rows, -kInfinity);
  std::fill(s.sum, s.sum + rows, 0.0f);

  for (int64_t chunk = first_chunk(a, b.position); chunk * kChunk <= last_position; ++chunk) {
    const int64_t start = chunk * kChunk;
    const int64_t count = std::min(kChunk, last_position + 1 - start);
    const int64_t first_token = a.query_start[b.sequence];

    // 1. Scores of every row with every key of the chunk.
    load_keys_or_values(s.keys, a, a.k, b.sequence, kv_head, start, count, first_token);
    transpose_chunk(s.keys_t, s.keys, width);
    matmul_block(s.scores, kChunk, false, RowOperand{s.q, width, 1}, PanelOperand<float>{s.keys_t, kPanelWidth, kChunk},
                 rows, kChunk / kPanelWidth, a.head_dim);

    // 2. Weights.
    online_softmax(a, b, start, rows, s);

    // 3. Weighted values, added to the rescaled outputs.
    load_keys_or_values(s.values, a, a.v, b.sequence, kv_head, start, count, first_token);
    matmul_block(s.out, width, true, RowOperand{s.scores, kChunk, 1}, PanelOperand<float>{s.values, kPanelWidth, width},
                 rows, width / kPanelWidth, count);
  }

  // 4. Normalize and store.
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = a.query_start[b.sequence] + b.begin + r / group;
    const int64_t row = token * a.heads + kv_head * group + r % group;
    map(
        a.y + row * a.head_dim, a.head_dim,
        [total = set(s.sum[r])](Vec v) { return hn::Add(hn::Div(v, total), zero()); },
        static_cast<const float*>(s.out + r * width));
    if (a.lse != nullptr) a.lse[row] = s.most[r] + std::log(s.sum[r]);
  }
}

// ---- Backward: with p = exp(scale q.k - lse),
//   dv_j = sum_i p_ij dy_i,   ds_ij = p_ij (dy_i . v_j - dy_i . y_i) scale,   dq_i = sum_j ds_ij k_j,
//   dk_j = sum_i ds_ij q_i.

// All tokens of one sequence and one kv head, chunk by chunk of keys, and in each all later blocks of queries in order.
void attention_backward_sequence(const Attention& a, int64_t sequence, int64_t kv_head, float* scratch) {
  const BackwardScratch s(a, scratch);
  const int64_t width = a.width(), group = a.group();
  const int64_t first_token = a.query_start[sequence];
  const int64_t tokens = a.query_start[sequence + 1] - first_token;
  const int64_t panels = width / kPanelWidth;

  for (int64_t start = 0; start < tokens; start += kChunk) {
    const int64_t count = std::min(kChunk, tokens - start);
    load_keys_or_values(s.keys, a, a.k, sequence, kv_head, start, count, first_token);
    load_keys_or_values(s.values, a, a.v, sequence, kv_head, start, count, first_token);
    transpose_chunk(s.keys_t, s.keys, width);
    transpose_chunk(s.values_t, s.values, width);
    std::fill(s.dkeys, s.dkeys + kChunk * width, 0.0f);
    std::fill(s.dvalues, s.dvalues + kChunk * width, 0.0f);

    for (int64_t begin = start / a.block_tokens() * a.block_tokens(); begin < tokens; begin += a.block_tokens()) {
      const TokenBlock b{sequence, begin, std::min(tokens, begin + a.block_tokens()), begin};
      if (a.window > 0 && b.begin - a.window + 1 >= start + kChunk) break;  // later blocks see none of these keys
      const int64_t rows = (b.end - b.begin) * group;
      const int64_t first_row = (first_token + b.begin) * a.heads + kv_head * group;
      const auto row_of = [&](int64_t r) { return first_row + r / group * a.heads + r % group; };
      load_rows(s.q, a, a.q, b, kv_head);
      load_rows(s.dy, a, a.dy, b, kv_head);
      for (int64_t r = 0; r < rows; ++r)
        s.along[r] = dot(a.dy + row_of(r) * a.head_dim, a.out + row_of(r) * a.head_dim, a.head_dim);

      // 1. Scores and dy . v.
      matmul_block(s.weights, kChunk, false, RowOperand{s.q, width, 1},
                   PanelOperand<float>{s.keys_t, kPanelWidth, kChunk}, rows, kChunk / kPanelWidth, a.head_dim);
      matmul_block(s.dscores, kChunk, false, RowOperand{s.dy, width, 1},
                   PanelOperand<float>{s.values_t, kPanelWidth, kChunk}, rows, kChunk / kPanelWidth, a.head_dim);

      // 2. Weights, and the gradient of the scores.
      for (int64_t r = 0; r < rows; ++r) {
        float* weights = s.weights + r * kChunk;
        float* dscores = s.dscores + r * kChunk;
        const Vec lse = set(a.saved_lse[row_of(r)]), along = set(s.along[r]), scale = set(a.scale);
        map(
            weights, kChunk, [&](Vec v) { return exp(hn::Sub(hn::Mul(v, scale), lse)); },
            static_cast<const float*>(weights));
        const Seen keys = seen(a, b.position + r / group, start);
        std::fill(weights, weights + keys.first, 0.0f);
        std::fill(weights + std::max(keys.first, keys.last), weights + kChunk, 0.0f);
        map(
            dscores, kChunk, [&](Vec w, Vec dw) { return hn::Mul(hn::Mul(w, hn::Sub(dw, along)), scale); },
            static_cast<const float*>(weights), static_cast<const float*>(dscores));
      }

      // 3. dv += p^T dy, dk += ds^T q.
      matmul_block(s.dvalues, width, true, RowOperand{s.weights, 1, kChunk},
                   PanelOperand<float>{s.dy, kPanelWidth, width}, kChunk, panels, rows);
      matmul_block(s.dkeys, width, true, RowOperand{s.dscores, 1, kChunk}, PanelOperand<float>{s.q, kPanelWidth, width},
                   kChunk, panels, rows);

      // 4. dq += ds k; the first chunk that a block sees starts it.
      if (a.dq == nullptr) continue;
      const bool resume = first_chunk(a, b.position) * kChunk < start;
      if (resume) load_rows(s.dq, a, a.dq, b, kv_head);
      matmul_block(s.dq, width, resume, RowOperand{s.dscores, kChunk, 1},
                   PanelOperand<float>{s.keys, kPanelWidth, width}, rows, panels, count);
      for (int64_t r = 0; r < rows; ++r)
        map(
            a.dq + row_of(r) * a.head_dim, a.head_dim, [](Vec v) { return v; },
            static_cast<const float*>(s.dq + r * width));
    }

    for (int64_t j = 0; j < count; ++j) {
      const int64_t row = ((first_token + start + j) * a.kv_heads + kv_head) * a.head_dim;
      const auto same = [](Vec v) { return v; };
      if (a.dk != nullptr) map(a.dk + row, a.head_dim, same, static_cast<const float*>(s.dkeys + j * width));
      if (a.dv != nullptr) map(a.dv + row, a.head_dim, same, static_cast<const float*>(s.dvalues + j * width));
    }
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(attention_block);
HWY_EXPORT(attention_backward_sequence);

namespace {

enum ForwardInput { kQ, kK, kV, kQueryStart, kKvLength, kBlockTable };
enum BackwardInput { kSavedY = 5, kSavedLse, kDy };

Attention shape_of(const AttentionAttrs& attrs) {
  Attention a{};
  a.heads = attrs.heads;
  a.kv_heads = attrs.kv_heads;
  a.head_dim = attrs.head_dim;
  a.window = attrs.window;
  a.scale = attrs.scale;
  return a;
}

Attention inputs_of(const KernelCall& call) {
  Attention a = shape_of(call.attrs.get<AttentionAttrs>());
  a.q = elements<const float>(call.inputs[kQ]);
  EADEM_CHECK(call.inputs[kK].is_contiguous() && call.inputs[kV].is_contiguous(), "keys {} are not contiguous",
              to_string(call.inputs[kK]));
  a.k = call.inputs[kK].data;
  a.v = call.inputs[kV].data;
  a.kv_dtype = call.inputs[kK].dtype;
  a.query_start = elements<const int32_t>(call.inputs[kQueryStart]);
  a.kv_length = elements<const int32_t>(call.inputs[kKvLength]);
  a.sequences = call.inputs[kKvLength].shape[0];
  return a;
}

// Multiplications and additions when every sequence is as long as the bounds allow: half of all pairs are seen.
double attention_flops(const KernelRequest& r, const AttentionAttrs& attrs) {
  const double tokens = static_cast<double>(r.bounds[Symbol::tokens]);
  const double keys = attrs.window > 0 ? std::min<double>(tokens, static_cast<double>(attrs.window)) : tokens / 2;
  return 4.0 * tokens * keys * static_cast<double>(attrs.heads * attrs.head_dim);
}

Requirements forward_requirements(const KernelRequest& r, const AttentionAttrs& attrs) {
  Requirements requirements(r);
  requirements.f32("q", r.inputs[kQ])
      .one_of("k", r.inputs[kK], {DType::f32, DType::bf16, DType::f16})
      .one_of("v", r.inputs[kV], {r.inputs[kK].dtype})
      .one_of("query_start", r.inputs[kQueryStart], {DType::i32})
      .one_of("kv_length", r.inputs[kKvLength], {DType::i32})
      .f32("y", r.outputs[0])
      .require(attrs.kv_heads > 0 && attrs.heads % attrs.kv_heads == 0, "heads is not a multiple of kv_heads");
  return requirements;
}

Verdict can_forward(const KernelRequest& r) {
  const AttentionAttrs& attrs = r.attrs.get<AttentionAttrs>();
  // A cached attention saves nothing, so it has no second output to ask about.
  if (attrs.source != KvSource::direct) return Verdict::no("the forward pass reads keys directly, not a cache");
  return forward_requirements(r, attrs).f32("lse", r.outputs[1]).at_cost(attention_flops(r, attrs));
}

Verdict can_infer(const KernelRequest& r) {
  const AttentionAttrs& attrs = r.attrs.get<AttentionAttrs>();
  Requirements requirements = forward_requirements(r, attrs);
  if (attrs.source == KvSource::cached)
    requirements.require(r.inputs.size() > kBlockTable && !is_absent(r.inputs[kBlockTable]),
                         "reads a cache through block_table; it is absent");
  return requirements.at_cost(attention_flops(r, attrs));
}

int64_t forward_scratch_bytes(const KernelRequest& r) {
  const Attention a = shape_of(r.attrs.get<AttentionAttrs>());
  return cpu_device(r).pool().num_threads() * ForwardScratch::floats(a) * static_cast<int64_t>(sizeof(float));
}

void run_forward(const KernelCall& call) {
  Attention a = inputs_of(call);
  if (call.attrs.get<AttentionAttrs>().source == KvSource::cached) {
    a.block_table = elements<const int32_t>(call.inputs[kBlockTable]);
    a.max_blocks = call.inputs[kBlockTable].shape[1];
    a.block_size = call.inputs[kK].shape[2];
  }
  a.y = elements<float>(call.outputs[0]);
  a.lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;

  const auto blocks_of = [&](int64_t sequence) {
    return ceil_div(a.query_start[sequence + 1] - a.query_start[sequence], a.block_tokens());
  };
  int64_t blocks = 0;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) blocks += blocks_of(sequence);
  const auto task = EADEM_CPU_DISPATCH(attention_block, cpu_device(call).isa());
  const int64_t floats = ForwardScratch::floats(a);
  cpu_device(call).pool().parallel_for(blocks * a.kv_heads, [&](int64_t index, int worker) {
    // Later blocks of a sequence see more keys: they go first, so that no thread is left with the longest.
    int64_t block = blocks - 1 - index / a.kv_heads;
    int64_t sequence = 0;
    for (; block >= blocks_of(sequence); ++sequence) block -= blocks_of(sequence);
    const int64_t tokens = a.query_start[sequence + 1] - a.query_start[sequence];
    const int64_t begin = block * a.block_tokens();
    const TokenBlock b{sequence, begin, std::min(tokens, begin + a.block_tokens()),
                       a.kv_length[sequence] - tokens + begin};
    task(a, b, index % a.kv_heads, static_cast<float*>(call.scratch.data) + worker * floats);
  });
}

Verdict can_backward(const KernelRequest& r) {
  const AttentionAttrs& attrs = r.attrs.get<AttentionAttrs>();
  Requirements requirements(r);
  for (const int port : {static_cast<int>(kQ), static_cast<int>(kK), static_cast<int>(kV)})
    requirements.f32("q, k or v", r.inputs[static_cast<size_t>(port)]);
  requirements.f32("y", r.inputs[kSavedY]).f32("lse", r.inputs[kSavedLse]).f32("dy", r.inputs[kDy]);
  for (const TensorType& type : r.outputs) requirements.f32("dq, dk or dv", type);
  return requirements.require(attrs.source == KvSource::direct, "gradients need keys given directly, not a cache")
      .require(attrs.kv_heads > 0 && attrs.heads % attrs.kv_heads == 0, "heads is not a multiple of kv_heads")
      .at_cost(2.5 * attention_flops(r, attrs));
}

int64_t backward_scratch_bytes(const KernelRequest& r) {
  const Attention a = shape_of(r.attrs.get<AttentionAttrs>());
  return cpu_device(r).pool().num_threads() * BackwardScratch::floats(a) * static_cast<int64_t>(sizeof(float));
}

void run_backward(const KernelCall& call) {
  Attention a = inputs_of(call);
  a.out = elements<const float>(call.inputs[kSavedY]);
  a.saved_lse = elements<const float>(call.inputs[kSavedLse]);
  a.dy = elements<const float>(call.inputs[kDy]);
  a.dq = elements<float>(call.outputs[0]);
  a.dk = elements<float>(call.outputs[1]);
  a.dv = elements<float>(call.outputs[2]);
  const auto task = EADEM_CPU_DISPATCH(attention_backward_sequence, cpu_device(call).isa());
  const int64_t floats = BackwardScratch::floats(a);
  cpu_device(call).pool().parallel_for(a.sequences * a.kv_heads, [&](int64_t index, int worker) {
    task(a, index / a.kv_heads, index % a.kv_heads, static_cast<float*>(call.scratch.data) + worker * floats);
  });
}

constexpr Kernel kForward{"cpu_online_softmax", Pass::forward, can_forward, run_forward, forward_scratch_bytes};
constexpr Kernel kInference{"cpu_online_softmax", Pass::inference, can_infer, run_forward, forward_scratch_bytes};
constexpr Kernel kBackward{"cpu_recompute", Pass::backward, can_backward, run_backward, backward_scratch_bytes};

}  // namespace

KernelList attention_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
