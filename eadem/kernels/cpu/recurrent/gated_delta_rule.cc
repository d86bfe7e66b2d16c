// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/recurrent/gated_delta_rule.h"

#include <algorithm>
#include <type_traits>

#include "eadem/core/device/cpu_probe.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"
#include "eadem/kernels/cpu/recurrent/delta_rule.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/recurrent/gated_delta_rule.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/recurrent/delta_rule-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// Vectors of columns that many tokens go through together: kWideVecs where the first cache has room for their rows of S
// and for the rows of tokens that pass by them, else kBlockVecs. All of a step's sums stand in registers: 4 of a
// vector, and four of what a row of S is multiplied by. With two vectors, y, one chain, takes as long as all
// operations. Tokens of Qwen3-Next with AVX-512: on Emerald Rapids, whose first cache has 48 KB, 4 vectors take 15 %
// less than 2 (medians of nine turns, 512 and 2,048 tokens); on Zen 4, where it has 32 KB, 3 took 8 % longer than 2 and
// 4 took 5 %, measured before later tokens were fetched a line at a time.
inline constexpr int kBlockVecs = 2, kWideVecs = HWY_TARGET == HWY_AVX3 ? 4 : kBlockVecs;

template <typename Task>
HWY_INLINE void with_block_vecs(bool wide, Task&& task) {
  if constexpr (kWideVecs > kBlockVecs)
    if (wide) return task(std::integral_constant<int, kWideVecs>());
  task(std::integral_constant<int, kBlockVecs>());
}

// Copies the columns of S [rows, columns], block by block, to where each block lies alone, or back.
template <int kVecs>
HWY_INLINE void copy_blocks(float* blocks, float* state, int64_t rows, int64_t columns, bool back) {
  const auto copy = [&](int64_t c, int64_t width) {
    float *block = blocks + c * rows, *part = state + c;
    for (int64_t i = 0; i < rows; ++i, block += width, part += columns) {
      if (back)
        std::copy_n(block, width, part);
      else
        std::copy_n(part, width, block);
    }
  };
  for_each_column_block<kVecs>(
      columns, [&](int64_t c) { copy(c, kVecs * kLanes); }, copy);
}

// Fetches what a token of the next chunk has for columns from `c` on: rows of neighbouring tokens lie pages apart,
// where the processor fetches nothing by itself. Of q and k it fetches the same columns as of v and y, so that all of
// them are fetched by the time that the columns of S went by. One line at a time: as many at once as a token has would
// take all buffers of the first cache, for which rows wait that come from the second one.
template <int kVecs>
struct TokenFetch {
  static constexpr int64_t kLine = 16;  // floats
  static constexpr int64_t kLines = ceil_div(kVecs * kLanes, kLine), kSteps = 4 * kLines;

  HWY_INLINE TokenFetch(const DeltaRule& p, int64_t token, int64_t head, int64_t c)
      : rows{p.q + p.key_row(token, head) + c, p.k + p.key_row(token, head) + c, p.v + p.value_row(token, head) + c,
             p.y + p.value_row(token, head) + c} {}
  HWY_INLINE void operator()(int64_t step) const { fetch_far(rows[step % 4] + step / 4 * kLine); }

  const float* rows[4];
};

// The tokens of a chunk, from token `begin` on, for columns of S from `c` on that lie at `state`, `stride` apart. The
// row of S that a token writes is read for the next one while it is in registers.
template <int kVecs>
HWY_INLINE void delta_tokens(const DeltaRule& p, int64_t head, int64_t begin, int64_t tokens,
                             const DeltaChunkRows& chunk, float* state, int64_t stride, int64_t c, int64_t lanes) {
  const DeltaColumns<kVecs> columns{lanes};
  const int64_t rows = p.attrs.key_dim;
  DeltaReads<kVecs> reads = read_columns(columns, state, stride, chunk.at(0).faded, rows);
  for (int64_t i = 0; i < tokens; ++i) {
    const TokenFetch<kVecs> fetch(p, begin + i + kDeltaChunk, head, c);
    const DeltaTokenRows token = chunk.at(i);
    const int64_t row = p.value_row(begin + i, head) + c;
    const Vec beta = set(*token.beta);
    Vec d[kVecs];
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u)
      d[u] = hn::Mul(beta, hn::Sub(columns.at(p.v + row, u), hn::Add(reads.even[u], reads.odd[u])));
    const DeltaUpdate<kVecs> update =
        i + 1 < tokens
            ? update_columns<kVecs, true>(columns, state, state, stride, token, d, chunk.at(i + 1).faded, rows, fetch)
            : update_columns<kVecs, false>(columns, state, state, stride, token, d, nullptr, rows, fetch);
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) columns.put(update.y[u], p.y + row, u);
    reads = update.reads;
  }
}

// All tokens of a sequence, for one value head. `scratch`: a state, then the rows of a chunk. The columns of S that a
// block has stay in the first cache while a chunk of tokens goes through them. Of several tokens each block lies alone
// in scratch: as parts of rows of a power of two in bytes, its lines would share a few sets of that cache.
template <int kVecs>
void delta_blocks(const DeltaRule& p, int64_t first, int64_t end, int64_t head, float* state, float* scratch) {
  const int64_t rows = p.attrs.key_dim, columns = p.attrs.value_dim;
  if (state == nullptr)
    std::fill_n(scratch, p.state_size(), 0.0f);
  else
    copy_blocks<kVecs>(scratch, state, rows, columns, false);
  const DeltaChunkRows chunk{scratch + p.state_size(), p.attrs};
  for (int64_t begin = first; begin < end; begin += kDeltaChunk) {
    const int64_t tokens = std::min(kDeltaChunk, end - begin);
    make_chunk_rows(chunk, p, begin, tokens, head);
    for_each_column_block<kVecs>(
        columns,
        [&](int64_t c) {
          delta_tokens<kVecs>(p, head, begin, tokens, chunk, scratch + c * rows, kVecs * kLanes, c, kLanes);
        },
        [&](int64_t c, int64_t lanes) {
          delta_tokens<1>(p, head, begin, tokens, chunk, scratch + c * rows, lanes, c, lanes);
        });
  }
  if (state != nullptr) copy_blocks<kVecs>(scratch, state, rows, columns, true);
}

// Updates the state of a head by a few tokens in place, without a copy of it in scratch.
void delta_in_place(const DeltaRule& p, int64_t begin, int64_t end, int64_t head, float* state, float* scratch) {
  const int64_t rows = p.attrs.key_dim, columns = p.attrs.value_dim;
  const DeltaChunkRows chunk{scratch, p.attrs};
  make_chunk_rows(chunk, p, begin, end - begin, head);
  for (int64_t i = 0; begin + i < end; ++i) {
    const int64_t row = p.value_row(begin + i, head);
    delta_step({.before = state, .after = state, .stride = columns, .v = p.v + row, .y = p.y + row}, chunk.at(i), rows,
               columns);
  }
}

void delta_sequence(const DeltaRule& p, int64_t sequence, int64_t head, float* scratch) {
  const int64_t first = p.query_start[sequence], end = p.query_start[sequence + 1];
  float* const state = p.slots != nullptr && p.slots[sequence] >= 0
                           ? p.state + (p.slots[sequence] * p.attrs.value_heads + head) * p.state_size()
                           : nullptr;
  if (state != nullptr && end - first < kDeltaTokensInBlocks)
    return delta_in_place(p, first, end, head, state, scratch);
  const int64_t wide_bytes = kWideVecs * kLanes * p.attrs.key_dim * static_cast<int64_t>(sizeof(float));
  with_block_vecs(3 * wide_bytes <= 2 * p.first_cache,
                  [&](auto vecs) { delta_blocks<decltype(vecs)::value>(p, first, end, head, state, scratch); });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(delta_sequence);

extern const Kernel kGatedDeltaRuleBackward;  // gated_delta_rule_backward.cc

namespace {

Verdict can_delta_rule(const KernelRequest& r) {
  Requirements requirements(r);
  for (const size_t port : {0, 1, 2, 3, 4}) requirements.f32("q, k, v, a or b", r.inputs[port]);
  // An element costs four operations on vectors, of which one is no fused product and sum.
  return requirements.f32("y", r.outputs[0]).verdict({.flops_share = 0.7, .reason = "token by token"});
}

PlanPtr prepare_delta_rule(const KernelRequest& r, Context&) {
  const auto task = EADEM_CPU_DISPATCH(delta_sequence, cpu_device(r).isa());
  const auto attrs = r.attrs.get<GatedDeltaRuleAttrs>();
  const int64_t floats =
      round_up(attrs.key_dim * attrs.value_dim + kDeltaChunk * DeltaChunkRows::floats_per_token(attrs), 16);
  return make_plan(
      [task, attrs, floats, first_cache = cache_bytes(1)](const KernelCall& call) {
        DeltaRule p{.attrs = attrs,
                    .q = elements<const float>(call.inputs[0]),
                    .k = elements<const float>(call.inputs[1]),
                    .v = elements<const float>(call.inputs[2]),
                    .a = elements<const float>(call.inputs[3]),
                    .b = elements<const float>(call.inputs[4]),
                    .a_log = elements<const float>(call.inputs[5]),
                    .dt_bias = elements<const float>(call.inputs[6]),
                    .query_start = elements<const int32_t>(call.inputs[7]),
                    .sequences = call.inputs[7].shape[0] - 1,
                    .y = elements<float>(call.outputs[0]),
                    .first_cache = first_cache};
        if (attrs.cached) {
          p.slots = elements<const int32_t>(call.inputs[8]);
          p.state = elements<float>(call.outputs[1]);
        }
        cpu_device(call).pool().parallel_shares(p.sequences * attrs.value_heads, [&](int64_t index, int worker) {
          task(p, index / attrs.value_heads, index % attrs.value_heads,
               static_cast<float*>(call.scratch.data) + worker * floats);
        });
      },
      cpu_device(r).pool().num_threads() * floats * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kDeltaRule{"cpu_recurrent", Pass::forward, can_delta_rule, prepare_delta_rule};
constexpr Kernel kDeltaRuleInference{"cpu_recurrent", Pass::inference, can_delta_rule, prepare_delta_rule};

}  // namespace

KernelList gated_delta_rule_kernels() { return {&kDeltaRule, &kDeltaRuleInference, &kGatedDeltaRuleBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
