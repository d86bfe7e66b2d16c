// SPDX-License-Identifier: Apache-2.0
//
// The types whose 4-bit codes index a table of 16 levels:
//
//   iq4_nl   32 values: scale f16 | 16 bytes of two codes
//   iq4_xs   8 groups of 32: scale f16 | 8 x top 2 bits and 8 x low 4 bits of the groups' scales | 8 x 16 bytes of two
//   codes mxfp4    32 values: e, for a scale of 2^(e - 127) | 16 bytes of two codes
//
// Byte i of a group's codes holds value i in its low half and value i + 16 in its high half.
#include <bit>

#include "eadem/core/encodings/block_types.h"

namespace eadem::block_types {

namespace {

// Denser around zero, as weights are. The levels are part of the file format.
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// The values of FP4 E2M1 (0 ½ 1 1½ 2 3 4 6), doubled; the upper eight are their negatives.
constexpr int8_t kE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

void unpack_iq4_nl(BlockParts& parts, const uint8_t* block) {
  set_scale_only(parts, load_f16(block));
  unpack_nibbles(parts.codes.data(), block + 2, 16);
}
void pack_iq4_nl(uint8_t* block, const BlockParts& parts) {
  store_f16(block, parts.scale);
  pack_nibbles(block + 2, parts.codes.data(), 16);
}

// A scale of a group is six bits, stored plus 32.
void unpack_iq4_xs(BlockParts& parts, const uint8_t* block) {
  const uint32_t top_bits = static_cast<uint32_t>(block[2]) | static_cast<uint32_t>(block[3]) << 8;
  parts.scale = load_f16(block);
  parts.min = 0;
  for (int group = 0; group < 8; ++group) {
    const uint32_t low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
    const uint32_t top = top_bits >> (2 * group) & 3;
    parts.sub_scales[group] = static_cast<int8_t>(static_cast<int>(low | top << 4) - 32);
    parts.sub_mins[group] = 1;
    unpack_nibbles(parts.codes.data() + 32 * group, block + 8 + 16 * group, 16);
  }
}
void pack_iq4_xs(uint8_t* block, const BlockParts& parts) {
  uint32_t top_bits = 0;
  for (int i = 4; i < 8; ++i) block[i] = 0;
  for (int group = 0; group < 8; ++group) {
    const uint32_t stored = static_cast<uint32_t>(parts.sub_scales[group] + 32);
    block[4 + group / 2] |= static_cast<uint8_t>((stored & 15) << (4 * (group % 2)));
    top_bits |= (stored >> 4 & 3) << (2 * group);
    pack_nibbles(block + 8 + 16 * group, parts.codes.data() + 32 * group, 16);
  }
  store_f16(block, parts.scale);
  block[2] = static_cast<uint8_t>(top_bits);
  block[3] = static_cast<uint8_t>(top_bits >> 8);
}

// The levels are doubled, so BlockParts::scale is half of the stored one: 2^(e - 128), subnormal below e = 2. The
// format's e = 255 (NaN) reads as a number, as in every other reader.
void unpack_mxfp4(BlockParts& parts, const uint8_t* block) {
  const uint32_t e = block[0];
  set_scale_only(parts, std::bit_cast<float>(e < 2 ? 0x00200000u << e : (e - 1) << 23));
  unpack_nibbles(parts.codes.data(), block + 1, 16);
}
void pack_mxfp4(uint8_t* block, const BlockParts& parts) {
  const uint32_t bits = std::bit_cast<uint32_t>(parts.scale);
  block[0] = static_cast<uint8_t>(bits < 0x00800000u ? bits >> 22 : (bits >> 23) + 1);
  pack_nibbles(block + 1, parts.codes.data(), 16);
}

constexpr BlockFormat kIq4Nl = {.name = "iq4_nl",
                                .block_size = 32,
                                .block_bytes = 18,
                                .group_size = 32,
                                .code_bits = 4,
                                .zero = 0,
                                .codebook = kNonLinear,
                                .scale_at = 0};
constexpr BlockFormat kIq4Xs = {.name = "iq4_xs",
                                .block_size = 256,
                                .block_bytes = 136,
                                .group_size = 32,
                                .code_bits = 4,
                                .zero = 0,
                                .sub_scale_min = -32,
                                .sub_scale_max = 31,
                                .codebook = kNonLinear,
                                .scale_at = 0};
constexpr BlockFormat kMxfp4 = {.name = "mxfp4",
                                .block_size = 32,
                                .block_bytes = 17,
                                .group_size = 32,
                                .code_bits = 4,
                                .zero = 0,
                                .scale = BlockFormat::Scale::power_of_two,
                                .codebook = kE2m1,
                                .scale_at = 0};

}  // namespace

constinit const BlockEncoding iq4_nl(kIq4Nl, unpack_iq4_nl, pack_iq4_nl);
constinit const BlockEncoding iq4_xs(kIq4Xs, unpack_iq4_xs, pack_iq4_xs);
constinit const BlockEncoding mxfp4(kMxfp4, unpack_mxfp4, pack_mxfp4);

}  // namespace eadem::block_types
