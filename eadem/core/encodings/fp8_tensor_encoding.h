// SPDX-License-Identifier: Apache-2.0
//
// Fp8TensorEncoding: a matrix in floats of 8 bits with one f32 scale, as training multiplies it: both along its rows
// and along its columns. So its codes are there twice, the second time transposed: tensor cores take 8-bit operands
// whose terms are neighbours only.
//
//   value[r, c] = scale * float(code[r, c])                                                       rounded once, to f32
//
//   current   scale = max |value| / largest of the format
//   delayed   scale is given: that of the values of earlier steps (kernels/quantize.h). What is larger becomes the
//             largest. `encode`, which knows no steps, takes the current scale.
//
// Codes are those of Fp8Encoding, e4m3 or e5m2, subnormals included; the quotient value / scale is rounded to f32 and
// then to nearest even. A value that is not finite has the code of NaN, also beside a scale that is given. A matrix of
// zeros has scale 0.
//
// Planes of a matrix [rows, columns], one after another without padding:
//   codes       u8 [rows, columns]
//   transposed  u8 [columns, rows rounded up to a multiple of 16]; the added ones are 0
//   scale       f32 [1]
// Source: Micikevicius et al. 2022, FP8 formats for deep learning; NVIDIA Transformer Engine's recipes
// Float8CurrentScaling and DelayedScaling.
#pragma once

#include <string_view>

#include "eadem/core/encodings/fp8_encoding.h"

namespace eadem {

class Fp8TensorEncoding final : public Encoding {
 public:
  using Kind = Fp8Format::Kind;

  // "fp8_e4m3_current", "fp8_e4m3_delayed", "fp8_e5m2_current", "fp8_e5m2_delayed"
  static const Fp8TensorEncoding& of(Kind kind, bool delayed);
  // `encoding` as what it is, or null.
  static const Fp8TensorEncoding* of(const Encoding* encoding);

  Kind kind() const { return kind_; }
  bool is_delayed() const { return is_delayed_; }
  float largest() const { return fp8_largest(kind_); }

  static constexpr int64_t kRowMultiple = 16;
  // The length of a transposed row.
  static int64_t padded_rows(int64_t rows) { return (rows + kRowMultiple - 1) / kRowMultiple * kRowMultiple; }

  std::string_view name() const override { return name_; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // one
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

  // The parts of `encode`, for those who share the work out; they allocate nothing. The largest magnitude of rows
  // [begin, end) of plain host values, not finite if one of them is not.
  static float largest_magnitude(const TensorView& values, int64_t begin, int64_t end);
  // The code of a value beside a scale.
  static uint8_t code_of(Kind kind, float value, float scale);
  float scale_of(float magnitude) const { return magnitude / largest(); }
  // Writes the codes of rows [begin, end), also the transposed ones. The last row's call pads.
  void encode_rows(const TensorView& encoded, const TensorView& values, float scale, int64_t begin, int64_t end) const;
  static void set_scale(const TensorView& encoded, float scale);
  static float scale(const TensorView& encoded);

  Fp8TensorEncoding(Kind kind, bool delayed, std::string_view name)  // public only for `of`
      : kind_(kind), is_delayed_(delayed), name_(name) {}

 private:
  Kind kind_;
  bool is_delayed_;
  std::string_view name_;
};

}  // namespace eadem
