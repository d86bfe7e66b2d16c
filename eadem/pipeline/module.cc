// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/module.h"

namespace eadem::pipeline {

ValueId OpModule::build(Graph& graph, ValueId x) const {
  const Graph::Scope scope(graph, name_);
  std::vector<ValueId> inputs = {x};
  for (const Parameter& parameter : parameters_)
    inputs.push_back(graph.add_parameter(graph.scoped_name(parameter.name), parameter.type));
  return graph.add1(op_, inputs);
}

}  // namespace eadem::pipeline
