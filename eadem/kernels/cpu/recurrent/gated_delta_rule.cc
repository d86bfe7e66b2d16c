// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/recurrent/gated_delta_rule.h"

#include <algorithm>
#include <type_traits>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/recurrent/delta_groups.h"
#include "eadem/kernels/cpu/recurrent/delta_rule.h"
#include "eadem/kernels/cpu/support.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/recurrent/gated_delta_rule.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/recurrent/delta_groups-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// From so many tokens of a sequence on, S is copied to blocks of columns in scratch and back; fewer are computed in
// place.
constexpr int64_t kDeltaTokensInBlocks = 8;

// Copies the columns of S [rows, columns], block by block, to where each block lies alone, or back.
HWY_INLINE void copy_blocks(float* blocks, float* state, int64_t rows, int64_t columns, bool back) {
  for (int64_t i = 0; i < rows; ++i, state += columns) {
    const auto copy = [&](int64_t c, int64_t width) {
      float *block = blocks + c * rows + i * width, *part = state + c;
      if (back)
        std::copy_n(block, width, part);
      else
        std::copy_n(part, width, block);
    };
    for_each_column_block<kGroupVecs>(
        columns, [&](int64_t c) { copy(c, kGroupVecs * kLanes); }, copy);
  }
}

// The tokens of one sequence for one value head.
class DeltaSequence {
 public:
  DeltaSequence(const DeltaRule& p, int64_t sequence, int64_t head, float* scratch)
      : p_(p),
        head_(head),
        first_(p.query_start[sequence]),
        end_(p.query_start[sequence + 1]),
        rows_(p.attrs.key_dim),
        columns_(p.attrs.value_dim),
        state_(p.slots != nullptr && p.slots[sequence] >= 0
                   ? p.state + (p.slots[sequence] * p.attrs.value_heads + head) * p.attrs.state_floats()
                   : nullptr),
        scratch_(p.attrs, scratch) {}

  void run() {
    if (first_ == end_) return;
    if (p_.attrs.channel_decay)
      run<true>();
    else
      run<false>();
  }

 private:
  template <bool kChannels>
  void run() {
    if (state_ != nullptr && end_ - first_ < kDeltaTokensInBlocks)
      in_place<kChannels>();
    else
      in_blocks<kChannels>();
  }

  // The columns of S that a block has stay in the first cache while a chunk of groups goes through them. Each block
  // lies alone in scratch: as parts of rows of a power of two in bytes, its lines would share a few sets of that cache.
  template <bool kChannels>
  void in_blocks() {
    if (state_ == nullptr)
      std::fill_n(scratch_.s, rows_ * columns_, 0.0f);
    else
      copy_blocks(scratch_.s, matrix(), rows_, columns_, false);
    for_each_chunk([&](int64_t begin, int64_t tokens, int64_t before) {
      const auto block = [&](auto vecs, int64_t c, int64_t lanes) {
        constexpr int kVecs = decltype(vecs)::value;
        for_each_group(begin, tokens, before, [&](const DeltaGroup& group, int64_t token, int64_t come, int64_t count) {
          const int64_t width = kVecs > 1 ? kVecs * kLanes : lanes;
          const DeltaPart part = part_of(scratch_.s + c * rows_, width, token, c);
          const auto fetch = fetch_of<kVecs, kChannels>(token + kDeltaChunk * kDeltaGroup, c);
          const DeltaColumns<kVecs> columns{lanes};
          with_number(count, [&](auto number) {
            read_part<kVecs, decltype(number)::value>(columns, group, rows_, come, part, fetch);
          });
          if (come + count == kDeltaGroup) update_part<kChannels>(columns, group, rows_, part, fetch.rest());
        });
      };
      for_each_column_block<kGroupVecs>(
          columns_, [&](int64_t c) { block(std::integral_constant<int, kGroupVecs>(), c, kLanes); },
          [&](int64_t c, int64_t lanes) { block(std::integral_constant<int, 1>(), c, lanes); });
    });
    if (state_ != nullptr) copy_blocks(scratch_.s, matrix(), rows_, columns_, true);
  }

  // A few tokens, without a copy of S in scratch. Where it is read for few of them, whole rows are.
  template <bool kChannels>
  void in_place() {
    for_each_chunk([&](int64_t begin, int64_t tokens, int64_t before) {
      for_each_group(begin, tokens, before, [&](const DeltaGroup& group, int64_t token, int64_t come, int64_t count) {
        with_number(count, [&](auto number) {
          constexpr int kTokens = decltype(number)::value;
          constexpr int kVecs = kGroupVecs * kDeltaGroup / kTokens;
          const auto read = [&](auto vecs, int64_t c, int64_t lanes) {
            const DeltaColumns<decltype(vecs)::value> columns{lanes};
            read_part<decltype(vecs)::value, kTokens>(columns, group, rows_, come,
                                                      part_of(matrix() + c, columns_, token, c), NoFetch());
          };
          for_each_column_block<kVecs>(
              columns_, [&](int64_t c) { read(std::integral_constant<int, kVecs>(), c, kLanes); },
              [&](int64_t c, int64_t lanes) { read(std::integral_constant<int, 1>(), c, lanes); });
        });
        if (come + count < kDeltaGroup) return;
        const auto update = [&](auto vecs, int64_t c, int64_t lanes) {
          update_part<kChannels>(DeltaColumns<decltype(vecs)::value>{lanes}, group, rows_,
                                 part_of(matrix() + c, columns_, token, c), NoFetch());
        };
        for_each_column_block<kGroupVecs>(
            columns_, [&](int64_t c) { update(std::integral_constant<int, kGroupVecs>(), c, kLanes); },
            [&](int64_t c, int64_t lanes) { update(std::integral_constant<int, 1>(), c, lanes); });
      });
    });
  }

  // The fetch of the group that begins at `token`. Where that is behind the sequence's last token, it is a group of the
  // first tokens for the next head, which is likely to be the next task of the same thread.
  template <int kVecs, bool kChannels>
  HWY_INLINE GroupFetch<kVecs, kChannels> fetch_of(int64_t token, int64_t c) const {
    const bool is_next = token >= end_ && head_ + 1 < p_.attrs.value_heads;
    return {p_, is_next ? token - end_ + first_ : token, is_next ? head_ + 1 : head_, c};
  }

  float* matrix() const { return state_ + p_.attrs.matrix_at(); }

  DeltaPart part_of(float* s, int64_t stride, int64_t token, int64_t c) const {
    const int64_t row = p_.value_row(token, head_) + c;
    return {s, stride, p_.v + row, p_.y + row, p_.attrs.value_heads * columns_, scratch_.corrections + c, columns_};
  }

  // Calls chunk(begin, tokens, before) for chunks of whole groups, whose rows and products are in scratch then.
  // `before` tokens of the first group are from an earlier step. The last group of a sequence need not be whole.
  template <typename Chunk>
  void for_each_chunk(Chunk&& chunk) {
    int64_t before = take_group(), begin = first_;
    for (int64_t tokens; begin < end_; begin += tokens) {
      tokens = std::min(kDeltaChunk * kDeltaGroup - before, end_ - begin);
      make_groups(scratch_, p_, begin, tokens, before, head_);
      chunk(begin, tokens, before);
      if (begin + tokens == end_) keep_group(before + tokens);
      before = 0;
    }
  }

  // Calls each(group, first new token, tokens that have come, new tokens).
  template <typename Each>
  HWY_INLINE void for_each_group(int64_t begin, int64_t tokens, int64_t before, Each&& each) {
    for (int64_t at = before; at < before + tokens; at = round_up(at + 1, kDeltaGroup))
      each(scratch_.group(at / kDeltaGroup), begin + at - before, at % kDeltaGroup,
           std::min(kDeltaGroup - at % kDeltaGroup, before + tokens - at));
  }

  // Copies the tokens of a group that the state keeps to scratch, and returns their number. It is bounded, so that no
  // state can lead outside of scratch.
  int64_t take_group() {
    if (state_ == nullptr) return 0;
    const GatedDeltaRuleAttrs& attrs = p_.attrs;
    const auto count = std::clamp<int64_t>(static_cast<int64_t>(state_[attrs.count_at()]), 0, kDeltaGroup - 1);
    const DeltaGroup group = scratch_.group(0);
    copy_keys(group, count, false);
    std::copy_n(state_ + attrs.corrections_at(), count * columns_, scratch_.corrections);
    std::copy_n(state_ + attrs.fade_at(), attrs.decays_of_head(), group.fade);
    return count;
  }

  // Copies the last group back, if it is not whole; `tokens` are all tokens of the groups in scratch.
  void keep_group(int64_t tokens) {
    if (state_ == nullptr) return;
    const GatedDeltaRuleAttrs& attrs = p_.attrs;
    const int64_t count = tokens % kDeltaGroup;
    state_[attrs.count_at()] = static_cast<float>(count);
    if (count == 0) return;
    const DeltaGroup group = scratch_.group(tokens / kDeltaGroup);
    copy_keys(group, count, true);
    std::copy_n(scratch_.corrections, count * columns_, state_ + attrs.corrections_at());
    std::copy_n(group.fade, attrs.decays_of_head(), state_ + attrs.fade_at());
  }

  // Keys of tokens from the state to a group, or back.
  void copy_keys(const DeltaGroup& group, int64_t tokens, bool back) {
    for (int64_t t = 0; t < tokens; ++t) {
      float* kept = state_ + p_.attrs.keys_at() + t * rows_;
      for_each_column_block<1>(
          rows_, [&](int64_t c) { copy_key(rows_from(group, c), t, kept + c, kLanes, back); },
          [&](int64_t c, int64_t lanes) { copy_key(rows_from(group, c), t, kept + c, lanes, back); });
    }
  }
  static HWY_INLINE void copy_key(float* rows, int64_t token, float* kept, int64_t lanes, bool back) {
    float* key = rows + (kOwnKeyRow + token) * kLanes;
    if (back)
      std::copy_n(key, lanes, kept);
    else
      store(load_n(kept, lanes), key);
  }

  const DeltaRule& p_;
  int64_t head_, first_, end_, rows_, columns_;
  float* state_;  // of this head, or null
  DeltaGroupScratch scratch_;
};

void delta_sequence(const DeltaRule& p, int64_t sequence, int64_t head, float* scratch) {
  DeltaSequence(p, sequence, head, scratch).run();
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
  return requirements.f32("y", r.outputs[0]).verdict({.flops_share = 0.75, .reason = "groups of four tokens"});
}

PlanPtr prepare_delta_rule(const KernelRequest& r, Context&) {
  const auto task = EADEM_CPU_DISPATCH(delta_sequence, cpu_device(r).isa());
  const auto attrs = r.attrs.get<GatedDeltaRuleAttrs>();
  const int64_t floats = DeltaGroupScratch::floats(attrs);
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
