// SPDX-License-Identifier: Apache-2.0
//
//   eadem_host_time MODEL [--batch 1,32] [--steps 2000] [--threads 1]
//
// Measures what a decode step costs on the host outside kernels: checking and laying out its input, binding views, the
// loop over plans, and reading the tokens. A step is timed whole, then its plans are called once more in a bare loop;
// the difference of the smallest times of both is reported, because noise only adds.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

#include "eadem/engine/infer_engine.h"

namespace {

using namespace eadem;
using Clock = std::chrono::steady_clock;

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

void run_plans(const pipeline::Program& program) {
  for (size_t n = 0; n < program.graph().nodes().size(); ++n)
    if (const kernels::Plan* plan = program.plan(n)) plan->run(program.call(n));
}

// Decodes the same token of every sequence again and again, behind kPrompt others.
void measure(engine::InferEngine& engine, int batch, int steps) {
  constexpr int kPrompt = 16;
  const auto size = static_cast<size_t>(batch);
  engine::InferEngine::Input input;
  input.input_ids.assign(size * kPrompt, 5);
  input.input_lengths.assign(size, kPrompt);
  input.cache_lengths.assign(size, 0);
  engine.forward(input);
  input.input_ids.assign(size, 5);
  input.input_lengths.assign(size, 1);
  input.cache_lengths.assign(size, kPrompt);
  double step_us = std::numeric_limits<double>::infinity(), kernels_us = step_us;
  for (int step = 0; step < steps; ++step) {
    Clock::time_point start = Clock::now();
    engine.forward(input);
    step_us = std::min(step_us, microseconds_since(start));
    start = Clock::now();
    run_plans(engine.decode_program());
    kernels_us = std::min(kernels_us, microseconds_since(start));
  }
  fmt::print("batch {:3}: step {:8.1f} us, kernels {:8.1f} us, host {:6.1f} us\n", batch, step_us, kernels_us,
             step_us - kernels_us);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times what decode steps cost on the host outside kernels.");
  std::string model;
  std::vector<int> batches = {1, 32};
  int steps = 2000, threads = 1;
  app.add_option("model", model, "a checkpoint")->required();
  app.add_option("--batch", batches, "sequences of a step")->delimiter(',');
  app.add_option("--steps", steps, "steps that are timed");
  app.add_option("--threads", threads, "threads of the device");
  CLI11_PARSE(app, argc, argv);
  try {
    const models::Checkpoint checkpoint = models::open_checkpoint(model);
    for (const int batch : batches) {
      engine::EngineOptions options;
      options.cache = engine::StaticKVCacheConfig{.max_batch_size = batch, .max_cache_len = 64};
      const auto engine =
          engine::InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = threads}), options);
      measure(*engine, batch, steps);
    }
  } catch (const Error& error) {
    fmt::print(stderr, "eadem_host_time: {}\n", error.what());
    return 1;
  }
  return 0;
}
