// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/attention.h"

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

// f32 FMA outside the tensor cores, keys and values read again for every query: the share of the bf16 rate.
constexpr double kRateShare = 0.02;

Verdict can_attend(const KernelRequest& request) {
  const AttentionAttrs& attrs = request.attrs.get<AttentionAttrs>();
  // Every query against as many keys as there may be tokens or cached positions.
  const TensorType& k = request.inputs[1];
  const double keys = attrs.source == KvSource::direct
                          ? elements_of(request, k) / static_cast<double>(attrs.kv_heads * attrs.head_dim)
                          : static_cast<double>(request.inputs[5].dim(1).bind(request.bounds) * k.fixed(2));
  const double flops = 4.0 * elements_of(request, request.inputs[0]) * keys;
  return Requirements(request)
      .dtype("q", request.inputs[0], kActivationDTypes)
      .dtype("k", k, kStorageDTypes)
      .same_dtype("v", request.inputs[2], "k", k)
      .same_dtype("y", request.outputs[0], "q", request.inputs[0])
      .at_most("head_dim", attrs.head_dim, kMaxHeadDim)
      .at_cost(flops / kRateShare);
}

void run_attention(const KernelCall& call) {
  const AttentionAttrs& attrs = call.attrs.get<AttentionAttrs>();
  const TensorView &q = call.inputs[0], &k = call.inputs[1], &v = call.inputs[2];
  const TensorView &query_start = call.inputs[3], &kv_length = call.inputs[4], &block_table = call.inputs[5];
  const bool cached = attrs.source == KvSource::cached;
  EADEM_CUDA_CALL(launch_attention({.q = elements(q),
                                    .k = elements(k),
                                    .v = elements(v),
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
                                    .kv_dtype = k.dtype},
                                   stream_of(call)));
}

constexpr Kernel kAttention{"cuda_online_softmax", Pass::inference, can_attend, run_attention};

}  // namespace

KernelList attention_kernels() { return {&kAttention}; }

}  // namespace eadem::kernels::cuda
