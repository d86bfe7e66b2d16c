// SPDX-License-Identifier: Apache-2.0
//
// Configurations of the Llama family as files state them: what they mean, what is refused, and by which words.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "eadem/io/gguf.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/config/llama_config.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/family.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace config_test {

using test::refusal;

namespace fs = std::filesystem;
using modules::RopeScaling;

constexpr const char* kGoldens[] = {"llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "yarn", "linear"};

std::string golden(const std::string& file) { return std::string(EADEM_SOURCE_DIR) + "/tests/data/golden/" + file; }

LlamaConfig read(const std::string& path) { return LlamaConfig::from_json(io::JsonReader::read(path)); }

LlamaConfig parse(const io::JsonValue& json) {
  return LlamaConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

// A small valid config that tests change one key of.
io::JsonValue small(const char* type = "llama") {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", type).set("vocab_size", 64).set("hidden_size", 32).set("intermediate_size", 48);
  json.set("num_hidden_layers", 2).set("num_attention_heads", 4).set("max_position_embeddings", 128);
  return json.set("num_key_value_heads", 4);
}

std::string refusal_of(const io::JsonValue& json) {
  return refusal([&] { parse(json); });
}

TEST(LlamaConfig, OldAndNewKeysMeanTheSame) {
  for (const std::string name : kGoldens)
    EXPECT_EQ(io::to_json(read(golden(name + "/config.json")).to_json()),
              io::to_json(read(golden(name + "/config.classic.json")).to_json()))
        << name;
}

TEST(LlamaConfig, WrittenConfigsReadBackTheSame) {
  for (const std::string name : kGoldens) {
    const LlamaConfig config = read(golden(name + "/config.json"));
    const LlamaConfig again = parse(config.to_json());
    EXPECT_EQ(again, config) << name;
    EXPECT_EQ(io::to_json(again.to_json()), io::to_json(config.to_json())) << name;
  }
}

TEST(LlamaConfig, GoldensHaveTheFieldsOfTheirFiles) {
  const LlamaConfig llama = read(golden("llama/config.json"));
  EXPECT_EQ(llama.vocab_size, 256);
  EXPECT_EQ(llama.hidden_size, 64);
  EXPECT_EQ(llama.intermediate_size, 56);
  EXPECT_EQ(llama.num_hidden_layers, 2);
  EXPECT_EQ(llama.num_attention_heads, 4);
  EXPECT_EQ(llama.num_key_value_heads, 2);
  EXPECT_EQ(llama.head_dim, 16);
  EXPECT_EQ(llama.rotary_dim, 16);
  EXPECT_EQ(llama.max_position_embeddings, 128);
  EXPECT_EQ(llama.rms_norm_eps, 1e-5);
  EXPECT_EQ(llama.checkpoint_dtype, DType::f32);
  EXPECT_EQ(llama.bos_token_id, std::vector<int64_t>{1});
  EXPECT_EQ(llama.eos_token_id, std::vector<int64_t>{2});
  EXPECT_FALSE(llama.attention_bias || llama.mlp_bias || llama.qk_norm || llama.tie_word_embeddings);

  const LlamaConfig llama31 = read(golden("llama31/config.json"));
  EXPECT_EQ(llama31.rope_scaling.kind, RopeScaling::Kind::llama3);
  EXPECT_EQ(llama31.rope_scaling.factor, 8.0);
  EXPECT_EQ(llama31.rope_scaling.original_max_positions, 32.0);
  EXPECT_TRUE(llama31.tie_word_embeddings);

  EXPECT_EQ(read(golden("mistral/config.json")).layer_windows, (std::vector<int64_t>{8, 8}));
  // qwen2: biases without a key that says so; a window that `use_sliding_window: false` switches off.
  const LlamaConfig qwen2 = read(golden("qwen2/config.classic.json"));
  EXPECT_TRUE(qwen2.attention_bias);
  EXPECT_FALSE(qwen2.attention_out_bias);
  EXPECT_EQ(qwen2.layer_windows, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(qwen2.head_dim, 12);  // hidden / heads
  EXPECT_TRUE(read(golden("qwen3/config.json")).qk_norm);
  EXPECT_EQ(read(golden("yarn/config.json")).rope_scaling.kind, RopeScaling::Kind::yarn);
  EXPECT_EQ(read(golden("linear/config.json")).rope_scaling.kind, RopeScaling::Kind::linear);
  EXPECT_EQ(read(golden("sharded_bf16/config.json")).checkpoint_dtype, DType::bf16);
}

TEST(LlamaConfig, AbsentKeysTakeTheDefaultsOfTransformers) {
  const LlamaConfig config = parse(small());
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.head_dim, 8);
  EXPECT_EQ(config.rms_norm_eps, 1e-6);
  EXPECT_EQ(config.rope_theta, 10000.0);
  EXPECT_EQ(config.layer_windows, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(parse(small("mistral")).layer_windows, (std::vector<int64_t>{4096, 4096}));
  EXPECT_EQ(parse(small("mistral").set("sliding_window", nullptr)).layer_windows, (std::vector<int64_t>{0, 0}));

  // An absent key is not null: MistralConfig has 8 key-value heads, Qwen2Config and Qwen3Config 32, and Qwen3Config
  // heads of 128.
  struct Case {
    const char* type;
    int64_t kv_heads, null_kv_heads, head_dim, null_head_dim, positions;
  };
  for (const Case& c : {Case{"llama", 64, 64, 4, 4, 2048}, Case{"mistral", 8, 64, 4, 4, 131072},
                        Case{"qwen2", 32, 64, 4, 4, 32768}, Case{"qwen3", 32, 64, 128, 4, 32768}}) {
    io::JsonValue::Object keys = small(c.type).as_object();
    std::erase_if(keys, [](const io::JsonMember& member) {
      return member.key == "num_key_value_heads" || member.key == "max_position_embeddings";
    });
    const io::JsonValue wide = io::JsonValue(keys).set("hidden_size", 256).set("num_attention_heads", 64);
    EXPECT_EQ(parse(wide).num_key_value_heads, c.kv_heads) << c.type;
    EXPECT_EQ(parse(wide).head_dim, c.head_dim) << c.type;
    EXPECT_EQ(parse(wide).max_position_embeddings, c.positions) << c.type;
    const LlamaConfig nulls = parse(io::JsonValue(wide).set("num_key_value_heads", nullptr).set("head_dim", nullptr));
    EXPECT_EQ(nulls.num_key_value_heads, c.null_kv_heads) << c.type;
    EXPECT_EQ(nulls.head_dim, c.null_head_dim) << c.type;
    if (c.kv_heads != 64) {
      EXPECT_HAS(refusal_of(io::JsonValue(keys)), "'num_key_value_heads' is missing; expected an integer that divides");
    }
  }
}

TEST(LlamaConfig, NullIdsAreNone) {
  const LlamaConfig config = parse(small().set("bos_token_id", nullptr).set("eos_token_id", nullptr));
  EXPECT_TRUE(config.bos_token_id.empty() && config.eos_token_id.empty());
}

// Ignored keys are listed with a reason, for eadem inspect; keys that are read are not.
TEST(LlamaConfig, IgnoredKeysHaveReasons) {
  io::JsonValue gptq = io::JsonValue::object().set("quant_method", "gptq").set("bits", 4).set("group_size", 32);
  const auto config = io::JsonReader::parse(
      io::to_json(small()
                      .set("use_cache", true)
                      .set("unsloth_version", "2025.3")
                      .set("rope_scaling",
                           io::JsonValue::object().set("type", "linear").set("factor", 2).set("finetuned", true))
                      .set("quantization_config", gptq.set("damp_percent", 0.1))),
      "config.json");
  LlamaConfig::from_json(config);
  std::map<std::string, IgnoredKey> keys;
  for (const IgnoredKey& key : ignored_keys(config)) {
    EXPECT_FALSE(key.reason.empty()) << key.path;
    EXPECT_TRUE(keys.emplace(key.path, key).second) << key.path;
  }
  for (const char* path :
       {"use_cache", "unsloth_version", "rope_scaling.finetuned", "quantization_config.damp_percent"})
    EXPECT_TRUE(keys.contains(path)) << path;
  for (const char* path : {"hidden_size", "rope_scaling", "quantization_config"}) EXPECT_FALSE(keys.contains(path));
  EXPECT_TRUE(keys["use_cache"].usual);
  EXPECT_FALSE(keys["unsloth_version"].usual);
}

TEST(LlamaConfig, WindowsPerLayer) {
  io::JsonValue qwen = small().set("model_type", "qwen2").set("sliding_window", 16).set("use_sliding_window", true);
  EXPECT_EQ(parse(io::JsonValue(qwen).set("max_window_layers", 1)).layer_windows, (std::vector<int64_t>{0, 16}));
  const io::JsonValue absent = small().set("model_type", "qwen3").set("use_sliding_window", true);
  EXPECT_EQ(parse(io::JsonValue(absent).set("max_window_layers", 1)).layer_windows, (std::vector<int64_t>{0, 4096}));
  const auto types = [&](const char* first, const char* second) {
    return io::JsonValue(qwen).set("layer_types", io::JsonValue::array().push_back(first).push_back(second));
  };
  const LlamaConfig mixed = parse(types("sliding_attention", "full_attention"));
  EXPECT_EQ(mixed.layer_windows, (std::vector<int64_t>{16, 0}));
  EXPECT_EQ(parse(mixed.to_json()).layer_windows, mixed.layer_windows);
  EXPECT_HAS(refusal_of(types("chunked_attention", "full_attention")), "'layer_types'");
  EXPECT_EQ(refusal_of(io::JsonValue(qwen).set("layer_types", nullptr)), "");
  EXPECT_HAS(refusal_of(types("sliding_attention", "full_attention").set("sliding_window", nullptr)),
             "'sliding_window'");
  EXPECT_HAS(refusal_of(types("sliding_attention", "full_attention").set("use_sliding_window", false)),
             "'use_sliding_window' is false; expected true");
  EXPECT_HAS(refusal_of(small().set("sliding_window", 16)), "'sliding_window' is 16");
}

TEST(LlamaConfig, BothRopeKeysMustAgree) {
  io::JsonValue rope = io::JsonValue::object();
  rope.set("rope_type", "linear").set("factor", 2.0).set("rope_theta", 500.0);
  const LlamaConfig both = parse(small().set("rope_parameters", rope).set("rope_scaling", rope));
  EXPECT_EQ(both.rope_scaling.factor, 2.0);
  EXPECT_EQ(both.rope_theta, 500.0);
  io::JsonValue other = rope;
  other.set("factor", 4.0);
  EXPECT_HAS(refusal_of(small().set("rope_parameters", rope).set("rope_scaling", other)), "disagree");
  EXPECT_HAS(refusal_of(small().set("rope_scaling", io::JsonValue(rope).set("rope_type", "ntk"))), "\"ntk\"");
}

// transformers reads the older key only where the newer one is absent.
TEST(LlamaConfig, RopeTypeStandsBeforeType) {
  io::JsonValue rope = io::JsonValue::object();
  rope.set("rope_type", "linear").set("factor", 2.0).set("type", "yarn");
  const auto config = io::JsonReader::parse(io::to_json(small().set("rope_scaling", rope)), "config.json");
  EXPECT_EQ(LlamaConfig::from_json(config).rope_scaling.kind, modules::RopeScaling::Kind::linear);
  const std::vector<IgnoredKey> keys = ignored_keys(config);
  EXPECT_TRUE(std::any_of(keys.begin(), keys.end(), [](const auto& key) { return key.path == "rope_scaling.type"; }));
}

// It begins beyond max_position_embeddings, where no sequence is.
TEST(LlamaConfig, DynamicScalingChangesNothingWithinTheContext) {
  const io::JsonValue rope = io::JsonValue::object().set("type", "dynamic").set("factor", 4.0);
  const LlamaConfig config = parse(small().set("rope_scaling", rope));
  EXPECT_EQ(config.rope_scaling.kind, modules::RopeScaling::Kind::dynamic);
  EXPECT_EQ(parse(config.to_json()), config);
  for (const auto& [key, value] : config.to_gguf()) EXPECT_FALSE(key.find("rope.scaling") != std::string::npos) << key;
}

TEST(LlamaConfig, ScalingThatCannotBeComputedIsRefused) {
  LlamaConfig config = read(golden("yarn/config.json"));
  const auto refused = [&](auto&& change) {
    LlamaConfig changed = config;
    change(changed);
    return refusal([&] { changed.validate("model.gguf"); });
  };
  EXPECT_EQ(refused([](LlamaConfig&) {}), "");
  EXPECT_HAS(refused([](LlamaConfig& c) { c.rope_scaling.factor = 0; }), "model.gguf: the factor of rope scaling is 0");
  EXPECT_HAS(refused([](LlamaConfig& c) { c.rope_scaling.attention_factor = -1; }), "attention factor");
  EXPECT_HAS(refused([](LlamaConfig& c) { c.rope_theta = 1; }), "rope_theta above 1");
}

// transformers passes the factor over for these types. Their config.json cannot state a part of a head.
TEST(LlamaConfig, PartialRotaryFactorsAreIgnored) {
  const auto rope = io::JsonValue::object().set("rope_theta", 10000.0).set("partial_rotary_factor", 0.5);
  EXPECT_EQ(parse(small().set("rope_parameters", rope)).rotary_dim, 8);
  LlamaConfig config = parse(small().set("partial_rotary_factor", 0.5));
  EXPECT_EQ(config.rotary_dim, 8);
  config.rotary_dim = 4;
  EXPECT_HAS(refusal([&] { config.to_json(); }), "type llama cannot state a rotation of a part of each head");
}

// transformers has these biases built in: a key that says otherwise would be honoured here and not there.
TEST(LlamaConfig, BiasesThatAModelTypeDoesNotReadAreRefused) {
  const auto with = [](const char* type, const char* key, bool value) {
    return small().set("model_type", type).set(key, value);
  };
  for (const char* type : {"llama", "qwen3"}) {
    const LlamaConfig config = parse(with(type, "attention_bias", true));
    EXPECT_TRUE(config.attention_bias && config.attention_out_bias) << type;
    EXPECT_EQ(parse(config.to_json()), config) << type;
  }
  EXPECT_TRUE(parse(with("qwen2", "attention_bias", true)).attention_bias);
  EXPECT_HAS(refusal_of(with("qwen2", "attention_bias", false)), "'attention_bias' is false");
  EXPECT_HAS(refusal_of(with("mistral", "attention_bias", true)), "'attention_bias' is true");
  EXPECT_TRUE(parse(with("llama", "mlp_bias", true)).mlp_bias);
  for (const char* type : {"mistral", "qwen2", "qwen3"}) {
    EXPECT_FALSE(parse(with(type, "mlp_bias", false)).mlp_bias);
    EXPECT_HAS(refusal_of(with(type, "mlp_bias", true)), "Unsupported: config.json: 'mlp_bias' is true");
  }
}

// A GGUF file can state models that no config.json can.
TEST(LlamaConfig, WhatCannotBeWrittenIsRefused) {
  const auto refused = [](const char* type, auto&& change) {
    LlamaConfig config = parse(small().set("model_type", type));
    change(config);
    EXPECT_FALSE(io::to_json(config.describe()).empty());
    return refusal([&] { config.to_json(); });
  };
  using Config = LlamaConfig;
  EXPECT_EQ(refused("llama", [](Config&) {}), "");
  EXPECT_HAS(refused("llama", [](Config& c) { c.rope_style = kernels::RopeStyle::interleaved; }), "interleaved");
  EXPECT_HAS(refused("llama", [](Config& c) { c.rope_divisors = {1, 1, 1, 1}; }), "rope divisors");
  EXPECT_HAS(refused("llama", [](Config& c) { c.attention_bias = true; }), "without one of o");
  EXPECT_HAS(refused("qwen2", [](Config& c) { c.attention_out_bias = true; }), "a bias of o");
  EXPECT_HAS(refused("qwen2", [](Config& c) { c.attention_bias = false; }), "q, k and v without biases");
  EXPECT_HAS(refused("mistral", [](Config& c) { c.mlp_bias = true; }), "biases of the MLP");
  EXPECT_HAS(refused("llama", [](Config& c) { c.qk_norm = true; }), "norms of q and k");
  EXPECT_HAS(refused("llama",
                     [](Config& c) {
                       c.layer_windows = {8, 8};
                     }),
             "of type llama cannot state attention windows");
  EXPECT_HAS(refused("mistral", [](Config& c) { c.layer_windows = {8, 4}; }), "of several lengths");
}

TEST(LlamaConfig, RefusesUnknownKeysByName) {
  const std::string one = refusal_of(small().set("attn_logit_softcap", 30.0));
  EXPECT_EQ(one, "Unsupported: config.json: a key is not honoured: 'attn_logit_softcap'");
  io::JsonValue rope = io::JsonValue::object();
  rope.set("rope_type", "linear").set("factor", 2.0).set("stretch", 1);
  const std::string two = refusal_of(small().set("num_experts", 8).set("rope_scaling", rope));
  EXPECT_HAS(two, "Unsupported: config.json: keys are not honoured: ");
  EXPECT_HAS(two, "'num_experts'");
  EXPECT_HAS(two, "'rope_scaling.stretch'");
}

TEST(LlamaConfig, RefusalsNameFileKeyAndValue) {
  struct Case {
    const char* key;
    io::JsonValue value;
    const char* kind;
    const char* words;
  };
  for (const Case& c : {Case{"hidden_size", 0, "DataCorrupted", "'hidden_size' is 0"},
                        Case{"hidden_size", "32", "DataCorrupted", "'hidden_size' is \"32\""},
                        Case{"num_hidden_layers", -1, "DataCorrupted", "'num_hidden_layers' is -1"},
                        Case{"num_hidden_layers", int64_t{1} << 40, "DataCorrupted", "'num_hidden_layers'"},
                        Case{"num_attention_heads", 64, "InvalidArgument", "head_dim is 0"},
                        Case{"head_dim", 7, "InvalidArgument", "7 of 7 head dimensions"},
                        Case{"eos_token_id", 64, "InvalidArgument", "eos_token_id 64 is outside"},
                        Case{"hidden_act", "mish", "Unsupported", "'hidden_act' is \"mish\""},
                        Case{"attention_dropout", 0.5, "Unsupported", "'attention_dropout' is 0.5"},
                        Case{"rope_interleaved", true, "Unsupported", "'rope_interleaved' is true; only false"},
                        Case{"temperature", 0.7, "Unsupported", "'temperature' is 0.7; only 1 is honoured"},
                        Case{"pruned_heads", io::JsonValue::object().set("0", 1), "Unsupported", "only {} is honoured"},
                        Case{"num_key_value_heads", 3, "InvalidArgument", "4 attention heads do not divide into 3"},
                        Case{"quantization_config", io::JsonValue::object().set("quant_method", "spqr"), "Unsupported",
                             "'quantization_config': 'quant_method' is 'spqr'"}}) {
    const std::string text = refusal_of(small().set(c.key, c.value));
    EXPECT_TRUE(text.starts_with(std::string(c.kind) + ": config.json: ")) << c.key << ": " << text;
    EXPECT_HAS(text, c.words);
  }
}

// The largest config that is accepted has sizes that fit 64 bits.
TEST(LlamaConfig, CountsDoNotOverflow) {
  const int64_t huge = int64_t{1} << 31;
  int64_t loaded = 0;
  for (int64_t hidden :
       {int64_t{1} << 12, int64_t{1} << 13, int64_t{1} << 16, int64_t{1} << 18, int64_t{1} << 20, huge})
    for (int64_t wide : {int64_t{1} << 20, int64_t{1} << 26, int64_t{1} << 28, int64_t{1} << 30, huge}) {
      io::JsonValue json = small().set("hidden_size", hidden).set("intermediate_size", wide).set("vocab_size", wide);
      json.set("num_hidden_layers", 4096).set("num_attention_heads", 16384).set("head_dim", 65536);
      json.set("num_key_value_heads", 16384);
      LlamaConfig config;
      if (!refusal([&] { config = parse(json); }).empty()) continue;
      ++loaded;
      const double exact =
          2.0 * static_cast<double>(wide) * static_cast<double>(hidden) +
          4096.0 * static_cast<double>(hidden) * (4.0 * 16384.0 * 65536.0 + 3.0 * static_cast<double>(wide));
      EXPECT_NEAR(static_cast<double>(config.num_parameters()) / exact, 1.0, 1e-6) << hidden << " x " << wide;
    }
  EXPECT_GT(loaded, 0);
}

TEST(AutoModel, UnknownArchitectureListsWhatThereIs) {
  const std::string text =
      refusal([] { model_from_config(io::JsonReader::parse(R"({"model_type": "mamba"})", "config.json")); });
  EXPECT_HAS(text, "Unsupported: config.json: ");
  EXPECT_HAS(text, "'mamba'");
  for (const char* type : {"llama", "mistral", "qwen2", "qwen3"}) EXPECT_HAS(text, type);
  EXPECT_HAS(refusal([] { model_from_config(io::JsonReader::parse("{}", "config.json")); }), "'model_type'");
  EXPECT_HAS(refusal([] { model_from_config(std::string("/nowhere/config.json")); }), "NotFound: /nowhere/config.json");
}

// Configs of many architectures, and configs spoiled in one place. Each is a model, or refused by name.
TEST(AutoModel, HostileConfigsLoadOrAreRefusedByName) {
  const fs::path folder = fs::path(EADEM_SHARED_DATA) / "models/random/mlxd-fixtures";
  if (!fs::exists(folder)) GTEST_SKIP() << folder << " is absent";
  int count = 0;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const fs::path file = entry.path() / "config.json";
    if (!entry.path().filename().string().starts_with("model_config") || !fs::exists(file)) continue;
    ++count;
    try {
      const std::shared_ptr<const Model> model = model_from_config(file.string());
      EXPECT_GT(model->spec().num_parameters, 0) << file;
      EXPECT_FALSE(io::to_json(model->config_json()).empty()) << file;
    } catch (const Error& error) {
      EXPECT_STRNE(error.kind(), "Error") << file;
      EXPECT_EQ(std::string(error.what()).rfind(file.string(), 0), 0u) << error.what();
    } catch (const std::exception& error) {
      ADD_FAILURE() << file << ": " << error.what();
    }
  }
  EXPECT_GT(count, 50);
}

void expect_config_of_gguf(const std::string& path) {
  SCOPED_TRACE(path);
  const auto file = std::dynamic_pointer_cast<const io::GgufFile>(io::open_weights(path));
  ASSERT_NE(file, nullptr);
  const LlamaConfig config = LlamaConfig::from_gguf(*file);
  EXPECT_EQ(config.rope_style, kernels::RopeStyle::interleaved);
  // The sizes that the tensors have.
  const auto shape = [&](const std::string& tensor) { return file->find(tensor)->shape; };
  EXPECT_EQ(shape("token_embd.weight"), (Shape{config.vocab_size, config.hidden_size}));
  EXPECT_EQ(shape("blk.0.attn_q.weight"), (Shape{config.num_attention_heads * config.head_dim, config.hidden_size}));
  EXPECT_EQ(shape("blk.0.attn_k.weight"), (Shape{config.kv_dim(), config.hidden_size}));
  EXPECT_EQ(shape("blk.0.ffn_up.weight"), (Shape{config.intermediate_size, config.hidden_size}));
  int64_t elements = 0;
  const Decoder model(config);
  for (const io::WeightInfo& info : file->tensors())
    if (!model.may_ignore(info.name)) elements += info.shape.num_elements();
  EXPECT_EQ(config.num_parameters(), elements);
  EXPECT_HAS(refusal([&] { config.to_json(); }), "Unsupported");
}

TEST(LlamaConfig, FromGguf) {
  expect_config_of_gguf(std::string(EADEM_SOURCE_DIR) + "/tests/data/stories260K/stories260K.gguf");
}

TEST(LlamaConfig, FromSharedGguf) {
  const fs::path folder = fs::path(EADEM_SHARED_DATA) / "models";
  if (!fs::exists(folder)) GTEST_SKIP() << folder << " is absent";
  for (const char* name : {"stories260K/tinyllamas-stories-260k-f32.crabml.gguf", "random/llama-2-tiny-random.gguf"})
    expect_config_of_gguf((folder / name).string());
}

// GGUF files have one name for each: without `output.weight` the embedding is the head; nothing stands in for it.
TEST(LlamaConfig, TiedInGgufWithoutAHead) {
  std::string pattern = (fs::temp_directory_path() / "eadem_gguf_XXXXXX").string();
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const fs::path folder = pattern;
  const Tensor matrix = Tensor::on_host(DType::f32, Shape{64, 32});
  std::fill_n(matrix.view.as<float>(), 64 * 32, 0.0f);
  const auto config_of = [&](std::initializer_list<const char*> names) {
    std::vector<io::NamedTensor> tensors;
    for (const char* name : names) tensors.push_back({name, matrix.view});
    const std::string path = (folder / "model.gguf").string();
    const auto number = [](uint32_t value) { return io::GgufValue::scalar(value); };
    io::write_gguf(path,
                   {{"general.architecture", io::GgufValue::string("llama")},
                    {"llama.attention.layer_norm_rms_epsilon", io::GgufValue::scalar(1e-5f)},
                    {"llama.block_count", number(1)},
                    {"llama.embedding_length", number(32)},
                    {"llama.feed_forward_length", number(48)},
                    {"llama.attention.head_count", number(4)},
                    {"llama.context_length", number(128)}},
                   tensors);
    return LlamaConfig::from_gguf(*io::GgufFile::open(path));
  };
  EXPECT_TRUE(config_of({"token_embd.weight"}).tie_word_embeddings);
  EXPECT_FALSE(config_of({"token_embd.weight", "output.weight"}).tie_word_embeddings);
  EXPECT_HAS(refusal([&] { config_of({"output.weight"}); }), "model.gguf: no matrix 'token_embd.weight'");
  fs::remove_all(folder);
}

TEST(Llama, GgufNames) {
  EXPECT_EQ(gguf_name("model.embed_tokens.weight"), "token_embd.weight");
  EXPECT_EQ(gguf_name("model.layers.12.self_attn.k_norm.weight"), "blk.12.attn_k_norm.weight");
  EXPECT_EQ(gguf_name("model.layers.0.mlp.down_proj.bias"), "blk.0.ffn_down.bias");
  EXPECT_EQ(refusal([] { gguf_name("model.layers.0.router.weight"); }),
            "InvalidArgument: 'model.layers.0.router.weight' has no GGUF name");
}

}  // namespace config_test
}  // namespace eadem::models
