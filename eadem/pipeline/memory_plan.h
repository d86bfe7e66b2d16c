// SPDX-License-Identifier: Apache-2.0
//
// Step 6: where every activation lives. Lifetimes over the program order, in-place results where an op allows it, and
// one arena whose offsets are reused as soon as a value is dead. Planned once, at the bounds of the shape bucket; a
// step then touches no allocator.
#pragma once

#include "eadem/pipeline/graph.h"

namespace eadem::pipeline {

struct MemoryPlan {
  static constexpr int64_t kAlignment = 256;

  // Value -> the value whose bytes it is written over (a view, an in-place result, a state), or itself.
  std::vector<ValueId> root;
  // Value -> offset in the arena; -1 for values that live elsewhere (parameters, constants, states, aliases of those).
  std::vector<int64_t> offset;
  // Node -> offset of its scratch; -1 without.
  std::vector<int64_t> scratch_offset;
  int64_t arena_bytes = 0;
  // The size that the arena would have without reuse, for `explain`.
  int64_t bytes_without_reuse = 0;
};

struct MemoryPlanOptions {
  // Every value gets its own bytes, so that all of them can be looked at after the step.
  bool keep_everything = false;
};

// `scratch_bytes` holds one entry per node. Throws InvalidArgument for an op whose state output names no input that it
// is written over.
MemoryPlan plan_memory(const Graph& graph, const SymbolValues& bounds, std::span<const int64_t> scratch_bytes,
                       const MemoryPlanOptions& options);

}  // namespace eadem::pipeline
