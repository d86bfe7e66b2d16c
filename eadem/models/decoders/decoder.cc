// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/decoders/decoder.h"

#include <algorithm>
#include <cstdlib>

#include "eadem/models/family.h"

namespace eadem::models {

using pipeline::Graph;

namespace {

constexpr const char* kEmbedding = "model.embed_tokens.weight";
constexpr const char* kPositions = "model.embed_positions.weight";
constexpr const char* kHead = "lm_head.weight";
constexpr const char* kHeadBias = "lm_head.bias";
constexpr const char* kStreamHead = "hc_head";
constexpr HeadOrder kOrders[] = {HeadOrder::halves, HeadOrder::interleaved};

bool is_rotated_projection(std::string_view parameter) {
  return parameter.find(".q_proj.") != std::string_view::npos || parameter.find(".k_proj.") != std::string_view::npos;
}

// The tables that a mixer reads; none for one that rotates nothing.
std::vector<modules::RopeConfig> ropes_of(const modules::LayerSpec& layer) {
  return std::visit(
      [](const auto& mixer) -> std::vector<modules::RopeConfig> {
        if constexpr (requires { mixer.ropes(); })
          return mixer.ropes();
        else if constexpr (requires { mixer.rotated; })
          return mixer.rotated ? std::vector{mixer.rope} : std::vector<modules::RopeConfig>();
        else if constexpr (requires { mixer.rope; })
          return {mixer.rope};
        else if constexpr (requires { mixer.attention.rope; })
          return {mixer.attention.rope};
        else
          return {};
      },
      layer.mixer);
}

void build_tables(BuildContext& context, const modules::LayerSpec& layer) {
  for (const modules::LayerSpec& part : layer.parts) build_tables(context, part);
  if (!layer.parts.empty()) return;
  for (const modules::RopeConfig& rope : ropes_of(layer)) modules::Rope(rope).build_table(context);
}

template <typename Build>
ValueId scoped(BuildContext& context, const std::string& name, int layer, Build&& build) {
  const Graph::Scope scope(context.graph, name, layer);
  return build();
}

}  // namespace

std::vector<ParameterInfo> parameters_of(const DecoderSpec& spec) {
  std::vector<ParameterInfo> list = {{kEmbedding, Shape{spec.vocab, spec.hidden}}};
  if (spec.positions > 0) list.push_back({kPositions, Shape{spec.positions, spec.hidden}});
  if (spec.layer_inputs.width > 0) modules::list_parameters(spec.layer_inputs, "model.", list);
  for (size_t layer = 0; layer < spec.layers.size(); ++layer)
    list_parameters(spec.layers[layer], fmt::format("model.layers.{}.", layer), list);
  if (spec.streams.streams > 0)
    modules::list_parameters(spec.streams, true, std::string("model.") + kStreamHead + ".", list);
  modules::list_parameters(spec.norm, spec.hidden, "model.", list);
  if (!spec.tied) list.push_back({kHead, Shape{spec.vocab, spec.hidden}});
  if (spec.head_bias) list.push_back({kHeadBias, Shape{spec.vocab}});
  return list;
}

Decoder::Decoder(ModelConfig config) : Decoder(config, config.family()) {}

Decoder::Decoder(ModelConfig config, const ModelFamily& family)
    : config_(std::move(config)), family_(family), spec_(family.decoder(config_)) {
  info_ = {.architecture = config_.model_type,
           .vocab = config_.vocab_size,
           .hidden = config_.hidden_size,
           .layers = config_.num_hidden_layers,
           .heads = config_.num_attention_heads,
           .kv_heads = config_.num_key_value_heads,
           .head_dim = config_.head_dim,
           .max_positions = config_.max_position_embeddings,
           .short_positions = config_.rope_scaling.short_positions(),
           .tied = config_.tie_word_embeddings,
           .bos_token_ids = config_.bos_token_id,
           .eos_token_ids = config_.eos_token_id};
}

modules::ModelSpec Decoder::spec() const {
  modules::ModelSpec spec{.hidden = config_.hidden_size,
                          .ffn = config_.intermediate_size,
                          .layers = config_.num_hidden_layers,
                          .heads = config_.num_attention_heads,
                          .kv_heads = config_.num_key_value_heads,
                          .head_dim = config_.head_dim,
                          .vocab = config_.vocab_size};
  for (const ParameterInfo& parameter : parameters()) spec.num_parameters += parameter.shape.num_elements();
  return spec;
}

// Layers share the tables of a step, whichever layer comes first.
void Decoder::build_ropes(BuildContext& context, int first_layer, int end_layer) const {
  for (int layer = first_layer; layer < end_layer; ++layer)
    build_tables(context, spec_.layers[static_cast<size_t>(layer)]);
}

void Decoder::build_layer_inputs(BuildContext& context, ValueId x) const {
  if (spec_.layer_inputs.width > 0 && context.step.layer_inputs.empty())
    modules::LayerInputs(spec_.layer_inputs).build(context, x);
}

ValueId Decoder::embed(BuildContext& context) const {
  const Graph::Scope model(context.graph, "model");
  build_ropes(context, 0, static_cast<int>(spec_.layers.size()));
  const ValueId tokens = scoped(context, "embed_tokens", -1, [&] {
    return modules::Embedding(spec_.vocab, spec_.hidden, spec_.embedding_scale).build(context, context.step.token_ids);
  });
  build_layer_inputs(context, tokens);
  if (spec_.positions == 0) return tokens;
  return scoped(context, "embed_positions", -1, [&] {
    const ValueId positions = modules::Embedding(spec_.positions, spec_.hidden).build(context, context.step.positions);
    return context.graph.add1(std::make_shared<ops::Add>(), {tokens, positions});
  });
}

ValueId Decoder::layer(BuildContext& context, int index, ValueId x) const {
  const Graph::Scope model(context.graph, "model");
  build_ropes(context, index, index + 1);
  if (index == 0) build_layer_inputs(context, x);  // embeddings from outside
  if (index == 0 && spec_.streams.streams > 0) x = modules::HyperConnections(spec_.streams).start(context, x);
  return scoped(context, "layers." + std::to_string(index), index, [&] {
    return modules::DecoderLayer(spec_.layers[static_cast<size_t>(index)], index).build(context, x);
  });
}

ValueId Decoder::finish(BuildContext& context, ValueId x) const {
  const Graph::Scope model(context.graph, "model");
  if (spec_.streams.streams > 0) x = modules::HyperConnections(spec_.streams).merge(context, kStreamHead, x);
  return modules::Norm(spec_.norm, spec_.hidden).build(context, x);
}

ValueId Decoder::head(BuildContext& context, ValueId hidden) const {
  return scoped(context, "lm_head", -1, [&] {
    const ValueId logits = modules::LmHead(spec_.vocab, spec_.hidden, spec_.tied ? kEmbedding : kHead, spec_.tied,
                                           spec_.head_bias ? kHeadBias : "")
                               .build(context, hidden);
    if (spec_.logit_scale == 1 && spec_.logit_softcap == 0) return logits;
    return context.graph.add1(
        std::make_shared<ops::Scale>(kernels::ScaleAttrs{.factor = static_cast<float>(spec_.logit_scale),
                                                         .softcap = static_cast<float>(spec_.logit_softcap)}),
        {logits});
  });
}

std::vector<WeightRecipe> Decoder::recipes(const ParameterInfo& parameter, CheckpointFormat format) const {
  std::vector<WeightRecipe> recipes;
  if (family_.recipes != nullptr) recipes = family_.recipes(config_, parameter, format);
  if (recipes.empty()) {
    const bool gguf = format == CheckpointFormat::gguf;
    const auto name = [&](const std::string& own) {
      return WeightRecipe::name(gguf ? gguf_name(own, &family_) : huggingface_name(own, family_));
    };
    recipes.push_back(name(parameter.name));
  }
  // Programs that save a tied matrix once keep either of its names.
  if (format == CheckpointFormat::huggingface && spec_.tied && parameter.name == kEmbedding)
    recipes.push_back(WeightRecipe::name(huggingface_name(kHead, family_)));
  const bool own = config_.rope_style == kernels::RopeStyle::interleaved;
  const bool stored = format == CheckpointFormat::gguf && family_.find_type(config_.model_type)->gguf_interleaves;
  // Files of latent attention agree, whatever their format.
  if (own == stored || family_.latent_attention || !is_rotated_projection(parameter.name)) return recipes;
  if (config_.rotary_dim != config_.head_dim)
    throw Unsupported(
        "only {} of {} dimensions of a head are rotated; the order of '{}' in the other format is not known",
        config_.rotary_dim, config_.head_dim, parameter.name);
  for (WeightRecipe& recipe : recipes)
    recipe = WeightRecipe::reorder(std::move(recipe), config_.head_dim, kOrders[own ? 1 : 0]);
  return recipes;
}

bool Decoder::may_ignore(const std::string& tensor) const {
  for (const std::string_view layers : {"model.layers.", "blk."})
    if (family_.further_layers && tensor.starts_with(layers) &&
        std::atoll(tensor.c_str() + layers.size()) >= config_.num_hidden_layers)
      return true;
  if (!family_.ignored_module.empty() && tensor.starts_with(family_.ignored_module)) return true;
  if (family_.may_ignore != nullptr && family_.may_ignore(config_, tensor)) return true;
  const auto& ignored = family_.ignored_tensors;
  return tensor.ends_with("rotary_emb.inv_freq") || tensor == "rope_freqs.weight" || tensor == kLongFactors ||
         tensor == kShortFactors || (spec_.tied && tensor == huggingface_name(kHead, family_)) ||
         std::any_of(ignored.begin(), ignored.end(), [&](std::string_view suffix) { return tensor.ends_with(suffix); });
}

}  // namespace eadem::models
