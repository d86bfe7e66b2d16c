// SPDX-License-Identifier: Apache-2.0
//
// deterministic_across_tp: logits, tokens and log-probabilities of whole models have the same bits on each number of
// ranks, one included; and what each costs.
#include <gtest/gtest.h>

#include <cstring>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "tests/distributed/rank_run.h"
#include "tests/support/refusal.h"

namespace eadem::test::deterministic_test {
namespace {

using distributed::run_mesh;

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

struct Serving {
  HardwareMode mode = HardwareMode::accuracy;
  std::optional<modules::ModelSpec> spec = {};
  bool greedy = true;
};

template <typename Load>
std::vector<Served> serve_on(const models::Model& model, int ranks, const Load& load, const Serving& run,
                             bool deterministic = true) {
  if (ranks == 1) return {serve(model, {}, run.greedy, load, run.mode, run.spec, deterministic)};
  std::vector<Served> served(static_cast<size_t>(ranks));
  run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
    served[static_cast<size_t>(mesh.rank(MeshAxis::tp))] =
        serve(model, mesh, run.greedy, load, run.mode, run.spec, deterministic);
  });
  return served;
}

// Every rank of each number of ranks gives what one rank does.
template <typename Load>
void expect_bits_of_one(const models::Model& model, const std::vector<int>& rank_counts, const Load& load,
                        const Serving& run = {}) {
  const Served one = serve_on(model, 1, load, run)[0];
  ASSERT_FALSE(one.logits.empty());
  ASSERT_TRUE(one.ops.contains("shard_sum"));
  for (const int ranks : rank_counts) {
    SCOPED_TRACE(fmt::format("{} ranks", ranks));
    for (const Served& rank : serve_on(model, ranks, load, run)) {
      EXPECT_TRUE(same_bits(rank.logits, one.logits));
      EXPECT_EQ(rank.token, one.token);
      EXPECT_TRUE(same_bits(rank.logprob, one.logprob));
    }
  }
}

TEST(DeterministicAcrossTp, GoldenModels) {
  struct Row {
    const char* model;
    std::vector<int> ranks;
  };
  // Key-value heads that divide, are copied and are all of one; experts, with a shared one and with a latent; latent
  // attention; state-space layers, linear attention and convolutions beside attention; windows and chunks.
  for (const Row& row :
       {Row{"llama", {2, 4}}, Row{"qwen2", {2, 4}}, Row{"qwen3", {2, 4}}, Row{"smollm2", {3}}, Row{"qwen3_moe", {2, 4}},
        Row{"qwen2_moe", {2}}, Row{"deepseek_v3", {2, 4}}, Row{"deepseek_v32", {3}}, Row{"granitemoehybrid", {2}},
        Row{"falcon_h1", {2}}, Row{"nemotron_h_moe", {2}}, Row{"lfm2", {3}}, Row{"qwen3_next_all", {2}},
        Row{"llama4", {3}}, Row{"gemma4_experts", {2}}, Row{"longcat_flash", {2, 3, 4}}}) {
    const models::Checkpoint checkpoint = models::open_checkpoint(golden(row.model));
    for (const HardwareMode mode : {HardwareMode::accuracy, HardwareMode::performance}) {
      SCOPED_TRACE(fmt::format("{}, mode {}", row.model, hardware_mode_name(mode)));
      expect_bits_of_one(*checkpoint.model, row.ranks, weights_of(checkpoint), {mode});
    }
  }
}

// Biases everywhere; 12 query heads that share 1, 2, 3 or 4 key-value heads; an MLP of 40, whose parts on 3 ranks are
// 14, 13 and 13.
TEST(DeterministicAcrossTp, BiasesAndPartsThatAreUneven) {
  for (const int kv_heads : {1, 2, 3, 4}) {
    SCOPED_TRACE(fmt::format("{} key-value heads", kv_heads));
    expect_bits_of_one(*SmallModel{.heads = 12, .kv_heads = kv_heads}.make(), {2, 3, 4}, random_weights(5));
    expect_bits_of_one(*SmallModel{.heads = 12, .kv_heads = kv_heads}.make(), {2, 3, 4}, random_weights(6),
                       {.greedy = false});
  }
  expect_bits_of_one(*SmallModel{.heads = 6, .kv_heads = 2}.make(), {2, 3}, random_weights(5));
}

// State-space layers whose groups divide or are copied, and one whose 9 heads all lie on each of 2 or 4 ranks.
TEST(DeterministicAcrossTp, StateSpaceLayers) {
  for (const char* name : {"granitemoehybrid", "falcon_h1_norm"})
    for (const int64_t groups : {1, 2, 3, 12}) {
      SCOPED_TRACE(fmt::format("{}: {} groups", name, groups));
      expect_bits_of_one(*state_space_model(name, groups), {2, 3, 4}, random_weights(5));
    }
  const auto whole = changed_model(
      "granitemoehybrid",
      {{"mamba_n_heads", 9}, {"mamba_d_head", 8}, {"num_attention_heads", 12}, {"num_key_value_heads", 12}});
  expect_bits_of_one(*whole, {2, 3, 4}, random_weights(5));
}

// The weights of a model as they are stored in a checkpoint of this type.
modules::ModelSpec stored_as(const models::Model& model, const Encoding* encoding) {
  EADEM_CHECK(encoding != nullptr, "an encoding that is not there");
  modules::ModelSpec spec = model.spec();
  spec.checkpoint_type = WeightType(DType::f32, encoding);
  return spec;
}

// Blocks and groups that fit the borders of shards, and scales of whole rows and whole matrices, which are made before
// a rank's part is cut.
TEST(DeterministicAcrossTp, EncodedWeights) {
  struct Row {
    const Encoding* encoding;
    int heads;  // of 8 elements; as wide as the MLP
    std::vector<int> ranks;
    int hidden = 64;
  };
  for (const Row& row :
       {Row{BlockEncoding::find("q4_k"), 128, {2, 4}, 256}, Row{BlockEncoding::find("q4_k"), 96, {3}, 256},
        Row{BlockEncoding::find("q8_0"), 48, {2, 3, 4}}, Row{GroupEncoding::find("int8_row_f32"), 48, {2, 3, 4}},
        Row{GroupEncoding::find("int4_g32_f16"), 48, {2, 3, 4}},
        Row{Fp8Encoding::find("fp8_e4m3_channel"), 12, {2, 3, 4}},
        Row{Fp8Encoding::find("fp8_e4m3_tensor"), 12, {2, 3, 4}}}) {
    const auto model = SmallModel{.vocab = 64,
                                  .hidden = row.hidden,
                                  .ffn = row.heads * 8,
                                  .layers = 1,
                                  .heads = row.heads,
                                  .kv_heads = 2,
                                  .bias = false}
                           .make();
    const modules::ModelSpec spec = stored_as(*model, row.encoding);
    for (const HardwareMode mode : {HardwareMode::accuracy, HardwareMode::performance}) {
      SCOPED_TRACE(
          fmt::format("{} in {} heads, mode {}", spec.checkpoint_type->name(), row.heads, hardware_mode_name(mode)));
      expect_bits_of_one(*model, row.ranks, random_weights(5), {mode, spec});
    }
  }
  const auto experts = changed_model(
      "qwen3_moe",
      {{"moe_intermediate_size", 384}, {"intermediate_size", 384}, {"num_attention_heads", 48}, {"head_dim", 8}});
  expect_bits_of_one(*experts, {2, 3, 4}, random_weights(5),
                     {HardwareMode::performance, stored_as(*experts, BlockEncoding::find("q8_0"))});
}

// The terms of each product are those of one rank without the option, grouped otherwise.
TEST(DeterministicAcrossTp, TheOptionRegroupsSums) {
  const auto model = SmallModel{.heads = 12, .kv_heads = 3}.make();
  const Served with = serve_on(*model, 1, random_weights(5), {})[0],
               without = serve_on(*model, 1, random_weights(5), {}, false)[0],
               two_without = serve_on(*model, 2, random_weights(5), {}, false)[0];
  EXPECT_FALSE(same_bits(with.logits, without.logits));
  EXPECT_FALSE(same_bits(two_without.logits, without.logits)) << "else there would be nothing to test";
  double largest = 0;
  for (const float value : without.logits) largest = std::max(largest, std::abs(static_cast<double>(value)));
  const double bound = regrouping_bound(48 + 96 + 40, 2.0 * 2 * 4, largest);
  for (size_t i = 0; i < with.logits.size(); ++i) EXPECT_NEAR(with.logits[i], without.logits[i], bound) << i;
}

// Ranks that divide experts have all tensors whole, and every number of them has the bits of one rank of tp.
TEST(DeterministicAcrossTp, RanksOfExperts) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden("qwen3_moe"));
  const Served one = serve_on(*checkpoint.model, 1, weights_of(checkpoint), {})[0];
  for (const int ranks : {2, 3})
    run_mesh({.ep = ranks}, [&](const Mesh& mesh) {
      const Served own = serve(*checkpoint.model, mesh, true, weights_of(checkpoint), HardwareMode::accuracy, {}, true);
      EXPECT_TRUE(same_bits(own.logits, one.logits));
      EXPECT_TRUE(same_bits(own.logprob, one.logprob));
    });
}

// docs/parallelism.md: as many sums as a rank's shards make travel from it to each other rank. On 2 and 4 ranks that is
// one; on 3 ranks, two.
TEST(DeterministicAcrossTp, WhatRanksHoldAndSend) {
  const auto model = SmallModel{.heads = 12, .kv_heads = 12, .bias = false}.make();
  const Served one = serve_on(*model, 1, random_weights(5), {})[0];
  const Served plain = serve_on(*model, 1, random_weights(5), {}, false)[0];
  EXPECT_EQ(one.parameter_bytes, plain.parameter_bytes);
  EXPECT_EQ(one.sent_bytes, 0);
  EXPECT_EQ(one.ops.at("shard_sum"), 2 * 2);
  // Six products each in the place of an o_proj and a down_proj, to which the residual is added apart.
  EXPECT_EQ(plain.ops.at("linear_add"), 2 * 2);
  EXPECT_EQ(one.ops.at("linear"), plain.ops.at("linear") + 2 * 2 * 6);
  for (const auto& [ranks, sums] : {std::pair{2, 1.0}, {3, 2.0}, {4, 1.0}}) {
    SCOPED_TRACE(fmt::format("{} ranks", ranks));
    const double tokens = 8, hidden = 48, layers = 2, others = ranks - 1;
    const std::vector<Served> served = serve_on(*model, ranks, random_weights(5), {});
    for (int rank = 0; rank < ranks; ++rank) {
      const Served& own = served[static_cast<size_t>(rank)];
      const double embedding = 2 * others / ranks * tokens * hidden * 4,
                   logits = others * tokens * static_cast<double>(part_of(512, ranks, rank).size) * 4;
      EXPECT_DOUBLE_EQ(own.sent_bytes, embedding + logits + 2 * layers * others * sums * tokens * hidden * 4) << rank;
      EXPECT_EQ(own.ops.at("all_reduce"), 1) << "of the embedding";
    }
  }
}

TEST(DeterministicAcrossTp, WhatIsRefused) {
  const auto refuse = [](const models::Model& model, int ranks, const Serving& run = {}) {
    return refusal([&] { serve_on(model, ranks, random_weights(1), run); });
  };
  EXPECT_HAS(refuse(*SmallModel{.heads = 12}.make(), 6),
             "the same bits on 1, 2, 3, 4 ranks of a model with 12 attention heads; there are 6");
  EXPECT_HAS(refuse(*SmallModel{.heads = 6}.make(), 4),
             "the same bits on 1, 2, 3 ranks of a model with 6 attention heads; there are 4");
  const auto blocks = SmallModel{.vocab = 64, .hidden = 256, .ffn = 768, .heads = 96, .kv_heads = 2}.make();
  EXPECT_HAS(refuse(*blocks, 2, Serving{.spec = stored_as(*blocks, BlockEncoding::find("q4_k"))}),
             "o_proj: weights are q4_k: a rank's rows of 384 values are not whole blocks of 256");
  const auto rows = SmallModel{.vocab = 64, .hidden = 64, .ffn = 96, .heads = 12, .kv_heads = 2, .bias = false}.make();
  EXPECT_HAS(refuse(*rows, 2, Serving{.spec = stored_as(*rows, GroupEncoding::find("int8_row_f32"))}),
             "o_proj: weights are int8_row_f32: a rank's rows of 48 values are not whole steps of 32");
  const auto device = open_device("cpu", {.num_threads = 1});
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(rows->spec(), *device, HardwareMode::accuracy);
  EXPECT_HAS(refusal([&] {
               models::build_training_graph(
                   *rows, {.device = device.get(), .hardware = &hardware, .deterministic_across_tp = true});
             }),
             "Unsupported: deterministic_across_tp is for serving");
}

}  // namespace
}  // namespace eadem::test::deterministic_test
