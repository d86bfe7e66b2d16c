// SPDX-License-Identifier: Apache-2.0
//
// Weights in 8-bit floats, decoded to f32: in registers for a single row, else to memory.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_FP8_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_FP8_DECODE_INL_H_
#undef EADEM_KERNELS_CPU_FP8_DECODE_INL_H_
#else
#define EADEM_KERNELS_CPU_FP8_DECODE_INL_H_
#endif

#include <algorithm>

#include "eadem/kernels/cpu/linear/matmul-inl.h"
#include "eadem/kernels/cpu/linear/matmul.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

// load_fp8 returns the decoded values divided by this factor.
template <bool kE5m2>
inline constexpr float kFp8Factor = kE5m2 ? 1.0f : 256.0f;

// Decodes kLanes codes to f32, divided by kFp8Factor: the bits are moved into the fields of an f16, whose exponent bias
// is larger than that of e4m3 by 8. Conversions from f16 handle subnormals at full speed.
template <bool kE5m2>
HWY_INLINE Vec load_fp8(const uint8_t* p) {
#if HWY_TARGET == HWY_SCALAR
  const f16_t half{static_cast<uint16_t>(kE5m2 ? *p << 8 : (*p & 0x80) << 8 | (*p & 0x7f) << 7)};
  return load(&half);
#else
  const hn::RebindToSigned<hn::Rebind<uint16_t, Lanes> > d16;
  const hn::Rebind<int8_t, Lanes> d8;
  auto bits = hn::PromoteTo(d16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(p)));
  // The widened sign fills the upper byte: shifted left by 7, it stands at bits 15 and 14.
  bits = kE5m2 ? hn::ShiftLeft<8>(bits) : hn::And(hn::ShiftLeft<7>(bits), hn::Set(d16, static_cast<int16_t>(0xbf80)));
#if HWY_TARGET == HWY_SSE4
  f16_t halves[kLanes];
  hn::StoreU(bits, d16, reinterpret_cast<int16_t*>(halves));
  return load(halves);
#else
  return hn::PromoteTo(Lanes(), hn::BitCast(hn::Rebind<hwy::float16_t, Lanes>(), bits));
#endif
#endif
}

// c [kPanels * 16] = one row of a times panels [p0, p0 + kPanels), which are decoded in registers.
template <bool kE5m2, int kPanels>
HWY_NOINLINE void fp8_row(float* HWY_RESTRICT c, const RowOperand& a, const Fp8Weight& w, int64_t k_size, int64_t p0) {
  const int64_t block = w.block_columns == 0 ? std::max<int64_t>(k_size, 1) : w.block_columns;
  const int64_t blocks = (k_size + block - 1) / block, panel_bytes = k_size * kPanelWidth;
  const StreamAhead ahead(panel_bytes, (kPanels - 1) * panel_bytes);
  for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
    Vec acc[kPanels];
#pragma GCC unroll kUnroll
    for (int p = 0; p < kPanels; ++p) acc[p] = zero();
    const uint8_t* codes = w.codes + p0 * panel_bytes + n;
    for (int64_t b = 0; b < blocks; ++b) {
      Vec scale[kPanels];
#pragma GCC unroll kUnroll
      for (int p = 0; p < kPanels; ++p)
        scale[p] = hn::Mul(load(w.scales + ((p0 + p) * blocks + b) * kPanelWidth + n), set(kFp8Factor<kE5m2>));
      for (int64_t k = b * block; k < std::min(k_size, (b + 1) * block); ++k, codes += kPanelWidth) {
        const Vec x = set(a.data[k * a.k_stride]);
        if (n == 0 && k % 4 == 0) {
          const int64_t near = ahead.offset(k * kPanelWidth, kFetchNear),
                        far = ahead.offset(k * kPanelWidth, kFetchFar);
#pragma GCC unroll kUnroll
          for (int p = 0; p < kPanels; ++p) {
            fetch_near(codes + p * panel_bytes + near);
            fetch_far(codes + p * panel_bytes + far);
          }
        }
#pragma GCC unroll kUnroll
        for (int p = 0; p < kPanels; ++p)
          acc[p] = hn::MulAdd(x, hn::Mul(scale[p], load_fp8<kE5m2>(codes + p * panel_bytes)), acc[p]);
      }
    }
#pragma GCC unroll kUnroll
    for (int p = 0; p < kPanels; ++p) store(acc[p], c + p * kPanelWidth + n);
  }
}

// Panels that a single row multiplies side by side, which is also the number of its accumulators and scales.
inline constexpr int kFp8RowPanels = HWY_TARGET == HWY_SCALAR ? 1 : 4;

template <bool kE5m2>
void fp8_row_panels(float* c, const RowOperand& a, const Fp8Weight& w, int64_t k_size, int64_t p0, int64_t panels) {
  int64_t p = 0;
  for (; p + kFp8RowPanels <= panels; p += kFp8RowPanels)
    fp8_row<kE5m2, kFp8RowPanels>(c + p * kPanelWidth, a, w, k_size, p0 + p);
  if constexpr (kFp8RowPanels > 1)
    for (; p < panels; ++p) fp8_row<kE5m2, 1>(c + p * kPanelWidth, a, w, k_size, p0 + p);
}

// Decodes rows [k0, k0 + k_size) of panels [p0, p0 + panels) to packed [panels, k_size, 16].
template <bool kE5m2>
void decode_panels(float* packed, const Fp8Weight& w, int64_t all_k, int64_t p0, int64_t panels, int64_t k0,
                   int64_t k_size) {
  const int64_t block = w.block_columns == 0 ? std::max<int64_t>(all_k, 1) : w.block_columns;
  const int64_t blocks = (all_k + block - 1) / block;
  for (int64_t p = 0; p < panels; ++p) {
    const uint8_t* codes = w.codes + ((p0 + p) * all_k + k0) * kPanelWidth;
    float* out = packed + p * k_size * kPanelWidth;
    for (int64_t k = 0; k < k_size;) {
      const int64_t at = (k0 + k) / block, end = std::min(k_size, (at + 1) * block - k0);
      const float* scales = w.scales + ((p0 + p) * blocks + at) * kPanelWidth;
      for (int64_t n = 0; n < kPanelWidth; n += kLanes) {
        const Vec scale = hn::Mul(load(scales + n), set(kFp8Factor<kE5m2>));
        for (int64_t i = k; i < end; ++i) {
          if (n == 0 && i % 4 == 0) fetch_near(codes + i * kPanelWidth + 2 * kFetchNear);
          store(hn::Mul(scale, load_fp8<kE5m2>(codes + i * kPanelWidth + n)), out + i * kPanelWidth + n);
        }
      }
      k = end;
    }
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
