// SPDX-License-Identifier: Apache-2.0
//
// Transposes in registers, for packing. They are written with the compiler's vectors of 16 bytes, which every processor
// has. Whole vectors are written, because reading a vector right after writing its elements one by one stalls.
#pragma once

#include <hwy/base.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace eadem::kernels::cpu {

// Transposes 4 x 4 words: four words of each of four rows, from rows[r] + at on; word i of all rows goes to
// out + i * 64. The bits of `flips` are inverted in every word.
HWY_INLINE void transpose_words(uint8_t* out, const uint8_t* const* rows, int64_t at, uint32_t flips = 0) {
  using FourWords = uint32_t __attribute__((vector_size(16)));
  FourWords r[4];
  for (size_t i = 0; i < 4; ++i) std::memcpy(&r[i], rows[i] + at, 16);
  const FourWords low01 = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5),
                  low23 = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5),
                  high01 = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7),
                  high23 = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
  const FourWords turned[] = {__builtin_shufflevector(low01, low23, 0, 1, 4, 5) ^ flips,
                              __builtin_shufflevector(low01, low23, 2, 3, 6, 7) ^ flips,
                              __builtin_shufflevector(high01, high23, 0, 1, 4, 5) ^ flips,
                              __builtin_shufflevector(high01, high23, 2, 3, 6, 7) ^ flips};
  for (size_t i = 0; i < 4; ++i) std::memcpy(out + i * 64, &turned[i], 16);
}

// Transposes 8 x 8 values of 16 bits: eight of each of eight rows, from rows[r] + at on; value i of all rows goes to
// out + i * 32.
HWY_INLINE void transpose_halves(uint8_t* out, const uint8_t* const* rows, int64_t at) {
  using Halves = uint16_t __attribute__((vector_size(16)));
  using Words = uint32_t __attribute__((vector_size(16)));
  using Pairs = uint64_t __attribute__((vector_size(16)));
  Halves r[8];
  for (size_t i = 0; i < 8; ++i) std::memcpy(&r[i], rows[i] + at, 16);
  // 1. Words of neighbouring rows: w[2 j] has values 0 … 3 of rows 2 j and 2 j + 1, w[2 j + 1] values 4 … 7.
  Words w[8];
  for (size_t j = 0; j < 8; j += 2) {
    w[j] = reinterpret_cast<Words>(__builtin_shufflevector(r[j], r[j + 1], 0, 8, 1, 9, 2, 10, 3, 11));
    w[j + 1] = reinterpret_cast<Words>(__builtin_shufflevector(r[j], r[j + 1], 4, 12, 5, 13, 6, 14, 7, 15));
  }
  // 2. Four rows: for each half of them, two values a vector. 3. All rows.
  for (size_t high = 0; high < 2; ++high) {
    const Words &a = w[high], &b = w[high + 2], &c = w[high + 4], &d = w[high + 6];
    const auto ab = reinterpret_cast<Pairs>(__builtin_shufflevector(a, b, 0, 4, 1, 5)),
               cd = reinterpret_cast<Pairs>(__builtin_shufflevector(c, d, 0, 4, 1, 5)),
               ab_next = reinterpret_cast<Pairs>(__builtin_shufflevector(a, b, 2, 6, 3, 7)),
               cd_next = reinterpret_cast<Pairs>(__builtin_shufflevector(c, d, 2, 6, 3, 7));
    const Pairs turned[] = {__builtin_shufflevector(ab, cd, 0, 2), __builtin_shufflevector(ab, cd, 1, 3),
                            __builtin_shufflevector(ab_next, cd_next, 0, 2),
                            __builtin_shufflevector(ab_next, cd_next, 1, 3)};
    for (size_t i = 0; i < 4; ++i) std::memcpy(out + (4 * high + i) * 32, &turned[i], 16);
  }
}

}  // namespace eadem::kernels::cpu
