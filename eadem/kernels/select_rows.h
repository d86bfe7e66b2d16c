// SPDX-License-Identifier: Apache-2.0
//
// y[r, :] = x[rows[r], :]: the rows whose logits are wanted.
//
//   inputs   x [tokens, hidden] f32 or bf16; rows [logit_rows] i32, distinct, in [0, tokens)
//   outputs  y [logit_rows, hidden] dtype of x
//   Inference only: training wants every row.
#pragma once
