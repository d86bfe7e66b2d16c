// SPDX-License-Identifier: Apache-2.0
//
// The sum over ranks that all communicators make, so that their results have the same bits.
#pragma once

#include <algorithm>
#include <array>

#include "eadem/core/mesh/mesh.h"

namespace eadem::distributed {

inline float widened(float value) { return value; }
inline float widened(bf16_t value) { return value.to_float(); }
inline void round_to(float& result, float value) { result = value; }
inline void round_to(bf16_t& result, float value) { result = bf16_t::from_float(value); }

// y[i] = sum over ranks of part(rank)[i], in rank order, in f32, rounded once; `store` puts a block of results away.
template <typename T, typename Part, typename Store>
void sum_parts(int64_t begin, int64_t end, int ranks, const Part& part, const Store& store) {
  constexpr int64_t kBlock = 512;  // stays in the first-level cache
  std::array<float, kBlock> sum;
  std::array<T, kBlock> rounded;
  for (int64_t first = begin; first < end; first += kBlock) {
    const int64_t count = std::min(kBlock, end - first);
    for (int rank = 0; rank < ranks; ++rank) {
      const T* values = part(rank) + first;
      for (int64_t i = 0; i < count; ++i) {
        const float value = widened(values[i]);
        sum[static_cast<size_t>(i)] = rank == 0 ? value : sum[static_cast<size_t>(i)] + value;
      }
    }
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) round_to(rounded[i], sum[i]);
    store(first, rounded.data(), count);
  }
}

template <typename Task>
void with_summed_dtype(DType dtype, const Task& task) {
  if (dtype == DType::f32) return task(float{});
  if (dtype == DType::bf16) return task(bf16_t{});
  throw InvalidArgument("ranks cannot sum {}; expected f32 or bf16", dtype_name(dtype));
}

}  // namespace eadem::distributed
