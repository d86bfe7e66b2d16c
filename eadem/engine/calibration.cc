// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/calibration.h"

#include <algorithm>
#include <cmath>

namespace eadem::engine {

namespace {

// The logits of a step take at most this many bytes, whatever the vocabulary.
constexpr int64_t kLogitBytes = 64 << 20;

// Adds the squares of `input` [rows, in].
void add_squares(InputStatistics& statistics, const TensorView& input) {
  const int64_t columns = input.shape.back(), rows = columns == 0 ? 0 : input.num_elements() / columns;
  const Tensor wide = input.dtype == DType::f32 ? Tensor(input, nullptr) : converted_on_host(input, DType::f32);
  std::vector<double>& sums = statistics.mean_squares;
  sums.resize(static_cast<size_t>(columns));
  const float* x = wide.view.as<float>();
  for (int64_t row = 0; row < rows; ++row, x += columns)
    for (int64_t column = 0; column < columns; ++column)
      sums[static_cast<size_t>(column)] += static_cast<double>(x[column]) * x[column];
  statistics.rows += rows;
}

}  // namespace

Calibration Calibration::run(const models::Checkpoint& checkpoint, std::shared_ptr<Device> device,
                             std::span<const int32_t> tokens, const CalibrationOptions& options,
                             const Progress& progress) {
  if (tokens.empty()) throw InvalidArgument("{}: no tokens to calibrate with", checkpoint.path);
  if (options.max_tokens < 1)
    throw InvalidArgument("max_tokens of a calibration is {}; expected at least 1", options.max_tokens);
  const int64_t context = std::min(options.context, checkpoint.model->info().default_context());
  const int64_t new_tokens = context - (options.bos ? 1 : 0);  // tokens of the text in one sequence
  if (new_tokens < 1)
    throw InvalidArgument("the context of a calibration is {} tokens{}; expected more", context,
                          options.bos ? ", one of them BOS" : "");
  tokens = tokens.first(static_cast<size_t>(std::min<int64_t>(options.max_tokens, std::ssize(tokens))));

  EngineOptions engine_options = options.engine;
  // Inside a fusion a linear is no op of its own, and its input cannot be told from the fusion's other inputs.
  engine_options.disabled_fusions = {"all"};
  engine_options.cache = StaticKVCacheConfig{.max_batch_size = 1, .max_cache_len = context};
  // Every token's hidden state goes through the LM head, as in training.
  engine_options.max_num_batched_tokens =
      std::clamp<int64_t>(kLogitBytes / (4 * checkpoint.model->info().vocab), 1, context);
  engine_options.max_logit_rows = engine_options.max_num_batched_tokens;
  const auto engine = InferEngine::from_checkpoint(
      checkpoint, std::move(device), engine_options,
      [&](int64_t done, int64_t total) { progress ? progress("loading", done, total) : void(); });

  Calibration result;
  engine->hooks().register_linear_input_hook("*", [&result](const std::string& weight, const TensorView& input, int) {
    add_squares(result.weights_[weight], input);
  });
  for (size_t begin = 0; begin < tokens.size(); begin += static_cast<size_t>(new_tokens)) {
    const size_t count = std::min(static_cast<size_t>(new_tokens), tokens.size() - begin);
    std::vector<int32_t> sequence(tokens.begin() + static_cast<ptrdiff_t>(begin),
                                  tokens.begin() + static_cast<ptrdiff_t>(begin + count));
    if (options.bos) sequence.insert(sequence.begin(), *options.bos);
    InferEngine::Input input;
    input.all_logits = true;
    for (size_t done = 0; done < sequence.size(); done += input.input_ids.size()) {
      const size_t step = std::min(static_cast<size_t>(engine_options.max_num_batched_tokens), sequence.size() - done);
      input.input_ids.assign(sequence.begin() + static_cast<ptrdiff_t>(done),
                             sequence.begin() + static_cast<ptrdiff_t>(done + step));
      input.input_lengths = {static_cast<int32_t>(step)};
      input.cache_lengths = {static_cast<int32_t>(done)};
      engine->forward(input, options.cancel);
    }
    result.tokens_ += std::ssize(sequence);
    if (progress) progress("calibrating", static_cast<int64_t>(begin + count), std::ssize(tokens));
  }
  for (auto& [weight, statistics] : result.weights_)
    for (size_t column = 0; column < statistics.mean_squares.size(); ++column) {
      double& value = statistics.mean_squares[column];
      value /= static_cast<double>(statistics.rows);
      if (!std::isfinite(value))
        throw InvalidArgument("{}: column {} of the input of '{}' is not finite on this text", checkpoint.path, column,
                              weight);
    }
  return result;
}

std::vector<float> Calibration::importance(const std::string& weight) const {
  const auto found = weights_.find(weight);
  if (found == weights_.end()) return {};
  const auto& [rows, mean_squares] = found->second;
  double mean = 0;
  for (double value : mean_squares) mean += value / static_cast<double>(mean_squares.size());
  std::vector<float> result;
  const double n = static_cast<double>(rows);
  for (double value : mean_squares)
    result.push_back(static_cast<float>((n * (mean > 0 ? value / mean : 1) + 1) / (n + 1)));
  return result;
}

}  // namespace eadem::engine
