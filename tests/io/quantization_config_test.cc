// SPDX-License-Identifier: Apache-2.0
//
// The supported values of a quantization_config; all others are refused by name.
#include <gtest/gtest.h>

#include "eadem/core/error.h"
#include "eadem/io/quantized/quantization_config.h"

namespace eadem::io {
namespace {

using Layout = QuantizationConfig::Layout;
using Scope = QuantizationConfig::Scope;

QuantizationConfig parsed(const std::string& quantization) {
  const auto config = QuantizationConfig::from_json(
      JsonReader::parse(R"({"quantization_config": )" + quantization + "}", "config.json"));
  EXPECT_TRUE(config.has_value());
  return config.value_or(QuantizationConfig{});
}

// "Kind: message", or "" when it is accepted.
std::string refusal(const std::string& quantization) {
  try {
    parsed(quantization);
    return "";
  } catch (const Error& error) {
    return std::string(error.kind()) + ": " + error.what();
  }
}

std::string gptq(const std::string& more) {
  return R"({"quant_method": "gptq", "bits": 4, "group_size": 32)" + more + "}";
}
std::string awq(const std::string& more) {
  return R"({"quant_method": "awq", "bits": 4, "group_size": 64)" + more + "}";
}
std::string fp8(const std::string& more) { return R"({"quant_method": "fp8")" + more + "}"; }
std::string tensors(const std::string& format, const std::string& weights, const std::string& scheme = "",
                    const std::string& more = "") {
  return R"({"quant_method": "compressed-tensors", "format": ")" + format +
         R"(", "config_groups": {"group_0": {"targets": ["Linear"], "weights": {)" + weights + "}" + scheme + "}}" +
         more + "}";
}
const std::string kInt4 = R"("num_bits": 4, "type": "int", "strategy": "group", "group_size": 32)";
const std::string kInt8 = R"("num_bits": 8, "type": "int", "strategy": "channel")";
const std::string kFp8 = R"("num_bits": 8, "type": "float", "strategy": "channel")";

TEST(QuantizationConfig, IsNothingWhereThereIsNone) {
  EXPECT_FALSE(QuantizationConfig::from_json(JsonReader::parse("{}", "config.json")));
  EXPECT_FALSE(QuantizationConfig::from_json(JsonReader::parse(R"({"quantization_config": null})", "config.json")));
}

TEST(QuantizationConfig, ReadsWhatTheMethodsSay) {
  const QuantizationConfig plain = parsed(gptq(R"(, "sym": true, "desc_act": false, "damp_percent": 0.1)"));
  EXPECT_EQ(plain.layout, Layout::gptq);
  EXPECT_EQ(plain.bits, 4);
  EXPECT_EQ(plain.scope, Scope::group);
  EXPECT_EQ(plain.group_size, 32);
  EXPECT_FALSE(plain.has_zeros);
  EXPECT_FALSE(plain.has_order);
  EXPECT_TRUE(plain.zeros_less_one);
  const QuantizationConfig ordered = parsed(
      R"({"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": false, "desc_act": true,
          "checkpoint_format": "gptq_v2", "dynamic": {"-:.*down_proj.*": {}}})");
  EXPECT_EQ(ordered.bits, 8);
  EXPECT_EQ(ordered.scope, Scope::row);
  EXPECT_TRUE(ordered.has_zeros);
  EXPECT_TRUE(ordered.has_order);
  EXPECT_FALSE(ordered.zeros_less_one);
  const QuantizationConfig of_awq = parsed(awq(R"(, "version": "GEMM", "modules_to_not_convert": ["visual"])"));
  EXPECT_EQ(of_awq.layout, Layout::awq);
  EXPECT_EQ(of_awq.group_size, 64);
  EXPECT_TRUE(of_awq.has_zeros);
  EXPECT_EQ(of_awq.ignored, std::vector<std::string>{"visual"});
  const QuantizationConfig blocks =
      parsed(fp8(R"(, "fmt": "e4m3", "weight_block_size": [128, 128], "activation_scheme": "dynamic")"));
  EXPECT_EQ(blocks.layout, Layout::floats);
  EXPECT_EQ(blocks.scope, Scope::block);
  EXPECT_EQ(blocks.floats, Fp8Format::Kind::e4m3);
  EXPECT_EQ(parsed(fp8("")).scope, Scope::unstated);
  const QuantizationConfig packed =
      parsed(tensors("pack-quantized", kInt4 + R"(, "symmetric": false, "actorder": "group")", "",
                     R"(, "ignore": ["lm_head"], "sparsity_config": {"format": "dense"}, "kv_cache_scheme": null)"));
  EXPECT_EQ(packed.layout, Layout::packed);
  EXPECT_TRUE(packed.has_zeros);
  EXPECT_TRUE(packed.has_order);
  EXPECT_FALSE(parsed(tensors("pack-quantized", kInt4 + R"(, "actorder": "weight")")).has_order);
  EXPECT_EQ(parsed(tensors("int-quantized", kInt8, R"(, "input_activations": {"dynamic": true})")).scope, Scope::row);
  EXPECT_EQ(parsed(tensors("float-quantized", kFp8)).layout, Layout::floats);
  EXPECT_EQ(parsed(tensors("naive-quantized", kInt8)).layout, Layout::integers);
}

TEST(QuantizationConfig, ReadsTheOldKey) {
  const auto config = QuantizationConfig::from_json(
      JsonReader::parse(R"({"compression_config": )" + tensors("float-quantized", kFp8) + "}", "config.json"));
  ASSERT_TRUE(config);
  EXPECT_EQ(config->place, "config.json: 'compression_config'");
}

TEST(QuantizationConfig, SchemesThatAgreeAreOne) {
  const auto two = [](const std::string& second) {
    return R"({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"a": {"weights": {)" +
           kInt8 + R"(}}, "b": {"weights": {)" + second + "}}}}";
  };
  EXPECT_EQ(refusal(two(kInt8)), "");
  EXPECT_NE(refusal(two(kInt4)).find("'a' and 'b' quantize weights in two ways"), std::string::npos);
}

TEST(QuantizationConfig, IgnoresByNameAndModule) {
  QuantizationConfig config;
  config.ignored = {"lm_head", "model.layers.3.mlp", "re:.*q_proj"};
  EXPECT_TRUE(config.ignores("lm_head"));
  EXPECT_TRUE(config.ignores("model.lm_head"));
  EXPECT_TRUE(config.ignores("model.layers.3.mlp.up_proj"));
  EXPECT_FALSE(config.ignores("model.layers.30.mlp.up_proj"));
  EXPECT_FALSE(config.ignores("my_lm_head"));
}

TEST(QuantizationConfig, WhatIsNotHonouredIsRefusedByName) {
  struct Case {
    std::string json;
    std::vector<const char*> words;
  };
  const std::vector<Case> cases = {
      {"7", {"DataCorrupted", "'quantization_config' is 7"}},
      {"{}", {"DataCorrupted", "'quant_method' is missing"}},
      {R"({"quant_method": "bitsandbytes"})", {"Unsupported", "'quant_method' is 'bitsandbytes'", "gptq, awq, fp8"}},
      {gptq(R"(, "colour": 1)"), {"Unsupported", "a key of gptq", "'colour'"}},
      {R"({"quant_method": "gptq", "bits": 3, "group_size": 32})", {"Unsupported", "'bits' is 3"}},
      {R"({"quant_method": "gptq", "bits": 4, "group_size": 0})", {"Unsupported", "'group_size' is 0"}},
      {R"({"quant_method": "gptq", "bits": 4, "group_size": 48})", {"Unsupported", "'group_size' is 48"}},
      {R"({"quant_method": "gptq", "bits": 4})", {"DataCorrupted", "'group_size' is missing"}},
      {gptq(R"(, "checkpoint_format": "marlin")"), {"Unsupported", "'checkpoint_format' is 'marlin'"}},
      {gptq(R"(, "is_marlin_format": true)"), {"Unsupported", "'is_marlin_format' is true"}},
      {gptq(R"(, "pack_dtype": "int8")"), {"Unsupported", "'pack_dtype' is 'int8'"}},
      {gptq(R"(, "dynamic": {"+:.*up": {"bits": 8}})"), {"Unsupported", "'dynamic.+:.*up'"}},
      {gptq(R"(, "rotation": "hadamard")"), {"Unsupported", "'rotation'"}},
      {R"({"quant_method": "awq", "bits": 8, "group_size": 64})", {"Unsupported", "'bits' is 8"}},
      {awq(R"(, "version": "gemv")"), {"Unsupported", "'version' is 'gemv'"}},
      {awq(R"(, "zero_point": false)"), {"Unsupported", "'zero_point' is false"}},
      {awq(R"(, "backend": "llm-awq")"), {"Unsupported", "'backend' is 'llm-awq'"}},
      {fp8(R"(, "activation_scheme": "static")"), {"Unsupported", "'activation_scheme' is 'static'"}},
      {fp8(R"(, "weight_block_size": [64, 64])"), {"Unsupported", "'weight_block_size' is [64, 64]"}},
      {fp8(R"(, "fmt": "e3m4")"), {"Unsupported", "'fmt' is 'e3m4'"}},
      {fp8(R"(, "expert_dtype": "fp6")"), {"Unsupported", "'expert_dtype' is 'fp6'", "fp4 and fp8"}},
      {fp8(R"(, "kv_cache_scheme": {"num_bits": 8})"), {"Unsupported", "'kv_cache_scheme'"}},
      {tensors("marlin-24", kInt4), {"Unsupported", "'format' is 'marlin-24'"}},
      {tensors("nvfp4-pack-quantized", kInt4), {"Unsupported", "'format' is 'nvfp4-pack-quantized'"}},
      {tensors("pack-quantized", kFp8), {"Unsupported", "'weights.type' is 'float'"}},
      {tensors("float-quantized", kInt8), {"Unsupported", "'weights.type' is 'int'"}},
      {tensors("int-quantized", kInt4), {"Unsupported", "'num_bits' is 4"}},
      {tensors("pack-quantized", R"("num_bits": 4, "strategy": "tensor_group", "group_size": 32)"),
       {"Unsupported", "'weights.strategy' is 'tensor_group'"}},
      {tensors("pack-quantized", R"("num_bits": 4, "strategy": "group", "group_size": 16)"),
       {"Unsupported", "'weights.group_size' is 16"}},
      {tensors("pack-quantized", R"("num_bits": 4, "strategy": "group")"), {"DataCorrupted", "group_size"}},
      {tensors("int-quantized", R"("num_bits": 8, "strategy": "tensor", "symmetric": false)"),
       {"Unsupported", "'weights.symmetric'"}},
      {tensors("float-quantized",
               R"("num_bits": 8, "type": "float", "strategy": "block", "block_structure": [1, 128])"),
       {"Unsupported", "'block_structure' is [1, 128]"}},
      {tensors("int-quantized", kInt8 + R"(, "dynamic": true)"), {"Unsupported", "'dynamic' is true"}},
      {tensors("int-quantized", kInt8 + R"(, "dynamic": "local")"), {"Unsupported", "'weights.dynamic'"}},
      {tensors("int-quantized", kInt8 + R"(, "actorder": "sideways")"), {"Unsupported", "'weights.actorder'"}},
      {tensors("int-quantized", kInt8 + R"(, "colour": 1)"), {"Unsupported", "'config_groups.group_0.weights.colour'"}},
      {tensors("int-quantized", kInt8, R"(, "input_activations": {"dynamic": false})"),
       {"Unsupported", "'input_activations.dynamic' is 'false'"}},
      {tensors("int-quantized", kInt8, R"(, "input_activations": {"num_bits": 8})"),
       {"Unsupported", "'input_activations.dynamic' is missing"}},
      {tensors("int-quantized", kInt8, R"(, "output_activations": {"num_bits": 8})"),
       {"Unsupported", "'output_activations'"}},
      {tensors("int-quantized", kInt8, R"(, "format": "pack-quantized")"), {"Unsupported", "group_0.format"}},
      {tensors("int-quantized", kInt8, "", R"(, "kv_cache_scheme": {"num_bits": 8})"),
       {"Unsupported", "'kv_cache_scheme'"}},
      {tensors("int-quantized", kInt8, "", R"(, "sparsity_config": {"format": "sparse-24-bitmask"})"),
       {"Unsupported", "'sparsity_config.format'"}},
      {tensors("int-quantized", kInt8, "", R"(, "transform_config": {"config_groups": {"R1": 1}})"),
       {"Unsupported", "'transform_config'"}},
      {tensors("int-quantized", kInt8, "", R"(, "quantization_status": "initialized")"),
       {"Unsupported", "'quantization_status'"}},
      {R"({"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {}})",
       {"DataCorrupted", "'config_groups'"}},
  };
  for (const Case& c : cases) {
    const std::string text = refusal(c.json);
    EXPECT_NE(text, "") << c.json;
    EXPECT_NE(text.find("config.json: "), std::string::npos) << text;
    for (const char* word : c.words) EXPECT_NE(text.find(word), std::string::npos) << text << " lacks " << word;
  }
}

}  // namespace
}  // namespace eadem::io
