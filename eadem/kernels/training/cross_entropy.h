// SPDX-License-Identifier: Apache-2.0
//
// loss[r] = logsumexp(logits[r, :]) - logits[r, labels[r]], 0 where labels[r] < 0 (ignored rows)
//
//   inputs   logits [rows, vocab] f32 or bf16; labels [rows] i32, < vocab
//   outputs  loss [rows] f32; forward also lse [rows] f32
//   backward inputs: logits, labels, lse, dloss [rows] f32.
//            outputs: dlogits = dloss * (exp(logits - lse) - onehot(labels)), 0 in ignored rows.
//
// linear_cross_entropy, the fusion with the LM head: logits = x weight^T are made and consumed in chunks of rows and
// never stored whole.
//   inputs   x [rows, hidden] f32 or bf16; weight [vocab, hidden] (parameter); labels
//   outputs  loss [rows] f32; forward also lse [rows] f32
//   backward inputs: x, weight, labels, lse, dloss.  outputs: dx =, dweight [vocab, hidden] f32 +=.
//            Without lse (unconnected) no forward pass has run: the loss is a third output, and the logits are made
//            once.
#pragma once

#include "eadem/core/machine/matmul_input.h"

namespace eadem::kernels {

struct LinearCrossEntropyAttrs {
  MatmulInput matmul_input = MatmulInput::int8;  // how far x may be rounded for the logits
};

}  // namespace eadem::kernels
