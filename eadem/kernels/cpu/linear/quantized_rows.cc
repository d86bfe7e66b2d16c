// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/quantized_rows.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear/quantized_rows.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/linear/quantized_words-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// The scale of the codes of steps * 32 values at x, and the factor by which values are multiplied to give codes. If any
// value is not finite, neither is the scale.
struct CodeScale {
  float scale, inverse;
};
HWY_INLINE CodeScale code_scale(const float* x, int64_t steps) {
  const IntLanes di;
  // The largest magnitude, compared as integers: NaN is larger than infinity, which is larger than any number.
  Ints most = hn::Zero(di);
  for (int64_t v = 0; v < steps * kStep; v += kLanes)
    most = hn::Max(most, hn::And(hn::BitCast(di, load(x + v)), hn::Set(di, 0x7fffffff)));
  const int32_t bits = hn::GetLane(hn::MaxOfLanes(di, most));
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  // Below this limit the reciprocal is not finite; such a small group is encoded as zeros.
  const float inverse = largest > 0x1p-119f && bits < 0x7f800000 ? 127.0f / largest : 0.0f;
  return {inverse == 0.0f && bits < 0x7f800000 ? 0.0f : largest * (1.0f / 127.0f), inverse};
}

// Computes the codes and group sums of the 32 values at x.
template <int kGroups>
HWY_INLINE void quantize_step(int8_t* codes, int32_t* sums, const float* x, float inverse) {
  int32_t rounded[kStep];
  for (int64_t v = 0; v < kStep; v += kLanes) {
    const Vec scaled = inverse == 0.0f ? zero() : hn::Mul(load(x + v), set(inverse));
    hn::StoreU(hn::NearestInt(scaled), IntLanes(), rounded + v);
  }
  for (int g = 0; g < kGroups; ++g) {
    int32_t sum = 0;
    for (int64_t i = g * (kStep / kGroups); i < (g + 1) * (kStep / kGroups); ++i) {
      codes[i] = static_cast<int8_t>(rounded[i]);
      sum += rounded[i];
    }
    sums[g] = sum;
  }
}

// Quantizes a row of x for weights with one scale for each output, a chunk at a time.
void quantize_row_chunks(const QuantizedRows& q, int64_t r, const float* x, int64_t k_size) {
  float total = 0;
  for (int64_t s0 = 0; s0 < k_size / kStep; s0 += kChunkSteps) {
    const int64_t steps = std::min(kChunkSteps, k_size / kStep - s0), at = q.step(r, s0);
    const float* values = x + s0 * kStep;
    float ordered[kChunkSteps * kStep];
    if (q.order != nullptr) {
      for (int64_t i = 0; i < steps * kStep; ++i) ordered[i] = x[q.order[s0 * kStep + i]];
      values = ordered;
    }
    const CodeScale scale = code_scale(values, steps);
    int32_t sum = 0;
    for (int64_t s = 0; s < steps; ++s) {
      int32_t step_sum;
      quantize_step<1>(q.codes + (at + s) * kStep, &step_sum, values + s * kStep, scale.inverse);
      sum += step_sum;
    }
    q.scales[at] = scale.scale;
    q.starts[at] = -q.zero() * sum;
    total = hn::GetLane(hn::MulAdd(set(scale.scale), set(static_cast<float>(sum)), set(total)));
  }
  q.sums[r] = total;
}

// Quantizes rows [begin, end) of x [rows, k_size].
void quantize_row_range(const QuantizedRows& q, const float* x, int64_t x_stride, int64_t k_size, int64_t begin,
                        int64_t end) {
  const bool halves = q.layout->groups() == 2;
  if (q.layout->whole_rows()) {
    for (int64_t r = begin; r < end; ++r) quantize_row_chunks(q, r, x + r * x_stride, k_size);
    return;
  }
  for (int64_t r = begin; r < end; ++r)
    for (int64_t s = 0; s < k_size / kStep; ++s) {
      int32_t sums[kMaxStepGroups];
      const float* values = x + r * x_stride + s * kStep;
      float ordered[kStep];
      if (q.order != nullptr) {
        for (int64_t i = 0; i < kStep; ++i) ordered[i] = x[r * x_stride + q.order[s * kStep + i]];
        values = ordered;
      }
      const int64_t step = q.step(r, s);
      const CodeScale scale = code_scale(values, 1);
      q.scales[step] = scale.scale;
      if (!halves) {
        quantize_step<1>(q.codes + step * kStep, sums, values, scale.inverse);
        q.starts[step] = -q.zero() * sums[0];
        q.sums[step] = static_cast<float>(sums[0]);
        continue;
      }
      quantize_step<2>(q.codes + step * kStep, sums, values, scale.inverse);
      if (!q.layout->folded) {
        for (int g = 0; g < 2; ++g) q.starts[step * 2 + g] = -q.zero() * sums[g];
        continue;
      }
      q.starts[step] = -q.zero() * (sums[0] + sums[1]);
      const int32_t factor = q.layout->has_min ? 1 : q.layout->zero;
      q.pairs[step] = (factor * sums[0] & 0xffff) | factor * sums[1] * 0x10000;
    }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(quantize_row_range);

namespace {
int64_t padded_steps(int64_t rows, int64_t k_size) {
  return rows * ((k_size / kStep + kChunkSteps - 1) / kChunkSteps * kChunkSteps);
}
}  // namespace

int64_t quantized_rows_bytes(int64_t rows, int64_t k_size) {
  return padded_steps(rows, k_size) * (kStep + static_cast<int64_t>(sizeof(float)) * (1 + 2 * kMaxStepGroups));
}

QuantizedRows quantized_rows_in(void* base, const QuantizedLayout& layout, int64_t rows, int64_t k_size) {
  const int64_t steps = padded_steps(rows, k_size);
  QuantizedRows q{};
  q.rows = rows;
  q.layout = &layout;
  q.codes = static_cast<int8_t*>(base);
  q.scales = reinterpret_cast<float*>(q.codes + steps * kStep);
  q.starts = reinterpret_cast<int32_t*>(q.scales + steps);
  q.sums = reinterpret_cast<float*>(q.starts + steps * q.dots());
  q.pairs = q.starts + steps * q.dots();  // a layout uses only one of the two
  return q;
}

QuantizeRows quantize_rows_on(Isa isa) { return EADEM_CPU_DISPATCH(quantize_row_range, isa); }

void quantize_rows(CpuDevice& device, QuantizeRows quantize, const QuantizedRows& q, const float* x, int64_t x_stride,
                   int64_t k_size) {
  // A few microseconds of work do not justify waking threads.
  device.pool().parallel_ranges(q.rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(k_size, 1)),
                                [&](int64_t begin, int64_t end) { quantize(q, x, x_stride, k_size, begin, end); });
}

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
