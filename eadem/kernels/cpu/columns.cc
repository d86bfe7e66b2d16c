// SPDX-License-Identifier: Apache-2.0
//
// split_columns and concat_columns: copies of whole parts of rows.
#include "eadem/kernels/columns.h"

#include <algorithm>
#include <cstring>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"

namespace eadem::kernels::cpu {

namespace {

Verdict can_move_columns(const KernelRequest& r) {
  Requirements requirements(r);
  for (const TensorType& type : r.inputs) requirements.one_of("a part", type, {DType::f32, DType::bf16});
  return requirements.verdict();
}

// Moves the columns of `whole` to its parts or, if kJoins, back; an undefined part is left out.
template <bool kJoins>
void move_columns(const KernelCall& call, const TensorView& whole, const TensorView& first, const TensorView& second,
                  int64_t first_columns) {
  const int64_t columns = whole.shape.back();
  const int64_t rows = columns == 0 ? 0 : whole.shape.num_elements() / columns;
  const auto size = static_cast<int64_t>(dtype_size(whole.dtype));
  const int64_t first_bytes = first_columns * size, row_bytes = columns * size, second_bytes = row_bytes - first_bytes;
  const auto move = [](char* part, char* at, int64_t bytes) {
    if (part == nullptr) return;
    std::memcpy(kJoins ? at : part, kJoins ? part : at, static_cast<size_t>(bytes));
  };
  auto *from = static_cast<char*>(whole.data), *a = static_cast<char*>(first.data),
       *b = static_cast<char*>(second.data);
  cpu_device(call).pool().parallel_ranges(
      rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(row_bytes, 1)), [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) {
          move(a == nullptr ? nullptr : a + r * first_bytes, from + r * row_bytes, first_bytes);
          move(b == nullptr ? nullptr : b + r * second_bytes, from + r * row_bytes + first_bytes, second_bytes);
        }
      });
}

PlanPtr prepare_split(const KernelRequest& r, Context&) {
  return make_plan([n = r.attrs.get<ColumnsAttrs>().first](const KernelCall& call) {
    move_columns<false>(call, call.inputs[0], call.outputs[0], call.outputs[1], n);
  });
}

PlanPtr prepare_concat(const KernelRequest& r, Context&) {
  return make_plan([n = r.attrs.get<ColumnsAttrs>().first](const KernelCall& call) {
    move_columns<true>(call, call.outputs[0], call.inputs[0], call.inputs[1], n);
  });
}

constexpr Kernel kSplit{"cpu_copy", Pass::forward, can_move_columns, prepare_split};
constexpr Kernel kSplitInference{"cpu_copy", Pass::inference, can_move_columns, prepare_split};
constexpr Kernel kSplitBackward{"cpu_copy", Pass::backward, can_move_columns, prepare_concat};
constexpr Kernel kConcat{"cpu_copy", Pass::forward, can_move_columns, prepare_concat};
constexpr Kernel kConcatInference{"cpu_copy", Pass::inference, can_move_columns, prepare_concat};
constexpr Kernel kConcatBackward{"cpu_copy", Pass::backward, can_move_columns, prepare_split};

}  // namespace

KernelList split_columns_kernels() { return {&kSplit, &kSplitInference, &kSplitBackward}; }
KernelList concat_columns_kernels() { return {&kConcat, &kConcatInference, &kConcatBackward}; }

}  // namespace eadem::kernels::cpu
