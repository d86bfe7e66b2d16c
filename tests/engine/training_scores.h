// SPDX-License-Identifier: Apache-2.0
//
// Logits and log-probabilities of one sequence, as serving computes them and as the forward half of training does.
#pragma once

#include <vector>

#include "tests/engine/engine_helpers.h"

namespace eadem::engine {

inline constexpr int64_t kTokens = 40;

// What one forward pass over a sequence gives for each of its tokens.
struct Scores {
  std::vector<float> logits;    // [tokens, vocab]
  std::vector<float> logprobs;  // [tokens] of the labels
};

// Serves the sequence in chunks of the given sizes from a cache; a token's label is the one that it samples greedily,
// which is written to `labels`.
inline Scores serve(const models::Checkpoint& checkpoint, const std::shared_ptr<Device>& device, DType weights,
                    const std::vector<int32_t>& tokens, const std::vector<int32_t>& chunks,
                    std::vector<int32_t>& labels) {
  EngineOptions options;
  options.max_logit_rows = kTokens;
  options.hardware.weights = weights;
  if (weights == DType::f32) options.hardware.activations = DType::f32;
  const auto engine = InferEngine::from_checkpoint(checkpoint, device, options);
  Scores result;
  int32_t begin = 0;
  for (const int32_t chunk : chunks) {
    const InferEngine::Output& output =
        engine->forward({.input_ids = {tokens.begin() + begin, tokens.begin() + begin + chunk},
                         .input_lengths = {chunk},
                         .cache_lengths = {begin},
                         .all_logits = true});
    labels.insert(labels.end(), output.output_ids.begin(), output.output_ids.end());
    result.logprobs.insert(result.logprobs.end(), output.logprobs.begin(), output.logprobs.end());
    for (const float logit : values(engine->logits())) result.logits.push_back(logit);
    begin += chunk;
  }
  return result;
}

// Runs the forward half of the training program. Only without the fusion with the LM head do logits exist.
inline Scores train_forward(const models::Checkpoint& checkpoint, const std::shared_ptr<Device>& device, DType weights,
                            const std::vector<int32_t>& tokens, const std::vector<int32_t>& labels,
                            const std::vector<std::string>& disabled_fusions) {
  HardwareOverrides overrides;
  overrides.weights = weights;
  if (weights == DType::f32) overrides.activations = DType::f32;
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(checkpoint.model->spec(), *device,
                                                                     HardwareMode::performance, overrides, "test");
  const auto parameters = std::make_shared<pipeline::ParameterStore>(device);
  pipeline::Environment environment{.device = device, .mode = pipeline::Mode::training};
  environment.bounds[Symbol::tokens] = kTokens;
  environment.bounds[Symbol::sequences] = 1;
  environment.disabled_fusions = disabled_fusions;
  pipeline::Program program(
      models::build_training_graph(*checkpoint.model, {.device = device.get(), .hardware = &hardware}).graph,
      environment, parameters);
  models::load_weights(*parameters, checkpoint);
  std::vector<Tensor> gradients;  // never written by the forward half, but every state needs memory
  for (const auto& [name, id] : program.states()) {
    gradients.push_back(allocate_tensor(*device, program.graph().value(id).type, {}));
    program.bind_state(name, gradients.back().view);
  }

  std::vector<int32_t> positions(kTokens);
  for (int32_t t = 0; t < kTokens; ++t) positions[static_cast<size_t>(t)] = t;
  const auto set = [&](const char* name, const std::vector<int32_t>& list) {
    program.set_input(program.input(name), list.data(), std::ssize(list) * 4);
  };
  set("token_ids", tokens);
  set("positions", positions);
  set("labels", labels);
  set("query_start", {0, kTokens});
  set("kv_length", {kTokens});
  Scores result;
  const pipeline::StepObserver keep_logits = [&](const pipeline::Node& node, std::span<const TensorView> inputs, auto) {
    if (node.op->name() == "cross_entropy") result.logits = values(copy_to_host(*device, inputs[0]));
  };
  program.run_forward(environment.bounds, &keep_logits);
  result.logprobs = values(copy_to_host(*device, program.view(program.output("loss"))));
  for (float& logprob : result.logprobs) logprob = -logprob;
  return result;
}

}  // namespace eadem::engine
