// SPDX-License-Identifier: Apache-2.0
//
// Training on a mesh: gradients, norms and losses of tp and dp ranks against one rank. To the bit where sums have the
// same order, within the bound of regrouped sums elsewhere.
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstring>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/models/config/model_config.h"
#include "tests/distributed/training_batches.h"
#include "tests/support/refusal.h"

namespace eadem::test {
namespace {

using distributed::run_mesh;
using train::Batch;
using train::Trainer;

struct TrainedRank {
  std::vector<double> losses, norms;                             // of each step
  std::vector<double> balancing;                                 // the load-balancing losses, where they are on
  std::map<std::string, std::vector<float>> gradients, weights;  // after the last step; this rank's parts
  std::map<std::string, Shape> shapes;
};

// Steps over the same passes; `passes` are this rank's.
TrainedRank train_rank(const models::Model& model, const Mesh& mesh, const std::vector<Batch>& passes, int steps,
                       double balancing = 0, const Encoding* products = nullptr, const Encoding* head = nullptr) {
  train::TrainerOptions options;
  options.products = products;
  options.head_products = head;
  options.batch_tokens = 64;
  options.router_aux_loss_coef = balancing;
  Trainer trainer(std::shared_ptr<const models::Model>(std::shared_ptr<void>(), &model),
                  open_device("cpu", {.num_threads = 1}), options, mesh);
  trainer.load_random(7, 0.15);
  TrainedRank run;
  for (int step = 0; step < steps; ++step) {
    const train::StepResult result = trainer.step(passes, 1e-2);
    run.losses.push_back(result.loss);
    run.norms.push_back(result.grad_norm);
    if (result.load_balancing_loss) run.balancing.push_back(*result.load_balancing_loss);
  }
  const auto values = [](const Tensor& tensor) {
    return std::vector<float>(tensor.view.as<float>(), tensor.view.as<float>() + tensor.view.num_elements());
  };
  for (const auto& [name, tensor] : trainer.state_dict()) {
    run.weights[name] = values(tensor);
    run.shapes[name] = tensor.shape();
    if (!name.ends_with("e_score_correction_bias")) run.gradients[name] = values(trainer.gradient(name));
  }
  return run;
}

// Gradients are sums over the tokens of products along the layers; each of their terms is as large as the largest, or
// as `term`.
void expect_close(const std::vector<float>& actual, const std::vector<float>& expected, const std::string& name,
                  double term = 0) {
  ASSERT_EQ(actual.size(), expected.size()) << name;
  const double largest = std::max(term, largest_of(expected));
  const double bound = regrouping_bound(512, 32, largest);
  for (size_t i = 0; i < actual.size(); ++i) ASSERT_NEAR(actual[i], expected[i], bound) << name << " " << i;
}

// A rank's part of a whole matrix or vector, as the store cuts it.
std::vector<float> part_of_whole(const std::vector<float>& whole, const Shape& shape, int axis, int ranks, int rank) {
  const PartRange range = part_of(shape[axis], ranks, rank);
  std::vector<float> part;
  int64_t outer = 1, inner = 1;
  for (int i = 0; i < axis; ++i) outer *= shape[i];
  for (int i = axis + 1; i < shape.rank(); ++i) inner *= shape[i];
  for (int64_t o = 0; o < outer; ++o)
    for (int64_t e = range.begin; e < range.begin + range.size; ++e)
      for (int64_t i = 0; i < inner; ++i) part.push_back(whole[static_cast<size_t>((o * shape[axis] + e) * inner + i)]);
  return part;
}

// The axis along which a part is divided.
int divided_axis(const Shape& part, const Shape& whole) {
  for (int axis = 0; axis < whole.rank(); ++axis)
    if (part[axis] != whole[axis]) return axis;
  return -1;
}

// keys_rotate: whether keys have positions, so that a bias of theirs has a gradient.
void compare_tp(const models::Model& model, int ranks, double balancing = 0, bool keys_rotate = true) {
  const std::vector<Batch> passes = {make_batch(model.info().vocab, 2, 1), make_batch(model.info().vocab, 3, 2)};
  const TrainedRank one = train_rank(model, {}, passes, 1, balancing);
  const TrainedRank three_steps = train_rank(model, {}, passes, 3, balancing);
  std::vector<TrainedRank> runs(static_cast<size_t>(ranks)), longer(static_cast<size_t>(ranks));
  run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
    const auto rank = static_cast<size_t>(mesh.rank(MeshAxis::tp));
    runs[rank] = train_rank(model, mesh, passes, 1, balancing);
    longer[rank] = train_rank(model, mesh, passes, 3, balancing);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    const TrainedRank& run = runs[static_cast<size_t>(rank)];
    EXPECT_NEAR(run.losses[0], one.losses[0], 1e-5);
    EXPECT_NEAR(run.norms[0], one.norms[0], 1e-4 * one.norms[0]);
    EXPECT_EQ(run.norms, runs[0].norms) << "every rank clips by the same norm";
    EXPECT_EQ(run.balancing, runs[0].balancing) << "every rank makes the same loss";
    ASSERT_EQ(run.balancing.size(), balancing > 0 ? 1u : 0u);
    // As close as the losses, which are of the same size.
    if (balancing > 0) {
      EXPECT_NEAR(run.balancing[0], one.balancing[0], 1e-5);
    }
    for (const auto& [name, expected] : one.gradients) {
      const std::vector<float>& actual = run.gradients.at(name);
      const Shape& whole = one.shapes.at(name);
      const int axis = divided_axis(run.shapes.at(name), whole);
      // A bias of keys that are not rotated adds the same to all scores of a query, so that its gradient is 0. What is
      // computed are roundings of terms that are as large as those of the weight's gradient.
      const bool cancels = !keys_rotate && name.ends_with("k_proj.bias");
      const double term = cancels ? largest_of(one.gradients.at(name.substr(0, name.size() - 4) + "weight")) : 0.0;
      if (axis < 0) {
        expect_close(actual, expected, name, term);
        EXPECT_TRUE(same_bits(run.weights.at(name), runs[0].weights.at(name))) << name << " is the same on all ranks";
        continue;
      }
      expect_close(actual, part_of_whole(expected, whole, axis, ranks, rank), name, term);
    }
    for (size_t step = 0; step < 3; ++step)
      EXPECT_NEAR(longer[static_cast<size_t>(rank)].losses[step], three_steps.losses[step], 2e-3) << step;
  }
  EXPECT_LT(three_steps.losses[2], three_steps.losses[0]);
}

TEST(TensorParallelTraining, GradientsOfOneRank) {
  for (const char* name :
       {"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "llama4_plain", "llama4_usual", "longcat_flash"}) {
    SCOPED_TRACE(name);
    compare_tp(*models::model_from_config(golden(name) + "/config.json"), 2);
  }
  SCOPED_TRACE("smollm2 on 3 ranks: one key-value head, an uneven vocabulary and MLP");
  compare_tp(*models::model_from_config(golden("smollm2") + "/config.json"), 3);
}

// Groups that divide, and one for all heads, whose b, c and norm every rank makes.
TEST(TensorParallelTraining, StateSpaceLayers) {
  for (const auto& [groups, ranks] : {std::pair{1, 2}, {2, 2}, {2, 3}, {3, 3}, {3, 4}}) {
    SCOPED_TRACE(fmt::format("{} groups on {} ranks", groups, ranks));
    compare_tp(*state_space_model("granitemoehybrid", groups), ranks, 0, false);
  }
  SCOPED_TRACE("the norm before the gate");
  compare_tp(*state_space_model("falcon_h1_norm", 2), 3);
}

// A rank rounds the blocks of one rank, and rows of what it has of x by scales of its own.
TEST(TensorParallelTraining, ProductsIn8BitFloatsDivideWholeBlocks) {
  const Encoding* products = train::products_from_name("fp8_block128");
  const auto train = [&](int64_t intermediate, int ranks) {
    const auto model =
        changed_model("llama", {{"hidden_size", 128}, {"head_dim", 128}, {"intermediate_size", intermediate}});
    std::vector<TrainedRank> runs(static_cast<size_t>(ranks));
    run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
      runs[static_cast<size_t>(mesh.rank(MeshAxis::tp))] =
          train_rank(*model, mesh, {make_batch(model->info().vocab, 3, 1)}, 3, 0, products);
    });
    return runs;
  };
  const TrainedRank one = train(256, 1)[0];
  const std::vector<TrainedRank> two = train(256, 2);
  EXPECT_EQ(two[0].norms, two[1].norms);
  // A value is within 2^-4 of itself with either scale. (AdamW's first steps have the size of the learning rate
  // whatever the gradient, so that later losses part.)
  EXPECT_NEAR(two[0].losses[0], one.losses[0], 0.0625 * one.losses[0]);
  EXPECT_NEAR(two[0].norms[0], one.norms[0], 0.0625 * one.norms[0]);
  EXPECT_LT(two[0].losses[2], two[0].losses[0]);
  EXPECT_HAS(refusal([&] { train(384, 2); }), "are not whole blocks of 128");
}

// One run of a `quantize` node: the magnitude that it found and the scale that it took.
struct Rounding {
  std::string name;  // of the value
  float magnitude;   // of this rank's part
  float scale;
};
struct RoundedRun {
  TrainedRank run;
  std::vector<Rounding> first;                          // of the first step
  std::map<std::string, std::vector<float>> histories;  // after all steps
};

RoundedRun train_rounded(const models::Model& model, const Mesh& mesh, const char* products) {
  train::TrainerOptions options;
  options.products = train::products_from_name(products);
  options.batch_tokens = 64;
  Trainer trainer(std::shared_ptr<const models::Model>(std::shared_ptr<void>(), &model),
                  open_device("cpu", {.num_threads = 1}), options, mesh);
  trainer.load_random(7, 0.15);
  RoundedRun result;
  const pipeline::StepObserver observer = [&](const pipeline::Node& node, std::span<const TensorView> inputs,
                                              std::span<const TensorView> outputs) {
    if (node.op->name() != "quantize" || trainer.num_steps() > 0) return;
    result.first.push_back({trainer.training_program().graph().value(node.inputs[0]).name,
                            Fp8TensorEncoding::largest_magnitude(inputs[0], 0, inputs[0].shape[0]),
                            Fp8TensorEncoding::scale(outputs[0])});
  };
  const std::vector<Batch> passes = {make_batch(model.info().vocab, 3, 1), make_batch(model.info().vocab, 2, 2)};
  for (int step = 0; step < 3; ++step) {
    const train::StepResult made = trainer.step(passes, 1e-2, &observer);
    result.run.losses.push_back(made.loss);
    result.run.norms.push_back(made.grad_norm);
  }
  for (const auto& [name, tensor] : trainer.optimizer_state())
    if (name.starts_with("amax."))
      result.histories[name] = {tensor.view.as<float>(), tensor.view.as<float>() + tensor.view.num_elements()};
  return result;
}

// Ranks of tp divide the vocabulary, and no kernel makes the loss together with a part of the head.
TEST(TensorParallelTraining, ARoundedHeadIsRefused) {
  const auto model = SmallModel{}.make();
  run_mesh({.tp = 2}, [&](const Mesh& mesh) {
    const std::string message = refusal([&] {
      train_rank(*model, mesh, {make_batch(512, 3, 1)}, 1, 0, nullptr, train::head_products_from_name("fp8_tensor"));
    });
    EXPECT_NE(message.find("the output layer is not rounded to fp8_e4m3_current where 2 ranks of tp divide it"),
              std::string::npos)
        << message;
  });
}

// One scale for a tensor, of which each rank has a part: that of the largest magnitude of all parts. A weight's is one
// rank's to the bit, and so is its history.
TEST(TensorParallelTraining, AScaleForATensorIsThatOfAllParts) {
  for (const int ranks : {2, 3})
    for (const char* products : {"fp8_tensor", "fp8_tensor_delayed"}) {
      SCOPED_TRACE(fmt::format("{} ranks, products {}", ranks, products));
      const auto model = SmallModel{}.make();  // two key-value heads
      const RoundedRun one = train_rounded(*model, {}, products);
      std::vector<RoundedRun> runs(static_cast<size_t>(ranks));
      run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
        runs[static_cast<size_t>(mesh.rank(MeshAxis::tp))] = train_rounded(*model, mesh, products);
      });
      ASSERT_GT(runs[0].first.size(), 0u);
      std::map<std::string, float> weight_scales;
      for (const Rounding& rounding : one.first)
        if (rounding.name.ends_with(".weight")) weight_scales[rounding.name] = rounding.scale;
      int divided = 0;
      size_t weights = 0;
      for (size_t i = 0; i < runs[0].first.size(); ++i) {
        const Rounding& first = runs[0].first[i];
        float largest = 0;
        for (const RoundedRun& run : runs) {
          largest = std::max(largest, run.first.at(i).magnitude);
          divided += run.first[i].magnitude != first.magnitude;
        }
        // 448 is the largest e4m3, 57344 the largest e5m2.
        for (const RoundedRun& run : runs)
          EXPECT_TRUE(run.first[i].scale == largest / 448 || run.first[i].scale == largest / 57344)
              << first.name << ": " << run.first[i].scale << ", largest " << largest;
        if (first.name.ends_with(".weight")) {
          EXPECT_EQ(first.scale, weight_scales.at(first.name)) << first.name;
          ++weights;
        }
      }
      EXPECT_GT(divided, 0) << "parts have other largest magnitudes";
      EXPECT_EQ(weights, 2 * weight_scales.size()) << "in each of two passes";
      for (const RoundedRun& run : runs) {
        EXPECT_EQ(run.run.losses, runs[0].run.losses);
        EXPECT_EQ(run.histories, runs[0].histories) << "every rank remembers the same";
      }
      // Within 2^-4 of itself a value is the same with any scale (as above).
      EXPECT_NEAR(runs[0].run.losses[0], one.run.losses[0], 0.0625 * one.run.losses[0]);
      EXPECT_NEAR(runs[0].run.norms[0], one.run.norms[0], 0.0625 * one.run.norms[0]);
      EXPECT_LT(runs[0].run.losses[2], runs[0].run.losses[0]);
      ASSERT_EQ(runs[0].histories.size(), one.histories.size());
      for (const auto& [name, history] : one.histories) {
        ASSERT_TRUE(runs[0].histories.contains(name)) << name;
        if (name.ends_with(".weight")) {
          EXPECT_EQ(runs[0].histories[name][2], history[2]) << name << ", of the first step";
        }
      }
    }
}

// The routers see whole rows on every rank.
TEST(TensorParallelTraining, TheLoadBalancingLossIsThatOfOneRank) {
  const auto model = changed_model("qwen3_moe", {{"num_attention_heads", 6}});
  for (const int ranks : {2, 3}) {
    SCOPED_TRACE(fmt::format("{} ranks", ranks));
    compare_tp(*model, ranks, 0.5);
  }
}

TEST(TensorParallelTraining, ExchangesWhatTheDocumentSays) {
  const auto model = SmallModel{.kv_heads = 6}.make();
  const auto count = [&](const models::Model& counted, int ranks, std::string_view op) {
    std::atomic<int64_t> found = 0;
    run_mesh({.tp = ranks}, [&](const Mesh& mesh) {
      train::TrainerOptions options;
      options.batch_tokens = 16;
      const Trainer trainer(std::shared_ptr<const models::Model>(std::shared_ptr<void>(), &counted),
                            open_device("cpu", {.num_threads = 1}), options, mesh);
      int64_t own = 0;
      for (const pipeline::Node& node : trainer.training_program().graph().nodes())  // backward, a part is taken
        own += node.op->name() == op && node.pass != kernels::Pass::backward;
      found = own;
    });
    return found.load();
  };
  const int64_t layers = model->info().layers;
  // Forward: the embedding, and two a layer. Backward: the head's input, and two a layer, one for q, k and v together.
  EXPECT_EQ(count(*model, 2, "all_reduce"), (1 + 2 * layers) + (1 + 2 * layers));
  EXPECT_EQ(count(*model, 2, "all_gather"), 1) << "states of the softmax; logits stay where they are";
  // Key-value heads that do not divide: the gradients of k and of v besides, two a layer.
  EXPECT_EQ(count(*SmallModel{.kv_heads = 2}.make(), 3, "all_reduce"), 2 + 4 * layers + 2 * layers);
  // A state-space layer whose groups do not divide: the norm's heads, and the gradients of these, of b and of c.
  const auto divided = state_space_model("granitemoehybrid", 12), whole = state_space_model("granitemoehybrid", 1);
  EXPECT_EQ(count(*whole, 2, "all_gather"), count(*divided, 2, "all_gather") + 1);
  EXPECT_EQ(count(*whole, 2, "all_reduce"), count(*divided, 2, "all_reduce") + 3);
}

TEST(TensorParallelTraining, BiasesAndReplicatedKeyValueHeads) {
  compare_tp(*SmallModel{.kv_heads = 2}.make(), 3);
  compare_tp(*SmallModel{.kv_heads = 1}.make(), 2);
}

// Two ranks with a batch each, and one rank that accumulates the same two passes: a gradient is g0 + g1 either way
// where a pass makes its whole sum before it is added to what is there. Not so where a pass adds term by term to the
// gradient: (g0 + t1) + t2 is rounded differently from g0 + (t1 + t2).
TEST(DataParallelTraining, TwoRanksAreOneRankThatAccumulatesTwoPasses) {
  const auto model = SmallModel{.bias = false}.make();
  const Batch first = make_batch(512, 3, 1), second = make_batch(512, 3, 2);
  const TrainedRank one = train_rank(*model, {}, {first, second}, 1);
  run_mesh({.dp = 2}, [&](const Mesh& mesh) {
    const TrainedRank own = train_rank(*model, mesh, {mesh.rank(MeshAxis::dp) == 0 ? first : second}, 1);
    EXPECT_EQ(own.losses, one.losses) << "the sums of two batches, added once";
    for (const auto& [name, expected] : one.gradients) {
      // Rows of the embedding are added token by token.
      const bool same_order = name != "model.embed_tokens.weight";
      if (same_order) {
        EXPECT_TRUE(same_bits(own.gradients.at(name), expected)) << name;
      } else {
        expect_close(own.gradients.at(name), expected, name);
      }
    }
  });
}

// Where no token of the second batch stands in the first and none twice in its own, the embedding's sums have one term
// or the same order as well: the whole step is one rank's to the bit, and so are all steps after it. So are they with
// products in 8-bit floats, whose delayed scales are those of what any rank saw.
TEST(DataParallelTraining, StepsAreOneRanksToTheBitWhereNoTokenStandsInBothBatches) {
  const auto model = SmallModel{.bias = false}.make();
  for (const int ranks : {2, 3}) {
    std::vector<Batch> passes;
    for (int rank = 0; rank < ranks; ++rank) {
      Batch& pass = passes.emplace_back(make_batch(512, 3, 1 + rank));
      for (size_t i = 0; i < pass.token_ids.size(); ++i) pass.token_ids[i] = static_cast<int32_t>(i) * ranks + rank;
    }
    for (const auto& [products, of_head] : {std::pair{"plain", "plain"},
                                            {"fp8_tensor", "plain"},
                                            {"fp8_tensor_delayed", "plain"},
                                            {"fp8_tensor_delayed", "fp8_tensor_delayed"}}) {
      SCOPED_TRACE(fmt::format("{} ranks, products {}, head {}", ranks, products, of_head));
      const Encoding *to = train::products_from_name(products), *head = train::head_products_from_name(of_head);
      const TrainedRank one = train_rank(*model, {}, passes, 3, 0, to, head);
      run_mesh({.dp = ranks}, [&](const Mesh& mesh) {
        const TrainedRank own =
            train_rank(*model, mesh, {passes[static_cast<size_t>(mesh.rank(MeshAxis::dp))]}, 3, 0, to, head);
        EXPECT_EQ(own.losses, one.losses);
        EXPECT_EQ(own.norms, one.norms);
        for (const auto& [name, expected] : one.weights) EXPECT_TRUE(same_bits(own.weights.at(name), expected)) << name;
      });
    }
  }
}

// One rank that takes both batches in one pass adds all tokens in one chain: within the bound of regrouping.
TEST(DataParallelTraining, TwoRanksAreOneRankWithTwiceTheBatch) {
  const auto model = SmallModel{}.make();
  const Batch first = make_batch(512, 3, 1), second = make_batch(512, 4, 2);
  const TrainedRank one = train_rank(*model, {}, {joined(first, second)}, 1);
  run_mesh({.dp = 2}, [&](const Mesh& mesh) {
    const TrainedRank own = train_rank(*model, mesh, {mesh.rank(MeshAxis::dp) == 0 ? first : second}, 1);
    EXPECT_NEAR(own.losses[0], one.losses[0], 1e-9) << "losses of tokens are the same; their f64 sum is regrouped";
    EXPECT_NEAR(own.norms[0], one.norms[0], 1e-4 * one.norms[0]);
    for (const auto& [name, expected] : one.gradients) expect_close(own.gradients.at(name), expected, name);
  });
}

TEST(DataParallelTraining, TogetherWithTensorParallelRanks) {
  const auto model = SmallModel{}.make();
  const Batch first = make_batch(512, 3, 1), second = make_batch(512, 4, 2);
  const TrainedRank one = train_rank(*model, {}, {joined(first, second)}, 2);
  run_mesh({.dp = 2, .tp = 3}, [&](const Mesh& mesh) {
    const TrainedRank own = train_rank(*model, mesh, {mesh.rank(MeshAxis::dp) == 0 ? first : second}, 2);
    for (size_t step = 0; step < 2; ++step) EXPECT_NEAR(own.losses[step], one.losses[step], 1e-3);
    EXPECT_NEAR(own.norms[0], one.norms[0], 1e-4 * one.norms[0]);
  });
}

bool is_of_experts(const std::string& name) { return name.find(".experts.") != std::string::npos; }

// The rows of a parameter of experts, [experts, …], that a rank of ep has.
std::vector<float> own_experts(const std::vector<float>& whole, int64_t experts, int ranks, int rank) {
  const PartRange part = part_of(experts, ranks, rank);
  const auto each = std::ssize(whole) / experts;
  return {whole.begin() + part.begin * each, whole.begin() + (part.begin + part.size) * each};
}

int64_t experts_of(const models::Model& model) { return model.config()->num_experts; }

Batch batch_of_rank(const models::Model& model, int rank) {
  return make_batch(model.info().vocab, 2 + rank % 2, 1 + rank);
}

// Each rank has tokens of its own. Every token's loss is one rank's to the bit, and so are the gradients of experts,
// whose rows stand in the order of one rank that takes all tokens in one pass. The gradients of everything else are
// sums over the ranks.
TEST(ExpertParallelTraining, ExpertsHaveTheBitsOfOneRankThatTakesAllTokens) {
  struct Row {
    const char* model;
    int ranks;
  };
  for (const Row& row : {Row{"qwen3_moe", 2},
                         {"qwen3_moe", 3},
                         {"deepseek_v3", 2},
                         {"deepseek_v3", 3},
                         {"qwen2_moe", 2},
                         {"qwen2_moe", 3},
                         {"gpt_oss", 2},
                         {"llama4_plain", 3}}) {
    SCOPED_TRACE(fmt::format("{} on {} ranks", row.model, row.ranks));
    const auto model = models::model_from_config(golden(row.model) + "/config.json");
    Batch all = batch_of_rank(*model, 0);
    for (int rank = 1; rank < row.ranks; ++rank) all = joined(all, batch_of_rank(*model, rank));
    const TrainedRank one = train_rank(*model, {}, {all}, 1);
    const TrainedRank two_steps = train_rank(*model, {}, {all}, 2);
    run_mesh({.ep = row.ranks}, [&](const Mesh& mesh) {
      const int rank = mesh.rank(MeshAxis::ep);
      const TrainedRank own = train_rank(*model, mesh, {batch_of_rank(*model, rank)}, 1);
      EXPECT_NEAR(own.losses[0], one.losses[0], 1e-9) << "losses of tokens are the same; their f64 sum is regrouped";
      EXPECT_NEAR(own.norms[0], one.norms[0], 1e-4 * one.norms[0]);
      int divided = 0;
      for (const auto& [name, expected] : one.gradients) {
        if (!is_of_experts(name)) {
          expect_close(own.gradients.at(name), expected, name);
          continue;
        }
        ++divided;
        EXPECT_TRUE(same_bits(own.gradients.at(name), own_experts(expected, experts_of(*model), row.ranks, rank)))
            << name;
      }
      EXPECT_GE(divided, 3);
      EXPECT_NEAR(train_rank(*model, mesh, {batch_of_rank(*model, rank)}, 2).losses[1], two_steps.losses[1], 2e-3);
    });
  }
}

// A run can be repeated, and ranks agree on whatever they do not divide.
TEST(ExpertParallelTraining, IsTheSameEachTimeAndOnEveryRank) {
  const auto model = models::model_from_config(golden("qwen3_moe") + "/config.json");
  std::vector<TrainedRank> first(3), second(3);
  for (std::vector<TrainedRank>* runs : {&first, &second})
    run_mesh({.ep = 3}, [&](const Mesh& mesh) {
      const int rank = mesh.rank(MeshAxis::ep);
      (*runs)[static_cast<size_t>(rank)] = train_rank(*model, mesh, {batch_of_rank(*model, rank)}, 3);
    });
  for (size_t rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(first[rank].losses, first[0].losses);
    EXPECT_EQ(first[rank].norms, first[0].norms);
    EXPECT_EQ(first[rank].losses, second[rank].losses);
    for (const auto& [name, weights] : first[rank].weights) {
      EXPECT_TRUE(same_bits(weights, second[rank].weights.at(name))) << name;
      if (is_of_experts(name)) continue;
      EXPECT_TRUE(same_bits(weights, first[0].weights.at(name))) << name;
    }
  }
  EXPECT_LT(first[0].losses[2], first[0].losses[0]);
}

// Two pairs of ranks: the pass of a pair is one of one rank over the tokens of both, and the passes of the pairs are
// added as those that one rank accumulates.
TEST(ExpertParallelTraining, TogetherWithDataParallelRanks) {
  const auto model = models::model_from_config(golden("deepseek_v3") + "/config.json");
  const auto batch = [&](int pair, int rank) { return batch_of_rank(*model, 2 * pair + rank); };
  const TrainedRank one =
      train_rank(*model, {}, {joined(batch(0, 0), batch(0, 1)), joined(batch(1, 0), batch(1, 1))}, 1);
  run_mesh({.dp = 2, .ep = 2}, [&](const Mesh& mesh) {
    const int rank = mesh.rank(MeshAxis::ep);
    const TrainedRank own = train_rank(*model, mesh, {batch(mesh.rank(MeshAxis::dp), rank)}, 1);
    EXPECT_NEAR(own.losses[0], one.losses[0], 1e-9);
    EXPECT_NEAR(own.norms[0], one.norms[0], 1e-4 * one.norms[0]);
    for (const auto& [name, expected] : one.gradients) {
      if (is_of_experts(name)) {
        EXPECT_TRUE(same_bits(own.gradients.at(name), own_experts(expected, experts_of(*model), 2, rank))) << name;
      } else {
        expect_close(own.gradients.at(name), expected, name);
      }
    }
  });
}

// Tensor-parallel ranks have the same tokens and parts of every expert of their rank of ep.
TEST(ExpertParallelTraining, TogetherWithTensorParallelRanks) {
  const auto model = models::model_from_config(golden("qwen3_moe") + "/config.json");
  const TrainedRank one = train_rank(*model, {}, {joined(batch_of_rank(*model, 0), batch_of_rank(*model, 1))}, 1);
  run_mesh({.tp = 2, .ep = 2}, [&](const Mesh& mesh) {
    const TrainedRank own = train_rank(*model, mesh, {batch_of_rank(*model, mesh.rank(MeshAxis::ep))}, 1);
    EXPECT_NEAR(own.losses[0], one.losses[0], 1e-5);
    EXPECT_NEAR(own.norms[0], one.norms[0], 1e-4 * one.norms[0]);
    for (const auto& [name, expected] : one.gradients)
      if (own.gradients.at(name).size() == expected.size()) expect_close(own.gradients.at(name), expected, name);
  });
}

TEST(ExpertParallelTraining, LossesAndEvaluationAreThoseOfOneRank) {
  const auto model = models::model_from_config(golden("qwen3_moe") + "/config.json");
  train::TrainerOptions options;
  options.batch_tokens = 64;
  options.router_aux_loss_coef = 0.01;
  const auto trainer = [&](const Mesh& mesh) {
    auto made = std::make_unique<Trainer>(model, open_device("cpu", {.num_threads = 1}), options, mesh);
    made->load_random(7, 0.15);
    return made;
  };
  const auto one = trainer({});
  std::vector<std::pair<double, int64_t>> evaluated;
  for (int rank : {0, 1}) evaluated.push_back(one->evaluate(batch_of_rank(*model, rank)));
  const train::StepResult expected = one->step(std::vector{batch_of_rank(*model, 0), batch_of_rank(*model, 1)}, 1e-2);
  run_mesh({.ep = 2}, [&](const Mesh& mesh) {
    const int rank = mesh.rank(MeshAxis::ep);
    const auto own = trainer(mesh);
    EXPECT_EQ(own->evaluate(batch_of_rank(*model, rank)), evaluated[static_cast<size_t>(rank)]);
    const train::StepResult result = own->step(std::vector{batch_of_rank(*model, rank)}, 1e-2);
    EXPECT_NEAR(result.loss, expected.loss, 1e-9);
    EXPECT_NEAR(*result.load_balancing_loss, *expected.load_balancing_loss, 1e-9);
    EXPECT_NEAR(result.grad_norm, expected.grad_norm, 1e-4 * expected.grad_norm);
  });
}

TEST(DataParallelTraining, AMeshThatTheTrainerCannotUseIsRefused) {
  const auto model = SmallModel{}.make();
  EXPECT_HAS(refusal([&] {
               run_mesh({.ep = 2}, [&](const Mesh& mesh) { train_rank(*model, mesh, {make_batch(512, 1, 1)}, 1); });
             }),
             "2 ranks to divide experts; the model has none");
  const auto experts = models::model_from_config(golden("qwen3_moe") + "/config.json");
  EXPECT_HAS(refusal([&] {
               run_mesh({.ep = 2}, [&](const Mesh& mesh) {
                 const std::vector<Batch> batches(static_cast<size_t>(1 + mesh.rank(MeshAxis::ep)),
                                                  batch_of_rank(*experts, 0));
                 train_rank(*experts, mesh, batches, 1);
               });
             }),
             "rank 1 of ep has 2 batches, rank 0 has 1");
}

}  // namespace
}  // namespace eadem::test
