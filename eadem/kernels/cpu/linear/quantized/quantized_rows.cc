// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/quantized/quantized_rows.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear/quantized/quantized_rows.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_words-inl.h"
#include "eadem/kernels/cpu/linear/round_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// What a dot product with bytes of weights has too much for each unit of x. Codes of 8 bits may be centered.
int32_t excess(const QuantizedRows& q) { return q.zero() - (kCentersBytes && q.layout->has_byte_codes() ? 128 : 0); }

// The starts of a row's chunks, and its total.
void sum_chunks(const QuantizedRows& q, const Int8RowPlanes& x, int64_t r, int64_t all_steps) {
  float total = 0;
  for (int64_t s0 = 0; s0 < all_steps; s0 += kChunkSteps) {
    const int64_t steps = std::min(kChunkSteps, all_steps - s0), at = q.step(r, s0);
    int32_t sum = 0;
    for (int64_t i = at * 2; i < (at + steps) * 2; ++i) sum += x.sums[i];
    q.starts[at] = -excess(q) * sum;
    total = hn::GetLane(hn::MulAdd(set(q.scales[at]), set(static_cast<float>(sum)), set(total)));
  }
  q.sums[r] = total;
}

void sum_steps(const QuantizedRows& q, const Int8RowPlanes& x, int64_t r, int64_t all_steps) {
  const bool halves = q.layout->groups() == 2, folded = q.layout->folded;
  const int32_t zero = excess(q), factor = q.layout->has_min ? 1 : q.layout->zero;
  for (int64_t s0 = 0; s0 < all_steps; s0 += kChunkSteps) {
    const int64_t begin = q.step(r, s0), end = begin + std::min(kChunkSteps, all_steps - s0);
    const int32_t* sums = x.sums;
    for (int64_t i = begin; i < end && !halves; ++i) {
      const int32_t sum = sums[2 * i] + sums[2 * i + 1];
      q.starts[i] = -zero * sum;
      q.sums[i] = static_cast<float>(sum);
    }
    for (int64_t i = 2 * begin; i < 2 * end && halves && !folded; ++i) q.starts[i] = -zero * sums[i];
    for (int64_t i = begin; i < end && folded; ++i) {
      q.starts[i] = -zero * (sums[2 * i] + sums[2 * i + 1]);
      q.pairs[i] = (factor * sums[2 * i] & 0xffff) | factor * sums[2 * i + 1] * 0x10000;
    }
  }
}

void sum_rows(const QuantizedRows& q, const Int8RowPlanes& x, int64_t k_size, int64_t begin, int64_t end) {
  const auto sum = q.layout->whole_rows() ? sum_chunks : sum_steps;
  for (int64_t r = begin; r < end; ++r) sum(q, x, r, k_size / kStep);
}

RowRoutines routines() { return {round_rows<1>, round_rows<kChunkSteps>, sum_rows}; }

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

EADEM_CPU_EXPORT(routines);

namespace {
int64_t padded_steps(int64_t rows, int64_t k_size) {
  return rows * ((k_size / kStep + kChunkSteps - 1) / kChunkSteps * kChunkSteps);
}
}  // namespace

int64_t quantized_rows_bytes(int64_t rows, int64_t k_size) {
  return padded_steps(rows, k_size) * static_cast<int64_t>(sizeof(float)) * 2 * kMaxStepGroups;
}

QuantizedRows quantized_rows_in(void* memory, const QuantizedLayout& layout, const Int8RowPlanes& x, int64_t k_size) {
  QuantizedRows q{};
  q.rows = x.rows;
  q.layout = &layout;
  q.codes = x.codes;
  q.scales = x.scales;
  q.starts = static_cast<int32_t*>(memory);
  q.pairs = q.starts + padded_steps(x.rows, k_size) * q.dots();  // a layout uses only one of the two
  q.sums = reinterpret_cast<float*>(q.pairs);
  return q;
}

RowRoutines row_routines(Isa isa) { return EADEM_CPU_DISPATCH(routines, isa)(); }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
