// SPDX-License-Identifier: Apache-2.0
//
// GroupEncoding: integers of 4 or 8 bits with a scale per group of columns, or per row: what GPTQ, AWQ and
// compressed-tensors store, each in a layout of its own (eadem/io), and what int8 per channel is.
//
//   value[o, k] = scale[o, g] * (code[o, k] - zero[o, g])        rounded once, to f32
//
// g is the group of column k: k / group_size; with an order of columns, j / group_size where order[j] = k ("desc_act":
// groups are of columns that need not be neighbours). Without zero points, zero is 2^(bits - 1).
//
// Planes of a matrix [out, in], one after another without padding, so numbers in them may lie unaligned:
//   codes   u8 [out, in * bits / 8]   in the order of groups; of 4 bits, byte i is [ code 2i + 1 | code 2i ]
//   scales  f16, bf16 or f32 [out, groups]
//   zeros   u8 [out, groups], with zero points
//   order   i32 [in], with an order of columns: each column once
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "eadem/core/encoding.h"

namespace eadem {

struct GroupFormat {
  int bits;            // 4 or 8
  int64_t group_size;  // 32, 64 or 128 columns; 0: the whole row
  DType scale;         // f16, bf16 or f32
  bool has_zeros;
  bool has_order;

  int middle() const { return 1 << (bits - 1); }
  int max_code() const { return (1 << bits) - 1; }
  friend bool operator==(const GroupFormat&, const GroupFormat&) = default;
};

class GroupEncoding final : public Encoding {
 public:
  // Every format has one instance.
  static std::span<const GroupEncoding> all();
  // Null when there is none.
  static const GroupEncoding* find(const GroupFormat& format);
  static const GroupEncoding* find(std::string_view name);
  // `encoding` as what it is, or null.
  static const GroupEncoding* of(const Encoding* encoding);

  const GroupFormat& format() const { return format_; }
  // "int4_g128_f16", "int8_row_bf16"; "_zeros" and "_order" follow where there are any.
  std::string_view name() const override { return name_; }

  // `shape` is [out, in], in > 0, a whole number of groups and of bytes.
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // rows
  // Each group by itself: without zero points the scale is the largest magnitude over (2^bits - 1) / 2, with them the
  // range, which includes zero, over 2^bits - 1; rounded to the scales' dtype; codes are the nearest. An error is at
  // most half a scale, one with zero points, and what rounding the scale adds. The order of columns is theirs. Throws
  // InvalidArgument for a value that is not finite, and where a scale overflows its dtype.
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  // Encodes plain values with an importance matrix: an error in column k costs importance[k] >= 0 ([in], the mean
  // square of the inputs of that column). Scales and zero points are the cheapest of several candidates: some around
  // the scale of the largest magnitude, and their least-squares fits, with codes rounded to the nearest. A group never
  // costs more than encode_pieces would make it.
  void encode_weighted(const TensorView& encoded, const TensorView& values, std::span<const float> importance,
                       int64_t begin, int64_t end) const;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  int64_t first_not_finite(const TensorView& encoded, int64_t begin, int64_t end) const override;
  // Cuts between groups; columns that have an order are not cut.
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

  // The parts of an encoded matrix, for who repacks it.
  int64_t group_columns(int64_t columns) const { return format_.group_size == 0 ? columns : format_.group_size; }
  int64_t num_groups(int64_t columns) const { return columns / group_columns(columns); }
  // Codes [begin, begin + count) of a row, a byte each, in the order in which they are stored. Both even.
  void unpack_codes(uint8_t* codes, const TensorView& encoded, int64_t row, int64_t begin, int64_t count) const;
  float scale(const TensorView& encoded, int64_t row, int64_t group) const;
  int zero(const TensorView& encoded, int64_t row, int64_t group) const;  // 2^(bits - 1) where there are none
  // The column whose code is the j-th.
  int64_t column(const TensorView& encoded, int64_t j) const;

  explicit GroupEncoding(const GroupFormat& format);  // public only for `all`

 private:
  int64_t row_bytes(int64_t columns) const { return columns * format_.bits / 8; }
  struct Fit;
  void quantize_rows(const TensorView& encoded, const TensorView& values, std::span<const float> importance,
                     int64_t begin, int64_t end) const;
  void quantize_row(const TensorView& encoded, int64_t row, const float* values, const float* importance) const;
  // Fits for one group whose values lie between `low` <= 0 and `high` >= 0. `importance` may be null.
  float nearest_scale(float low, float high) const;
  Fit nearest_fit(float low, float high) const;
  Fit least_fit(const float* values, const float* importance, int64_t count, float low, float high) const;
  int code_of(const Fit& fit, float value) const;

  GroupFormat format_;
  std::string name_;
};

}  // namespace eadem
