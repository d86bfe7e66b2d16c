// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/backend.h"

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/kernels.h"

namespace eadem::kernels::cpu {

namespace {

constexpr OpKernels kOps[] = {
    {"embedding", embedding_kernels},
    {"linear", linear_kernels},
    {"rms_norm", rms_norm_kernels},
    {"layer_norm", layer_norm_kernels},
    {"add", add_kernels},
    {"scale", scale_kernels},
    {"scale_by", scale_by_kernels},
    {"mul", mul_kernels},
    {"rope_table", rope_table_kernels},
    {"rope", rope_kernels},
    {"scale_by_position", scale_by_position_kernels},
    {"attention", attention_kernels},
    {"activation", activation_kernels},
    {"gated_activation", gated_activation_kernels},
    {"softmax", softmax_kernels},
    {"cross_entropy", cross_entropy_kernels},
    {"cast", cast_kernels},
    {"quantize", quantize_kernels},
    {"kv_append", kv_append_kernels},
    {"latent_append", latent_append_kernels},
    {"head_linear", head_linear_kernels},
    {"latent_attention", latent_attention_kernels},
    {"select_keys", select_keys_kernels},
    {"selected_attention", selected_attention_kernels},
    {"compress_keys", compress_keys_kernels},
    {"compressed_attention", compressed_attention_kernels},
    {"select_blocks", select_blocks_kernels},
    {"pool_keys", pool_keys_kernels},
    {"pooled_attention", pooled_attention_kernels},
    {"split_columns", split_columns_kernels},
    {"concat_columns", concat_columns_kernels},
    {"short_convolution", short_convolution_kernels},
    {"gated_delta_rule", gated_delta_rule_kernels},
    {"select_rows", select_rows_kernels},
    {"feed_tokens", feed_tokens_kernels},
    {"sample", sample_kernels},
    {"add_bias", add_bias_kernels},
    {"select_heads", select_heads_kernels},
    {"softmax_state", softmax_state_kernels},
    {"parallel_cross_entropy", parallel_cross_entropy_kernels},
    {"all_reduce", all_reduce_kernels},
    {"all_gather", all_gather_kernels},
    {"reduce_scatter", reduce_scatter_kernels},
    {"all_to_all", all_to_all_kernels},
    {"broadcast", broadcast_kernels},
    {"send", send_kernels},
    {"recv", recv_kernels},
    {"cut_columns", cut_columns_kernels},
    {"shard_sum", shard_sum_kernels},
    {"grad_norm", grad_norm_kernels},
    {"adamw", adamw_kernels},
    {"route", route_kernels},
    {"expert_order", expert_order_kernels},
    {"permute", permute_kernels},
    {"grouped_linear", grouped_linear_kernels},
    {"unpermute", unpermute_kernels},
    {"expert_dispatch", expert_dispatch_kernels},
    {"expert_combine", expert_combine_kernels},
    {"clamped_swiglu", clamped_swiglu_kernels},
    {"gate_rows", gate_rows_kernels},
    {"identity_experts", identity_experts_kernels},
    {"load_balancing_loss", load_balancing_loss_kernels},
    {"state_space_scan", state_space_scan_kernels},
    {"stream_weights", stream_weights_kernels},
    {"collapse_streams", collapse_streams_kernels},
    {"expand_streams", expand_streams_kernels},
    {"add_rms_norm", add_rms_norm_kernels},
    {"rms_norm_quantize", rms_norm_quantize_kernels},
    {"add_rms_norm_quantize", add_rms_norm_quantize_kernels},
    {"linear_gated_activation", linear_gated_activation_kernels},
    {"linear_gated_activation_quantize", linear_gated_activation_quantize_kernels},
    {"linear_add", linear_add_kernels},
    {"rope_kv_append", rope_kv_append_kernels},
    {"linear_cross_entropy", linear_cross_entropy_kernels},
};

KernelList kernels_of(std::string_view op) { return find_kernels(kOps, op); }

std::vector<std::string> list() { return {"cpu"}; }

std::shared_ptr<Device> open(int index, const DeviceOptions& options) {
  if (index != 0) throw NotFound("device 'cpu:{}' not found: there is one, 'cpu', with all processors", index);
  return std::make_shared<CpuDevice>(options);
}

}  // namespace

extern const Backend kBackend{.name = "cpu", .list = list, .open = open, .kernels = kernels_of};

}  // namespace eadem::kernels::cpu
