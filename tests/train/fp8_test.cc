// SPDX-License-Identifier: Apache-2.0
//
// Training whose linear layers multiply 8-bit floats.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/train/trainer.h"
#include "tests/support/refusal.h"
#include "tests/train/golden_batches.h"

namespace eadem::train {
namespace {

const Encoding* fp8() { return products_from_name("fp8_block128"); }
std::vector<const Encoding*> one_scale() {
  return {products_from_name("fp8_tensor"), products_from_name("fp8_tensor_delayed")};
}

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
  Tensor tokens = io::open_weights(folder + "/train.safetensors")->get("tokens");
  Batch batch = batch_of(tokens, 0);

  Trainer trainer(const Encoding* products, DType weights = DType::f32, int64_t amax_history = 16,
                  const Encoding* head = nullptr) const {
    Trainer result(checkpoint.model, open_device("cpu"),
                   {.weights = weights,
                    .products = products,
                    .head_products = head,
                    .amax_history = amax_history,
                    .batch_tokens = 256});
    result.load(checkpoint);
    return result;
  }
};

constexpr const char* kSaved[] = {"model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight",
                                  "model.layers.1.mlp.gate_proj.weight"};

// As TheFirstStepIsThatOfPyTorch has it. `plain` has made the same step without rounding.
void expect_gradients(const Trainer& trainer, const Trainer& plain, const std::string& file,
                      std::span<const char* const> names = kSaved) {
  const auto gradients = io::open_weights(file);
  for (const char* name : names) {
    const std::vector<float> want = values_of(gradients->get(name));
    const double rounding = distance(values_of(plain.gradient(name)), want);
    EXPECT_GT(rounding, 0) << name;
    EXPECT_LT(distance(values_of(trainer.gradient(name)), want), rounding / 20) << name;
  }
}

std::vector<float> state_of(const Trainer& trainer, const std::string& name) {
  for (const auto& [known, tensor] : trainer.optimizer_state())
    if (known == name) return values_of(tensor);
  ADD_FAILURE() << "no state " << name;
  return {};
}

// make_fp8_goldens.py has PyTorch round the same operands. A sum in another order puts a value on the other side of a
// border between two codes now and then, which are 2^-3 apart: the loss, a mean over the tokens, moves by far less than
// by the rounding itself (0.016), and a gradient by a twentieth of what rounding moves it.
TEST(Fp8Training, TheFirstStepIsThatOfPyTorch) {
  const Llama llama;
  const io::JsonReader json = io::JsonReader::read(llama.folder + "/fp8.json");
  Trainer trainer = llama.trainer(fp8()), plain = llama.trainer(nullptr);
  const double loss = trainer.step(std::span(&llama.batch, 1), 1e-3).loss,
               plain_loss = plain.step(std::span(&llama.batch, 1), 1e-3).loss;
  const double expected = json.number("loss_f64");
  EXPECT_NEAR(loss, expected, std::abs(plain_loss - expected) / 20);
  expect_gradients(trainer, plain, llama.folder + "/fp8.safetensors");
}

// One scale for each tensor, dy in e5m2, and the gradient of a weight from rounded operands, too.
TEST(Fp8Training, TheFirstStepWithOneScaleIsThatOfPyTorch) {
  const Llama llama;
  const double expected = io::JsonReader::read(llama.folder + "/fp8_tensor.json").numbers("losses_f64")[0];
  Trainer plain = llama.trainer(nullptr);
  const double plain_loss = plain.step(std::span(&llama.batch, 1), 1e-3).loss;
  // Without earlier steps, delayed scales are those of the values, too.
  for (const Encoding* products : one_scale()) {
    SCOPED_TRACE(products->name());
    Trainer trainer = llama.trainer(products);
    EXPECT_NEAR(trainer.step(std::span(&llama.batch, 1), 1e-3).loss, expected, std::abs(plain_loss - expected) / 20);
    expect_gradients(trainer, plain, llama.folder + "/fp8_tensor.safetensors");
  }
}

// The head, too, with the constant scale of the gradient of its logits. The norm before it has the gradient of its x.
TEST(Fp8Training, TheFirstStepWithARoundedHeadIsThatOfPyTorch) {
  const Llama llama;
  const double expected = io::JsonReader::read(llama.folder + "/fp8_head.json").numbers("losses_f64")[0];
  Trainer plain = llama.trainer(nullptr);
  const double plain_loss = plain.step(std::span(&llama.batch, 1), 1e-3).loss;
  for (const Encoding* products : one_scale()) {
    SCOPED_TRACE(products->name());
    Trainer trainer = llama.trainer(products, DType::f32, 16, products);
    EXPECT_NEAR(trainer.step(std::span(&llama.batch, 1), 1e-3).loss, expected, std::abs(plain_loss - expected) / 20);
    expect_gradients(trainer, plain, llama.folder + "/fp8_head.safetensors");
    constexpr const char* kHead[] = {"lm_head.weight", "model.norm.weight"};
    expect_gradients(trainer, plain, llama.folder + "/fp8_head.safetensors", kHead);
  }
}

// Four steps of different batches with a history of two, so that the first is forgotten; weights stay as they are.
TEST(Fp8Training, DelayedScalesAreThoseOfPyTorch) {
  const Llama llama;
  const io::JsonReader json = io::JsonReader::read(llama.folder + "/fp8_delayed.json");
  const std::vector<double> expected = json.numbers("losses_f64");
  Trainer trainer = llama.trainer(products_from_name("fp8_tensor_delayed"), DType::f32, 2),
          plain = llama.trainer(nullptr);
  for (size_t step = 0; step < expected.size(); ++step) {
    const Batch batch = batch_of(llama.tokens, static_cast<int64_t>(step));
    const double loss = trainer.step(std::span(&batch, 1), 0).loss,
                 plain_loss = plain.step(std::span(&batch, 1), 0).loss;
    EXPECT_NEAR(loss, expected[step], std::abs(plain_loss - expected[step]) / 20) << "step " << step;
  }
  expect_gradients(trainer, plain, llama.folder + "/fp8_delayed.safetensors");
  const std::string layer = "model.layers.1.mlp.up_proj", first_reader_of_x = "model.layers.1.mlp.gate_proj";
  for (const char* port : {".x", ".weight", ".dy"}) {
    const std::vector<double> seen = json.numbers(layer + port);
    const std::vector<float> state =
        state_of(trainer, "amax." + (port == std::string(".x") ? first_reader_of_x : layer) + port);
    ASSERT_EQ(state.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      const double want = seen[seen.size() - 1 - i];
      // What a layer before rounded to the other side of a border moves a sum of 64 products by 2^-4 of one of them.
      EXPECT_NEAR(static_cast<double>(state[i]), want, port == std::string(".weight") ? 0 : want * 0x1p-9) << port << i;
    }
  }
}

TEST(Fp8Training, EvaluatesWithTheBitsOfTheTrainingPass) {
  const Llama llama;
  for (const auto& [products, head] : {std::pair{"fp8_block128", "plain"},
                                       {"fp8_tensor", "plain"},
                                       {"fp8_tensor_delayed", "plain"},
                                       {"fp8_tensor", "fp8_tensor"},
                                       {"plain", "fp8_tensor_delayed"}})
    for (const DType weights : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(fmt::format("{}, head {}", products, head));
      Trainer trainer = llama.trainer(products_from_name(products), weights, 16, head_products_from_name(head));
      for (int step = 0; step < 2; ++step) {
        const auto [loss, count] = trainer.evaluate(llama.batch);
        const std::vector<float> evaluated = trainer.last_token_losses();
        if (step == 0) {
          EXPECT_NE(loss, llama.trainer(nullptr, weights).evaluate(llama.batch).first);
        }
        EXPECT_EQ(trainer.step(std::span(&llama.batch, 1), 1e-3).loss, loss);
        EXPECT_EQ(trainer.last_token_losses(), evaluated);
      }
    }
}

// A scale of rows and one from earlier steps do not depend on the batch; the current one of a tensor does.
TEST(Fp8Training, OnlyCurrentScalesOfTensorsDependOnTheBatch) {
  const Llama llama;
  Batch first;
  clear(first);
  const int64_t length = llama.batch.lengths[0];
  std::vector<uint32_t> document;
  for (int64_t i = 0; i <= length; ++i) document.push_back(static_cast<uint32_t>(llama.tokens.view.as<int32_t>()[i]));
  append_piece(first, document, 0, length);
  for (const char* products : {"fp8_block128", "fp8_tensor", "fp8_tensor_delayed"}) {
    Trainer trainer = llama.trainer(products_from_name(products));
    trainer.step(std::span(&llama.batch, 1), 1e-3);
    trainer.evaluate(first);
    const std::vector<float> alone = trainer.last_token_losses();
    trainer.evaluate(llama.batch);
    std::vector<float> beside = trainer.last_token_losses();
    beside.resize(alone.size());
    EXPECT_EQ(alone == beside, products != std::string("fp8_tensor")) << products;
  }
}

// Rounded gradients would add their errors; the sum of a bias is that of what the layer above gave.
TEST(Fp8Training, TheGradientOfABiasSumsPlainValues) {
  const models::Checkpoint qwen = models::open_checkpoint(golden("qwen2").string());
  const Batch batch = batch_of(io::open_weights(golden("qwen2").string() + "/train.safetensors")->get("tokens"), 0);
  for (const Encoding* products : one_scale()) {
    Trainer trainer(qwen.model, open_device("cpu"), {.products = products, .batch_tokens = 256});
    trainer.load(qwen);
    std::vector<float> sum;
    const pipeline::StepObserver observer = [&](const pipeline::Node& node, std::span<const TensorView> inputs,
                                                std::span<const TensorView> outputs) {
      if (node.pass != kernels::Pass::backward || node.op->name() != "linear" || !outputs[2].defined() ||
          !node.scope.ends_with("layers.1.self_attn.v_proj"))
        return;
      const TensorView& dy = inputs[2];
      ASSERT_EQ(dy.encoding, nullptr);
      sum.assign(static_cast<size_t>(dy.shape[1]), 0.0f);
      for (int64_t i = 0; i < dy.num_elements(); ++i) sum[static_cast<size_t>(i % dy.shape[1])] += dy.as<float>()[i];
    };
    trainer.step(std::span(&batch, 1), 0, &observer);
    EXPECT_EQ(values_of(trainer.gradient("model.layers.1.self_attn.v_proj.bias")), sum);
  }
}

// A run that goes on from a saved state has the bits of one that was not interrupted, and needs the history for it.
TEST(Fp8Training, ResumesTheHistoryBitForBit) {
  const Llama llama;
  const Encoding* delayed = products_from_name("fp8_tensor_delayed");
  const auto batch = [&](int64_t step) { return batch_of(llama.tokens, step); };
  Trainer trainer = llama.trainer(delayed, DType::bf16, 3, delayed);
  for (int64_t step = 0; step < 2; ++step) trainer.step(std::vector{batch(step), batch(step + 1)}, 1e-3);

  const std::string path = testing::TempDir() + fmt::format("eadem_fp8_{}.safetensors", ::getpid());
  const auto save = [&](const std::vector<std::pair<std::string, Tensor>>& tensors) {
    std::vector<io::NamedTensor> named;
    for (const auto& [name, tensor] : tensors) named.push_back({name, tensor.view});
    io::write_safetensors(path, named);
    return io::open_weights(path);
  };
  const std::vector<std::pair<std::string, Tensor>> state = trainer.optimizer_state();
  Trainer resumed = llama.trainer(delayed, DType::bf16, 3, delayed);
  for (const auto& [name, tensor] : trainer.state_dict()) resumed.load_param(name, tensor.view);
  resumed.load_optimizer_state(*save(state), trainer.num_steps());
  for (int64_t step = 2; step < 4; ++step) {
    const Batch next = batch(step);
    EXPECT_EQ(trainer.step(std::span(&next, 1), 1e-3).loss, resumed.step(std::span(&next, 1), 1e-3).loss);
  }
  const auto expected = trainer.optimizer_state(), actual = resumed.optimizer_state();
  ASSERT_EQ(expected.size(), actual.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_EQ(values_of(expected[i].second), values_of(actual[i].second)) << expected[i].first;

  // A state without the history, one that has it where it is not known, and one of another length.
  std::vector<std::pair<std::string, Tensor>> without;
  for (const auto& one : state)
    if (!one.first.starts_with("amax.")) without.push_back(one);
  EXPECT_EQ(without.size() + 2 * (7 + 4 + 7) + 2, state.size())
      << "weights, x and dy of two layers; weight and x of the head";
  for (const char* of : {".x", ".weight"}) {
    const std::vector<float> history = state_of(trainer, std::string("amax.lm_head") + of);
    EXPECT_EQ(std::count(history.begin(), history.end(), 0.0f), 0) << of;
  }
  EXPECT_NE(test::refusal([&] { resumed.check_optimizer_state(*save(without)); }).find("'amax.lm_head"),
            std::string::npos);
  const Trainer current = llama.trainer(products_from_name("fp8_tensor"), DType::bf16);
  EXPECT_EQ(test::refusal([&] { current.check_optimizer_state(*save(without)); }), "");
  EXPECT_NE(test::refusal([&] { current.check_optimizer_state(*save(state)); }).find("is no state of a trainer"),
            std::string::npos);
  const Trainer longer = llama.trainer(delayed, DType::bf16, 4, delayed);
  EXPECT_NE(test::refusal([&] { longer.check_optimizer_state(*save(state)); }).find("expected"), std::string::npos);
  std::remove(path.c_str());
}

// The history has what the passes of a step saw, and a step that fails leaves it as it was.
TEST(Fp8Training, TheHistoryIsThatOfStepsThatWereMade) {
  const Llama llama;
  const Encoding* delayed = products_from_name("fp8_tensor_delayed");
  const std::string x = "amax.model.layers.0.self_attn.q_proj.x";
  const Batch a = batch_of(llama.tokens, 0), b = batch_of(llama.tokens, 2);
  const auto seen = [&](const std::vector<Batch>& passes) {
    Trainer trainer = llama.trainer(delayed);
    trainer.step(passes, 0);
    return state_of(trainer, x)[0];
  };
  EXPECT_EQ(seen({a, b}), std::max(seen({a}), seen({b})));

  Trainer trainer = llama.trainer(delayed);
  trainer.step(std::span(&a, 1), 0);
  const std::vector<float> before = state_of(trainer, x);
  const std::string broken = "model.layers.0.input_layernorm.weight";
  for (const auto& [name, tensor] : trainer.state_dict()) {
    if (name != broken) continue;
    Tensor changed = Tensor::on_host(DType::f32, tensor.view.shape);
    // A row has values of more than one standard deviation, which overflow.
    std::fill_n(changed.view.as<float>(), tensor.view.num_elements(), 3e38f);
    trainer.load_param(broken, changed.view);
    EXPECT_THROW(trainer.step(std::span(&a, 1), 0), DataCorrupted);
    EXPECT_EQ(state_of(trainer, x), before);
    trainer.load_param(broken, tensor.view);
  }
  EXPECT_TRUE(std::isfinite(trainer.step(std::span(&a, 1), 0).loss));
  EXPECT_EQ(state_of(trainer, x)[1], before[0]);
}

TEST(Fp8Training, LearnsAsFastAsPlainProducts) {
  const Llama llama;
  for (const auto& [products, head] : {std::pair{"fp8_block128", "plain"},
                                       {"fp8_tensor", "plain"},
                                       {"fp8_tensor_delayed", "plain"},
                                       {"fp8_tensor_delayed", "fp8_tensor_delayed"}}) {
    SCOPED_TRACE(fmt::format("{}, head {}", products, head));
    Trainer trainer = llama.trainer(products_from_name(products), DType::f32, 16, head_products_from_name(head)),
            plain = llama.trainer(nullptr);
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
}

// Gated activations and their gradients may be rounded where they are made, if nothing else reads them: with delayed
// scales, and without biases, whose gradients sum plain values. No kernel of the CPU does it.
TEST(Fp8Training, GatedActivationsAreMatchedWithTheirRounding) {
  const auto matched = [](const std::string& folder, const char* products) {
    const Trainer trainer(models::open_checkpoint(golden(folder).string()).model, open_device("cpu"),
                          {.products = products_from_name(products), .batch_tokens = 256});
    std::map<std::string, int> found;
    for (const pipeline::FusionDecision& decision : trainer.training_program().fusion_decisions())
      if (decision.fusion.starts_with("gated_")) {
        ++found[decision.fusion];
        EXPECT_FALSE(decision.applied);
        EXPECT_EQ(decision.reason, "no kernel on cpu");
        EXPECT_NE(decision.scope.find(".mlp"), std::string::npos) << decision.scope;
      }
    return found;
  };
  const std::map<std::string, int> both = {{"gated_activation_quantize", 2}, {"gated_gradients_quantize", 2}};
  EXPECT_EQ(matched("llama", "fp8_tensor_delayed"), both);
  for (const char* products : {"plain", "fp8_block128", "fp8_tensor"})
    EXPECT_TRUE(matched("llama", products).empty()) << products;
}

// Tied weights are rounded for the head alone, and both of their readers add to one gradient.
TEST(Fp8Training, ATiedHeadIsRoundedAndTheEmbeddingIsNot) {
  const std::string folder = golden("qwen2").string();
  const models::Checkpoint qwen = models::open_checkpoint(folder);
  const Batch batch = batch_of(io::open_weights(folder + "/train.safetensors")->get("tokens"), 0);
  std::vector<std::vector<float>> gradients;
  for (const char* head : {"plain", "fp8_tensor_delayed"}) {
    Trainer trainer(qwen.model, open_device("cpu"),
                    {.head_products = head_products_from_name(head), .batch_tokens = 256});
    trainer.load(qwen);
    std::vector<const Encoding*> embedded;
    const pipeline::StepObserver observer = [&](const pipeline::Node& node, std::span<const TensorView> inputs,
                                                std::span<const TensorView>) {
      if (node.op->name() == "embedding" && node.pass == kernels::Pass::forward)
        for (const TensorView& input : inputs) embedded.push_back(input.encoding);
    };
    trainer.step(std::span(&batch, 1), 0, &observer);
    EXPECT_FALSE(embedded.empty());
    for (const Encoding* encoding : embedded) EXPECT_EQ(encoding, nullptr);
    EXPECT_EQ(state_of(trainer, "m.model.embed_tokens.weight").empty(), false);
    gradients.push_back(values_of(trainer.gradient("model.embed_tokens.weight")));
    if (head != std::string("plain")) {
      EXPECT_EQ(state_of(trainer, "amax.model.embed_tokens.weight").size(), 16u);
      EXPECT_EQ(state_of(trainer, "amax.lm_head.x").size(), 16u);
    }
  }
  const double change = distance(gradients[0], gradients[1]),
               size = distance(gradients[0], std::vector<float>(gradients[0].size(), 0.0f));
  EXPECT_GT(change, 0);
  EXPECT_LT(change, size / 8) << "codes of e5m2 are within 2^-3 of their values";
}

TEST(Fp8Training, AHeadThatCannotBeRoundedIsRefused) {
  const auto refusal = [](const std::string& folder, const TrainerOptions& options, const Mesh& mesh = {}) {
    return test::refusal([&] {
      const Trainer trainer(models::open_checkpoint(golden(folder).string()).model, open_device("cpu"), options, mesh);
    });
  };
  const Encoding* head = head_products_from_name("fp8_tensor");
  EXPECT_EQ(refusal("llama", {.head_products = products_from_name("fp8_block128")}),
            "InvalidArgument: head_products in fp8_e4m3_block128 cannot be trained; expected fp8_e4m3_current, "
            "fp8_e4m3_delayed");
  EXPECT_EQ(test::refusal([] { head_products_from_name("fp8_block128"); }),
            "InvalidArgument: head_products is 'fp8_block128'; expected one of plain, fp8_tensor, fp8_tensor_delayed");
  // Logits that something else than the loss reads first, and a loss that is not made together with the head.
  for (const std::string& message :
       {refusal("gemma2", {.head_products = head}),
        refusal("llama", {.head_products = head, .disabled_fusions = {"linear_cross_entropy"}})})
    EXPECT_NE(message.find("gradients of logits in e5m2 are for linear_cross_entropy"), std::string::npos) << message;
  const std::string bias = refusal("ernie4_5_moe_bias", {.head_products = head});
  EXPECT_NE(bias.find("the output layer is not rounded to fp8_e4m3_current where it has a bias"), std::string::npos)
      << bias;
  EXPECT_NE(refusal("llama", {.head_products = head, .amax_history = 4}).find("amax_history is 4"), std::string::npos);
  EXPECT_EQ(refusal("llama", {.head_products = head_products_from_name("fp8_tensor_delayed"), .amax_history = 4}), "");
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
  EXPECT_NE(refusal("llama", Fp8Encoding::find("fp8_e4m3_channel"))
                .find("expected fp8_e4m3_block128, fp8_e4m3_current, fp8_e4m3_delayed"),
            std::string::npos);
  EXPECT_NE(refusal("llama", &Fp8TensorEncoding::of(Fp8Format::Kind::e5m2, false)).find("fp8_e5m2_current"),
            std::string::npos);
  for (const char* products : {"fp8_block128", "fp8_tensor", "fp8_tensor_delayed"}) {
    const std::string experts = refusal("qwen3_moe", products_from_name(products));
    EXPECT_NE(experts.find("experts"), std::string::npos) << experts;
    EXPECT_NE(experts.find(products_from_name(products)->name()), std::string::npos) << experts;
  }
  EXPECT_EQ(test::refusal([] { products_from_name("fp8"); }),
            "InvalidArgument: products is 'fp8'; expected one of plain, fp8_block128, fp8_tensor, fp8_tensor_delayed");
  for (const std::string& name : product_names()) EXPECT_EQ(products_from_name(name) == nullptr, name == "plain");
  EXPECT_THROW(Llama().trainer(products_from_name("fp8_tensor_delayed"), DType::f32, 0), InvalidArgument);
  for (const char* products : {"plain", "fp8_block128", "fp8_tensor"})
    EXPECT_EQ(test::refusal([&] { Llama().trainer(products_from_name(products), DType::f32, 4); }),
              fmt::format("InvalidArgument: amax_history is 4, but products are '{}' and head_products 'plain'; only "
                          "fp8_tensor_delayed takes scales from earlier steps",
                          products));
}

}  // namespace
}  // namespace eadem::train
