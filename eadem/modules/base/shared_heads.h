// SPDX-License-Identifier: Apache-2.0
//
// Heads that several heads of another kind share, on tensor-parallel ranks that divide the latter: key-value heads,
// which query heads share, and the groups of a state-space layer.
#pragma once

#include <numeric>
#include <optional>

#include "eadem/modules/build_context.h"
#include "eadem/ops/parallel/select_heads.h"

namespace eadem::modules {

struct SharedHeads {
  int64_t own;                                         // on this rank
  std::optional<kernels::SelectHeadsAttrs> selection;  // where the ranks make all of them and keep some
};

// Ranks divide `shared` heads where these divide. Else every rank makes all of them and keeps one for each run of its
// part of `heads` that share the same one; runs are as long as one length for all allows. `heads` divide.
inline SharedHeads divide_shared_heads(const BuildContext& context, int64_t heads, int64_t shared) {
  if (shared % context.num_ranks == 0) return {shared / context.num_ranks, std::nullopt};
  const int64_t own = heads / context.num_ranks, group = heads / shared, run = std::gcd(own, group);
  return {own / run,
          kernels::SelectHeadsAttrs{
              .heads = shared, .own_heads = own / run, .first_query = context.rank * own, .run = run, .group = group}};
}

}  // namespace eadem::modules
