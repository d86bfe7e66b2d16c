// SPDX-License-Identifier: Apache-2.0
//
//   eadem_hooks_bench [MODEL] [--steps 500] [--json]
//
// Times steps of decode of one sequence, on one thread: what hooks cost, and that without any they cost nothing. Rows
// take turns step by step, so that all see the same machine.
//
//   never    an engine on which no hook was ever registered
//   removed  one whose hooks were removed
//   one      a hook on the value that the head reads
//   all      a hook on every value
//
// The difference of `removed` and `never` is to be compared with that of `again` and `never`, two engines alike.
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
  std::string name;
  std::unique_ptr<InferEngine> engine;
  std::vector<double> times;  // us
};

Row make_row(const std::string& name, const models::Checkpoint& checkpoint, const std::string& pattern, bool removed) {
  Row row{name, nullptr, {}};
  row.engine = InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 1}), {});
  if (!pattern.empty()) {
    const auto id = row.engine->hooks().register_hook(pattern, [](const std::string&, const TensorView&, int) {});
    if (removed) row.engine->hooks().remove(id);
  }
  return row;
}

// Decodes the token behind a prompt of kPrompt, whose place each step writes again.
double step_us(InferEngine& engine) {
  InferEngine::Input input{.input_ids = {5}, .input_lengths = {1}, .cache_lengths = {kPrompt}};
  const Clock::time_point start = Clock::now();
  engine.forward(input);
  return std::chrono::duration<double>(Clock::now() - start).count() * 1e6;
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
    std::vector<Row> rows;
    for (const char* name : {"never", "again"}) rows.push_back(make_row(name, checkpoint, "", false));
    rows.push_back(make_row("removed", checkpoint, "*", true));
    rows.push_back(make_row("one", checkpoint, "model.norm.*", false));
    rows.push_back(make_row("all", checkpoint, "*", false));
    for (const Row& row : rows) fill_cache(*row.engine);
    for (int64_t step = -steps / 10; step < steps; ++step)  // the first tenth warms up
      for (Row& row : rows)
        if (const double time = step_us(*row.engine); step >= 0) row.times.push_back(time);
    double base = 0;
    for (Row& row : rows) {
      std::sort(row.times.begin(), row.times.end());
      const double median = row.times[row.times.size() / 2];
      if (row.name == "never") base = median;
      if (json)
        fmt::print("{{\"name\": \"hooks/{}\", \"steps\": {}, \"median_us\": {:.3f}, \"quarter_us\": {:.3f}}}\n", row.name,
                   row.times.size(), median, row.times[row.times.size() / 4]);
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
