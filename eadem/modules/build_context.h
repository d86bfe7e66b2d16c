// SPDX-License-Identifier: Apache-2.0
//
// BuildContext: what modules need to add their ops to a graph.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "eadem/core/candidate.h"
#include "eadem/modules/auto_hardware_config.h"
#include "eadem/pipeline/graph.h"

namespace eadem::modules {

using pipeline::Graph;
using pipeline::ValueId;

// The place of the keys and values of earlier tokens.
enum class CacheLayout : uint8_t {
  none,        // nowhere: every sequence is whole in its step (training, scoring)
  contiguous,  // one block per sequence
  paged,       // blocks found through a table
};

struct CacheSpec {
  CacheLayout layout = CacheLayout::none;
  int64_t num_blocks = 0;
  int64_t block_size = 0;  // tokens
};

// The values that describe a step; inputs of the graph, shared by every layer. See kernels/attention.h for the shapes.
struct StepValues {
  ValueId token_ids = pipeline::kNoValue;
  ValueId positions = pipeline::kNoValue;
  ValueId query_start = pipeline::kNoValue;
  ValueId kv_length = pipeline::kNoValue;
  ValueId block_table = pipeline::kNoValue;    // with a cache
  ValueId slots = pipeline::kNoValue;          // with a cache
  std::map<std::string, ValueId> rope_tables;  // by name; made once by Rope, used by every layer
};

struct BuildContext {
  Graph& graph;
  const Device& device;
  const AutoHardwareConfig& hardware;
  CacheSpec cache;
  int num_ranks = 1;  // tensor-parallel ranks
  int rank = 0;       // this one
  StepValues step;
  std::vector<Decision> decisions;  // the choices of the factories, for `explain`

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
