// SPDX-License-Identifier: Apache-2.0
//
// Calibration: statistics of the inputs of a model's linear layers, measured on a text.
//
// An error e in column k of a weight [out, in] changes an output by e * x[k], where x is the linear's input. Its mean
// square over many tokens is e^2 * mean(x[k]^2). The mean square of each input column is therefore the cost of a square
// error in that column, which quantizers take as its importance (BlockEncoding::quantize_row). Inputs are observed
// while the model runs over the tokens of the text; the model is not changed.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/engine/infer_engine.h"

namespace eadem::engine {

struct CalibrationOptions {
  EngineOptions engine;                       // precisions; the cache, step sizes and fusions are chosen here
  int64_t context = 512;                      // tokens of one sequence; at most the model's positions
  int64_t max_tokens = int64_t{1} << 15;      // tokens of the text
  std::optional<int32_t> bos;                 // stands before each sequence and counts as one of its tokens
  const std::atomic<bool>* cancel = nullptr;  // once it is set, Cancelled is thrown
};

struct InputStatistics {
  int64_t rows = 0;                  // input rows seen
  std::vector<double> mean_squares;  // [in]
};

class Calibration {
 public:
  // `stage`: "loading" (bytes) or "calibrating" (tokens). May throw to stop.
  using Progress = std::function<void(std::string_view stage, int64_t done, int64_t total)>;

  // Runs the model of `checkpoint` over `tokens`, packed into sequences of the context's length. Throws InvalidArgument
  // when options are out of range, when there are no tokens, and when the inputs of a weight are not finite, naming the
  // weight.
  static Calibration run(const models::Checkpoint& checkpoint, std::shared_ptr<Device> device,
                         std::span<const int32_t> tokens, const CalibrationOptions& options,
                         const Progress& progress = {});

  // Statistics by parameter, for every weight that linears multiply by. Embeddings that are only looked up are left
  // out.
  const std::map<std::string, InputStatistics>& weights() const { return weights_; }
  int64_t tokens() const { return tokens_; }  // tokens that were run, with each BOS

  // Returns [in] positive values with mean 1, the importance that quantizers take for `weight`, or nothing when no
  // linear multiplies by it. One row whose columns are all equal is added to the statistics, so that a column that
  // stayed zero in this text has little importance, but not none.
  std::vector<float> importance(const std::string& weight) const;

 private:
  std::map<std::string, InputStatistics> weights_;
  int64_t tokens_ = 0;
};

}  // namespace eadem::engine
