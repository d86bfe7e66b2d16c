// SPDX-License-Identifier: Apache-2.0
//
// LinearFactory hides how a matrix product's weights are stored. Strategies are chosen by encoding, precision and
// device.
#pragma once

#include <memory>
#include <span>

#include "eadem/modules/build_context.h"

namespace eadem::modules {

// The division of a linear layer over tensor-parallel ranks. Source: Shoeybi et al. 2019.
enum class Parallel : uint8_t {
  none,
  column,  // outputs divided: the weight's rows, the bias
  row,  // inputs divided: the weight's columns; the result is a partial sum, to which the bias is added after the ranks
        // have summed it
};

struct LinearRequest {
  std::string name;  // parameters are `name`.weight and, with a bias, `name`.bias
  int64_t in = 0;    // size of the whole layer, as `out`
  int64_t out = 0;
  bool bias = false;
  Parallel parallel = Parallel::none;
  const HardwareConfig* hardware = nullptr;
  WeightType weights;              // set by the factory: how this layer's weight is stored
  const Device* device = nullptr;  // likewise
  int num_ranks = 1;               // likewise
  int rank = 0;                    // likewise
};

struct LinearStrategy {
  std::string_view name;
  Verdict (*can_handle)(const LinearRequest& request);
  ValueId (*build)(BuildContext& context, const LinearRequest& request, ValueId x);
};

class LinearFactory {
 public:
  static std::span<const LinearStrategy* const> strategies();

  // Adds the layer to the graph and records the decision in the context. Throws Unsupported listing every refusal.
  static ValueId build(BuildContext& context, LinearRequest request, ValueId x);
};

}  // namespace eadem::modules
