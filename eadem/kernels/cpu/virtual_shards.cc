// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/virtual_shards.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

namespace {

// ---- cut_columns

Verdict can_cut(const KernelRequest& r) {
  return Requirements(r).one_of("x", r.inputs[0], {DType::f32, DType::bf16}).verdict();
}

void run_cut(const KernelCall& call) {
  const TensorView& x = call.inputs[0];
  const auto size = static_cast<int64_t>(dtype_size(x.dtype)), row_bytes = x.shape[1] * size;
  const auto* from = static_cast<const char*>(x.data);
  cpu_device(call).pool().parallel_ranges(
      x.shape[0], std::max<int64_t>(1, 32768 / row_bytes), [&](int64_t begin, int64_t end) {
        int64_t offset = 0;
        for (const TensorView& y : call.outputs) {
          const int64_t bytes = y.shape[1] * size;
          for (int64_t row = begin; row < end && y.defined(); ++row)
            std::memcpy(static_cast<char*>(y.data) + row * bytes, from + row * row_bytes + offset,
                        static_cast<size_t>(bytes));
          offset += bytes;
        }
      });
}

PlanPtr prepare_cut(const KernelRequest&, Context&) { return make_plan(run_cut); }

constexpr Kernel kCut{"cpu_copy", Pass::inference, can_cut, prepare_cut};

// ---- shard_sum

// A stack of 8 sums of this many elements stays in the first cache.
constexpr int64_t kSumChunk = 512;
constexpr int kMostDepth = 8;
constexpr size_t kMostTerms = 64;
using Terms = std::array<const float*, kMostTerms>;  // of a sum, in order

Verdict can_add(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.one_of("a partial sum", type, {DType::f32});
  return requirements.one_of("y", r.outputs[0], {DType::f32, DType::bf16}).verdict();
}

void store(float* to, const float* sum, int64_t n) { std::memcpy(to, sum, static_cast<size_t>(n) * sizeof(float)); }
void store(bf16_t* to, const float* sum, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = bf16_t::from_float(sum[i]);
}

// Writes the sum that `steps` describe of terms of `count` elements to y. Every element is added by itself, so that it
// does not matter how they are divided over threads.
template <typename T>
void add_terms(ThreadPool& pool, T* y, std::span<const float* const> terms, std::span<const int> steps, int64_t count) {
  pool.parallel_ranges((count + kSumChunk - 1) / kSumChunk, 16, [&](int64_t first, int64_t last) {
    std::array<std::array<float, kSumChunk>, kMostDepth> stack;
    for (int64_t begin = first * kSumChunk; begin < std::min(count, last * kSumChunk); begin += kSumChunk) {
      const int64_t n = std::min(kSumChunk, count - begin);
      size_t depth = 0;
      for (const int step : steps) {
        if (step != SumTree::kAdd) {
          store(stack[depth++].data(), terms[static_cast<size_t>(step)] + begin, n);
          continue;
        }
        --depth;
        float* sum = stack[depth - 1].data();
        const float* more = stack[depth].data();
        for (int64_t i = 0; i < n; ++i) sum[i] += more[i];
      }
      store(y + begin, stack[0].data(), n);
    }
  });
}

void add_terms(ThreadPool& pool, const TensorView& y, std::span<const float* const> terms, std::span<const int> steps) {
  if (y.dtype == DType::f32)
    add_terms(pool, elements<float>(y), terms, steps, y.num_elements());
  else
    add_terms(pool, elements<bf16_t>(y), terms, steps, y.num_elements());
}

Terms partials_of(const KernelCall& call) {
  Terms terms{};
  for (size_t i = 0; i < call.inputs.size(); ++i) terms[i] = elements<const float>(call.inputs[i]);
  return terms;
}

// The steps of a sum of these terms.
std::vector<int> steps_of(const SumTree& tree, std::span<const ShardRange> terms) {
  std::vector<int> steps = tree.steps(terms);
  EADEM_CHECK(terms.size() <= kMostTerms && SumTree::depth_of(steps) <= kMostDepth, "a sum of {} terms, depth {}",
              terms.size(), SumTree::depth_of(steps));
  return steps;
}

std::vector<ShardRange> single_shards(ShardRange range) {
  std::vector<ShardRange> shards;
  for (int i = range.begin; i < range.end; ++i) shards.push_back({i, i + 1});
  return shards;
}

PlanPtr prepare_alone(const ShardSumAttrs& attrs) {
  return make_plan([steps = steps_of(attrs.tree, single_shards(attrs.own()))](const KernelCall& call) {
    add_terms(cpu_device(call).pool(), call.outputs[0], partials_of(call), steps);
  });
}

// A sum that this rank sends: of the partial sums from `first` on.
struct OwnSum {
  size_t first;
  std::vector<int> steps;
};

struct GatheredSum {
  std::vector<OwnSum> own;
  std::vector<size_t> places;  // of the terms of the whole sum, among the sums that all ranks gather
  std::vector<int> steps;
  int64_t most = 0;  // sums of a rank; the places of a rank with fewer are not read
  Communicator* communicator = nullptr;
};

void run_gathered(const GatheredSum& plan, const KernelCall& call) {
  ThreadPool& pool = cpu_device(call).pool();
  const Terms partials = partials_of(call);
  const int64_t count = call.inputs[0].num_elements(), ranks = plan.communicator->size();
  auto* scratch = static_cast<float*>(call.scratch.data);
  const TensorView sent(scratch, DType::f32, Shape{plan.most * count});
  const TensorView gathered(scratch + plan.most * count, DType::f32, Shape{ranks, plan.most * count});
  for (size_t i = 0; i < plan.own.size(); ++i)
    add_terms(pool, scratch + static_cast<int64_t>(i) * count, std::span(partials).subspan(plan.own[i].first),
              plan.own[i].steps, count);
  plan.communicator->all_gather(call.context->device, gathered, sent);
  Terms terms{};
  for (size_t i = 0; i < plan.places.size(); ++i)
    terms[i] = gathered.as<const float>() + static_cast<int64_t>(plan.places[i]) * count;
  add_terms(pool, call.outputs[0], terms, plan.steps);
}

PlanPtr prepare_sum(const KernelRequest& r, Context& context) {
  const auto& attrs = r.attrs.get<ShardSumAttrs>();
  if (attrs.ranks() == 1) return prepare_alone(attrs);
  GatheredSum plan{.most = attrs.most_sums(), .communicator = &context.mesh.along(attrs.over)};
  for (const ShardRange& sum : attrs.sums_of(attrs.rank))
    plan.own.push_back({static_cast<size_t>(sum.begin - attrs.own().begin), steps_of(attrs.tree, single_shards(sum))});
  std::vector<ShardRange> all;
  for (int rank = 0; rank < attrs.ranks(); ++rank) {
    const std::vector<ShardRange> sums = attrs.sums_of(rank);
    for (size_t i = 0; i < sums.size(); ++i) {
      all.push_back(sums[i]);
      plan.places.push_back(static_cast<size_t>(rank * plan.most) + i);
    }
  }
  plan.steps = steps_of(attrs.tree, all);
  const int64_t bytes = r.inputs[0].size_bytes(r.bounds) * plan.most * (attrs.ranks() + 1);
  return make_plan([plan = std::move(plan)](const KernelCall& call) { run_gathered(plan, call); }, bytes);
}

constexpr Kernel kSum{"cpu_communicator", Pass::inference, can_add, prepare_sum};

}  // namespace

KernelList cut_columns_kernels() { return {&kCut}; }
KernelList shard_sum_kernels() { return {&kSum}; }

}  // namespace eadem::kernels::cpu
