// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/mtp_input.h"

#include "eadem/modules/factory/linear_factory.h"
#include "eadem/modules/hybrid/layer_spec.h"
#include "eadem/ops/elementwise/columns.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/reshape.h"

namespace eadem::modules {

MtpInput::MtpInput(const NormSpec& norm, int64_t hidden, const HyperConnections::Config& streams, int layer)
    : token_norm_(norm), previous_norm_(norm), hidden_(hidden), streams_(streams), layer_(layer) {
  token_norm_.name = "enorm";
  previous_norm_.name = "hnorm";
}

ValueId MtpInput::project(BuildContext& context, const char* name, int64_t in, ValueId x) const {
  return LinearFactory::build(
      context, {.name = name, .in = in, .out = hidden_, .hardware = &context.hardware.of(Role::mlp, layer_)}, x);
}

ValueId MtpInput::build(BuildContext& context, ValueId tokens, ValueId previous) const {
  if (streams_.streams > 0) return build_streams(context, tokens, previous);
  const ValueId both = context.graph.add1(std::make_shared<ops::ConcatColumns>(kernels::ColumnsAttrs{hidden_}),
                                          {Norm(token_norm_, hidden_).build(context, tokens, layer_),
                                           Norm(previous_norm_, hidden_).build(context, previous, layer_)});
  return project(context, "eh_proj", 2 * hidden_, both);
}

// Each stream of a token is a row of its own to hnorm and h_proj.
ValueId MtpInput::build_streams(BuildContext& context, ValueId tokens, ValueId previous) const {
  Graph& graph = context.graph;
  const Dim count = graph.value(previous).type.dim(0);
  const ValueId flat =
      graph.add1(std::make_shared<ops::Reshape>(streams_.streams * count, std::vector<int64_t>{hidden_}), {previous});
  const ValueId rows = project(context, "h_proj", hidden_, Norm(previous_norm_, hidden_).build(context, flat, layer_));
  const ValueId of_streams =
      graph.add1(std::make_shared<ops::Reshape>(count, std::vector<int64_t>{streams_.streams, hidden_}), {rows});
  const ValueId of_token =
      project(context, "e_proj", hidden_, Norm(token_norm_, hidden_).build(context, tokens, layer_));
  return graph.add1(std::make_shared<ops::Add>(), {of_streams, HyperConnections(streams_).start(context, of_token)});
}

void MtpInput::list_parameters(const std::string& prefix, std::vector<ParameterInfo>& list) const {
  modules::list_parameters(token_norm_, hidden_, prefix, list);
  modules::list_parameters(previous_norm_, hidden_, prefix, list);
  if (streams_.streams == 0) {
    list.push_back({prefix + "eh_proj.weight", Shape{hidden_, 2 * hidden_}});
    return;
  }
  for (const char* name : {"e_proj.weight", "h_proj.weight"}) list.push_back({prefix + name, Shape{hidden_, hidden_}});
}

}  // namespace eadem::modules
