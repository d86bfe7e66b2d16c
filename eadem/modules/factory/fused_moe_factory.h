// SPDX-License-Identifier: Apache-2.0
//
// FusedMoeFactory hides which rank computes a row of an expert: the executor of a mixture of experts, whose router is
// SelectTopk (base/select_topk.h) and whose products LinearFactory::build_grouped makes for each encoding.
#pragma once

#include <span>

#include "eadem/core/function_ref.h"
#include "eadem/modules/build_context.h"

namespace eadem::modules {

struct MoeRequest {
  int64_t experts = 0;  // of all ranks
  int64_t top_k = 0;    // of each token
  int ranks = 1;        // that divide the experts
  int rank = 0;         // this one
  bool own_tokens = false;
};

// Adds the experts' products of rows that stand in the order of experts, [rows, width], with offsets as of
// kernels::ExpertOrder, and returns what they make.
using BuildExperts = FunctionRef<ValueId(ValueId rows, ValueId offsets)>;

struct MoeExecutor {
  std::string_view name;
  Verdict (*can_handle)(const MoeRequest& request);
  ValueId (*build)(BuildContext& context, const MoeRequest& request, ValueId rows, ValueId offsets,
                   const BuildExperts& experts);
};

class FusedMoeFactory {
 public:
  // grouped: this rank has all experts. gathered: each rank computes the rows of its experts, and all get all rows.
  // all_to_all: each rank has tokens of its own, whose rows travel to the ranks of their experts and back.
  static std::span<const MoeExecutor* const> strategies();

  // Adds `experts` to the graph, and what the ranks exchange around them, and records the decision. `rows` [top_k *
  // tokens, width] are those of this rank's tokens, and so is the result.
  static ValueId build(BuildContext& context, MoeRequest request, ValueId rows, ValueId offsets,
                       const BuildExperts& experts);
};

}  // namespace eadem::modules
