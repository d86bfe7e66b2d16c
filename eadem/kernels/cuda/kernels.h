// SPDX-License-Identifier: Apache-2.0
//
// The kernels of this backend by op, each list in the source that has the kernels.
#pragma once

#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cuda {

KernelList embedding_kernels();
KernelList linear_kernels();
KernelList linear_backward_kernels();      // linear_kernels has them
KernelList linear_fp8_backward_kernels();  // likewise
KernelList linear_decoded_kernels();       // likewise
KernelList linear_fp8_tensor_kernels();    // likewise
KernelList cross_entropy_kernels();
KernelList linear_cross_entropy_kernels();
KernelList fp8_cross_entropy_kernels();  // linear_cross_entropy_kernels has them
KernelList grad_norm_kernels();
KernelList adamw_kernels();
KernelList attention_backward_kernels();  // attention_kernels has them
KernelList rms_norm_kernels();
KernelList add_kernels();
KernelList mul_kernels();
KernelList rope_table_kernels();
KernelList rope_kernels();
KernelList attention_kernels();
KernelList activation_kernels();
KernelList gated_activation_kernels();
KernelList softmax_kernels();
KernelList cast_kernels();
KernelList scale_kernels();
KernelList layer_norm_kernels();
KernelList kv_append_kernels();
KernelList select_rows_kernels();
KernelList feed_tokens_kernels();
KernelList sample_kernels();
KernelList all_reduce_kernels();
KernelList add_rms_norm_kernels();
KernelList quantize_kernels();
KernelList gated_activation_quantize_kernels();
KernelList gated_gradients_quantize_kernels();
KernelList rms_norm_quantize_kernels();
KernelList add_rms_norm_quantize_kernels();
KernelList linear_gated_activation_kernels();
KernelList linear_gated_activation_quantize_kernels();
KernelList linear_qkv_kernels();
KernelList rope_kv_append_kernels();
KernelList rope_qk_append_kernels();
KernelList rope_append_attention_kernels();
KernelList rope_append_attention_quantize_kernels();
KernelList decoder_layers_kernels();

}  // namespace eadem::kernels::cuda
