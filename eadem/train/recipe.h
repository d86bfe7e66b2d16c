// SPDX-License-Identifier: Apache-2.0
//
// Recipe: everything a training run depends on, in one TOML file; docs/train.md describes each key. Unknown keys are
// refused. Paths are relative to the recipe.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "eadem/core/dtype.h"
#include "eadem/core/encoding.h"
#include "eadem/train/texts.h"

namespace eadem::train {

struct Recipe {
  std::string path;  // of the recipe itself

  // [model]
  std::string config;     // one of config, an architecture to train from scratch,
  std::string init_from;  // and init_from, a model to fine-tune: a directory or a .gguf
  double init_std = 0.02;

  // [tokenizer]
  std::string tokenizer;  // empty: the tokenizer of init_from

  // [data]; `eval` has no files if no text is held out
  Texts train;
  Texts eval;

  struct Training {
    int64_t steps = 0;                        // optimizer steps
    int64_t batch_tokens = 4096;              // tokens of one pass; with accumulation, a step sees several
    int64_t accumulation = 1;                 // passes per optimizer step
    int64_t sequence_length = 512;            // longest piece of a document; longer documents are divided
    DType weights = DType::f32;               // "f32", or "bf16" with f32 master copies
    const Encoding* products = nullptr;       // one of product_names() (TrainerOptions)
    const Encoding* head_products = nullptr;  // one of head_product_names()
    int64_t amax_history = 16;                // steps (TrainerOptions)
    bool recompute_layers = false;            // "recompute" is "layers", or "none" (TrainerOptions)
    double learning_rate = 1e-3;              // peak
    double min_learning_rate = 1e-4;          // at the end of the cosine; a tenth of the peak unless stated
    int64_t warmup_steps = 100;               // linear from 0
    int64_t decay_steps = 0;    // where the cosine ends; 0: at the number of `steps` with which the run began
    double weight_decay = 0.1;  // on matrices; vectors are not decayed
    double beta1 = 0.9;
    double beta2 = 0.95;
    double eps = 1e-8;
    double max_grad_norm = 1.0;                  // 0: no clipping
    std::optional<double> router_aux_loss_coef;  // trainer.h
    std::vector<std::string> freeze;             // patterns of parameters that are not trained (trainer.h)
    uint64_t seed = 1;                           // of initial weights and document order
    int64_t eval_interval = 100;                 // steps
    int64_t checkpoint_interval = 100;
    int64_t keep_checkpoints = 2;  // newest ones; older are removed
  } training;

  // [output]
  std::string output;
};

// Throws NotFound, IoError (no regular file), DataCorrupted (syntax, with the line), InvalidArgument (type or range,
// with the key), Unsupported (unknown key, by name).
Recipe load_recipe(const std::string& path);

// Linear warm-up, then cosine to the minimum at `decay_steps`, which is not 0 here. `step` counts from 0. Source:
// Loshchilov & Hutter 2017.
double learning_rate_at(const Recipe::Training& training, int64_t step);

}  // namespace eadem::train
