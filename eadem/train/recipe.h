// SPDX-License-Identifier: Apache-2.0
//
// Recipe: everything a training run depends on, in one TOML file. Unknown keys are refused. Paths are relative to the
// recipe.
//
//   [model]     config = "config.json"          architecture; or init_from = "DIR" to fine-tune a checkpoint
//               init_std = 0.02                 standard deviation of new matrices
//   [tokenizer] path = "tokenizer"              directory with tokenizer.json
//   [data]      train = ["a.txt"]               texts; documents are separated by `separator`
//               eval = ["b.txt"]                held out, never trained on; may be empty
//               separator = "<|endoftext|>"
//   [training]  see Recipe::Training
//   [output]    directory = "out"
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "eadem/core/dtype.h"

namespace eadem::train {

struct Recipe {
  std::string path;  // of the recipe itself

  std::string config;  // one of config and init_from
  std::string init_from;
  double init_std = 0.02;

  std::string tokenizer;

  std::vector<std::string> train_files;
  std::vector<std::string> eval_files;
  std::string separator = "<|endoftext|>";

  struct Training {
    int64_t steps = 0;                // optimizer steps
    int64_t batch_tokens = 4096;      // tokens of one pass; with accumulation, a step sees several
    int64_t accumulation = 1;         // passes per optimizer step
    int64_t sequence_length = 512;    // longest piece of a document; longer documents are cut
    DType weights = DType::f32;       // "f32", or "bf16" with f32 master copies
    double learning_rate = 1e-3;      // peak
    double min_learning_rate = 1e-4;  // at the end of the cosine
    int64_t warmup_steps = 100;       // linear from 0
    double weight_decay = 0.1;        // on matrices; vectors are not decayed
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double max_grad_norm = 1.0;   // 0: no clipping
    uint64_t seed = 1;            // of initial weights and document order
    int64_t eval_interval = 100;  // steps
    int64_t checkpoint_interval = 100;
    int64_t keep_checkpoints = 2;  // newest ones; older are removed
  } training;

  std::string output;
};

// Throws NotFound, DataCorrupted (syntax, with the line), InvalidArgument (type or range, with the key), Unsupported
// (unknown key, by name).
Recipe load_recipe(const std::string& path);

// Linear warm-up, then cosine to the minimum. `step` counts from 0. Source: Loshchilov & Hutter 2017.
double learning_rate_at(const Recipe::Training& training, int64_t step);

}  // namespace eadem::train
