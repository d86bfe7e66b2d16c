// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/recurrent/gated_delta_rule.h"

#include <algorithm>

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

// Vectors of columns that many tokens go through together. Their rows of S and those of a token fit the first cache;
// all of a step's sums stand in registers: 4 kVecs of them, and four of what a row of S is multiplied by. Measured on
// Zen 4 with AVX-512, 512 tokens: 3 vectors took 8 % longer and 4, whose block fills the first cache, 5 %.
inline constexpr int kBlockVecs = 2;

// Copies the columns of S [rows, columns], block by block, to where each block lies alone, or back.
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
  for_each_column_block<kBlockVecs>(
      columns, [&](int64_t c) { copy(c, kBlockVecs * kLanes); }, copy);
}

// Fetches what a token of the next chunk has for columns from `c` on; with the first columns, its rows of q and k. Rows
// of neighbouring tokens lie pages apart, where the processor fetches nothing by itself.
template <int kVecs>
HWY_INLINE void fetch_token(const DeltaRule& p, int64_t token, int64_t head, int64_t c) {
  constexpr int64_t kLine = 16;  // floats
  if (c == 0)
    for (int64_t i = 0; i < p.attrs.key_dim; i += kLine) {
      fetch_far(p.q + p.key_row(token, head) + i);
      fetch_far(p.k + p.key_row(token, head) + i);
    }
  for (int64_t i = 0; i < kVecs * kLanes; i += kLine) {
    fetch_far(p.v + p.value_row(token, head) + c + i);
    fetch_far(p.y + p.value_row(token, head) + c + i);
  }
}

// The tokens of a chunk, from token `begin` on, for columns of S from `c` on that lie at `state`, `stride` apart. The
// row of S that a token writes is read for the next one while it is in registers.
template <int kVecs>
HWY_INLINE void delta_tokens(const DeltaRule& p, int64_t head, int64_t begin, int64_t tokens,
                             const DeltaChunkRows& chunk, float* state, int64_t stride, int64_t c, int64_t lanes) {
  const DeltaColumns<kVecs> columns{lanes};
  const int64_t rows = p.attrs.key_dim;
  DeltaReads<kVecs> reads = read_columns(columns, state, stride, chunk.at(0).faded, rows);
  for (int64_t i = 0; i < tokens; ++i) {
    fetch_token<kVecs>(p, begin + i + kDeltaChunk, head, c);
    const DeltaTokenRows token = chunk.at(i);
    const int64_t row = p.value_row(begin + i, head) + c;
    const Vec beta = set(*token.beta);
    Vec d[kVecs];
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u)
      d[u] = hn::Mul(beta, hn::Sub(columns.at(p.v + row, u), hn::Add(reads.even[u], reads.odd[u])));
    const DeltaUpdate<kVecs> update =
        i + 1 < tokens
            ? update_columns<kVecs, true>(columns, state, state, stride, token, d, chunk.at(i + 1).faded, rows)
            : update_columns<kVecs, false>(columns, state, state, stride, token, d, nullptr, rows);
#pragma GCC unroll kUnroll
    for (int u = 0; u < kVecs; ++u) columns.put(update.y[u], p.y + row, u);
    reads = update.reads;
  }
}

// All tokens of a sequence, for one value head. `scratch`: a state, then the rows of a chunk. The columns of S that a
// block has stay in the first cache while a chunk of tokens goes through them. Of several tokens each block lies alone
// in scratch: as parts of rows of a power of two in bytes, its lines would share a few sets of that cache.
void delta_sequence(const DeltaRule& p, int64_t sequence, int64_t head, float* scratch) {
  const int64_t rows = p.attrs.key_dim, columns = p.attrs.value_dim, first = p.query_start[sequence],
                end = p.query_start[sequence + 1];
  const bool kept = p.slots != nullptr && p.slots[sequence] >= 0;
  const bool in_blocks = !kept || end - first >= kDeltaTokensInBlocks;
  float* state = kept ? p.state + (p.slots[sequence] * p.attrs.value_heads + head) * p.state_size() : scratch;
  if (!kept)
    std::fill_n(scratch, p.state_size(), 0.0f);
  else if (in_blocks)
    copy_blocks(scratch, state, rows, columns, false);
  const DeltaChunkRows chunk{scratch + p.state_size(), rows};
  for (int64_t begin = first; begin < end; begin += kDeltaChunk) {
    const int64_t tokens = std::min(kDeltaChunk, end - begin);
    for (int64_t i = 0; i < tokens; ++i) make_token_rows(chunk.at(i), p, begin + i, head);
    if (!in_blocks) {
      for (int64_t i = 0; i < tokens; ++i) {
        const int64_t row = p.value_row(begin + i, head);
        delta_step({.before = state, .after = state, .stride = columns, .v = p.v + row, .y = p.y + row}, chunk.at(i),
                   rows, columns);
      }
      continue;
    }
    for_each_column_block<kBlockVecs>(
        columns,
        [&](int64_t c) {
          delta_tokens<kBlockVecs>(p, head, begin, tokens, chunk, scratch + c * rows, kBlockVecs * kLanes, c, kLanes);
        },
        [&](int64_t c, int64_t lanes) {
          delta_tokens<1>(p, head, begin, tokens, chunk, scratch + c * rows, lanes, c, lanes);
        });
  }
  if (kept && in_blocks) copy_blocks(scratch, state, rows, columns, true);
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
  const int64_t floats = round_up(attrs.key_dim * attrs.value_dim + kDeltaChunk * (4 * attrs.key_dim + 1), 16);
  return make_plan(
      [task, attrs, floats](const KernelCall& call) {
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
                    .y = elements<float>(call.outputs[0])};
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
