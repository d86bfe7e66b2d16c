// SPDX-License-Identifier: Apache-2.0
//
// select_keys. The rows of a block are the index queries of its tokens; a chunk of keys is widened and transposed into
// scratch once for all of them. Every product is one chain over head_dim and every score one chain over the heads, so a
// score has the same bits in every step. Where a step has few blocks, as in decode, threads divide the keys of a block.
#include <algorithm>
#include <numeric>
#include <utility>

#include "eadem/kernels/attention/selected_attention.h"
#include "eadem/kernels/cpu/attention/attention_call.h"
#include "eadem/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/select_keys.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/attention-inl.h"
#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/matmul-inl.h"

#ifndef EADEM_KERNELS_CPU_SELECT_KEYS_SCRATCH_
#define EADEM_KERNELS_CPU_SELECT_KEYS_SCRATCH_
namespace eadem::kernels::cpu {
namespace {

struct IndexScratch {
  float *q, *products;   // [rows, width], [rows, kChunk]
  float *keys, *keys_t;  // [kChunk, width], [width, kChunk]

  static int64_t floats(const Attention& a) {
    return round_up(a.block_rows() * (a.width() + kChunk) + 2 * kChunk * a.width(), kPanelWidth);
  }
  IndexScratch(const Attention& a, float* p) {
    const auto take = [&](int64_t n) { return std::exchange(p, p + n); };
    q = take(a.block_rows() * a.width()), products = take(a.block_rows() * kChunk);
    keys = take(kChunk * a.width()), keys_t = take(kChunk * a.width());
  }
};

// Keys of `stride` tokens: how many there are before the position, and where key j lies among those of a step.
struct KeyRows {
  int64_t stride;

  int64_t before(int64_t position) const { return position / stride; }
  int64_t last_position(int64_t j) const { return (j + 1) * stride - 1; }
};

// Writes the scores of a block's tokens for the chunks [first, last) of keys, in rows of `pitch`.
using ScoreChunks = void (*)(const Attention& a, const KeyRows& keys, const float* weights, const TokenBlock& b,
                             int64_t first, int64_t last, float* scores, int64_t pitch, float* scratch);

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Loads keys of a sequence, counted by their numbers, into rows of scratch; the remaining rows of the chunk are 0.
template <typename T>
void load_keys(float* to, const Attention& a, const KeyRows& keys, int64_t sequence, int64_t start, int64_t count) {
  const auto* k = static_cast<const T*>(a.k);
  if (keys.stride == 1 || a.block_table != nullptr)
    return load_chunk(to, a, k, a.head_dim, a.head_dim, sequence, 0, start, count);
  const KvRows<T> from{a, k, sequence, 0, a.head_dim};
  for (int64_t j = 0; j < count; ++j)
    widen_row(to + j * a.width(), from.at(keys.last_position(start + j)), a.head_dim, a.width());
  std::fill(to + count * a.width(), to + kChunk * a.width(), 0.0f);
}

template <typename T>
void score_chunks(const Attention& a, const KeyRows& rows, const float* weights, const TokenBlock& b, int64_t first,
                  int64_t last, float* scores, int64_t pitch, float* scratch) {
  const IndexScratch s(a, scratch);
  const int64_t width = a.width(), tokens = b.end - b.begin, keys = rows.before(b.position + tokens);
  load_rows(s.q, a, a.q, a.head_dim, b, 0);
  for (int64_t chunk = first; chunk < last; ++chunk) {
    const int64_t start = chunk * kChunk;
    load_keys<T>(s.keys, a, rows, b.sequence, start, std::min(kChunk, keys - start));
    transpose_chunk(s.keys_t, s.keys, width);
    matmul_block(s.products, kChunk, false, RowOperand{s.q, width, 1},
                 PanelOperand<float>{s.keys_t, kPanelWidth, kChunk}, tokens * a.heads, kChunk / kPanelWidth,
                 a.head_dim);
    for (int64_t t = 0; t < tokens; ++t) {
      const float* weight = weights + (a.query_start[b.sequence] + b.begin + t) * a.heads;
      const float* products = s.products + t * a.heads * kChunk;
      for (int64_t j = 0; j < kChunk; j += kLanes) {
        Vec score = zero();
        for (int64_t h = 0; h < a.heads; ++h) {
          const Vec product = hn::Mul(load(products + h * kChunk + j), set(a.scale));
          score = hn::MulAdd(hn::Max(product, zero()), set(weight[h]), score);
        }
        store(score, scores + t * pitch + start + j);
      }
    }
  }
}

ScoreChunks score_routine(DType dtype) {
  return with_dtype(dtype, [](auto* type) -> ScoreChunks { return score_chunks<ElementOf<decltype(type)>>; });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(score_routine);

namespace {

// q, k and weights come before the ports that describe sequences.
enum SelectKeysInput { kIndexQ, kIndexK, kIndexWeights, kIndexQueryStart, kIndexKvLength, kIndexBlockTable };

Verdict can_select(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("q", r.inputs[kIndexQ])
      .one_of("k", r.inputs[kIndexK], kStorageDTypes)
      .f32("weights", r.inputs[kIndexWeights])
      .one_of("query_start", r.inputs[kIndexQueryStart], {DType::i32})
      .one_of("kv_length", r.inputs[kIndexKvLength], {DType::i32});
  return requirements.verdict();
}

// The positions of the `count` largest of `scores`, ascending, then -1. `order` has room for all of them.
void choose(int32_t* chosen, int64_t count, const float* scores, int64_t visible, int32_t* order) {
  const int64_t kept = std::min(count, visible);
  std::iota(order, order + visible, 0);
  if (kept < visible) {
    const auto is_better = [scores](int32_t x, int32_t y) {
      return scores[x] != scores[y] ? scores[x] > scores[y] : x < y;
    };
    std::nth_element(order, order + kept, order + visible, is_better);
    std::sort(order, order + kept);
  }
  std::copy(order, order + kept, chosen);
  std::fill(chosen + kept, chosen + count, -1);
}

struct SelectPlan {
  Attention shape;
  ScoreChunks score;
  KeyRows keys;
  int64_t top_k;
  bool cached;
  int64_t positions;      // the most that a sequence has
  int64_t worker_floats;  // of IndexScratch, and the order of one token's positions
  int64_t score_floats() const { return shape.block_tokens() * positions; }
};

void run_select(const SelectPlan& plan, const KernelCall& call) {
  Attention a = plan.shape;
  a.q = elements<const float>(call.inputs[kIndexQ]);
  a.k = call.inputs[kIndexK].data;
  a.query_start = elements<const int32_t>(call.inputs[kIndexQueryStart]);
  a.kv_length = elements<const int32_t>(call.inputs[kIndexKvLength]);
  a.sequences = call.inputs[kIndexKvLength].shape[0];
  if (plan.cached) {
    a.block_table = elements<const int32_t>(call.inputs[kIndexBlockTable]);
    a.max_blocks = call.inputs[kIndexBlockTable].shape[1];
    a.block_size = call.inputs[kIndexK].shape[2];
  }
  const auto* weights = elements<const float>(call.inputs[kIndexWeights]);
  auto* selection = elements<int32_t>(call.outputs[0]);
  ThreadPool& pool = cpu_device(call).pool();
  auto* const scratch = static_cast<float*>(call.scratch.data);
  float* const all_scores = scratch + pool.num_threads() * plan.worker_floats;

  const auto blocks_of = [&](int64_t s) { return ceil_div(a.query_start[s + 1] - a.query_start[s], a.block_tokens()); };
  int64_t blocks = 0;
  for (int64_t s = 0; s < a.sequences; ++s) blocks += blocks_of(s);
  const auto block_at = [&](int64_t index) {
    int64_t sequence = 0;
    for (; index >= blocks_of(sequence); ++sequence) index -= blocks_of(sequence);
    const int64_t tokens = a.query_start[sequence + 1] - a.query_start[sequence], begin = index * a.block_tokens();
    return TokenBlock{sequence, begin, std::min(tokens, begin + a.block_tokens()),
                      a.kv_length[sequence] - tokens + begin};
  };
  const auto chunks_of = [&](const TokenBlock& b) {
    return ceil_div(plan.keys.before(b.position + b.end - b.begin), kChunk);
  };
  const auto choose_token = [&](const TokenBlock& b, int64_t t, const float* scores, int worker) {
    auto* order = reinterpret_cast<int32_t*>(scratch + worker * plan.worker_floats);
    choose(selection + (a.query_start[b.sequence] + b.begin + t) * plan.top_k, plan.top_k, scores + t * plan.positions,
           plan.keys.before(b.position + t + 1), order);
  };

  if (blocks >= pool.active_threads()) {
    pool.parallel_for(blocks, [&](int64_t index, int worker) {
      const TokenBlock b = block_at(index);
      float* scores = all_scores + worker * plan.score_floats();
      plan.score(a, plan.keys, weights, b, 0, chunks_of(b), scores, plan.positions,
                 scratch + worker * plan.worker_floats);
      for (int64_t t = 0; t < b.end - b.begin; ++t) choose_token(b, t, scores, worker);
    });
    return;
  }
  for (int64_t index = 0; index < blocks; ++index) {
    const TokenBlock b = block_at(index);
    pool.parallel_ranges(chunks_of(b), 4, [&](int64_t begin, int64_t end, int worker) {
      plan.score(a, plan.keys, weights, b, begin, end, all_scores, plan.positions,
                 scratch + worker * plan.worker_floats);
    });
    pool.parallel_for(b.end - b.begin, [&](int64_t t, int worker) { choose_token(b, t, all_scores, worker); });
  }
}

PlanPtr prepare_select(const KernelRequest& r, Context&) {
  const SelectKeysAttrs& attrs = r.attrs.get<SelectKeysAttrs>();
  const bool cached = attrs.source == KvSource::cached;
  Attention shape{};
  shape.heads = attrs.heads;
  shape.kv_heads = 1;
  shape.head_dim = attrs.head_dim;
  shape.scale = attrs.scale;
  const int64_t most = cached ? r.bounds[Symbol::max_blocks] * r.inputs[kIndexK].fixed(2)
                              : ceil_div(r.inputs[kIndexQ].bind(r.bounds)[0], attrs.stride);
  SelectPlan plan{.shape = shape,
                  .score = EADEM_CPU_DISPATCH(score_routine, cpu_device(r).isa())(r.inputs[kIndexK].dtype),
                  .keys = {attrs.stride},
                  .top_k = attrs.top_k,
                  .cached = cached,
                  .positions = round_up(most, kChunk),
                  .worker_floats = 0};
  plan.worker_floats = std::max(IndexScratch::floats(shape), plan.positions);
  const int64_t threads = cpu_device(r).pool().num_threads();
  return make_plan([plan](const KernelCall& call) { run_select(plan, call); },
                   threads * (plan.worker_floats + plan.score_floats()) * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kSelectInference{"cpu_chunks", Pass::inference, can_select, prepare_select};

}  // namespace

KernelList select_keys_kernels() { return {&kSelectInference}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
