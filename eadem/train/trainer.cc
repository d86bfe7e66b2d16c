// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/trainer.h"

#include <fmt/ranges.h>
#include <fnmatch.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <set>
#include <sstream>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/models/family.h"
#include "eadem/ops/parallel/expert_exchange.h"
#include "eadem/ops/quantize.h"
#include "eadem/train/rank_values.h"

namespace eadem::train {

using pipeline::Environment;
using pipeline::Graph;
using pipeline::Mode;
using pipeline::Program;
using pipeline::ValueId;

namespace {

constexpr const char *kBalancing = "load_balancing_loss", *kBalancingSeed = "d.load_balancing_loss";

void check_options(const TrainerOptions& options) {
  const auto require = [](bool ok, const char* name, auto value, const char* range) {
    if (!ok) throw InvalidArgument("{} is {}; expected {}", name, value, range);
  };
  require(options.batch_tokens >= 1 && options.batch_tokens <= int64_t{1} << 24, "batch_tokens", options.batch_tokens,
          "1 to 2^24");
  require(options.beta1 >= 0 && options.beta1 < 1, "beta1", options.beta1, "0 to less than 1");
  require(options.beta2 >= 0 && options.beta2 < 1, "beta2", options.beta2, "0 to less than 1");
  require(options.eps > 0 && options.eps <= 1, "eps", options.eps, "more than 0, at most 1");
  require(options.weight_decay >= 0 && options.weight_decay <= 1e6, "weight_decay", options.weight_decay, "0 to 1e6");
  require(options.max_grad_norm >= 0 && options.max_grad_norm <= 1e30, "max_grad_norm", options.max_grad_norm,
          "0 (off) to 1e30");
  require(options.amax_history >= 1 && options.amax_history <= 1 << 16, "amax_history", options.amax_history,
          "1 to 2^16");
  if (const std::optional<double>& coef = options.router_aux_loss_coef)
    require(*coef >= 0 && *coef <= 1e6, "router_aux_loss_coef", *coef, "0 (off) to 1e6");
}

struct Products {
  std::string_view name;
  const Encoding* encoding;
};

// Gradients multiply the transposed weight: in square blocks, and with one scale, its codes are the same.
std::array<Products, 4> all_products() {
  constexpr auto kWeights = Fp8Format::Kind::e4m3;
  return {{{"plain", nullptr},
           {"fp8_block128", Fp8Encoding::find("fp8_e4m3_block128")},
           {"fp8_tensor", &Fp8TensorEncoding::of(kWeights, false)},
           {"fp8_tensor_delayed", &Fp8TensorEncoding::of(kWeights, true)}}};
}

// The output layer has kernels for operands with one scale.
std::vector<Products> all_head_products() {
  std::vector<Products> result;
  for (const Products& one : all_products())
    if (one.encoding == nullptr || Fp8TensorEncoding::of(one.encoding) != nullptr) result.push_back(one);
  return result;
}

void check_products(const char* option, const Encoding* products, std::span<const Products> all) {
  std::vector<std::string_view> known;
  bool is_known = false;
  for (const Products& one : all) {
    is_known = is_known || one.encoding == products;
    if (one.encoding != nullptr) known.push_back(one.encoding->name());
  }
  if (!is_known)
    throw InvalidArgument("{} in {} cannot be trained; expected {}", option, products->name(), fmt::join(known, ", "));
}

// The name of products that check_products accepts.
std::string_view name_of_products(const Encoding* products) {
  for (const Products& one : all_products())
    if (one.encoding == products) return one.name;
  EADEM_UNREACHABLE("products without a name");
}

std::vector<std::string> names_of(std::span<const Products> all) {
  std::vector<std::string> names;
  for (const Products& one : all) names.emplace_back(one.name);
  return names;
}

const Encoding* from_name(const char* option, std::string_view name, std::span<const Products> all) {
  for (const Products& one : all)
    if (name == one.name) return one.encoding;
  throw InvalidArgument("{} is '{}'; expected one of {}", option, name, fmt::join(names_of(all), ", "));
}

constexpr const char* kAmaxPrefix = "amax.";
constexpr int64_t kScalingPitch = 16;  // f32: states begin at multiples of 64 bytes

}  // namespace

std::vector<std::string> product_names() { return names_of(all_products()); }
std::vector<std::string> head_product_names() { return names_of(all_head_products()); }

const Encoding* products_from_name(std::string_view name) { return from_name("products", name, all_products()); }
const Encoding* head_products_from_name(std::string_view name) {
  return from_name("head_products", name, all_head_products());
}

Trainer::Trainer(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device,
                 const TrainerOptions& options, const Mesh& mesh)
    : model_(std::move(model)), device_(std::move(device)), options_(options), mesh_(mesh) {
  if (options.weights != DType::f32 && options.weights != DType::bf16)
    throw InvalidArgument("weights of {} cannot be trained; expected f32 or bf16", dtype_name(options.weights));
  check_options(options);
  check_products("products", options.products, all_products());
  check_products("head_products", options.head_products, all_head_products());
  if (!ops::Quantize::has_scaling(options.products) && !ops::Quantize::has_scaling(options.head_products) &&
      options.amax_history != TrainerOptions{}.amax_history)
    throw InvalidArgument(
        "amax_history is {}, but products are '{}' and head_products '{}'; only fp8_tensor_delayed takes scales from "
        "earlier steps",
        options.amax_history, name_of_products(options.products), name_of_products(options.head_products));
  HardwareOverrides overrides;
  overrides.weights = options.weights;
  if (options.products != nullptr) overrides.rounded_weights = options.products;
  if (options.head_products != nullptr) overrides.rounded_head = options.head_products;
  // Weights in f32 are for f32 training, also where the device would rather have 16-bit activations.
  if (options.weights == DType::f32) overrides.activations = DType::f32;
  hardware_ = modules::AutoHardwareConfig::from_model_spec(model_->spec(), *device_, HardwareMode::performance,
                                                           overrides, "trainer options");
  parameters_ = std::make_shared<pipeline::ParameterStore>(device_, mesh_);

  balancing_ = find_balancing();
  compile_programs();
  find_rounded();
  list_parameters();
  make_optimizer();
  make_amax_histories();
}

void Trainer::compile_programs() {
  const auto build = [&](bool balancing) {
    return models::build_training_graph(*model_, {.device = device_.get(),
                                                  .hardware = &hardware_,
                                                  .num_ranks = mesh_.size(MeshAxis::tp),
                                                  .rank = mesh_.rank(MeshAxis::tp),
                                                  .expert_ranks = mesh_.size(MeshAxis::ep),
                                                  .expert_rank = mesh_.rank(MeshAxis::ep),
                                                  .load_balancing_loss = balancing})
        .graph;
  };
  Environment environment{.device = device_, .mesh = mesh_};
  environment.disabled_fusions = options_.disabled_fusions;
  environment.bounds[Symbol::tokens] = options_.batch_tokens;
  environment.bounds[Symbol::sequences] = options_.batch_tokens;
  environment.bounds[ops::rank_tokens()] = options_.batch_tokens;
  environment.mode = Mode::training;
  environment.seeds_come_first = true;
  environment.recompute_layers = options_.recompute_layers;
  environment.frozen = find_frozen();
  for (int pass = 0; pass < mesh_.size(MeshAxis::pp); ++pass) {
    training_.push_back(std::make_unique<Program>(build(balancing_ > 0), environment, parameters_));
    training_.back()->require_complete();
  }
  environment.mode = Mode::inference;
  evaluation_ = std::make_unique<Program>(build(false), environment, parameters_);
  evaluation_->require_complete();
  for (const std::string& name : parameters_->names())
    if (std::find(environment.frozen.begin(), environment.frozen.end(), name) == environment.frozen.end())
      trained_.push_back(name);
}

double Trainer::find_balancing() const {
  const models::ModelConfig* config = model_->config();
  const double coef = options_.router_aux_loss_coef.value_or(config == nullptr ? 0 : config->router_aux_loss_coef);
  if (coef > 0 && config != nullptr && (config->family().router_aux_loss_coef == 0 || config->num_experts == 0))
    throw Unsupported("router_aux_loss_coef is {}; this model of type {} has no load-balancing loss", coef,
                      config->model_type);
  return coef;
}

std::vector<std::string> Trainer::find_frozen() const {
  std::vector<std::string> frozen;
  std::vector<bool> used(options_.frozen.size());
  const std::vector<models::ParameterInfo> all = model_->parameters();
  for (const models::ParameterInfo& parameter : all) {
    bool matches = !parameter.trainable;
    for (size_t i = 0; i < used.size(); ++i)
      if (fnmatch(options_.frozen[i].c_str(), parameter.name.c_str(), FNM_NOESCAPE) == 0) matches = used[i] = true;
    if (matches) frozen.push_back(parameter.name);
  }
  if (const auto unused = std::find(used.begin(), used.end(), false); unused != used.end())
    throw InvalidArgument("no parameter matches the frozen '{}'; there are '{}' and {} more",
                          options_.frozen[static_cast<size_t>(unused - used.begin())],
                          all.empty() ? "none" : all.front().name, std::max<size_t>(all.size(), 1) - 1);
  if (!frozen.empty() && frozen.size() == all.size())
    throw InvalidArgument("all {} parameters are frozen: nothing is trained", frozen.size());
  return frozen;
}

void Trainer::find_rounded() {
  const std::function<bool(const models::WeightRecipe&)> adds = [&](const models::WeightRecipe& recipe) {
    return recipe.kind == models::WeightRecipe::Kind::add ||
           std::any_of(recipe.parts.begin(), recipe.parts.end(), adds);
  };
  for (const models::ParameterInfo& parameter : model_->parameters())
    if (std::find(trained_.begin(), trained_.end(), parameter.name) != trained_.end() &&
        parameters_->type(parameter.name).dtype == DType::f32 &&
        adds(model_->recipes(parameter, models::CheckpointFormat::huggingface).at(0)))
      rounded_.push_back(parameter.name);
}

void Trainer::list_parameters() {
  const auto contains = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  const auto add = [&](const std::string& name) {
    whole_parameters_[name] = {parameters_->whole_shape(name), parameters_->type(name).dtype, contains(trained_, name),
                               contains(rounded_, name), mesh_.rank(MeshAxis::pp)};
  };
  const int stages = mesh_.size(MeshAxis::pp);
  if (stages == 1) {
    for (const std::string& name : parameters_->names()) add(name);
    return;
  }
  const std::vector<models::ParameterInfo> all = model_->parameters();
  std::vector<int64_t> own;  // of each, what its stage knows; -1: it is another stage's
  for (const models::ParameterInfo& parameter : all) {
    const std::string& name = parameter.name;
    own.push_back(!parameters_->contains(name) ? -1
                                               : static_cast<int64_t>(parameters_->type(name).dtype) * 4 +
                                                     contains(trained_, name) * 2 + contains(rounded_, name));
  }
  const std::vector<int64_t> known = gather_values(*device_, mesh_, MeshAxis::pp, own);
  for (size_t i = 0; i < all.size(); ++i)
    for (int stage = 0; stage < stages; ++stage)
      if (const int64_t value = known[static_cast<size_t>(stage) * all.size() + i]; value >= 0)
        whole_parameters_.try_emplace(all[i].name, WholeParameter{all[i].shape, static_cast<DType>(value / 4),
                                                                  value / 2 % 2 == 1, value % 2 == 1, stage});
}

void Trainer::make_optimizer() {
  shared_gradients_ = std::make_unique<SharedGradients>(device_, mesh_, training_);
  std::vector<Optimizer::Gradient> gradients;
  for (const std::string& name : trained_) {
    const Graph& graph = training_[0]->graph();
    const TensorType& type = graph.value(*graph.find("grad." + name)).type;
    Tensor& values = gradients_[name] = allocate_tensor(*device_, type.dtype, type.bind({}));
    device_->fill_zero(values.view.data, values.view.size_bytes());
    shared_gradients_->bind(name, values.view);
    gradients.push_back({name, type, values.view, shared_gradients_->is_summed_elsewhere(name)});
  }
  optimizer_ = std::make_unique<Optimizer>(device_, mesh_, parameters_, gradients,
                                           AdamWOptions{.beta1 = options_.beta1,
                                                        .beta2 = options_.beta2,
                                                        .eps = options_.eps,
                                                        .weight_decay = options_.weight_decay,
                                                        .max_grad_norm = options_.max_grad_norm});
}

void Trainer::make_amax_histories() {
  const auto is_scaling = [](const pipeline::GraphOutput& state) {
    return state.name.starts_with(ops::Quantize::kScalingPrefix);
  };
  std::vector<std::string> states;
  for (const pipeline::GraphOutput& state : training_[0]->states())
    if (is_scaling(state)) states.push_back(state.name);
  std::sort(states.begin(), states.end());
  const std::vector<std::string> of_stages =
      gather_texts(*device_, mesh_, MeshAxis::pp, fmt::format("{}", fmt::join(states, "\n")));
  for (int stage = 0; stage < mesh_.size(MeshAxis::pp); ++stage) {
    std::istringstream lines(of_stages[static_cast<size_t>(stage)]);
    for (std::string line; std::getline(lines, line);)
      whole_histories_.try_emplace(kAmaxPrefix + line.substr(ops::Quantize::kScalingPrefix.size()), stage);
  }
  if (states.empty()) return;
  scalings_ = allocate_tensor(*device_, DType::f32, {std::ssize(states), kScalingPitch});
  const auto scaling = [&](std::ptrdiff_t i) {
    return TensorView(scalings_.view.as<float>() + i * kScalingPitch, DType::f32, {2});
  };
  for (std::ptrdiff_t i = 0; i < std::ssize(states); ++i) {
    const std::string& state = states[static_cast<size_t>(i)];
    amax_histories_.push_back({kAmaxPrefix + state.substr(ops::Quantize::kScalingPrefix.size()),
                               std::vector<float>(static_cast<size_t>(options_.amax_history), 0.0f)});
    for (const auto& program : training_) program->bind_state(state, scaling(i));
  }
  // An evaluation rounds with the scales that the next step will have.
  for (const pipeline::GraphOutput& state : evaluation_->states()) {
    if (!is_scaling(state)) continue;
    const auto found = std::lower_bound(states.begin(), states.end(), state.name);
    EADEM_CHECK(found != states.end() && *found == state.name, "'{}' is not rounded in training", state.name);
    evaluation_->bind_state(state.name, scaling(found - states.begin()));
  }
  set_scalings();
}

void Trainer::set_scalings() {
  if (amax_histories_.empty()) return;
  const Tensor host = Tensor::on_host(DType::f32, scalings_.view.shape);
  std::fill_n(host.view.as<float>(), host.view.num_elements(), 0.0f);
  for (size_t i = 0; i < amax_histories_.size(); ++i)
    host.view.as<float>()[static_cast<int64_t>(i) * kScalingPitch] = amax_histories_[i].largest();
  device_->copy_from_host(scalings_.view.data, host.view.data, host.view.size_bytes());
}

void Trainer::read_scalings() {
  if (whole_histories_.empty()) return;
  std::string not_finite;
  if (!amax_histories_.empty()) {
    const Tensor host = copy_to_host(*device_, scalings_.view);
    std::vector<int64_t> own;
    for (size_t i = 0; i < amax_histories_.size(); ++i)
      own.push_back(std::bit_cast<int32_t>(host.view.as<float>()[static_cast<int64_t>(i) * kScalingPitch + 1]));
    const std::vector<int64_t> all = gather_values(*device_, mesh_, MeshAxis::dp, own);
    for (size_t i = 0; i < amax_histories_.size(); ++i) {
      AmaxHistory& history = amax_histories_[i];
      history.seen = 0;
      for (size_t of = i; of < all.size(); of += own.size()) {
        const auto seen = std::bit_cast<float>(static_cast<int32_t>(all[of]));
        if (!std::isfinite(seen) && not_finite.empty()) not_finite = history.name;
        history.seen = std::max(history.seen, seen);
      }
    }
  }
  for (const std::string& name : gather_texts(*device_, mesh_, MeshAxis::pp, not_finite))
    if (!name.empty())
      throw DataCorrupted("step {}: a value of '{}' is not finite; the parameters are unchanged", num_steps_ + 1,
                          name.substr(std::string_view(kAmaxPrefix).size()));
}

void Trainer::load(const models::Checkpoint& checkpoint) {
  models::load_weights(*parameters_, checkpoint, {}, {.one_stage = mesh_.size(MeshAxis::pp) > 1});
  copy_weights_to_masters();
}

void Trainer::load_random(uint64_t seed, double stddev) {
  models::load_random(*parameters_, seed, stddev);
  copy_weights_to_masters();
}

void Trainer::load_param(const std::string& name, const TensorView& whole) {
  if (whole_parameters_.contains(name) && !parameters_->contains(name)) return;
  parameters_->load(name, whole, "load_param");
  optimizer_->copy_to_master(name);
}

std::vector<std::string> Trainer::whole_parameter_names() const {
  std::vector<std::string> names;
  for (const models::ParameterInfo& parameter : model_->parameters())
    if (whole_parameters_.contains(parameter.name)) names.push_back(parameter.name);
  return names;
}

// Masters begin as copies of the weights; a resumed run overwrites them with its saved values.
void Trainer::copy_weights_to_masters() {
  for (const std::string& name : trained_) optimizer_->copy_to_master(name);
}

std::vector<std::pair<std::string, Tensor>> Trainer::state_dict() const {
  std::vector<std::pair<std::string, Tensor>> result;
  for (const std::string& name : parameters_->names()) result.emplace_back(name, parameters_->to_host(name));
  return result;
}

std::vector<std::pair<std::string, Tensor>> Trainer::whole_state_dict() const {
  std::vector<std::pair<std::string, Tensor>> result;
  if (mesh_.rank(MeshAxis::dp) != 0) return result;  // it has what the first has
  for (const auto& [name, parameter] : whole_parameters_) {
    const Tensor own = is_here(parameter) ? joined(name, parameters_->to_host(name)) : Tensor();
    if (Tensor whole = from_stage(parameter.stage, own, parameter.dtype, parameter.shape); whole.defined())
      result.emplace_back(name, std::move(whole));
  }
  return result;
}

Tensor Trainer::from_stage(int stage, const Tensor& own, DType dtype, const Shape& shape) const {
  // Stages are those of the first ranks along the other axes.
  for (MeshAxis axis : {MeshAxis::dp, MeshAxis::tp, MeshAxis::ep})
    if (mesh_.rank(axis) != 0) return {};
  const int here = mesh_.rank(MeshAxis::pp);
  if (stage == 0) return here == 0 ? own : Tensor();
  if (here != 0 && here != stage) return {};
  const Tensor sent = here == stage ? copy_to_device(device_, own.view) : allocate_tensor(*device_, dtype, shape);
  if (here == stage) {
    mesh_.along(MeshAxis::pp).send(*device_, sent.view, 0);
    return {};
  }
  mesh_.along(MeshAxis::pp).recv(*device_, sent.view, stage);
  return copy_to_host(*device_, sent.view);
}

Tensor Trainer::joined(const std::string& parameter, const Tensor& part) const {
  Tensor result = part;
  // A part was cut over ep first. Ranks that are not the first along an axis have nothing to join along the next.
  for (MeshAxis axis : {MeshAxis::tp, MeshAxis::ep}) {
    const Sharding sharding = parameters_->type(parameter).over(axis);
    if (sharding.kind == Sharding::Kind::sharded && mesh_.size(axis) > 1)
      result =
          join_parts(*device_, mesh_, axis, result, sharding.axis, parameters_->whole_shape(parameter)[sharding.axis]);
    if (mesh_.rank(axis) != 0) return {};
  }
  return result;
}

void Trainer::check(const Batch& batch) const {
  const auto tokens = static_cast<int64_t>(batch.token_ids.size());
  if (tokens < 1 || tokens > options_.batch_tokens)
    throw InvalidArgument("the batch has {} tokens; expected 1 to {}", tokens, options_.batch_tokens);
  if (batch.positions.size() != batch.token_ids.size() || batch.labels.size() != batch.token_ids.size() ||
      batch.query_start.size() != batch.lengths.size() + 1)
    throw InvalidArgument("the batch has {} tokens, {} positions, {} labels, {} lengths and {} starts", tokens,
                          batch.positions.size(), batch.labels.size(), batch.lengths.size(), batch.query_start.size());
  const int64_t vocab = model_->info().vocab, context = model_->info().default_context();
  int64_t first = 0;
  for (size_t s = 0; s < batch.lengths.size(); ++s) {
    if (batch.lengths[s] < 1 || batch.query_start[s] != first)
      throw InvalidArgument("sequence {} of the batch starts at {} with {} tokens; expected to start at {}", s,
                            batch.query_start[s], batch.lengths[s], first);
    // A longer sequence would need position embeddings that do not exist, or the frequencies that dynamic scaling and
    // longrope have beyond the context.
    if (batch.lengths[s] > context)
      throw InvalidArgument("sequence {} of the batch has {} tokens; the model's context is {}", s, batch.lengths[s],
                            context);
    first += batch.lengths[s];
  }
  if (first != tokens || batch.query_start.back() != first)
    throw InvalidArgument("the sequences of the batch have {} tokens; there are {}", first, tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    const int32_t id = batch.token_ids[static_cast<size_t>(t)], label = batch.labels[static_cast<size_t>(t)];
    if (id < 0 || id >= vocab || label >= vocab)
      throw InvalidArgument("token {} of the batch is {} with label {}; the vocabulary has {}", t, id, label, vocab);
  }
}

SymbolValues Trainer::feed(Program& program, const Batch& batch, int64_t rank_tokens) const {
  SymbolValues symbols;
  symbols[ops::rank_tokens()] = rank_tokens;
  symbols[Symbol::tokens] = static_cast<int64_t>(batch.token_ids.size());
  symbols[Symbol::sequences] = static_cast<int64_t>(batch.lengths.size());
  const auto set = [&](const char* name, const std::vector<int32_t>& values) {
    program.set_input(program.input(name), values.data(), static_cast<int64_t>(values.size() * sizeof(int32_t)));
  };
  set("token_ids", batch.token_ids);
  set("positions", batch.positions);
  set("labels", batch.labels);
  set("query_start", batch.query_start);
  set("kv_length", batch.lengths);
  return symbols;
}

StepResult Trainer::step(std::span<const Batch> batches, double learning_rate, const pipeline::StepObserver* observer) {
  require_all_loaded();
  if (!(learning_rate >= 0 && learning_rate <= 1e6))
    throw InvalidArgument("learning_rate is {}; expected 0 to 1e6", learning_rate);
  int64_t num_labels = 0;
  for (const Batch& batch : batches) {
    check(batch);
    num_labels += batch.num_labels;
  }
  const int64_t rank_tokens = most_tokens_of_ranks(batches);
  num_labels = summed_over_ranks(0, num_labels).second;
  if (num_labels == 0) throw InvalidArgument("no token of the step has a label");
  for (const auto& [name, values] : gradients_) device_->fill_zero(values.view.data, values.view.size_bytes());
  set_scalings();

  double loss = 0, balance = 0;
  const int64_t num_passes = balancing_ > 0 ? summed_over_ranks(0, static_cast<int64_t>(batches.size())).second : 1;
  const auto balance_seed = static_cast<float>(balancing_ / static_cast<double>(num_passes));
  const std::vector<float> seeds(static_cast<size_t>(options_.batch_tokens),
                                 static_cast<float>(1.0 / static_cast<double>(num_labels)));
  for (size_t first = 0; first < batches.size(); first += training_.size()) {
    const std::span<const Batch> group = batches.subspan(first, std::min(training_.size(), batches.size() - first));
    const auto [losses, balances] = run_passes(group, rank_tokens, seeds, balance_seed, observer);
    loss += losses;
    balance += balances;
  }
  loss = summed_over_ranks(loss, 0).first / static_cast<double>(num_labels);
  if (balancing_ > 0) balance = summed_over_ranks(balance, 0).first / static_cast<double>(num_passes);
  loss += balancing_ * balance;

  if (!std::isfinite(loss))
    throw DataCorrupted("step {}: the loss is {}; the parameters are unchanged", num_steps_ + 1, loss);
  // The norm is computed first, alone: a gradient that is not finite must not reach the parameters.
  const float norm = optimizer_->sum_gradients(observer);
  if (!std::isfinite(norm))
    throw DataCorrupted("step {}: the gradient's norm is {}; the parameters are unchanged", num_steps_ + 1, norm);
  shared_gradients_->hand_over();
  read_scalings();
  optimizer_->update(learning_rate, num_steps_ + 1, observer);
  ++num_steps_;
  for (AmaxHistory& history : amax_histories_) {
    std::shift_right(history.previous.begin(), history.previous.end(), 1);
    history.previous.front() = history.seen;
  }
  set_scalings();
  parameters_->refresh_packed(trained_);
  return {loss, norm, balancing_ > 0 ? std::optional(balance) : std::nullopt};
}

std::pair<double, double> Trainer::run_passes(std::span<const Batch> batches, int64_t rank_tokens,
                                              std::span<const float> seeds, float balance_seed,
                                              const pipeline::StepObserver* observer) {
  std::vector<SymbolValues> symbols;
  for (size_t pass = 0; pass < batches.size(); ++pass) {
    Program& program = *training_[pass];
    symbols.push_back(feed(program, batches[pass], rank_tokens));
    if (has_loss())
      program.set_input(program.input("d.loss"), seeds.data(),
                        symbols.back()[Symbol::tokens] * static_cast<int64_t>(sizeof(float)));
    // The balancing loss has no gradient where everything that it depends on is frozen.
    if (balancing_ > 0 && program.graph().find(kBalancingSeed))
      program.set_input(program.input(kBalancingSeed), &balance_seed, sizeof(float));
    program.run_forward(symbols.back(), observer);
  }
  double loss = 0, balance = 0;
  shared_gradients_->clear();
  for (size_t pass = 0; pass < batches.size(); ++pass) {
    Program& program = *training_[pass];
    program.run_backward(symbols[pass], observer);
    last_ = &program;
    for (float token_loss : last_token_losses()) loss += token_loss;
    if (balancing_ > 0 && has_loss()) {
      float pass_balance = 0;
      program.read(program.output(kBalancing), &pass_balance);
      balance += static_cast<double>(pass_balance);
    }
  }
  shared_gradients_->add(symbols, observer);
  return {loss, balance};
}

std::pair<double, int64_t> Trainer::summed_over_ranks(double loss, int64_t count) const {
  // The last stage has the losses; all have counts.
  const auto of_loss = std::bit_cast<int64_t>(loss);
  loss = std::bit_cast<double>(gather_values(*device_, mesh_, MeshAxis::pp, {&of_loss, 1}).back());
  for (MeshAxis axis : {MeshAxis::ep, MeshAxis::dp}) {
    const std::vector<int64_t> all =
        gather_values(*device_, mesh_, axis, std::array{std::bit_cast<int64_t>(loss), count});
    loss = 0;
    count = 0;
    for (size_t i = 0; i < all.size(); i += 2) {
      loss += std::bit_cast<double>(all[i]);
      count += all[i + 1];
    }
  }
  return {loss, count};
}

int64_t Trainer::most_tokens_of_ranks(std::span<const Batch> batches) const {
  int64_t most = 0;
  for (const Batch& batch : batches) most = std::max(most, std::ssize(batch.token_ids));
  const std::vector<int64_t> all =
      gather_values(*device_, mesh_, MeshAxis::ep, std::array<int64_t, 2>{std::ssize(batches), most});
  for (size_t i = 0; i < all.size(); i += 2) {
    if (all[i] != all[0])
      throw InvalidArgument("rank {} of ep has {} batches, rank 0 has {}; experts need the tokens of all", i / 2,
                            all[i], all[0]);
    most = std::max(most, all[i + 1]);
  }
  return most;
}

std::pair<double, int64_t> Trainer::evaluate(const Batch& batch) {
  require_all_loaded();
  check(batch);
  evaluation_->run(feed(*evaluation_, batch, most_tokens_of_ranks({&batch, 1})));
  last_ = evaluation_.get();
  double loss = 0;
  for (float token_loss : last_token_losses()) loss += token_loss;
  const auto of_loss = std::bit_cast<int64_t>(loss);
  loss = std::bit_cast<double>(gather_values(*device_, mesh_, MeshAxis::pp, {&of_loss, 1}).back());
  return {batch.num_labels == 0 ? 0.0 : loss / static_cast<double>(batch.num_labels), batch.num_labels};
}

std::vector<float> Trainer::last_token_losses() const {
  if (last_ == nullptr) throw InvalidArgument("no pass has run yet: there are no losses");
  if (!has_loss()) return {};
  const ValueId loss = last_->output("loss");
  std::vector<float> result(static_cast<size_t>(last_->view(loss).num_elements()));
  last_->read(loss, result.data());
  return result;
}

Tensor Trainer::gradient(const std::string& parameter) const {
  const auto found = gradients_.find(parameter);
  if (found == gradients_.end()) throw NotFound("no parameter '{}' is trained", parameter);
  return copy_to_host(*device_, found->second.view);
}

Tensor Trainer::whole_gradient(const std::string& parameter) const {
  const auto found = whole_parameters_.find(parameter);
  if (found == whole_parameters_.end() || !found->second.trained)
    throw NotFound("no parameter '{}' is trained", parameter);
  const WholeParameter& whole = found->second;
  if (mesh_.rank(MeshAxis::dp) != 0) return {};
  const Tensor own = is_here(whole) ? joined(parameter, gradient(parameter)) : Tensor();
  return from_stage(whole.stage, own, DType::f32, whole.shape);
}

std::vector<std::pair<std::string, Tensor>> Trainer::optimizer_state() const {
  std::vector<std::pair<std::string, Tensor>> result;
  for (const std::string& name : optimizer_->state_names()) result.emplace_back(name, optimizer_->state(name));
  for (const std::string& name : rounded_) result.emplace_back("exact." + name, parameters_->to_host(name));
  for (const AmaxHistory& history : amax_histories_) result.emplace_back(history.name, history_tensor(history));
  return result;
}

std::vector<std::pair<std::string, Shape>> Trainer::optimizer_state_shapes() const {
  std::vector<std::pair<std::string, Shape>> result;
  const auto add = [&](const char* kind, bool WholeParameter::*has) {
    for (const auto& [name, parameter] : whole_parameters_)
      if (parameter.*has && (kind != std::string_view("master.") || parameter.dtype != DType::f32))
        result.emplace_back(kind + name, parameter.shape);
  };
  for (const char* kind : {"m.", "master.", "v."}) add(kind, &WholeParameter::trained);
  add("exact.", &WholeParameter::rounded);
  for (const auto& [name, stage] : whole_histories_) result.emplace_back(name, Shape{options_.amax_history});
  return result;
}

Tensor Trainer::history_tensor(const AmaxHistory& history) const {
  Tensor values = Tensor::on_host(DType::f32, {std::ssize(history.previous)});
  std::copy(history.previous.begin(), history.previous.end(), values.view.as<float>());
  return values;
}

Tensor Trainer::whole_optimizer_state(const std::string& name) const {
  if (const auto history = whole_histories_.find(name); history != whole_histories_.end()) {
    const auto own = std::find_if(amax_histories_.begin(), amax_histories_.end(),
                                  [&](const AmaxHistory& one) { return one.name == name; });
    return from_stage(history->second, own == amax_histories_.end() ? Tensor() : history_tensor(*own), DType::f32,
                      Shape{options_.amax_history});
  }
  const std::string parameter = Optimizer::parameter_of(name);
  const WholeParameter& whole = whole_parameters_.at(parameter);
  Tensor own;
  if (is_here(whole)) own = name.starts_with("exact.") ? parameters_->to_host(parameter) : optimizer_->state(name);
  if (mesh_.rank(MeshAxis::dp) != 0) return {};
  return from_stage(whole.stage, own.defined() ? joined(parameter, own) : own, DType::f32, whole.shape);
}

void Trainer::check_optimizer_state(const io::WeightSource& source) const {
  std::set<std::string> known;
  for (const auto& [name, shape] : optimizer_state_shapes()) {
    const Tensor saved = source.get(*known.insert(name).first);
    if (saved.dtype() != DType::f32 || !(saved.shape() == shape))
      throw InvalidArgument("{}: '{}' is {}; expected {}", source.path(), name, to_string(saved.view),
                            to_string(TensorView(nullptr, DType::f32, shape)));
  }
  for (const io::WeightInfo& info : source.tensors())
    if (!known.contains(info.name))
      throw InvalidArgument("{}: '{}' is no state of a trainer with weights in {}", source.path(), info.name,
                            dtype_name(options_.weights));
}

void Trainer::load_optimizer_state(const io::WeightSource& source, int64_t num_steps) {
  check_optimizer_state(source);
  for (AmaxHistory& history : amax_histories_) {
    const Tensor saved = source.get(history.name);
    std::copy_n(saved.view.as<float>(), history.previous.size(), history.previous.begin());
    source.release(history.name);
  }
  set_scalings();
  for (const auto& [name, shape] : optimizer_state_shapes()) {
    if (whole_histories_.contains(name)) continue;
    const std::string parameter = Optimizer::parameter_of(name);
    if (!parameters_->contains(parameter)) continue;
    const Tensor part = parameters_->part_of_whole(parameter, source.get(name));
    if (name.starts_with("exact."))
      device_->copy_from_host(parameters_->layout(parameter, nullptr).data, part.view.data, part.view.size_bytes());
    else
      optimizer_->set_state(name, part.view);
    source.release(name);
  }
  num_steps_ = num_steps;
}

}  // namespace eadem::train
