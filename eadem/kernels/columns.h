// SPDX-License-Identifier: Apache-2.0
//
// The columns of rows, in two parts; a column is an element of the last axis.
//
// split_columns: first[..., :n] = x[..., :n], second[..., :] = x[..., n:].
//   inputs   x [..., columns] f32 or bf16.   outputs  first [..., n], second [..., columns - n], dtype of x.
//   backward inputs: dfirst, dsecond.  outputs: dx.
//
// concat_columns: y = [first | second].
//   inputs   first [..., n], second [..., m] f32 or bf16, of one dtype.   outputs  y [..., n + m].
//   backward inputs: dy.  outputs: dfirst, dsecond.
//
// Values move as they are.
#pragma once

#include <cstdint>

namespace eadem::kernels {

struct ColumnsAttrs {
  int64_t first = 0;  // columns of the first part
};

}  // namespace eadem::kernels
