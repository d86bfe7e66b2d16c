// SPDX-License-Identifier: Apache-2.0
//
// DeepSeek V4: what its configurations mean, the names of its tensors in transformers' and in published files, what of
// a file is refused, and its cache. Its logits are compared in tests/engine/golden_test.cc.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/graphs.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/parameter_reader.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace deepseek_v4_test {

namespace fs = std::filesystem;
using test::refusal;

const fs::path kGolden = fs::path(EADEM_SOURCE_DIR) / "tests/data/golden/deepseek_v4";

ModelConfig parse(const io::JsonValue& json) {
  return ModelConfig::from_json(io::JsonReader::parse(io::to_json(json), "config.json"));
}

io::JsonValue small() {
  io::JsonValue json = io::JsonValue::object();
  json.set("model_type", "deepseek_v4").set("vocab_size", 64).set("hidden_size", 256);
  return json.set("moe_intermediate_size", 48).set("num_hidden_layers", 6).set("num_attention_heads", 16);
}

template <typename T>
io::JsonValue list(std::initializer_list<T> values) {
  io::JsonValue json = io::JsonValue::array();
  for (const T& value : values) json.push_back(io::JsonValue(value));
  return json;
}

TEST(DeepseekV4, AbsentKeysTakeTheDefaultsOfTransformers) {
  const ModelConfig config = parse(small());
  EXPECT_EQ(config.head_dim, 512);
  EXPECT_EQ(config.rotary_dim, 64);
  EXPECT_EQ(config.num_key_value_heads, 1);
  EXPECT_EQ(config.q_lora_rank, 1024);
  EXPECT_EQ(config.output_groups, 8);
  EXPECT_EQ(config.output_rank, 1024);
  EXPECT_EQ(config.layer_pattern, "HHHIHI");
  EXPECT_EQ(config.indexed_stride, 4);
  EXPECT_EQ(config.pooled_stride, 128);
  EXPECT_EQ(config.layer_windows, std::vector<int64_t>(6, 128));
  EXPECT_EQ(config.index_n_heads, 64);
  EXPECT_EQ(config.index_head_dim, 128);
  EXPECT_EQ(config.index_topk, 512);
  EXPECT_EQ(config.streams, 4);
  EXPECT_EQ(config.stream_iterations, 20);
  EXPECT_EQ(config.stream_eps, 1e-6);
  EXPECT_EQ(config.hash_layers, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(config.num_experts, 256);
  EXPECT_EQ(config.num_experts_per_tok, 6);
  EXPECT_EQ(config.routed_scaling_factor, 1.5);
  EXPECT_EQ(config.swiglu_limit, 10);
  EXPECT_EQ(config.rope_theta, 10000);
  EXPECT_EQ(config.pooled_rope_theta, 160000);
  EXPECT_EQ(config.rope_scaling, modules::RopeScaling{});
  EXPECT_EQ(parse(config.to_json()), config);
}

// Of published files: numbers for kinds of layers, of which those behind the last predict further tokens, and one
// object for the scaling of layers with rows.
TEST(DeepseekV4, OlderKeysMeanTheSame) {
  const auto scaling = [] {
    return io::JsonValue::object().set("type", "yarn").set("factor", 16).set("original_max_position_embeddings", 65536);
  };
  io::JsonValue old = small();
  old.set("compress_ratios", list<int64_t>({0, 0, 4, 128, 4, 128, 0})).set("num_hash_layers", 2);
  old.set("qk_rope_head_dim", 64).set("rope_scaling", scaling()).set("rope_theta", 10000.0);
  const ModelConfig config = parse(old);
  EXPECT_EQ(config.layer_pattern, "WWIHIH");
  EXPECT_EQ(config.hash_layers, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(config.rope_scaling.kind, modules::RopeScaling::Kind::yarn);
  EXPECT_EQ(config.rope_scaling.attention_factor, 1.0);

  const auto both = [&](io::JsonValue pooled) {
    io::JsonValue ropes = io::JsonValue::object();
    ropes.set("main", io::JsonValue::object().set("rope_type", "default").set("rope_theta", 10000.0));
    ropes.set("compress", pooled.set("rope_theta", 160000.0));
    io::JsonValue json = small();
    const char *window = "sliding_attention", *chosen = "compressed_sparse_attention",
               *all = "heavily_compressed_attention";
    json.set("layer_types", list({window, window, chosen, all, chosen, all}));
    json.set("mlp_layer_types", list({"hash_moe", "hash_moe", "moe", "moe", "moe", "moe"}));
    return json.set("partial_rotary_factor", 0.125).set("rope_parameters", std::move(ropes));
  };
  EXPECT_EQ(parse(both(scaling().set("attention_factor", 1.0))), config);
  EXPECT_EQ(parse(both(scaling())).rope_scaling.attention_factor, std::nullopt) << "as transformers derives it";
  EXPECT_HAS(refusal([&] { parse(both(scaling().set("truncate", false))); }), "'truncate' of rope scaling is false");
}

TEST(DeepseekV4, WhatIsNotComputedIsRefused) {
  const auto refused = [](const char* key, io::JsonValue value) {
    return refusal([&] { parse(small().set(key, std::move(value))); });
  };
  EXPECT_HAS(refused("num_key_value_heads", 2), "'num_key_value_heads' is 2");
  EXPECT_HAS(refused("scoring_func", "softmax"), "'scoring_func' is \"softmax\"");
  EXPECT_HAS(refused("n_shared_experts", 2), "'n_shared_experts' is 2");
  EXPECT_HAS(refused("norm_topk_prob", false), "'norm_topk_prob' is false");
  EXPECT_HAS(refused("attention_bias", true), "'attention_bias' is true");
  EXPECT_HAS(refused("expert_dtype", "fp4"), "'expert_dtype'") << "without a quantization_config";
  EXPECT_HAS(refused("layer_types", list({"full_attention", "", "", "", "", ""})), "'layer_types'");
  EXPECT_HAS(refused("compress_ratios", list<int64_t>({0, 4})), "'compress_ratios'");
  EXPECT_HAS(refused("compress_ratios", list<int64_t>({0, 4, 8, 4, 4, 4})), "only 0, 4 and 128");
  EXPECT_HAS(refused("mlp_layer_types", list({"dense", "moe", "moe", "moe", "moe", "moe"})), "'mlp_layer_types'");
  EXPECT_HAS(refused("o_groups", 7), "16 heads in 7 groups");
  EXPECT_HAS(refused("hc_mult", 65), "65 streams");
  EXPECT_HAS(refused("index_head_dim", 32), "64 of 32 dimensions of an index");
  // An object of its own without a theta takes that of the config beside it, not compress_rope_theta.
  const auto objects = [] { return io::JsonValue::object().set("main", io::JsonValue::object()); };
  EXPECT_EQ(parse(small()
                      .set("rope_theta", 20000)
                      .set("compress_rope_theta", 500)
                      .set("rope_parameters", objects().set("compress", io::JsonValue::object())))
                .pooled_rope_theta,
            20000);
  EXPECT_HAS(refusal([] { parse(small().set("partial_rotary_factor", 0.25).set("qk_rope_head_dim", 64)); }),
             "'qk_rope_head_dim' is 64");
}

// Every tensor of the file is made of parameters again, and nothing else is.
TEST(DeepseekV4, IsSavedAsItWasRead) {
  const Checkpoint golden = open_checkpoint(kGolden.string());
  const ParameterReader reader(golden);
  size_t count = 0;
  for (const auto& [name, recipe] : tensors_of(*golden.model, CheckpointFormat::huggingface)) {
    ASSERT_NE(golden.weights->find(name), nullptr) << name;
    const Tensor read = golden.weights->get(name),
                 saved = evaluate(
                     recipe, [&](const std::string&own) { return reader.read(own); }, name);
    ASSERT_EQ(to_string(read.view), to_string(saved.view)) << name;
    EXPECT_EQ(std::memcmp(read.view.data, saved.view.data, static_cast<size_t>(read.view.size_bytes())), 0) << name;
    ++count;
  }
  EXPECT_EQ(count, golden.weights->tensors().size());
}

class DeepseekV4Files : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_deepseek_v4_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    fs::copy_file(kGolden / "config.json", folder_ / "config.json");
  }
  void TearDown() override { fs::remove_all(folder_); }

  // The golden with other names, other values and further tensors.
  template <typename Rename, typename Change>
  std::string write(Rename&& rename, Change&& change) {
    const Checkpoint golden = open_checkpoint(kGolden.string());
    std::vector<Tensor> kept;
    std::vector<io::NamedTensor> tensors;
    for (const io::WeightInfo& info : golden.weights->tensors()) {
      const Tensor read = golden.weights->get(info.name);
      Tensor& copy = kept.emplace_back(Tensor::on_host(read.dtype(), read.shape()));
      std::memcpy(copy.view.data, read.view.data, static_cast<size_t>(read.view.size_bytes()));
      change(info.name, copy.view);
      tensors.push_back({rename(info.name), copy.view});
    }
    tensors.push_back({"mtp.0.norm.weight", kept.front().view});  // of the layer that predicts a further token
    io::write_safetensors((folder_ / "model.safetensors").string(), tensors);
    return folder_.string();
  }

  fs::path folder_;
};

// The names of DeepSeek's own files.
TEST_F(DeepseekV4Files, PublishedNamesAreRead) {
  const std::string folder = write(
      [](std::string name) {
        const auto replace = [&](std::string_view from, std::string_view to) {
          if (const size_t at = name.find(from); at != std::string::npos) name.replace(at, from.size(), to);
        };
        replace("model.", "");
        replace("embed_tokens.", "embed.");
        replace("hc_head.hc_", "hc_head_");
        replace(".attn.norm.", ".attn.kv_norm.");
        return name;
      },
      [](const std::string&, const TensorView&) {});
  const Checkpoint golden = open_checkpoint(kGolden.string()), published = open_checkpoint(folder);
  const ParameterReader ours(golden), theirs(published);
  for (const ParameterInfo& parameter : golden.model->parameters()) {
    const Tensor a = ours.read(parameter.name), b = theirs.read(parameter.name);
    ASSERT_EQ(to_string(a.view), to_string(b.view)) << parameter.name;
    EXPECT_EQ(std::memcmp(a.view.data, b.view.data, static_cast<size_t>(a.view.size_bytes())), 0) << parameter.name;
  }
}

TEST_F(DeepseekV4Files, ATokensExpertMustBeOneOfThem) {
  for (const int64_t number : {int64_t{-1}, int64_t{6}, int64_t{1} << 40}) {
    const std::string folder = write([](const std::string& name) { return name; },
                                     [&](const std::string& name, const TensorView& view) {
                                       if (name == "model.layers.1.ffn.gate.tid2eid") view.as<int64_t>()[3] = number;
                                     });
    EXPECT_HAS(refusal([&] {
                 engine::InferEngine::from_checkpoint(open_checkpoint(folder), open_device("cpu", {.num_threads = 1}),
                                                      {});
               }),
               fmt::format("number 3 of 'model.layers.1.ffn.gate.tid2eid' is {}; expected one of [0, 6)", number));
  }
}

std::vector<float> logits_of(engine::InferEngine& engine, const std::vector<int>& chunks) {
  std::vector<float> result;
  int32_t begin = 0;
  for (const int chunk : chunks) {
    engine::InferEngine::Input input{.input_lengths = {chunk}, .cache_lengths = {begin}, .all_logits = true};
    for (; chunk > std::ssize(input.input_ids); ++begin) input.input_ids.push_back(3 + begin * 7 % 60);
    engine.forward(input);
    const Tensor logits = engine.logits();
    result.insert(result.end(), logits.view.as<float>(), logits.view.as<float>() + logits.view.num_elements());
  }
  return result;
}

std::unique_ptr<engine::InferEngine> engine_of(const WeightType& kv_cache, const engine::CacheConfig& cache) {
  engine::EngineOptions options;
  options.max_logit_rows = 64;
  options.hardware.kv_cache = kv_cache;
  options.cache = cache;
  return engine::InferEngine::from_checkpoint(open_checkpoint(kGolden.string()), open_device("cpu", {.num_threads = 2}),
                                              options);
}

// Keys of windows are rounded as any, rows to bf16, and what rows are made of not at all.
TEST(DeepseekV4, AnEncodedCacheKeepsPlainRows) {
  const auto plain = engine_of(DType::f32, engine::StaticKVCacheConfig{}),
             encoded = engine_of({DType::f32, &RowEncoding::int8()}, engine::StaticKVCacheConfig{});
  const std::vector<float> exact = logits_of(*plain, {50}), whole = logits_of(*encoded, {50}),
                           parts = logits_of(*encoded, {11, 1, 1, 30, 7});
  EXPECT_EQ(whole, parts);
  EXPECT_NE(whole, exact);
}

// Rows stand for 4 tokens and for 12, and end with a block.
TEST(DeepseekV4, BlocksAreMultiplesOfTheTokensOfRows) {
  const auto blocks_of = [](int64_t block_size) {
    return engine_of(DType::f32, engine::PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = block_size})
        ->cache_spec()
        .block_size;
  };
  EXPECT_EQ(blocks_of(36), 36);
  EXPECT_GT(blocks_of(0), 0);
  EXPECT_EQ(blocks_of(0) % 12, 0);
  EXPECT_HAS(refusal([&] { blocks_of(16); }), "block_size is 16; this model keeps rows for 12 tokens each");
}

// Experts that a token's number says are used as they are.
TEST(DeepseekV4, TheLoadBalancingLossIsThatOfTheLayersThatChoose) {
  EXPECT_EQ(parse(small()).router_aux_loss_coef, 0);
  EXPECT_EQ(parse(small().set("output_router_logits", true)).router_aux_loss_coef, 0.001);
  const Checkpoint golden = open_checkpoint(kGolden.string());
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(golden.model->spec(), *device,
                                                                     HardwareMode::accuracy, {}, "the test");
  const BuiltGraph built =
      build_training_graph(*golden.model, {.device = device.get(), .hardware = &hardware, .load_balancing_loss = true});
  size_t layers = 0;
  for (const pipeline::Node& node : built.graph.nodes())
    if (node.op->name() == "load_balancing_loss") layers = node.inputs.size();
  EXPECT_EQ(layers, 3u) << "of five, of which two have a table";
}

TEST(DeepseekV4, TensorParallelRanksAreRefused) {
  const Checkpoint golden = open_checkpoint(kGolden.string());
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(golden.model->spec(), *device,
                                                                     HardwareMode::accuracy, {}, "the test");
  EXPECT_HAS(refusal([&] {
               build_training_graph(*golden.model, {.device = device.get(), .hardware = &hardware, .num_ranks = 2});
             }),
             "not divided over tensor-parallel ranks; there are 2");
}

}  // namespace deepseek_v4_test
}  // namespace eadem::models
