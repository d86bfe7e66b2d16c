// SPDX-License-Identifier: Apache-2.0
//
// RowEncoding: 8 bits a value and one f32 scale for each row, which is written at once and never again: the keys or the
// values of one token and head in a KV cache.
//
//   value[i] = scale * level(code[i])
//
//   int8      level = code, -127 … 127;  scale = max |value| / 127
//   fp8_e4m3  level = e4m3 number (e4m3.h);  scale = max |value| / 448. No code is written as a subnormal: below 2^-6,
//             which is 1 / 28672 of the row's largest value, it is 0 or 2^-6, whichever is nearer.
//
// The quotient value / scale is rounded to nearest even. A row of zeros has scale 0. A row with an infinity or NaN has
// the scale NaN: nothing it takes part in looks like a number.
//
// Planes: data u8 [rows…, columns], scales f32 [rows…].
#pragma once

#include <optional>

#include "eadem/core/e4m3.h"
#include "eadem/core/encoding.h"

namespace eadem {

class RowEncoding final : public Encoding {
 public:
  enum class Code : uint8_t { int8, e4m3 };
  RowEncoding(Code code, std::string_view name) : code_(code), name_(name) {}

  static const RowEncoding& int8();
  static const RowEncoding& fp8_e4m3();
  // `encoding` as what it is, or null.
  static const RowEncoding* of(const Encoding* encoding);

  Code code() const { return code_; }
  // The level that the largest value of a row becomes.
  float largest() const { return code_ == Code::int8 ? 127.0f : e4m3_t::kLargest; }

  std::string_view name() const override { return name_; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // rows
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  // Along every axis but the last.
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  Code code_;
  std::string_view name_;
};

// The storage type of a KV cache by name: "f32", "bf16", "f16", "int8" or "fp8_e4m3". Nothing for any other name.
std::optional<WeightType> kv_cache_type(std::string_view name);

}  // namespace eadem
