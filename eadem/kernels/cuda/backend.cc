// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/backend.h"

#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"

namespace eadem::kernels::cuda {

namespace {

// Ops without a line have no kernel here. Ranks of CUDA devices exchange sums only, and divide key-value
// heads evenly: add_bias, select_heads and the other collectives. linear_add is not needed: add_rms_norm adds the
// residual without a pass of its own, after the product was rounded, as the separate ops do.
constexpr OpKernels kOps[] = {
    {"embedding", embedding_kernels},
    {"linear", linear_kernels},
    {"rms_norm", rms_norm_kernels},
    {"layer_norm", layer_norm_kernels},
    {"add", add_kernels},
    {"scale", scale_kernels},
    {"mul", mul_kernels},
    {"rope_table", rope_table_kernels},
    {"rope", rope_kernels},
    {"attention", attention_kernels},
    {"activation", activation_kernels},
    {"gated_activation", gated_activation_kernels},
    {"softmax", softmax_kernels},
    {"cross_entropy", cross_entropy_kernels},
    {"cast", cast_kernels},
    {"quantize", quantize_kernels},
    {"gated_activation_quantize", gated_activation_quantize_kernels},
    {"gated_gradients_quantize", gated_gradients_quantize_kernels},
    {"kv_append", kv_append_kernels},
    {"select_rows", select_rows_kernels},
    {"feed_tokens", feed_tokens_kernels},
    {"sample", sample_kernels},
    {"all_reduce", all_reduce_kernels},
    {"grad_norm", grad_norm_kernels},
    {"adamw", adamw_kernels},
    {"add_rms_norm", add_rms_norm_kernels},
    {"rms_norm_quantize", rms_norm_quantize_kernels},
    {"add_rms_norm_quantize", add_rms_norm_quantize_kernels},
    {"linear_gated_activation", linear_gated_activation_kernels},
    {"linear_gated_activation_quantize", linear_gated_activation_quantize_kernels},
    {"linear_qkv", linear_qkv_kernels},
    {"rope_kv_append", rope_kv_append_kernels},
    {"rope_qk_append", rope_qk_append_kernels},
    {"rope_append_attention", rope_append_attention_kernels},
    {"rope_append_attention_quantize", rope_append_attention_quantize_kernels},
    {"decoder_layer", decoder_layers_kernels},
    {"decoder_layers", decoder_layers_kernels},
    {"linear_cross_entropy", linear_cross_entropy_kernels},
};

KernelList kernels_of(std::string_view op) { return find_kernels(kOps, op); }

std::vector<std::string> list() {
  std::vector<std::string> names;
  for (int index = 0; index < num_cuda_devices(); ++index) names.push_back(fmt::format("cuda:{}", index));
  return names;
}

std::shared_ptr<Device> open(int index, const DeviceOptions&) { return open_cuda_device(index); }

}  // namespace

extern const Backend kBackend{.name = "cuda", .list = list, .open = open, .kernels = kernels_of};

}  // namespace eadem::kernels::cuda
