// SPDX-License-Identifier: Apache-2.0
//
// Serving on ranks that divide the experts: whole models give the bits of one rank, whatever the number of ranks, the
// mode and the form in which the checkpoint has its experts.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "tests/distributed/rank_run.h"
#include "tests/support/refusal.h"

namespace eadem::test {
namespace {

using distributed::run_mesh;

template <typename T>
bool are_equal(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// As engines load: in place, with the types of the checkpoint.
auto in_place(const models::Checkpoint& checkpoint) {
  return [&checkpoint](pipeline::ParameterStore& store) {
    models::load_weights(store, checkpoint, {}, {.in_place = true});
  };
}

void expect_bits_of_one_rank(const models::Checkpoint& checkpoint, int ranks, HardwareMode mode) {
  const auto spec = models::spec_of(checkpoint);
  for (bool greedy : {true, false}) {
    const Served one = serve(*checkpoint.model, {}, greedy, in_place(checkpoint), mode, spec);
    ASSERT_FALSE(one.logits.empty());
    run_mesh({.ep = ranks}, [&](const Mesh& mesh) {
      const Served own = serve(*checkpoint.model, mesh, greedy, in_place(checkpoint), mode, spec);
      EXPECT_TRUE(are_equal(own.logits, one.logits)) << "rank " << mesh.rank(MeshAxis::ep);
      EXPECT_EQ(own.token, one.token);
      EXPECT_TRUE(are_equal(own.logprob, one.logprob));
      EXPECT_GE(own.ops.at("expert_dispatch"), 1);
      EXPECT_EQ(own.ops.at("expert_dispatch"), own.ops.at("expert_combine"));
      EXPECT_FALSE(own.ops.contains("all_reduce"));
      EXPECT_LT(own.layout_bytes, one.layout_bytes);
    });
  }
}

TEST(ExpertParallel, GoldenModelsGiveTheBitsOfOneRank) {
  struct Row {
    const char* model;
    std::vector<int> ranks;
  };
  // 8 experts, a layer without; groups, a correction and a shared expert; 3 experts and a shared one with a gate; 9; 5
  // with biases; 5 whose input is weighed; 5 beside an MLP; 3 beside state spaces; 5 without gate_proj, in a latent
  // space; 4 beside linear attention; 7; some beside identities; some that tokens name.
  for (const Row& row : {Row{"qwen3_moe", {2, 3, 4, 8}},
                         {"deepseek_v3", {2, 3, 4}},
                         {"qwen2_moe", {2, 3}},
                         {"glm4_moe", {2, 4}},
                         {"gpt_oss", {3}},
                         {"llama4", {3}},
                         {"gemma4_experts", {2}},
                         {"granitemoehybrid", {3}},
                         {"nemotron_h_moe", {4}},
                         {"qwen3_next_all", {3}},
                         {"minimax_m2", {4}},
                         {"longcat_flash", {2, 3}},
                         {"deepseek_v4", {3}}})
    for (int ranks : row.ranks)
      for (HardwareMode mode : {HardwareMode::accuracy, HardwareMode::performance}) {
        SCOPED_TRACE(fmt::format("{} on {} ranks, mode {}", row.model, ranks, static_cast<int>(mode)));
        expect_bits_of_one_rank(models::open_checkpoint(golden(row.model)), ranks, mode);
      }
}

// Experts stacked in one tensor, of a GGUF file in blocks and of a directory in MXFP4.
TEST(ExpertParallel, EncodedExpertsGiveTheBitsOfOneRank) {
  for (const char* path : {"qwen3_moe_all/model-q8_0.gguf", "qwen2_moe/model-q8_0.gguf", "gpt_oss_mxfp4"})
    for (int ranks : {2, 3})
      for (HardwareMode mode : {HardwareMode::accuracy, HardwareMode::performance}) {
        SCOPED_TRACE(fmt::format("{} on {} ranks, mode {}", path, ranks, static_cast<int>(mode)));
        expect_bits_of_one_rank(models::open_checkpoint(golden(path)), ranks, mode);
      }
}

TEST(ExpertParallel, RanksHoldTheirExpertsAlone) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden("qwen3_moe"));
  const Served one = serve(*checkpoint.model, {}, true, weights_of(checkpoint));
  // Two of three layers have 8 experts of three matrices [20, 32].
  const int64_t expert_bytes = 2 * 3 * 20 * 32 * 4;
  run_mesh({.ep = 3}, [&](const Mesh& mesh) {
    const Served own = serve(*checkpoint.model, mesh, true, weights_of(checkpoint));
    const int64_t kept = part_of(8, 3, mesh.rank(MeshAxis::ep)).size;
    EXPECT_EQ(one.parameter_bytes - own.parameter_bytes, (8 - kept) * expert_bytes);
    EXPECT_EQ(own.state_bytes, one.state_bytes) << "the cache is whole";
    // docs/parallelism.md: the rows that a rank's experts made go to the two others, in each layer with experts.
    const double tokens = 8, top_k = 2, hidden = 32;
    EXPECT_DOUBLE_EQ(own.sent_bytes, 2 * 2 * tokens * top_k / 3 * hidden * 4);
  });
}

TEST(ExpertParallel, ExplainSaysWhoComputesARow) {
  const auto answers = [](const Served& served) {
    std::string text;
    for (const Decision& decision : served.decisions)
      if (decision.subject.starts_with("experts ")) text += to_string(decision);
    return text;
  };
  const models::Checkpoint checkpoint = models::open_checkpoint(golden("qwen3_moe"));
  const std::string one = answers(serve(*checkpoint.model, {}, true, weights_of(checkpoint)));
  EXPECT_HAS(one, "experts model.layers.0.mlp");
  EXPECT_HAS(one, "8 of 8 experts, 2 for each token");
  EXPECT_HAS(one, "one rank has all experts");
  run_mesh({.ep = 3}, [&](const Mesh& mesh) {
    const std::string own = answers(serve(*checkpoint.model, mesh, true, weights_of(checkpoint)));
    EXPECT_HAS(own, "3 ranks divide the experts");
    EXPECT_HAS(own, fmt::format("{} of 8 experts, 2 for each token", part_of(8, 3, mesh.rank(MeshAxis::ep)).size));
    EXPECT_HAS(own, "every rank has all tokens");
  });
}

// Tensor-parallel ranks divide the matrices of each expert then. Each ep rank has the bits of every other.
TEST(ExpertParallel, TogetherWithTensorParallelRanks) {
  for (const char* name : {"qwen3_moe", "deepseek_v3"}) {
    SCOPED_TRACE(name);
    const models::Checkpoint checkpoint = models::open_checkpoint(golden(name));
    std::vector<float> tensor_ranks;
    run_mesh({.tp = 2}, [&](const Mesh& mesh) {
      const Served own = serve(*checkpoint.model, mesh, true, weights_of(checkpoint));
      if (mesh.rank(MeshAxis::tp) == 0) tensor_ranks = own.logits;
    });
    run_mesh({.tp = 2, .ep = 3}, [&](const Mesh& mesh) {
      const Served own = serve(*checkpoint.model, mesh, true, weights_of(checkpoint));
      EXPECT_TRUE(are_equal(own.logits, tensor_ranks)) << "experts regroup nothing";
    });
  }
}

// The first stage has experts in one of its layers, the second in its only one.
TEST(ExpertParallel, TogetherWithPipelineStages) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden("qwen3_moe"));
  const Served one = serve(*checkpoint.model, {}, true, weights_of(checkpoint));
  run_mesh({.pp = 2, .ep = 3}, [&](const Mesh& mesh) {
    const Served own = serve(*checkpoint.model, mesh, true, weights_of(checkpoint, /*one_stage=*/true));
    EXPECT_EQ(own.ops.at("expert_dispatch"), 1);
    EXPECT_EQ(own.logits.empty(), mesh.rank(MeshAxis::pp) == 0);
    if (own.logits.empty()) return;
    EXPECT_TRUE(are_equal(own.logits, one.logits));
    EXPECT_EQ(own.token, one.token);
  });
}

TEST(ExpertParallel, WhatCannotBeDividedIsRefused) {
  const auto refuse = [](const char* name, int ranks) {
    const auto model = models::model_from_config(golden(name) + "/config.json");
    return refusal(
        [&] { run_mesh({.ep = ranks}, [&](const Mesh& mesh) { serve(*model, mesh, true, random_weights(1)); }); });
  };
  EXPECT_HAS(refuse("llama", 2), "InvalidArgument: 2 ranks to divide experts; the model has none");
  const std::string few = refuse("qwen2_moe", 4);
  EXPECT_HAS(few, "Unsupported");
  EXPECT_HAS(few, "3 experts for 4 ranks");
}

}  // namespace
}  // namespace eadem::test
