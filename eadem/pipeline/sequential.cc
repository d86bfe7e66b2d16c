// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/sequential.h"

namespace eadem::pipeline {

Sequential::Sequential(std::vector<std::shared_ptr<const Module>> modules, const std::vector<int64_t>& row,
                       int64_t max_tokens, std::shared_ptr<Device> device)
    : device_(std::move(device)), parameters_(std::make_shared<ParameterStore>(device_)) {
  Graph graph;
  std::vector<Dim> dims = {Symbol::tokens};
  for (int64_t extent : row) dims.emplace_back(extent);
  ValueId x = graph.add_input("x", TensorType(DType::f32, dims));
  for (const auto& module : modules) x = module->build(graph, x);
  graph.mark_output("y", x);

  Environment environment{.device = device_, .mesh = {}};
  environment.bounds[Symbol::tokens] = max_tokens;
  inference_ = std::make_unique<Program>(graph, environment, parameters_);
  environment.mode = Mode::training;
  environment.input_gradients = {"x"};
  training_ = std::make_unique<Program>(std::move(graph), environment, parameters_);
  inference_->require_complete();
  training_->require_complete();
  for (const auto& [name, id] : training_->states()) {
    const TensorType& type = training_->graph().value(id).type;
    const Tensor& gradient = gradients_[name] = allocate_tensor(*device_, type.dtype, type.bind({}));
    training_->bind_state(name, gradient.view);
  }
  zero_gradients();
}

void Sequential::check(const TensorView& tensor, const TensorType& type, std::string_view name) const {
  SymbolValues symbols;
  symbols[Symbol::tokens] = tensor.shape.rank() > 0 ? tensor.shape[0] : 0;
  const int64_t limit = inference_->environment().bounds[Symbol::tokens];
  if (tensor.dtype != type.dtype || !(tensor.shape == type.bind(symbols)) || symbols[Symbol::tokens] > limit)
    throw InvalidArgument("'{}' is {}; expected {} with tokens <= {}", name, to_string(tensor), to_string(type), limit);
}

Tensor Sequential::read(const Program& program, ValueId value) const {
  const TensorView view = program.view(value);
  Tensor result = Tensor::on_host(view.dtype, view.shape);
  program.read(value, result.view.data);
  return result;
}

Tensor Sequential::inference(const TensorView& x) {
  const ValueId input = inference_->input("x");
  check(x, inference_->graph().value(input).type, "x");
  SymbolValues symbols;
  symbols[Symbol::tokens] = x.shape[0];
  inference_->set_input(input, x.data, x.size_bytes());
  inference_->run(symbols);
  return read(*inference_, inference_->output("y"));
}

Tensor Sequential::forward(const TensorView& x) {
  const ValueId input = training_->input("x");
  check(x, training_->graph().value(input).type, "x");
  forward_[Symbol::tokens] = x.shape[0];
  training_->set_input(input, x.data, x.size_bytes());
  training_->run_forward(forward_);
  return read(*training_, training_->output("y"));
}

Tensor Sequential::backward(const TensorView& dy) {
  const ValueId input = training_->input("d.y");
  check(dy, training_->graph().value(input).type, "dy");
  if (dy.shape[0] != forward_[Symbol::tokens])
    throw InvalidArgument("'dy' has {} rows; the last forward had {}", dy.shape[0], forward_[Symbol::tokens]);
  training_->set_input(input, dy.data, dy.size_bytes());
  training_->run_backward(forward_);
  return read(*training_, training_->output("d.x"));
}

Tensor Sequential::gradient(const std::string& parameter) const {
  const auto found = gradients_.find("grad." + parameter);
  if (found == gradients_.end()) throw NotFound("no parameter '{}' is trained here", parameter);
  return copy_to_host(*device_, found->second.view);
}

void Sequential::zero_gradients() {
  for (const auto& [name, gradient] : gradients_) device_->fill_zero(gradient.view.data, gradient.view.size_bytes());
}

}  // namespace eadem::pipeline
