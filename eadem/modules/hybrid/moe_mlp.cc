// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/moe_mlp.h"

#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/experts/expert_order.h"
#include "eadem/ops/experts/permute.h"
#include "eadem/ops/linear.h"

namespace eadem::modules {

MoeMlp::Routed MoeMlp::build_router(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  // A rounded router would choose other experts.
  const ValueId weight =
      graph.add_parameter(graph.scoped_name("gate.weight"), TensorType(DType::f32, {config_.experts, config_.hidden}));
  const Graph::Scope scope(graph, "gate");
  const ValueId logits =
      graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{.out_dtype = DType::f32}), {x, weight});
  const std::vector<ValueId> routed = graph.add(std::make_shared<ops::Route>(config_.route), {logits});
  return {routed[0], routed[1]};
}

ValueId MoeMlp::build_experts(BuildContext& context, ValueId rows, ValueId offsets) const {
  const HardwareConfig& hardware = context.hardware.of(Role::mlp, layer_);
  const Graph::Scope scope(context.graph, "experts");
  const auto project = [&](const char* name, int64_t in, int64_t out, Parallel parallel, ValueId value) {
    const LinearRequest request{.name = name, .in = in, .out = out, .parallel = parallel, .hardware = &hardware};
    return LinearFactory::build_grouped(context, request, config_.experts, value, offsets);
  };
  const ValueId gate = project("gate_proj", config_.hidden, config_.ffn, Parallel::column, rows);
  const ValueId up = project("up_proj", config_.hidden, config_.ffn, Parallel::column, rows);
  const ValueId gated = context.graph.add1(
      std::make_shared<ops::GatedActivation>(kernels::ActivationAttrs{config_.activation}), {gate, up});
  return project("down_proj", config_.ffn, config_.hidden, Parallel::row, gated);
}

ValueId MoeMlp::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const Routed routed = build_router(context, x);
  const std::vector<ValueId> order =
      graph.add(std::make_shared<ops::ExpertOrder>(kernels::ExpertOrderAttrs{config_.experts}), {routed.experts});
  const ValueId rows = graph.add1(std::make_shared<ops::Permute>(), {x, order[0]});
  const ValueId made = build_experts(context, rows, order[1]);
  return graph.add1(std::make_shared<ops::Unpermute>(), {made, order[0], routed.weights});
}

}  // namespace eadem::modules
