// SPDX-License-Identifier: Apache-2.0
//
// Quantized layers that we write are, read again, the same bytes in the same encoding.
#include "eadem/io/quantized/quantized_writer.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <random>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/io/quantized/quantized_checkpoint.h"
#include "eadem/io/safetensors.h"

namespace eadem::io {
namespace {

std::vector<const Encoding*> written_encodings() {
  std::vector<const Encoding*> result;
  for (const GroupEncoding& encoding : GroupEncoding::all())
    if (can_write_layer(encoding)) result.push_back(&encoding);
  for (const Fp8Encoding& encoding : Fp8Encoding::all())
    if (can_write_layer(encoding)) result.push_back(&encoding);
  return result;
}

class WrittenLayer : public testing::TestWithParam<const Encoding*> {};
INSTANTIATE_TEST_SUITE_P(Encodings, WrittenLayer, testing::ValuesIn(written_encodings()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(WrittenLayer, ReadsBackTheSame) {
  const Encoding& encoding = *GetParam();
  const GroupEncoding* groups = GroupEncoding::of(&encoding);
  // Rows that do not fill the last word or block, where the encoding allows it.
  const Shape shape{130, groups != nullptr && groups->format().group_size == 0 ? 42 : 256};
  std::mt19937 random(1);
  std::vector<float> values(static_cast<size_t>(shape.num_elements()));
  for (float& value : values) value = std::normal_distribution<float>()(random);
  const Tensor encoded = Tensor::in_one_piece(DType::bf16, shape, encoding);
  encoding.encode(encoded.view, TensorView(values.data(), DType::f32, shape));

  const std::string path = testing::TempDir() + "layer_" + std::string(encoding.name()) + ".safetensors";
  const std::vector<TensorHeader> headers = layer_headers("model.X", encoding, shape);
  const std::vector<Tensor> parts = layer_values(encoded);
  ASSERT_EQ(headers.size(), parts.size());
  const auto writer = begin_safetensors(path, headers);
  for (const Tensor& part : parts) writer->write(part.view);
  writer->commit();

  const JsonValue json = JsonValue::object().set("quantization_config", quantization_config_of(encoding, {"lm_head"}));
  const auto config = QuantizationConfig::from_json(JsonReader::parse(to_json(json), "config.json"));
  ASSERT_TRUE(config);
  EXPECT_TRUE(config->ignores("lm_head"));
  const auto source = open_quantized(open_weights(path), *config);
  ASSERT_EQ(source->tensors().size(), 1u);
  EXPECT_EQ(source->tensors()[0].name, "model.X.weight");
  const Tensor back = source->get("model.X.weight");
  EXPECT_EQ(back.view.encoding, &encoding);
  EXPECT_EQ(back.shape(), shape);
  EXPECT_EQ(std::memcmp(back.view.data, encoded.view.data, static_cast<size_t>(encoded_bytes(encoding, shape))), 0);
  std::filesystem::remove(path);
}

TEST(QuantizedWriter, WritesWhatItSays) {
  EXPECT_FALSE(can_write_layer(*GroupEncoding::find("int4_g32_f16_zeros")));
  EXPECT_FALSE(can_write_layer(*GroupEncoding::find("int4_g32_f16_order")));
  EXPECT_FALSE(can_write_layer(*Fp8Encoding::find("fp8_e5m2_tensor")));
  EXPECT_EQ(written_encodings().size(), 24u + 3u);
}

}  // namespace
}  // namespace eadem::io
