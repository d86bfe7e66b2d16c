// SPDX-License-Identifier: Apache-2.0
//
// Training whose linear layers multiply 8-bit floats.
#include <gtest/gtest.h>

#include <cmath>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/io/json.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/train/trainer.h"
#include "tests/train/golden_batches.h"

namespace eadem::train {
namespace {

const Encoding* fp8() { return products_from_name("fp8_block128"); }

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double squares = 0;
  for (size_t i = 0; i < a.size(); ++i) squares += std::pow(static_cast<double>(a[i]) - static_cast<double>(b[i]), 2);
  return std::sqrt(squares);
}

std::vector<float> values_of(const Tensor& tensor) {
  return {tensor.view.as<float>(), tensor.view.as<float>() + tensor.view.num_elements()};
}

struct Llama {
  std::string folder = golden("llama").string();
  models::Checkpoint checkpoint = models::open_checkpoint(folder);
  Batch batch = batch_of(io::open_weights(folder + "/train.safetensors")->get("tokens"), 0);

  Trainer trainer(const Encoding* products, DType weights = DType::f32) const {
    Trainer result(checkpoint.model, open_device("cpu"),
                   {.weights = weights, .products = products, .batch_tokens = 256});
    result.load(checkpoint);
    return result;
  }
};

// make_fp8_goldens.py has PyTorch round the same operands. A sum in another order puts a value on the other side of a
// border between two codes now and then, which are 2^-3 apart: the loss, a mean over the tokens, moves by far less than
// by the rounding itself (0.016), and a gradient by a twentieth of what rounding moves it.
TEST(Fp8Training, TheFirstStepIsThatOfPyTorch) {
  const Llama llama;
  const io::JsonReader json = io::JsonReader::read(llama.folder + "/fp8.json");
  const auto gradients = io::open_weights(llama.folder + "/fp8.safetensors");
  Trainer trainer = llama.trainer(fp8()), plain = llama.trainer(nullptr);
  const double loss = trainer.step(std::span(&llama.batch, 1), 1e-3).loss,
               plain_loss = plain.step(std::span(&llama.batch, 1), 1e-3).loss;
  const double expected = json.number("loss_f64");
  EXPECT_NEAR(loss, expected, std::abs(plain_loss - expected) / 20);
  for (const char* name : {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight",
                           "model.layers.1.mlp.gate_proj.weight"}) {
    const std::vector<float> want = values_of(gradients->get(name));
    const double rounding = distance(values_of(plain.gradient(name)), want);
    EXPECT_GT(rounding, 0) << name;
    EXPECT_LT(distance(values_of(trainer.gradient(name)), want), rounding / 20) << name;
  }
}

TEST(Fp8Training, EvaluatesWithTheBitsOfTheTrainingPass) {
  const Llama llama;
  for (const DType weights : {DType::f32, DType::bf16}) {
    Trainer trainer = llama.trainer(fp8(), weights);
    const auto [loss, count] = trainer.evaluate(llama.batch);
    const std::vector<float> evaluated = trainer.last_token_losses();
    EXPECT_NE(loss, llama.trainer(nullptr, weights).evaluate(llama.batch).first);
    EXPECT_EQ(trainer.step(std::span(&llama.batch, 1), 1e-3).loss, loss);
    EXPECT_EQ(trainer.last_token_losses(), evaluated);
  }
}

TEST(Fp8Training, LearnsAsFastAsPlainProducts) {
  const Llama llama;
  Trainer trainer = llama.trainer(fp8()), plain = llama.trainer(nullptr);
  double first = 0, plain_first = 0, last = 0, plain_last = 0;
  for (int step = 0; step < 30; ++step) {
    last = trainer.step(std::span(&llama.batch, 1), 1e-3).loss;
    plain_last = plain.step(std::span(&llama.batch, 1), 1e-3).loss;
    if (step == 0) first = last, plain_first = plain_last;
  }
  EXPECT_LT(last, 0.1 * first);
  // Operands are off by 2^-5 of themselves or so.
  EXPECT_GT(first - last, 0.95 * (plain_first - plain_last));
}

TEST(Fp8Training, RefusesWhatItCannotRound) {
  const auto refusal = [](const std::string& folder, const Encoding* products) -> std::string {
    try {
      const Trainer trainer(models::open_checkpoint(golden(folder).string()).model, open_device("cpu"),
                            {.products = products});
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_NE(refusal("llama", Fp8Encoding::find("fp8_e4m3_channel")).find("expected fp8_e4m3_block128"),
            std::string::npos);
  const std::string experts = refusal("qwen3_moe", fp8());
  EXPECT_NE(experts.find("experts"), std::string::npos) << experts;
  EXPECT_NE(experts.find("fp8_e4m3_block128"), std::string::npos) << experts;
  EXPECT_THROW(products_from_name("fp8"), InvalidArgument);
  EXPECT_EQ(products_from_name("plain"), nullptr);
}

}  // namespace
}  // namespace eadem::train
