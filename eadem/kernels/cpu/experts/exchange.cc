// SPDX-License-Identifier: Apache-2.0
//
// expert_dispatch and expert_combine: copies of rows around a communicator's all_to_all_parts. Rows leave in the order
// of experts, so those for one rank are neighbours and go as they lie. They arrive by rank; between that and the order
// of experts they are copied once more, in scratch.
#include <algorithm>
#include <cstring>
#include <span>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/expert_exchange.h"

namespace eadem::kernels::cpu {

namespace {

void copy_rows(const TensorView& to, int64_t to_row, const TensorView& from, int64_t from_row, int64_t rows) {
  const int64_t bytes = from.shape[1] * static_cast<int64_t>(dtype_size(from.dtype));
  if (rows * bytes > 0)
    std::memcpy(static_cast<std::byte*>(to.data) + to_row * bytes,
                static_cast<const std::byte*>(from.data) + from_row * bytes, static_cast<size_t>(rows * bytes));
}

// The rows of a rank's experts among all that stand in the order of experts.
PartRange rows_of(const ExpertExchangeAttrs& attrs, const int32_t* offsets, int rank) {
  const PartRange experts = attrs.experts_of(rank);
  return {offsets[experts.begin], offsets[experts.begin + experts.size] - offsets[experts.begin]};
}

PartRange elements_of(PartRange rows, int64_t hidden) { return {rows.begin * hidden, rows.size * hidden}; }

// How a call divides its scratch: the parts of both sides, where the next row of each rank lies, the counts to be sent,
// and rows by rank.
struct ExchangeScratch {
  ExchangeScratch(const ExpertExchangeAttrs& attrs, void* memory) {
    const auto ranks = static_cast<size_t>(attrs.ranks);
    auto* ranges = static_cast<PartRange*>(memory);
    received = {ranges, ranks};
    sent = {ranges + ranks, ranks};
    next = {reinterpret_cast<int64_t*>(ranges + 2 * ranks), ranks};
    counts = reinterpret_cast<int32_t*>(next.data() + ranks);
    rows = static_cast<std::byte*>(memory) + head_bytes(attrs);
  }
  static int64_t head_bytes(const ExpertExchangeAttrs& attrs) {
    const int64_t words = 5 * attrs.ranks * static_cast<int64_t>(sizeof(int64_t));
    return round_up(words + attrs.ranks * attrs.most_experts() * static_cast<int64_t>(sizeof(int32_t)), 64);
  }
  std::span<PartRange> received, sent;
  std::span<int64_t> next;
  int32_t* counts;
  std::byte* rows;
};

// Sets how many rows came from each rank in all, as parts one after another, and `next` to their beginnings.
void set_parts(const ExpertExchangeAttrs& attrs, const int32_t* counts, std::span<PartRange> parts,
               std::span<int64_t> next) {
  const int64_t most = attrs.most_experts();
  int64_t begin = 0;
  for (int64_t rank = 0; rank < attrs.ranks; ++rank) {
    int64_t rows = 0;
    for (int64_t e = 0; e < most; ++e) rows += counts[rank * most + e];
    next[static_cast<size_t>(rank)] = begin;
    parts[static_cast<size_t>(rank)] = {begin, rows};
    begin += rows;
  }
}

// Calls run(row by expert, row by rank, rows) for every run of rows that are neighbours in both orders.
template <typename Run>
void for_each_run(const ExpertExchangeAttrs& attrs, const int32_t* counts, std::span<int64_t> next, const Run& run) {
  const int64_t most = attrs.most_experts();
  int64_t row = 0;
  for (int64_t e = 0; e < attrs.own_experts().size; ++e)
    for (int64_t rank = 0; rank < attrs.ranks; ++rank) {
      const int64_t rows = counts[rank * most + e];
      run(row, next[static_cast<size_t>(rank)], rows);
      row += rows;
      next[static_cast<size_t>(rank)] += rows;
    }
}

// One side of the exchange: the rows of each rank's experts, which lie in the order of experts.
void set_parts_by_expert(const ExpertExchangeAttrs& attrs, const int32_t* offsets, std::span<PartRange> parts,
                         int64_t hidden) {
  for (int rank = 0; rank < attrs.ranks; ++rank)
    parts[static_cast<size_t>(rank)] = elements_of(rows_of(attrs, offsets, rank), hidden);
}

// The other: rows by rank, `places` of them at most.
TensorView set_parts_by_rank(const ExpertExchangeAttrs& attrs, const int32_t* counts, const ExchangeScratch& scratch,
                             std::span<PartRange> parts, const TensorView& places) {
  set_parts(attrs, counts, parts, scratch.next);
  const int64_t rows = parts.back().begin + parts.back().size;
  EADEM_CHECK(rows <= places.shape[0], "{} rows for rank {} of {}; there is room for {}", rows, attrs.rank, attrs.ranks,
              places.shape[0]);
  for (PartRange& part : parts) part = elements_of(part, places.shape[1]);
  return TensorView(scratch.rows, places.dtype, Shape{rows, places.shape[1]});
}

// y [places, hidden] := the rows of this rank's experts in x [pairs, hidden] of all ranks.
void send_to_experts(const ExpertExchangeAttrs& attrs, Context& context, const TensorView& y, const TensorView& x,
                     const int32_t* offsets, const int32_t* counts, const ExchangeScratch& scratch) {
  if (attrs.same_tokens) {
    const PartRange own = rows_of(attrs, offsets, attrs.rank);
    EADEM_CHECK(own.size <= y.shape[0], "{} rows for rank {}; there is room for {}", own.size, attrs.rank, y.shape[0]);
    return copy_rows(y, 0, x, own.begin, own.size);
  }
  set_parts_by_expert(attrs, offsets, scratch.sent, x.shape[1]);
  const TensorView by_rank = set_parts_by_rank(attrs, counts, scratch, scratch.received, y);
  context.mesh.along(attrs.over).all_to_all_parts(context.device, by_rank, scratch.received, x, scratch.sent);
  for_each_run(attrs, counts, scratch.next,
               [&](int64_t expert_row, int64_t row, int64_t rows) { copy_rows(y, expert_row, by_rank, row, rows); });
}

// y [pairs, hidden] := the rows that the ranks have made of this rank's, from x [places, hidden] of each; 0 behind
// them.
void bring_back(const ExpertExchangeAttrs& attrs, Context& context, const TensorView& y, const TensorView& x,
                const int32_t* offsets, const int32_t* counts, const ExchangeScratch& scratch) {
  set_parts_by_expert(attrs, offsets, scratch.received, x.shape[1]);
  TensorView sent = x;
  if (attrs.same_tokens) {
    const int64_t own = rows_of(attrs, offsets, attrs.rank).size;
    std::fill(scratch.sent.begin(), scratch.sent.end(), elements_of({0, own}, x.shape[1]));
  } else {
    sent = set_parts_by_rank(attrs, counts, scratch, scratch.sent, x);
    for_each_run(attrs, counts, scratch.next,
                 [&](int64_t expert_row, int64_t row, int64_t rows) { copy_rows(sent, row, x, expert_row, rows); });
  }
  context.mesh.along(attrs.over).all_to_all_parts(context.device, y, scratch.received, sent, scratch.sent);
  const int64_t end = offsets[attrs.experts], bytes = y.shape[1] * static_cast<int64_t>(dtype_size(y.dtype));
  if (end < y.shape[0])
    std::memset(static_cast<std::byte*>(y.data) + end * bytes, 0, static_cast<size_t>((y.shape[0] - end) * bytes));
}

// ---- The order of the rows that come

// counts [ranks, most] := how many rows of this rank's experts each rank has.
void exchange_counts(const ExpertExchangeAttrs& attrs, Context& context, const TensorView& counts,
                     const int32_t* offsets, int32_t* sent) {
  const int64_t most = attrs.most_experts();
  auto* received = elements<int32_t>(counts);
  int32_t* to = attrs.same_tokens ? received : sent;
  std::fill_n(to, attrs.ranks * most, 0);
  for (int rank = 0; rank < attrs.ranks; ++rank) {
    if (attrs.same_tokens && rank != attrs.rank) continue;  // the others' rows are this rank's
    const PartRange experts = attrs.experts_of(rank);
    for (int64_t e = 0; e < experts.size; ++e)
      to[rank * most + e] = offsets[experts.begin + e + 1] - offsets[experts.begin + e];
  }
  if (attrs.same_tokens) return;
  context.mesh.along(attrs.over).all_to_all(context.device, counts, TensorView(sent, DType::i32, counts.shape));
}

// own [own experts + 1] := where the rows of each of this rank's experts begin.
void set_own_offsets(const ExpertExchangeAttrs& attrs, int32_t* own, const int32_t* counts) {
  const int64_t most = attrs.most_experts();
  own[0] = 0;
  for (int64_t e = 0; e < attrs.own_experts().size; ++e) {
    own[e + 1] = own[e];
    for (int64_t rank = 0; rank < attrs.ranks; ++rank) own[e + 1] += counts[rank * most + e];
  }
}

// ---- Passes

void run_dispatch(const KernelCall& call, const ExpertExchangeAttrs& attrs) {
  enum { kX, kOffsets };
  enum { kY, kOwn, kCounts };
  const ExchangeScratch scratch(attrs, call.scratch.data);
  const auto* offsets = elements<const int32_t>(call.inputs[kOffsets]);
  const auto* counts = elements<const int32_t>(call.outputs[kCounts]);
  exchange_counts(attrs, *call.context, call.outputs[kCounts], offsets, scratch.counts);
  set_own_offsets(attrs, elements<int32_t>(call.outputs[kOwn]), counts);
  send_to_experts(attrs, *call.context, call.outputs[kY], call.inputs[kX], offsets, counts, scratch);
}

void run_combine(const KernelCall& call, const ExpertExchangeAttrs& attrs) {
  enum { kX, kOffsets, kCounts };
  bring_back(attrs, *call.context, call.outputs[0], call.inputs[kX], elements<const int32_t>(call.inputs[kOffsets]),
             elements<const int32_t>(call.inputs[kCounts]), ExchangeScratch(attrs, call.scratch.data));
}

enum ExchangeBackwardInput { kOffsetsOfDy, kCountsOfDy, kDyOfExchange };

void run_dispatch_backward(const KernelCall& call, const ExpertExchangeAttrs& attrs) {
  bring_back(attrs, *call.context, call.outputs[0], call.inputs[kDyOfExchange],
             elements<const int32_t>(call.inputs[kOffsetsOfDy]), elements<const int32_t>(call.inputs[kCountsOfDy]),
             ExchangeScratch(attrs, call.scratch.data));
}

void run_combine_backward(const KernelCall& call, const ExpertExchangeAttrs& attrs) {
  send_to_experts(attrs, *call.context, call.outputs[0], call.inputs[kDyOfExchange],
                  elements<const int32_t>(call.inputs[kOffsetsOfDy]), elements<const int32_t>(call.inputs[kCountsOfDy]),
                  ExchangeScratch(attrs, call.scratch.data));
}

Verdict can_exchange(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs)
    requirements.require(type.encoding == nullptr, fmt::format("takes plain values; an input is {}", to_string(type)));
  return requirements.verdict();
}

// `places`: the port with the rows of this rank's experts.
int64_t exchange_scratch_bytes(const KernelRequest& r, const TensorType& places) {
  const auto& attrs = r.attrs.get<ExpertExchangeAttrs>();
  return ExchangeScratch::head_bytes(attrs) + (attrs.same_tokens ? 0 : places.size_bytes(r.bounds));
}

const TensorType& dispatched_output(const KernelRequest& r) { return r.outputs[0]; }
const TensorType& dispatched_input(const KernelRequest& r) { return r.inputs[0]; }
const TensorType& dispatched_gradient(const KernelRequest& r) { return r.inputs[kDyOfExchange]; }

using RunExchange = void (*)(const KernelCall& call, const ExpertExchangeAttrs& attrs);
using PlacesOf = const TensorType& (*)(const KernelRequest& request);

template <RunExchange kRun, PlacesOf kPlaces>
PlanPtr prepare_exchange(const KernelRequest& r, Context&) {
  return make_plan([attrs = r.attrs.get<ExpertExchangeAttrs>()](const KernelCall& call) { kRun(call, attrs); },
                   exchange_scratch_bytes(r, kPlaces(r)));
}

constexpr Kernel exchange_kernel(Pass pass, PlanPtr (*prepare_call)(const KernelRequest&, Context&)) {
  return {.name = "cpu_communicator", .pass = pass, .can_handle = can_exchange, .prepare = prepare_call};
}

constexpr Kernel kDispatchForward = exchange_kernel(Pass::forward, prepare_exchange<run_dispatch, dispatched_output>);
constexpr Kernel kDispatch = exchange_kernel(Pass::inference, prepare_exchange<run_dispatch, dispatched_output>);
constexpr Kernel kDispatchBackward =
    exchange_kernel(Pass::backward, prepare_exchange<run_dispatch_backward, dispatched_gradient>);
constexpr Kernel kCombineForward = exchange_kernel(Pass::forward, prepare_exchange<run_combine, dispatched_input>);
constexpr Kernel kCombine = exchange_kernel(Pass::inference, prepare_exchange<run_combine, dispatched_input>);
constexpr Kernel kCombineBackward =
    exchange_kernel(Pass::backward, prepare_exchange<run_combine_backward, dispatched_output>);

}  // namespace

KernelList expert_dispatch_kernels() { return {&kDispatchForward, &kDispatch, &kDispatchBackward}; }
KernelList expert_combine_kernels() { return {&kCombineForward, &kCombine, &kCombineBackward}; }

}  // namespace eadem::kernels::cpu
