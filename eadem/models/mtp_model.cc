// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/mtp_model.h"

#include <cstdlib>

#include "eadem/models/decoders/dense_decoder.h"
#include "eadem/models/family.h"
#include "eadem/models/parameter_reader.h"

namespace eadem::models {

using pipeline::Graph;

namespace {

constexpr const char *kSharedHead = "shared_head", *kStreamHead = "hc_head";

// The model with the module's layers.
ModelConfig with_own_layers(const Decoder& model) {
  const ModelInfo& info = model.info();
  if (model.family().mtp == ModelFamily::Mtp::none)
    throw Unsupported("{} has no head for multi-token prediction (MTP) that is computed here", info.architecture);
  ModelConfig config = *model.config();
  if (model.family().add_mtp_layers != nullptr) {
    model.family().add_mtp_layers(config);
    return config;
  }
  ++config.num_hidden_layers;
  config.layer_windows.push_back(0);
  return config;
}

}  // namespace

MtpModel::MtpModel(const Decoder& model)
    : longer_(with_own_layers(model), model.family()),
      layer_(static_cast<int>(model.info().layers)),
      scope_("layers." + std::to_string(layer_)),
      info_(model.info()),
      input_(model.decoder_spec().norm, info_.hidden, model.decoder_spec().streams, layer_),
      norm_(model.decoder_spec().norm),
      streams_(model.decoder_spec().streams) {
  norm_.name = "norm";
  info_.layers = longer_.info().layers - layer_;
}

modules::ModelSpec MtpModel::spec() const {
  modules::ModelSpec spec = longer_.spec();
  spec.layers = info_.layers;
  spec.num_parameters = 0;
  for (const ParameterInfo& parameter : parameters()) spec.num_parameters += parameter.shape.num_elements();
  return spec;
}

ValueId MtpModel::embed(BuildContext& context) const {
  if (context.num_ranks > 1 || context.expert_ranks > 1)
    throw Unsupported("a head for multi-token prediction (MTP) of {} over several ranks", info_.architecture);
  const ValueId tokens = longer_.embed(context);
  const DType activations = context.hardware.of(modules::Role::embedding).precision.activations.value;
  const ValueId previous = context.graph.add_input(
      "previous_hidden", streams_.streams > 0 ? TensorType(activations, {Symbol::tokens, streams_.streams, hidden()})
                                              : TensorType(activations, {Symbol::tokens, hidden()}));
  const Graph::Scope model(context.graph, "model");
  const Graph::Scope layer(context.graph, scope_, layer_);
  return input_.build(context, tokens, previous);
}

ValueId MtpModel::layer(BuildContext& context, int index, ValueId x) const {
  return longer_.layer(context, layer_ + index, x);
}

ValueId MtpModel::finish(BuildContext& context, ValueId x) const {
  const Graph::Scope model(context.graph, "model");
  const Graph::Scope layer(context.graph, scope_, layer_);
  if (streams_.streams > 0) x = modules::HyperConnections(streams_).merge(context, kStreamHead, x);
  const Graph::Scope head(context.graph, kSharedHead);
  return modules::Norm(norm_, hidden()).build(context, x, layer_);
}

bool MtpModel::is_own(const std::string& parameter) const {
  const LayerName name = layer_name(parameter);
  return !name.rest.empty() && std::atoll(name.number.c_str()) >= layer_;
}

std::vector<ParameterInfo> MtpModel::parameters() const {
  const std::string prefix = "model." + scope_ + ".";
  std::vector<ParameterInfo> list;
  for (const ParameterInfo& each : longer_.parameters()) {
    if (is_own(each.name) || each.name == "model.embed_tokens.weight" || each.name == "lm_head.weight")
      list.push_back(each);
    if (each.name == "model.embed_tokens.weight") input_.list_parameters(prefix, list);
  }
  if (streams_.streams > 0) modules::list_parameters(streams_, true, prefix + kStreamHead + ".", list);
  modules::list_parameters(norm_, hidden(), prefix + kSharedHead + ".", list);
  return list;
}

std::string MtpModel::place(CheckpointFormat format) const {
  if (format == CheckpointFormat::gguf) return fmt::format("blk.{}", layer_);
  switch (longer_.family().mtp) {
    case ModelFamily::Mtp::further_layer: return "model." + scope_;
    case ModelFamily::Mtp::own_module: return std::string(longer_.family().mtp_module);
    default: return "mtp";
  }
}

namespace {

std::string name_in_own_module(const std::string& tensor, const std::string& layer, const ModelFamily& family) {
  const size_t at = tensor.find(layer);
  if (at == std::string::npos) return tensor;
  const std::string_view rest = std::string_view(tensor).substr(at + layer.size());
  for (const OwnName& name : family.mtp_names)
    if (rest.starts_with(name.usual))
      return fmt::format("{}.{}{}", family.mtp_module, name.own, rest.substr(name.usual.size()));
  return tensor;
}

template <typename Rename>
void rename_leaves(WeightRecipe& recipe, Rename&& rename) {
  for (WeightRecipe& part : recipe.parts) rename_leaves(part, rename);
  if (recipe.is_name()) recipe.tensor = rename(recipe.tensor);
}

}  // namespace

std::string MtpModel::name_in_own_layers(const std::string& tensor) const {
  constexpr std::string_view kLayers = "layers.", kFinalNorm = "shared_head.norm.";
  const size_t at = tensor.find(kLayers);
  if (at == std::string::npos) return tensor;
  const size_t number = at + kLayers.size(), dot = tensor.find('.', number);
  const int64_t layer = std::atoll(tensor.c_str() + number) - layer_;
  if (layer < 0 || dot == std::string::npos) return tensor;
  const std::string_view rest = std::string_view(tensor).substr(dot + 1);
  if (rest.starts_with(kFinalNorm))
    return fmt::format("mtp.layers.{}.final_layernorm.{}", info_.layers - 1, rest.substr(kFinalNorm.size()));
  return fmt::format("mtp.layers.{}.{}", layer, rest);
}

std::vector<WeightRecipe> MtpModel::recipes(const ParameterInfo& parameter, CheckpointFormat format) const {
  std::vector<WeightRecipe> recipes = longer_.recipes(parameter, format);
  const ModelFamily::Mtp mtp = longer_.family().mtp;
  if (mtp == ModelFamily::Mtp::further_layer || format != CheckpointFormat::huggingface) return recipes;
  const std::string layer = scope_ + ".";
  std::vector<WeightRecipe> renamed;
  for (WeightRecipe& recipe : recipes) {
    rename_leaves(recipe, [&](const std::string& tensor) {
      return mtp == ModelFamily::Mtp::own_layers ? name_in_own_layers(tensor)
                                                 : name_in_own_module(tensor, layer, longer_.family());
    });
    // Where a family has two names for a tensor, the module may have one.
    if (renamed.empty() || renamed.back().names() != recipe.names()) renamed.push_back(std::move(recipe));
  }
  return renamed;
}

namespace {

constexpr std::string_view kOwnEmbedding = "mtp.embed_tokens.weight";

std::shared_ptr<const MtpModel> model_of(const Checkpoint& checkpoint) {
  const auto* decoder = dynamic_cast<const Decoder*>(checkpoint.model.get());
  if (decoder == nullptr) throw Unsupported("{} has no head for multi-token prediction (MTP)", checkpoint.path);
  return std::make_shared<const MtpModel>(*decoder);
}

}  // namespace

std::string why_no_mtp(const Checkpoint& checkpoint) {
  Checkpoint module = checkpoint;
  try {
    module.model = model_of(checkpoint);
  } catch (const Unsupported& refusal) {
    return refusal.what();
  }
  if (checkpoint.weights == nullptr) return fmt::format("{} has no weights", checkpoint.path);
  if (checkpoint.weights->find(kOwnEmbedding) != nullptr)
    return fmt::format(
        "{}: the head for multi-token prediction (MTP) has an embedding of its own, '{}'; heads here read the model's",
        checkpoint.weights->path(), kOwnEmbedding);
  const CheckpointFormat format = format_of(*checkpoint.weights);
  if (format == CheckpointFormat::gguf && !checkpoint.model->config()->family().gguf_mtp)
    return fmt::format("{}: GGUF files of {} have no head for multi-token prediction (MTP) that is read",
                       checkpoint.weights->path(), checkpoint.model->info().architecture);
  const ParameterReader reader(module);
  for (const ParameterInfo& parameter : module.model->parameters())
    if (reader.recipe(parameter.name) == nullptr)
      return fmt::format("{}: the file has no head for multi-token prediction (MTP) of {}: there is no '{}'",
                         checkpoint.weights->path(), module.model->info().architecture,
                         module.model->recipes(parameter, format).front().names().front());
  return {};
}

std::string mtp_place(const Checkpoint& checkpoint) {
  return why_no_mtp(checkpoint).empty() ? model_of(checkpoint)->place(format_of(*checkpoint.weights)) : "";
}

Checkpoint mtp_checkpoint(const Checkpoint& checkpoint) {
  if (const std::string reason = why_no_mtp(checkpoint); !reason.empty()) throw Unsupported("{}", reason);
  Checkpoint module = checkpoint;
  module.model = model_of(checkpoint);
  module.ignored_keys.clear();  // the model has spoken of them
  module.notice.clear();
  return module;
}

}  // namespace eadem::models
