// SPDX-License-Identifier: Apache-2.0
//
// Fp8Encoding: floats of 8 bits with an f32 scale per block of the matrix: what compressed-tensors calls
// float-quantized and what DeepSeek and Qwen publish.
//
//   value[o, k] = scale[o / block_rows, k / block_columns] * float(code[o, k])        rounded once, to f32
//
//   e4m3   [ sign | 4 bits of exponent, bias 7  | 3 bits ]   largest 448, no infinity, NaN is 0x7f and 0xff
//   e5m2   [ sign | 5 bits of exponent, bias 15 | 2 bits ]   largest 57344, infinities and NaN as in f16, whose upper
//                                                            byte it is
//
// Planes of a matrix [out, in], one after another without padding:
//   codes   u8 [out, in]
//   scales  f32 [ceil(out / block_rows), ceil(in / block_columns)]
// Source: Micikevicius et al. 2022, FP8 formats for deep learning (e4m3 is its variant without infinities, "fn").
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "eadem/core/encoding.h"

namespace eadem {

struct Fp8Format {
  enum class Kind : uint8_t { e4m3, e5m2 };
  Kind kind;
  int64_t block_rows;     // 0: all rows
  int64_t block_columns;  // 0: all columns
  friend bool operator==(const Fp8Format&, const Fp8Format&) = default;
};

// The value of a code, exactly; NaN and infinities too.
float fp8_to_float(Fp8Format::Kind kind, uint8_t code);
// The nearest code, ties to even; what is beyond the largest value becomes the largest. NaN stays NaN.
uint8_t fp8_from_float(Fp8Format::Kind kind, float value);
float fp8_largest(Fp8Format::Kind kind);

class Fp8Encoding final : public Encoding {
 public:
  // e4m3 and e5m2, per tensor, per channel (one row) and per 128 x 128 block.
  static std::span<const Fp8Encoding> all();
  // Null when there is none.
  static const Fp8Encoding* find(const Fp8Format& format);
  static const Fp8Encoding* find(std::string_view name);
  static const Fp8Encoding* of(const Encoding* encoding);

  const Fp8Format& format() const { return format_; }
  // "fp8_e4m3_tensor", "fp8_e4m3_channel", "fp8_e4m3_block128"
  std::string_view name() const override { return name_; }

  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  // Rows of blocks. The scale is the block's largest magnitude over the format's largest value. Throws InvalidArgument
  // for a value that is not finite.
  int64_t num_pieces(const Shape& shape) const override;
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  // Encodes plain values with an importance matrix: an error in column k costs importance[k] >= 0 ([in], the mean
  // square of the inputs of that column). The scale is the cheapest of several candidates up to twice as large; a scale
  // decides where values fall within an octave. A block never costs more than encode_pieces would make it.
  void encode_weighted(const TensorView& encoded, const TensorView& values, std::span<const float> importance,
                       int64_t begin, int64_t end) const;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  // Cuts between blocks.
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

  float scale(const TensorView& encoded, int64_t row, int64_t column) const;

  explicit Fp8Encoding(const Fp8Format& format);  // public only for `all`

 private:
  int64_t block_rows(const Shape& shape) const { return format_.block_rows == 0 ? shape[0] : format_.block_rows; }
  int64_t block_columns(const Shape& shape) const {
    return format_.block_columns == 0 ? shape[1] : format_.block_columns;
  }
  Shape blocks(const Shape& shape) const;
  // Piece `piece`: the scales of its blocks, in one row of blocks, and codes by given scales.
  std::vector<float> largest_scales(const TensorView& values, int64_t piece) const;
  void weigh_scales(std::vector<float>& scales, const TensorView& values, std::span<const float> importance,
                    int64_t piece) const;
  void store_piece(const TensorView& encoded, const TensorView& values, std::span<const float> scales,
                   int64_t piece) const;
  int64_t first_row(const Shape& shape, int64_t piece) const { return piece * block_rows(shape); }
  int64_t last_row(const Shape& shape, int64_t piece) const;
  void check(const TensorView& encoded, const TensorView& values) const;

  Fp8Format format_;
  std::string name_;
};

}  // namespace eadem
