// SPDX-License-Identifier: Apache-2.0
//
// Attention of packed sequences: what the kernel takes, and how a step is divided into the tasks of
// attention_tasks-inl.h.
//
// A task is a block of tokens of one sequence and one kv head; its rows are the queries of those tokens for all heads
// of the group, so that keys and values are brought in once for all of them.
//
// Every split of kAttentionSplit positions has a softmax state of its own, and the states are merged in order. Where a
// step has few blocks for its threads, splits become separate tasks, and their states wait in scratch to be merged.
#include "eadem/kernels/attention/attention.h"

#include <algorithm>

#include "eadem/kernels/cpu/attention/attention_call.h"
#include "eadem/kernels/cpu/kernels.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/attention/attention.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/attention/attention_tasks-inl.h"
#include "eadem/kernels/cpu/dispatch.h"

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(attention_routines);

Attention shape_of(const AttentionAttrs& attrs) {
  Attention a{};
  a.heads = attrs.heads;
  a.kv_heads = attrs.kv_heads;
  a.sharing = attrs.sharing_heads();
  a.head_dim = attrs.head_dim;
  a.value_dim = attrs.values();
  a.window = attrs.window;
  a.chunk = attrs.chunk;
  a.scale = attrs.scale;
  a.softcap = attrs.softcap;
  return a;
}

void set_inputs(Attention& a, const KernelCall& call) {
  const TensorView &k = call.inputs[kK], &v = call.inputs[kV];
  EADEM_CHECK(k.is_contiguous() && v.is_contiguous(), "keys {} and values {}", to_string(k), to_string(v));
  a.q = elements<const float>(call.inputs[kQ]);
  a.k = k.data;
  a.v = v.data;
  a.value_row = v.shape.back();
  a.k_scales = static_cast<const float*>(k.plane(1));
  a.v_scales = static_cast<const float*>(v.plane(1));
  a.query_start = elements<const int32_t>(call.inputs[kQueryStart]);
  a.kv_length = elements<const int32_t>(call.inputs[kKvLength]);
  a.sequences = call.inputs[kKvLength].shape[0];
}

namespace {

// Only blocks of at most this many rows, or of one token, are divided into splits, because split states take memory.
constexpr int64_t kRowsOfSplits = 16;
// Spans become tasks where there are fewer than kTasksPerThread blocks for each thread; they are then grouped into
// about kSplitTasksPerThread tasks for each thread.
constexpr int64_t kTasksPerThread = 4, kSplitTasksPerThread = 8;

Requirements forward_requirements(const KernelRequest& r, const AttentionAttrs& attrs) {
  // A cache may be encoded by rows. Keys and values given directly are plain, and so are all inputs in training.
  const Encoding* encoding = attrs.source == KvSource::cached ? RowEncoding::of(r.inputs[kK].encoding) : nullptr;
  Requirements requirements(r);
  requirements.f32("q", r.inputs[kQ])
      .packed("k", r.inputs[kK], kStorageDTypes, encoding)
      .packed("v", r.inputs[kV], {r.inputs[kK].dtype}, encoding)
      .one_of("query_start", r.inputs[kQueryStart], {DType::i32})
      .one_of("kv_length", r.inputs[kKvLength], {DType::i32})
      .f32("y", r.outputs[0])
      .require(!attrs.sinks || r.inputs[kSinks].dtype == DType::f32, "takes sinks in f32")
      .require(r.inputs[kK].encoding == r.inputs[kV].encoding, "takes keys and values in the same encoding")
      .require(attrs.kv_heads > 0 && attrs.heads % attrs.kv_heads == 0, "heads is not a multiple of kv_heads");
  return requirements;
}

Verdict can_forward(const KernelRequest& r) {
  const AttentionAttrs& attrs = r.attrs.get<AttentionAttrs>();
  // A cached attention saves nothing, so it has no second output to ask about.
  if (attrs.source != KvSource::direct) return Verdict::no("the forward pass reads keys directly, not a cache");
  return forward_requirements(r, attrs).f32("lse", r.outputs[1]).verdict();
}

Verdict can_infer(const KernelRequest& r) {
  const AttentionAttrs& attrs = r.attrs.get<AttentionAttrs>();
  Requirements requirements = forward_requirements(r, attrs);
  const RowEncoding* encoding = RowEncoding::of(r.inputs[kK].encoding);
  if (encoding != nullptr && encoding->code() == RowEncoding::Code::int8)
    requirements.require(attrs.head_dim <= kMostCodes, "rows of an int8 cache have too many codes for exact sums");
  if (attrs.source == KvSource::cached)
    requirements.require(r.inputs.size() > kBlockTable && !is_unconnected(r.inputs[kBlockTable]),
                         "reads a cache through block_table; it is absent");
  return requirements.verdict();
}

int64_t rows_of_splits(const Attention& a) { return std::max(kRowsOfSplits, a.group()); }

// With this many blocks (times kv heads) or more, none is divided into splits.
int64_t most_divided_blocks(int threads) { return threads > 1 ? threads * kTasksPerThread : 0; }

// The floats that the states of divided blocks may take in any step over a cache of blocks of `block_size`.
int64_t split_floats(const Attention& a, const SymbolValues& bounds, int64_t block_size, int threads) {
  const int64_t positions = bounds[Symbol::max_blocks] * block_size;
  // A block of n tokens sees window + n - 1 positions, or as many by chunks, n <= rows_of_splits.
  const int64_t reach = std::max(a.window, a.chunk);
  const int64_t splits =
      std::min(ceil_div(positions, kSplit), reach > 0 ? (reach + rows_of_splits(a)) / kSplit + 2 : positions);
  const int64_t blocks = std::min(most_divided_blocks(threads), bounds[Symbol::sequences] * a.kv_heads);
  const int64_t rows = std::min(bounds[Symbol::tokens] * a.heads, blocks * rows_of_splits(a));
  // Each block's rows are stored apart.
  const int64_t stored = std::min(rows + blocks * (a.stored_rows(1) - 1), blocks * a.stored_rows(rows_of_splits(a)));
  return splits * (Gathered::floats(stored, a.value_width()) + blocks * kPanelWidth);
}

// Computes every block with all of its keys; blocks are numbered in the order of sequences.
void run_blocks(const AttentionPlan& plan, CpuDevice& device, const Attention& a, int64_t blocks, float* scratch) {
  const auto blocks_of = [&](int64_t sequence) {
    return ceil_div(a.query_start[sequence + 1] - a.query_start[sequence], a.block_tokens());
  };
  const auto run = [&](int64_t index, int worker) {
    // Later blocks of a sequence see more keys. They start first, so that the longest do not run last.
    int64_t block = blocks - 1 - index / a.kv_heads;
    int64_t sequence = 0;
    for (; block >= blocks_of(sequence); ++sequence) block -= blocks_of(sequence);
    const int64_t tokens = a.query_start[sequence + 1] - a.query_start[sequence];
    const int64_t begin = block * a.block_tokens();
    const TokenBlock b{sequence, begin, std::min(tokens, begin + a.block_tokens()),
                       a.kv_length[sequence] - tokens + begin};
    plan.routines.block(a, b, index % a.kv_heads, scratch + worker * plan.worker_floats);
  };
  // The heads of one block are assigned to threads as the pages of a cache with one sequence are (InferEngine).
  ThreadPool& pool = device.pool();
  if (blocks == 1)
    pool.parallel_shares(a.kv_heads, run);
  else
    pool.parallel_for(blocks * a.kv_heads, run);
}

// Computes steps in which every sequence has few rows and is one block: every split on its own, then the merge. The
// splits of one head are neighbours, like their pages in a cache of one sequence.
void run_splits(const AttentionPlan& plan, CpuDevice& device, const Attention& a, float* scratch) {
  const auto block_of = [&](int64_t sequence) {
    const int64_t tokens = a.query_start[sequence + 1] - a.query_start[sequence];
    return TokenBlock{sequence, 0, tokens, a.kv_length[sequence] - tokens};
  };
  const auto splits_of = [&](int64_t sequence) {
    const TokenBlock b = block_of(sequence);
    return b.end == 0 ? 0 : a.end_split(b) - a.first_split(b);
  };
  const auto rows_of = [&](int64_t sequence) {
    return (a.query_start[sequence + 1] - a.query_start[sequence]) * a.group();
  };
  ThreadPool& pool = device.pool();
  float* results = scratch + pool.num_threads() * plan.worker_floats;
  // The states of a sequence lie by kv head, then by split, then by row.
  const auto floats_of = [&](int64_t sequence) { return Gathered::floats(a, rows_of(sequence)); };
  const auto results_of = [&](int64_t sequence, int64_t kv_head) {
    float* at = results;
    for (int64_t s = 0; s < sequence; ++s) at += a.kv_heads * splits_of(s) * floats_of(s);
    return at + kv_head * splits_of(sequence) * floats_of(sequence);
  };

  // A task is a run of neighbouring splits, so long that each thread has a few tasks: what a split prefetches is then
  // what the thread reads next.
  int64_t splits = 0;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) splits += splits_of(sequence);
  const int64_t length = std::max<int64_t>(1, splits * a.kv_heads / (pool.active_threads() * kSplitTasksPerThread));
  const auto tasks_of = [&](int64_t sequence) { return ceil_div(splits_of(sequence), length); };
  int64_t tasks = 0;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) tasks += tasks_of(sequence);

  pool.parallel_shares(tasks * a.kv_heads, [&](int64_t index, int worker) {
    int64_t sequence = 0;
    for (; index >= tasks_of(sequence) * a.kv_heads; ++sequence) index -= tasks_of(sequence) * a.kv_heads;
    const int64_t kv_head = index / tasks_of(sequence), task = index % tasks_of(sequence);
    const TokenBlock b = block_of(sequence);
    const auto border = [&](int64_t i) { return splits_of(sequence) * i / tasks_of(sequence); };
    plan.routines.splits(a, b, kv_head, a.first_split(b) + border(task), a.first_split(b) + border(task + 1),
                         results_of(sequence, kv_head) + border(task) * floats_of(sequence), floats_of(sequence),
                         scratch + worker * plan.worker_floats);
  });
  pool.parallel_for(a.sequences * a.kv_heads, [&](int64_t index, int /*worker*/) {
    const int64_t sequence = index / a.kv_heads, kv_head = index % a.kv_heads;
    if (splits_of(sequence) == 0) return;
    plan.routines.merge(a, block_of(sequence), kv_head, results_of(sequence, kv_head), floats_of(sequence));
  });
}

void run_forward(const AttentionPlan& plan, const KernelCall& call) {
  Attention a = plan.shape;
  set_inputs(a, call);
  if (plan.cached) {
    a.block_table = elements<const int32_t>(call.inputs[kBlockTable]);
    a.max_blocks = call.inputs[kBlockTable].shape[1];
    a.block_size = call.inputs[kK].shape[2];
  }
  if (call.inputs.size() > kSinks) a.sinks = elements<const float>(call.inputs[kSinks]);
  a.y = elements<float>(call.outputs[0]);
  a.lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr;
  run_attention(plan, cpu_device(call), a, static_cast<float*>(call.scratch.data));
}

PlanPtr prepare_forward(const KernelRequest& r, Context&) {
  const AttentionAttrs& attrs = r.attrs.get<AttentionAttrs>();
  const bool cached = attrs.source == KvSource::cached;
  Attention sizes = shape_of(attrs);
  sizes.value_row = r.inputs[kV].fixed(r.inputs[kV].rank() - 1);
  const AttentionPlan plan =
      attention_plan(cpu_device(r), sizes, r.inputs[kK], r.bounds, cached ? r.inputs[kK].fixed(2) : 0);
  return make_plan([plan](const KernelCall& call) { run_forward(plan, call); },
                   plan.floats * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kForward{"cpu_online_softmax", Pass::forward, can_forward, prepare_forward};
constexpr Kernel kInference{"cpu_online_softmax", Pass::inference, can_infer, prepare_forward};
}  // namespace

AttentionPlan attention_plan(const CpuDevice& device, const Attention& sizes, const TensorType& keys,
                             const SymbolValues& bounds, int64_t block_size) {
  AttentionPlan plan{.shape = sizes, .routines = {}, .cached = block_size > 0};
  Attention& shape = plan.shape;
  shape.kv_encoding = RowEncoding::of(keys.encoding);
  // Whether tiles are used does not depend on the rank, the step or the place of the rows, so that bits do not either.
  // Prompts are faster on tiles in any case, one token only where enough query heads share its keys and values.
  const bool latents = sizes.value_row == sizes.head_dim && sizes.value_dim < sizes.head_dim;
  shape.on_tiles = device.isa() == Isa::amx && keys.dtype == DType::bf16 && keys.encoding == nullptr &&
                   (latents || sizes.sharing >= kTiledSharing) && sizes.head_dim % kTiledStep == 0 &&
                   sizes.value_dim % kTiledStep == 0;
  shape.byte_dots = shape.rounds_queries() && has_byte_dots(device.isa()) && device.isa() != Isa::neon_dotprod;
  plan.routines = EADEM_CPU_DISPATCH(attention_routines, device.isa())(keys.dtype, shape.kv_encoding);
  plan.worker_floats = ForwardScratch::floats(shape);
  const int threads = device.pool().num_threads();
  plan.floats = threads * plan.worker_floats + (plan.cached ? split_floats(shape, bounds, block_size, threads) : 0);
  return plan;
}

void run_attention(const AttentionPlan& plan, CpuDevice& device, const Attention& a, float* scratch) {
  int64_t blocks = 0;
  bool few_rows = true, many_keys = false;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
    const int64_t tokens = a.query_start[sequence + 1] - a.query_start[sequence];
    blocks += ceil_div(tokens, a.block_tokens());
    few_rows = few_rows && tokens * a.group() <= rows_of_splits(a);
    many_keys = many_keys || (tokens > 0 && a.kv_length[sequence] > kSplit);
  }
  if (plan.cached && few_rows && many_keys && blocks * a.kv_heads < most_divided_blocks(device.pool().active_threads()))
    run_splits(plan, device, a, scratch);
  else
    run_blocks(plan, device, a, blocks, scratch);
}

KernelList attention_kernels() { return {&kForward, &kInference, &kAttentionBackwardBf16, &kAttentionBackward}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
