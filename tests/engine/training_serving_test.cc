// SPDX-License-Identifier: Apache-2.0
//
// Training and serving compute one function: logits and log-probabilities of both are compared bit for bit.
#include <gtest/gtest.h>

#include "eadem/models/decoders/decoder.h"
#include "tests/engine/training_scores.h"

namespace eadem::engine {
namespace {

class EveryModel : public testing::TestWithParam<const char*> {};

TEST_P(EveryModel, TrainingScoresWithTheBitsOfServing) {
  const models::Checkpoint checkpoint = models::open_checkpoint(golden(GetParam()));
  const std::vector<int32_t> tokens = tokens_of(kTokens, checkpoint.model->info().vocab, 5);
  const auto& model = dynamic_cast<const models::Decoder&>(*checkpoint.model);
  const bool scales = model.decoder_spec().logit_scale != 1 || model.decoder_spec().logit_softcap != 0;
  for (const Isa isa : available_isas())
    for (const DType weights : {DType::f32, DType::bf16}) {
      const std::string what = fmt::format("{} {}", isa_name(isa), dtype_name(weights));
      const auto device = open_device("cpu", {.num_threads = 2, .isa = isa_name(isa)});
      std::vector<int32_t> labels;
      const Scores served = serve(checkpoint, device, weights, tokens, {23, 1, 16}, labels);
      const Scores trained = train_forward(checkpoint, device, weights, tokens, labels, {"linear_cross_entropy"});
      expect_same_bits(served.logits, trained.logits, what + " logits");
      expect_same_bits(served.logprobs, trained.logprobs, what + " log-probabilities");
      const Scores fused = train_forward(checkpoint, device, weights, tokens, labels, {});
      EXPECT_EQ(fused.logits.empty(), !scales);  // they were never stored, unless a multiplier stands behind the head
      expect_same_bits(served.logprobs, fused.logprobs, what + " log-probabilities, fused with the LM head");
    }
}

INSTANTIATE_TEST_SUITE_P(Transformers, EveryModel,
                         testing::Values("llama", "llama31", "mistral", "qwen2", "qwen3", "smollm2", "qwen3_moe",
                                         "glm4_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "mistral4",
                                         "granitemoehybrid", "falcon_h1", "nemotron_h_moe", "lfm2", "qwen3_next",
                                         "kimi_linear", "llama4", "longcat_flash", "deepseek_v4"));

}  // namespace
}  // namespace eadem::engine
