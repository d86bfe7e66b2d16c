// SPDX-License-Identifier: Apache-2.0
//
// y[t, :] = scale * table[ids[t], :], computed in f32
//
//   inputs   table [vocab, hidden] f32, bf16 or f16 (parameter); ids [tokens] i32, of the whole table
//   outputs  y [tokens, hidden] f32, bf16 or f16
//            A rank may have a part of the table, ids [first, first + vocab). It makes zeros for the others, and
//            y is then a partial sum: one term is the row, all others are zeros.
//   backward inputs: ids, dy.  outputs: dtable [vocab, hidden] f32 += scale * dy, rows added in token order.
//
// The ids were checked when the step was submitted.
#pragma once

#include "eadem/core/dtype.h"

namespace eadem::kernels {

struct EmbeddingAttrs {
  DType out_dtype = DType::f32;
  int64_t vocab = 0;  // rows of the table on this rank; the backward pass has no table to ask
  int64_t first = 0;  // the id of its first row
  float scale = 1;
};

}  // namespace eadem::kernels
