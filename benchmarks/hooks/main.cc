// SPDX-License-Identifier: Apache-2.0
//
//   eadem_hooks_bench [MODEL] [--steps 500] [--json]
//
// Times steps of decode of one sequence, on one thread: what hooks cost, and that without any they cost nothing. The
// rows take turns on one engine, step by step, so that all see the same machine and the same memory.
//
//   none   no hook is registered; those of other rows were removed
//   again  likewise: how far apart two rows are that do the same
//   one    a hook on the value that the head reads
//   all    a hook on every value
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "eadem/engine/infer_engine.h"

namespace {

using namespace eadem;
using namespace eadem::engine;
using Clock = std::chrono::steady_clock;

constexpr int32_t kPrompt = 16;

struct Row {
  std::string name, pattern;  // of the hook; empty: none
  std::vector<double> times;  // us
};

// Decodes the token behind a prompt of kPrompt, whose place each step writes again.
double step_us(InferEngine& engine, const std::string& pattern) {
  const InferEngine::Input input{.input_ids = {5}, .input_lengths = {1}, .cache_lengths = {kPrompt}};
  if (!pattern.empty()) engine.hooks().register_hook(pattern, [](const std::string&, const TensorView&, int) {});
  const Clock::time_point start = Clock::now();
  engine.forward(input);
  const double time = std::chrono::duration<double>(Clock::now() - start).count() * 1e6;
  engine.hooks().clear();
  return time;
}

void fill_cache(InferEngine& engine) {
  InferEngine::Input input{
      .input_ids = std::vector<int32_t>(kPrompt, 3), .input_lengths = {kPrompt}, .cache_lengths = {0}};
  engine.forward(input);
}

}  // namespace

int main(int argc, char** argv) {
  std::string model = EADEM_ASSETS_DIR "/stories";
  int64_t steps = 500;
  bool json = false;
  CLI::App app("Times steps with and without hooks");
  app.add_option("MODEL", model, "a checkpoint (default: the bundled model)");
  app.add_option("--steps", steps, "steps of each row")->check(CLI::Range(1, 1000000));
  app.add_flag("--json", json, "a JSON object for each row");
  CLI11_PARSE(app, argc, argv);
  try {
    const models::Checkpoint checkpoint = models::open_checkpoint(model);
    const auto engine = InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), {});
    fill_cache(*engine);
    std::vector<Row> rows = {{"none", "", {}}, {"again", "", {}}, {"one", "model.norm.*", {}}, {"all", "*", {}}};
    for (int64_t step = -steps / 10; step < steps; ++step)  // the first tenth warms up
      for (size_t i = 0; i < rows.size(); ++i) {            // each row comes behind each other one as often
        const size_t turn = i * static_cast<size_t>(1 + 2 * (step & 1)) + static_cast<size_t>(step + steps);
        Row& row = rows[turn % rows.size()];
        if (const double time = step_us(*engine, row.pattern); step >= 0) row.times.push_back(time);
      }
    double base = 0;
    for (Row& row : rows) {
      std::sort(row.times.begin(), row.times.end());
      const double median = row.times[row.times.size() / 2];
      if (row.name == "none") base = median;
      if (json)
        fmt::print("{{\"name\": \"hooks/{}\", \"steps\": {}, \"median_us\": {:.3f}, \"quarter_us\": {:.3f}}}\n",
                   row.name, row.times.size(), median, row.times[row.times.size() / 4]);
      else
        fmt::print("{:<8} median {:>8.1f} us   first quarter {:>8.1f} us   {:+.2f}%\n", row.name, median,
                   row.times[row.times.size() / 4], 100 * (median / base - 1));
    }
  } catch (const Error& error) {
    fmt::print(stderr, "error: {}\n", error.what());
    return 1;
  }
  return 0;
}
