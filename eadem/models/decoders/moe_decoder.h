// SPDX-License-Identifier: Apache-2.0
//
// The parts that families with mixtures of experts share: keys of their configurations, the decoder that most of them
// are, and the ways in which checkpoints store experts.
#pragma once

#include <string_view>
#include <vector>

#include "eadem/models/config/config_text.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/weight_recipe.h"

namespace eadem::models {

// The sizes that config.json gives under `count_key` or transformers 5's num_local_experts, num_experts_per_tok and
// moe_intermediate_size, with the values for absent keys.
struct ExpertDefaults {
  std::string_view count_key = "num_experts";
  int64_t count = 0;
  int64_t per_token = 0;
  int64_t ffn = 0;
};
void read_experts(const io::JsonReader& config, const ExpertDefaults& defaults, ModelConfig& result);
void write_experts(const ModelConfig& config, std::string_view count_key, io::JsonValue& json);

// The same of a GGUF file: expert_count, expert_used_count and expert_feed_forward_length, for which
// feed_forward_length stands where it is absent.
inline constexpr std::string_view kExpertGgufKeys = "expert_count expert_used_count expert_feed_forward_length";
void read_experts(const io::GgufFile& file, const std::string& prefix, ModelConfig& result);
void write_experts(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
// leading_dense_block_count of a GGUF file: so many layers have dense MLPs, all others experts. Writing throws
// Unsupported for a layer of mlp_only_layers that is not among the first ones.
void read_leading_layers(const io::GgufFile& file, const std::string& prefix, ModelConfig& result);
void write_leading_layers(const ModelConfig& config, const std::string& prefix, io::GgufMetadata& metadata);
// The size of the experts that compute every token is that of their tensors; none, if there are none.
void read_shared_experts(const io::GgufFile& file, ModelConfig& result);
// Throws Unsupported unless expert_gating_func is `honoured` (1: softmax, 2: sigmoid) or absent.
void require_gating(const io::GgufFile& file, const std::string& prefix, int64_t honoured);

// decoder_sparse_step and mlp_only_layers.
void read_sparse_layers(const io::JsonReader& config, ModelConfig& result);
void write_sparse_layers(const ModelConfig& config, io::JsonValue& json);

// The experts that the configuration describes, without what is a family's own: scores, groups, biases.
modules::MoeMlp::Config experts_of(const ModelConfig& config);
// A pre-norm decoder whose layers have `experts` where the configuration has them, and a dense MLP elsewhere.
DecoderSpec moe_decoder(const ModelConfig& config, const modules::MoeMlp::Config& experts,
                        kernels::RopeStyle rope_style = kernels::RopeStyle::rotate_half);
// The same with q and k normalized over all heads of a token together.
DecoderSpec with_whole_norms(DecoderSpec spec);

// How the Hugging Face files of a family name the parts of a layer's experts.
struct ExpertNames {
  std::string_view module = "mlp";
  std::string_view gate = "gate_proj", up = "up_proj", down = "down_proj";
};
// A matrix for each expert, or what transformers 5 computes with: gate and up of all experts in one tensor
// [experts, 2 ffn, hidden], down in another. GGUF files have the parameters as they are. Nothing for other parameters.
std::vector<WeightRecipe> expert_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format, const ExpertNames& names = {});

// The factor on q . k of latent attention: the root of head_dim divides it, and the square of yarn's factor multiplies
// it.
double latent_scale_of(const ModelConfig& config);

// k_b_proj or v_b_proj, of kv_b_proj, which has for each head rows of its keys and then of its values. What takes a
// query into the space of the latent is the transpose of what makes keys of latents. GGUF files have the parameters as
// they are; those from before April 2025 have kv_b_proj. Nothing for other parameters.
std::vector<WeightRecipe> latent_recipes(const ModelConfig& config, const ParameterInfo& parameter,
                                         CheckpointFormat format);

}  // namespace eadem::models
