// SPDX-License-Identifier: Apache-2.0
//
// Training on a GPU: it scores with the bits of serving, repeats itself to the bit, and learns as on the CPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string_view>

#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/train/trainer.h"
#include "tests/engine/training_scores.h"

namespace eadem::engine {
namespace {

class CudaTraining : public testing::Test {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  }
};

// Products in 8-bit floats, which only Hopper has.
class CudaFp8Training : public CudaTraining {
 protected:
  void SetUp() override {
    CudaTraining::SetUp();
    if (IsSkipped()) return;
    const auto device = open_cuda_device(0);
    if (const std::string& why = static_cast<const CudaDevice&>(*device).hopper_refusal(); !why.empty())
      GTEST_SKIP() << why;
  }
};

TEST_F(CudaTraining, ScoresWithTheBitsOfServing) {
  for (const char* name : {"llama", "qwen2", "qwen3", "smollm2"}) {
    const models::Checkpoint checkpoint = models::open_checkpoint(golden(name));
    const std::vector<int32_t> tokens = tokens_of(kTokens, checkpoint.model->info().vocab, 5);
    const auto device = open_device("cuda");
    for (const DType weights : {DType::f32, DType::bf16}) {
      const std::string what = fmt::format("{} {}", name, dtype_name(weights));
      std::vector<int32_t> labels;
      const Scores served = serve(checkpoint, device, weights, tokens, {23, 1, 16}, labels);
      const Scores trained = train_forward(checkpoint, device, weights, tokens, labels, {"linear_cross_entropy"});
      expect_same_bits(served.logits, trained.logits, what + " logits");
      expect_same_bits(served.logprobs, trained.logprobs, what + " log-probabilities");
      const Scores fused = train_forward(checkpoint, device, weights, tokens, labels, {});
      expect_same_bits(served.logprobs, fused.logprobs, what + " log-probabilities, fused with the LM head");
    }
  }
}

// Two documents of 60 tokens, which repeat.
train::Batch batch_of(int64_t vocab) {
  train::Batch batch;
  clear(batch);
  for (const int32_t seed : {1, 2}) {
    std::vector<uint32_t> document;
    for (const int32_t token : tokens_of(61, vocab, seed)) document.push_back(static_cast<uint32_t>(token));
    append_piece(batch, document, 0, 60);
  }
  return batch;
}

struct Progress {
  std::vector<float> losses, norms;
};

Progress train_on(const std::string& device, DType weights, int steps) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden("llama"));
  train::Trainer trainer(checkpoint.model, open_device(device), {.weights = weights, .batch_tokens = 128});
  trainer.load(checkpoint);
  const train::Batch batch = batch_of(checkpoint.model->info().vocab);
  Progress run;
  for (int step = 0; step < steps; ++step) {
    const train::StepResult result = trainer.step(std::span(&batch, 1), 1e-3);
    run.losses.push_back(static_cast<float>(result.loss));
    run.norms.push_back(static_cast<float>(result.grad_norm));
  }
  return run;
}

TEST_F(CudaTraining, RepeatsItselfAndLearnsInBf16AsInF32) {
  constexpr int kSteps = 20;
  const Progress exact = train_on("cpu", DType::f32, kSteps), run = train_on("cuda", DType::bf16, kSteps),
                 again = train_on("cuda", DType::bf16, kSteps);
  expect_same_bits(run.losses, again.losses, "losses");
  expect_same_bits(run.norms, again.norms, "norms");
  EXPECT_LT(run.losses.back(), 0.8f * run.losses.front());
  // Activations and weights are rounded to 8 bits of mantissa; a loss is a mean over 120 tokens.
  for (size_t i = 0; i < exact.losses.size(); ++i)
    EXPECT_NEAR(run.losses[i], exact.losses[i], 0.02 * static_cast<double>(exact.losses[i])) << "step " << i;
}

// A model whose matrices are whole blocks of 128 x 128, as products of 8-bit floats on a GPU want them.
struct BlockModel {
  BlockModel() {
    models::ModelConfig config = *models::open_checkpoint(golden("llama")).model->config();
    config.hidden_size = config.num_attention_heads * (config.head_dim = config.rotary_dim = 64);
    config.intermediate_size = 384;
    model = std::make_shared<models::Decoder>(config);
    batch = batch_of(config.vocab_size);
  }

  train::Trainer trainer(const std::string& device, const char* products, const char* head = "plain") const {
    train::Trainer result(model, open_device(device),
                          {.weights = DType::bf16,
                           .products = train::products_from_name(products),
                           .head_products = train::head_products_from_name(head),
                           .batch_tokens = 128});
    result.load_random(7, 0.05);
    return result;
  }

  Progress run(const std::string& device, const char* products, const char* head, int steps) const {
    train::Trainer trainer = this->trainer(device, products, head);
    Progress progress;
    for (int step = 0; step < steps; ++step) {
      const train::StepResult result = trainer.step(std::span(&batch, 1), 1e-3);
      progress.losses.push_back(static_cast<float>(result.loss));
      progress.norms.push_back(static_cast<float>(result.grad_norm));
    }
    return progress;
  }

  std::shared_ptr<const models::Decoder> model;
  train::Batch batch;
};

TEST_F(CudaFp8Training, EvaluatesWithTheBitsOfTheTrainingPass) {
  const BlockModel block;
  train::Trainer trainer = block.trainer("cuda", "fp8_block128");
  const double loss = trainer.evaluate(block.batch).first;
  const std::vector<float> evaluated = trainer.last_token_losses();
  EXPECT_NE(loss, block.trainer("cuda", "plain").evaluate(block.batch).first);
  EXPECT_EQ(trainer.step(std::span(&block.batch, 1), 1e-3).loss, loss);
  expect_same_bits(trainer.last_token_losses(), evaluated, "losses of tokens");
  // Forward and backward products are those of 8-bit floats.
  std::map<std::string, int> kernels;
  const pipeline::Program& program = trainer.training_program();
  for (const pipeline::KernelChoice& choice : program.choices())
    if (choice.kernel != nullptr) ++kernels[std::string(choice.kernel->name)];
  EXPECT_EQ(kernels["cuda_fp8"], 2 * 2 * 7) << "of two layers of seven products, forward and backward";
  EXPECT_EQ(kernels["cuda_blocks"], 2 * 7);
}

// Also with one scale for each tensor, where a step, too, leaves scales for the next.
TEST_F(CudaFp8Training, WithOneScaleEvaluatesWithTheBitsOfTheTrainingPass) {
  const BlockModel block;
  for (const auto& [products, head] : {std::pair{"fp8_tensor", "plain"},
                                       {"fp8_tensor_delayed", "plain"},
                                       {"fp8_tensor", "fp8_tensor"},
                                       {"fp8_tensor_delayed", "fp8_tensor_delayed"}}) {
    SCOPED_TRACE(fmt::format("{}, head {}", products, head));
    const int heads = head == std::string("plain") ? 0 : 1;
    train::Trainer trainer = block.trainer("cuda", products, head);
    for (int step = 0; step < 2; ++step) {
      const double loss = trainer.evaluate(block.batch).first;
      const std::vector<float> evaluated = trainer.last_token_losses();
      EXPECT_EQ(trainer.step(std::span(&block.batch, 1), 1e-3).loss, loss);
      expect_same_bits(trainer.last_token_losses(), evaluated, "losses of tokens");
    }
    std::map<std::string, int> kernels;
    for (const pipeline::KernelChoice& choice : trainer.training_program().choices())
      if (choice.kernel != nullptr) ++kernels[std::string(choice.kernel->name)];
    EXPECT_EQ(kernels["cuda_fp8_tensor"], 2 * 7 * 3 + heads)
        << "forward, dx and dw of two layers of seven products, and of the head in one";
    // With delayed scales one kernel makes and rounds both gradients of a gated activation.
    const int together = products == std::string("fp8_tensor_delayed") ? 2 : 0;
    EXPECT_EQ(kernels["cuda_tensor"], 2 * (7 + 4 + 7) - together + 2 * heads) << "weights, x and dy";
  }
}

TEST_F(CudaFp8Training, RoundingInTheKernelsThatMakeValuesChangesNoBit) {
  const BlockModel block;
  std::vector<std::vector<float>> losses, gradients;
  for (const std::vector<std::string>& disabled :
       {std::vector<std::string>{}, {"gated_activation_quantize", "gated_gradients_quantize"}}) {
    const train::TrainerOptions options{.weights = DType::bf16,
                                        .products = train::products_from_name("fp8_tensor_delayed"),
                                        .batch_tokens = 128,
                                        .disabled_fusions = disabled};
    train::Trainer trainer(block.model, open_device("cuda"), options);
    trainer.load_random(7, 0.05);
    std::map<std::string, int> fused;
    for (const pipeline::Node& node : trainer.training_program().graph().nodes()) ++fused[std::string(node.op->name())];
    EXPECT_EQ(fused["gated_activation_quantize"], disabled.empty() ? 2 : 0);
    EXPECT_EQ(fused["gated_gradients_quantize"], disabled.empty() ? 2 : 0);
    std::vector<float>& own = losses.emplace_back();
    for (int step = 0; step < 3; ++step)
      own.push_back(static_cast<float>(trainer.step(std::span(&block.batch, 1), 1e-3).loss));
    const Tensor gradient = trainer.gradient("model.layers.0.mlp.gate_proj.weight");
    gradients.emplace_back(gradient.view.as<float>(), gradient.view.as<float>() + gradient.view.num_elements());
  }
  expect_same_bits(losses[0], losses[1], "losses");
  expect_same_bits(gradients[0], gradients[1], "gradients");
}

TEST_F(CudaFp8Training, RepeatsItselfAndLearnsAsOnTheCpu) {
  constexpr int kSteps = 20;
  const BlockModel block;
  for (const auto& [products, head] : {std::pair{"fp8_block128", "plain"},
                                       {"fp8_tensor", "plain"},
                                       {"fp8_tensor_delayed", "plain"},
                                       {"fp8_tensor_delayed", "fp8_tensor_delayed"}}) {
    SCOPED_TRACE(fmt::format("{}, head {}", products, head));
    const Progress plain = block.run("cpu", "plain", "plain", kSteps), exact = block.run("cpu", products, head, kSteps),
                   run = block.run("cuda", products, head, kSteps), again = block.run("cuda", products, head, kSteps);
    expect_same_bits(run.losses, again.losses, "losses");
    expect_same_bits(run.norms, again.norms, "norms");
    EXPECT_LT(run.losses.back(), 0.8f * run.losses.front());
    // On the GPU activations are rounded to bf16 besides, which moves a loss by up to 3 %. A scale of a whole tensor
    // then differs, and with it the roundings of all its codes: losses differ by what such roundings have moved so far.
    double moved = 0;
    for (size_t i = 0; i < exact.losses.size(); ++i) {
      const double loss = exact.losses[i];
      if (std::string_view(products) != "fp8_block128") moved = std::max(moved, std::fabs(loss - plain.losses[i]));
      EXPECT_NEAR(run.losses[i], loss, 0.03 * loss + moved) << "step " << i;
    }
  }
}

}  // namespace
}  // namespace eadem::engine
