// SPDX-License-Identifier: Apache-2.0
//
// Optimizer: the norm of the gradients and AdamW over the trained parameters of one rank.
//
// The ranks of dp have the same parameters and divide the optimizer's states (m, v, and f32 masters of rounded
// weights): each keeps those of a share of the elements, updates these elements and sends them to the others. An
// element's update reads nothing of other elements, so that the bits are those of whole states. Gradients are summed
// whole on every rank: their norm is a sum of f64 sums of blocks in one order, which a rank with a share does not see.
// Source: Rajbhandari et al. 2020 (ZeRO, stage 1).
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eadem/pipeline/program.h"

namespace eadem::train {

struct AdamWOptions {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;   // on parameters of two or more dimensions
  double max_grad_norm = 1.0;  // 0: no clipping
};

// Elements of a parameter, row by row, whose states one rank keeps.
struct StatePart {
  std::string parameter;
  PartRange elements;  // never empty
};

// Shares of the elements of all parameters (name, elements), one parameter after another: result[rank]. A share has at
// most the kStateUnit - 1 elements more than total / ranks that let each part begin at a multiple of kStateUnit.
inline constexpr int64_t kStateUnit = 64;  // f32: 256 bytes, as memory is aligned
std::vector<std::vector<StatePart>> divide_states(std::span<const std::pair<std::string, int64_t>> parameters,
                                                  int ranks);

class Optimizer {
 public:
  // A gradient: its type says over which axes it is divided, or a sum yet to be made.
  struct Gradient {
    std::string parameter;
    TensorType type;
    TensorView values;  // on the device; outlives the optimizer
    // True where an earlier stage of pp has the parameter, too. That stage sums the gradient and counts it in the norm;
    // the caller copies the sum to `values` between sum_gradients and update.
    bool summed_elsewhere = false;
  };

  // The parameters of `gradients` are in the store. Masters begin as zeros: call copy_to_master.
  Optimizer(std::shared_ptr<Device> device, const Mesh& mesh, std::shared_ptr<pipeline::ParameterStore> parameters,
            std::span<const Gradient> gradients, const AdamWOptions& options);

  // Sums the gradients over the ranks, in place, and returns the length of all, the same on every rank of the mesh.
  // Over pp it is made of the lengths of the stages, and within 2^-22 of one rank's.
  float sum_gradients(const pipeline::StepObserver* observer);
  // Updates the weights from these sums, as step number `step` of a run, from 1. Packed layouts are the caller's.
  void update(double learning_rate, int64_t step, const pipeline::StepObserver* observer);

  // Makes the master of a parameter, if it has one, from its weight.
  void copy_to_master(const std::string& parameter);

  // The names of all states of all ranks of dp, "m.", "master." or "v." + parameter, in the order of a checkpoint.
  std::vector<std::string> state_names() const;
  static std::string parameter_of(const std::string& state) { return state.substr(state.find('.') + 1); }
  // The state of this rank's part of the parameter (of tp and ep), on the host: all ranks of dp call it together.
  Tensor state(const std::string& name) const;
  // Takes this rank's share of it.
  void set_state(const std::string& name, const TensorView& host);
  // Of the states that this rank keeps.
  int64_t state_bytes() const;

 private:
  void compile_norm(std::span<const Gradient> gradients);
  void compile_update(std::span<const Gradient> gradients);
  bool has_master(const std::string& parameter) const {
    return parameters_->type(parameter).dtype != DType::f32;  // f32 weights are their own
  }
  // Elements of the weight that the passes read.
  TensorView weight_of(const StatePart& part) const;

  std::shared_ptr<Device> device_;
  Mesh mesh_;
  std::shared_ptr<pipeline::ParameterStore> parameters_;
  AdamWOptions options_;
  std::vector<std::string> trained_;
  std::map<std::string, TensorView> weights_;   // of trained_, as they were declared
  std::vector<std::vector<StatePart>> shares_;  // of all ranks of dp
  std::map<std::string, Tensor> states_;        // [elements of the part], on the device; of this rank's share
  Tensor length_;                               // [1] f32 on the device: of all gradients, as the update reads it
  std::unique_ptr<pipeline::Program> norm_;     // null: a stage that sums nothing
  std::unique_ptr<pipeline::Program> update_;   // null: a rank without a share
};

}  // namespace eadem::train
