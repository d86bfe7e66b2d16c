// SPDX-License-Identifier: Apache-2.0
//
// Module: adds ops to a graph and names parameters. It runs nothing. The concrete ones live in `modules`.
#pragma once

#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

class Module {
 public:
  virtual ~Module() = default;
  // Adds this module's ops behind `x` and returns its result.
  virtual ValueId build(Graph& graph, ValueId x) const = 0;
};

// A module that is one op: its first input is the module's input, its other inputs are parameters.
class OpModule final : public Module {
 public:
  struct Parameter {
    std::string name;  // below the scope
    TensorType type;
  };
  // `name`: the scope of the parameters, e.g. "norm" gives "norm.weight".
  OpModule(std::string name, OpPtr op, std::vector<Parameter> parameters)
      : name_(std::move(name)), op_(std::move(op)), parameters_(std::move(parameters)) {}

  ValueId build(Graph& graph, ValueId x) const override;

 private:
  std::string name_;
  OpPtr op_;
  std::vector<Parameter> parameters_;
};

}  // namespace eadem::pipeline
