// SPDX-License-Identifier: Apache-2.0
//
// y[t, :] = scale * table[ids[t], :], computed in f32
//
//   inputs   table [vocab, hidden] f32, bf16 or f16 (parameter); ids [tokens] i32 in [0, vocab)
//   outputs  y [tokens, hidden] f32, bf16 or f16
//   backward inputs: ids, dy.  outputs: dtable [vocab, hidden] f32 += scale * dy, rows added in token order.
//
// The ids were checked when the step was submitted.
#pragma once

#include "eadem/core/dtype.h"

namespace eadem::kernels {

struct EmbeddingAttrs {
  DType out_dtype = DType::f32;
  int64_t vocab = 0;  // rows of the whole table; the backward pass has no table to ask
  float scale = 1;
};

}  // namespace eadem::kernels
