// SPDX-License-Identifier: Apache-2.0
//
// scale_by: y = factor[0] * x, where the factor belongs to a model and is not trained.
//
//   inputs   x [...] f32 or bf16; factor [1] f32
//   outputs  y, shape and dtype of x; inference may be written over x
//   backward inputs: factor, dy.   outputs: dx = factor[0] * dy.
//
// One product in f32, rounded once.
#pragma once
