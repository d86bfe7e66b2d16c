// SPDX-License-Identifier: Apache-2.0
//
// y[t] = ids[t], or sampled[-1 - ids[t]] where ids[t] < 0: the token that a row of the step before sampled, which the
// host need not have read.
//
//   inputs   ids [tokens] i32; sampled [logit_rows] i32, with room for every row that ids name
//   outputs  y [tokens] i32
//   Inference only.
//
// A row that sampled nothing, -1, feeds token 0. The rows were checked when the step was submitted. They may be rows
// that this step does not have.
#pragma once
