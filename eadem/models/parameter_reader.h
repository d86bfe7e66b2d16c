// SPDX-License-Identifier: Apache-2.0
//
// ParameterReader: the parameters of a model out of the tensors of a checkpoint, by the recipes that the files serve.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "eadem/models/auto_model.h"

namespace eadem::models {

CheckpointFormat format_of(const io::WeightSource& weights);

// Keeps model and weights alive. Immutable: may be shared between threads.
class ParameterReader {
 public:
  explicit ParameterReader(const Checkpoint& checkpoint);

  // The first recipe of which the checkpoint has every tensor; null without one.
  const WeightRecipe* recipe(const std::string& parameter) const;
  // Returns the type and shape that `read` gives; nothing without a recipe, or for a tensor that has no type here.
  // Throws as models::describe.
  std::optional<RecipeType> type(const std::string& parameter) const;
  // Throws NotFound, naming the tensor that is usually there, without a recipe; else as models::evaluate.
  Tensor read(const std::string& parameter) const;
  // As `read`, of some experts alone: the slices `experts` of the first axis of a parameter of this whole shape.
  Tensor read_experts(const std::string& parameter, PartRange experts, const Shape& whole) const;
  // Says that the parameter has been read and will not be soon again.
  void release(const std::string& parameter) const;

  // A parameter may have several recipes that the checkpoint serves, as a tied embedding does. Throws DataCorrupted
  // naming both tensors when they differ in type, shape or values: transformers 4 uses the first alone then,
  // transformers 5 both.
  void require_one_value(const std::string& parameter) const;

  // The tensors of any recipe that the checkpoint serves.
  std::set<std::string> tensors_of(const std::string& parameter) const;
  // Throws DataCorrupted for a tensor of the checkpoint that is not among `used`, and neither follows from the
  // configuration nor adds nothing.
  void require_no_other(const std::set<std::string>& used) const;

 private:
  // The recipe that `read` runs.
  WeightRecipe recipe_to_read(const std::string& parameter) const;
  const std::vector<WeightRecipe>& recipes(const std::string& parameter) const;
  std::vector<const WeightRecipe*> served(const std::string& parameter) const;
  std::optional<RecipeType> describe_tensor(const std::string& name) const;

  std::shared_ptr<const Model> model_;
  std::shared_ptr<const io::WeightSource> weights_;
  std::string config_path_;
  CheckpointFormat format_;
  std::map<std::string, std::vector<WeightRecipe>, std::less<>> recipes_;
};

}  // namespace eadem::models
