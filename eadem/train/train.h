// SPDX-License-Identifier: Apache-2.0
//
// A training run of a recipe, with checkpoints, metrics and a plot. It can be resumed at any moment.
//
// Below the recipe's output directory:
//   lock                          held by the run that writes there
//   tokens/train.tok, eval.tok    tokenized texts (made once)
//   checkpoints/step_00000100/    a model directory with optimizer.safetensors and trainer.json (checkpoint.h)
//   metrics.jsonl                 one line per step: step, loss, learning_rate, grad_norm, tokens, tokens_per_second
//                                 and, where it is on, load_balancing_loss; and per evaluation: step, eval_loss,
//                                 eval_perplexity
//   loss.svg                      the curves
//   final/                        the trained model, Hugging Face layout
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>

#include "eadem/core/device/device.h"
#include "eadem/core/log.h"
#include "eadem/core/mesh/mesh.h"
#include "eadem/train/recipe.h"

namespace eadem::train {

struct Progress {
  int64_t step;   // finished
  int64_t steps;  // of the run
  double loss;
  double learning_rate;
  double grad_norm;
  int64_t tokens;            // seen so far, over all resumed runs
  double tokens_per_second;  // of recent steps
  double seconds_left;
  double eval_loss;                                // NaN between evaluations
  std::optional<double> load_balancing_loss = {};  // not set where it is off
};

struct RunOptions {
  std::shared_ptr<Device> device;
  // This rank's view of a mesh, all of whose ranks run the same recipe. Ranks of dp and ep divide the passes of a step,
  // as many each; the steps are those of one rank, and so are the files, which the first rank writes.
  // It alone calls the functions below, and its `cancel` counts.
  Mesh mesh = {};
  bool resume = true;                         // from the newest checkpoint, if there is one
  const std::atomic<bool>* cancel = nullptr;  // set: save a checkpoint after this step and stop
  std::function<void(const Progress&)> on_step;
  std::function<void(const std::string&)> on_note;  // receives a sentence about how the run continues
  std::function<void(const char* what, int64_t done, int64_t total)> on_preparation;
};

struct RunResult {
  int64_t steps = 0;
  bool cancelled = false;
  double loss = 0;              // loss of the last step; NaN when no step was left
  double eval_loss = 0;         // NaN without eval texts
  std::string model_directory;  // final/, empty when cancelled
};

// Throws IoError when another run writes the output directory or it is not writable; InvalidArgument when it belongs to
// a recipe with another identity, naming each value that differs, or when it holds a run and `resume` is off;
// DataCorrupted when none of its checkpoints is whole. A failed checkpoint leaves the earlier ones unchanged. On a
// mesh, InvalidArgument when ranks of dp and ep do not divide the recipe's accumulation, what the trainer refuses
// (trainer.h), and RankFailed when another rank has failed.
RunResult run(const Recipe& recipe, const RunOptions& options, const Logger& log = Logger(LogLevel::warning));

}  // namespace eadem::train
