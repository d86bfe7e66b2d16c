// SPDX-License-Identifier: Apache-2.0
//
// The block types, one object each, and the two helpers that their layouts share. For the files of this folder; others
// ask BlockEncoding::find.
#pragma once

#include <cstring>

#include "eadem/core/dtype.h"
#include "eadem/core/encodings/block_encoding.h"

namespace eadem::block_types {

extern const BlockEncoding q4_0, q4_1, q5_0, q5_1, q8_0;                          // legacy_blocks.cc
extern const BlockEncoding q2_k, q3_k, q4_k, q5_k, q6_k;                          // k_blocks.cc
extern const BlockEncoding iq4_nl, iq4_xs, mxfp4;                                 // codebook_blocks.cc
extern const BlockEncoding iq1_s, iq1_m, iq2_xxs, iq2_xs, iq2_s, iq3_xxs, iq3_s;  // grid_blocks.cc
extern const BlockEncoding tq1_0, tq2_0;                                          // ternary_blocks.cc

// Numbers lie in the file unaligned, low byte first.
inline float load_f16(const uint8_t* bytes) {
  return f16_t{static_cast<uint16_t>(bytes[0] | bytes[1] << 8)}.to_float();
}
// `value` is an f16 already: a BlockParts holds scales as they are stored.
inline void store_f16(uint8_t* bytes, float value) {
  const uint16_t bits = f16_t::from_float(value).bits;
  bytes[0] = static_cast<uint8_t>(bits);
  bytes[1] = static_cast<uint8_t>(bits >> 8);
}

// Two codes of 4 bits in a byte: the low halves of `bytes` are the first `num_bytes` codes, the high halves the next.
inline void unpack_nibbles(uint8_t* codes, const uint8_t* bytes, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) codes[i] = bytes[i] & 15;
  for (int i = 0; i < num_bytes; ++i) codes[num_bytes + i] = bytes[i] >> 4;
}
inline void pack_nibbles(uint8_t* bytes, const uint8_t* codes, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) bytes[i] = static_cast<uint8_t>((codes[i] & 15) | codes[num_bytes + i] << 4);
}

// The parts of a format without sub-scales or a min.
inline void set_scale_only(BlockParts& parts, float scale) {
  parts.scale = scale;
  parts.min = 0;
  parts.sub_scales[0] = 1;
  parts.sub_mins[0] = 1;
}

}  // namespace eadem::block_types
