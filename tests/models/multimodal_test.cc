// SPDX-License-Identifier: Apache-2.0
//
// The text parts of multimodal checkpoints. Their logits are compared with the whole models' in
// tests/engine/golden_test.cc.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/config/model_config.h"
#include "eadem/models/multimodal/text_part.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

namespace fs = std::filesystem;

std::string golden(const char* folder) { return (fs::path(EADEM_SOURCE_DIR) / "tests/data/golden" / folder).string(); }

std::shared_ptr<const Model> model_of(const char* json) {
  return model_from_config(io::JsonReader::parse(json, "config.json"));
}

class MultimodalFiles : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_multimodal_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
  }
  void TearDown() override { fs::remove_all(folder_); }

  // A copy of a golden whose tensors have other names and whose config.json is another text.
  Checkpoint copy(const char* name, const std::function<std::string(std::string)>& renamed, const std::string& config) {
    const auto weights = io::open_weights(golden(name));
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    for (const io::WeightInfo& info : weights->tensors()) {
      kept.push_back(weights->get(info.name));
      tensors.push_back({renamed(info.name), kept.back().view});
    }
    io::write_safetensors((folder_ / "model.safetensors").string(), tensors, {});
    io::write_file_atomically((folder_ / "config.json").string(), config);
    return open_checkpoint(folder_.string());
  }

  fs::path folder_;
};

void expect_same_parameters(const Checkpoint& a, const Checkpoint& b) {
  const ParameterReader x(a), y(b);
  ASSERT_FALSE(a.model->parameters().empty());
  for (const ParameterInfo& parameter : a.model->parameters()) {
    const Tensor left = x.read(parameter.name), right = y.read(parameter.name);
    ASSERT_EQ(left.view.size_bytes(), right.view.size_bytes()) << parameter.name;
    EXPECT_EQ(std::memcmp(left.view.data, right.view.data, static_cast<size_t>(left.view.size_bytes())), 0)
        << parameter.name;
  }
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  if (const size_t at = text.find(from); at != std::string::npos) text.replace(at, from.size(), to);
  return text;
}

std::string config_text(const char* name) {
  return io::to_json(io::JsonReader::read(golden(name) + "/config.json").value());
}

TEST(Multimodal, SaysWhatIsLeftOut) {
  const Checkpoint checkpoint = open_checkpoint(golden("gemma3_multimodal"));
  EXPECT_EQ(checkpoint.model->info().architecture, "gemma3_text");
  EXPECT_HAS(checkpoint.notice, "only the text part of this gemma3 model is read");
  EXPECT_HAS(checkpoint.notice, "multi_modal_projector, vision_tower");
  const auto ignored = [&](const char* path) {
    return std::any_of(checkpoint.ignored_keys.begin(), checkpoint.ignored_keys.end(),
                       [&](const IgnoredKey& key) { return key.path == path; });
  };
  EXPECT_TRUE(ignored("vision_config") && ignored("image_token_index") && ignored("use_cache"));
  EXPECT_FALSE(ignored("hidden_size"));
  EXPECT_EQ(open_checkpoint(golden("gemma3")).notice, "");
  const Checkpoint llama4 = open_checkpoint(golden("llama4_multimodal"));
  EXPECT_EQ(llama4.model->info().architecture, "llama4_text");
  EXPECT_HAS(llama4.notice, "multi_modal_projector, vision_model");
}

// transformers has saved the same tensors under several names.
TEST_F(MultimodalFiles, AllSpellingsOfNamesAreRead) {
  const Checkpoint gemma = open_checkpoint(golden("gemma3_multimodal"));
  const auto moved = [](std::string name) {
    return replaced(replaced(std::move(name), "language_model.model.", "model.language_model."), "vision_tower.",
                    "model.vision_tower.");
  };
  expect_same_parameters(gemma, copy("gemma3_multimodal", moved, config_text("gemma3_multimodal")));
  const Checkpoint qwen = open_checkpoint(golden("qwen3_vl_multimodal"));
  const auto bare = [](std::string name) {
    return replaced(replaced(std::move(name), "model.language_model.", "model."), "model.visual.", "visual.");
  };
  expect_same_parameters(qwen, copy("qwen3_vl_multimodal", bare, config_text("qwen3_vl_multimodal")));
}

// A config.json that does not say whether the head is tied: the files have one or not.
TEST_F(MultimodalFiles, TheHeadIsTiedWhereThereIsNone) {
  const auto unchanged = [](std::string name) { return name; };
  for (const char* name : {"gemma3_multimodal", "mistral3_multimodal"}) {
    const bool tied = std::string_view(name).starts_with("gemma3");
    io::JsonValue config = io::JsonValue::object();
    const io::JsonReader stated = io::JsonReader::read(golden(name) + "/config.json");
    for (const io::JsonMember& member : stated.value().as_object())
      if (member.key != "tie_word_embeddings") config.set(member.key, member.value);
    config.set("tie_word_embeddings", nullptr);
    EXPECT_EQ(copy(name, unchanged, io::to_json(config)).model->info().tied, tied) << name;
    expect_same_parameters(open_checkpoint(golden(name)), copy(name, unchanged, io::to_json(config)));
  }
}

// transformers ties no head of these types, though their configurations may say so.
TEST_F(MultimodalFiles, SomeTypesTieNothing) {
  const Checkpoint golden_model = open_checkpoint(golden("mistral3_multimodal"));
  for (const char* type : {"voxtral", "qwen2_audio", "llama4", "audioflamingo3", "musicflamingo"}) {
    const io::JsonReader stated = io::JsonReader::read(golden("mistral3_multimodal") + "/config.json");
    io::JsonValue config = io::parse_json(io::to_json(stated.value()), type);
    config.set("model_type", type).set("tie_word_embeddings", true);
    const Checkpoint other = copy(
        "mistral3_multimodal", [](std::string name) { return name; }, io::to_json(config));
    EXPECT_FALSE(other.model->info().tied) << type;
    expect_same_parameters(golden_model, other);
  }
}

// The configuration of a published Gemma 3 of 4 billion parameters, which leaves the most to transformers' defaults.
TEST(Multimodal, SizesThatAreNotStatedAreThoseOfTransformers) {
  const auto model = model_of(R"({"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999,
      "eoi_token_index": 256000, "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02,
      "mm_tokens_per_image": 256, "model_type": "gemma3",
      "text_config": {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
                      "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                      "sliding_window": 1024},
      "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0",
      "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"}})");
  const ModelConfig& config = *model->config();
  EXPECT_EQ(config.vocab_size, 262208);
  EXPECT_EQ(config.num_attention_heads, 8);
  EXPECT_EQ(config.num_key_value_heads, 4);
  EXPECT_EQ(config.head_dim, 256);
  EXPECT_EQ(config.eos_token_id, (std::vector<int64_t>{1, 106}));
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.checkpoint_dtype, DType::bf16);
  EXPECT_EQ(model_of(R"({"model_type": "llava", "text_config": {"vocab_size": 32064}})")->info().hidden, 4096);
  const ModelConfig llama4 = *model_of(R"({"model_type": "llama4", "text_config": {}})")->config();
  EXPECT_EQ(llama4.num_hidden_layers, 48);
  EXPECT_EQ(llama4.num_attention_heads, 40);
  EXPECT_EQ(llama4.intermediate_size, 16384);
  EXPECT_EQ(llama4.moe_intermediate_size, 8192);
  EXPECT_EQ(llama4.num_experts, 16);
  // Files leave out what the default text model of the whole has, too: that of internvl is a qwen2 of as many words.
  const auto qwen3 = model_of(R"({"model_type": "internvl", "text_config": {"model_type": "qwen3",
      "hidden_size": 2560, "num_hidden_layers": 36}})");
  EXPECT_EQ(qwen3->config()->vocab_size, 151936);
  EXPECT_EQ(qwen3->config()->intermediate_size, 22016);
  EXPECT_EQ(qwen3->config()->head_dim, 128);
  const ModelConfig voxtral =
      *model_of(R"({"model_type": "voxtral", "text_config": {"model_type": "llama"}})")->config();
  EXPECT_EQ(voxtral.vocab_size, 131072);
  EXPECT_EQ(voxtral.num_attention_heads, 32);
  EXPECT_EQ(voxtral.num_key_value_heads, 8);
  EXPECT_EQ(voxtral.rope_theta, 1e8);
  const ModelConfig sounds = *model_of(R"({"model_type": "glmasr", "text_config": {"hidden_size": 64}})")->config();
  EXPECT_EQ(sounds.vocab_size, 59264);
  EXPECT_EQ(sounds.num_attention_heads, 16);
  EXPECT_EQ(sounds.head_dim, 4);
  EXPECT_EQ(sounds.max_position_embeddings, 8192);
  EXPECT_EQ(model_of(R"({"model_type": "lfm2_vl", "text_config": {}})")->info().hidden, 2560);
  EXPECT_EQ(model_of(R"({"model_type": "exaone4_5", "text_config": {}})")->config()->vocab_size, 102400);
  const ModelConfig experts = *model_of(R"({"model_type": "qwen3_5_moe", "text_config": {}})")->config();
  EXPECT_EQ(experts.num_hidden_layers, 40);
  EXPECT_EQ(experts.num_experts, 256);
  EXPECT_EQ(experts.moe_intermediate_size, 512);
}

// Qwen2-VL's files state the text's keys beside those of the images, and a rotation by several axes.
TEST(Multimodal, TextKeysMayStandInTheWholeConfig) {
  const auto model = model_of(R"({"model_type": "qwen2_5_vl", "vision_start_token_id": 5, "image_token_id": 6,
      "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
      "num_key_value_heads": 2, "vocab_size": 100, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
      "use_sliding_window": false, "sliding_window": 32768, "max_window_layers": 2, "tie_word_embeddings": true,
      "vision_config": {"depth": 32}, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}})");
  const ModelConfig& config = *model->config();
  EXPECT_EQ(config.model_type, "qwen2");
  EXPECT_EQ(config.rope_theta, 10000);
  EXPECT_EQ(config.rope_scaling.kind, modules::RopeScaling::Kind::none);
  EXPECT_TRUE(config.tie_word_embeddings && config.attention_bias);
}

// Their published files have no text_config; every other type without one is refused, for transformers would take
// another text model than the usual one of its type.
TEST(Multimodal, OnlyQwen2VlMayLackATextConfig) {
  for (const char* type : {"qwen2_vl", "qwen2_5_vl"}) {
    const auto model = model_of(io::to_json(io::JsonValue::object().set("model_type", type)).c_str());
    EXPECT_EQ(model->info().hidden, 8192) << type;
  }
  for (const char* type : {"gemma3",     "gemma4",      "mistral3",    "llava",          "llava_onevision",
                           "aya_vision", "idefics2",    "idefics3",    "smolvlm",        "lfm2_vl",
                           "fast_vlm",   "got_ocr2",    "glmasr",      "pp_chart2table", "lighton_ocr",
                           "qwen3_asr",  "exaone4_5",   "qwen3_vl",    "qwen3_5",        "llama4",
                           "voxtral",    "minicpmv4_6", "qwen2_audio", "granite_speech", "moss_transcribe_diarize"}) {
    const std::string config = io::to_json(io::JsonValue::object().set("model_type", type).set("hidden_size", 64));
    EXPECT_HAS(test::refusal([&] { model_of(config.c_str()); }), fmt::format("a {} model without 'text_config'", type));
  }
}

TEST(Multimodal, WhatIsNotUnderstoodIsRefused) {
  EXPECT_HAS(test::refusal([] { model_of(R"({"model_type": "gemma3", "text_config": 3})"); }), "'text_config'");
  EXPECT_HAS(test::refusal([] { model_of(R"({"model_type": "gemma3", "text_config": {"model_type": 3}})"); }),
             "'text_config'");
  EXPECT_HAS(test::refusal([] { model_of(R"({"model_type": "gemma3", "text_config": {"model_type": "bert"}})"); }),
             "bert");
  EXPECT_HAS(test::refusal([] { model_of(R"({"model_type": "gemma3", "text_config": {"depth_gate": 1}})"); }),
             "'depth_gate'");
  EXPECT_HAS(test::refusal([] { model_of(R"({"model_type": "paligemma", "text_config": {}})"); }), "paligemma");
  EXPECT_HAS(test::refusal([] { model_of(R"({"model_type": "qwen3_vl_moe", "text_config": {}})"); }), "qwen3_vl_moe");
}

}  // namespace
}  // namespace eadem::models
