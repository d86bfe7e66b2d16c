// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/streams/hyper_connections.h"

#include "eadem/modules/base/rms_norm.h"
#include "eadem/ops/elementwise/columns.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/reshape.h"
#include "eadem/ops/streams/mix_streams.h"
#include "eadem/ops/streams/stream_weights.h"

namespace eadem::modules {

namespace {

kernels::StreamWeightsAttrs weights_of(const HyperConnections::Config& config, bool merges) {
  return {.streams = config.streams,
          .iterations = config.iterations,
          .eps = static_cast<float>(config.eps),
          .merges = merges};
}

}  // namespace

std::vector<std::pair<std::string, Shape>> HyperConnections::Config::parameters(bool merges) const {
  const kernels::StreamWeightsAttrs weights = weights_of(*this, merges);
  return {{"fn", {weights.width(), streams * hidden}}, {"base", {weights.width()}}, {"scale", {weights.scales()}}};
}

ValueId HyperConnections::start(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  ValueId all = x;
  for (int64_t stream = 1; stream < config_.streams; ++stream)
    all = graph.add1(std::make_shared<ops::ConcatColumns>(kernels::ColumnsAttrs{stream * config_.hidden}), {all, x});
  return graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{config_.streams, config_.hidden}), {all});
}

ValueId HyperConnections::build_weights(BuildContext& context, ValueId streams, bool merges) const {
  Graph& graph = context.graph;
  const int64_t all = config_.streams * config_.hidden;
  const ValueId flat = graph.add1(std::make_shared<ops::Reshape>(std::vector<int64_t>{all}), {streams});
  const ValueId normalized = RmsNorm(all, config_.norm_eps).build_weightless(context, flat);
  std::vector<ValueId> parameters;
  for (const auto& [name, shape] : config_.parameters(merges)) {
    const std::vector<Dim> dims(shape.dims().begin(), shape.dims().end());
    parameters.push_back(graph.add_parameter(graph.scoped_name(name), TensorType(DType::f32, dims)));
  }
  const ValueId logits = graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{.out_dtype = DType::f32}),
                                    {normalized, parameters[0]});
  return graph.add1(std::make_shared<ops::StreamWeights>(weights_of(config_, merges)),
                    {logits, parameters[1], parameters[2]});
}

HyperConnections::Reading HyperConnections::read(BuildContext& context, const std::string& name,
                                                 ValueId streams) const {
  const Graph::Scope scope(context.graph, name);
  const ValueId weights = build_weights(context, streams, false);
  return {context.graph.add1(std::make_shared<ops::CollapseStreams>(), {streams, weights}), weights};
}

ValueId HyperConnections::write(BuildContext& context, const std::string& name, ValueId streams, ValueId y,
                                ValueId weights) const {
  const Graph::Scope scope(context.graph, name);
  return context.graph.add1(std::make_shared<ops::ExpandStreams>(), {streams, y, weights});
}

ValueId HyperConnections::merge(BuildContext& context, const std::string& name, ValueId streams) const {
  const Graph::Scope scope(context.graph, name);
  return context.graph.add1(std::make_shared<ops::CollapseStreams>(), {streams, build_weights(context, streams, true)});
}

}  // namespace eadem::modules
