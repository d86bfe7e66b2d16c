// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/packed_panels.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "eadem/core/lookups.h"
#include "eadem/kernels/cpu/linear/stream_ahead.h"
#include "eadem/kernels/cpu/linear/transpose.h"

namespace eadem::kernels::cpu {

namespace {

float widen(float value) { return value; }
float widen(bf16_t value) { return value.to_float(); }
float widen(f16_t value) { return value.to_float(); }

template <typename To, typename From>
To convert(From value) {
  if constexpr (std::is_same_v<To, From>)
    return value;
  else if constexpr (std::is_same_v<To, float>)
    return widen(value);
  else
    return To::from_float(widen(value));
}

// While a panel is packed, its rows are prefetched this many bytes ahead: processors do not prefetch 16 streams by
// themselves.
constexpr int64_t kFetchRow = 512;

// The rows of a whole panel, as bytes.
struct PanelRows {
  std::array<const uint8_t*, kPanelWidth> at;

  template <typename T>
  PanelRows(const T* weight, int64_t k_size) {
    for (size_t n = 0; n < kPanelWidth; ++n)
      at[n] = reinterpret_cast<const uint8_t*>(weight + static_cast<int64_t>(n) * k_size);
  }
  void fetch_line(int64_t offset) const {
    for (const uint8_t* row : at) fetch_near(row + offset + kFetchRow);
  }
};

// Packs as many whole lines of 64 bytes as rows have. Returns the number of values of k that they hold.
int64_t pack_lines(uint8_t* panel, const PanelRows& rows, int64_t row_bytes, int64_t value_bytes) {
  constexpr int64_t kLine = 64;
  int64_t at = 0;
  for (; at + kLine <= row_bytes; at += kLine, panel += kLine * kPanelWidth) {
    rows.fetch_line(at);
    if (value_bytes == 4) {
      for (size_t n = 0; n < kPanelWidth; n += 4)
        for (int64_t i = 0; i < kLine; i += 16) transpose_words(panel + i / 4 * 64 + n * 4, rows.at.data() + n, at + i);
    } else {
      for (size_t n = 0; n < kPanelWidth; n += 8)
        for (int64_t i = 0; i < kLine; i += 16)
          transpose_halves(panel + i / 2 * 32 + n * 2, rows.at.data() + n, at + i);
    }
  }
  return at / value_bytes;
}

// Packs rows [k_begin, k_end) of one panel from a matrix [outputs, k] stored by rows. 16 x 16 blocks keep both sides in
// the first-level cache: 16 lines are read and 16 are written.
template <typename To, typename From>
void pack_rows(To* panel, const From* weight, int64_t k_size, int64_t outputs, int64_t k_begin, int64_t k_end) {
  for (int64_t k0 = k_begin; k0 < k_end; k0 += kPanelWidth) {
    const int64_t k1 = std::min(k0 + kPanelWidth, k_end);
    for (int64_t n = 0; n < outputs; ++n)
      for (int64_t k = k0; k < k1; ++k) panel[k * kPanelWidth + n] = convert<To>(weight[n * k_size + k]);
    for (int64_t k = k0; k < k1; ++k)
      for (int64_t n = outputs; n < kPanelWidth; ++n) panel[k * kPanelWidth + n] = To{};
  }
}

// Packs one panel from a matrix [outputs, k] stored by rows.
template <typename To, typename From>
void pack_by_rows(To* panel, const From* weight, int64_t k_size, int64_t outputs) {
  int64_t k = 0;
  if constexpr (std::is_same_v<To, From>)
    if (outputs == kPanelWidth)
      k = pack_lines(reinterpret_cast<uint8_t*>(panel), PanelRows(weight, k_size),
                     k_size * static_cast<int64_t>(sizeof(To)), sizeof(To));
  pack_rows(panel, weight, k_size, outputs, k, k_size);
}

// Packs one panel from a matrix [k, outputs] stored by rows: on the transposed side, packing copies whole rows.
template <typename To, typename From>
void pack_columns(To* panel, const From* weight, int64_t row_size, int64_t outputs, int64_t k_begin, int64_t k_end) {
  for (int64_t k = k_begin; k < k_end; ++k) {
    for (int64_t n = 0; n < outputs; ++n) panel[k * kPanelWidth + n] = convert<To>(weight[k * row_size + n]);
    for (int64_t n = outputs; n < kPanelWidth; ++n) panel[k * kPanelWidth + n] = To{};
  }
}

// Packs one panel, VNNI-interleaved, from a matrix [outputs, k], 32 values of k at a time: 16 lines are read and 16 are
// written.
template <typename From>
void pack_vnni(bf16_t* panel, const From* weight, int64_t k_size, int64_t outputs) {
  int64_t k0 = 0;
  if constexpr (std::is_same_v<From, bf16_t>) {
    // A word of two values is transposed as a whole.
    if (outputs == kPanelWidth)
      k0 = 2 * pack_lines(reinterpret_cast<uint8_t*>(panel), PanelRows(weight, k_size), k_size * 2, 4);
    panel += k0 * kPanelWidth;
  }
  for (; k0 < k_size; k0 += kVnniTile, panel += kVnniTile * kPanelWidth)
    for (int64_t n = 0; n < kPanelWidth; ++n) {
      bf16_t values[kVnniTile] = {};
      const int64_t some = n < outputs ? std::min(kVnniTile, k_size - k0) : 0;
      for (int64_t k = 0; k < some; ++k) values[k] = convert<bf16_t>(weight[n * k_size + k0 + k]);
      for (int64_t k = 0; k < kVnniTile; k += 2)
        std::memcpy(panel + (k / 2 * kPanelWidth + n) * 2, values + k, 2 * sizeof(bf16_t));
    }
}

// Packs one panel, VNNI-interleaved, from a matrix [k, outputs] stored by rows.
template <typename From>
void pack_vnni_columns(bf16_t* panel, const From* weight, int64_t row_size, int64_t outputs, int64_t k_size) {
  const int64_t padded = (k_size + kVnniTile - 1) / kVnniTile * kVnniTile;
  for (int64_t k = 0; k < padded; k += 2, panel += 2 * kPanelWidth) {
    bf16_t rows[2][kPanelWidth] = {}, pairs[kPanelWidth][2];
    for (int64_t i = 0; i < std::min<int64_t>(2, k_size - k); ++i)
      for (int64_t n = 0; n < outputs; ++n) rows[i][n] = convert<bf16_t>(weight[(k + i) * row_size + n]);
    for (int64_t n = 0; n < kPanelWidth; ++n) pairs[n][0] = rows[0][n], pairs[n][1] = rows[1][n];
    std::memcpy(panel, pairs, sizeof(pairs));
  }
}

struct Extents {
  int64_t outputs;  // panel lanes
  int64_t k;        // panel rows
  int64_t panels;
  int64_t panel_rows;  // k; if VNNI-interleaved, the padded number of rows
};

Extents extents(const Shape& shape, PackedPanels::Side side) {
  const bool transposed = PackedPanels::is_transposed(side);
  const int64_t outputs = transposed ? shape[1] : shape[0], k = transposed ? shape[0] : shape[1];
  const int64_t filled = PackedPanels::is_interleaved(side) ? (k + kVnniTile - 1) / kVnniTile * kVnniTile : k;
  return {outputs, k, (outputs + kPanelWidth - 1) / kPanelWidth, filled};
}

template <typename To, typename From>
void pack_panel(To* data, const From* weight, const Extents& e, PackedPanels::Side side, int64_t p) {
  const int64_t outputs = std::min(kPanelWidth, e.outputs - p * kPanelWidth);
  To* panel = data + p * e.panel_rows * kPanelWidth;
  if (side == PackedPanels::Side::transposed)
    pack_columns(panel, weight + p * kPanelWidth, e.outputs, outputs, 0, e.k);
  else if (side == PackedPanels::Side::normal)
    pack_by_rows(panel, weight + p * kPanelWidth * e.k, e.k, outputs);
  else if constexpr (std::is_same_v<To, bf16_t>) {
    if (side == PackedPanels::Side::vnni)
      pack_vnni(panel, weight + p * kPanelWidth * e.k, e.k, outputs);
    else
      pack_vnni_columns(panel, weight + p * kPanelWidth, e.outputs, outputs, e.k);
  }
}

// Calls f(To*, const From*) with the element types of the two views.
template <typename Function>
void with_types(const TensorView& to, const TensorView& from, DType to_dtype, Function f) {
  const auto with_from = [&]<typename To>(To* data) {
    switch (from.dtype) {
      case DType::f32: return f(data, static_cast<const float*>(from.data));
      case DType::bf16: return f(data, static_cast<const bf16_t*>(from.data));
      case DType::f16: return f(data, static_cast<const f16_t*>(from.data));
      default: EADEM_UNREACHABLE("packed panels from {}", dtype_name(from.dtype));
    }
  };
  switch (to_dtype) {
    case DType::f32: return with_from(static_cast<float*>(to.data));
    case DType::bf16: return with_from(static_cast<bf16_t*>(to.data));
    case DType::f16: return with_from(static_cast<f16_t*>(to.data));
    default: EADEM_UNREACHABLE("packed panels of {}", dtype_name(to_dtype));
  }
}

}  // namespace

const PackedPanels* PackedPanels::of(DType dtype, Side side) {
  count_lookup();
  static const PackedPanels kAll[] = {
      {DType::f32, Side::normal, "packed_panels_f32"},
      {DType::f32, Side::transposed, "packed_panels_f32_transposed"},
      {DType::bf16, Side::normal, "packed_panels_bf16"},
      {DType::bf16, Side::transposed, "packed_panels_bf16_transposed"},
      {DType::bf16, Side::vnni, "packed_panels_bf16_vnni"},
      {DType::bf16, Side::vnni_transposed, "packed_panels_bf16_vnni_transposed"},
      {DType::f16, Side::normal, "packed_panels_f16"},
      {DType::f16, Side::transposed, "packed_panels_f16_transposed"},
  };
  for (const PackedPanels& encoding : kAll)
    if (encoding.dtype_ == dtype && encoding.side_ == side) return &encoding;
  return nullptr;
}

std::vector<PlaneSpec> PackedPanels::planes(const Shape& shape) const {
  if (shape.rank() != 2)
    throw InvalidArgument("{} packs matrices [out, in]; the tensor is {}", name_, to_string(shape));
  const Extents e = extents(shape, side_);
  if (is_interleaved(side_)) return {{"data", dtype_, Shape{e.panels, e.panel_rows / 2, kPanelWidth, 2}}};
  return {{"data", dtype_, Shape{e.panels, e.k, kPanelWidth}}};
}

int64_t PackedPanels::num_pieces(const Shape& shape) const { return extents(shape, side_).panels; }

void PackedPanels::encode_pieces(const TensorView& encoded, const TensorView& plain, int64_t begin, int64_t end) const {
  const Extents e = extents(plain.shape, side_);
  with_types(encoded, plain, dtype_, [&](auto* data, const auto* weight) {
    for (int64_t p = begin; p < end; ++p) pack_panel(data, weight, e, side_, p);
  });
}

void PackedPanels::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const Extents e = extents(encoded.shape, side_);
  with_types(encoded, encoded, dtype_, [&](const auto* data, const auto*) {
    if (side_ == Side::normal) {
      const auto* lane = data + index / kPanelWidth * e.k * kPanelWidth + index % kPanelWidth;
      for (int64_t k = 0; k < e.k; ++k) row[k] = widen(lane[k * kPanelWidth]);
    } else if (side_ == Side::vnni) {
      const auto* lane = data + index / kPanelWidth * e.panel_rows * kPanelWidth + index % kPanelWidth * 2;
      for (int64_t k = 0; k < e.k; ++k) row[k] = widen(lane[k / 2 * kPanelWidth * 2 + k % 2]);
    } else if (side_ == Side::vnni_transposed) {
      for (int64_t n = 0; n < e.outputs; ++n)
        row[n] = widen(
            data[(n / kPanelWidth * e.panel_rows / 2 + index / 2) * 2 * kPanelWidth + n % kPanelWidth * 2 + index % 2]);
    } else {
      for (int64_t n = 0; n < e.outputs; ++n)
        row[n] = widen(data[(n / kPanelWidth * e.k + index) * kPanelWidth + n % kPanelWidth]);
    }
  });
}

void PackedPanels::slice(const TensorView&, const TensorView&, int, int64_t) const {
  EADEM_UNREACHABLE("{}: a rank packs its own part", name_);
}

}  // namespace eadem::kernels::cpu
