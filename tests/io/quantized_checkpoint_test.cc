// SPDX-License-Identifier: Apache-2.0
//
// Each layer of a quantized checkpoint is read as one tensor with the right values. Inconsistent files are refused by
// name.
// (tests/engine/checkpoints_test.cc reads whole models that other programs wrote.)
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <random>

#include "eadem/core/encodings/group_encoding.h"
#include "eadem/io/quantized/quantized_checkpoint.h"
#include "eadem/io/safetensors.h"

namespace eadem::io {
namespace {

struct RawTensor {
  std::string name;
  std::string type;
  Shape shape;
  std::vector<uint8_t> bytes;
};

template <typename T>
RawTensor raw(const std::string& name, const std::string& type, const Shape& shape, const std::vector<T>& values) {
  RawTensor result{name, type, shape, std::vector<uint8_t>(values.size() * sizeof(T))};
  if (!values.empty()) std::memcpy(result.bytes.data(), values.data(), result.bytes.size());
  return result;
}

using RawTensors = std::vector<RawTensor>;

std::shared_ptr<const WeightSource> file_of(const RawTensors& tensors) {
  std::string header = "{", data;
  for (const RawTensor& tensor : tensors) {
    const size_t begin = data.size();
    data.append(tensor.bytes.begin(), tensor.bytes.end());
    header +=
        fmt::format(R"({}"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", header.size() > 1 ? "," : "",
                    tensor.name, tensor.type, fmt::join(tensor.shape.dims(), ","), begin, data.size());
  }
  header += "}";
  header.append((8 - header.size() % 8) % 8, ' ');
  const uint64_t size = header.size();
  auto bytes = std::make_shared<std::string>(8, '\0');
  std::memcpy(bytes->data(), &size, 8);
  *bytes += header + data;
  return SafetensorsFile::parse("model.safetensors", std::as_bytes(std::span<const char>(*bytes)), bytes);
}

QuantizationConfig config_of(const std::string& json) {
  return *QuantizationConfig::from_json(JsonReader::parse(R"({"quantization_config": )" + json + "}", "config.json"));
}

std::shared_ptr<const WeightSource> opened(const RawTensors& tensors, const std::string& json) {
  return open_quantized(file_of(tensors), config_of(json));
}

std::vector<float> values_of(const Tensor& tensor) {
  std::vector<float> values(static_cast<size_t>(tensor.view.num_elements()));
  tensor.view.encoding->decode(TensorView(values.data(), DType::f32, tensor.shape()), tensor.view);
  return values;
}

// A layer [16, 64] in groups of 32: random codes, zero points, scales that are powers of two or three of them.
struct Layer {
  static constexpr int64_t kOut = 16, kIn = 64, kGroups = 2;
  int bits;
  std::vector<int> codes = std::vector<int>(kOut * kIn), zeros = std::vector<int>(kOut * kGroups);
  std::vector<float> scales = std::vector<float>(kOut * kGroups);
  std::vector<int32_t> group_of = std::vector<int32_t>(kIn);

  explicit Layer(int bits, bool middle_zeros = false) : bits(bits) {
    std::mt19937 random(1);
    for (int& code : codes) code = static_cast<int>(random() % (1u << bits));
    for (int& zero : zeros) zero = middle_zeros ? 1 << (bits - 1) : static_cast<int>(random() % (1u << bits));
    for (float& scale : scales) scale = std::ldexp(random() % 2 == 0 ? 1.0f : -3.0f, -static_cast<int>(random() % 10));
    for (size_t k = 0; k < group_of.size(); ++k) group_of[k] = static_cast<int32_t>(k / 32);
  }
  int code(int64_t o, int64_t k) const { return codes[static_cast<size_t>(o * kIn + k)]; }
  int zero(int64_t o, int64_t g) const { return zeros[static_cast<size_t>(o * kGroups + g)]; }
  float scale(int64_t o, int64_t g) const { return scales[static_cast<size_t>(o * kGroups + g)]; }
  std::vector<float> values() const {
    std::vector<float> result;
    for (int64_t o = 0; o < kOut; ++o)
      for (int64_t k = 0; k < kIn; ++k) {
        const int32_t g = group_of[static_cast<size_t>(k)];
        result.push_back(scale(o, g) * static_cast<float>(code(o, k) - zero(o, g)));
      }
    return result;
  }

  // Words along rows of [rows, columns], where value(r, c) stands at place(c) of its word.
  template <typename Value, typename Place>
  std::vector<uint32_t> words(int64_t rows, int64_t columns, Value value, Place place) const {
    const int64_t n = 32 / bits;
    std::vector<uint32_t> result(static_cast<size_t>(rows * ((columns + n - 1) / n)), 0);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < columns; ++c)
        result[static_cast<size_t>(r * ((columns + n - 1) / n) + c / n)] |= static_cast<uint32_t>(value(r, c))
                                                                            << (place(c % n) * bits);
    return result;
  }
  std::vector<uint32_t> words(int64_t rows, int64_t columns, const std::function<int(int64_t, int64_t)>& value) const {
    return words(rows, columns, value, [](int64_t i) { return i; });
  }
  template <typename T>
  std::vector<T> transposed_16(const std::vector<uint32_t>& from, int64_t rows, int64_t columns) const {
    std::vector<T> result;
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t r = 0; r < rows; ++r) result.push_back(static_cast<T>(from[static_cast<size_t>(r * columns + c)]));
    return result;
  }
  std::vector<uint16_t> scale_bits(bool transposed) const {
    std::vector<uint16_t> result;
    for (int64_t i = 0; i < kOut * kGroups; ++i)
      result.push_back(f16_t::from_float(transposed ? scale(i % kOut, i / kOut) : scales[static_cast<size_t>(i)]).bits);
    return result;
  }

  RawTensors gptq(int less) const {
    const int64_t n = 32 / bits;
    const auto by_row = words(kOut, kIn, [&](int64_t o, int64_t k) { return code(o, k); });
    return {raw("X.qweight", "I32", {kIn / n, kOut}, transposed_16<uint32_t>(by_row, kOut, kIn / n)),
            raw("X.qzeros", "I32", {kGroups, kOut / n},
                words(kGroups, kOut, [&](int64_t g, int64_t o) { return (zero(o, g) - less) & ((1 << bits) - 1); })),
            raw("X.scales", "F16", {kGroups, kOut}, scale_bits(true)), raw("X.g_idx", "I32", {kIn}, group_of)};
  }
  RawTensors awq() const {
    const auto awq_place = [](int64_t i) {  // 0 2 4 6 1 3 5 7: evens first
      return i % 2 == 0 ? i / 2 : 4 + i / 2;
    };
    return {raw("X.qweight", "I32", {kIn, kOut / 8},
                words(
                    kIn, kOut, [&](int64_t k, int64_t o) { return code(o, k); }, awq_place)),
            raw("X.qzeros", "I32", {kGroups, kOut / 8},
                words(
                    kGroups, kOut, [&](int64_t g, int64_t o) { return zero(o, g); }, awq_place)),
            raw("X.scales", "F16", {kGroups, kOut}, scale_bits(true))};
  }
  RawTensors packed(bool with_zeros) const {
    const int64_t n = 32 / bits;
    RawTensors result = {raw("X.weight_packed", "I32", {kOut, kIn / n},
                             words(kOut, kIn, [&](int64_t o, int64_t k) { return code(o, k); })),
                         raw("X.weight_scale", "F16", {kOut, kGroups}, scale_bits(false)),
                         raw("X.weight_shape", "I64", {2}, std::vector<int64_t>{kOut, kIn})};
    const auto by_group = words(kGroups, kOut, [&](int64_t g, int64_t o) { return zero(o, g); });
    if (with_zeros)
      result.push_back(
          raw("X.weight_zero_point", "I32", {kOut / n, kGroups}, transposed_16<uint32_t>(by_group, kGroups, kOut / n)));
    return result;
  }
  RawTensors integers() const {
    std::vector<int8_t> bytes, zero_bytes;
    for (int code : codes) bytes.push_back(static_cast<int8_t>(code - 128));
    for (int zero : zeros) zero_bytes.push_back(static_cast<int8_t>(zero - 128));
    return {raw("X.weight", "I8", {kOut, kIn}, bytes), raw("X.weight_scale", "F16", {kOut, kGroups}, scale_bits(false)),
            raw("X.weight_zero_point", "I8", {kOut, kGroups}, zero_bytes)};
  }
};

std::string gptq_config(int bits, bool symmetric, bool order = false, const char* format = "gptq") {
  return fmt::format(
      R"({{"quant_method": "gptq", "bits": {}, "group_size": 32, "sym": {}, "desc_act": {}, "checkpoint_format": "{}"}})",
      bits, symmetric, order, format);
}
std::string tensors_config(const std::string& format, int bits, bool symmetric, const std::string& more = "") {
  return fmt::format(
      R"({{"quant_method": "compressed-tensors", "format": "{}", "config_groups": {{"group_0": {{"weights":
          {{"num_bits": {}, "type": "int", "symmetric": {}, "strategy": "group", "group_size": 32{}}}}}}}}})",
      format, bits, symmetric, more);
}
const char* const kAwq = R"({"quant_method": "awq", "bits": 4, "group_size": 32})";

void expect_layer(const RawTensors& tensors, const std::string& json, const Layer& layer, const char* encoding) {
  SCOPED_TRACE(json);
  const auto source = opened(tensors, json);
  ASSERT_EQ(source->tensors().size(), 1u);
  const WeightInfo& info = source->tensors()[0];
  EXPECT_EQ(info.name, "X.weight");
  EXPECT_EQ(info.type_name, encoding);
  EXPECT_EQ(info.shape, (Shape{Layer::kOut, Layer::kIn}));
  int64_t bytes = 0;
  for (const RawTensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.bytes.size());
  EXPECT_EQ(info.size_bytes, bytes);
  EXPECT_EQ(values_of(source->get("X.weight")), layer.values());
  source->release("X.weight");
  source->release("none");
}

TEST(QuantizedCheckpoint, EveryLayoutMeansItsValues) {
  for (int bits : {4, 8}) {
    const Layer layer(bits), middle(bits, true);
    const std::string name = fmt::format("int{}_g32_f16", bits);
    const std::string zeros = name + "_zeros";
    expect_layer(layer.gptq(1), gptq_config(bits, false), layer, zeros.c_str());
    expect_layer(layer.gptq(0), gptq_config(bits, false, false, "gptq_v2"), layer, zeros.c_str());
    expect_layer(middle.gptq(1), gptq_config(bits, true), middle, name.c_str());
    expect_layer(middle.gptq(0), gptq_config(bits, true, false, "gptq_v2"), middle, name.c_str());
    expect_layer(middle.gptq(0), gptq_config(bits, true), middle, name.c_str());  // mislabelled
    expect_layer(layer.packed(true), tensors_config("pack-quantized", bits, false), layer, zeros.c_str());
    expect_layer(middle.packed(false), tensors_config("pack-quantized", bits, true), middle, name.c_str());
  }
  // GPTQModel subtracts one from each field of a whole word at once, and a zero borrows from the field above it.
  for (int bits : {4, 8}) {
    Layer layer(bits);
    for (size_t i = 0; i < layer.zeros.size(); i += 3) layer.zeros[i] = 0;
    RawTensors tensors = layer.gptq(0);
    std::vector<uint8_t>& bytes = tensors[1].bytes;
    for (size_t at = 0; at < bytes.size(); at += 4) {
      uint32_t word = 0;
      std::memcpy(&word, &bytes[at], 4);
      word -= bits == 4 ? 0x11111111u : 0x01010101u;
      std::memcpy(&bytes[at], &word, 4);
    }
    std::string config = gptq_config(bits, false);
    config.insert(config.size() - 1, R"(, "meta": {"quantizer": ["gptqmodel:2.2.0"]})");
    const std::string name = fmt::format("int{}_g32_f16_zeros", bits);
    expect_layer(tensors, config, layer, name.c_str());
    expect_layer(layer.gptq(1), gptq_config(bits, false), layer, name.c_str());
  }
  expect_layer(Layer(4).awq(), kAwq, Layer(4), "int4_g32_f16_zeros");
  expect_layer(Layer(8).integers(), tensors_config("int-quantized", 8, false), Layer(8), "int8_g32_f16_zeros");
}

TEST(QuantizedCheckpoint, ColumnsMayHaveAnOrder) {
  Layer layer(4);
  std::mt19937 random(2);
  std::shuffle(layer.group_of.begin(), layer.group_of.end(), random);
  expect_layer(layer.gptq(1), gptq_config(4, false, true), layer, "int4_g32_f16_zeros_order");
  RawTensors packed = layer.packed(true);
  packed.push_back(raw("X.weight_g_idx", "I32", {Layer::kIn}, layer.group_of));
  expect_layer(packed, tensors_config("pack-quantized", 4, false, R"(, "actorder": "group")"), layer,
               "int4_g32_f16_zeros_order");
  // One that changes nothing is none.
  const Layer plain(4);
  expect_layer(plain.gptq(1), gptq_config(4, false, true), plain, "int4_g32_f16_zeros");
}

TEST(QuantizedCheckpoint, ScalesMayBeOfRowsAndTensors) {
  const Layer layer(8, true);
  std::vector<int8_t> bytes;
  for (int code : layer.codes) bytes.push_back(static_cast<int8_t>(code - 128));
  for (const char* strategy : {"channel", "tensor"}) {
    const bool one = strategy == std::string("tensor");
    const std::string json = fmt::format(
        R"({{"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {{"g": {{"weights":
            {{"num_bits": 8, "type": "int", "strategy": "{}"}}}}}}}})",
        strategy);
    std::vector<float> scales;
    for (int o = 0; o < (one ? 1 : 16); ++o) scales.push_back(0.5f + static_cast<float>(o));
    const auto source = opened(
        {raw("X.weight", "I8", {16, 64}, bytes), raw("X.weight_scale", "F32", one ? Shape{1} : Shape{16, 1}, scales)},
        json);
    EXPECT_EQ(source->tensors()[0].type_name, "int8_row_f32");
    const std::vector<float> values = values_of(source->get("X.weight"));
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(values[i], scales[one ? 0 : i / 64] * static_cast<float>(bytes[i]));
  }
}

TEST(QuantizedCheckpoint, FloatsHaveTheirScales) {
  std::vector<uint8_t> codes(200 * 130);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i % 0x70);
  const auto check = [&](const std::string& json, const char* type, const char* part, const Shape& shape,
                         const char* encoding) {
    SCOPED_TRACE(json);
    std::vector<uint16_t> scales;
    for (int64_t i = 0; i < shape.num_elements(); ++i)
      scales.push_back(bf16_t::from_float(0.25f * static_cast<float>(1 + i)).bits);
    const auto source =
        opened({raw("X.weight", type, {200, 130}, codes), raw(std::string("X.") + part, "BF16", shape, scales)}, json);
    ASSERT_EQ(source->tensors()[0].type_name, encoding);
    const Tensor tensor = source->get("X.weight");
    const Fp8Encoding& fp8 = *Fp8Encoding::of(tensor.view.encoding);
    const std::vector<float> values = values_of(tensor);
    const bool blocks = shape.rank() == 2 && shape[1] == 2;
    for (size_t i = 0; i < values.size(); ++i) {
      const size_t at = shape.num_elements() == 1 ? 0 : blocks ? i / 130 / 128 * 2 + i % 130 / 128 : i / 130;
      ASSERT_EQ(values[i], 0.25f * static_cast<float>(1 + at) * fp8_to_float(fp8.format().kind, codes[i])) << i;
    }
  };
  const std::string blocks = R"({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})";
  check(blocks, "F8_E4M3", "weight_scale_inv", {2, 2}, "fp8_e4m3_block128");
  check(R"({"quant_method": "fp8"})", "F8_E5M2", "weight_scale_inv", {}, "fp8_e5m2_tensor");
  check(R"({"quant_method": "fp8"})", "F8_E4M3", "weight_scale", {200, 1}, "fp8_e4m3_channel");
  const std::string rows = R"({"quant_method": "compressed-tensors", "format": "float-quantized",
                               "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}})";
  check(rows, "F8_E4M3", "weight_scale", {200, 1}, "fp8_e4m3_channel");
}

// DeepSeek's: bytes that are powers of two, the least of which f32 holds as a subnormal number.
TEST(QuantizedCheckpoint, FloatsWithPowersOfTwo) {
  std::vector<uint8_t> codes(200 * 130);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i % 0x70);
  const std::vector<uint8_t> exponents = {0, 1, 127, 254};
  for (const char* part : {"scale", "weight_scale_inv"}) {
    const auto source = opened(
        {raw("X.weight", "F8_E4M3", {200, 130}, codes), raw(std::string("X.") + part, "F8_E8M0", {2, 2}, exponents)},
        R"({"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"})");
    ASSERT_EQ(source->tensors().size(), 1u);
    ASSERT_EQ(source->tensors()[0].type_name, "fp8_e4m3_block128");
    const std::vector<float> values = values_of(source->get("X.weight"));
    for (size_t i = 0; i < values.size(); ++i) {
      const int exponent = exponents[i / 130 / 128 * 2 + i % 130 / 128] - 127;
      ASSERT_EQ(values[i], std::ldexp(fp8_to_float(Fp8Format::Kind::e4m3, codes[i]), exponent)) << i;
    }
  }
}

constexpr float kE2m1[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

// Experts of DeepSeek-V4, beside a layer in 8-bit floats.
TEST(QuantizedCheckpoint, FloatsOf4BitsBesideThoseOf8) {
  std::mt19937 random(6);
  std::vector<uint8_t> codes(3 * 32), exponents = {0, 1, 120, 127, 130, 254};
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
  const RawTensor eight = raw("Y.weight", "F8_E4M3", {1, 1}, std::vector<uint8_t>{0x38}),
                  its_scale = raw("Y.scale", "F32", {1, 1}, std::vector<float>{3});
  for (const char* type : {"I8", "U8"}) {
    const auto source = file_of(
        {raw("X.weight", type, {3, 32}, codes), raw("X.scale", "F8_E8M0", {3, 2}, exponents), eight, its_scale});
    QuantizationConfig config = config_of(R"({"quant_method": "fp8", "weight_block_size": [128, 128]})");
    config.expert_dtype = "fp4";
    const auto layers = open_quantized(source, config);
    ASSERT_EQ(layers->tensors().size(), 2u);
    EXPECT_EQ(layers->tensors()[0].type_name, "mxfp4");
    EXPECT_EQ(layers->tensors()[0].size_bytes, 3 * 32 + 6);
    const Tensor tensor = layers->get("X.weight");
    ASSERT_EQ(tensor.shape(), (Shape{3, 64}));
    const std::vector<float> values = values_of(tensor);
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_EQ(values[i], std::ldexp(kE2m1[codes[i / 2] >> (i % 2 * 4) & 15], exponents[i / 32] - 127)) << i;
    EXPECT_EQ(values_of(layers->get("Y.weight")), std::vector<float>{3});
  }
}

// Experts of GPT-OSS: two codes of E2M1 in a byte, neighbours, the first in the lower half.
TEST(QuantizedCheckpoint, Mxfp4) {
  std::mt19937 random(5);
  std::vector<uint8_t> codes(2 * 3 * 2 * 16), scales(2 * 3 * 2);
  for (uint8_t& code : codes) code = static_cast<uint8_t>(random());
  for (uint8_t& scale : scales) scale = static_cast<uint8_t>(120 + random() % 12);
  const RawTensor blocks = raw("X_blocks", "U8", {2, 3, 2, 16}, codes);
  const std::string json = R"({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})";
  const auto source = opened({blocks, raw("X_scales", "U8", {2, 3, 2}, scales)}, json);
  ASSERT_EQ(source->tensors().size(), 1u);
  EXPECT_EQ(source->tensors()[0].type_name, "mxfp4");
  const Tensor tensor = source->get("X.weight");
  ASSERT_EQ(tensor.shape(), (Shape{2, 3, 64}));
  const std::vector<float> values = values_of(tensor);
  for (size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(values[i], std::ldexp(kE2m1[codes[i / 2] >> (i % 2 * 4) & 15], scales[i / 32] - 127)) << i;
  const auto refused = [&](const RawTensors& tensors) {
    try {
      opened(tensors, json);
      return std::string();
    } catch (const Error& error) {
      return std::string(error.what());
    }
  };
  EXPECT_NE(refused({blocks}).find("'X_scales' is missing"), std::string::npos) << refused({blocks});
  EXPECT_NE(refused({blocks, raw("X_scales", "U8", {2, 3}, std::vector<uint8_t>(6))}).find("[2, 3, 2]"),
            std::string::npos);
  EXPECT_NE(refused({raw("X_blocks", "U8", {6, 32}, codes)}).find("expected [out, in / 32, 16]"), std::string::npos);
}

TEST(QuantizedCheckpoint, WhatIsPlainPassesThrough) {
  RawTensors tensors = Layer(4).gptq(1);
  tensors.insert(tensors.begin(), raw("norm.weight", "F32", {2}, std::vector<float>{1, 2}));
  tensors.push_back(raw("X.bias", "F32", {1}, std::vector<float>{3}));
  tensors.push_back(raw("odd", "I8", {1}, std::vector<int8_t>{3}));
  const auto source = opened(tensors, gptq_config(4, false));
  ASSERT_EQ(source->tensors().size(), 4u);
  EXPECT_EQ(source->tensors()[0].name, "norm.weight");
  EXPECT_EQ(source->tensors()[1].name, "X.weight");
  EXPECT_EQ(source->get("X.bias").view.as<float>()[0], 3);
  EXPECT_EQ(source->get_bytes("odd").view.as<uint8_t>()[0], 3);
  EXPECT_THROW(source->get_bytes("X.weight"), Unsupported);
  EXPECT_THROW(source->get("odd"), Unsupported);
}

// ---- Files that lie

std::string refusal(const RawTensors& tensors, const std::string& json) {
  try {
    const auto source = opened(tensors, json);
    for (const WeightInfo& info : source->tensors()) source->get(info.name);
    return "";
  } catch (const Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
}

void expect_refusal(const RawTensors& tensors, const std::string& json, std::initializer_list<const char*> words) {
  const std::string text = refusal(tensors, json);
  EXPECT_NE(text, "");
  EXPECT_NE(text.find("model.safetensors"), std::string::npos) << text;
  for (const char* word : words) EXPECT_NE(text.find(word), std::string::npos) << text << " lacks " << word;
}

RawTensors without(RawTensors tensors, const std::string& name) {
  std::erase_if(tensors, [&](const RawTensor& tensor) { return tensor.name == name; });
  return tensors;
}

RawTensors with(RawTensors tensors, const RawTensor& replacement) {
  for (RawTensor& tensor : tensors)
    if (tensor.name == replacement.name) tensor = replacement;
  return tensors;
}

TEST(QuantizedCheckpoint, WhatIsMissingIsNamed) {
  const Layer layer(4);
  for (const char* part : {"X.scales", "X.qzeros"}) {
    expect_refusal(without(layer.gptq(1), part), gptq_config(4, false), {"NotFound", part, "is missing"});
    expect_refusal(without(layer.awq(), part), kAwq, {"NotFound", part, "is missing"});
  }
  expect_refusal(without(layer.gptq(1), "X.g_idx"), gptq_config(4, false, true), {"NotFound", "X.g_idx"});
  EXPECT_EQ(refusal(without(layer.gptq(1), "X.g_idx"), gptq_config(4, false)), "");
  for (const char* part : {"X.weight_scale", "X.weight_shape", "X.weight_zero_point"})
    expect_refusal(without(layer.packed(true), part), tensors_config("pack-quantized", 4, false), {"NotFound", part});
  for (const char* part : {"X.weight_scale", "X.weight_zero_point"})
    expect_refusal(without(Layer(8).integers(), part), tensors_config("int-quantized", 8, false), {"NotFound", part});
  const RawTensor codes = raw("X.weight", "F8_E4M3", {2, 2}, std::vector<uint8_t>(4));
  expect_refusal({codes}, R"({"quant_method": "fp8", "weight_block_size": [128, 128]})",
                 {"NotFound", "'X.weight_scale_inv' is missing"});
  // Without a config there is no telling what they mean.
  EXPECT_THROW(file_of({codes})->get("X.weight"), Unsupported);
}

TEST(QuantizedCheckpoint, ShapesAndTypesMustAgree) {
  const Layer layer(4);
  const std::string gptq = gptq_config(4, false);
  const auto words = [](size_t count) { return std::vector<int32_t>(count, 0); };
  const auto halves = [](size_t count) { return std::vector<uint16_t>(count, 0x3c00); };
  expect_refusal(with(layer.gptq(1), raw("X.scales", "F16", {2, 15}, halves(30))), gptq,
                 {"DataCorrupted", "'X.scales' is F16 [2, 15]", "'X.qweight' is I32 [8, 16]", "imply [2, 16]"});
  expect_refusal(with(layer.gptq(1), raw("X.scales", "F16", {0, 16}, halves(0))), gptq, {"'X.scales'", "[0, 16]"});
  expect_refusal(with(layer.gptq(1), raw("X.scales", "I32", {2, 16}, words(32))), gptq, {"'X.scales' is I32"});
  expect_refusal(with(layer.gptq(1), raw("X.qzeros", "I32", {2, 3}, words(6))), gptq, {"'X.qzeros'", "[2, 2]"});
  expect_refusal(with(layer.gptq(1), raw("X.qweight", "I32", {128}, words(128))), gptq, {"'X.qweight'", "a matrix"});
  expect_refusal(with(layer.gptq(1), raw("X.qweight", "I32", {0, 16}, words(0))), gptq, {"'X.qweight'", "empty"});
  expect_refusal(with(layer.gptq(1), raw("X.qweight", "I64", {8, 16}, std::vector<int64_t>(128))), gptq,
                 {"'X.qweight' is I64"});
  expect_refusal(with(layer.gptq(1), raw("X.qweight", "I32", {9, 16}, words(144))), gptq,
                 {"72 columns", "groups of 32"});
  expect_refusal(with(layer.gptq(1), raw("X.g_idx", "I32", {63}, words(63))), gptq, {"'X.g_idx'", "[64]"});
  expect_refusal(with(layer.awq(), raw("X.scales", "F16", {16, 2}, halves(32))), kAwq, {"'X.scales'", "[2, 16]"});
  const std::string packed = tensors_config("pack-quantized", 4, true);
  const Layer middle(4, true);
  for (const auto& [out, in] : {std::pair<int64_t, int64_t>{16, 65},
                                {15, 64},
                                {16, 0},
                                {16, -64},
                                {-16, 64},
                                {16, INT64_MAX},
                                {INT64_MIN, INT64_MIN}})
    expect_refusal(with(middle.packed(false), raw("X.weight_shape", "I64", {2}, std::vector<int64_t>{out, in})), packed,
                   {"DataCorrupted", "'X.weight_shape'"});
  expect_refusal(with(middle.packed(false), raw("X.weight_shape", "I64", {1}, std::vector<int64_t>{16})), packed,
                 {"'X.weight_shape'", "[2]"});
  // Rows of 57 columns fit as many words, but are no whole number of groups, or of bytes.
  const RawTensor odd = raw("X.weight_shape", "I64", {2}, std::vector<int64_t>{16, 57});
  expect_refusal(with(middle.packed(false), odd), packed, {"57 columns", "groups of 32"});
  expect_refusal(with(with(middle.packed(false), odd), raw("X.weight_scale", "F16", {16, 1}, halves(16))),
                 R"({"quant_method": "compressed-tensors", "format": "pack-quantized",
                     "config_groups": {"g": {"weights": {"num_bits": 4, "strategy": "channel"}}}})",
                 {"Unsupported", "57", "bytes"});
  const std::string fp8 = R"({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]})";
  const RawTensor codes = raw("X.weight", "F8_E4M3", {129, 3}, std::vector<uint8_t>(387));
  expect_refusal({codes, raw("X.weight_scale_inv", "F32", {1, 2}, std::vector<float>{1, 1})}, fp8,
                 {"'X.weight_scale_inv' is F32 [1, 2]", "imply [2, 1]"});
  expect_refusal({codes, raw("X.weight_scale_inv", "F32", {2, 1}, std::vector<float>{1, 1}),
                  raw("X.weight_scale", "F32", {2, 1}, std::vector<float>{1, 1})},
                 fp8, {"both"});
  expect_refusal({raw("X.weight", "F8_E5M2", {1, 1}, std::vector<uint8_t>(1)),
                  raw("X.weight_scale_inv", "F32", {1, 1}, std::vector<float>{1})},
                 fp8, {"'X.weight' is F8_E5M2", "says e4m3"});
  const auto scales = [](const char* type, const Shape& shape, uint8_t last) {
    std::vector<uint8_t> exponents(static_cast<size_t>(shape.num_elements()), 127);
    exponents.back() = last;
    return raw("X.scale", type, shape, exponents);
  };
  expect_refusal({codes, scales("F8_E8M0", {2, 1}, 255)}, fp8,
                 {"DataCorrupted", "number 1 of 'X.scale' is 255", "[0, 254]"});
  expect_refusal({codes, scales("U8", {2, 1}, 127)}, fp8, {"'X.scale' is U8 [2, 1]", "F8_E8M0"});
  expect_refusal({codes, scales("F8_E8M0", {1, 2}, 127)}, fp8, {"'X.scale' is F8_E8M0 [1, 2]", "imply [2, 1]"});

  const std::string fp4 = R"({"quant_method": "fp8", "expert_dtype": "fp4", "weight_block_size": [128, 128]})";
  const RawTensor packed_floats = raw("X.weight", "I8", {2, 32}, std::vector<uint8_t>(64));
  expect_refusal({packed_floats}, fp4, {"NotFound", "'X.weight_scale_inv' is missing"});
  expect_refusal({packed_floats, scales("F8_E8M0", {2, 2}, 255)}, fp4, {"number 3 of 'X.scale' is 255"});
  expect_refusal({packed_floats, scales("F8_E8M0", {2, 1}, 127)}, fp4,
                 {"'X.scale' is F8_E8M0 [2, 1]", "'X.weight' is I8 [2, 32]", "imply [2, 2]"});
  expect_refusal({packed_floats, raw("X.scale", "F32", {2, 2}, std::vector<float>(4, 1))}, fp4,
                 {"'X.scale' is F32 [2, 2]", "F8_E8M0"});
  expect_refusal({raw("X.weight", "I8", {2, 24}, std::vector<uint8_t>(48)), scales("F8_E8M0", {2, 2}, 127)}, fp4,
                 {"'X.weight' is I8 [2, 24]", "48 values", "groups of 32"});
  expect_refusal({packed_floats, scales("F8_E8M0", {2, 2}, 127)}, fp8, {"'X.weight' is I8", "says nothing"});
  expect_refusal({packed_floats, scales("F8_E8M0", {2, 2}, 127)},
                 R"({"quant_method": "fp8", "expert_dtype": "fp8", "weight_block_size": [128, 128]})",
                 {"'X.weight' is I8", "says 'fp8' of 'expert_dtype'"});
  expect_refusal({codes, scales("F8_E8M0", {2, 1}, 127)}, fp4, {"no layer is in 4-bit floats", "'expert_dtype'"});
}

TEST(QuantizedCheckpoint, GroupsMustBeWhole) {
  const auto with_group = [](size_t column, int32_t group) {
    Layer layer(4);
    layer.group_of[column] = group;
    return layer.gptq(1);
  };
  const std::string ordered = gptq_config(4, false, true);
  expect_refusal(with_group(7, 2), ordered, {"DataCorrupted", "'X.g_idx'[7] is 2", "2 groups"});
  expect_refusal(with_group(7, -1), ordered, {"'X.g_idx'[7] is -1"});
  expect_refusal(with_group(7, 1), ordered, {"'X.g_idx' puts 31 columns into group 0"});
  Layer swapped(4);
  std::swap(swapped.group_of[0], swapped.group_of[63]);
  expect_refusal(swapped.gptq(1), gptq_config(4, false), {"'X.g_idx'", "no neighbours", "config.json"});
}

TEST(QuantizedCheckpoint, ZeroPointsMustBeWhatTheConfigSays) {
  expect_refusal(Layer(4).gptq(1), gptq_config(4, true), {"DataCorrupted", "'X.qzeros'", "zero points are 8"});
  // Version 2 writes 8 as 8.
  expect_refusal(Layer(4, true).gptq(1), gptq_config(4, true, false, "gptq_v2"), {"'X.qzeros' begins with 7"});
  Layer one_off(4, true);
  one_off.zeros[5] = 9;
  expect_refusal(one_off.gptq(1), gptq_config(4, true), {"'X.qzeros' holds 8 for group 1, output 2"});
}

TEST(QuantizedCheckpoint, ContradictionsAreRefused) {
  const RawTensors plain = {raw("X.weight", "F32", {1, 1}, std::vector<float>{1})};
  expect_refusal(plain, gptq_config(4, false), {"DataCorrupted", "no layer is quantized", "gptq"});
  RawTensors both = Layer(4).gptq(1);
  both.push_back(plain[0]);
  expect_refusal(both, gptq_config(4, false), {"DataCorrupted", "'X.qweight' and 'X.weight'"});
  expect_refusal(Layer(4).awq(),
                 R"({"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["X"]})",
                 {"DataCorrupted", "'X' is quantized", "says that it is not"});
}

// A config of an int4 scheme for layers named …X, an int8 scheme for those named …Y, and 8-bit floats for the others'
// class or nothing.
std::string three_schemes(const std::string& more_targets) {
  const auto group = [](const char* name, const std::string& targets, const char* format, const std::string& weights) {
    return fmt::format(R"("{}": {{"targets": [{}], "format": "{}", "weights": {{{}}}}})", name, targets, format,
                       weights);
  };
  const std::string groups_of_32 = R"(, "type": "int", "symmetric": false, "strategy": "group", "group_size": 32)";
  return R"({"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {)" +
         group("x", R"("re:.*X$")", "pack-quantized", R"("num_bits": 4)" + groups_of_32) + ", " +
         group("y", R"("re:.*Y$")", "int-quantized", R"("num_bits": 8)" + groups_of_32) + ", " +
         group("z", R"("Z")" + more_targets, "float-quantized",
               R"("num_bits": 8, "type": "float", "strategy": "channel")") +
         "}}";
}

RawTensors renamed(RawTensors tensors, const std::string& layer) {
  for (RawTensor& tensor : tensors) tensor.name = layer + tensor.name.substr(1);
  return tensors;
}

RawTensors joined(std::initializer_list<RawTensors> all) {
  RawTensors result;
  for (const RawTensors& tensors : all) result.insert(result.end(), tensors.begin(), tensors.end());
  return result;
}

const RawTensors kFloatsLayer = {raw("X.weight", "F8_E4M3", {2, 1}, std::vector<uint8_t>{0x38, 0x40}),
                                 raw("X.weight_scale", "F32", {2, 1}, std::vector<float>{1, 3})};

TEST(QuantizedCheckpoint, LayersMayHaveDifferentSchemes) {
  const Layer four(4), eight(8);
  const auto source = opened(joined({four.packed(true), renamed(eight.integers(), "a.Y"), renamed(kFloatsLayer, "Z")}),
                             three_schemes(""));
  ASSERT_EQ(source->tensors().size(), 3u);
  EXPECT_EQ(source->find("X.weight")->type_name, "int4_g32_f16_zeros");
  EXPECT_EQ(source->find("a.Y.weight")->type_name, "int8_g32_f16_zeros");
  EXPECT_EQ(source->find("Z.weight")->type_name, "fp8_e4m3_channel");
  EXPECT_EQ(values_of(source->get("X.weight")), four.values());
  EXPECT_EQ(values_of(source->get("a.Y.weight")), eight.values());
  EXPECT_EQ(values_of(source->get("Z.weight")), (std::vector<float>{1, 6}));
}

TEST(QuantizedCheckpoint, ALayerThatIsNotWhatItsSchemeSaysIsRefused) {
  expect_refusal(renamed(Layer(4).packed(true), "W"), three_schemes(""),
                 {"DataCorrupted", "'W' is quantized ('W.weight_packed' is there)", "no target of the schemes"});
  expect_refusal(renamed(Layer(4).packed(true), "Y"), three_schemes(""),
                 {"DataCorrupted", "'Y' should be compressed-tensors int-quantized as 'config_groups.y' says",
                  "'Y.weight_packed' is I32 there"});
  expect_refusal(renamed(Layer(8).integers(), "W"), three_schemes(R"(, "Linear")"),
                 {"DataCorrupted", "'W' should be compressed-tensors float-quantized", "'W.weight' is I8 there"});
  // 8 bits where the scheme has 4, a scale that is missing, and a layer that is not to be quantized.
  expect_refusal(Layer(8).packed(true), three_schemes(""), {"DataCorrupted", "'X.weight_shape' says", "4 bits"});
  expect_refusal({kFloatsLayer[0]}, three_schemes(R"(, "X")"),
                 {"NotFound", "'X' is quantized (compressed-tensors float-quantized as 'config_groups.z' says)",
                  "'X.weight_scale' is missing"});
  std::string ignoring = three_schemes("");
  ignoring.insert(ignoring.size() - 1, R"(, "ignore": ["X"])");
  expect_refusal(Layer(4).packed(true), ignoring, {"DataCorrupted", "'X' is quantized", "says that it is not"});
}

// The compressed-tensors package leaves a layer on the list plain and makes every other quantized, and transformers
// fills what a file does not have with noise.
TEST(QuantizedCheckpoint, LayersThatContradictTheIgnoreListOfCompressedTensorsAreRefused) {
  const auto config = [](const std::string& targets, const std::string& ignored) {
    std::string json = tensors_config("pack-quantized", 4, false);
    json.insert(json.find(R"("weights")"), R"("targets": [)" + targets + "], ");
    json.insert(json.size() - 1, R"(, "ignore": [)" + ignored + "]");
    return json;
  };
  const std::string linear = R"("Linear")", up = "m.layers.0.up";
  const RawTensors quantized = renamed(Layer(4).packed(true), up);
  for (const char* entry : {R"("m.layers.0.up")", R"("re:.*up$")", R"("re:m[.]layers[.]0")", R"("Linear")"}) {
    expect_refusal(quantized, config(linear, entry),
                   {"DataCorrupted", "'m.layers.0.up' is quantized ('m.layers.0.up.weight_packed' is there)",
                    "'quantization_config' says that it is not"});
  }
  // Neither the name of a module around it nor that of its last part is the layer's, nor is a pattern within its name.
  for (const char* entry : {R"("m.layers.0")", R"("up")", R"("re:layers")", R"("Embedding")", R"("lm_head")"}) {
    EXPECT_EQ(opened(quantized, config(linear, entry))->find("m.layers.0.up.weight")->type_name, "int4_g32_f16_zeros");
  }

  const std::vector<uint16_t> values(Layer::kOut * Layer::kIn, 0x3F80);
  const RawTensor plain = raw("m.layers.1.up.weight", "BF16", {Layer::kOut, Layer::kIn}, values);
  expect_refusal(joined({quantized, {plain}}), config(linear, R"("lm_head")"),
                 {"DataCorrupted", "'m.layers.1.up' is not quantized ('m.layers.1.up.weight' is BF16)",
                  "says that it is, as 'm.layers.0.up' is"});
  // A layer behind the model's last one predicts further tokens and is not made.
  QuantizationConfig of_one_layer = config_of(config(linear, R"("lm_head")"));
  of_one_layer.num_layers = 1;
  EXPECT_EQ(
      open_quantized(file_of(joined({quantized, {plain}})), of_one_layer)->find("m.layers.1.up.weight")->type_name,
      "BF16");
  for (const char* entry : {R"("m.layers.1.up")", R"("re:.*[.]1[.]up")", R"("x.layers.1.up")"}) {
    const auto source = opened(joined({quantized, {plain}}), config(linear, entry));
    EXPECT_EQ(source->find("m.layers.1.up.weight")->type_name, "BF16");
  }
  EXPECT_NE(opened(joined({quantized, {plain}}), config(R"("re:m[.]layers[.]0[.]")", "")), nullptr);
  // Whether a name that no quantized layer resembles is that of a layer, nothing says.
  const RawTensor gate = raw("m.layers.1.gate.weight", "BF16", {Layer::kOut, Layer::kIn}, values);
  EXPECT_NE(opened(joined({quantized, {gate}}), config(linear, "")), nullptr);
}

}  // namespace
}  // namespace eadem::io
