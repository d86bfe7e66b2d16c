// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/select_topk.h"

#include <cmath>

#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/elementwise/scale_by.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/rms_norm.h"

namespace eadem::modules {

ValueId SelectTopk::build_norm(BuildContext& context, ValueId x) const {
  if (!config_.norm_eps) return x;
  Graph& graph = context.graph;
  const ValueId scale = graph.add_parameter(graph.scoped_name("gate.scale"), TensorType(DType::f32, {config_.hidden}));
  const Graph::Scope scope(graph, "gate");
  const kernels::RmsNormAttrs attrs{static_cast<float>(*config_.norm_eps)};
  const auto factor = static_cast<float>(1 / std::sqrt(static_cast<double>(config_.hidden)));
  return graph.add1(std::make_shared<ops::Scale>(kernels::ScaleAttrs{.factor = factor}),
                    {graph.add1(std::make_shared<ops::RmsNorm>(attrs), {x, scale})});
}

SelectTopk::Chosen SelectTopk::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  x = build_norm(context, x);
  const auto parameter = [&](bool is_there, const char* name, std::initializer_list<Dim> dims) {
    return is_there ? graph.add_parameter(graph.scoped_name(name), TensorType(DType::f32, dims)) : pipeline::kNoValue;
  };
  const int64_t choices = config_.choices;
  const ValueId weight = parameter(true, "gate.weight", {choices, config_.hidden}),
                bias = parameter(config_.bias, "gate.bias", {choices}),
                correction = parameter(config_.correction_bias, "gate.e_score_correction_bias", {choices}),
                scales = parameter(config_.scales, "per_expert_scale", {choices}),
                table = parameter(config_.route.by_token, "gate.tid2eid", {config_.token_table, config_.route.top_k});
  const Graph::Scope scope(graph, "gate");
  const kernels::LinearAttrs attrs{.has_bias = config_.bias, .out_dtype = DType::f32};
  const ValueId logits = graph.add1(std::make_shared<ops::Linear>(attrs), {x, weight, bias});
  std::vector<ValueId> inputs = {logits, correction};
  if (config_.route.by_token)
    inputs.insert(inputs.end(), {table, context.step.token_ids});
  else
    context.routers.push_back({logits, config_.route.top_k});
  const std::vector<ValueId> chosen = graph.add(std::make_shared<ops::Route>(config_.route), std::move(inputs));
  if (!config_.scales) return {chosen[0], chosen[1]};
  const kernels::ScaleByAttrs indexed{.indexed = true};
  return {chosen[0], graph.add1(std::make_shared<ops::ScaleBy>(indexed), {chosen[1], scales, chosen[0]})};
}

}  // namespace eadem::modules
