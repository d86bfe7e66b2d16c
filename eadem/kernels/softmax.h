// SPDX-License-Identifier: Apache-2.0
//
// y[r, :] = exp(x[r, :] - max) / sum(exp(x[r, :] - max))
//
//   inputs   x [..., n] f32.   outputs: y [..., n] f32 (inference may alias x).
//   backward inputs: y, dy.  outputs: dx = y * (dy - sum(dy * y)).
// A row of NaN gives NaN. Sums in f32.
#pragma once
