// SPDX-License-Identifier: Apache-2.0
//
// GGUF files of Kimi Linear, Mistral 4 and DeepSeek V4 against files that the gguf package wrote as llama.cpp's
// converter lays them out (tests/data/golden/make_latent_gguf.py): the same keys, names, shapes and values. What else
// such files may hold, and what they cannot.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <set>

#include "eadem/engine/infer_engine.h"
#include "eadem/io/gguf.h"
#include "eadem/models/family.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/f32_error.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace latent_gguf_test {

namespace fs = std::filesystem;
using io::GgufMetadata;
using io::GgufValue;
using test::refusal;

const fs::path kGoldens = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden";

// A GGUF file in memory.
struct File {
  GgufMetadata metadata;
  std::map<std::string, Tensor> tensors;

  void set(const std::string& key, GgufValue value) {
    erase(key);
    metadata.emplace_back(key, std::move(value));
  }
  void set(const std::string& key, uint32_t value) { set(key, GgufValue::scalar(value)); }
  void erase(const std::string& key) {
    std::erase_if(metadata, [&](const auto& entry) { return entry.first == key; });
  }
};

std::map<std::string, GgufValue> sorted(const GgufMetadata& metadata) { return {metadata.begin(), metadata.end()}; }

// What Eadem writes of a model.
File written(const Checkpoint& checkpoint) {
  File file{.metadata = checkpoint.model->config()->to_gguf(), .tensors = {}};
  const ParameterReader reader(checkpoint);
  for (const auto& [name, recipe] : tensors_of(*checkpoint.model, CheckpointFormat::gguf))
    file.tensors[name] = evaluate(
        recipe, [&](const std::string& own) { return reader.read(own); }, name);
  return file;
}

std::vector<float> values_of(const Tensor& tensor) {
  return {tensor.view.as<float>(), tensor.view.as<float>() + tensor.view.num_elements()};
}

Tensor reshaped(const Tensor& tensor, const Shape& shape) {
  return Tensor(TensorView(tensor.view.data, tensor.dtype(), shape), tensor.storage);
}

Checkpoint golden(const std::string& name) { return open_checkpoint((kGoldens / name).string()); }
std::string package_file(const std::string& name) { return (kGoldens / name / "model-f32.gguf").string(); }

class LatentGguf : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_latent_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string save(const File& file) const {
    std::string path = (folder_ / "model.gguf").string();
    std::vector<io::NamedTensor> tensors;
    for (const auto& [name, tensor] : file.tensors) tensors.push_back({name, tensor.view});
    io::write_gguf(path, file.metadata, tensors);
    return path;
  }
  ModelConfig config_of(const File& file) const { return ModelConfig::from_gguf(*io::GgufFile::open(save(file))); }
  // The error of reading a file after a change.
  std::string refused(File file, const std::function<void(File&)>& change) const {
    change(file);
    return refusal([&] { config_of(file); });
  }

  // Logits of the golden's prompt.
  static std::vector<float> logits_of(const Checkpoint& checkpoint, const std::string& name) {
    engine::EngineOptions options;
    options.mode = HardwareMode::accuracy;
    options.max_logit_rows = options.max_num_batched_tokens = 160;
    const auto engine =
        engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), options);
    const Tensor prompt = io::open_weights((kGoldens / name / "expected.safetensors").string())->get("prompt");
    engine::InferEngine::Input input;
    input.input_ids.assign(prompt.view.as<int32_t>(), prompt.view.as<int32_t>() + prompt.view.num_elements());
    input.input_lengths = {static_cast<int32_t>(prompt.view.num_elements())};
    input.cache_lengths = {0};
    input.all_logits = true;
    engine->forward(input);
    return values_of(engine->logits());
  }

  // Logits within the error of f32.
  static void expect_exact(const std::vector<float>& actual, const std::string& name) {
    const auto expected = io::open_weights((kGoldens / name / "expected.safetensors").string());
    const std::vector<float> exact = values_of(expected->get("logits_f64")),
                             single = values_of(expected->get("logits"));
    ASSERT_EQ(actual.size(), exact.size());
    const auto of = [](const std::vector<float>& values) { return [&](size_t i) { return values[i]; }; };
    test::expect_f32_error(test::deviation(actual.size(), of(actual), of(exact)),
                           test::deviation(actual.size(), of(single), of(exact)), name);
  }

  fs::path folder_;
};

// The keys are those that llama.cpp reads of the architecture, and the groups and widths that it reads of all.
TEST_F(LatentGguf, KeysAreThoseOfTheArchitecture) {
  const std::set<std::string> shared = {"context_length",
                                        "embedding_length",
                                        "block_count",
                                        "feed_forward_length",
                                        "vocab_size",
                                        "attention.head_count",
                                        "attention.head_count_kv",
                                        "attention.key_length",
                                        "attention.value_length",
                                        "attention.key_length_mla",
                                        "attention.value_length_mla",
                                        "attention.kv_lora_rank",
                                        "attention.layer_norm_rms_epsilon",
                                        "rope.dimension_count",
                                        "leading_dense_block_count",
                                        "expert_count",
                                        "expert_used_count",
                                        "expert_feed_forward_length",
                                        "expert_shared_count",
                                        "expert_gating_func",
                                        "expert_weights_scale",
                                        "expert_group_count",
                                        "expert_group_used_count"};
  const auto expect_keys = [&](const char* name, const std::string& architecture, std::set<std::string> own) {
    own.insert(shared.begin(), shared.end());
    std::set<std::string> expected = {"general.architecture"}, actual;
    for (const std::string& key : own) expected.insert(architecture + "." + key);
    for (const auto& [key, value] : golden(name).model->config()->to_gguf())
      EXPECT_TRUE(actual.insert(key).second) << key << " twice";
    EXPECT_EQ(actual, expected);
  };
  expect_keys("kimi_linear", "kimi-linear", {"ssm.conv_kernel", "kda.head_dim"});
  expect_keys("mistral4_usual", "mistral4",
              {"attention.q_lora_rank", "attention.temperature_scale", "attention.temperature_length",
               "expert_weights_norm", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
               "rope.scaling.original_context_length", "rope.scaling.yarn_log_multiplier"});
}

class PackageFiles : public LatentGguf, public testing::WithParamInterface<const char*> {};

TEST_P(PackageFiles, HaveWhatIsWritten) {
  const auto expected = io::GgufFile::open(package_file(GetParam()));
  const File actual = written(golden(GetParam()));
  EXPECT_EQ(sorted(actual.metadata), sorted(expected->metadata()));
  ASSERT_EQ(actual.tensors.size(), expected->tensors().size());
  for (const io::WeightInfo& info : expected->tensors()) {
    ASSERT_TRUE(actual.tensors.contains(info.name)) << info.name;
    const Tensor own = actual.tensors.at(info.name), other = expected->get(info.name);
    ASSERT_EQ(to_string(own.view), to_string(other.view)) << info.name;
    if (!info.name.ends_with("ssm_a")) {
      EXPECT_EQ(std::memcmp(own.view.data, other.view.data, static_cast<size_t>(own.view.size_bytes())), 0)
          << info.name;
      continue;
    }
    // -exp(a): two libraries, each within a unit in the last place.
    for (int64_t i = 0; i < own.view.num_elements(); ++i)
      EXPECT_NEAR(own.view.as<float>()[i], other.view.as<float>()[i], 0x1p-22 * std::abs(other.view.as<float>()[i]));
  }
}

TEST_P(PackageFiles, HaveTheLogitsOfTransformers) {
  const Checkpoint gguf = open_checkpoint(package_file(GetParam()));
  const std::vector<float> logits = logits_of(gguf, GetParam());
  expect_exact(logits, GetParam());
  if (std::string_view(GetParam()) != "kimi_linear") {
    EXPECT_EQ(logits, logits_of(golden(GetParam()), GetParam()));
  }
}

TEST_P(PackageFiles, StateTheConfigurationOfTheDirectory) {
  ModelConfig config = *golden(GetParam()).model->config();
  const ModelConfig gguf = ModelConfig::from_gguf(*io::GgufFile::open(package_file(GetParam())));
  config.checkpoint_dtype.reset();  // which a GGUF file does not state, nor the ids of its tokenizer
  config.bos_token_id.clear();
  config.eos_token_id.clear();
  for (double ModelConfig::*number :
       {&ModelConfig::rms_norm_eps, &ModelConfig::attn_scale, &ModelConfig::stream_eps}) {  // f32 there
    EXPECT_EQ(static_cast<float>(config.*number), static_cast<float>(gguf.*number));
    config.*number = gguf.*number;
  }
  if (config.is_linear(0)) config.rope_style = gguf.rope_style;  // of what nothing rotates
  EXPECT_EQ(gguf, config);
}

INSTANTIATE_TEST_SUITE_P(Models, PackageFiles, testing::Values("kimi_linear", "mistral4_usual", "deepseek_v4_usual"));

// llama-quantize drops axes of 1 behind the last; older files have kv_b_proj whole, and heads of keys as attention
// without latents has them.
TEST_F(LatentGguf, OtherFormsOfKimiLinearMeanTheSame) {
  const Checkpoint plain = golden("kimi_linear");
  const ModelConfig& config = *plain.model->config();
  const File file = written(plain);
  const std::vector<float> expected = logits_of(open_checkpoint(save(file)), "kimi_linear");
  File other = file;
  other.tensors["blk.0.ssm_a"] = reshaped(other.tensors["blk.0.ssm_a"], {config.linear_key_heads, 1});
  for (const char* stream : {"q", "k", "v"}) {
    Tensor& taps = other.tensors[fmt::format("blk.0.ssm_conv1d_{}.weight", stream)];
    taps = reshaped(taps, {config.linear_key_heads * config.linear_key_dim, 1, config.linear_taps});
  }
  other.tensors.erase("blk.1.attn_k_b.weight");
  other.tensors.erase("blk.1.attn_v_b.weight");
  other.tensors["blk.1.attn_kv_b.weight"] = plain.weights->get("model.layers.1.self_attn.kv_b_proj.weight");
  const std::vector<int32_t> heads = {0, 3};
  other.set("kimi-linear.attention.head_count_kv", GgufValue::scalars(std::span<const int32_t>(heads)));
  // Of a published config.json's head_dim and rope_theta, which mean nothing.
  other.set("kimi-linear.attention.value_length", 72);
  other.set("kimi-linear.rope.freq_base", GgufValue::scalar(10000.0F));
  other.set("kimi-linear.expert_weights_norm", GgufValue::boolean(true));
  EXPECT_EQ(config_of(other), config_of(file));
  EXPECT_EQ(logits_of(open_checkpoint(save(other)), "kimi_linear"), expected);
  other.tensors["blk.0.ssm_a"] = reshaped(other.tensors["blk.0.ssm_a"], {1, config.linear_key_heads});
  EXPECT_HAS(refusal([&] { logits_of(open_checkpoint(save(other)), "kimi_linear"); }), "'blk.0.ssm_a' is [1, 3]");
}

TEST_F(LatentGguf, WhatKimiLinearsFilesCannotStateIsRefused) {
  const ModelConfig config = *golden("kimi_linear").model->config();
  const auto not_written = [&](const std::function<void(ModelConfig&)>& change) {
    ModelConfig changed = config;
    change(changed);
    return refusal([&] { changed.to_gguf(); });
  };
  EXPECT_EQ(not_written([](ModelConfig&) {}), "");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.attention_bias = true; }),
             "Unsupported: biases of attention, which GGUF's kimi-linear architecture cannot state");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.tie_word_embeddings = true; }), "one matrix for embeddings and logits");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.norm_topk_prob = false; }), "(moe_renormalize)");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.linear_key_heads = c.linear_value_heads = 5; }),
             "linear attention of 5 heads where attention has 3");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.mlp_only_layers = {1}; }), "layer 1 without experts behind one");

  const File file = written(golden("kimi_linear"));
  EXPECT_HAS(refused(file, [](File& f) { f.set("kimi-linear.expert_gating_func", 1); }),
             "'kimi-linear.expert_gating_func' is 1; only 2 is honoured");
  EXPECT_HAS(refused(file, [](File& f) { f.set("kimi-linear.expert_weights_norm", GgufValue::boolean(false)); }),
             "'kimi-linear.expert_weights_norm' is false; only true is honoured");
  EXPECT_HAS(refused(file, [](File& f) { f.set("kimi-linear.moe_latent_size", 4); }),
             "metadata 'kimi-linear.moe_latent_size' is not honoured");
  EXPECT_HAS(refused(file, [](File& f) { f.erase("kimi-linear.kda.head_dim"); }), "'kimi-linear.kda.head_dim'");
  const std::vector<int32_t> heads = {0, 0, 1};
  EXPECT_HAS(refused(file,
                     [&](File& f) {
                       f.set("kimi-linear.attention.head_count_kv",
                             GgufValue::scalars(std::span<const int32_t>(heads)));
                     }),
             "'kimi-linear.attention.head_count_kv' has 3 entries for 2 layers");
}

// One epsilon stands in the file for all norms.
TEST_F(LatentGguf, OtherNormsOfLatentsAreSaid) {
  ModelConfig config = *golden("kimi_linear").model->config();
  const auto notice = config.family().gguf_notice;
  ASSERT_NE(notice, nullptr);
  EXPECT_HAS(notice(config), "norms of latents have the epsilon 1e-06");
  config.rms_norm_eps = 1e-6;
  EXPECT_EQ(notice(config), "");
}

// Quantizing programs may keep gate and up of experts apart, as other architectures have them.
TEST_F(LatentGguf, ExpertsOfMistral4MayLieApart) {
  const Checkpoint plain = golden("mistral4_usual");
  File file = written(plain);
  const std::string fused = "blk.1.ffn_gate_up_exps.weight";
  const WeightRecipe gate = WeightRecipe::slice(fused, 1, 0, 8, 16), up = WeightRecipe::slice(fused, 1, 8, 8, 16);
  const auto read = [&](const std::string& name) { return file.tensors.at(name); };
  file.tensors["blk.1.ffn_gate_exps.weight"] = evaluate(gate, read, "the test");
  file.tensors["blk.1.ffn_up_exps.weight"] = evaluate(up, read, "the test");
  file.tensors.erase(fused);
  EXPECT_EQ(logits_of(open_checkpoint(save(file)), "mistral4_usual"), logits_of(plain, "mistral4_usual"));
}

// llama.cpp's converter leaves the growth of queries out, and so does what computes such a file.
TEST_F(LatentGguf, QueriesOfMistral4GrowAsTheFileSays) {
  const Checkpoint plain = golden("mistral4_usual");
  File file = written(plain);
  const auto original = static_cast<size_t>(plain.model->config()->rope_scaling.original_max_positions);
  const std::vector<float> growing = logits_of(plain, "mistral4_usual");
  file.erase("mistral4.attention.temperature_scale");
  file.erase("mistral4.attention.temperature_length");
  const Checkpoint still = open_checkpoint(save(file));
  EXPECT_EQ(still.model->config()->attn_scale, 0);
  const std::vector<float> logits = logits_of(still, "mistral4_usual");
  const size_t before = original * static_cast<size_t>(plain.model->config()->vocab_size);
  ASSERT_LT(before, logits.size());
  EXPECT_TRUE(std::equal(logits.begin(), logits.begin() + static_cast<std::ptrdiff_t>(before), growing.begin()));
  EXPECT_NE(logits, growing);
  const Checkpoint back = huggingface_form(still);
  EXPECT_EQ(logits_of(back, "mistral4_usual"), logits);

  file = written(plain);
  EXPECT_HAS(refused(file, [](File& f) { f.erase("mistral4.attention.temperature_length"); }),
             "'mistral4.attention.temperature_length'");
  file.set("mistral4.attention.temperature_length", 7);
  const ModelConfig other = config_of(file);
  EXPECT_EQ(other.floor_scale, 7);
  EXPECT_HAS(refusal([&] { other.to_json(); }), "queries that grow every 7 positions");
}

TEST_F(LatentGguf, WhatMistral4sFilesCannotStateIsRefused) {
  const ModelConfig config = *golden("mistral4_usual").model->config();
  const auto not_written = [&](const std::function<void(ModelConfig&)>& change) {
    ModelConfig changed = config;
    change(changed);
    return refusal([&] { changed.to_gguf(); });
  };
  EXPECT_EQ(not_written([](ModelConfig&) {}), "");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.attention_bias = true; }), "Unsupported: biases of attention");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.rope_style = kernels::RopeStyle::rotate_half; }), "rotation by halves");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.rms_norm_eps = 1e-5; }), "rms_norm_eps of 1e-05");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.rope_scaling.beta_fast = 16; }), "parameters of its own");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.rope_scaling.mscale = 0.5; }), "not one number");

  const File file = written(golden("mistral4_usual"));
  EXPECT_HAS(refused(file, [](File& f) { f.set("mistral4.expert_gating_func", 2); }),
             "'mistral4.expert_gating_func' is 2 (sigmoid); models of type mistral4 have 1 (softmax)");
  EXPECT_HAS(refused(file, [](File& f) { f.set("mistral4.rope.scaling.type", GgufValue::string("linear")); }),
             "'mistral4.rope.scaling.type' is not \"yarn\"");
  // DeepSeek's queries do not grow.
  File deepseek = written(golden("deepseek_v2"));
  deepseek.set("deepseek2.attention.temperature_scale", GgufValue::scalar(0.1F));
  EXPECT_HAS(refusal([&] { config_of(deepseek); }), "metadata 'deepseek2.attention.temperature_scale' is not honoured");
}

// Ratios may go on, a limit may stand for all layers, and a file may count a layer that it does not have, or has.
TEST_F(LatentGguf, OtherFormsOfDeepseekV4MeanTheSame) {
  const Checkpoint plain = golden("deepseek_v4_usual");
  const File file = written(plain);
  const std::vector<float> expected = logits_of(plain, "deepseek_v4_usual");
  File other = file;
  const std::vector<int32_t> ratios = {0, 4, 128, 0};
  other.set("deepseek4.attention.compress_ratios", GgufValue::scalars(std::span<const int32_t>(ratios)));
  other.set("deepseek4.swiglu_clamp_exp", GgufValue::scalar(1.0F));
  other.erase("deepseek4.swiglu_clamp_shexp");
  other.set("deepseek4.nextn_predict_layers", 1);
  other.set("deepseek4.embedding_length_out", 4 * 32);
  other.set("deepseek4.feed_forward_length", 32);
  EXPECT_EQ(config_of(other), config_of(file));
  EXPECT_EQ(logits_of(open_checkpoint(save(other)), "deepseek_v4_usual"), expected);

  // A layer that predicts a further token is not computed.
  other.set("deepseek4.block_count", 4);
  for (const auto& [name, tensor] : file.tensors)
    if (name.starts_with("blk.0.")) other.tensors["blk.3." + name.substr(6)] = tensor;
  other.tensors["blk.3.nextn.eh_proj.weight"] = file.tensors.at("output.weight");
  EXPECT_EQ(config_of(other), config_of(file));
  EXPECT_EQ(logits_of(open_checkpoint(save(other)), "deepseek_v4_usual"), expected);
  other.tensors.erase("blk.3.nextn.eh_proj.weight");
  EXPECT_EQ(config_of(other).num_hidden_layers, 4);
}

TEST_F(LatentGguf, WhatDeepseekV4sFilesCannotStateIsRefused) {
  const ModelConfig config = *golden("deepseek_v4_usual").model->config();
  const auto not_written = [&](const std::function<void(ModelConfig&)>& change) {
    ModelConfig changed = config;
    change(changed);
    return refusal([&] { changed.to_gguf(); });
  };
  EXPECT_EQ(not_written([](ModelConfig&) {}), "");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.tie_word_embeddings = true; }),
             "Unsupported: one matrix for embeddings and logits, which GGUF's deepseek4 architecture cannot state");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.pooled_stride = 12; }), "rows of 12 tokens, not 128");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.indexed_stride = 8; }),
             "rows that an indexer chooses of 8 tokens, not 4");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.hash_layers = {1}; }), "experts by token in layer 1");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.rope_scaling.attention_factor = 1.1; }), "parameters of its own");
  EXPECT_HAS(not_written([](ModelConfig& c) { c.rope_scaling.attention_factor.reset(); }), "parameters of its own");
  EXPECT_EQ(not_written([](ModelConfig& c) { c.rope_scaling.beta_fast = 16; }), "");
  ModelConfig streams = config;
  EXPECT_EQ(config.family().gguf_notice(streams), "");
  streams.streams = 3;
  EXPECT_HAS(config.family().gguf_notice(streams), "there are 3 streams");
}

TEST_F(LatentGguf, WhatDeepseekV4sFilesMustNotStateIsRefused) {
  const File file = written(golden("deepseek_v4_usual"));
  const auto number = [&](const char* key, uint32_t value) {
    return refused(file, [&](File& f) { f.set(std::string("deepseek4.") + key, value); });
  };
  EXPECT_HAS(number("expert_gating_func", 2), "'deepseek4.expert_gating_func' is 2; only 4 is honoured");
  EXPECT_HAS(number("attention.head_count_kv", 2), "'deepseek4.attention.head_count_kv' is 2; only 1 is honoured");
  EXPECT_HAS(number("attention.value_length", 8), "'deepseek4.attention.value_length' is 8; only 16 is honoured");
  EXPECT_HAS(number("expert_shared_count", 2), "'deepseek4.expert_shared_count' is 2; only 1 is honoured");
  EXPECT_HAS(number("embedding_length_out", 32), "'deepseek4.embedding_length_out' is 32; only 128 is honoured");
  EXPECT_HAS(number("nextn_predict_layers", 4), "'deepseek4.nextn_predict_layers' is u32 4");
  EXPECT_HAS(number("leading_dense_block_count", 1), "metadata 'deepseek4.leading_dense_block_count' is not honoured");
  EXPECT_HAS(number("attention.sliding_window", 0), "'deepseek4.attention.sliding_window'");
  EXPECT_HAS(number("attention.output_group_count", 3), "4 heads in 3 groups of the output");
  const auto list = [&]<typename T>(const char* key, std::vector<T> values) {
    return refused(
        file, [&](File& f) { f.set(std::string("deepseek4.") + key, GgufValue::scalars(std::span<const T>(values))); });
  };
  EXPECT_HAS(list("attention.compress_ratios", std::vector<int32_t>{0, 4}),
             "'deepseek4.attention.compress_ratios' has 2 entries for 3 layers");
  EXPECT_HAS(list("attention.compress_ratios", std::vector<int32_t>{0, 4, 12}),
             "has 12 for layer 2; known are 0, 4 and 128");
  EXPECT_HAS(list("swiglu_clamp_exp", std::vector<float>{1, 2, 1}), "'deepseek4.swiglu_clamp_exp' has 2; only one");
  EXPECT_HAS(list("swiglu_clamp_shexp", std::vector<float>{2, 2, 2}), "'deepseek4.swiglu_clamp_shexp' has 2; only one");
  EXPECT_HAS(list("swiglu_clamp_exp", std::vector<float>{0, 0, 0}), "'deepseek4.swiglu_clamp_exp' has 0; only one");
  EXPECT_HAS(list("swiglu_clamp_exp", std::vector<float>{}), "'deepseek4.swiglu_clamp_exp' is empty");
  EXPECT_HAS(refused(file, [](File& f) { f.set("deepseek4.expert_weights_norm", GgufValue::boolean(false)); }),
             "'deepseek4.expert_weights_norm' is false; only true is honoured");
  EXPECT_HAS(refused(file, [](File& f) { f.set("deepseek4.expert_weights_scale", GgufValue::scalar(-1.0F)); }),
             "'deepseek4.expert_weights_scale' is -1; expected a number above 0");
  EXPECT_HAS(refused(file, [](File& f) { f.set("deepseek4.rope.scaling.attn_factor", GgufValue::scalar(0.5F)); }),
             "'deepseek4.rope.scaling.attn_factor' is 0.5; only 1 is honoured");
  for (const char* key : {"hash_layer_count", "hyper_connection.count", "attention.compress_ratios", "swiglu_clamp_exp",
                          "attention.q_lora_rank", "attention.compress_rope_freq_base"})
    EXPECT_HAS(refused(file, [&](File& f) { f.erase(std::string("deepseek4.") + key); }), key);

  // A number of an expert that there is not.
  File wrong = file;
  Tensor& table = wrong.tensors["blk.0.ffn_gate_tid2eid.weight"];
  table.view.as<int32_t>()[5] = 6;
  EXPECT_HAS(refusal([&] { logits_of(open_checkpoint(save(wrong)), "deepseek_v4_usual"); }),
             "number 5 of 'blk.0.ffn_gate_tid2eid.weight' is 6; expected one of [0, 6)");
}

}  // namespace latent_gguf_test
}  // namespace eadem::models
