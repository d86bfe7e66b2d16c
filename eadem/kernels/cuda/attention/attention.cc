// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/attention/attention.h"

#include <array>

#include "eadem/kernels/attention/append_attention.h"
#include "eadem/kernels/attention/kv_append.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/int8_chunks.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

// The share of the bf16 rate that f32 FMA reaches outside the tensor cores, reading keys and values again for each
// query.
constexpr double kRateShare = 0.02;

// The share of the bf16 rate that the tensor-core kernels reach.
constexpr double kMmaRateShare = 0.4;

// Whether the tensor-core kernels accept the request. The two kernels use this to divide all requests between them.
bool takes_mma(const KernelRequest& request) {
  const AttentionAttrs& attrs = request.attrs.get<AttentionAttrs>();
  const TensorType& k = request.inputs[1];
  const bool plain = k.encoding == nullptr && k.dtype == DType::bf16, codes = kv_code_of(k) != KvCode::none;
  const bool fits = (plain && attrs.head_dim % 8 == 0 && attrs.head_dim <= 256) ||
                    (codes && attrs.head_dim % 16 == 0 && attrs.head_dim <= 128);
  return runs_hopper_kernels(request) && request.inputs[0].dtype == DType::bf16 && fits &&
         attrs.heads / attrs.kv_heads <= kAttentionMmaMaxGroup && attrs.values() == attrs.head_dim &&
         attrs.scale > 0.0f && attrs.chunk == 0 &&
         (attrs.source == KvSource::direct ||
          request.inputs[4].dim(0).bind(request.bounds) <= kAttentionMmaMaxSequences);
}

Verdict can_use_mma(const KernelRequest& request) {
  return Requirements(request, {1, 2})
      .hopper()
      .same_dtype("v", request.inputs[2], "k", request.inputs[1])
      .same_dtype("y", request.outputs[0], "q", request.inputs[0])
      .require(
          takes_mma(request),
          fmt::format("needs bf16 queries; keys in bf16 and head_dim a multiple of 8 up to 256, or a cache of 8-bit "
                      "codes and one of 16 up to 128; values as wide as keys, at most {} heads a key head, a positive "
                      "scale, no chunks, and at most {} sequences of a cache",
                      kAttentionMmaMaxGroup, kAttentionMmaMaxSequences))
      .verdict({.flops_share = kMmaRateShare, .reason = "tensor cores"});
}

Verdict can_attend(const KernelRequest& request) {
  const AttentionAttrs& attrs = request.attrs.get<AttentionAttrs>();
  const TensorType& k = request.inputs[1];
  return Requirements(request)
      .dtype("q", request.inputs[0], kActivationDTypes)
      .dtype("k", k, kStorageDTypes)
      .same_dtype("v", request.inputs[2], "k", k)
      .same_dtype("y", request.outputs[0], "q", request.inputs[0])
      .at_most("head_dim", attrs.head_dim, kMaxHeadDim)
      .require(
          attrs.values() == attrs.head_dim,
          fmt::format("values of {} elements and keys of {}: takes both of one width", attrs.values(), attrs.head_dim))
      .require(attrs.chunk == 0, fmt::format("attention by chunks of {} positions: takes none", attrs.chunk))
      .require(!takes_mma(request), "cuda_mma takes it")
      .verdict({.flops_share = kRateShare, .reason = "f32 FMA, keys and values read for each query"});
}

// The most split states that decode steps need: for every sequence, one more than the full splits of its keys.
int64_t most_splits(const KernelRequest& request) {
  const int64_t keys = request.inputs[5].dim(1).bind(request.bounds) * request.inputs[1].fixed(2);
  return request.inputs[4].dim(0).bind(request.bounds) * (keys / kAttentionSplitKeys + 1);
}

// Without states, decode steps run as prompts do: the result is correct, but one block reads all keys of a head.
int64_t mma_scratch_bytes(const KernelRequest& request) {
  constexpr int64_t kMostBytes = int64_t{1} << 30;
  const AttentionAttrs& attrs = request.attrs.get<AttentionAttrs>();
  if (attrs.source == KvSource::direct) return 0;
  const int64_t bytes =
      most_splits(request) * attrs.heads * (padded_head_dim(attrs.head_dim) + 2) * static_cast<int64_t>(sizeof(float));
  return bytes <= kMostBytes ? bytes : 0;
}

AttentionParams attention_params(const AttentionAttrs& attrs, KvCode code, const KernelCall& call) {
  const TensorView &q = call.inputs[0], &k = call.inputs[1], &v = call.inputs[2];
  const TensorView &query_start = call.inputs[3], &kv_length = call.inputs[4], &block_table = call.inputs[5];
  const bool cached = attrs.source == KvSource::cached;
  return {.q = elements(q),
          .k = cache_rows(k),
          .v = cache_rows(v),
          .query_start = elements<const int32_t>(query_start),
          .kv_length = elements<const int32_t>(kv_length),
          .block_table = cached ? elements<const int32_t>(block_table) : nullptr,
          .y = elements(call.outputs[0]),
          .tokens = q.shape[0],
          .sequences = kv_length.shape[0],
          .max_blocks = cached ? block_table.shape[1] : 0,
          .block_size = cached ? k.shape[2] : 0,
          .heads = static_cast<int32_t>(attrs.heads),
          .kv_heads = static_cast<int32_t>(attrs.kv_heads),
          .head_dim = static_cast<int32_t>(attrs.head_dim),
          .window = static_cast<int32_t>(attrs.window),
          .scale = attrs.scale,
          .dtype = q.dtype,
          .kv_dtype = k.dtype,
          .lse = call.outputs.size() > 1 ? elements<float>(call.outputs[1]) : nullptr,
          .softcap = attrs.softcap,
          .scale_by_cap = attrs.softcap > 0.0f ? attrs.scale / attrs.softcap : 0.0f,
          .sinks = attrs.sinks ? elements<const float>(call.inputs[6]) : nullptr,
          .code = code,
          .k_scales = cache_scales(k),
          .v_scales = cache_scales(v)};
}

PlanPtr prepare_attention(const KernelRequest& request, Context&) {
  return make_plan([attrs = request.attrs.get<AttentionAttrs>()](const KernelCall& call) {
    EADEM_CUDA_CALL(launch_attention(attention_params(attrs, KvCode::none, call), stream_of(call)));
  });
}

// A prepared request of the tensor-core kernels, and the launch of its calls.
struct MmaAttention {
  AttentionAttrs attrs;
  KvCode code;
  int64_t scratch_bytes;  // of states
  unsigned* arrivals;
  int32_t multiprocessors;

  MmaAttention(const KernelRequest& request, Context& context)
      : attrs(request.attrs.get<AttentionAttrs>()),
        code(kv_code_of(request.inputs[1])),
        scratch_bytes(mma_scratch_bytes(request)) {
    CudaDevice& device = static_cast<CudaDevice&>(context.device);
    arrivals =
        scratch_bytes > 0 ? device.counters(request.inputs[4].dim(0).bind(request.bounds) * attrs.heads) : nullptr;
    multiprocessors = device.multiprocessors();
  }
  AttentionParams params(const KernelCall& call) const {
    AttentionParams params = attention_params(attrs, code, call);
    params.states = static_cast<float*>(call.scratch.data);
    params.max_splits = params.sequences * (params.max_blocks * params.block_size / kAttentionSplitKeys + 1);
    params.multiprocessors = multiprocessors;
    if (params.block_size > 0) params.cache_rows = call.inputs[1].num_elements() / params.head_dim;
    params.arrivals = arrivals;
    return params;
  }
  static bool decodes(const AttentionParams& params) {
    return params.tokens == params.sequences && params.states != nullptr;
  }
  static void launch(const AttentionParams& params, const KernelCall& call) {
    EADEM_CUDA_CALL((decodes(params) ? launch_attention_decode : launch_attention_prompt)(params, stream_of(call)));
  }
};

PlanPtr prepare_mma(const KernelRequest& request, Context& context) {
  const MmaAttention mma(request, context);
  return make_plan([mma](const KernelCall& call) { mma.launch(mma.params(call), call); }, mma.scratch_bytes);
}

// --- rope_append_attention: one launch where a step decodes few sequences, else those of its two parts. Rounded, too
// (rope_append_attention_quantize), or by one launch more.

// The inputs and outputs of the two parts of a request or of a call. `rotated`: the queries between them; `y`: what is
// attended to, before it is rounded.
template <typename T>
struct Parts {
  std::array<T, 7> append;
  std::array<T, 6> attend;
  std::array<T, 3> appended;
  std::array<T, 1> attended;

  Parts(std::span<const T> in, std::span<const T> out, const T& rotated, const T& y)
      : append{in[0], in[1], in[2], in[3], in[4], in[5], in[6]},
        attend{rotated, out[1], out[2], in[7], in[8], in[9]},
        appended{rotated, out[1], out[2]},
        attended{y} {}
};

// The requests of the two parts, which refer to themselves.
struct PartRequests {
  Parts<TensorType> types;
  RopeKvAppendAttrs rope;
  KernelRequest append, attend;

  explicit PartRequests(const KernelRequest& request)
      : types(
            request.inputs, request.outputs, request.inputs[0],
            request.attrs.get<RopeAppendAttentionAttrs>().round_to == nullptr ? request.outputs[0] : request.inputs[0]),
        rope{request.attrs.get<RopeAppendAttentionAttrs>().rope},
        append(request),
        attend(request) {
    append.op = "rope_qk_append", attend.op = "attention";
    append.attrs = AttrsRef(rope), attend.attrs = AttrsRef(request.attrs.get<RopeAppendAttentionAttrs>().attention);
    append.inputs = types.append, append.outputs = types.appended;
    attend.inputs = types.attend, attend.outputs = types.attended;
    append.definition = attend.definition = nullptr;
  }
  PartRequests(const PartRequests&) = delete;
  PartRequests& operator=(const PartRequests&) = delete;
};

const Kernel& append_kernel() { return *rope_qk_append_kernels().front(); }

Verdict can_append_and_attend(const KernelRequest& request) {
  const PartRequests parts(request);
  const Verdict verdict = append_kernel().can_handle(parts.append);
  return verdict.accepted ? can_use_mma(parts.attend) : verdict;
}

Verdict can_append_attend_and_round(const KernelRequest& request) {
  const Encoding* to = request.attrs.get<RopeAppendAttentionAttrs>().round_to;
  if (to != &Int8Chunks::instance())
    return Requirements(request, {5, 6}, {0})
        .require(false, fmt::format("rounds to int8_chunks; {} is wanted", to->name()))
        .verdict({});
  return can_append_and_attend(request);
}

PlanPtr prepare_append_and_attend(const KernelRequest& request, Context& context) {
  const PartRequests parts(request);
  const bool rounds = request.attrs.get<RopeAppendAttentionAttrs>().round_to != nullptr;
  const MmaAttention mma(parts.attend, context);
  const TensorType& q = request.inputs[0];
  // The one launch rotates whole heads, by halves.
  const bool rotates =
      parts.rope.rope.style == RopeStyle::rotate_half && parts.rope.rope.rotary_dim == mma.attrs.head_dim;
  constexpr int64_t kAlignment = 64;
  const auto aligned = [](int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  const int64_t q_bytes = q.size_bytes(request.bounds), rotated_at = aligned(mma.scratch_bytes),
                attended_at = aligned(rotated_at + q_bytes);
  return make_plan(
      [mma, rotates, rounds, rotated_at, attended_at,
       append = std::shared_ptr<const Plan>(append_kernel().prepare(parts.append, context))](const KernelCall& call) {
        const TensorView& q = call.inputs[0];
        const auto in_scratch = [&](int64_t at) {
          return TensorView(static_cast<std::byte*>(call.scratch.data) + at, q.dtype, q.shape);
        };
        const TensorView rotated = in_scratch(rotated_at), y = rounds ? in_scratch(attended_at) : call.outputs[0];
        const Parts<TensorView> views(call.inputs, call.outputs, rotated, y);
        KernelCall attend{.inputs = views.attend, .outputs = views.attended, .context = call.context};
        if (mma.scratch_bytes > 0) attend.scratch = call.scratch;
        AttentionParams params = mma.params(attend);
        if (rotates && mma.decodes(params) && takes_new_rows(params)) {
          params.q = elements(q);
          params.new_rows = {.table = elements<const float>(call.inputs[1]),
                             .k = elements(call.inputs[2]),
                             .v = elements(call.inputs[3]),
                             .slots = elements<const int64_t>(call.inputs[4]),
                             .cache_k = cache_rows(call.outputs[1]),
                             .cache_v = cache_rows(call.outputs[2])};
        } else {
          append->run({.inputs = views.append, .outputs = views.appended, .context = call.context});
        }
        const Int8ChunkPlanes chunks = rounds ? int8_chunk_planes(call.outputs[0]) : Int8ChunkPlanes{};
        const bool in_one = mma.decodes(params) && writes_chunks(params);
        if (in_one) params.chunks = chunks;
        mma.launch(params, attend);
        if (rounds && !in_one)
          EADEM_CUDA_CALL(launch_quantize_chunks({.x = elements(y), .to = chunks, .dtype = y.dtype}, stream_of(call)));
      },
      rounds ? attended_at + q_bytes : rotated_at + q_bytes);
}

constexpr Kernel kMma{.name = "cuda_mma",
                      .pass = Pass::inference,
                      .can_handle = can_use_mma,
                      .prepare = prepare_mma,
                      .alignment_bytes = 16};
constexpr Kernel kMmaForward = in_forward(kMma);
constexpr Kernel kAppendAndAttend{.name = "cuda_mma",
                                  .pass = Pass::inference,
                                  .can_handle = can_append_and_attend,
                                  .prepare = prepare_append_and_attend,
                                  .alignment_bytes = 32};
constexpr Kernel kAppendAttendAndRound{.name = "cuda_mma",
                                       .pass = Pass::inference,
                                       .can_handle = can_append_attend_and_round,
                                       .prepare = prepare_append_and_attend,
                                       .alignment_bytes = 32};
constexpr Kernel kAttention{"cuda_online_softmax", Pass::inference, can_attend, prepare_attention};
constexpr Kernel kAttentionForward = in_forward(kAttention);

}  // namespace

KernelList attention_kernels() {
  KernelList kernels = attention_backward_kernels();
  kernels.insert(kernels.begin(), {&kMma, &kMmaForward, &kAttention, &kAttentionForward});
  return kernels;
}

KernelList rope_append_attention_kernels() { return {&kAppendAndAttend}; }
KernelList rope_append_attention_quantize_kernels() { return {&kAppendAttendAndRound}; }

}  // namespace eadem::kernels::cuda
