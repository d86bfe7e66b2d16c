// SPDX-License-Identifier: Apache-2.0
//
// BuildContext: what modules need to add their ops to a graph.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "eadem/core/candidate.h"
#include "eadem/modules/auto_hardware_config.h"
#include "eadem/modules/state_spec.h"
#include "eadem/ops/quantize.h"
#include "eadem/pipeline/graph.h"

namespace eadem::modules {

using pipeline::Graph;
using pipeline::ValueId;

// Where a step finds and puts the rows of a cache group.
struct GroupValues {
  ValueId block_table = pipeline::kNoValue;
  ValueId slots = pipeline::kNoValue;
};

// The keys and values that an attention reads: those of the step's tokens, or the caches that hold them.
struct KvValues {
  ValueId k = pipeline::kNoValue;
  ValueId v = pipeline::kNoValue;
};

// The values that describe a step; inputs of the graph, shared by every layer. See kernels/attention/attention.h for
// the shapes.
struct StepValues {
  ValueId token_ids = pipeline::kNoValue;
  ValueId positions = pipeline::kNoValue;
  ValueId query_start = pipeline::kNoValue;
  ValueId kv_length = pipeline::kNoValue;
  std::vector<GroupValues> groups;             // with a cache: one for each of its groups
  ValueId state_slots = pipeline::kNoValue;    // with slots for states per sequence
  ValueId prompt_length = pipeline::kNoValue;  // with a cache, where a module has asked for it
  std::map<std::string, ValueId> rope_tables;  // by name; made once by Rope, used by every layer
  std::map<int, KvValues> layer_kv;            // of layers that attend, for later ones that read the same
  std::vector<ValueId> layer_inputs;  // what each layer reads of a token besides its hidden state (LayerInputs)
};

// What a router decides by.
struct RouterValues {
  ValueId logits;  // [tokens, experts] f32
  int64_t top_k;
};

struct BuildContext {
  Graph& graph;
  const Device& device;
  const AutoHardwareConfig& hardware;
  CacheSpec cache;
  int num_ranks = 1;             // tensor-parallel ranks
  int rank = 0;                  // this one
  int expert_ranks = 1;          // ranks that divide experts
  int expert_rank = 0;           // this one
  bool own_tokens = false;       // each of them has tokens of its own; else all have the same
  int64_t longest_sequence = 0;  // tokens that a sequence may have; 0: not known, taken for few
  // The numbers of tensor-parallel ranks that give the same bits, 1 aside, in the order in which their borders part a
  // sum (core/mesh/virtual_shards.h). Nothing: ranks add one partial sum each.
  std::optional<std::vector<int>> same_bits_on;
  StepValues step;
  std::vector<Decision> decisions;    // the choices of the factories, for `explain`
  std::vector<StateSpec> states;      // what modules declared
  std::vector<RouterValues> routers;  // of layers with experts, in the order of the computation

  // Declares a state and returns its storage.
  ValueId add_state(const StateSpec& state) {
    states.push_back(state);
    return graph.add_state(state.name, storage_type(state, cache));
  }
  // Adds the rounding of a plain parameter to `to`, and the state of a delayed scale, named after the parameter.
  ValueId rounded(ValueId parameter, const Encoding* to) {
    std::vector<ValueId> inputs = {parameter};
    if (ops::Quantize::has_scaling(to))
      inputs.push_back(
          graph.add_state(ops::Quantize::scaling_name(graph.value(parameter).name), ops::Quantize::scaling_type()));
    return graph.add(std::make_shared<ops::Quantize>(kernels::QuantizeAttrs{to}), std::move(inputs))[0];
  }
  // How many tokens each sequence's prompt has, an input of the graph that is added on first use.
  ValueId prompt_length() {
    if (step.prompt_length == pipeline::kNoValue)
      step.prompt_length = graph.add_input("prompt_length", TensorType(DType::i32, {Symbol::sequences}));
    return step.prompt_length;
  }
  // The step's values for states with this window.
  const GroupValues& group_of(int64_t window) const { return step.groups[cache.group_of(window)]; }

  // This rank's part of `count` rows that need not divide evenly. Throws InvalidArgument when there are more ranks.
  PartRange part(int64_t count, std::string_view what) const {
    if (count < num_ranks) throw InvalidArgument("{} {} for {} tensor-parallel ranks", count, what, num_ranks);
    return part_of(count, num_ranks, rank);
  }
  // This rank's share of `count` heads. Throws InvalidArgument when it does not divide.
  int64_t share(int64_t count, std::string_view what) const {
    if (count % num_ranks != 0)
      throw InvalidArgument("{} {} do not divide into {} tensor-parallel ranks", count, what, num_ranks);
    return count / num_ranks;
  }
};

}  // namespace eadem::modules
