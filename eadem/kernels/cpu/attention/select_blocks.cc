// SPDX-License-Identifier: Apache-2.0
//
// select_blocks. A task is a token and a kv head: the scores of its queries with the compressed keys that it sees,
// their softmax, which is added over the heads in order, and the weights of blocks, each a sum over rows in order.
#include <algorithm>
#include <numeric>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/attention/compressed_attention.h"
#include "eadem/kernels/cpu/attention/selected_call.h"
#include "eadem/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/select_blocks.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/gathered_rows-inl.h"
#include "eadem/kernels/cpu/dispatch.h"

#ifndef EADEM_KERNELS_CPU_SELECT_BLOCKS_CALL_
#define EADEM_KERNELS_CPU_SELECT_BLOCKS_CALL_
namespace eadem::kernels::cpu {
namespace {

// Writes the sums over the heads of a group of the weights of the rows that a token sees, and returns their number.
using WeighRows = int64_t (*)(float* sums, const SelectedCall& c, const SelectedToken& t, int64_t kv_head,
                              float* scratch);

}  // namespace
}  // namespace eadem::kernels::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

template <typename T>
int64_t weigh_rows(float* sums, const SelectedCall& c, const SelectedToken& t, int64_t kv_head, float* scratch) {
  const SelectedScratch s(c, scratch);
  const int64_t count = list_positions(s.positions, c, t, kv_head);
  if (count == 0) return 0;
  load_group(s.q, c, c.a.q, c.a.head_dim, t, kv_head);
  multiply_gathered(s.weights, c, s, s.q, c.a.head_dim, count,
                    [&](int64_t first, int64_t own) { gather_keys<T>(s, c, t, kv_head, first, own); });
  std::fill_n(sums, count, 0.0f);
  for (int64_t r = 0; r < c.a.group(); ++r) {
    float* weights = s.weights + r * c.most_keys();
    map(
        weights, count, [scale = set(c.a.scale)](Vec v) { return hn::Mul(v, scale); },
        static_cast<const float*>(weights));
    softmax_row(weights, weights, count);
    map(
        sums, count, [](Vec acc, Vec v) { return hn::Add(acc, v); }, static_cast<const float*>(sums),
        static_cast<const float*>(weights));
  }
  return count;
}

WeighRows weigh_routine(DType dtype) {
  return with_dtype(dtype, [](auto* type) -> WeighRows { return weigh_rows<ElementOf<decltype(type)>>; });
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(weigh_routine);

namespace {

enum SelectBlocksInput { kBlocksQ, kBlocksK, kBlocksQueryStart, kBlocksKvLength, kBlocksBlockTable };

Verdict can_select_blocks(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("q", r.inputs[kBlocksQ])
      .one_of("k", r.inputs[kBlocksK], kStorageDTypes)
      .one_of("query_start", r.inputs[kBlocksQueryStart], {DType::i32})
      .one_of("kv_length", r.inputs[kBlocksKvLength], {DType::i32});
  return requirements.verdict();
}

// weights[j], j < blocks, from `rows` sums of rows that begin with the grid's first. Row r is made of the strides
// r - length / stride + 1, …, r, and block j of span / stride of them.
void weigh_blocks(float* weights, int64_t blocks, const float* sums, int64_t rows, const SelectBlocksAttrs& attrs) {
  const int64_t width = attrs.span / attrs.grid.stride, reach = attrs.grid.length / attrs.grid.stride;
  for (int64_t j = 0; j < blocks; ++j) {
    const int64_t first = j * width, end = first + width;  // strides
    float weight = 0.0f;
    for (int64_t i = std::max<int64_t>(0, first - reach + 1); i < std::min(rows, end); ++i)  // row i + reach - 1
      weight += static_cast<float>(std::min(i + reach, end) - std::max(i, first)) * sums[i];
    weights[j] = weight;
  }
}

// The blocks that come first, and those of the largest weights, ascending, then -1. `order` has room for all blocks.
void choose_blocks(int32_t* chosen, const float* weights, int64_t blocks, const SelectBlocksAttrs& attrs,
                   int32_t* order) {
  const int64_t kept = std::min(attrs.top_n, blocks);
  std::iota(order, order + blocks, 0);
  if (kept < blocks) {
    const auto comes_first = [&](int32_t j) { return j < attrs.first_blocks || j >= blocks - attrs.local_blocks; };
    const auto is_better = [&](int32_t x, int32_t y) {
      if (comes_first(x) != comes_first(y)) return comes_first(x);
      return weights[x] != weights[y] ? weights[x] > weights[y] : x < y;
    };
    std::nth_element(order, order + kept, order + blocks, is_better);
    std::sort(order, order + kept);
  }
  std::copy(order, order + kept, chosen);
  std::fill(chosen + kept, chosen + attrs.top_n, -1);
}

struct BlocksPlan {
  SelectedCall shape;
  SelectBlocksAttrs attrs;
  WeighRows weigh;
  int64_t blocks;  // the most that a token sees

  int64_t worker_floats() const {
    return SelectedScratch::floats(shape) + round_up(shape.most_keys() + 2 * blocks, kPanelWidth);
  }
};

void run_select_blocks(const BlocksPlan& plan, const KernelCall& call) {
  SelectedCall c = plan.shape;
  EADEM_CHECK(call.inputs[kBlocksK].is_contiguous(), "keys {}", to_string(call.inputs[kBlocksK]));
  c.a.q = elements<const float>(call.inputs[kBlocksQ]);
  c.a.k = call.inputs[kBlocksK].data;
  c.a.query_start = elements<const int32_t>(call.inputs[kBlocksQueryStart]);
  c.a.kv_length = elements<const int32_t>(call.inputs[kBlocksKvLength]);
  c.a.sequences = call.inputs[kBlocksKvLength].shape[0];
  if (plan.attrs.source == KvSource::cached) {
    c.a.block_table = elements<const int32_t>(call.inputs[kBlocksBlockTable]);
    c.a.max_blocks = call.inputs[kBlocksBlockTable].shape[1];
    c.a.block_size = call.inputs[kBlocksK].shape[2];
  }
  auto* selection = elements<int32_t>(call.outputs[0]);
  cpu_device(call).pool().parallel_for(c.a.query_start[c.a.sequences] * c.a.kv_heads, [&](int64_t i, int worker) {
    float* scratch = static_cast<float*>(call.scratch.data) + worker * plan.worker_floats();
    float* sums = scratch + SelectedScratch::floats(c);
    float* weights = sums + c.most_keys();
    const SelectedToken t = token_at(c.a, i / c.a.kv_heads);
    const int64_t blocks = t.position / plan.attrs.span + 1;
    const int64_t rows = plan.weigh(sums, c, t, i % c.a.kv_heads, scratch);
    weigh_blocks(weights, blocks, sums, rows, plan.attrs);
    choose_blocks(selection + i * plan.attrs.top_n, weights, blocks, plan.attrs,
                  reinterpret_cast<int32_t*>(weights + plan.blocks));
  });
}

PlanPtr prepare_select_blocks(const KernelRequest& r, Context&) {
  const SelectBlocksAttrs& attrs = r.attrs.get<SelectBlocksAttrs>();
  Attention a{};
  a.heads = attrs.heads;
  a.kv_heads = attrs.kv_heads;
  a.head_dim = attrs.head_dim;
  a.scale = attrs.scale;
  const int64_t rows = most_compressed_rows(r, attrs.grid, attrs.source);
  // A block of a cache, or a step, may end with a part of a stride.
  const BlocksPlan plan{.shape = {.a = a, .selection = nullptr, .entries = rows, .span = 1, .grid = attrs.grid},
                        .attrs = attrs,
                        .weigh = EADEM_CPU_DISPATCH(weigh_routine, cpu_device(r).isa())(r.inputs[kBlocksK].dtype),
                        .blocks = (rows + 1) * attrs.grid.stride / attrs.span + 1};
  return make_plan([plan](const KernelCall& call) { run_select_blocks(plan, call); },
                   cpu_device(r).pool().num_threads() * plan.worker_floats() * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kBlocksInference{"cpu_gather", Pass::inference, can_select_blocks, prepare_select_blocks};

}  // namespace

KernelList select_blocks_kernels() { return {&kBlocksInference}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
