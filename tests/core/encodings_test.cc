// SPDX-License-Identifier: Apache-2.0
//
// The block types against the `gguf` package's reading of them, bit for bit, and their quantizer against its bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <utility>
#include <vector>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/tensor.h"

namespace eadem {
namespace {

struct Vectors {
  std::vector<uint8_t> blocks;
  std::vector<float> values;
};

// tests/data/encodings/NAME.blocks; see make_encodings.py.
Vectors read_vectors(const BlockFormat& format) {
  const std::string path = fmt::format(EADEM_SOURCE_DIR "/tests/data/encodings/{}.blocks", format.name);
  std::ifstream file(path, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  const size_t values_bytes = static_cast<size_t>(format.block_size) * sizeof(float);
  const size_t count = bytes.size() / (static_cast<size_t>(format.block_bytes) + values_bytes);
  EXPECT_GT(count, 0u) << path;
  EXPECT_EQ(bytes.size(), count * (static_cast<size_t>(format.block_bytes) + values_bytes)) << path;
  Vectors result;
  result.blocks.resize(count * static_cast<size_t>(format.block_bytes));
  result.values.resize(count * static_cast<size_t>(format.block_size));
  std::memcpy(result.blocks.data(), bytes.data(), result.blocks.size());
  std::memcpy(result.values.data(), bytes.data() + result.blocks.size(), count * values_bytes);
  return result;
}

TensorView encoded_view(const BlockEncoding& encoding, void* data, const Shape& shape) {
  TensorView view;
  view.data = data;
  view.shape = shape;
  view.encoding = &encoding;
  return view;
}

class BlockTypes : public testing::TestWithParam<const BlockEncoding*> {
 protected:
  const BlockEncoding& encoding_ = *GetParam();
  const BlockFormat& format_ = encoding_.format();
};

INSTANTIATE_TEST_SUITE_P(All, BlockTypes, testing::ValuesIn(BlockEncoding::all()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(BlockTypes, AreFoundByName) {
  EXPECT_EQ(BlockEncoding::find(encoding_.name()), &encoding_);
  EXPECT_EQ(BlockEncoding::find("q9_z"), nullptr);
}

TEST_P(BlockTypes, DecodeToTheBitsOfTheGgufPackage) {
  const Vectors expected = read_vectors(format_);
  const Shape shape{static_cast<int64_t>(expected.values.size())};
  std::vector<float> values(expected.values.size());
  encoding_.decode_row(values.data(), encoded_view(encoding_, const_cast<uint8_t*>(expected.blocks.data()), shape), 0);
  for (size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(std::bit_cast<uint32_t>(values[i]), std::bit_cast<uint32_t>(expected.values[i]))
        << "block " << i / format_.block_size << " value " << i % format_.block_size << ": " << values[i] << " for "
        << expected.values[i];
}

TEST_P(BlockTypes, UnpackKeepsItsRangesAndPackRestoresWhatItRead) {
  const Vectors expected = read_vectors(format_);
  std::vector<uint8_t> packed(static_cast<size_t>(format_.block_bytes));
  for (size_t begin = 0; begin < expected.blocks.size(); begin += packed.size()) {
    BlockParts parts;
    encoding_.unpack(parts, expected.blocks.data() + begin);
    for (int i = 0; i < format_.block_size; ++i) EXPECT_LT(parts.codes[i], 1 << format_.code_bits);
    for (int i = 0; i < format_.num_groups(); ++i) {
      EXPECT_GE(parts.sub_scales[i], format_.sub_scale_min);
      EXPECT_LE(parts.sub_scales[i], format_.sub_scale_max);
      if (format_.has_min) {
        EXPECT_LE(parts.sub_mins[i], format_.sub_min_max);
      }
    }
    if (!encoding_.is_writable()) continue;
    std::fill(packed.begin(), packed.end(), uint8_t{0xa5});
    encoding_.pack(packed.data(), parts);
    EXPECT_TRUE(std::equal(packed.begin(), packed.end(), expected.blocks.begin() + static_cast<int64_t>(begin)))
        << "block " << begin / packed.size();
  }
}

// At every byte of a block: an infinity of 16 bits and other such words, and ones up to the end. What is found is what
// decodes to a value that is not finite.
TEST_P(BlockTypes, NotFiniteIsWhatDecodesSo) {
  const Vectors vectors = read_vectors(format_);
  std::vector<float> values(static_cast<size_t>(format_.block_size));
  const auto size = static_cast<size_t>(format_.block_bytes);
  int found = 0;
  const auto compare = [&](std::vector<uint8_t>& block, size_t at) {
    const TensorView view = encoded_view(encoding_, block.data(), Shape{1, format_.block_size});
    encoding_.decode_row(values.data(), view, 0);
    const bool finite = std::all_of(values.begin(), values.end(), [](float value) { return std::isfinite(value); });
    EXPECT_EQ(encoding_.first_not_finite(view, 0, 1) < 0, finite) << "byte " << at;
    found += finite ? 0 : 1;
  };
  for (size_t at = 0; at + 1 < size; ++at) {
    const std::vector<uint8_t> good(vectors.blocks.begin(), vectors.blocks.begin() + static_cast<std::ptrdiff_t>(size));
    for (const uint16_t bits : {uint16_t{0x7c00}, uint16_t{0xfc01}, uint16_t{0xffff}, uint16_t{0x7bff}}) {
      std::vector<uint8_t> block = good;
      block[at] = static_cast<uint8_t>(bits);
      block[at + 1] = static_cast<uint8_t>(bits >> 8);
      compare(block, at);
    }
    std::vector<uint8_t> block = good;
    std::fill(block.begin() + static_cast<std::ptrdiff_t>(at), block.end(), uint8_t{0xff});
    compare(block, at);
  }
  EXPECT_GT(found, 0);
}

class OnlyRead : public BlockTypes {};
INSTANTIATE_TEST_SUITE_P(All, OnlyRead,
                         testing::ValuesIn(BlockEncoding::all().subspan(BlockEncoding::writable().size())),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(OnlyRead, IsNotWrittenButDrawn) {
  const int64_t count = 40;
  std::vector<float> values(static_cast<size_t>(count * format_.block_size), 0.5f);
  std::vector<uint8_t> blocks(static_cast<size_t>(encoding_.row_bytes(static_cast<int64_t>(values.size()))));
  try {
    encoding_.quantize_row(blocks.data(), values, {});
    FAIL();
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find(encoding_.name()), std::string::npos) << error.what();
  }
  encoding_.fill_random(blocks.data(), 0, count, 0.02, 5);
  std::vector<uint8_t> last(static_cast<size_t>(format_.block_bytes));
  encoding_.fill_random(last.data(), count - 1, 1, 0.02, 5);
  EXPECT_TRUE(std::equal(last.begin(), last.end(), blocks.end() - format_.block_bytes));
  const Shape shape{static_cast<int64_t>(values.size())};
  encoding_.decode_row(values.data(), encoded_view(encoding_, blocks.data(), shape), 0);
  double squares = 0;
  for (float value : values) squares += static_cast<double>(value) * value;
  // Each block has this size, up to the rounding of its scale to an f16.
  EXPECT_NEAR(std::sqrt(squares / static_cast<double>(values.size())), 0.02, 0.02 * 0x1p-10);
}

// ---- Quantizing ----------------------------------------------------------------------------------------------------

// `count` values of a symmetric distribution with heavier tails than a normal one.
std::vector<float> random_values(int count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) {
    const double sum = static_cast<double>(random()) + static_cast<double>(random()) - 4294967295.0;
    value = static_cast<float>(sum * std::abs(sum) * 0x1p-64);
  }
  return values;
}

double square_error(std::span<const float> a, std::span<const float> b, std::span<const float> weights = {}) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double off = static_cast<double>(a[i]) - b[i];
    sum += off * off * (weights.empty() ? 1.0 : weights[i]);
  }
  return sum;
}

class Quantizing : public BlockTypes {
 protected:
  std::vector<uint8_t> quantized(const std::vector<float>& values, std::span<const float> importance = {}) const {
    std::vector<uint8_t> row(static_cast<size_t>(encoding_.row_bytes(static_cast<int64_t>(values.size()))));
    encoding_.quantize_row(row.data(), values, importance);
    return row;
  }
  std::vector<float> decoded(std::vector<uint8_t> row) const {
    const int64_t columns = static_cast<int64_t>(row.size()) / format_.block_bytes * format_.block_size;
    std::vector<float> values(static_cast<size_t>(columns));
    encoding_.decode_row(values.data(), encoded_view(encoding_, row.data(), Shape{columns}), 0);
    return values;
  }
  std::vector<int> levels() const {
    std::vector<int> result;
    for (int code = 0; code < 1 << format_.code_bits; ++code)
      result.push_back(format_.level(static_cast<uint8_t>(code)));
    std::sort(result.begin(), result.end());
    return result;
  }
};

INSTANTIATE_TEST_SUITE_P(All, Quantizing, testing::ValuesIn(BlockEncoding::writable()),
                         [](const auto& info) { return std::string(info.param->name()); });

// The best choice is at least as good as the plain one, of which the bound is plain: the extremes of a group on the
// last levels, so that a value is off by half of the largest gap between levels at most. Then the scale is rounded: up
// to the next integer sub-scale (by a whole unit, largest scale / largest sub-scale, at most; mins likewise) or power
// of two (twice), and to an f16 (2^-11 of the value).
TEST_P(Quantizing, ErrorIsWithinHalfAStep) {
  const std::vector<float> values = random_values(64 * 256, 5);
  const std::vector<float> result = decoded(quantized(values));
  const std::vector<int> all = levels();
  double gap = 0;
  for (size_t i = 1; i < all.size(); ++i) gap = std::max(gap, static_cast<double>(all[i] - all[i - 1]));
  for (size_t begin = 0; begin < values.size(); begin += static_cast<size_t>(format_.block_size)) {
    std::vector<double> scales, mins;
    double farthest = 0;
    for (int group = 0; group < format_.num_groups(); ++group) {
      const float* x = values.data() + begin + group * format_.group_size;
      const double low = *std::min_element(x, x + format_.group_size);
      const double high = *std::max_element(x, x + format_.group_size);
      farthest = std::max({farthest, -low, high});
      mins.push_back(format_.sub_min_max > 1 ? std::max(-low, 0.0) : 0.0);
      scales.push_back(format_.has_min ? (high - std::min(low, format_.sub_min_max > 1 ? 0.0 : low)) / all.back()
                                       : std::max(-low, high) / std::min(-all.front(), all.back()));
    }
    const double largest_scale = *std::max_element(scales.begin(), scales.end());
    const double min_unit = *std::max_element(mins.begin(), mins.end()) / format_.sub_min_max;
    double bound = 0;
    for (double scale : scales) {
      double step = scale;
      if (format_.sub_scale_max > 1) step += largest_scale / format_.sub_scale_max;
      if (format_.sub_min_max > 1) step += min_unit / all.back();
      if (format_.scale == BlockFormat::Scale::power_of_two) step *= 2;
      const double off = step * gap / 2 + farthest * 0x1p-11;
      bound += off * off * format_.group_size;
    }
    const size_t size = static_cast<size_t>(format_.block_size);
    const double error = square_error(std::span(values).subspan(begin, size), std::span(result).subspan(begin, size));
    EXPECT_LE(error, bound) << "block at " << begin;
  }
}

// Blocks that use their last levels, in each group, and their largest sub-scales and sub-mins are found again.
TEST_P(Quantizing, RestoresWhatABlockCanSay) {
  std::mt19937 random(11);
  const std::vector<int> all = levels();
  std::vector<float> values;
  for (int block = 0; block < 40; ++block) {
    BlockParts parts;
    for (int i = 0; i < format_.block_size; ++i) {
      // The last levels of both ends stand in every group.
      const int wanted = i % format_.group_size == 0   ? all.front()
                         : i % format_.group_size == 1 ? all.back()
                                                       : all[random() % all.size()];
      for (int code = (1 << format_.code_bits) - 1; code >= 0; --code)
        if (format_.level(static_cast<uint8_t>(code)) == wanted) parts.codes[i] = static_cast<uint8_t>(code);
    }
    const auto between = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1u)); };
    for (int group = 0; group < format_.num_groups(); ++group) {
      const bool first = group == 0;
      parts.sub_scales[group] = static_cast<int8_t>(
          first ? format_.sub_scale_max : between(format_.sub_scale_min < 0 ? 1 : 0, format_.sub_scale_max));
      parts.sub_mins[group] = static_cast<uint8_t>(first || format_.sub_min_max == 1 ? format_.sub_min_max
                                                                                     : between(0, format_.sub_min_max));
    }
    const auto f16 = [&](double value) { return f16_t::from_float(static_cast<float>(value)).to_float(); };
    parts.scale = format_.scale == BlockFormat::Scale::power_of_two ? std::ldexp(1.0f, between(-20, 20))
                                                                    : f16(0.001 * between(100, 1000));
    parts.min = format_.has_min ? f16(0.002 * between(100, 1000)) : 0;
    std::vector<uint8_t> bytes(static_cast<size_t>(format_.block_bytes));
    encoding_.pack(bytes.data(), parts);
    const std::vector<float> block_values = decoded(bytes);
    values.insert(values.end(), block_values.begin(), block_values.end());
  }
  const std::vector<float> again = decoded(quantized(values));
  for (size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(again[i], values[i]) << "block " << i / format_.block_size << " value " << i % format_.block_size;
}

TEST_P(Quantizing, ImportanceLowersTheWeightedError) {
  const std::vector<float> values = random_values(32 * 256, 6);
  std::vector<float> importance = random_values(32 * 256, 7);
  for (float& value : importance) value = value * value * 3;
  const double plain = square_error(decoded(quantized(values)), values, importance);
  const double weighted = square_error(decoded(quantized(values, importance)), values, importance);
  EXPECT_LT(weighted, plain);
  // Only their ratios matter.
  std::vector<float> doubled = importance;
  for (float& value : doubled) value *= 2;
  EXPECT_EQ(quantized(values, doubled), quantized(values, importance));
}

TEST_P(Quantizing, NoImportanceIsAnEvenOne) {
  const std::vector<float> values = random_values(8 * 256, 8);
  const std::vector<float> ones(values.size(), 0.25f), nothing(values.size(), 0.0f);
  EXPECT_EQ(quantized(values, ones), quantized(values));
  EXPECT_EQ(quantized(values, nothing), quantized(values));
  std::vector<float> bad(values.size(), 1.0f);
  bad[300] = -1;
  EXPECT_THROW(quantized(values, bad), InvalidArgument);
  bad[300] = HUGE_VALF;
  EXPECT_THROW(quantized(values, bad), InvalidArgument);
}

TEST_P(Quantizing, ZerosStayZeros) {
  for (float zero : {0.0f, -0.0f})
    for (float value : decoded(quantized(std::vector<float>(512, zero)))) EXPECT_EQ(value, 0);
}

TEST_P(Quantizing, ConstantsSurvive) {
  for (float constant : {1.0f, -1.0f, 0.5f, 3.0f, -0.3f}) {
    const std::vector<float> values(256, constant);
    // Off by the rounding of an f16 scale, twice where a sub-scale multiplies it; a power of two has only its levels,
    // a quarter apart at the most.
    const double bound = format_.scale == BlockFormat::Scale::power_of_two ? 0.25 : 0x1p-9;
    for (float value : decoded(quantized(values))) EXPECT_NEAR(value, constant, bound * std::abs(constant));
  }
}

// From the smallest subnormal up to what the scales reach: finite, and no worse than zeros.
TEST_P(Quantizing, AnyMagnitudeIsFinite) {
  for (int exponent = -149; exponent <= 127; exponent += 3) {
    std::vector<float> values = random_values(256, 9);
    for (float& value : values) value = std::ldexp(value, exponent);
    float largest = 0;
    for (float value : values) largest = std::max(largest, std::abs(value));
    std::vector<float> result;
    try {
      result = decoded(quantized(values));
    } catch (const InvalidArgument& error) {
      EXPECT_GT(largest, 65504.0f) << error.what();
      continue;
    }
    // The quantizer sums up to 256 squares in f32: 2^-16 is 256 units of roundoff.
    const double nothing = square_error(std::vector<float>(values.size(), 0.0f), values);
    EXPECT_LE(square_error(result, values), nothing * (1 + 0x1p-16)) << exponent;
  }
}

TEST_P(Quantizing, RefusesWhatItsScalesCannotReach) {
  std::vector<float> values(512, 0.5f);
  for (float bad : {HUGE_VALF, -HUGE_VALF, std::nanf(""), 3.4e38f}) {
    values[300] = bad;
    try {
      quantized(values);
      FAIL() << bad;
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find(fmt::format("value {} in column 300", bad)), std::string::npos)
          << error.what();
    }
  }
}

// ---- Against the quantizers of the gguf package --------------------------------------------------------------------

TEST(QuantizingLikeGguf, IsNotWorse) {
  std::ifstream file(EADEM_SOURCE_DIR "/tests/data/encodings/values.f32", std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(file), {}};
  std::vector<float> values(bytes.size() / sizeof(float)), result(values.size());
  ASSERT_FALSE(values.empty());
  std::memcpy(values.data(), bytes.data(), bytes.size());
  std::ifstream errors(EADEM_SOURCE_DIR "/tests/data/encodings/gguf_errors.txt");
  std::string name;
  double gguf_error = 0;
  int compared = 0;
  for (; errors >> name >> gguf_error; ++compared) {
    const BlockEncoding* encoding = BlockEncoding::find(name);
    ASSERT_NE(encoding, nullptr) << name;
    std::vector<uint8_t> row(static_cast<size_t>(encoding->row_bytes(static_cast<int64_t>(values.size()))));
    encoding->quantize_row(row.data(), values, {});
    encoding->decode_row(result.data(), encoded_view(*encoding, row.data(), Shape{static_cast<int64_t>(values.size())}),
                         0);
    const double error = std::sqrt(square_error(result, values) / static_cast<double>(values.size()));
    EXPECT_LT(error, gguf_error) << name;
  }
  EXPECT_EQ(compared, 6);
}

// ---- Tensors -------------------------------------------------------------------------------------------------------

TEST_P(Quantizing, PlanesAreRowsOfBlocks) {
  const std::vector<PlaneSpec> planes = encoding_.planes({3, 5, 512});
  ASSERT_EQ(planes.size(), 1u);
  EXPECT_EQ(planes[0].dtype, DType::u8);
  EXPECT_EQ(planes[0].shape, (Shape{3, 5, encoding_.row_bytes(512)}));
  EXPECT_EQ(encoding_.num_pieces({3, 5, 512}), 15);
  EXPECT_THROW(encoding_.planes({}), InvalidArgument);
  try {
    encoding_.planes({4, 300});
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("300"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find(std::to_string(format_.block_size)), std::string::npos) << error.what();
  }
}

TEST_P(Quantizing, TensorsAreEncodedRowByRow) {
  constexpr int64_t kRows = 5, kColumns = 512;
  std::vector<float> values = random_values(kRows * kColumns, 10);
  for (float& value : values) value = bf16_t::from_float(value).to_float();
  const TensorView plain(values.data(), DType::f32, Shape{kRows, kColumns});
  std::vector<uint8_t> data(static_cast<size_t>(kRows * encoding_.row_bytes(kColumns)));
  encoding_.encode(encoded_view(encoding_, data.data(), plain.shape), plain);
  EXPECT_EQ(data, quantized(values));

  // From bf16, and from the encoding itself.
  const Tensor narrow = converted_on_host(plain, DType::bf16);
  std::vector<uint8_t> again(data.size()), copied(data.size());
  encoding_.encode(encoded_view(encoding_, again.data(), plain.shape), narrow.view);
  EXPECT_EQ(again, data);
  encoding_.encode(encoded_view(encoding_, copied.data(), plain.shape),
                   encoded_view(encoding_, data.data(), plain.shape));
  EXPECT_EQ(copied, data);

  values[3 * kColumns + 7] = HUGE_VALF;
  try {
    encoding_.encode(encoded_view(encoding_, data.data(), plain.shape), plain);
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("row 3"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("column 7"), std::string::npos) << error.what();
  }
}

// A part of a rank-3 tensor along each axis has the values that lie there in the whole.
TEST_P(Quantizing, CutsEqualSlices) {
  const Shape shape{2, 3, 1024};
  std::vector<uint8_t> data = quantized(random_values(2 * 3 * 1024, 12));
  const TensorView whole = encoded_view(encoding_, data.data(), shape);
  const std::vector<float> all = decoded(data);
  struct Cut {
    int axis;
    int64_t begin, extent;
  };
  for (const Cut& cut : {Cut{0, 1, 1}, Cut{0, 0, 2}, Cut{1, 1, 2}, Cut{1, 2, 1}, Cut{1, 1, 0}, Cut{2, 256, 512},
                         Cut{2, 768, 256}, Cut{2, 0, 1024}}) {
    Shape part_shape = shape;
    part_shape[cut.axis] = cut.extent;
    std::vector<uint8_t> part_data(static_cast<size_t>(part_shape.num_rows() * encoding_.row_bytes(part_shape.back())));
    encoding_.slice(encoded_view(encoding_, part_data.data(), part_shape), whole, cut.axis, cut.begin);
    const std::vector<float> part = decoded(part_data);
    size_t next = 0;
    for (int64_t a = 0; a < part_shape[0]; ++a)
      for (int64_t b = 0; b < part_shape[1]; ++b)
        for (int64_t c = 0; c < part_shape[2]; ++c, ++next) {
          const int64_t at_a = a + (cut.axis == 0 ? cut.begin : 0), at_b = b + (cut.axis == 1 ? cut.begin : 0),
                        at_c = c + (cut.axis == 2 ? cut.begin : 0);
          ASSERT_EQ(part[next], all[static_cast<size_t>((at_a * 3 + at_b) * 1024 + at_c)])
              << "axis " << cut.axis << " from " << cut.begin;
        }
  }
}

TEST_P(Quantizing, NoCutGoesThroughABlock) {
  std::vector<uint8_t> data = quantized(random_values(2 * 1024, 13)), part(data.size());
  const TensorView whole = encoded_view(encoding_, data.data(), {2, 1024});
  for (const auto& [begin, extent] : {std::pair<int64_t, int64_t>{16, 256}, {0, 272}}) {
    try {
      encoding_.slice(encoded_view(encoding_, part.data(), {2, extent}), whole, 1, begin);
      FAIL();
    } catch (const InvalidArgument& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find(fmt::format("{} to {}", begin, begin + extent)), std::string::npos) << message;
      EXPECT_NE(message.find(fmt::format("block of {}", format_.block_size)), std::string::npos) << message;
    }
  }
}

}  // namespace
}  // namespace eadem
