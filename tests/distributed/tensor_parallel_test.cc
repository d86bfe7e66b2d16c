// SPDX-License-Identifier: Apache-2.0
//
// Serving on tensor-parallel ranks: whole models against one rank within the bound of regrouped sums, and what ranks
// divide without regrouping (the vocabulary) to the bit.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <cstring>

#include "eadem/modules/base/embedding.h"
#include "eadem/modules/base/lm_head.h"
#include "eadem/modules/base/sampling.h"
#include "tests/distributed/rank_run.h"
#include "tests/support/refusal.h"

namespace eadem::test {
namespace {

using distributed::run_mesh;
using pipeline::Graph;
using pipeline::Program;
using pipeline::ValueId;

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// Serves on `ranks` and checks against one rank.
template <typename Load>
void compare(const models::Model& model, int ranks, const Load& load) {
  const Served one = serve(model, {}, /*greedy=*/true, load);
  std::vector<Served> served(static_cast<size_t>(ranks));
  run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
    served[static_cast<size_t>(mesh.rank(MeshAxis::tp))] = serve(model, mesh, true, load);
  });
  for (const Served& rank : served) {
    EXPECT_TRUE(same_bits(rank.logits, served[0].logits)) << "every rank has the same bits";
    EXPECT_EQ(rank.token, served[0].token);
    EXPECT_TRUE(same_bits(rank.logprob, served[0].logprob));
  }
  // o_proj, or a state-space layer's out_proj, and down_proj of each layer are regrouped.
  const int64_t terms = model.spec().ffn + model.spec().hidden + model.config()->mamba.inner();
  const double bound = regrouping_bound(static_cast<double>(terms), 2.0 * static_cast<double>(model.info().layers) * 4,
                                        largest_of(one.logits));
  ASSERT_EQ(one.logits.size(), served[0].logits.size());
  for (size_t i = 0; i < one.logits.size(); ++i) EXPECT_NEAR(served[0].logits[i], one.logits[i], bound) << i;
  const auto vocab = static_cast<size_t>(model.info().vocab);
  for (size_t row = 0; row < one.token.size(); ++row) {
    // The greedy token is the same, unless two logits lie closer than the bound.
    const float* logits = &one.logits[row * vocab];
    const double gap = logits[one.token[row]] - logits[served[0].token[row]];
    EXPECT_LE(gap, 2 * bound) << row;
  }
}

TEST(TensorParallel, GoldenModelsOnTwoThreeAndFourRanks) {
  struct Row {
    const char* model;
    int ranks;
  };
  // smollm2: 3 heads that share one key-value head, 131 words, an MLP of 52: nothing but the heads divides by 3.
  // llama, qwen2 and qwen3 on 4 ranks have 2 key-value heads. qwen2: biases of q, k and v; qwen2 and qwen3 are tied.
  for (const Row& row : {Row{"llama", 2},          Row{"qwen2", 2},
                         Row{"qwen3", 2},          Row{"mistral", 2},
                         Row{"smollm2", 3},        Row{"llama", 4},
                         Row{"qwen2", 4},          Row{"qwen3", 4},
                         Row{"qwen3_moe", 2},      Row{"qwen3_moe", 4},
                         Row{"deepseek_v3", 2},    Row{"deepseek_v3", 4},
                         Row{"deepseek_v32", 3},   Row{"granitemoehybrid", 2},
                         Row{"falcon_h1", 2},      Row{"nemotron_h_moe", 2},
                         Row{"lfm2", 3},           Row{"qwen3_next_all", 2},
                         Row{"llama4", 3},         Row{"llama4_plain", 2},
                         Row{"gemma4", 2},         Row{"gemma4_equal", 2},
                         Row{"gemma4_equal", 4},   Row{"gemma4_experts", 2},
                         Row{"mistral4", 3},       Row{"longcat_flash", 2},
                         Row{"longcat_flash", 3},  Row{"longcat_flash", 4},
                         Row{"gpt2_scaled", 2},    Row{"gpt2_scaled", 4},
                         Row{"cohere2_full", 3},   Row{"ernie4_5_moe_bias", 3},
                         Row{"falcon_h1_bias", 2}, Row{"nemotron_h_bias", 2},
                         Row{"gemma3_scaled", 2},  Row{"deepseek_v2_bias", 2}}) {
    SCOPED_TRACE(fmt::format("{} on {} ranks", row.model, row.ranks));
    const models::Checkpoint checkpoint = models::open_checkpoint(golden(row.model));
    compare(*checkpoint.model, row.ranks, weights_of(checkpoint));
  }
}

// Six query heads, groups of 3 that share one of two key-value heads: on 2 ranks key-value heads divide; on 3 ranks one
// rank's query heads read both, so that it keeps a copy for each.
TEST(TensorParallel, BiasesAndKeyValueHeadsThatDoNotDivide) {
  for (const auto& [ranks, kv_heads] : {std::pair{2, 2}, {3, 2}, {3, 1}, {2, 3}, {6, 2}}) {
    SCOPED_TRACE(fmt::format("{} ranks, {} key-value heads", ranks, kv_heads));
    compare(*SmallModel{.kv_heads = kv_heads}.make(), ranks, random_weights(5));
  }
}

// Groups that divide with the heads; that are copied, once or for each run of heads that share one; one group, and one
// for each head. A norm of groups that do not divide is made of all ranks' heads.
TEST(TensorParallel, HeadsOfStateSpaceLayersDivide) {
  for (const char* name : {"granitemoehybrid", "falcon_h1_norm"})
    for (const int64_t groups : {1, 2, 3, 12})
      for (const int ranks : {2, 3, 4}) {
        SCOPED_TRACE(fmt::format("{}: {} groups on {} ranks", name, groups, ranks));
        const auto model = state_space_model(name, groups);
        compare(*model, ranks, random_weights(5));
        if (HasFailure()) return;
        const Served one = serve(*model, {}, true, random_weights(5));
        run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
          const Served own = serve(*model, mesh, true, random_weights(5));
          EXPECT_EQ(own.ops.contains("select_heads"), groups % ranks != 0);
          if (groups % ranks == 0) {
            EXPECT_EQ(own.state_bytes * ranks, one.state_bytes);
          }
          EXPECT_LT(own.state_bytes, one.state_bytes);
        });
      }
}

TEST(TensorParallel, StateSpaceHeadsThatDoNotDivideAreOnEveryRank) {
  const auto model = changed_model("granitemoehybrid", {{"mamba_n_heads", 9}, {"mamba_d_head", 8}});
  compare(*model, 2, random_weights(5));
  run_mesh({.tp = 2}, [&](const Mesh& mesh) {
    const Served one = serve(*model, {}, true, random_weights(5)), own = serve(*model, mesh, true, random_weights(5));
    EXPECT_GT(own.state_bytes * 2, one.state_bytes + one.state_bytes / 2) << "whole states beside half of the keys";
  });
}

TEST(TensorParallel, RowParallelBiasIsAddedOnce) {
  // With weights of zero the model's hidden state is the embedding plus the biases of o_proj and down_proj: a bias that
  // each rank adds would count twice. Compared with one rank to the bit: no sum is regrouped.
  const auto model = SmallModel{}.make();
  const auto load = [&](pipeline::ParameterStore& store) {
    for (const std::string& name : store.names()) {
      Tensor whole = Tensor::on_host(DType::f32, store.whole_shape(name));
      const bool zero = name.find("_proj.weight") != std::string::npos;
      for (int64_t i = 0; i < whole.view.num_elements(); ++i)
        whole.view.as<float>()[i] = zero ? 0.0f : static_cast<float>((i * 37 % 101) - 50) / 64;
      store.load(name, whole.view, "test");
    }
  };
  const Served one = serve(*model, {}, true, load);
  for (int ranks : {2, 3})
    run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
      const Served own = serve(*model, mesh, true, load);
      EXPECT_TRUE(same_bits(own.logits, one.logits));
      EXPECT_EQ(own.ops.at("add_bias"), 2 * model->info().layers);
      EXPECT_EQ(own.token, one.token);
    });
}

TEST(TensorParallel, RanksHoldParts) {
  const auto model = SmallModel{.kv_heads = 6, .bias = false}.make();
  const Served one = serve(*model, {}, true, random_weights(1));
  run_mesh({.tp = 2}, [&](const Mesh& mesh) {
    const Served own = serve(*model, mesh, true, random_weights(1));
    EXPECT_EQ(own.state_bytes * 2, one.state_bytes);
    const int64_t norms = (2 * model->info().layers + 1) * model->info().hidden * 4;
    EXPECT_EQ((own.parameter_bytes - norms) * 2, one.parameter_bytes - norms) << "all but the norms are divided";
    // One sum for the embedding, two a layer; one gathering of logits, which the sampler and the output share.
    EXPECT_EQ(own.ops.at("all_reduce"), 1 + 2 * model->info().layers);
    EXPECT_EQ(own.ops.at("all_gather"), 1);
    // docs/parallelism.md: T H b (n - 1) / n * 2 each, and 4 R V / n of logits to the other rank.
    const double tokens = 8, hidden = static_cast<double>(model->info().hidden), vocab = 512;
    const double sums = static_cast<double>(1 + 2 * model->info().layers) * tokens * hidden * 4;
    EXPECT_EQ(own.sent_bytes, sums + tokens * vocab * 4 / 2);
  });
}

TEST(TensorParallel, WhatCannotBeDividedIsRefusedWithBothNumbers) {
  const auto refuse = [&](const SmallModel& small, int ranks) {
    const auto model = small.make();
    return refusal(
        [&] { run_mesh({.tp = ranks}, [&](const Mesh& mesh) { serve(*model, mesh, true, random_weights(1)); }); });
  };
  EXPECT_HAS(refuse({}, 4), "6 attention heads do not divide into 4");
  EXPECT_HAS(refuse({.vocab = 2, .heads = 6}, 3), "2 words of the vocabulary for 3");
  EXPECT_HAS(refuse({.ffn = 2}, 3), "does not divide into 3");
}

// --- The vocabulary: divided, and yet to the bit.

struct Head {
  std::vector<float> logits, logprob;
  std::vector<int32_t> token;
};

constexpr int64_t kRows = 9, kHidden = 33;

Head run_head(const Mesh& mesh, int64_t vocab, bool greedy, DType weights) {
  const auto device = open_device("cpu", {.num_threads = 1});
  HardwareOverrides overrides;
  overrides.weights = weights;
  modules::ModelSpec spec{.hidden = kHidden,
                          .ffn = 8,
                          .layers = 1,
                          .heads = 1,
                          .kv_heads = 1,
                          .head_dim = 8,
                          .vocab = vocab,
                          .num_parameters = vocab * kHidden};
  const auto hardware =
      modules::AutoHardwareConfig::from_model_spec(spec, *device, HardwareMode::accuracy, overrides, "test");
  Graph graph;
  modules::BuildContext context{.graph = graph,
                                .device = *device,
                                .hardware = hardware,
                                .cache = {},
                                .num_ranks = mesh.size(MeshAxis::tp),
                                .rank = mesh.rank(MeshAxis::tp)};
  const ValueId x = graph.add_input("x", TensorType(DType::f32, {Symbol::logit_rows, kHidden}));
  const ValueId logits = modules::LmHead(vocab, kHidden, "head.weight", false).build(context, x);
  graph.mark_output("logits", logits);
  modules::Sampling().build(context, logits);
  pipeline::Environment environment{.device = device, .mesh = mesh, .whole_outputs = {"logits"}};
  environment.bounds[Symbol::logit_rows] = kRows;
  auto parameters =
      std::make_shared<pipeline::ParameterStore>(device, mesh.rank(MeshAxis::tp), mesh.size(MeshAxis::tp));
  Program program(std::move(graph), environment, parameters);
  program.require_complete();
  models::load_random(*parameters, 3, 0.3);
  std::vector<float> values(kRows * kHidden);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i * i % 1009));
  program.set_input(program.input("x"), values.data(), static_cast<int64_t>(values.size() * sizeof(float)));
  const auto rows = sample_rows(kRows, greedy);
  program.set_input(program.input("sample_rows"), rows.data(), static_cast<int64_t>(rows.size() * sizeof(rows[0])));
  program.run(environment.bounds);
  Head head;
  head.logits.resize(static_cast<size_t>(kRows * vocab));
  head.logprob.resize(kRows);
  head.token.resize(kRows);
  program.read(program.output("logits"), head.logits.data());
  program.read(program.output("logprob"), head.logprob.data());
  program.read(program.output("token"), head.token.data());
  return head;
}

TEST(Vocabulary, HeadAndSamplingGiveTheBitsOfOneRank) {
  for (int64_t vocab : {131, 512, 32000})
    for (bool greedy : {true, false})
      for (DType weights : {DType::f32, DType::bf16}) {
        if (vocab == 32000 && weights == DType::bf16) continue;
        SCOPED_TRACE(fmt::format("{} words, greedy {}, {}", vocab, greedy, dtype_name(weights)));
        const Head one = run_head({}, vocab, greedy, weights);
        for (int ranks : {2, 3})
          run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
            const Head own = run_head(mesh, vocab, greedy, weights);
            EXPECT_TRUE(same_bits(own.logits, one.logits));
            EXPECT_EQ(own.token, one.token);
            EXPECT_TRUE(same_bits(own.logprob, one.logprob));
          });
      }
}

std::vector<float> run_embedding(const Mesh& mesh, int64_t vocab, const std::vector<int32_t>& ids) {
  const auto device = open_device("cpu", {.num_threads = 1});
  modules::ModelSpec spec{.hidden = kHidden,
                          .ffn = 8,
                          .layers = 1,
                          .heads = 1,
                          .kv_heads = 1,
                          .head_dim = 8,
                          .vocab = vocab,
                          .num_parameters = vocab * kHidden};
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(spec, *device, HardwareMode::accuracy);
  Graph graph;
  modules::BuildContext context{.graph = graph,
                                .device = *device,
                                .hardware = hardware,
                                .cache = {},
                                .num_ranks = mesh.size(MeshAxis::tp),
                                .rank = mesh.rank(MeshAxis::tp)};
  const ValueId input = graph.add_input("ids", TensorType(DType::i32, {Symbol::tokens}));
  graph.mark_output("y", modules::Embedding(vocab, kHidden).build(context, input));
  pipeline::Environment environment{.device = device, .mesh = mesh};
  environment.bounds[Symbol::tokens] = static_cast<int64_t>(ids.size());
  auto parameters =
      std::make_shared<pipeline::ParameterStore>(device, mesh.rank(MeshAxis::tp), mesh.size(MeshAxis::tp));
  Program program(std::move(graph), environment, parameters);
  program.require_complete();
  models::load_random(*parameters, 3, 0.3);
  program.set_input(program.input("ids"), ids.data(), static_cast<int64_t>(ids.size() * sizeof(int32_t)));
  program.run(environment.bounds);
  std::vector<float> y(ids.size() * kHidden);
  program.read(program.output("y"), y.data());
  return y;
}

TEST(Vocabulary, EmbeddingGivesTheBitsOfOneRank) {
  for (int32_t vocab : {3, 131, 512}) {
    std::vector<int32_t> ids;
    for (int32_t id = 0; id < vocab; ++id) ids.push_back(id * 7 % vocab);
    ids.push_back(0);
    ids.push_back(vocab - 1);
    const std::vector<float> one = run_embedding({}, vocab, ids);
    for (int ranks : {2, 3})
      run_mesh({.tp = ranks}, [&](const Mesh& mesh) { EXPECT_TRUE(same_bits(run_embedding(mesh, vocab, ids), one)); });
  }
}

}  // namespace
}  // namespace eadem::test
