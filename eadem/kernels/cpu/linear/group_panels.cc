// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cpu/linear/group_panels.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "eadem/core/lookups.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"

namespace eadem::kernels::cpu {

namespace {

QuantizedLayout layout_of(const GroupFormat& format) {
  QuantizedLayout layout{};
  layout.code_bits = format.bits;
  layout.group_size = kStep;
  layout.block_size = kStep;
  layout.scales = QuantizedLayout::Scales::groups;
  layout.has_min = format.has_zeros;
  layout.zero = format.middle();
  layout.group_scales = format.scale;
  layout.group_steps = format.group_size / kStep;
  return layout;
}

// Where value k of a step is stored: byte k % 4 of output `lane` in a vector; 4-bit codes use its low or high half.
struct Place {
  int64_t byte;
  int shift;
};
Place place_of(int bits, int64_t lane, int64_t k) {
  const int64_t vector = k / 4, at = lane * 4 + k % 4;
  if (bits == 8) return {vector * 64 + at, 0};
  return {vector % 4 * 64 + at, vector < 4 ? 0 : 4};
}

struct GroupPanel {
  uint8_t* quants;
  std::byte* scales;
  uint8_t* zeros;
};

GroupPanel group_panel_of(const TensorView& encoded, const GroupFormat& format, int64_t groups, int64_t p) {
  const int64_t lanes = p * groups * kPanelWidth;
  return {static_cast<uint8_t*>(encoded.plane(0)) + p * (encoded.shape[1] / kStep) * 64 * format.bits,
          static_cast<std::byte*>(encoded.plane(1)) + lanes * static_cast<int64_t>(dtype_size(format.scale)),
          format.has_zeros ? static_cast<uint8_t*>(encoded.plane(2)) + lanes : nullptr};
}

void store_scale(std::byte* scales, int64_t index, DType dtype, float value) {
  switch (dtype) {
    case DType::f16: reinterpret_cast<f16_t*>(scales)[index] = f16_t::from_float(value); break;
    case DType::bf16: reinterpret_cast<bf16_t*>(scales)[index] = bf16_t::from_float(value); break;
    default: reinterpret_cast<float*>(scales)[index] = value;
  }
}

float load_scale(const std::byte* scales, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::f16: return reinterpret_cast<const f16_t*>(scales)[index].to_float();
    case DType::bf16: return reinterpret_cast<const bf16_t*>(scales)[index].to_float();
    default: return reinterpret_cast<const float*>(scales)[index];
  }
}

// Writes the codes of one output, [in], into its panel.
void pack_lane(uint8_t* quants, const uint8_t* codes, int bits, int64_t lane, int64_t columns) {
  for (int64_t k0 = 0; k0 < columns; k0 += kStep, quants += 64 * bits, codes += kStep) {
    if (bits == 8) {
      for (int64_t i = 0; i < kStepVectors; ++i) std::memcpy(quants + i * 64 + lane * 4, codes + 4 * i, 4);
      continue;
    }
    for (int64_t i = 0; i < kStepVectors / 2; ++i) {
      uint32_t low, high;
      std::memcpy(&low, codes + 4 * i, 4);
      std::memcpy(&high, codes + 4 * (i + 4), 4);
      low |= high << 4;
      std::memcpy(quants + i * 64 + lane * 4, &low, 4);
    }
  }
}

}  // namespace

const GroupPanels* GroupPanels::of(const Encoding* encoding) {
  count_lookup();
  static const auto kAll = [] {
    std::vector<std::unique_ptr<const GroupPanels>> all;
    for (const GroupEncoding& stored : GroupEncoding::all()) all.push_back(std::make_unique<const GroupPanels>(stored));
    return all;
  }();
  for (const auto& panels : kAll)
    if (&panels->stored_ == encoding || panels.get() == encoding) return panels.get();
  return nullptr;
}

GroupPanels::GroupPanels(const GroupEncoding& stored)
    : stored_(stored), layout_(layout_of(stored.format())), name_("group_panels_" + std::string(stored.name())) {}

std::vector<PlaneSpec> GroupPanels::planes(const Shape& shape) const {
  if (shape.rank() != 2 || shape[1] == 0 || shape[1] % kStep != 0)
    throw InvalidArgument("{} packs matrices [out, in] with in a multiple of {}; the tensor is {}", name_, kStep,
                          to_string(shape));
  const GroupFormat& format = stored_.format();
  const Shape lanes{num_pieces(shape), stored_.num_groups(shape[1]), kPanelWidth};
  std::vector<PlaneSpec> result = {{"quants", DType::u8, Shape{lanes[0], shape[1] / kStep, layout_.quant_bytes()}},
                                   {"scales", format.scale, lanes}};
  if (format.has_zeros) result.push_back({"zeros", DType::u8, lanes});
  if (format.has_order) result.push_back({"order", DType::i32, Shape{shape[1]}});
  return result;
}

int64_t GroupPanels::num_pieces(const Shape& shape) const { return (shape[0] + kPanelWidth - 1) / kPanelWidth; }

void GroupPanels::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const {
  EADEM_CHECK(values.encoding == &stored_, "{} from {}", name_, to_string(values));
  const GroupFormat& format = stored_.format();
  const int64_t columns = values.shape[1], groups = stored_.num_groups(columns);
  if (format.has_order && begin == 0) {
    auto* order = static_cast<int32_t*>(encoded.plane(format.has_zeros ? 3 : 2));
    for (int64_t j = 0; j < columns; ++j) order[j] = static_cast<int32_t>(stored_.column(values, j));
  }
  std::vector<uint8_t> codes(static_cast<size_t>(columns));
  for (int64_t p = begin; p < end; ++p) {
    const GroupPanel panel = group_panel_of(encoded, format, groups, p);
    for (int64_t lane = 0; lane < kPanelWidth; ++lane) {
      const int64_t row = p * kPanelWidth + lane;
      const bool exists = row < values.shape[0];
      if (exists)
        stored_.unpack_codes(codes.data(), values, row, 0, columns);
      else
        std::fill(codes.begin(), codes.end(), uint8_t{0});
      pack_lane(panel.quants, codes.data(), format.bits, lane, columns);
      for (int64_t g = 0; g < groups; ++g) {
        store_scale(panel.scales, g * kPanelWidth + lane, format.scale, exists ? stored_.scale(values, row, g) : 0.0f);
        if (format.has_zeros)
          panel.zeros[g * kPanelWidth + lane] = static_cast<uint8_t>(exists ? stored_.zero(values, row, g) : 0);
      }
    }
  }
}

void GroupPanels::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  const GroupFormat& format = stored_.format();
  const int64_t columns = encoded.shape[1], groups = stored_.num_groups(columns), size = stored_.group_columns(columns);
  const GroupPanel panel = group_panel_of(encoded, format, groups, index / kPanelWidth);
  const int64_t lane = index % kPanelWidth;
  const auto* order = format.has_order ? static_cast<const int32_t*>(encoded.plane(format.has_zeros ? 3 : 2)) : nullptr;
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = load_scale(panel.scales, g * kPanelWidth + lane, format.scale);
    const int zero = format.has_zeros ? panel.zeros[g * kPanelWidth + lane] : format.middle();
    for (int64_t k = g * size; k < (g + 1) * size; ++k) {
      const Place place = place_of(format.bits, lane, k % kStep);
      const int code = panel.quants[k / kStep * layout_.quant_bytes() + place.byte] >> place.shift & format.max_code();
      row[order == nullptr ? k : order[k]] = scale * static_cast<float>(code - zero);
    }
  }
}

void GroupPanels::slice(const TensorView&, const TensorView&, int, int64_t) const {
  EADEM_UNREACHABLE("{}: a rank packs its own part", name_);
}

const Encoding* quantized_packing_of(const Encoding* encoding) {
  if (const QuantizedPanels* blocks = QuantizedPanels::of(encoding)) return blocks;
  return GroupPanels::of(encoding);
}

}  // namespace eadem::kernels::cpu
