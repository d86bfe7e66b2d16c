// SPDX-License-Identifier: Apache-2.0
//
// From values to BlockParts.
#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/block_encoding.h"

namespace eadem {

namespace {

float round_to_f16(float value) { return f16_t::from_float(value).to_float(); }

uint8_t nearest_code(const BlockFormat& format, float level) {
  const int num_codes = 1 << format.code_bits;
  if (format.codebook == nullptr)
    return static_cast<uint8_t>(std::clamp(std::lround(level) + format.zero, 0l, num_codes - 1l));
  int best = 0;
  for (int code = 1; code < num_codes; ++code)
    if (std::abs(level - format.codebook[code]) < std::abs(level - format.codebook[best])) best = code;
  return static_cast<uint8_t>(best);
}

}  // namespace

void BlockEncoding::quantize_row(uint8_t* row, std::span<const float> values, std::span<const float>) const {
  const int num_groups = format_.num_groups(), num_codes = 1 << format_.code_bits;
  float top_level = 0;
  for (int code = 0; code < num_codes; ++code)
    top_level = std::max(top_level, std::abs(static_cast<float>(format_.level(static_cast<uint8_t>(code)))));
  BlockParts parts;
  parts.codes.fill(0);
  for (size_t begin = 0; begin < values.size(); begin += static_cast<size_t>(format_.block_size)) {
    std::array<float, kMaxGroups> scales{}, mins{};
    for (int group = 0; group < num_groups; ++group) {
      const float* x = values.data() + begin + group * format_.group_size;
      float low = x[0], high = x[0];
      for (int i = 0; i < format_.group_size; ++i) low = std::min(low, x[i]), high = std::max(high, x[i]);
      if (format_.has_min) {
        if (format_.sub_min_max > 1) low = std::min(low, 0.0f);
        mins[group] = -low;
        scales[group] = (high - low) / static_cast<float>(num_codes - 1);
      } else {
        scales[group] = std::max(high, -low) / top_level;
      }
    }
    const float scale = *std::max_element(scales.begin(), scales.begin() + num_groups);
    const float min = *std::max_element(mins.begin(), mins.begin() + num_groups);
    if (format_.scale == BlockFormat::Scale::power_of_two)
      parts.scale = scale == 0 ? 0x1p-128f : std::max(0x1p-128f, std::exp2(std::ceil(std::log2(scale))));
    else
      parts.scale = round_to_f16(scale / static_cast<float>(format_.sub_scale_max));
    parts.min = round_to_f16(format_.sub_min_max > 1 ? min / static_cast<float>(format_.sub_min_max) : mins[0]);
    if (!std::isfinite(parts.scale) || !std::isfinite(parts.min))
      throw InvalidArgument("{}: a scale of {} and a min of {} pass the largest f16, 65504", name(), scale, min);
    for (int group = 0; group < num_groups; ++group) {
      const auto in_units = [](float value, float unit) { return unit == 0 ? 0.0f : value / unit; };
      parts.sub_scales[group] = static_cast<int8_t>(
          std::clamp(std::lround(format_.sub_scale_max == 1 ? 1.0f : in_units(scales[group], parts.scale)), 0l,
                     static_cast<long>(format_.sub_scale_max)));
      parts.sub_mins[group] = static_cast<uint8_t>(
          std::clamp(std::lround(format_.sub_min_max == 1 ? 1.0f : in_units(mins[group], parts.min)), 0l,
                     static_cast<long>(format_.sub_min_max)));
      const float group_scale = parts.scale * static_cast<float>(parts.sub_scales[group]);
      const float group_min = parts.min * static_cast<float>(parts.sub_mins[group]);
      for (int i = group * format_.group_size; i < (group + 1) * format_.group_size; ++i)
        parts.codes[i] = nearest_code(format_, in_units(values[begin + i] + group_min, group_scale));
    }
    pack_(row, parts);
    row += format_.block_bytes;
  }
}

}  // namespace eadem
