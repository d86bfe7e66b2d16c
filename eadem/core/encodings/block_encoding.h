// SPDX-License-Identifier: Apache-2.0
//
// BlockEncoding: the quantized types of GGUF. A row is a sequence of blocks of `block_size` values; a block is
// `block_bytes` bytes that hold small codes and the scales to read them by. Every type is the same sentence with other
// numbers in it:
//
//   value[i] = (scale * sub_scale[g]) * level(code[i]) - (min * sub_min[g]),   g = i / group_size
//   level(code) = codebook[code], or code - zero where there is no codebook
//
// so a type is a `BlockFormat` and a pair of functions between bytes and `BlockParts`. Dequantizing, packing for a
// device, cutting into shards and quantizing are written once, for all of them, on the parts.
// Source of the layouts: github.com/ggml-org/llama.cpp, ggml/src/ggml-common.h (facts only).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "eadem/core/encoding.h"

namespace eadem {

inline constexpr int kMaxBlockSize = 256;
inline constexpr int kMaxGroups = 16;

// The integers and scales that one block consists of. Only the first block_size codes and block_size / group_size
// sub-scales mean something.
struct BlockParts {
  std::array<uint8_t, kMaxBlockSize> codes;
  std::array<int8_t, kMaxGroups> sub_scales;  // 1 where the format has none
  std::array<uint8_t, kMaxGroups> sub_mins;   // 1 where the format has a min but no sub-mins; unused without a min
  float scale;                                // as stored, an f16 or a power of two, times BlockFormat::scale_unit
  float min;                                  // an f16; 0 where the format has none
};

struct BlockFormat {
  std::string_view name;  // "q4_k"
  int block_size;         // values
  int block_bytes;
  int group_size;  // values that share a sub-scale; block_size where there are none
  int code_bits;   // 2, 3, 4, 5, 6 or 8
  int zero;        // subtracted from a code; 0 with a min or a codebook
  enum class Scale : uint8_t { f16, power_of_two };
  Scale scale = Scale::f16;
  float scale_unit = 1;  // a power of two that makes integers of sub-scales and levels
  // Range of the integer sub-scales; both 1 where the format has none.
  int sub_scale_min = 1, sub_scale_max = 1;
  bool has_min = false;
  int sub_min_max = 1;               // sub-mins are 0 … sub_min_max; 1: no sub-mins
  const int8_t* codebook = nullptr;  // [2^code_bits] levels, ascending or not; null: codes are numbers
  // The byte of a block at which its scale begins, with the min behind it: f16, or the exponent of a power of two,
  // 2^(e - 128). -1: the scale does not lie in one place.
  int scale_at = -1;

  int num_groups() const { return block_size / group_size; }
  int level(uint8_t code) const { return codebook == nullptr ? code - zero : codebook[code]; }
};

class BlockEncoding final : public Encoding {
 public:
  using Unpack = void (*)(BlockParts& parts, const uint8_t* block);
  using Pack = void (*)(uint8_t* block, const BlockParts& parts);
  // Writes the scale as it is stored: without BlockFormat::scale_unit.
  using StoreScale = void (*)(uint8_t* block, float scale);

  constexpr BlockEncoding(const BlockFormat& format, Unpack unpack, Pack pack)
      : format_(format), unpack_(unpack), pack_(pack) {}
  // A type that is only read: not every choice of codes has a block.
  constexpr BlockEncoding(const BlockFormat& format, Unpack unpack, StoreScale store_scale)
      : format_(format), unpack_(unpack), store_scale_(store_scale) {}

  // q4_0 q4_1 q5_0 q5_1 q8_0 q2_k q3_k q4_k q5_k q6_k iq4_nl iq4_xs mxfp4, and those that are only read:
  // iq1_s iq1_m iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s tq1_0 tq2_0
  static std::span<const BlockEncoding* const> all();
  // Those that quantize_row and pack write.
  static std::span<const BlockEncoding* const> writable();
  // Null when there is none of that name.
  static const BlockEncoding* find(std::string_view name);
  // `encoding` as what it is, or null.
  static const BlockEncoding* of(const Encoding* encoding);

  const BlockFormat& format() const { return format_; }
  bool is_writable() const { return pack_ != nullptr; }
  std::string_view name() const override { return format_.name; }
  int64_t row_bytes(int64_t columns) const { return columns / format_.block_size * format_.block_bytes; }

  // Rows [begin, begin + count) of a matrix in this encoding.
  TensorView rows(const TensorView& encoded, int64_t begin, int64_t count) const;

  // One plane: data u8 [rows…, row_bytes].
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // rows
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  int64_t first_not_finite(const TensorView& encoded, int64_t begin, int64_t end) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

  // Quantizes one row of `columns` values. `importance` [columns], or empty: what an error in that column costs
  // (the mean square of the activation that it multiplies). Minimizes the weighted square error over the scales.
  // Deterministic; thread-safe. Throws Unsupported for a type that is only read.
  void quantize_row(uint8_t* row, std::span<const float> values, std::span<const float> importance) const;

  void unpack(BlockParts& parts, const uint8_t* block) const { unpack_(parts, block); }
  void pack(uint8_t* block, const BlockParts& parts) const { pack_(block, parts); }

  // Fills `count` blocks, of which the first has number `first`, with random codes and sub-scales, and a scale that
  // gives each block the root mean square `size`: a pure function of key and number. For types that are only read.
  void fill_random(uint8_t* blocks, int64_t first, int64_t count, double size, uint64_t key) const;

 private:
  // Whether a look at the stored scale and min tells that every value of the block is finite.
  bool is_finite_by_scale(const uint8_t* block) const;

  BlockFormat format_;
  Unpack unpack_;
  Pack pack_ = nullptr;
  StoreScale store_scale_ = nullptr;
};

}  // namespace eadem
