// SPDX-License-Identifier: Apache-2.0
//
// Tiles of integer sums: how many sums fit into registers, how rows and panels are divided into tiles, and the sums of
// one step of k.
//
// Per-target header: included after hwy/foreach_target.h, inside no namespace.
#if defined(EADEM_KERNELS_CPU_INTEGER_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef EADEM_KERNELS_CPU_INTEGER_TILES_INL_H_
#undef EADEM_KERNELS_CPU_INTEGER_TILES_INL_H_
#else
#define EADEM_KERNELS_CPU_INTEGER_TILES_INL_H_
#endif

#include <type_traits>

#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_panels.h"
#include "eadem/kernels/cpu/linear/quantized/quantized_words-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {

inline constexpr int kPanelVectors = static_cast<int>(kPanelWidth / kLanes);

// The largest tile, in rows x panels, whose sums stay in registers if a step has one sum for each output.
#if HWY_TARGET == HWY_AVX3
inline constexpr int kSumRows = 12, kSumPanels = 2;  // 24 + 2 + 1 of 32
#elif HWY_TARGET == HWY_NEON
inline constexpr int kSumRows = 4, kSumPanels = 1;  // 16 + 4 + 1 of 32
#elif HWY_TARGET == HWY_SCALAR
inline constexpr int kSumRows = 2, kSumPanels = 1;
#else
inline constexpr int kSumRows = HWY_TARGET == HWY_AVX2 ? 4 : 2, kSumPanels = 1;  // 8 + 2 + 3 of 16
#endif

// Divides `count` rows or panels into pieces of kMost, then divides the rest into pieces of kSmaller (descending to 1;
// sizes of kMost or more are skipped). Calls piece(size, first), where `size` is a std::integral_constant.
template <int kMost, int... kSmaller, typename Piece>
HWY_INLINE void cut_into(int64_t count, Piece piece) {
  int64_t first = 0;
  const auto pieces_of = [&](auto size) {
    for (; count - first >= size; first += size) piece(size, first);
  };
  const auto smaller = [&](auto size) {
    if constexpr (decltype(size)::value < kMost) pieces_of(size);
  };
  pieces_of(std::integral_constant<int, kMost>());
  (smaller(std::integral_constant<int, kSmaller>()), ...);
}

// Returns a sum to which others are added in the order in which they are written. GCC 12 would add the products of a
// step as a tree, for which it makes those of all rows first and spills most. One row has registers for that.
HWY_INLINE Ints in_order(Ints sum) {
#if HWY_TARGET == HWY_AVX3
  asm("" : "+v"(sum.raw));
#elif HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_SSE4
  asm("" : "+x"(sum.raw));
#endif
  return sum;
}

// sums[r][v] = start(r, v) + the dot product of vectors [kBegin, kEnd) of a step of weights with the matching codes of
// row r of x. Neighbouring rows of x lie kChunkSteps steps apart. words_at(i, v) returns vector i of the step for the
// v-th kLanes outputs.
template <typename Dot, int kBegin, int kEnd, int kRows, int kVecs, typename WordsAt, typename Start>
HWY_INLINE void make_dots(Ints (&sums)[kRows][kVecs], const int8_t* x_codes, WordsAt words_at, Start start) {
  constexpr int kSums = Dot::kSums < kEnd - kBegin ? Dot::kSums : kEnd - kBegin;
  if constexpr (kSums == 1)
#pragma GCC unroll kUnroll
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVecs; ++v) sums[r][v] = start(r, v);
#pragma GCC unroll kUnroll
  for (int i = kBegin; i < kEnd; i += kSums) {
    Ints partial[kRows][kVecs];  // in the place of the sums, so that both never take registers
#pragma GCC unroll kUnroll
    for (int j = 0; j < kSums; ++j) {
      decltype(Dot::weights(Words())) weights[kVecs];
#pragma GCC unroll kUnroll
      for (int v = 0; v < kVecs; ++v) weights[v] = Dot::weights(words_at(i + j, v));
#pragma GCC unroll kUnroll
      for (int r = 0; r < kRows; ++r) {
        const Ints bytes = broadcast_bytes(x_codes + r * kChunkSteps * kStep + (i + j) * 4);
#pragma GCC unroll kUnroll
        for (int v = 0; v < kVecs; ++v) {
          if constexpr (kSums == 1) {
            sums[r][v] = in_order(Dot::dot(sums[r][v], weights[v], bytes));
          } else {
            const Ints product = Dot::multiply(weights[v], bytes);
            partial[r][v] = j == 0 ? product : in_order(Dot::add(partial[r][v], product));
          }
        }
      }
    }
    if constexpr (kSums > 1)
#pragma GCC unroll kUnroll
      for (int r = 0; r < kRows; ++r)
#pragma GCC unroll kUnroll
        for (int v = 0; v < kVecs; ++v)
          sums[r][v] = in_order(hn::Add(i == kBegin ? start(r, v) : sums[r][v], Dot::total(partial[r][v])));
  }
}

}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
