// SPDX-License-Identifier: Apache-2.0
//
// Calibration: what the matrices of a model are multiplied by, measured on a text.
//
// An error e in column k of a weight [out, in] moves an output by e * x[k], where x is the linear's input. Its mean
// square over many tokens is e^2 * mean(x[k]^2): so the mean square of each input column is what a square error in
// that column costs, the importance that quantizers take (BlockEncoding::quantize_row). Inputs are observed as the
// model runs; of the text nothing but its tokens is used, and the model stays as it is.
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
  EngineOptions engine;                       // precisions; the cache, the size of steps and fusions are chosen here
  int64_t context = 512;                      // tokens of one sequence; at most the model's positions
  int64_t max_tokens = int64_t{1} << 15;      // of the text
  std::optional<int32_t> bos;                 // stands before each sequence, as one of its tokens
  const std::atomic<bool>* cancel = nullptr;  // once it is set, Cancelled is thrown
};

struct InputStatistics {
  int64_t rows = 0;                  // of inputs seen
  std::vector<double> mean_squares;  // [in]
};

class Calibration {
 public:
  // `stage`: "loading" (bytes) or "calibrating" (tokens). May throw to stop.
  using Progress = std::function<void(std::string_view stage, int64_t done, int64_t total)>;

  // Runs the model of `checkpoint` over `tokens`, packed into sequences of the context's length. Throws InvalidArgument
  // for options out of range, without tokens, and when inputs are not finite, naming the weight.
  static Calibration run(const models::Checkpoint& checkpoint, std::shared_ptr<Device> device,
                         std::span<const int32_t> tokens, const CalibrationOptions& options,
                         const Progress& progress = {});

  // By parameter: every weight that linears multiply by. Embeddings that are only looked up are not among them.
  const std::map<std::string, InputStatistics>& weights() const { return weights_; }
  int64_t tokens() const { return tokens_; }  // run, with each BOS

  // [in], positive, with mean 1: what quantizers take for `weight`. Empty when no linear multiplies by it. As if one
  // more row had been seen whose columns are all alike: a column that stayed zero in this text is cheap, but not free.
  std::vector<float> importance(const std::string& weight) const;

 private:
  std::map<std::string, InputStatistics> weights_;
  int64_t tokens_ = 0;
};

}  // namespace eadem::engine
