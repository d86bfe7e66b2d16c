// SPDX-License-Identifier: Apache-2.0
//
// y = sum of x over the ranks of the tensor-parallel group, in rank order; the identity on one rank.
//
//   inputs   x [...] f32 or bf16.   outputs: y like x (may alias x).   backward inputs: dy. outputs: dx = dy (no
//   kernel: the gradient of a replicated value is the same on every rank and passes through).
#pragma once
