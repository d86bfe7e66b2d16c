// SPDX-License-Identifier: Apache-2.0
//
// The multiplications that a model asks of a machine, by the arithmetic that kernels do them in: one side of the share
// of the limit.
#pragma once

#include "eadem/cli/bench/machine.h"
#include "eadem/pipeline/graph.h"

namespace eadem::cli {

// Elements of weight matrices, each multiplied once by every row.
struct Products {
  double f32 = 0;   // plain f32 and f16, and 8-bit floats, which are widened
  double bf16 = 0;  // on tiles where there are any, else as f32
  double int8 = 0;  // quantized: by 8-bit dot products
  // Weights in int8 with one scale per output: tiles multiply them where there are any, else dot products.
  double int8_rows = 0;

  // The least time for `rows` rows at two operations an element. Where a rate is 0, the next slower way is taken: dot
  // products for int8 tiles, f32 arithmetic for everything else.
  double seconds(const MachineRates& rates, double rows) const;
};

// The products of the decoder, and those of the LM head, which sees only the tokens whose successors are wanted.
struct ModelProducts {
  Products decoder, head;
};

// Counts the products in a model's graph. Embeddings are looked up, not multiplied.
ModelProducts products_of(const pipeline::Graph& graph);

}  // namespace eadem::cli
