// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/parameter_reader.h"

#include <algorithm>
#include <cstring>

#include "eadem/io/gguf.h"

namespace eadem::models {

namespace {

// The views have one type and one shape.
bool hold_same_values(const TensorView& a, const TensorView& b) {
  if (a.encoding == nullptr) return std::memcmp(a.data, b.data, static_cast<size_t>(a.size_bytes())) == 0;
  const Tensor x = values_in_f32(a), y = values_in_f32(b);
  return std::memcmp(x.view.data, y.view.data, static_cast<size_t>(x.view.size_bytes())) == 0;
}

}  // namespace

CheckpointFormat format_of(const io::WeightSource& weights) {
  return dynamic_cast<const io::GgufFile*>(&weights) != nullptr ? CheckpointFormat::gguf
                                                                : CheckpointFormat::huggingface;
}

ParameterReader::ParameterReader(const Checkpoint& checkpoint)
    : model_(checkpoint.model),
      weights_(checkpoint.weights),
      config_path_(checkpoint.config_path),
      format_(format_of(*checkpoint.weights)) {
  for (const ParameterInfo& parameter : model_->parameters())
    recipes_[parameter.name] = model_->recipes(parameter, format_);
}

// A model that does not list its parameters has each as the tensor of its name.
const std::vector<WeightRecipe>& ParameterReader::recipes(const std::string& parameter) const {
  static const std::vector<WeightRecipe> kNone;
  const auto found = recipes_.find(parameter);
  return found == recipes_.end() ? kNone : found->second;
}

std::vector<const WeightRecipe*> ParameterReader::served(const std::string& parameter) const {
  std::vector<const WeightRecipe*> result;
  for (const WeightRecipe& recipe : recipes(parameter)) {
    const std::vector<std::string> names = recipe.names();
    if (std::all_of(names.begin(), names.end(), [&](const auto& name) { return weights_->find(name) != nullptr; }))
      result.push_back(&recipe);
  }
  return result;
}

const WeightRecipe* ParameterReader::recipe(const std::string& parameter) const {
  const std::vector<const WeightRecipe*> all = served(parameter);
  return all.empty() ? nullptr : all.front();
}

std::optional<RecipeType> ParameterReader::describe_tensor(const std::string& name) const {
  const io::WeightInfo* info = weights_->find(name);
  if (info == nullptr || !info->type) return std::nullopt;
  return RecipeType{*info->type, info->shape};
}

std::optional<RecipeType> ParameterReader::type(const std::string& parameter) const {
  const WeightRecipe* own = recipe(parameter);
  if (own == nullptr) return std::nullopt;
  return describe(
      *own, [this](const std::string& name) { return describe_tensor(name); }, weights_->path());
}

WeightRecipe ParameterReader::recipe_to_read(const std::string& parameter) const {
  if (const WeightRecipe* own = recipe(parameter)) return *own;
  const std::vector<WeightRecipe>& all = recipes(parameter);
  return all.empty() ? WeightRecipe::name(parameter) : all.front();
}

Tensor ParameterReader::read(const std::string& parameter) const {
  const auto get = [this](const std::string& name) { return weights_->get(name); };
  return evaluate(recipe_to_read(parameter), get, weights_->path());
}

Tensor ParameterReader::read_experts(const std::string& parameter, PartRange experts, const Shape& whole) const {
  const auto get = [this](const std::string& name) { return weights_->get(name); };
  return evaluate(part_of_first_axis(recipe_to_read(parameter), experts, whole[0], whole.rank()), get,
                  weights_->path());
}

void ParameterReader::release(const std::string& parameter) const {
  if (const WeightRecipe* own = recipe(parameter))
    for (const std::string& name : own->names()) weights_->release(name);
}

void ParameterReader::require_one_value(const std::string& parameter) const {
  const std::vector<const WeightRecipe*> all = served(parameter);
  for (size_t i = 1; i < all.size(); ++i) {
    const auto get = [this](const std::string& name) { return weights_->get(name); };
    const Tensor first = evaluate(*all[0], get, weights_->path()), other = evaluate(*all[i], get, weights_->path());
    const bool same = first.dtype() == other.dtype() && first.view.encoding == other.view.encoding &&
                      first.shape() == other.shape() && hold_same_values(first.view, other.view);
    for (const std::string& name : all[i]->names()) weights_->release(name);
    if (same) continue;
    const io::WeightInfo &a = *weights_->find(all[0]->names()[0]), &b = *weights_->find(all[i]->names()[0]);
    if (all[0]->is_name() && all[i]->is_name())
      throw DataCorrupted(
          "{}: '{}' {} {} and '{}' {} {} differ, but {} says that they are tied; with \"tie_word_embeddings\": false "
          "both "
          "are used",
          weights_->path(), a.name, a.type_name, to_string(a.shape), b.name, b.type_name, to_string(b.shape),
          config_path_);
    throw DataCorrupted("{}: '{}' {} {} and '{}' {} {} hold different values of '{}'", weights_->path(), a.name,
                        a.type_name, to_string(a.shape), b.name, b.type_name, to_string(b.shape), parameter);
  }
}

std::set<std::string> ParameterReader::tensors_of(const std::string& parameter) const {
  std::set<std::string> result;
  for (const WeightRecipe* recipe : served(parameter))
    for (std::string& name : recipe->names()) result.insert(std::move(name));
  return result;
}

void ParameterReader::require_no_other(const std::set<std::string>& used) const {
  for (const io::WeightInfo& info : weights_->tensors())
    if (!used.contains(info.name) && !model_->may_ignore(info.name) && !adds_nothing(*weights_, info))
      throw DataCorrupted("{}: tensor '{}' {} {} is no parameter of the model that {} describes", weights_->path(),
                          info.name, info.type_name, to_string(info.shape), config_path_);
}

}  // namespace eadem::models
