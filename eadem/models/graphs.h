// SPDX-License-Identifier: Apache-2.0
//
// The graphs that engines and trainers compile: a model between the inputs and outputs of a step.
#pragma once

#include "eadem/models/model.h"

namespace eadem::models {

// Everything a graph of a model depends on besides the model.
struct GraphOptions {
  const Device* device = nullptr;
  const modules::AutoHardwareConfig* hardware = nullptr;
  modules::CacheSpec cache;
  int num_ranks = 1;                 // tensor-parallel ranks
  int rank = 0;                      // this one
  int expert_ranks = 1;              // ranks that divide experts; of inference graphs, all have the same tokens
  int expert_rank = 0;               // this one
  int64_t longest_sequence = 0;      // tokens that a sequence may have; 0: not known, taken for few
  bool load_balancing_loss = false;  // a training graph has it as an output
  // Serving: one rank's bits on each number of tensor-parallel ranks that same_bits_on() lists; one rank included,
  // whose bits are not those without this option. See docs/parallelism.md.
  bool deterministic_across_tp = false;
};

// The numbers of ranks that give the same bits with deterministic_across_tp: those of 1, 2, 3 and 4 that the model's
// attention heads divide by.
std::vector<int> same_bits_on(const ModelInfo& model);
// Throws InvalidArgument for another number of ranks.
void require_same_bits_on(const ModelInfo& model, int num_ranks);

struct BuiltGraph {
  pipeline::Graph graph;
  std::vector<Decision> decisions;         // the choices of the factories
  std::vector<modules::StateSpec> states;  // what the modules keep between steps
};

// Serving. Inputs: sampled [logit_rows] i32 (see modules::Sampling::feed), token_ids, positions [tokens] i32,
// query_start [sequences+1], kv_length [sequences], for each group of the cache block_table [sequences, max_blocks] i32
// and slots [tokens] i64 (named by modules::group_input), state_slots [sequences] i32 where there are slots,
// prompt_length [sequences] i32 where a module asks for it, logit_rows [logit_rows] i32, and those of
// modules::Sampling. Outputs: hidden [tokens, hidden], logits [logit_rows, vocab] f32, token and logprob [logit_rows].
// States: model.layers.N.self_attn.{k,v}_cache. Throws InvalidArgument where ranks should divide experts that the model
// does not have; so does the next.
// deterministic_across_tp throws as require_same_bits_on() does, and Unsupported for what LinearFactory does not make
// in shards.
BuiltGraph build_inference_graph(const Model& model, const GraphOptions& options);

// Training and scoring without a cache; ranks that divide experts have tokens of their own. Inputs: token_ids,
// positions, labels [tokens] i32 (negative: ignored), query_start, kv_length. Outputs: loss [tokens] f32 and, if it is
// wanted, load_balancing_loss [1] f32. Throws InvalidArgument for a model without experts then, and Unsupported for
// deterministic_across_tp.
BuiltGraph build_training_graph(const Model& model, const GraphOptions& options);

// The states that a model's modules declare on rank `rank` of `num_ranks`, in the order of the computation.
std::vector<modules::StateSpec> states_of(const Model& model, const Device& device,
                                          const modules::AutoHardwareConfig& hardware, int num_ranks = 1, int rank = 0);

}  // namespace eadem::models
