// SPDX-License-Identifier: Apache-2.0
//
// y[t, :] = x[t, :] + bias: what follows the sum of a row-parallel product over its ranks, each of which would add the
// bias otherwise.
//
//   inputs   x [tokens, n] f32 or bf16; bias [n] f32, bf16 or f16 (parameter)
//   outputs  y like x (inference may write it over x); one addition in f32, rounded once
//   backward inputs: dy.  outputs: dx = dy; dbias [n] f32 +=, the sum over tokens in their order
#pragma once
