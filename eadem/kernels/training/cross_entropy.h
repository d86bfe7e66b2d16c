// SPDX-License-Identifier: Apache-2.0
//
// loss[r] = logsumexp(logits[r, :]) - logits[r, labels[r]], 0 where labels[r] < 0 (ignored rows)
//
//   inputs   logits [rows, vocab] f32 or bf16; labels [rows] i32, < vocab
//   outputs  loss [rows] f32; forward also lse [rows] f32
//   backward inputs: logits, labels, lse, dloss [rows] f32.
//            outputs: dlogits = dloss * (exp(logits - lse) - onehot(labels)), 0 in ignored rows.
//
// With dlogits_in_e5m2 dlogits are rounded to e5m2 with one scale, as Fp8TensorEncoding rounds them: the largest
// |dloss| over 57344. No value exceeds it, because a probability minus 0 or 1 is at most 1, and a row that is predicted
// badly has values of nearly that size. So the scale is known before the gradient is made; what is smaller than the
// largest by up to 2^29 keeps all bits of e5m2. cross_entropy has no backward kernel for it: the fusion below has.
//
// linear_cross_entropy, the fusion with the LM head: logits = x weight^T are made and consumed in chunks of rows and
// never stored whole.
//   inputs   x [rows, hidden] f32 or bf16; weight [vocab, hidden] (parameter); labels
//            Or x and weight in e4m3, each an Fp8TensorEncoding; then the backward pass multiplies dlogits_in_e5m2.
//   outputs  loss [rows] f32; forward also lse [rows] f32
//   backward inputs: x, weight, labels, lse, dloss.  outputs: dx =, dweight [vocab, hidden] f32 +=.
//            Without lse (unconnected) no forward pass has run: the loss is a third output, and the logits are made
//            once.
#pragma once

#include "eadem/core/machine/matmul_input.h"

namespace eadem::kernels {

struct CrossEntropyAttrs {
  bool dlogits_in_e5m2 = false;
};

struct LinearCrossEntropyAttrs {
  MatmulInput matmul_input = MatmulInput::int8;  // how far x may be rounded for the logits
  bool dlogits_in_e5m2 = false;
};

// Why a kernel that makes or multiplies plain gradients of logits refuses others.
inline constexpr const char* kPlainGradients =
    "gradients of logits in e5m2 are for linear_cross_entropy in 8-bit floats";

}  // namespace eadem::kernels
