// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/optimizer.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>

#include "eadem/ops/training/optimizer.h"
#include "eadem/train/rank_values.h"

namespace eadem::train {

using pipeline::Graph;
using pipeline::Program;
using pipeline::StepObserver;
using pipeline::ValueId;

namespace {

// The ranks of one stage of pp. `mesh` keeps their communicators.
Mesh stage_of(const Mesh& mesh) {
  std::array<std::shared_ptr<Communicator>, kNumMeshAxes> axes;
  for (MeshAxis axis : {MeshAxis::dp, MeshAxis::tp, MeshAxis::ep})
    if (mesh.size(axis) > 1)
      axes[static_cast<size_t>(axis)] = std::shared_ptr<Communicator>(std::shared_ptr<const void>(), &mesh.along(axis));
  return Mesh(std::move(axes));
}

TensorView elements_of(const TensorView& values, const PartRange& range) {
  auto* first = static_cast<std::byte*>(values.data) + range.begin * static_cast<int64_t>(dtype_size(values.dtype));
  return TensorView(first, values.dtype, Shape{range.size});
}

}  // namespace

std::vector<std::vector<StatePart>> divide_states(std::span<const std::pair<std::string, int64_t>> parameters,
                                                  int ranks) {
  int64_t total = 0;
  for (const auto& [name, elements] : parameters) total += elements;
  std::vector<std::vector<StatePart>> result(static_cast<size_t>(ranks));
  int64_t first = 0;  // of the parameter, among all elements
  for (const auto& [name, elements] : parameters) {
    // Where the share of a rank begins in this parameter.
    const auto begin_of = [&, elements = elements](int rank) {
      const int64_t place = part_of(total, ranks, rank).begin - first;
      return rank == ranks || place >= elements ? elements : std::max<int64_t>(place, 0) / kStateUnit * kStateUnit;
    };
    for (int rank = 0; rank < ranks; ++rank) {
      const int64_t begin = begin_of(rank), end = rank + 1 == ranks ? elements : begin_of(rank + 1);
      if (begin < end) result[static_cast<size_t>(rank)].push_back({name, {begin, end - begin}});
    }
    first += elements;
  }
  return result;
}

Optimizer::Optimizer(std::shared_ptr<Device> device, const Mesh& mesh,
                     std::shared_ptr<pipeline::ParameterStore> parameters, std::span<const Gradient> gradients,
                     const AdamWOptions& options)
    : device_(std::move(device)), mesh_(mesh), parameters_(std::move(parameters)), options_(options) {
  std::vector<std::pair<std::string, int64_t>> sizes;
  for (const Gradient& gradient : gradients) {
    trained_.push_back(gradient.parameter);
    sizes.emplace_back(gradient.parameter, gradient.values.num_elements());
    weights_[gradient.parameter] = parameters_->layout(gradient.parameter, nullptr);
  }
  length_ = allocate_tensor(*device_, DType::f32, {1});
  shares_ = divide_states(sizes, mesh_.size(MeshAxis::dp));
  compile_norm(gradients);
  compile_update(gradients);
}

void Optimizer::compile_norm(std::span<const Gradient> gradients) {
  const auto is_summed = [](const Gradient& gradient) { return !gradient.summed_elsewhere; };
  if (std::none_of(gradients.begin(), gradients.end(), is_summed)) return;
  Graph graph;
  // By the axes, of tp and ep, over which a gradient is divided.
  std::map<std::pair<bool, bool>, std::vector<ValueId>> divided;
  std::vector<ValueId> whole;
  for (const Gradient& gradient : gradients) {
    if (!is_summed(gradient)) continue;
    const ValueId id = graph.add_state("grad." + gradient.parameter, gradient.type);
    const auto is_part = [&](MeshAxis axis) { return gradient.type.over(axis).kind == Sharding::Kind::sharded; };
    const std::pair axes{is_part(MeshAxis::tp), is_part(MeshAxis::ep)};
    (axes.first || axes.second ? divided[axes] : whole).push_back(id);
  }
  // The length of all is that of the whole ones and of the lengths of every rank's parts.
  for (const auto& [axes, parts] : divided)
    whole.push_back(graph.add1(std::make_shared<ops::GradNorm>(static_cast<int>(parts.size()), true), parts));
  graph.mark_output("norm", graph.add1(std::make_shared<ops::GradNorm>(static_cast<int>(whole.size())), whole));
  norm_ = std::make_unique<Program>(std::move(graph), pipeline::Environment{.device = device_, .mesh = stage_of(mesh_)},
                                    parameters_);
  norm_->require_complete();
  norm_->bind_output(norm_->output("norm"), length_.view.data);
  for (const Gradient& gradient : gradients)
    if (is_summed(gradient)) norm_->bind_state("grad." + gradient.parameter, gradient.values);
}

// On parts, which no other rank has: to this program every rank is alone.
void Optimizer::compile_update(std::span<const Gradient> gradients) {
  const std::vector<StatePart>& own = shares_[static_cast<size_t>(mesh_.rank(MeshAxis::dp))];
  if (own.empty()) return;
  Graph graph;
  const ValueId hyper = graph.add_input("hyper", TensorType(DType::f32, {8}));
  const ValueId norm = graph.add_input("norm", TensorType(DType::f32, {1}));
  std::vector<std::pair<std::string, TensorView>> bound;
  for (const StatePart& part : own) {
    const std::string& name = part.parameter;
    const TensorType type(DType::f32, {Dim(part.elements.size)});
    const auto bind = [&](const std::string& state, const TensorView& view) {
      bound.emplace_back(state, view);
      return graph.add_state(state, type.with_dtype(view.dtype));
    };
    const auto keep = [&](const std::string& state) {
      Tensor& values = states_[state] = allocate_tensor(*device_, DType::f32, Shape{part.elements.size});
      device_->fill_zero(values.view.data, values.view.size_bytes());
      return bind(state, values.view);
    };
    const auto gradient =
        std::find_if(gradients.begin(), gradients.end(), [&](const Gradient& g) { return g.parameter == name; });
    const ValueId grad = bind("grad." + name, elements_of(gradient->values, part.elements));
    const ValueId weight = bind("weight." + name, weight_of(part));
    const ValueId master = has_master(name) ? keep("master." + name) : weight;
    const ValueId m = keep("m." + name), v = keep("v." + name);
    graph.add(std::make_shared<ops::AdamW>(kernels::AdamWAttrs{.decay = parameters_->type(name).rank() >= 2}),
              {grad, norm, hyper, master, m, v, has_master(name) ? weight : pipeline::kNoValue});
  }
  update_ = std::make_unique<Program>(std::move(graph), pipeline::Environment{.device = device_}, parameters_);
  update_->require_complete();
  update_->bind_input(update_->input("norm"), length_.view.data);
  for (const auto& [state, view] : bound) update_->bind_state(state, view);
}

TensorView Optimizer::weight_of(const StatePart& part) const {
  return elements_of(weights_.at(part.parameter), part.elements);
}

float Optimizer::sum_gradients(const StepObserver* observer) {
  float norm = 0;
  if (norm_ != nullptr) {
    norm_->run({}, observer);
    norm_->read(norm_->output("norm"), &norm);
  }
  if (mesh_.size(MeshAxis::pp) == 1) return norm;
  const auto own = std::bit_cast<int64_t>(static_cast<double>(norm));
  double squares = 0;
  for (const int64_t bits : gather_values(*device_, mesh_, MeshAxis::pp, {&own, 1})) {
    const auto length = std::bit_cast<double>(bits);
    squares += length * length;
  }
  norm = static_cast<float>(std::sqrt(squares));
  device_->copy_from_host(length_.view.data, &norm, sizeof norm);
  return norm;
}

void Optimizer::update(double learning_rate, int64_t step, const StepObserver* observer) {
  if (update_ != nullptr) {
    const auto t = static_cast<double>(step);
    std::array<float, 8> hyper{};
    hyper[kernels::kHyperLearningRate] = static_cast<float>(learning_rate);
    hyper[kernels::kHyperBeta1] = static_cast<float>(options_.beta1);
    hyper[kernels::kHyperBeta2] = static_cast<float>(options_.beta2);
    hyper[kernels::kHyperEps] = static_cast<float>(options_.eps);
    hyper[kernels::kHyperWeightDecay] = static_cast<float>(options_.weight_decay);
    hyper[kernels::kHyperBiasCorrection1] = static_cast<float>(1 - std::pow(options_.beta1, t));
    hyper[kernels::kHyperBiasCorrection2] = static_cast<float>(1 - std::pow(options_.beta2, t));
    hyper[kernels::kHyperMaxNorm] = static_cast<float>(options_.max_grad_norm);
    update_->set_input(update_->input("hyper"), hyper.data(), sizeof(hyper));
    update_->run({}, observer);
  }
  if (mesh_.size(MeshAxis::dp) == 1) return;
  for (int rank = 0; rank < mesh_.size(MeshAxis::dp); ++rank)
    for (const StatePart& part : shares_[static_cast<size_t>(rank)])
      mesh_.along(MeshAxis::dp).broadcast(*device_, weight_of(part), rank);
}

void Optimizer::copy_to_master(const std::string& parameter) {
  if (!states_.contains("master." + parameter)) return;
  set_state("master." + parameter, converted_on_host(parameters_->to_host(parameter).view, DType::f32).view);
}

std::vector<std::string> Optimizer::state_names() const {
  std::vector<std::string> names;
  for (const char* kind : {"m.", "master.", "v."})
    for (const std::string& parameter : trained_)
      if (kind != std::string_view("master.") || has_master(parameter)) names.push_back(kind + parameter);
  return names;
}

Tensor Optimizer::state(const std::string& name) const {
  const std::string parameter = parameter_of(name);
  const Shape shape = parameters_->type(parameter).bind({});
  const int ranks = mesh_.size(MeshAxis::dp);
  if (ranks == 1) return copy_to_host(*device_, states_.at(name).view.reshaped(shape));
  const Tensor all = allocate_tensor(*device_, DType::f32, shape);
  for (int rank = 0; rank < ranks; ++rank)
    for (const StatePart& part : shares_[static_cast<size_t>(rank)]) {
      if (part.parameter != parameter) continue;
      const TensorView place = elements_of(all.view, part.elements);
      if (rank == mesh_.rank(MeshAxis::dp)) device_->copy(place.data, states_.at(name).view.data, place.size_bytes());
      mesh_.along(MeshAxis::dp).broadcast(*device_, place, rank);
    }
  return copy_to_host(*device_, all.view);
}

void Optimizer::set_state(const std::string& name, const TensorView& host) {
  for (const StatePart& part : shares_[static_cast<size_t>(mesh_.rank(MeshAxis::dp))]) {
    if (part.parameter != parameter_of(name)) continue;
    const TensorView own = elements_of(host, part.elements);
    device_->copy_from_host(states_.at(name).view.data, own.data, own.size_bytes());
  }
}

int64_t Optimizer::state_bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, values] : states_) bytes += values.view.size_bytes();
  return bytes;
}

}  // namespace eadem::train
