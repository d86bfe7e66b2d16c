// SPDX-License-Identifier: Apache-2.0
//
// The supported values of a quantization_config; all others are refused by name.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
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
  EXPECT_FALSE(plain.borrows_across_zeros);
  for (const char* writer : {R"("gptqmodel:1.4.0")", R"(["gptqmodel:1.4.0"])"})
    EXPECT_TRUE(parsed(gptq(fmt::format(R"(, "meta": {{"quantizer": {}}})", writer))).borrows_across_zeros);
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

// Groups in order: the name, its targets, a format of its own or "", and its weights.
struct Group {
  std::string name, targets, format, weights;
};
std::string groups(const std::string& format, const std::vector<Group>& all) {
  std::string text;
  for (const Group& group : all)
    text += (text.empty() ? "\"" : ", \"") + group.name + R"(": {"targets": [)" + group.targets + R"(], "weights": {)" +
            group.weights + "}" + (group.format.empty() ? "" : R"(, "format": ")" + group.format + "\"") + "}";
  return R"({"quant_method": "compressed-tensors", "format": ")" + format + R"(", "config_groups": {)" + text + "}}";
}

TEST(QuantizationConfig, SchemesThatAgreeAreOne) {
  const QuantizationConfig config =
      parsed(groups("int-quantized", {{"a", R"("Linear")", "", kInt8},
                                      {"b", R"("re:(x")", "int-quantized", kInt8 + R"(, "actorder": null)"}}));
  EXPECT_TRUE(config.schemes.empty());
  EXPECT_EQ(config.layout, Layout::integers);
  EXPECT_EQ(config.place, "config.json: 'quantization_config'");
  EXPECT_EQ(config.scheme_of("anything"), &config);
}

// A group's own format is that of its layers, whatever the config says.
TEST(QuantizationConfig, AFormatOfAGroupIsItsOwn) {
  EXPECT_EQ(parsed(groups("int-quantized", {{"a", R"("Linear")", "pack-quantized", kInt8}})).layout, Layout::packed);
  EXPECT_EQ(parsed(groups("mixed-precision", {{"a", R"("Linear")", "pack-quantized", kInt4}})).layout, Layout::packed);
}

TEST(QuantizationConfig, LayersHaveTheSchemeOfTheirTargets) {
  const QuantizationConfig config = parsed(groups(
      "mixed-precision",
      {{"rest", R"("Linear")", "int-quantized", kInt8},
       {"some", R"("re:.*self_attn\\.[qk]_proj$", "model.layers.1.mlp.up_proj", "re:.*down")", "pack-quantized", kInt4},
       {"floats", R"("re:.*(gate|down)_proj", "model.layers.0.mlp.down_proj",
                                                     "Embedding")",
        "float-quantized", kFp8}}));
  ASSERT_EQ(config.schemes.size(), 3u);
  const auto layout_of = [&](const char* layer) {
    const QuantizationScheme* scheme = config.scheme_of(layer);
    return scheme == nullptr ? std::optional<Layout>() : std::optional(scheme->layout);
  };
  EXPECT_EQ(layout_of("model.layers.0.self_attn.q_proj"), Layout::packed);
  EXPECT_EQ(layout_of("model.layers.0.self_attn.q_proj_2"), Layout::integers) << "the pattern ends at the name's end";
  EXPECT_EQ(layout_of("model.layers.0.self_attn.v_proj"), Layout::integers) << "by its class";
  EXPECT_EQ(layout_of("model.layers.1.mlp.up_proj"), Layout::packed) << "by its name";
  EXPECT_EQ(layout_of("model.layers.10.mlp.up_proj"), Layout::integers);
  EXPECT_EQ(layout_of("model.layers.0.mlp.gate_proj"), Layout::floats);
  EXPECT_EQ(layout_of("model.layers.0.mlp.down_proj"), Layout::floats) << "a name before patterns";
  EXPECT_EQ(layout_of("model.layers.1.mlp.down_proj"), Layout::floats) << "'(' sorts before 'd'";
  EXPECT_EQ(layout_of("model.layers.1.mlp.downwards"), Layout::packed);
  EXPECT_EQ(layout_of("model.embed_tokens"), Layout::floats);
  EXPECT_EQ(config.scheme_of("lm_head")->method, "compressed-tensors int-quantized as 'config_groups.rest' says");
  EXPECT_EQ(config.scheme_of("lm_head")->place, "config.json: 'quantization_config': 'config_groups.rest'");
}

// What the compressed-tensors package chose (tests/data/checkpoints/make_checkpoints.py).
TEST(QuantizationConfig, TargetsAreChosenAsThePackageChoosesThem) {
  const std::string path = std::string(EADEM_SOURCE_DIR) + "/tests/data/checkpoints/targets.json";
  const JsonValue rows = parse_json(read_file(path, 1 << 20), path);
  ASSERT_GT(rows.as_array().size(), 50u);
  for (const JsonValue& row : rows.as_array()) {
    std::vector<Group> all;
    for (const JsonValue& targets : row.as_array()[0].as_array()) {
      const std::string text = to_compact_json(targets);
      all.push_back({fmt::format("{}", all.size()), text.substr(1, text.size() - 2), "",
                     fmt::format(R"("num_bits": {}, "strategy": "group", "group_size": {})", all.size() < 2 ? 4 : 8,
                                 all.size() % 2 == 0 ? 32 : 64)});
    }
    const QuantizationConfig config = parsed(groups("pack-quantized", all));
    const QuantizationScheme* scheme = config.scheme_of(row.as_array()[1].as_string());
    const JsonValue& expected = row.as_array()[2];
    EXPECT_EQ(scheme == nullptr ? JsonValue() : JsonValue(scheme - config.schemes.data()), expected)
        << to_compact_json(row);
  }
}

// A pattern matches from the beginning of a name, not within it.
TEST(QuantizationConfig, LayersMayHaveNoScheme) {
  const QuantizationConfig config = parsed(groups(
      "pack-quantized", {{"a", R"("re:q_proj", "LlamaMLP")", "", kInt4}, {"b", R"("re:model.*k_proj")", "", kInt8}}));
  EXPECT_EQ(config.scheme_of("model.q_proj"), nullptr);
  EXPECT_EQ(config.scheme_of("q_proj_of_all")->bits, 4);
  EXPECT_EQ(config.scheme_of("model.k_proj")->bits, 8);
}

TEST(QuantizationConfig, OfTwoGroupsTheLaterOneHasATarget) {
  const QuantizationConfig config =
      parsed(groups("pack-quantized", {{"a", R"("Linear")", "", kInt4}, {"b", R"("Linear")", "", kInt8}}));
  EXPECT_EQ(config.scheme_of("x")->bits, 8);
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

// As compressed_tensors.utils.match has it: whole names, patterns from the beginning of names, and classes.
TEST(QuantizationConfig, IgnoresByNameAndPatternAsCompressedTensorsDoes) {
  const auto ignoring = [](const std::string& entries) {
    std::string json = groups("pack-quantized", {{"a", R"("Linear")", "", kInt4}});
    json.insert(json.size() - 1, R"(, "ignore": [)" + entries + "]");
    return parsed(json);
  };
  const QuantizationConfig config =
      ignoring(R"("lm_head", "model.layers.3.mlp", "re:.*q_proj", "re:layers[.]7[.]", "re:model[.]layers[.]8[.]")");
  EXPECT_TRUE(config.ignores("lm_head"));
  EXPECT_FALSE(config.ignores("model.lm_head"));
  EXPECT_FALSE(config.ignores("model.layers.3.mlp.up_proj"));
  EXPECT_TRUE(config.ignores("model.layers.0.self_attn.q_proj"));
  EXPECT_FALSE(config.ignores("model.layers.7.mlp.up_proj"));
  EXPECT_TRUE(config.ignores("model.layers.8.mlp.up_proj"));
  EXPECT_FALSE(config.ignores("model.layers.80.mlp.up_proj"));
  EXPECT_TRUE(ignoring(R"("Linear")").ignores("model.layers.3.mlp.up_proj"));
  EXPECT_FALSE(ignoring(R"("Linear")").ignores("model.embed_tokens"));
  EXPECT_FALSE(ignoring("").ignores("lm_head"));
  // A pattern that PCRE2 and Python read differently is not looked at.
  EXPECT_FALSE(ignoring(R"("re:(?i).*UP_PROJ")").ignores("model.layers.3.mlp.up_proj"));

  EXPECT_TRUE(config.may_be_plain("model.lm_head"));
  EXPECT_TRUE(config.may_be_plain("model.layers.3.mlp.up_proj"));
  EXPECT_FALSE(config.may_be_plain("model.layers.4.mlp.up_proj"));
  EXPECT_TRUE(config.may_be_plain("model.embed_tokens"));  // no target is for it
  EXPECT_TRUE(ignoring(R"("re:(?i).*UP_PROJ")").may_be_plain("model.layers.3.mlp.up_proj"));
  EXPECT_TRUE(ignoring(R"("language_model.model.layers.3.mlp.up_proj")")
                  .may_be_plain("model.language_model.layers.3.mlp.up_proj"));
  EXPECT_FALSE(ignoring(R"("language_model.model.layers.3.mlp.up_proj")")
                   .may_be_plain("model.language_model.layers.4.mlp.up_proj"));
  EXPECT_FALSE(ignoring("").may_be_plain("lm_head"));
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
      {tensors("int-quantized", kInt8, R"(, "format": "marlin-24")"),
       {"Unsupported", "group_0.format' is 'marlin-24'"}},
      {tensors("mixed-precision", kInt8), {"Unsupported", "'format' is 'mixed-precision'", "each states its own"}},
      {groups("mixed-precision",
              {{"a", R"("Linear")", "pack-quantized", kInt4}, {"b", R"("re:.*")", "int-quantized", kInt4}}),
       {"Unsupported", "'num_bits' is 4", "(of 'config_groups.b')"}},
      {groups("mixed-precision",
              {{"a", R"("Linear")", "pack-quantized", kInt4}, {"b", R"("re:(")", "int-quantized", kInt8}}),
       {"DataCorrupted", "a target of a scheme", "'('"}},
      {groups("pack-quantized", {{"a", R"("Linear")", "", kInt4}, {"b", R"("re:(?i).*Q_PROJ")", "", kInt8}}),
       {"Unsupported", "'targets' is 're:(?i).*Q_PROJ'", "such a pattern is not read"}},
      {groups("pack-quantized", {{"a", R"("Linear")", "", kInt4}, {"b", "7", "", kInt8}}),
       {"DataCorrupted", "config_groups.b.targets"}},
      {R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": {"weights": {)" +
           kInt4 + R"(}, "targets": ["Linear"]}, "b": {"weights": {)" + kInt8 + "}}}}",
       {"DataCorrupted", "config_groups.b.targets"}},
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
