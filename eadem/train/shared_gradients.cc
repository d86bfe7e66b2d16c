// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/shared_gradients.h"

#include <algorithm>

#include "eadem/ops/elementwise/elementwise.h"

namespace eadem::train {

using pipeline::Program;
using pipeline::SharedParameter;
using pipeline::ValueId;

namespace {

constexpr int64_t kPiece = int64_t{1} << 20;  // elements that are sent at once

}  // namespace

SharedGradients::SharedGradients(std::shared_ptr<Device> device, const Mesh& mesh,
                                 std::span<const std::unique_ptr<Program>> programs)
    : device_(std::move(device)), mesh_(mesh), programs_(programs), all_(programs[0]->shared_parameters()) {
  const int here = mesh_.rank(MeshAxis::pp);
  if (std::none_of(all_.begin(), all_.end(), [&](const SharedParameter& shared) { return shared.first == here; }))
    return;
  pipeline::Graph graph;
  const TensorType type(DType::f32, {Symbol::tokens});  // here: elements
  const ValueId sum = graph.add_input("sum", type), term = graph.add_input("term", type);
  graph.mark_output("next", graph.add1(std::make_shared<ops::Add>(), {sum, term}));
  pipeline::Environment environment{.device = device_};
  environment.bounds[Symbol::tokens] = kPiece;
  adder_ =
      std::make_unique<Program>(std::move(graph), environment, std::make_shared<pipeline::ParameterStore>(device_));
  adder_->require_complete();
  received_ = allocate_tensor(*device_, DType::f32, {kPiece});
  adder_->bind_input(term, received_.view.data);
}

bool SharedGradients::is_summed_elsewhere(const std::string& parameter) const {
  return std::any_of(all_.begin(), all_.end(), [&](const SharedParameter& shared) {
    return shared.name == parameter && shared.last == mesh_.rank(MeshAxis::pp);
  });
}

void SharedGradients::bind(const std::string& parameter, const TensorView& values) {
  if (std::any_of(all_.begin(), all_.end(), [&](const SharedParameter& shared) { return shared.name == parameter; }))
    sums_[parameter] = values;
  const bool elsewhere = is_summed_elsewhere(parameter);
  for (size_t pass = 0; pass < programs_.size(); ++pass) {
    TensorView own = values;
    if (elsewhere && pass > 0)
      own = of_passes_[parameter].emplace_back(allocate_tensor(*device_, values.dtype, values.shape)).view;
    programs_[pass]->bind_state("grad." + parameter, own);
  }
}

void SharedGradients::clear() {
  for (const auto& [name, terms] : of_passes_) {
    device_->fill_zero(sums_.at(name).data, sums_.at(name).size_bytes());
    for (const Tensor& term : terms) device_->fill_zero(term.view.data, term.view.size_bytes());
  }
}

void SharedGradients::add(std::span<const SymbolValues> symbols, const pipeline::StepObserver* observer) {
  const int here = mesh_.rank(MeshAxis::pp);
  for (size_t pass = 0; pass < symbols.size(); ++pass) {
    for (const SharedParameter& shared : all_) {
      if (shared.first == here) add_received(sums_.at(shared.name), shared.last);
      if (shared.last == here)
        send(pass == 0 ? sums_.at(shared.name) : of_passes_.at(shared.name)[pass - 1].view, shared.first);
    }
    programs_[pass]->run_deferred(symbols[pass], observer);
  }
}

void SharedGradients::add_received(const TensorView& to, int stage) {
  const int64_t elements = to.num_elements();
  SymbolValues symbols;
  for (int64_t first = 0; first < elements; first += kPiece) {
    const int64_t size = symbols[Symbol::tokens] = std::min(kPiece, elements - first);
    mesh_.along(MeshAxis::pp).recv(*device_, TensorView(received_.view.data, DType::f32, Shape{size}), stage);
    float* sum = to.as<float>() + first;
    adder_->bind_input(adder_->input("sum"), sum);
    adder_->bind_output(adder_->output("next"), sum);
    adder_->run(symbols);
  }
}

void SharedGradients::send(const TensorView& from, int stage) {
  const int64_t elements = from.num_elements();
  for (int64_t first = 0; first < elements; first += kPiece) {
    const Shape piece{std::min(kPiece, elements - first)};
    mesh_.along(MeshAxis::pp).send(*device_, TensorView(from.as<float>() + first, DType::f32, piece), stage);
  }
}

void SharedGradients::hand_over() {
  const int here = mesh_.rank(MeshAxis::pp);
  for (const SharedParameter& shared : all_) {
    if (shared.first == here) mesh_.along(MeshAxis::pp).send(*device_, sums_.at(shared.name), shared.last);
    if (shared.last == here) mesh_.along(MeshAxis::pp).recv(*device_, sums_.at(shared.name), shared.first);
  }
}

}  // namespace eadem::train
