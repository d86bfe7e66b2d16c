// SPDX-License-Identifier: Apache-2.0
//
// DeepSeek: what its configurations mean, its GGUF files, old and new, and what it keeps of a token. Its logits are
// compared in tests/engine/golden_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/gguf.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/multimodal/text_part.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace deepseek_test {

namespace fs = std::filesystem;
using test::refusal;

const fs::path kGoldens = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden";

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

io::JsonValue small(const char* type) {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", type).set("vocab_size", 64).set("hidden_size", 256).set("intermediate_size", 48);
  return json.set("num_hidden_layers", 4).set("num_attention_heads", 4).set("num_experts_per_tok", 6);
}

TEST(Deepseek, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig v2 = parse(small("deepseek_v2")), v3 = parse(small("deepseek_v3"));
  for (const ModelConfig& config : {v2, v3}) {
    EXPECT_EQ(config.kv_lora_rank, 512);
    EXPECT_EQ(config.q_lora_rank, 1536);
    EXPECT_EQ(config.head_dim, 192);
    EXPECT_EQ(config.rotary_dim, 64);
    EXPECT_EQ(config.v_head_dim, 128);
    EXPECT_EQ(config.num_key_value_heads, 4);
    EXPECT_EQ(config.rope_style, kernels::RopeStyle::interleaved);
  }
  EXPECT_EQ(v2.num_experts, 64);
  EXPECT_TRUE(v2.has_experts(0));
  EXPECT_FALSE(v2.norm_topk_prob);
  EXPECT_EQ(v3.num_experts, 256);
  EXPECT_FALSE(v3.has_experts(2));
  EXPECT_TRUE(v3.has_experts(3));
  EXPECT_TRUE(v3.norm_topk_prob);
  EXPECT_EQ(v3.n_group, 8);
  EXPECT_EQ(v3.topk_group, 4);
  EXPECT_EQ(v3.routed_scaling_factor, 2.5);
  EXPECT_EQ(parse(small("deepseek_v2").set("q_lora_rank", nullptr)).q_lora_rank, 0);
  for (const io::JsonValue& no : {io::JsonValue(false), io::JsonValue(nullptr)})
    EXPECT_EQ(parse(small("deepseek_v3").set("rope_interleave", no)).rope_style, kernels::RopeStyle::rotate_half);
}

TEST(Deepseek, AnIndexerSelectsWhatV32AttendsTo) {
  const ModelConfig config = parse(small("deepseek_v32"));
  EXPECT_EQ(config.index_n_heads, 64);
  EXPECT_EQ(config.index_head_dim, 128);
  EXPECT_EQ(config.index_topk, 2048);
  EXPECT_EQ(config.n_group, 8);
  EXPECT_EQ(config.max_position_embeddings, 163840);
  EXPECT_FALSE(config.has_experts(2));
  EXPECT_TRUE(config.has_experts(3));
  const auto strings = [](std::initializer_list<const char*> values) {
    io::JsonValue list = io::JsonValue::array();
    for (const char* value : values) list.push_back(io::JsonValue(value));
    return list;
  };
  const auto typed = [&](const char* key, std::initializer_list<const char*> values) {
    return small("deepseek_v32").set(key, strings(values));
  };
  EXPECT_TRUE(parse(typed("mlp_layer_types", {"dense", "sparse", "sparse", "sparse"})).has_experts(1));
  EXPECT_HAS(refusal([&] {
               parse(typed("mlp_layer_types", {"dense", "sparse", "dense", "sparse"}));
             }),
             "'mlp_layer_types'");
  const char *indexed = "indexed_attention", *older = "deepseek_sparse_attention", *full = "full_attention";
  EXPECT_EQ(parse(typed("layer_types", {older, older, older, older})), config);
  EXPECT_HAS(refusal([&] { parse(typed("layer_types", {indexed, indexed, full, indexed})); }), "'layer_types'");
  EXPECT_HAS(refusal([] { parse(small("deepseek_v32").set("q_lora_rank", nullptr)); }), "'q_lora_rank' is null");
}

// transformers takes the rope_parameters of the published model for a configuration without any.
TEST(Deepseek, Mistral4HasQueriesThatGrow) {
  const auto with = [](io::JsonValue rope) { return small("mistral4").set("rope_parameters", std::move(rope)); };
  const auto rope = [] {
    return io::JsonValue::object()
        .set("rope_type", "yarn")
        .set("rope_theta", 10000.0)
        .set("factor", 128.0)
        .set("original_max_position_embeddings", 8192)
        .set("max_position_embeddings", 1048576)
        .set("beta_fast", 32.0)
        .set("beta_slow", 1.0)
        .set("mscale", 1.0)
        .set("mscale_all_dim", 1.0)
        .set("llama_4_scaling_beta", 0.1)
        .set("partial_rotary_factor", 0.5);
  };
  const ModelConfig config = parse(with(rope()));
  EXPECT_EQ(config.kv_lora_rank, 256);
  EXPECT_EQ(config.q_lora_rank, 1024);
  EXPECT_EQ(config.qk_nope_head_dim, 64);
  EXPECT_EQ(config.rotary_dim, 64);
  EXPECT_EQ(config.v_head_dim, 128);
  EXPECT_EQ(config.num_experts, 128);
  EXPECT_EQ(config.moe_intermediate_size, 2048);
  EXPECT_EQ(config.shared_expert_intermediate_size, 2048);
  EXPECT_EQ(config.n_group, 1);
  EXPECT_EQ(config.routed_scaling_factor, 1);
  EXPECT_EQ(config.max_position_embeddings, 1048576);
  EXPECT_TRUE(config.norm_topk_prob);
  EXPECT_TRUE(config.has_experts(0));
  EXPECT_EQ(config.attn_scale, 0.1);
  EXPECT_EQ(config.floor_scale, 8192);
  EXPECT_EQ(config.rope_style, kernels::RopeStyle::interleaved);
  EXPECT_EQ(parse(config.to_json()), config);
  EXPECT_EQ(parse(small("mistral4")), config);
  EXPECT_EQ(parse(small("mistral4").set("rope_theta", 10000.0).set("rope_scaling", nullptr)), config);
  EXPECT_HAS(refusal([&] { parse(small("mistral4").set("rope_theta", 500.0)); }),
             "'rope_theta' is 500; without 'rope_parameters' only 10000 is honoured");
  EXPECT_HAS(refusal([&] { parse(with(rope().set("rope_type", "default"))); }), "rope_type");
  EXPECT_HAS(refusal([&] { parse(with(rope().set("partial_rotary_factor", 0.25))); }), "partial_rotary_factor");
  // As published: the text part of a model that sees images.
  io::JsonValue text = io::JsonValue::object();
  text.set("model_type", "mistral4").set("rope_parameters", rope());
  const io::JsonReader whole = io::JsonReader::parse(
      io::to_json(io::JsonValue::object().set("model_type", "mistral3").set("text_config", std::move(text))),
      "config.json");
  const ModelConfig published = ModelConfig::from_json(text_config_of(whole, nullptr));
  EXPECT_EQ(published.model_type, "mistral4");
  EXPECT_EQ(published.num_hidden_layers, 36);
  EXPECT_EQ(published.vocab_size, 131072);
  EXPECT_EQ(refusal([&] { config.to_gguf(); }), "");
  const io::JsonReader unstated =
      io::JsonReader::parse(R"({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}})", "config.json");
  EXPECT_EQ(ModelConfig::from_json(text_config_of(unstated, nullptr)), published);
}

TEST(Deepseek, OldAndNewKeysMeanTheSame) {
  for (const char* name : {"deepseek_v2", "deepseek_v3"}) {
    const auto read = [&](const char* file) {
      return ModelConfig::from_json(io::JsonReader::read((kGoldens / name / file).string()));
    };
    const ModelConfig config = read("config.json");
    EXPECT_EQ(io::to_json(config.describe()), io::to_json(read("config.classic.json").describe())) << name;
    EXPECT_EQ(parse(config.to_json()), config) << name;
  }
  // Published files state these keys too.
  EXPECT_EQ(refusal([] {
              parse(small("deepseek_v3")
                        .set("num_nextn_predict_layers", 1)
                        .set("ep_size", 1)
                        .set("seq_aux", true)
                        .set("aux_loss_alpha", 0.001)
                        .set("moe_layer_freq", 1)
                        .set("scoring_func", "sigmoid")
                        .set("topk_method", "noaux_tc"));
            }),
            "");
}

// The golden's tensors with kv_b_proj in 8-bit floats with a scale for each block, or with the values of that.
class Fp8Latents final : public io::WeightSource {
 public:
  Fp8Latents(std::shared_ptr<const io::WeightSource> plain, bool decoded)
      : WeightSource(plain->path()), plain_(std::move(plain)), decoded_(decoded) {
    std::vector<io::WeightInfo> tensors(plain_->tensors().begin(), plain_->tensors().end());
    for (io::WeightInfo& info : tensors)
      if (is_changed(info) && !decoded_) info.type = WeightType(DType::bf16, &encoding());
    set_tensors(std::move(tensors));
  }
  void release(std::string_view) const override {}
  std::vector<std::shared_ptr<const io::MappedFile>> files() const override { return plain_->files(); }

 private:
  static const Fp8Encoding& encoding() { return *Fp8Encoding::find({Fp8Format::Kind::e4m3, 128, 128}); }
  static bool is_changed(const io::WeightInfo& info) { return info.name.ends_with("kv_b_proj.weight"); }
  Tensor load(size_t index) const override {
    const io::WeightInfo& info = tensors()[index];
    const Tensor plain = plain_->get(info.name);
    if (!is_changed(info)) return plain;
    Tensor encoded = Tensor::in_one_piece(DType::bf16, info.shape, encoding());
    encoding().encode(encoded.view, plain.view);
    return decoded_ ? values_in_f32(encoded.view) : encoded;
  }
  Tensor load_bytes(size_t index) const override { return plain_->get_bytes(tensors()[index].name); }

  std::shared_ptr<const io::WeightSource> plain_;
  bool decoded_;
};

// Heads of 17 rows are cut out of blocks of 128, which decodes them.
TEST(Deepseek, LatentsInBlocksOfEightBitFloatsAreComputedAsTheirValues) {
  const auto logits_of = [](bool decoded) {
    Checkpoint checkpoint = open_checkpoint((kGoldens / "deepseek_v3").string());
    checkpoint.weights = std::make_shared<Fp8Latents>(checkpoint.weights, decoded);
    engine::EngineOptions options;
    options.mode = HardwareMode::accuracy;
    const auto engine =
        engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), options);
    engine->forward({.input_ids = {5, 6, 7, 8}, .input_lengths = {4}, .cache_lengths = {0}});
    const Tensor logits = engine->logits();
    return std::vector<float>(logits.view.as<float>(), logits.view.as<float>() + logits.view.num_elements());
  };
  EXPECT_EQ(logits_of(false), logits_of(true));
}

// Of published sizes, k_b_proj is decoded, for it is transposed, and v_b_proj keeps its blocks.
TEST(Deepseek, HeadsOfWholeBlocksKeepTheirEncoding) {
  const Decoder model(parse(small("deepseek_v3")));
  const Encoding& fp8 = *Fp8Encoding::find({Fp8Format::Kind::e4m3, 128, 128});
  const auto describe_tensor = [&](const std::string&) {
    return std::optional(RecipeType{{DType::bf16, &fp8}, Shape{4 * (128 + 128), 512}});
  };
  const auto made = [&](const char* part) {
    const std::string name = fmt::format("model.layers.0.self_attn.{}.weight", part);
    for (const ParameterInfo& parameter : model.parameters())
      if (parameter.name == name)
        return *describe(model.recipes(parameter, CheckpointFormat::huggingface).at(0), describe_tensor, "the test");
    return RecipeType{};
  };
  EXPECT_EQ(made("k_b_proj").type, WeightType(DType::f32));
  EXPECT_EQ(made("k_b_proj").shape, (Shape{4, 512, 128}));
  EXPECT_EQ(made("v_b_proj").type.encoding, stack_encoding(&fp8));
}

TEST(Deepseek, WhatIsNotComputedIsRefused) {
  EXPECT_HAS(refusal([] { parse(small("deepseek_v2").set("scoring_func", "sigmoid")); }), "'scoring_func'");
  EXPECT_HAS(refusal([] { parse(small("deepseek_v2").set("topk_method", "noaux_tc")); }), "'topk_method'");
  EXPECT_HAS(refusal([] { parse(small("deepseek_v3").set("num_key_value_heads", 2)); }), "2 heads of keys for 4");
  EXPECT_HAS(refusal([] { parse(small("deepseek_v3").set("mlp_bias", true)); }), "'mlp_bias'");
  EXPECT_HAS(refusal([] { parse(small("deepseek_v32").set("mlp_bias", true)); }), "'mlp_bias' is true");
  EXPECT_HAS(refusal([] { parse(small("deepseek_v2").set("moe_layer_freq", 2)); }), "'moe_layer_freq' is 2");
}

// The softmax's scale is m^2 / sqrt(head_dim), m = 0.1 mscale_all_dim ln(factor) + 1; the rotation has no factor.
TEST(Deepseek, YarnScalesTheSoftmax) {
  const Checkpoint golden = open_checkpoint((kGoldens / "deepseek_v2").string());
  const auto& model = dynamic_cast<const Decoder&>(*golden.model);
  const auto& attention = std::get<modules::MlaAttention::Config>(model.decoder_spec().layers[1].mixer);
  const double m = 0.1 * 0.707 * std::log(4.0) + 1;
  EXPECT_NEAR(attention.scale, m * m / std::sqrt(18.0), 1e-15);
  EXPECT_EQ(modules::rope_frequencies(attention.rope).attention_factor, 1.0);
}

class DeepseekFiles : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_mla_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    golden_ = open_checkpoint((kGoldens / GetParam()).string());
  }
  void TearDown() override { fs::remove_all(folder_); }

  // A GGUF file of the golden model; `old`: as llama.cpp's converter wrote it before April 2025, with kv_b_proj whole
  // and the widths of heads.
  std::string write(bool old) const {
    io::GgufMetadata metadata = golden_.model->config()->to_gguf();
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    const auto add = [&](const std::string& name, Tensor tensor) {
      kept.push_back(std::move(tensor));
      tensors.push_back({name, kept.back().view});
    };
    const ParameterReader reader(golden_);
    for (const auto& [name, recipe] : tensors_of(*golden_.model, CheckpointFormat::gguf))
      if (!old || (name.find("attn_k_b") == std::string::npos && name.find("attn_v_b") == std::string::npos))
        add(name, evaluate(
                      recipe, [&](const std::string& own) { return reader.read(own); }, name));
    if (old) {
      for (int layer = 0; layer < 2; ++layer)
        add(fmt::format("blk.{}.attn_kv_b.weight", layer),
            golden_.weights->get(fmt::format("model.layers.{}.self_attn.kv_b_proj.weight", layer)));
      const ModelConfig& config = *golden_.model->config();
      const auto set = [&](const char* key, int64_t value) {
        std::erase_if(metadata, [&](const auto& entry) { return entry.first == std::string("deepseek2.") + key; });
        if (value > 0)
          metadata.emplace_back(std::string("deepseek2.") + key, io::GgufValue::scalar(static_cast<uint32_t>(value)));
      };
      set("attention.head_count_kv", config.num_attention_heads);
      set("attention.key_length", config.head_dim);
      set("attention.value_length", config.v_head_dim);
      set("attention.key_length_mla", 0);
      set("attention.value_length_mla", 0);
    }
    const std::string path = (folder_ / "model.gguf").string();
    io::write_gguf(path, metadata, tensors);
    return path;
  }

  static std::vector<float> logits_of(const Checkpoint& checkpoint) {
    engine::EngineOptions options;
    options.mode = HardwareMode::accuracy;
    options.max_logit_rows = options.max_num_batched_tokens = 64;
    const auto engine =
        engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), options);
    engine::InferEngine::Input input;
    for (int32_t i = 0; i < 30; ++i) input.input_ids.push_back(3 + 5 * i % 60);
    input.input_lengths = {30};
    input.cache_lengths = {0};
    input.all_logits = true;
    engine->forward(input);
    const Tensor logits = engine->logits();
    return {logits.view.as<float>(), logits.view.as<float>() + logits.view.num_elements()};
  }

  fs::path folder_;
  Checkpoint golden_;
};

TEST_P(DeepseekFiles, GgufHasTheBitsOfTheDirectory) {
  const std::vector<float> expected = logits_of(golden_);
  for (const bool old : {false, true}) {
    const Checkpoint gguf = open_checkpoint(write(old));
    EXPECT_EQ(*gguf.model->config(), [&] {
      ModelConfig config = *golden_.model->config();
      config.checkpoint_dtype.reset();  // which a GGUF file does not state, nor the ids of its tokenizer
      config.bos_token_id.clear();
      config.eos_token_id.clear();
      config.rms_norm_eps = gguf.model->config()->rms_norm_eps;  // f32 there
      return config;
    }()) << old;
    EXPECT_EQ(logits_of(gguf), expected) << old;
  }
}

// Layers of multi-token prediction lie behind the last one.
TEST_P(DeepseekFiles, LaterLayersAreIgnored) {
  EXPECT_TRUE(golden_.model->may_ignore("model.layers.2.eh_proj.weight"));
  EXPECT_TRUE(golden_.model->may_ignore("model.layers.2.self_attn.o_proj.weight"));
  EXPECT_FALSE(golden_.model->may_ignore("model.layers.1.self_attn.q_norm.weight"));
}

INSTANTIATE_TEST_SUITE_P(Models, DeepseekFiles, testing::Values("deepseek_v2", "deepseek_v3"));

}  // namespace deepseek_test
}  // namespace eadem::models
