// SPDX-License-Identifier: Apache-2.0
//
// The communicator moves equal parts that lie one after another. Where a part is a range of a later dimension, or parts
// are unequal, they are copied to and from scratch in that form; a shorter part leaves the end of its place unused.
#include "eadem/kernels/collectives.h"

#include <algorithm>
#include <cstring>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

namespace {

// A tensor around one of its dimensions: [outer, extent, inner bytes].
struct Around {
  Around(const Shape& shape, DType dtype, int dim)
      : extent(shape[dim]), inner(static_cast<int64_t>(dtype_size(dtype))) {
    for (int i = 0; i < dim; ++i) outer *= shape[i];
    for (int i = dim + 1; i < shape.rank(); ++i) inner *= shape[i];
  }
  int64_t outer = 1, extent, inner;
};

void copy_bytes(void* to, const void* from, int64_t size) {
  if (size > 0 && to != from) std::memcpy(to, from, static_cast<size_t>(size));
}

// Copies `range` of the dimension between a whole tensor and a part that lies by itself.
enum class Way { take, put };
void copy_range(Way way, std::byte* whole, const Around& around, PartRange range, std::byte* part) {
  const int64_t run = range.size * around.inner;
  for (int64_t o = 0; o < around.outer; ++o) {
    std::byte* in_whole = whole + (o * around.extent + range.begin) * around.inner;
    way == Way::take ? copy_bytes(part + o * run, in_whole, run) : copy_bytes(in_whole, part + o * run, run);
  }
}

std::byte* bytes_of(const TensorView& view) { return static_cast<std::byte*>(view.data); }

PartRange part_of_rank(const CollectiveAttrs& attrs, int rank) { return part_of(attrs.whole, attrs.ranks, rank); }

// The largest part of a tensor around the divided dimension, in elements.
int64_t part_elements(const Around& whole, const CollectiveAttrs& attrs, DType dtype) {
  return whole.outer * part_of_rank(attrs, 0).size * whole.inner / static_cast<int64_t>(dtype_size(dtype));
}

// Whether the parts of a tensor lie one after another and are equal.
bool moves_as_it_lies(const Around& whole, const CollectiveAttrs& attrs) {
  return whole.outer == 1 && attrs.whole % attrs.ranks == 0;
}

// The bytes of scratch for this rank's part of `type` and for all parts, one after another; 0 where they lie so.
int64_t parts_scratch(const KernelRequest& r, const TensorType& type) {
  const auto& attrs = r.attrs.get<CollectiveAttrs>();
  const Around whole(type.bind(r.bounds), type.dtype, attrs.dim);
  if (moves_as_it_lies(whole, attrs)) return 0;
  return (attrs.ranks + 1) * part_elements(whole, attrs, type.dtype) * static_cast<int64_t>(dtype_size(type.dtype));
}

Verdict can_move(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs)
    requirements.require(type.encoding == nullptr, fmt::format("takes plain values; x is {}", to_string(type)));
  return requirements.verdict();
}

Verdict can_sum(const KernelRequest& r) {
  return Requirements(r)
      .one_of("x", r.inputs[0], {DType::f32, DType::bf16})
      .one_of("y", r.outputs[0], {r.inputs[0].dtype})
      .verdict();
}

// ---- all_reduce, broadcast, send, recv

void run_all_reduce(const KernelCall& call, const CollectiveAttrs&, Communicator& communicator) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  EADEM_CHECK(x.is_contiguous() && y.is_contiguous(), "all_reduce of {} into {}", to_string(x), to_string(y));
  copy_bytes(y.data, x.data, x.size_bytes());
  communicator.all_reduce_sum(call.context->device, y);
}

void run_broadcast(const KernelCall& call, const CollectiveAttrs& attrs, Communicator& communicator) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  copy_bytes(y.data, x.data, x.size_bytes());
  communicator.broadcast(call.context->device, y, attrs.peer);
}

void run_send(const KernelCall& call, const CollectiveAttrs& attrs, Communicator& communicator) {
  communicator.send(call.context->device, call.inputs[0], attrs.peer);
}

void run_recv(const KernelCall& call, const CollectiveAttrs& attrs, Communicator& communicator) {
  communicator.recv(call.context->device, call.outputs[0], attrs.peer);
}

// ---- all_gather

int64_t gather_scratch(const KernelRequest& r) { return parts_scratch(r, r.outputs[0]); }

void run_all_gather(const KernelCall& call, const CollectiveAttrs& attrs, Communicator& communicator) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  const Around whole(y.shape, y.dtype, attrs.dim);
  if (moves_as_it_lies(whole, attrs)) return communicator.all_gather(call.context->device, y, x);
  const int64_t count = part_elements(whole, attrs, y.dtype);
  const TensorView own(call.scratch.data, y.dtype, Shape{count});
  const TensorView all(bytes_of(own) + own.size_bytes(), y.dtype, Shape{attrs.ranks, count});
  copy_bytes(own.data, x.data, x.size_bytes());
  communicator.all_gather(call.context->device, all, own);
  for (int rank = 0; rank < attrs.ranks; ++rank)
    copy_range(Way::put, bytes_of(y), whole, part_of_rank(attrs, rank), bytes_of(all) + rank * own.size_bytes());
}

void run_all_gather_backward(const KernelCall& call, const CollectiveAttrs& attrs, Communicator& /*communicator*/) {
  const TensorView &dy = call.inputs[0], &dx = call.outputs[0];
  const Around whole(dy.shape, dy.dtype, attrs.dim);
  copy_range(Way::take, bytes_of(dy), whole, part_of_rank(attrs, attrs.rank), bytes_of(dx));
}

// ---- reduce_scatter

int64_t scatter_scratch(const KernelRequest& r) { return parts_scratch(r, r.inputs[0]); }

void run_reduce_scatter(const KernelCall& call, const CollectiveAttrs& attrs, Communicator& communicator) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  const Around whole(x.shape, x.dtype, attrs.dim);
  if (moves_as_it_lies(whole, attrs)) return communicator.reduce_scatter_sum(call.context->device, y, x);
  const int64_t count = part_elements(whole, attrs, x.dtype);
  const TensorView own(call.scratch.data, x.dtype, Shape{count});
  const TensorView all(bytes_of(own) + own.size_bytes(), x.dtype, Shape{attrs.ranks, count});
  for (int rank = 0; rank < attrs.ranks; ++rank) {
    std::byte* place = bytes_of(all) + rank * own.size_bytes();
    const PartRange range = part_of_rank(attrs, rank);
    const int64_t used = whole.outer * range.size * whole.inner;
    copy_range(Way::take, bytes_of(x), whole, range, place);
    std::memset(place + used, 0, static_cast<size_t>(own.size_bytes() - used));  // it is summed
  }
  communicator.reduce_scatter_sum(call.context->device, own, all);
  copy_bytes(y.data, own.data, y.size_bytes());
}

// ---- all_to_all

int64_t exchange_scratch(const KernelRequest& r) { return 2 * r.inputs[0].size_bytes(r.bounds); }

void run_all_to_all(const KernelCall& call, const CollectiveAttrs& attrs, Communicator& communicator) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  const TensorView sent(call.scratch.data, x.dtype, Shape{x.num_elements()});
  const TensorView received(bytes_of(sent) + sent.size_bytes(), x.dtype, Shape{x.num_elements()});
  const Around before(x.shape, x.dtype, attrs.other_dim), after(y.shape, y.dtype, attrs.dim);
  const int64_t piece = sent.size_bytes() / attrs.ranks;
  for (int rank = 0; rank < attrs.ranks; ++rank)
    copy_range(Way::take, bytes_of(x), before, part_of(before.extent, attrs.ranks, rank),
               bytes_of(sent) + rank * piece);
  communicator.all_to_all(call.context->device, received, sent);
  for (int rank = 0; rank < attrs.ranks; ++rank)
    copy_range(Way::put, bytes_of(y), after, part_of_rank(attrs, rank), bytes_of(received) + rank * piece);
}

using Run = void (*)(const KernelCall& call, const CollectiveAttrs& attrs, Communicator& communicator);

int64_t no_scratch(const KernelRequest&) { return 0; }

template <Run kRun, int64_t (*kScratch)(const KernelRequest& request) = no_scratch>
PlanPtr prepare(const KernelRequest& r, Context& context) {
  const CollectiveAttrs attrs = r.attrs.get<CollectiveAttrs>();
  Communicator& communicator = context.mesh.along(attrs.over);
  return make_plan([attrs, &communicator](const KernelCall& call) { kRun(call, attrs, communicator); }, kScratch(r));
}

constexpr Kernel kAllReduceForward{"cpu_communicator", Pass::forward, can_sum, prepare<run_all_reduce>};
constexpr Kernel kAllReduce{"cpu_communicator", Pass::inference, can_sum, prepare<run_all_reduce>};
constexpr Kernel kAllGather{"cpu_communicator", Pass::inference, can_move, prepare<run_all_gather, gather_scratch>};
constexpr Kernel kAllGatherForward{"cpu_communicator", Pass::forward, can_move,
                                   prepare<run_all_gather, gather_scratch>};
constexpr Kernel kAllGatherBackward{"cpu_communicator", Pass::backward, can_move, prepare<run_all_gather_backward>};
constexpr Kernel kReduceScatter{"cpu_communicator", Pass::inference, can_sum,
                                prepare<run_reduce_scatter, scatter_scratch>};
constexpr Kernel kAllToAll{"cpu_communicator", Pass::inference, can_move, prepare<run_all_to_all, exchange_scratch>};
constexpr Kernel kBroadcast{"cpu_communicator", Pass::inference, can_move, prepare<run_broadcast>};
constexpr Kernel kSend{"cpu_communicator", Pass::inference, can_move, prepare<run_send>};
constexpr Kernel kRecv{"cpu_communicator", Pass::inference, can_move, prepare<run_recv>};

}  // namespace

KernelList all_reduce_kernels() { return {&kAllReduceForward, &kAllReduce}; }
KernelList all_gather_kernels() { return {&kAllGatherForward, &kAllGather, &kAllGatherBackward}; }
KernelList reduce_scatter_kernels() { return {&kReduceScatter}; }
KernelList all_to_all_kernels() { return {&kAllToAll}; }
KernelList broadcast_kernels() { return {&kBroadcast}; }
KernelList send_kernels() { return {&kSend}; }
KernelList recv_kernels() { return {&kRecv}; }

}  // namespace eadem::kernels::cpu
