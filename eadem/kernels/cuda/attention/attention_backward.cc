// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/attention/attention.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

enum Input { kQ, kK, kV, kQueryStart, kKvLength, kY, kLse, kDy };
enum Output { kDq, kDk, kDv };

// The shares of the bf16 rate that tensor cores reach (0.36 to 0.55 with 2,048 tokens and more), and f32 FMA that reads
// the columns for each row.
constexpr double kTensorCoreShare = 0.3, kRowsShare = 0.02;

bool takes_tensor_cores(const KernelRequest& request) {
  const AttentionAttrs& attrs = request.attrs.get<AttentionAttrs>();
  return runs_hopper_kernels(request) && request.inputs[kQ].dtype == DType::bf16 && attrs.head_dim % 8 == 0 &&
         attrs.head_dim <= kGradientHeadDim;
}

Requirements common(const KernelRequest& request) {
  const AttentionAttrs& attrs = request.attrs.get<AttentionAttrs>();
  Requirements requirements(request);
  requirements.require(attrs.source == KvSource::direct, "keys and values are those of a cache")
      .require(attrs.values() == attrs.head_dim, "takes keys and values of one width")
      .require(attrs.softcap == 0.0f, fmt::format("a soft cap of {} on scores: takes none", attrs.softcap))
      .require(!attrs.sinks, "scores with sinks: takes none")
      .require(attrs.chunk == 0, fmt::format("attention by chunks of {} positions: takes none", attrs.chunk))
      .at_most("head_dim", attrs.head_dim, kMaxHeadDim);
  if (attrs.sinks) return requirements;  // their ports are others
  requirements.dtype("q", request.inputs[kQ], kActivationDTypes);
  for (size_t i : {kK, kV, kY, kDy}) requirements.same_dtype("an input", request.inputs[i], "q", request.inputs[kQ]);
  for (const TensorType& type : request.outputs) requirements.same_dtype("a gradient", type, "q", request.inputs[kQ]);
  return requirements.dtype("lse", request.inputs[kLse], {DType::f32});
}

Verdict can_use_tensor_cores(const KernelRequest& request) {
  return common(request)
      .hopper()
      .require(takes_tensor_cores(request),
               fmt::format("needs bf16, and head_dim a multiple of 8 up to {}", kGradientHeadDim))
      .verdict({.flops_share = kTensorCoreShare, .reason = "tensor cores"});
}

Verdict can_use_rows(const KernelRequest& request) {
  return common(request)
      .require(!takes_tensor_cores(request), "tensor cores take it")
      .verdict({.flops_share = kRowsShare, .reason = "f32 FMA, a block for each row"});
}

// Where a call has its scratch: the sums of dq, if it has some, delta, and the turns of the sums.
struct Scratch {
  int64_t delta_at, turns_at, bytes;

  Scratch(const AttentionAttrs& attrs, int64_t tokens, bool has_sums) {
    const int64_t chunks = has_sums ? (tokens + kGradientTokens - 1) / kGradientTokens * attrs.heads : 0;
    delta_at = chunks * kGradientChunk * padded_head_dim(attrs.head_dim) * static_cast<int64_t>(sizeof(float));
    turns_at = delta_at + tokens * attrs.heads * static_cast<int64_t>(sizeof(float));
    bytes = turns_at + (has_sums ? (chunks + 1) * static_cast<int64_t>(sizeof(int32_t)) : 0);
  }
};

template <cudaError_t (*kLaunch)(const AttentionBackwardParams& params, cudaStream_t stream), bool kSums>
PlanPtr prepare_backward(const KernelRequest& request, Context&) {
  const AttentionAttrs attrs = request.attrs.get<AttentionAttrs>();
  return make_plan(
      [attrs](const KernelCall& call) {
        const TensorView &q = call.inputs[kQ], &kv_length = call.inputs[kKvLength];
        const Scratch scratch(attrs, q.shape[0], kSums);
        auto* memory = static_cast<uint8_t*>(call.scratch.data);
        EADEM_CUDA_CALL(kLaunch({.forward = {.q = elements(q),
                                             .k = elements(call.inputs[kK]),
                                             .v = elements(call.inputs[kV]),
                                             .query_start = elements<const int32_t>(call.inputs[kQueryStart]),
                                             .kv_length = elements<const int32_t>(kv_length),
                                             .block_table = nullptr,
                                             .y = elements(call.inputs[kY]),
                                             .tokens = q.shape[0],
                                             .sequences = kv_length.shape[0],
                                             .max_blocks = 0,
                                             .block_size = 0,
                                             .heads = static_cast<int32_t>(attrs.heads),
                                             .kv_heads = static_cast<int32_t>(attrs.kv_heads),
                                             .head_dim = static_cast<int32_t>(attrs.head_dim),
                                             .window = static_cast<int32_t>(attrs.window),
                                             .scale = attrs.scale,
                                             .dtype = q.dtype,
                                             .kv_dtype = q.dtype,
                                             .lse = elements<float>(call.inputs[kLse])},
                                 .dy = elements(call.inputs[kDy]),
                                 .dq = elements(call.outputs[kDq]),
                                 .dk = elements(call.outputs[kDk]),
                                 .dv = elements(call.outputs[kDv]),
                                 .delta = reinterpret_cast<float*>(memory + scratch.delta_at),
                                 .sums = reinterpret_cast<float*>(memory),
                                 .turns = reinterpret_cast<int32_t*>(memory + scratch.turns_at)},
                                stream_of(call)));
      },
      Scratch(attrs, request.inputs[kQ].dim(0).bind(request.bounds), kSums).bytes);
}

constexpr Kernel kWgmma{.name = "cuda_wgmma",
                        .pass = Pass::backward,
                        .can_handle = can_use_tensor_cores,
                        .prepare = prepare_backward<launch_attention_backward_wgmma, true>,
                        .alignment_bytes = 16};
constexpr Kernel kRows{"cuda_rows", Pass::backward, can_use_rows, prepare_backward<launch_attention_backward, false>};

}  // namespace

KernelList attention_backward_kernels() { return {&kWgmma, &kRows}; }

}  // namespace eadem::kernels::cuda
