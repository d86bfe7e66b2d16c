// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/moe_mlp.h"

#include "eadem/modules/factory/fused_moe_factory.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/modules/hybrid/dense_mlp.h"
#include "eadem/ops/experts/clamped_swiglu.h"
#include "eadem/ops/experts/expert_order.h"
#include "eadem/ops/experts/gate_rows.h"
#include "eadem/ops/experts/identity_experts.h"
#include "eadem/ops/experts/permute.h"
#include "eadem/ops/linear.h"

namespace eadem::modules {

SelectTopk::Chosen MoeMlp::build_router(BuildContext& context, ValueId x) const {
  return SelectTopk({.hidden = config_.hidden,
                     .choices = config_.choices(),
                     .route = config_.route,
                     .bias = config_.router_bias,
                     .correction_bias = config_.correction_bias,
                     .norm_eps = config_.router_norm_eps,
                     .scales = config_.expert_scales,
                     .token_table = config_.token_table})
      .build(context, x);
}

ValueId MoeMlp::build_experts(BuildContext& context, ValueId rows, ValueId offsets) const {
  const HardwareConfig& hardware = context.hardware.of(Role::mlp, layer_);
  const Graph::Scope scope(context.graph, "experts");
  const auto project = [&](const char* name, int64_t in, int64_t out, Parallel parallel, ValueId value) {
    const LinearRequest request{
        .name = name, .in = in, .out = out, .bias = config_.expert_bias, .parallel = parallel, .hardware = &hardware};
    return LinearFactory::build_grouped(context, request, config_.experts, value, offsets);
  };
  const int64_t width = config_.expert_width();
  if (!config_.gated) {
    const ValueId up = project("up_proj", width, config_.ffn, Parallel::column, rows);
    return project(
        "down_proj", config_.ffn, width, Parallel::row,
        context.graph.add1(std::make_shared<ops::Activation>(kernels::ActivationAttrs{config_.activation}), {up}));
  }
  const ValueId gate = project("gate_proj", width, config_.ffn, Parallel::column, rows);
  const ValueId up = project("up_proj", width, config_.ffn, Parallel::column, rows);
  const ops::OpPtr activation =
      config_.clamped
          ? ops::OpPtr(std::make_shared<ops::ClampedSwiglu>(*config_.clamped))
          : ops::OpPtr(std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{config_.activation}));
  const ValueId gated = context.graph.add1(activation, {gate, up});
  return project("down_proj", config_.ffn, width, Parallel::row, gated);
}

ValueId MoeMlp::build_shared(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const SharedExpert& shared = *config_.shared;
  ValueId y = pipeline::kNoValue;
  {
    const Graph::Scope scope(graph, shared.name);
    y = DenseMlp({.hidden = config_.hidden,
                  .ffn = shared.ffn,
                  .activation = config_.activation,
                  .bias = shared.bias,
                  .gated = config_.gated,
                  .clamped = config_.clamped},
                 layer_)
            .build(context, x);
  }
  if (!shared.gated) return y;
  const ValueId weight = graph.add_parameter(graph.scoped_name("shared_expert_gate.weight"),
                                             TensorType(DType::f32, {int64_t{1}, config_.hidden}));
  const Graph::Scope scope(graph, "shared_expert_gate");
  const kernels::LinearAttrs attrs{.out_dtype = context.hardware.of(Role::mlp, layer_).precision.activations.value};
  const ValueId gate = graph.add1(std::make_shared<ops::Linear>(attrs), {x, weight});
  return graph.add1(std::make_shared<ops::GateRows>(), {y, gate});
}

ValueId MoeMlp::build(BuildContext& context, ValueId x, ValueId router_x) const {
  Graph& graph = context.graph;
  const SelectTopk::Chosen routed = build_router(context, router_x);
  const kernels::ExpertOrderAttrs all{config_.experts, config_.identities};
  const std::vector<ValueId> order = graph.add(std::make_shared<ops::ExpertOrder>(all), {routed.experts});
  const HardwareConfig& hardware = context.hardware.of(Role::mlp, layer_);
  const auto project = [&](const char* name, int64_t in, int64_t out, ValueId value) {
    if (config_.latent == 0) return value;
    return LinearFactory::build(
        context, {.name = name, .in = in, .out = out, .bias = config_.latent_bias, .hardware = &hardware}, value);
  };
  const ValueId read = project("fc1_latent_proj", config_.hidden, config_.latent, x);
  const auto with_weights = [&](bool weighted, ValueId value) {
    std::vector<ValueId> ports = {value, order[0]};
    if (weighted) ports.push_back(routed.weights);
    return ports;
  };
  const bool first = config_.weighs_input;
  const ValueId rows =
      graph.add1(std::make_shared<ops::Permute>(kernels::PermuteAttrs{first}), with_weights(first, read));
  const ValueId made = FusedMoeFactory::build(
      context, {.experts = config_.experts, .top_k = config_.route.top_k}, rows, order[1],
      [&](ValueId own_rows, ValueId own_offsets) { return build_experts(context, own_rows, own_offsets); });
  ValueId mixed = project(
      "fc2_latent_proj", config_.latent, config_.hidden,
      graph.add1(std::make_shared<ops::Unpermute>(kernels::UnpermuteAttrs{!first}), with_weights(!first, made)));
  const auto add = [&](ValueId more) { mixed = graph.add1(std::make_shared<ops::Add>(), {mixed, more}); };
  if (config_.identities > 0) {
    const kernels::IdentityExpertsAttrs attrs{.first = config_.experts};
    add(graph.add1(std::make_shared<ops::IdentityExperts>(attrs), {x, routed.experts, routed.weights}));
  }
  if (config_.shared) add(build_shared(context, x));
  return mixed;
}

}  // namespace eadem::modules
