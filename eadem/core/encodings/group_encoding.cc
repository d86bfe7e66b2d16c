// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/encodings/group_encoding.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "eadem/core/lookups.h"
#include "eadem/core/tensor.h"

namespace eadem {

namespace {

// Planes may begin anywhere.
template <typename T>
T load_at(const void* base, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(base) + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}
template <typename T>
void store_at(void* base, int64_t index, T value) {
  std::memcpy(static_cast<std::byte*>(base) + index * static_cast<int64_t>(sizeof(T)), &value, sizeof(T));
}

float load_scale(const void* base, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::f16: return load_at<f16_t>(base, index).to_float();
    case DType::bf16: return load_at<bf16_t>(base, index).to_float();
    default: return load_at<float>(base, index);
  }
}

void store_scale(void* base, int64_t index, DType dtype, float value) {
  switch (dtype) {
    case DType::f16: store_at(base, index, f16_t::from_float(value)); break;
    case DType::bf16: store_at(base, index, bf16_t::from_float(value)); break;
    default: store_at(base, index, value);
  }
}

// `value` as `dtype` holds it.
float rounded_to(DType dtype, float value) {
  switch (dtype) {
    case DType::f16: return f16_t::from_float(value).to_float();
    case DType::bf16: return bf16_t::from_float(value).to_float();
    default: return value;
  }
}

void* scales_of(const TensorView& encoded) { return encoded.plane(1); }
void* zeros_of(const TensorView& encoded) { return encoded.plane(2); }
void* order_of(const TensorView& encoded, const GroupFormat& format) { return encoded.plane(format.has_zeros ? 3 : 2); }

std::string name_of(const GroupFormat& format) {
  const std::string group = format.group_size == 0 ? "row" : fmt::format("g{}", format.group_size);
  return fmt::format("int{}_{}_{}{}{}", format.bits, group, dtype_name(format.scale), format.has_zeros ? "_zeros" : "",
                     format.has_order ? "_order" : "");
}

}  // namespace

GroupEncoding::GroupEncoding(const GroupFormat& format) : format_(format), name_(name_of(format)) {}

std::span<const GroupEncoding> GroupEncoding::all() {
  static const std::vector<GroupEncoding> kAll = [] {
    std::vector<GroupEncoding> encodings;
    for (int bits : {4, 8})
      for (int64_t group_size : {0, 32, 64, 128})
        for (DType scale : {DType::f16, DType::bf16, DType::f32})
          for (bool has_zeros : {false, true})
            for (bool has_order : {false, true})
              encodings.emplace_back(GroupFormat{bits, group_size, scale, has_zeros, has_order});
    return encodings;
  }();
  return kAll;
}

const GroupEncoding* GroupEncoding::find(const GroupFormat& format) {
  for (const GroupEncoding& encoding : all())
    if (encoding.format_ == format) return &encoding;
  return nullptr;
}

const GroupEncoding* GroupEncoding::find(std::string_view name) {
  for (const GroupEncoding& encoding : all())
    if (encoding.name_ == name) return &encoding;
  return nullptr;
}

const GroupEncoding* GroupEncoding::of(const Encoding* encoding) {
  count_lookup();
  for (const GroupEncoding& candidate : all())
    if (&candidate == encoding) return &candidate;
  return nullptr;
}

std::vector<PlaneSpec> GroupEncoding::planes(const Shape& shape) const {
  if (shape.rank() != 2 || shape[1] < 1)
    throw InvalidArgument("{}: holds matrices [out, in] of at least one column; this is {}", name_, to_string(shape));
  const int64_t out = shape[0], in = shape[1];
  if (in % group_columns(in) != 0)
    throw InvalidArgument("{}: rows of {} values ({}) are no whole number of groups of {}", name_, in, to_string(shape),
                          format_.group_size);
  if (in * format_.bits % 8 != 0)
    throw InvalidArgument("{}: rows of {} values ({}) are no whole number of bytes", name_, in, to_string(shape));
  const Shape groups{out, num_groups(in)};
  std::vector<PlaneSpec> result = {{"codes", DType::u8, Shape{out, row_bytes(in)}}, {"scales", format_.scale, groups}};
  if (format_.has_zeros) result.push_back({"zeros", DType::u8, groups});
  if (format_.has_order) result.push_back({"order", DType::i32, Shape{in}});
  return result;
}

int64_t GroupEncoding::num_pieces(const Shape& shape) const { return shape[0]; }

void GroupEncoding::unpack_codes(uint8_t* codes, const TensorView& encoded, int64_t row, int64_t begin,
                                 int64_t count) const {
  const uint8_t* bytes = static_cast<const uint8_t*>(encoded.data) + row * row_bytes(encoded.shape[1]);
  if (format_.bits == 8) {
    std::memcpy(codes, bytes + begin, static_cast<size_t>(count));
    return;
  }
  for (int64_t i = 0; i < count / 2; ++i) {
    const uint8_t byte = bytes[begin / 2 + i];
    codes[2 * i] = byte & 15;
    codes[2 * i + 1] = byte >> 4;
  }
}

float GroupEncoding::scale(const TensorView& encoded, int64_t row, int64_t group) const {
  return load_scale(scales_of(encoded), row * num_groups(encoded.shape[1]) + group, format_.scale);
}

int GroupEncoding::zero(const TensorView& encoded, int64_t row, int64_t group) const {
  return format_.has_zeros ? load_at<uint8_t>(zeros_of(encoded), row * num_groups(encoded.shape[1]) + group)
                           : format_.middle();
}

int64_t GroupEncoding::column(const TensorView& encoded, int64_t j) const {
  return format_.has_order ? load_at<int32_t>(order_of(encoded, format_), j) : j;
}

void GroupEncoding::decode_row(float* row, const TensorView& encoded, int64_t index) const {
  constexpr int64_t kBlock = 256;
  uint8_t codes[kBlock];
  const int64_t columns = encoded.shape[1], size = group_columns(columns);
  for (int64_t g = 0; g < num_groups(columns); ++g) {
    const float group_scale = scale(encoded, index, g);
    const int group_zero = zero(encoded, index, g);
    for (int64_t begin = g * size; begin < (g + 1) * size; begin += kBlock) {
      const int64_t count = std::min(kBlock, (g + 1) * size - begin);
      unpack_codes(codes, encoded, index, begin, count);
      for (int64_t i = 0; i < count; ++i)
        row[column(encoded, begin + i)] = group_scale * static_cast<float>(codes[i] - group_zero);
    }
  }
}

int64_t GroupEncoding::first_not_finite(const TensorView& encoded, int64_t begin, int64_t end) const {
  const int64_t columns = encoded.shape[1];
  for (int64_t row = begin; row < end; ++row)
    for (int64_t g = 0; g < num_groups(columns); ++g) {
      // A code is at most 255 from its zero: a smaller scale keeps every value finite.
      if (std::abs(scale(encoded, row, g)) < 0x1p120f) continue;
      std::vector<float> values(static_cast<size_t>(columns));
      decode_row(values.data(), encoded, row);
      for (int64_t k = 0; k < columns; ++k)
        if (!std::isfinite(values[static_cast<size_t>(k)])) return row * columns + k;
    }
  return -1;
}

// The scale and zero point of a group: value = scale * (code - zero).
struct GroupEncoding::Fit {
  float scale;  // rounded to its dtype
  int zero;
};

int GroupEncoding::code_of(const Fit& fit, float value) const {
  const float steps = fit.scale == 0.0f ? 0.0f : std::nearbyint(value / fit.scale);
  return static_cast<int>(
      std::clamp(steps + static_cast<float>(fit.zero), 0.0f, static_cast<float>(format_.max_code())));
}

// Halves first: the range of two finite values may not be.
float GroupEncoding::nearest_scale(float low, float high) const {
  const auto max_code = static_cast<float>(format_.max_code());
  return format_.has_zeros ? (high / max_code) - (low / max_code) : std::max(-low / max_code, high / max_code) * 2.0f;
}

GroupEncoding::Fit GroupEncoding::nearest_fit(float low, float high) const {
  Fit fit{rounded_to(format_.scale, nearest_scale(low, high)), 0};
  fit.zero = format_.has_zeros ? code_of(fit, -low) : format_.middle();
  return fit;
}

GroupEncoding::Fit GroupEncoding::least_fit(const float* values, const float* importance, int64_t count, float low,
                                            float high) const {
  // The cost of a fit, and the best scale for its codes (0 if all codes are the zero point).
  struct Cost {
    double errors, best_scale;
  };
  const auto cost_of = [&](const Fit& fit) {
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest even, as code_of does; here in a loop that vectorizes.
    constexpr int64_t kRun = 64;
    constexpr float kRounder = 12582912.0f;
    float levels[kRun];
    const auto least = static_cast<float>(-fit.zero), most = static_cast<float>(format_.max_code() - fit.zero);
    double errors = 0, products = 0, squares = 0;
    for (int64_t begin = 0; begin < count; begin += kRun) {
      const int64_t run = std::min(kRun, count - begin);
      for (int64_t k = 0; k < run; ++k)
        levels[k] = std::clamp((values[begin + k] / fit.scale + kRounder) - kRounder, least, most);
      for (int64_t k = 0; k < run; ++k) {
        const double level = levels[k], value = values[begin + k], weight = importance[begin + k];
        const double error = value - static_cast<double>(fit.scale * levels[k]);
        errors += weight * error * error;
        products += weight * level * value;
        squares += weight * level * level;
      }
    }
    return Cost{errors, squares > 0 ? products / squares : 0.0};
  };
  Fit best = nearest_fit(low, high);
  if (best.scale == 0.0f) return best;
  Cost least = cost_of(best);
  const auto consider = [&](const Fit& fit) {
    if (!(fit.scale > 0.0f) || !std::isfinite(fit.scale * static_cast<float>(format_.max_code()))) return false;
    const Cost cost = cost_of(fit);
    if (cost.errors >= least.errors) return false;
    least = cost, best = fit;
    return true;
  };
  // Candidates begin at 1.1 steps, so that the largest value has a code even if codes reach less far on its side, and
  // end where the largest values are clipped to half. Least-squares fits of the best codes follow while they help.
  const float step = best.scale;
  for (int i = 0; i <= 24; ++i) {
    const float scale = rounded_to(format_.scale, step * (1.1f - 0.025f * static_cast<float>(i)));
    if (scale == 0.0f) continue;
    const int middle = format_.has_zeros ? code_of({scale, 0}, -low) : format_.middle();
    const int reach = format_.has_zeros ? 1 : 0;
    for (int zero = std::max(middle - reach, 0); zero <= std::min(middle + reach, format_.max_code()); ++zero)
      consider({scale, zero});
  }
  for (int i = 0; i < 4; ++i)
    if (!consider({rounded_to(format_.scale, static_cast<float>(least.best_scale)), best.zero})) break;
  return best;
}

void GroupEncoding::quantize_row(const TensorView& encoded, int64_t row, const float* values,
                                 const float* importance) const {
  const int64_t columns = encoded.shape[1], size = group_columns(columns), groups = num_groups(columns);
  uint8_t* bytes = static_cast<uint8_t*>(encoded.data) + row * row_bytes(columns);
  if (format_.bits == 4) std::memset(bytes, 0, static_cast<size_t>(row_bytes(columns)));
  for (int64_t g = 0; g < groups; ++g) {
    float low = 0, high = 0;
    for (int64_t k = g * size; k < (g + 1) * size; ++k) {
      if (!std::isfinite(values[k]))
        throw InvalidArgument("{}: {} at row {}, column {} is not finite", name_, values[k], row, k);
      low = std::min(low, values[k]);
      high = std::max(high, values[k]);
    }
    Fit fit = nearest_fit(low, high);
    if (!std::isfinite(fit.scale * static_cast<float>(format_.max_code())))
      throw InvalidArgument("{}: values from {} to {} at row {}, columns {} to {} need a scale of {}, beyond {}", name_,
                            low, high, row, g * size, (g + 1) * size, nearest_scale(low, high),
                            dtype_name(format_.scale));
    if (importance != nullptr) fit = least_fit(values + g * size, importance + g * size, size, low, high);
    store_scale(scales_of(encoded), row * groups + g, format_.scale, fit.scale);
    if (format_.has_zeros) store_at(zeros_of(encoded), row * groups + g, static_cast<uint8_t>(fit.zero));
    for (int64_t k = g * size; k < (g + 1) * size; ++k) {
      const int code = code_of(fit, values[k]);
      if (format_.bits == 8)
        bytes[k] = static_cast<uint8_t>(code);
      else
        bytes[k / 2] = static_cast<uint8_t>(bytes[k / 2] | code << (k % 2 * 4));
    }
  }
}

void GroupEncoding::quantize_rows(const TensorView& encoded, const TensorView& values,
                                  std::span<const float> importance, int64_t begin, int64_t end) const {
  const int64_t columns = values.shape[1];
  if (format_.has_order && begin == 0)
    for (int64_t j = 0; j < columns; ++j) store_at(order_of(encoded, format_), j, static_cast<int32_t>(j));
  std::vector<float> wide(static_cast<size_t>(columns));
  for (int64_t row = begin; row < end; ++row) {
    row_as_f32(wide.data(), values, row);
    quantize_row(encoded, row, wide.data(), importance.empty() ? nullptr : importance.data());
  }
}

void GroupEncoding::encode_weighted(const TensorView& encoded, const TensorView& values,
                                    std::span<const float> importance, int64_t begin, int64_t end) const {
  EADEM_CHECK(encoded.encoding == this, "encoded is not {}", name_);
  EADEM_CHECK(encoded.shape == values.shape, "{} encoded from {}", to_string(encoded.shape), to_string(values.shape));
  EADEM_CHECK(values.encoding != nullptr || values.is_contiguous(), "values are strided");
  EADEM_CHECK(std::ssize(importance) == values.shape[1], "{} importances of {}", importance.size(),
              to_string(values.shape));
  quantize_rows(encoded, values, importance, begin, end);
}

void GroupEncoding::encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin,
                                  int64_t end) const {
  EADEM_CHECK(encoded.encoding == this, "encoded is not {}", name_);
  EADEM_CHECK(encoded.shape == values.shape, "{} encoded from {}", to_string(encoded.shape), to_string(values.shape));
  EADEM_CHECK(values.encoding != nullptr || values.is_contiguous(), "values are strided");
  if (values.encoding == this) {
    Shape rows = values.shape;
    rows[0] = end - begin;
    int index = 0;
    for (const PlaneSpec& plane : planes(rows)) {
      const bool is_order = plane.dtype == DType::i32;
      if (!is_order || begin == 0)
        std::memcpy(static_cast<std::byte*>(encoded.plane(index)) +
                        (is_order ? 0 : begin * plane.size_bytes() / std::max<int64_t>(end - begin, 1)),
                    static_cast<const std::byte*>(values.plane(index)) +
                        (is_order ? 0 : begin * plane.size_bytes() / std::max<int64_t>(end - begin, 1)),
                    static_cast<size_t>(plane.size_bytes()));
      ++index;
    }
    return;
  }
  quantize_rows(encoded, values, {}, begin, end);
}

void GroupEncoding::slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const {
  EADEM_CHECK(part.encoding == this && whole.encoding == this, "a cut of another encoding than {}", name_);
  EADEM_CHECK((axis == 0 || axis == 1) && begin >= 0 && begin + part.shape[axis] <= whole.shape[axis] &&
                  part.shape[1 - axis] == whole.shape[1 - axis],
              "a cut of {} from {} at {} along axis {}", to_string(part.shape), to_string(whole.shape), begin, axis);
  if (axis == 1 && format_.has_order)
    throw InvalidArgument("{}: columns {} to {} of {} have groups all over the row; it cannot be cut there", name_,
                          begin, begin + part.shape[1], to_string(whole.shape));
  const int64_t unit = format_.group_size == 0 ? 8 / format_.bits : format_.group_size;
  if (axis == 1 && (begin % unit != 0 || part.shape[1] % unit != 0))
    throw InvalidArgument("{}: columns {} to {} of {} cut through a group of {}", name_, begin, begin + part.shape[1],
                          to_string(whole.shape), unit);
  const std::vector<PlaneSpec> part_planes = planes(part.shape), whole_planes = planes(whole.shape);
  for (size_t i = 0; i < part_planes.size(); ++i) {
    auto* to = static_cast<std::byte*>(part.plane(static_cast<int>(i)));
    const auto* from = static_cast<const std::byte*>(whole.plane(static_cast<int>(i)));
    if (part_planes[i].dtype == DType::i32) {  // the order of all columns
      std::memcpy(to, from, static_cast<size_t>(part_planes[i].size_bytes()));
      continue;
    }
    const int64_t rows = part.shape[0];
    if (rows == 0) continue;
    const int64_t part_row = part_planes[i].size_bytes() / rows;
    const int64_t whole_row = whole_planes[i].size_bytes() / whole.shape[0];
    // Bytes to skip in a plane's row: those of columns [0, begin). Every part keeps a scale of the whole row.
    const bool per_row = i > 0 && format_.group_size == 0;
    const int64_t skip = axis == 1 && !per_row ? begin * whole_row / whole.shape[1] : 0;
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(to + row * part_row, from + (row + (axis == 0 ? begin : 0)) * whole_row + skip,
                  static_cast<size_t>(part_row));
  }
}

}  // namespace eadem
