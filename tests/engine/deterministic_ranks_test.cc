// SPDX-License-Identifier: Apache-2.0
//
// EngineOptions::deterministic_across_tp: engines of one rank, and of several that are processes, give the same bits,
// however requests are cut into steps, whatever they begin with and what is proposed to them.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "tests/distributed/rank_run.h"
#include "tests/engine/forked_engines.h"
#include "tests/engine/speculation/speculating_loop.h"
#include "tests/support/refusal.h"

namespace eadem::engine {
namespace {

bool same_bits(const Drawn& a, const Drawn& b) {
  return a.tokens == b.tokens && a.logprobs.size() == b.logprobs.size() &&
         std::memcmp(a.logprobs.data(), b.logprobs.data(), a.logprobs.size() * sizeof(float)) == 0;
}

// Engines with the option, whose steps have at most 16 tokens.
Make deterministic(const Make& make, HardwareMode mode = HardwareMode::accuracy) {
  return [=](const std::shared_ptr<Device>& device, EngineOptions options) {
    options.deterministic_across_tp = true;
    options.max_num_batched_tokens = 16;
    options.mode = mode;
    return make(device, options);
  };
}

// A model with random weights.
Make random(const std::shared_ptr<const models::Model>& model, const Encoding* stored_as = nullptr) {
  return [=](const std::shared_ptr<Device>& device, const EngineOptions& options) {
    modules::ModelSpec spec = model->spec();
    if (stored_as != nullptr) spec.checkpoint_type = WeightType(DType::f32, stored_as);
    auto engine = std::make_unique<InferEngine>(model, device, options, spec);
    if (options.rank() == 0) engine->load_random(5, 0.15);
    return engine;
  };
}

// 12 query heads, which 2, 3 and 4 ranks divide, and 2 key-value heads, which 3 and 4 do not; biases everywhere.
std::shared_ptr<const models::Model> dense_model() { return test::SmallModel{.heads = 12, .kv_heads = 2}.make(); }

// Attention and experts beside state-space layers, whose 3 groups only 3 ranks divide.
std::shared_ptr<const models::Model> hybrid_model() { return test::state_space_model("granitemoehybrid", 3); }

std::shared_ptr<const models::Model> expert_model() {
  return test::changed_model(
      "qwen3_moe",
      {{"moe_intermediate_size", 384}, {"intermediate_size", 384}, {"num_attention_heads", 48}, {"head_dim", 8}});
}

TEST(DeterministicRanks, DrawTheBitsOfOneRank) {
  struct Row {
    const char* name;
    Make make;
    std::vector<int> ranks;
  };
  for (const Row& row : {Row{"dense", random(dense_model()), {2, 3, 4}},
                         Row{"experts in q8_0", random(expert_model(), BlockEncoding::find("q8_0")), {2, 3, 4}},
                         Row{"hybrid", random(hybrid_model()), {2, 3, 4}}, Row{"stories", from(kStories), {2, 3}},
                         Row{"qwen3_next_all", from(golden("qwen3_next_all")), {2}}})
    for (const HardwareMode mode : {HardwareMode::accuracy, HardwareMode::performance}) {
      const Make make = deterministic(row.make, mode);
      Drawn one;
      {
        const auto alone = make(open_device("cpu", {.num_threads = 2}), accurate());
        one = draw(*alone);
      }
      for (const int size : row.ranks) {
        SCOPED_TRACE(fmt::format("{}, {} ranks, mode {}", row.name, size, hardware_mode_name(mode)));
        const auto ranks = fork_ranks(size, make);
        const auto engine = make(one_thread(), on(*ranks));
        EXPECT_TRUE(same_bits(draw(*engine), one));
        EXPECT_TRUE(same_bits(draw(*engine), one)) << "with prompts that the cache holds";
      }
    }
}

// Eight query heads of 32 values share a key head, of which four ranks have four each: attention's tiles
// (kernels/cpu/attention/tiled_rows.h) are chosen by what the model shares.
TEST(DeterministicRanks, OfCachesInBf16DrawTheBitsOfOneRank) {
  const Make model =
      random(test::changed_model("llama", {{"head_dim", 32}, {"num_attention_heads", 16}, {"num_key_value_heads", 2}}));
  const Make make = deterministic([&](const std::shared_ptr<Device>& device, EngineOptions options) {
    options.hardware.kv_cache = kv_cache_type("bf16").value();
    return model(device, options);
  });
  const auto alone = make(one_thread(), accurate());
  const Drawn one = draw(*alone);
  for (const int size : {2, 4}) {
    const auto ranks = fork_ranks(size, make);
    EXPECT_TRUE(same_bits(draw(*make(one_thread(), on(*ranks))), one)) << size << " ranks";
  }
}

// Whole logits, of a prompt in one step and in others, with every number of ranks.
TEST(DeterministicRanks, ChunksChangeNoBit) {
  for (const Make& model : {random(dense_model()), random(hybrid_model())}) {
    const Make make = deterministic(model);
    const std::vector<int32_t> prompt = tokens_of(33, 60, 4);
    EngineOptions options = accurate();
    options.max_logit_rows = 16;
    std::vector<float> one;
    for (const int size : {1, 2, 3, 4}) {
      SCOPED_TRACE(fmt::format("{} ranks", size));
      const Make sized = [&](const std::shared_ptr<Device>& device, EngineOptions own) {
        own.max_logit_rows = 16;
        return make(device, own);
      };
      const auto ranks = fork_ranks(size, sized);
      EngineOptions own = on(*ranks);
      const auto engine = sized(one_thread(), own);
      for (const std::vector<int>& chunks :
           {std::vector<int>{16, 16, 1}, {1, 1, 1, 7, 16, 7}, {15, 2, 16}, {5, 5, 5, 5, 5, 5, 3}}) {
        const std::vector<float> logits = logits_in_chunks(*engine, prompt, chunks);
        if (one.empty()) one = logits;
        expect_same_bits(logits, one, fmt::format("chunks of {} and so on", chunks[0]));
      }
    }
  }
}

TEST(DeterministicRanks, ProposedTokensChangeNoBit) {
  const Make make = deterministic(random(hybrid_model()));
  const std::vector<GenerationRequest> requests = {{.prompt = tokens_of(9, 60, 1), .max_tokens = 20},
                                                   {.prompt = tokens_of(5, 60, 2), .max_tokens = 20}};
  const auto alone = make(one_thread(), accurate());
  const SpeculatingRun plain = run_requests(*alone, requests);
  for (const int size : {2, 3}) {
    const auto ranks = fork_ranks(size, make);
    EngineOptions speculating = on(*ranks);
    speculating.draft_tokens = 4;
    const auto engine = make(one_thread(), speculating);
    const SpeculatingRun run = run_requests(*engine, requests, from_answers(plain.answers, 4, 59));
    expect_same_answers(run, plain, fmt::format("{} ranks", size));
    EXPECT_GT(run.accepted, 10);
    EXPECT_LT(run.steps, plain.steps);
  }
}

// Fusions, packs and values that are not kept apart change no bit; parameters go in and come out whole.
TEST(DeterministicRanks, WhatElseChangesNoBit) {
  namespace fs = std::filesystem;
  const fs::path packs = fs::temp_directory_path() / fmt::format("eadem_deterministic_packs_{}", ::getpid());
  const Make make = deterministic(from(golden("llama")), HardwareMode::performance);
  const auto alone = make(one_thread(), accurate());
  const Drawn one = draw(*alone);
  const Make unfused = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
    options.disabled_fusions = {"all"};
    return make(device, options);
  };
  const Make packed = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
    options.pack_cache = packs.string();
    return make(device, options);
  };
  const Make op_by_op = [&](const std::shared_ptr<Device>& device, EngineOptions options) {
    options.op_by_op = true;
    return make(device, options);
  };
  for (const Make& other : {unfused, packed, packed, op_by_op})
    for (const int size : {1, 2, 4}) {
      const auto ranks = fork_ranks(size, other);
      const auto engine = other(one_thread(), on(*ranks));
      EXPECT_TRUE(same_bits(draw(*engine), one));
    }
  EXPECT_EQ(std::distance(fs::directory_iterator(packs), fs::directory_iterator()), 2 * 7)
      << "a pack and its stamp of each rank of one, two and four";
  fs::remove_all(packs);

  const auto ranks = fork_ranks(4, make);
  const auto engine = make(one_thread(), on(*ranks));
  const InferEngine::StateDict expected = alone->state_dict(), whole = engine->whole_state_dict();
  ASSERT_EQ(whole.size(), expected.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(whole[i].first, expected[i].first);
    expect_same_bits(values(whole[i].second), values(expected[i].second), whole[i].first);
  }
  for (InferEngine* each : {alone.get(), engine.get()}) {
    Tensor values = Tensor::on_host(DType::f32, each->parameters().whole_shape("model.layers.0.mlp.down_proj.weight"));
    for (int64_t i = 0; i < values.view.num_elements(); ++i)
      values.view.as<float>()[i] = static_cast<float>(i * 37 % 101 - 50) / 256;
    each->load_param("model.layers.0.mlp.down_proj.weight", values.view);
    each->reset_cache();
  }
  const Drawn changed = draw(*alone);
  EXPECT_FALSE(same_bits(changed, one)) << "parameters matter";
  EXPECT_TRUE(same_bits(draw(*engine), changed));
}

TEST(DeterministicRanks, WhatIsRefused) {
  const Make make = deterministic(random(test::SmallModel{.heads = 12}.make()));
  const auto ranks = fork_ranks(6, make);
  EXPECT_HAS(test::refusal([&] { make(one_thread(), on(*ranks)); }),
             "the same bits on 1, 2, 3, 4 ranks of a model with 12 attention heads; there are 6");
  EXPECT_HAS(test::refusal([] { deterministic(from(golden("gpt_oss")))(one_thread(), accurate()); }),
             "experts.down_proj: experts have biases; deterministic_across_tp makes their products in");
  EngineOptions rounding = accurate();
  rounding.hardware.rounded_weights = {Fp8Encoding::find("fp8_e4m3_channel"), "test"};
  EXPECT_HAS(test::refusal([&] { make(one_thread(), rounding); }),
             "weights are rounded to fp8_e4m3_channel in each step; deterministic_across_tp takes them as stored");
}

}  // namespace
}  // namespace eadem::engine
