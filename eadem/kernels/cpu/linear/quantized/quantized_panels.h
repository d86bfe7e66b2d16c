// SPDX-License-Identifier: Apache-2.0
//
// QuantizedPanels: the layout in which the CPU's matrix products read a weight [out, in] that a BlockEncoding stores.
//
// Sixteen outputs stand side by side, as in PackedPanels. A step is 32 values of k; its codes are eight vectors of 64
// bytes, vector i holding for each of the 16 outputs the codes of k = 4 i … 4 i + 3: the operand of an 8-bit dot
// Codes of fewer than 8 bits share bytes so that shifts and masks of whole vectors separate them:
//   4 bits   vector i | vector i + 4 << 4                       for i < 4: 4 vectors a step
//   2 bits   vector i | i + 2 << 2 | i + 4 << 4 | i + 6 << 6    for i < 2
//   1 bit    vector 0 | 1 << 1 | … | 7 << 7
//   3, 5, 6  the low 2 (4) bits as above, then the high 1 (2) bits likewise
// A row takes as many bytes as in the file, apart from sub-scales that the file packs into less than a byte, and from
// IQ1 to IQ3: a level of theirs takes 3 bits (IQ3: 4), where the file numbers runs of levels. To look such a run up
// for each lane in the product would take longer than reading the bits.
//
// Planes, for P = ceil(out / 16) panels:
//   quants        u8 [P, in / 32, 64 * code_bits]
//   scales        without sub-scales f16 [P, in / 32, 1 or 2 (scale, min), 16], for powers of two u8 [P, in / 32, 16],
//   a
//                 byte e being the scale 2^(e - 128);
//                 with sub-scales u8, for groups of 32 [P, in / 32, 1 or 2 (sub-scale, sub-min), 16], for groups of 16
//                 [P, in / 32, 16, 2], a byte being a sub-scale or, with a min, sub-scale | sub-min << 4
//   super_scales  with sub-scales: f16 [P, in / block_size, 1 or 2 (scale, min), 16]
#pragma once

#include <array>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/tensor.h"

namespace eadem::kernels::cpu {

inline constexpr int64_t kStep = 32;          // values of k
inline constexpr int64_t kStepVectors = 8;    // vectors of 64 bytes: 4 k x 16 outputs
inline constexpr int64_t kStepBytes = 512;    // bytes of codes, one code a byte
inline constexpr int64_t kMaxStepGroups = 2;  // scales in a step, at most

// A task unpacks and multiplies at most kMaxGroupPanels panels together, one chunk of k at a time.
inline constexpr int64_t kMaxGroupPanels = 4;
inline constexpr int64_t kChunkSteps = 8;
inline constexpr int64_t kChunkScratchBytes =
    kChunkSteps * (kStepBytes + 2 * kMaxStepGroups * 16 * static_cast<int64_t>(sizeof(float)));

// Codes are stored in one field of 2, 4 or 8 bits, or in a low field of low_bits bits and a high one.
constexpr int low_bits(int code_bits) { return code_bits == 3 ? 2 : code_bits == 5 || code_bits == 6 ? 4 : code_bits; }

// The properties of a layout for which products are compiled.
struct QuantizedFormat {
  // How scales are stored. exponents: a power of two in one byte; bytes: one sub-scale a byte, times a super-scale;
  // nibbles: a sub-scale and a sub-min in one byte; groups: the scales of GroupPanels, each shared by a number of
  // steps.
  enum class Scales : uint8_t { f16, exponents, bytes, nibbles, groups };
  int code_bits;
  Scales scales;
  int groups = 1;  // in a step
  bool has_min = false;
  bool has_table = false;
  int table_bits = 8;  // of an entry

  constexpr bool operator==(const QuantizedFormat&) const = default;
  // A level times its sub-scale fits a byte. A step is then summed in integers, with the super-scale as its only scale.
  constexpr bool folded() const { return code_bits <= 3 && !has_table; }
};

// The formats that products are compiled for: {code_bits, scales, groups, has_min, has_table, table_bits}.
inline constexpr QuantizedFormat kQuantizedFormats[] = {
    {2, QuantizedFormat::Scales::nibbles, 2, true},
    {2, QuantizedFormat::Scales::bytes, 2},
    {3, QuantizedFormat::Scales::bytes, 2},
    {3, QuantizedFormat::Scales::bytes, 1, false, true, 7},
    {3, QuantizedFormat::Scales::bytes, 2, false, true, 7},
    {4, QuantizedFormat::Scales::f16},
    {4, QuantizedFormat::Scales::f16, 1, true},
    {4, QuantizedFormat::Scales::f16, 1, false, true},
    {4, QuantizedFormat::Scales::exponents, 1, false, true, 5},
    {4, QuantizedFormat::Scales::bytes, 1, true},
    {4, QuantizedFormat::Scales::bytes, 1, false, true, 7},
    {4, QuantizedFormat::Scales::bytes, 1, false, true},
    {4, QuantizedFormat::Scales::groups},
    {4, QuantizedFormat::Scales::groups, 1, true},
    {5, QuantizedFormat::Scales::f16},
    {5, QuantizedFormat::Scales::f16, 1, true},
    {5, QuantizedFormat::Scales::bytes, 1, true},
    {6, QuantizedFormat::Scales::bytes, 2},
    {8, QuantizedFormat::Scales::f16},
    {8, QuantizedFormat::Scales::groups},
    {8, QuantizedFormat::Scales::groups, 1, true},
};

struct QuantizedLayout {
  using Scales = QuantizedFormat::Scales;
  int code_bits;
  int group_size;  // values of k that share a scale: 16 or 32
  int block_size;  // values that share a super-scale
  Scales scales;
  float scale_unit = 1;  // what super-scales are multiplied by
  bool has_min;
  int zero;     // subtracted from a code, or from its table entry, to give the level
  bool folded;  // QuantizedFormat::folded
  // Codes of a codebook are indices: the unpacked byte is table[code], a number of table_bits bits.
  bool has_table;
  int table_bits = 8;
  std::array<uint8_t, 16> table;
  // For Scales::groups: the dtype of the stored scales, and how many steps share one (0: all).
  DType group_scales;
  int64_t group_steps;

  QuantizedFormat format() const {
    return {code_bits, scales, static_cast<int>(groups()), has_min, has_table, table_bits};
  }
  int64_t quant_bytes() const { return 64 * code_bits; }          // of a step
  int64_t groups() const { return group_size == kStep ? 1 : 2; }  // in a step
  // Each output has a single scale: products then sum whole chunks in integers.
  bool whole_rows() const { return scales == Scales::groups && group_steps == 0; }
  // Bytes of weights, as tiles multiply them, may be 128 or more.
  bool has_byte_codes() const { return code_bits == 8 || (has_table && table_bits == 8) || (folded && !has_min); }
  bool has_super_scales() const { return scales == Scales::bytes || scales == Scales::nibbles; }
  // Scales of an output in a step: each group has a scale and may have a min.
  int64_t scale_columns() const { return groups() * (has_min && scales != Scales::nibbles ? 2 : 1); }
  int64_t scale_bytes() const { return (scales == Scales::f16 ? 2 : 1) * scale_columns() * 16; }  // of a step
  int64_t super_columns() const { return has_min ? 2 : 1; }
};

class QuantizedPanels final : public Encoding {
 public:
  // Returns the packing of weights stored as `encoding`, `encoding` itself if it already is this packing, or null for
  // any other encoding.
  static const QuantizedPanels* of(const Encoding* encoding);

  explicit QuantizedPanels(const BlockEncoding& stored);

  const BlockEncoding& stored() const { return stored_; }
  const QuantizedLayout& layout() const { return layout_; }

  std::string_view name() const override { return name_; }
  std::vector<PlaneSpec> planes(const Shape& shape) const override;
  int64_t num_pieces(const Shape& shape) const override;  // panels
  int64_t rows_of_piece(const Shape&) const override;
  // `values` must be stored as `stored()`.
  void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const override;
  void decode_row(float* row, const TensorView& encoded, int64_t index) const override;
  void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const override;

 private:
  const BlockEncoding& stored_;
  QuantizedLayout layout_;
  std::string name_;
};

}  // namespace eadem::kernels::cpu
