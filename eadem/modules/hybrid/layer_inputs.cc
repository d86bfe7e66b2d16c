// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/layer_inputs.h"

#include <cmath>

#include "eadem/modules/base/embedding.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/elementwise/columns.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

namespace {

ValueId times(Graph& graph, double factor, ValueId x) {
  return graph.add1(std::make_shared<ops::Scale>(kernels::ScaleAttrs{.factor = static_cast<float>(factor)}), {x});
}

// Appends x [tokens, parts * width] in parts, by halves: each value is copied once for each doubling of the parts.
void split_evenly(Graph& graph, ValueId x, int64_t parts, int64_t width, std::vector<ValueId>& list) {
  if (parts == 1) return list.push_back(x);
  const int64_t first = parts / 2;
  const std::vector<ValueId> halves =
      graph.add(std::make_shared<ops::SplitColumns>(kernels::ColumnsAttrs{first * width}), {x});
  split_evenly(graph, halves[0], first, width, list);
  split_evenly(graph, halves[1], parts - first, width, list);
}

}  // namespace

void LayerInputs::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const int64_t all = config_.layers * config_.width;
  const auto reshaped = [&](std::vector<int64_t> dims, ValueId value) {
    return graph.add1(std::make_shared<ops::Reshape>(std::move(dims)), {value});
  };
  const auto in_scope = [&](const char* name, auto&& build_value) -> ValueId {
    const Graph::Scope scope(graph, name);
    return build_value();
  };
  const ValueId own = in_scope("embed_tokens_per_layer", [&] {
    const Embedding table(config_.vocab, all, std::sqrt(static_cast<double>(config_.width)));
    return table.build(context, context.step.token_ids);
  });
  const ValueId projected = LinearFactory::build(context,
                                                 {.name = "per_layer_model_projection",
                                                  .in = config_.hidden,
                                                  .out = all,
                                                  .hardware = &context.hardware.of(Role::mlp)},
                                                 x);
  const ValueId made = in_scope("per_layer_projection_norm", [&] {
    const ValueId scaled = times(graph, 1 / std::sqrt(static_cast<double>(config_.hidden)), projected);
    const ValueId parts = reshaped({config_.layers, config_.width}, scaled);
    return reshaped({all}, RmsNorm(config_.width, config_.eps).build(context, parts));
  });
  in_scope("per_layer_inputs", [&] {
    const ValueId sum = graph.add1(std::make_shared<ops::Add>(), {made, own});
    const ValueId inputs = times(graph, std::sqrt(0.5), sum);
    context.step.layer_inputs.clear();
    split_evenly(graph, inputs, config_.layers, config_.width, context.step.layer_inputs);
    return inputs;
  });
}

ValueId LayerInputReader::build(BuildContext& context, ValueId x) const {
  if (context.step.layer_inputs.empty())
    throw Unsupported("layer {} reads inputs that the embedding makes, which is not in the same part of the model",
                      layer_);
  const HardwareConfig& hardware = context.hardware.of(Role::mlp, layer_);
  const auto project = [&](const char* name, int64_t in, int64_t out, ValueId value) {
    return LinearFactory::build(context, {.name = name, .in = in, .out = out, .hardware = &hardware}, value);
  };
  const ValueId gate = project("per_layer_input_gate", config_.hidden, config_.width, x);
  const ValueId gated =
      context.graph.add1(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{config_.activation}),
                         {gate, context.step.layer_inputs[static_cast<size_t>(layer_)]});
  const ValueId made = project("per_layer_projection", config_.width, config_.hidden, gated);
  return context.graph.add1(std::make_shared<ops::Add>(),
                            {x, Norm(config_.norm, config_.hidden).build(context, made, layer_)});
}

}  // namespace eadem::modules
