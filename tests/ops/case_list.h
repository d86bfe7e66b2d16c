// SPDX-License-Identifier: Apache-2.0
//
// Helpers for lists of cases (op_cases.h): a builder, dtypes and sizes.
#pragma once

#include <utility>
#include <vector>

#include "tests/ops/op_cases.h"

namespace eadem::test {

inline constexpr DType kF32 = DType::f32, kBf16 = DType::bf16, kF16 = DType::f16;
inline constexpr DType kActivationDtypes[] = {kF32, kBf16};

// Around the widths of vectors (4, 8, 16 and 32 elements), of weight panels (16 and 64 outputs) and of unrolled loops.
inline constexpr int64_t kEdges[] = {1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129};

class Cases {
 public:
  void add(ops::OpPtr op, std::vector<TensorType> types, SymbolValues symbols = {}) {
    cases_.push_back(named_case(std::move(op), std::move(types), symbols));
  }
  // With `tokens` bound.
  void add(ops::OpPtr op, std::vector<TensorType> types, int64_t tokens) {
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    symbols[Symbol::logit_rows] = tokens;
    add(std::move(op), std::move(types), symbols);
  }
  std::vector<ops::Workload> take() { return std::move(cases_); }

 private:
  std::vector<ops::Workload> cases_;
};

}  // namespace eadem::test
