// SPDX-License-Identifier: Apache-2.0
//
// Work of decoder_layer and decoder_layers: one token of one sequence behind the keys of its cache, in small layers and
// in those of Llama 3.1 8B and Llama 3.2 1B.
#pragma once

#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

struct DecoderLayerRow {
  ops::Workload row;
  size_t layers;
  bool is_small;   // quick to compute by definition
  bool is_floats;  // weights are in e4m3
};

// Activations in `activations`; in small rows weights of every kind, in large ones of 4 bits in groups of 128,
// K-quants and e4m3.
std::vector<DecoderLayerRow> decoder_layer_rows(DType activations);

}  // namespace eadem::test
