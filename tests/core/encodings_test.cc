// SPDX-License-Identifier: Apache-2.0
//
// The block types against the `gguf` package's reading of them, bit for bit, and their quantizer against its bounds.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <iterator>
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
        << "block " << i / format_.block_size << " value " << i % format_.block_size << ": " << values[i]
        << " for " << expected.values[i];
}

TEST_P(BlockTypes, PackRestoresWhatUnpackRead) {
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
    std::fill(packed.begin(), packed.end(), uint8_t{0xa5});
    encoding_.pack(packed.data(), parts);
    EXPECT_TRUE(std::equal(packed.begin(), packed.end(), expected.blocks.begin() + static_cast<int64_t>(begin)))
        << "block " << begin / packed.size();
  }
}

}  // namespace
}  // namespace eadem
