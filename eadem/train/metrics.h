// SPDX-License-Identifier: Apache-2.0
//
// metrics.jsonl and its plot.
#pragma once

#include <cstdint>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

namespace eadem::train {

struct StepMetrics {
  int64_t step = 0;
  double loss = 0;
  double learning_rate = 0;
  double grad_norm = 0;
  int64_t tokens = 0;
  double tokens_per_second = 0;
  std::optional<double> load_balancing_loss = {};  // which `loss` has in it, times its coefficient
};

struct EvalMetrics {
  int64_t step = 0;
  double loss = 0;  // mean over tokens, natural logarithm
};

// The history of a run, kept in a file of JSON lines that grows by one line per entry.
class Metrics {
 public:
  // Reads the entries up to `last_step`. Drops entries that an interrupted run wrote after it, and entries that repeat
  // a step or go back behind one. Throws IoError.
  Metrics(const std::string& path, int64_t last_step);

  void add(const StepMetrics& metrics);
  void add(const EvalMetrics& metrics);

  const std::vector<StepMetrics>& steps() const { return steps_; }
  const std::vector<EvalMetrics>& evals() const { return evals_; }

 private:
  void append(const std::string& line);

  std::string path_;
  std::ofstream file_;
  std::vector<StepMetrics> steps_;
  std::vector<EvalMetrics> evals_;
};

// Draws the loss curves as an SVG document: training loss (smoothed) and evaluation loss.
std::string plot_svg(const Metrics& metrics, const std::string& title);

}  // namespace eadem::train
