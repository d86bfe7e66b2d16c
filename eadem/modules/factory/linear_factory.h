// SPDX-License-Identifier: Apache-2.0
//
// LinearFactory hides how a matrix product's weights are stored and divided over ranks.
//
// With BuildContext::same_bits_on, layers whose inputs ranks divide are made in virtual shards: a product of each, with
// columns of the weight as a parameter of its own, and one sum of them all in f32 (ops/parallel/virtual_shards.h), on
// one rank as on several. The bias is added behind it.
#pragma once

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
  // How many attention heads the inputs of the layer consist of; ranks divide inputs between heads only. 0: ranks may
  // divide them anywhere.
  int64_t in_heads = 0;
};

class LinearFactory {
 public:
  // Adds the layer to the graph and records in the context how its weight is stored. Throws Unsupported, naming the
  // layer, for weights that no product reads and for encodings that cannot be divided over the ranks; with same_bits_on
  // also for a rounding of weights in each step.
  static ValueId build(BuildContext& context, const LinearRequest& request, ValueId x);

  // The same for a layer of `experts` matrices, of which each row of x meets one: rows stand in the order of their
  // experts, those of expert e at [offsets[e], offsets[e + 1]). The parameter is [experts, out, in], its bias
  // [experts, out], which ranks that divide inputs cannot have.
  static ValueId build_grouped(BuildContext& context, const LinearRequest& request, int64_t experts, ValueId x,
                               ValueId offsets);

  // Builds products of `heads` matrices, each with its own head of x [tokens, heads, in]. The parameter is
  // [heads, out, in], of which each rank has its heads; there is no bias.
  static ValueId build_heads(BuildContext& context, const LinearRequest& request, int64_t heads, ValueId x);
  // The parameter alone, for an op that multiplies by itself.
  static ValueId head_weight(BuildContext& context, const LinearRequest& request, int64_t heads);
};

}  // namespace eadem::modules
