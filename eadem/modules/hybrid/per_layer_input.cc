// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/per_layer_input.h"

#include <cmath>
#include <numbers>

#include "eadem/modules/base/embedding.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/elementwise.h"
#include "eadem/ops/rms_norm.h"

namespace eadem::modules {

namespace {

ValueId scaled(Graph& graph, double factor, ValueId x) {
  return graph.add1(std::make_shared<ops::Scale>(kernels::ScaleAttrs{.factor = static_cast<float>(factor)}), {x});
}

ValueId sum(Graph& graph, ValueId a, ValueId b) { return graph.add1(std::make_shared<ops::Add>(), {a, b}); }

}  // namespace

std::vector<std::pair<std::string, Shape>> PerLayerInput::Config::parameters() const {
  return {{"per_layer_embedding.weight", {vocab, size}},
          {"per_layer_model_projection.weight", {size, hidden}},
          {"per_layer_input_gate.weight", {size, hidden}},
          {"per_layer_projection.weight", {hidden, size}},
          {"post_per_layer_input_norm.weight", {hidden}}};
}

ValueId PerLayerInput::project(BuildContext& context, const char* name, int64_t in, int64_t out, ValueId x) const {
  return LinearFactory::build(
      context, {.name = name, .in = in, .out = out, .hardware = &context.hardware.of(Role::mlp, layer_)}, x);
}

ValueId PerLayerInput::build_input(BuildContext& context) const {
  Graph& graph = context.graph;
  if (context.embedded == pipeline::kNoValue)
    throw Unsupported("layer {} reads the model's embedding, which another stage of the pipeline has", layer_);
  const double size = static_cast<double>(config_.size);
  const ValueId projected =
      scaled(graph, 1.0 / std::sqrt(static_cast<double>(config_.hidden)),
             project(context, "per_layer_model_projection", config_.hidden, config_.size, context.embedded));
  const DType dtype = context.hardware.of(Role::norm, layer_).precision.weights.value.dtype;
  const ValueId weight = graph.add_parameter(kPerLayerNorm, TensorType(dtype, {config_.size}));
  const ValueId normed = graph.add1(
      std::make_shared<ops::RmsNorm>(kernels::RmsNormAttrs{static_cast<float>(config_.norm_eps)}), {projected, weight});
  const auto looked_up = [&] {
    const Graph::Scope scope(graph, "per_layer_embedding");
    return Embedding(config_.vocab, config_.size, std::sqrt(size)).build(context, context.step.token_ids);
  };
  return scaled(graph, 1.0 / std::numbers::sqrt2, sum(graph, normed, looked_up()));
}

ValueId PerLayerInput::build(BuildContext& context, ValueId h) const {
  Graph& graph = context.graph;
  const ValueId gated =
      graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{config_.activation}),
                 {project(context, "per_layer_input_gate", config_.hidden, config_.size, h), build_input(context)});
  const ValueId projected = project(context, "per_layer_projection", config_.size, config_.hidden, gated);
  const auto normed = [&] {
    const Graph::Scope scope(graph, "post_per_layer_input_norm");
    return RmsNorm(config_.hidden, config_.norm_eps).build(context, projected, layer_);
  };
  return sum(graph, h, normed());
}

}  // namespace eadem::modules
