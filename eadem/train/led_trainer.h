// SPDX-License-Identifier: Apache-2.0
//
// LedTrainer: a trainer on a mesh whose first rank has the caller. What it is asked for, it tells the ranks that
// follow, and all do it together. (Where every rank reads the same recipe, as in train/train.h, nobody need be told.)
#pragma once

#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "eadem/train/checkpoint.h"
#include "eadem/train/trainer.h"

namespace eadem::train {

// Arguments that no rank can use throw before others are told. What all ranks refuse alike (a parameter's name, a
// checkpoint, a gradient that is not finite) throws here as it does there, and they go on; anything else that fails on
// one of them ends the group, and calls throw RankFailed. One thread at a time may use it.
class LedTrainer {
 public:
  // `all`: the communicator of all ranks of the trainer's mesh, of which this is the first; null: it is alone.
  LedTrainer(std::unique_ptr<Trainer> trainer, std::shared_ptr<Communicator> all);

  void load_param(const std::string& name, const TensorView& whole);
  void load_random(uint64_t seed, double stddev);
  // The passes of a step, which the ranks of dp and ep divide, as many each, in their order. Throws InvalidArgument for
  // another number.
  StepResult step(const std::vector<Batch>& batches, double learning_rate);
  std::pair<double, int64_t> evaluate(const Batch& batch);
  std::vector<std::pair<std::string, Tensor>> whole_state_dict();
  Tensor whole_gradient(const std::string& parameter);
  void write_model(const Companions& companions, const std::string& directory);
  void write_checkpoint(const Companions& companions, const std::string& directory);
  void load_checkpoint(const std::string& directory);

  const Trainer& trainer() const { return *trainer_; }

 private:
  void tell(const std::string& message);

  std::unique_ptr<Trainer> trainer_;
  std::shared_ptr<Communicator> all_;
};

// What the other ranks do, until the first one ends the group: throws RankFailed then.
void follow_trainer(Trainer& trainer, Communicator& all);

}  // namespace eadem::train
