// SPDX-License-Identifier: Apache-2.0
//
// The multiplications of a model, by the arithmetic in which kernels compute them; bench compares them with the
// machine's rates.
#pragma once

#include "eadem/cli/bench/machine.h"
#include "eadem/pipeline/graph.h"

namespace eadem::cli {

// Elements of weight matrices that each token multiplies.
struct Products {
  double f32 = 0;   // plain f32 and f16, and 8-bit floats, which are widened
  double bf16 = 0;  // on AMX tiles if there are any, else as f32
  double int8 = 0;  // quantized: by 8-bit dot products
  // Weights in int8 with one scale per output, multiplied on AMX tiles if there are any, else by dot products.
  double int8_rows = 0;

  // The least time for `rows` rows at two operations an element. If a rate is 0, the next slower one is used: dot
  // products for int8 tiles, f32 arithmetic for everything else.
  double seconds(const MachineRates& rates, double rows) const;
};

// The products of the decoder, and those of the LM head, which computes only the tokens that need logits.
struct ModelProducts {
  Products decoder, head;
};

// The rows of a node's first input that there are for each token: as many as a token has experts, else one. Of experts
// that ranks divide, this rank's share of them.
double rows_per_token(const pipeline::Graph& graph, const pipeline::Node& node);

// Counts the products in a model's graph. Embeddings are looked up, not multiplied; of a stack of matrices each row
// meets one.
ModelProducts products_of(const pipeline::Graph& graph);

}  // namespace eadem::cli
