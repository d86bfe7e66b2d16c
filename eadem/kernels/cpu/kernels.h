// SPDX-License-Identifier: Apache-2.0
//
// The kernels of this backend by op, each list in the source that has the kernels.
#pragma once

#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cpu {

KernelList embedding_kernels();
KernelList linear_kernels();
KernelList rms_norm_kernels();
KernelList layer_norm_kernels();
KernelList add_kernels();
KernelList scale_kernels();
KernelList scale_by_kernels();
KernelList mul_kernels();
KernelList rope_table_kernels();
KernelList rope_kernels();
KernelList scale_by_position_kernels();
KernelList attention_kernels();
KernelList activation_kernels();
KernelList gated_activation_kernels();
KernelList softmax_kernels();
KernelList cross_entropy_kernels();
KernelList cast_kernels();
KernelList quantize_kernels();
KernelList rms_norm_quantize_kernels();
KernelList add_rms_norm_quantize_kernels();
KernelList kv_append_kernels();
KernelList latent_append_kernels();
KernelList head_linear_kernels();
KernelList latent_attention_kernels();
KernelList select_keys_kernels();
KernelList selected_attention_kernels();
KernelList compress_keys_kernels();
KernelList compressed_attention_kernels();
KernelList select_blocks_kernels();
KernelList pool_keys_kernels();
KernelList pooled_attention_kernels();
KernelList split_columns_kernels();
KernelList concat_columns_kernels();
KernelList short_convolution_kernels();
KernelList gated_delta_rule_kernels();
KernelList select_rows_kernels();
KernelList feed_tokens_kernels();
KernelList sample_kernels();
KernelList add_bias_kernels();
KernelList select_heads_kernels();
KernelList softmax_state_kernels();
KernelList parallel_cross_entropy_kernels();
KernelList all_reduce_kernels();
KernelList all_gather_kernels();
KernelList reduce_scatter_kernels();
KernelList all_to_all_kernels();
KernelList broadcast_kernels();
KernelList send_kernels();
KernelList cut_columns_kernels();
KernelList shard_sum_kernels();
KernelList recv_kernels();
KernelList grad_norm_kernels();
KernelList adamw_kernels();
KernelList route_kernels();
KernelList expert_order_kernels();
KernelList permute_kernels();
KernelList grouped_linear_kernels();
KernelList unpermute_kernels();
KernelList expert_dispatch_kernels();
KernelList expert_combine_kernels();
KernelList clamped_swiglu_kernels();
KernelList gate_rows_kernels();
KernelList identity_experts_kernels();
KernelList load_balancing_loss_kernels();
KernelList state_space_scan_kernels();
KernelList stream_weights_kernels();
KernelList collapse_streams_kernels();
KernelList expand_streams_kernels();
KernelList add_rms_norm_kernels();
KernelList linear_gated_activation_kernels();
KernelList linear_gated_activation_quantize_kernels();
KernelList linear_add_kernels();
KernelList rope_kv_append_kernels();
KernelList linear_cross_entropy_kernels();

}  // namespace eadem::kernels::cpu
