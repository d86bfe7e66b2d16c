// SPDX-License-Identifier: Apache-2.0
//
// The multiplications that a model asks of a machine, by the arithmetic that kernels do them in: one side of the share
// of the limit.
#pragma once

#include "eadem/cli/machine.h"
#include "eadem/pipeline/graph.h"

namespace eadem::cli {

// Elements of weight matrices, each multiplied once by every row.
struct Products {
  double f32 = 0;   // plain f32 and f16, and 8-bit floats, which are widened
  double bf16 = 0;  // on tiles where there are any, else as f32
  double int8 = 0;  // quantized: by 8-bit dot products
  // Quantized with one scale an output: on tiles where there are any, else by dot products.
  double int8_rows = 0;

  // The least time for `rows` rows at two operations an element. A rate that is 0 is that of the
  // next best: tiles of int8 that of dot products, all others that of f32.
  double seconds(const MachineRates& rates, double rows) const;
};

// Of the decoder, and of the LM head, which sees only the tokens whose successors are wanted.
struct ModelProducts {
  Products decoder, head;
};

// Of a model's graph. Embeddings are looked up, not multiplied.
ModelProducts products_of(const pipeline::Graph& graph);

}  // namespace eadem::cli
