// SPDX-License-Identifier: Apache-2.0
//
//   eadem_host_time MODEL [--batch 1,32] [--steps 2000] [--threads 1] [--depth 16] [--ops] [--prompt 512]
//   eadem_host_time MODEL --device cuda [--random] [--batch 1,32] [--steps 2000] [--depth 16]
//
// Measures what a decode step costs on the host outside kernels: checking and laying out its input, binding views, the
// loop over plans, and reading the tokens. A step is timed whole, then its plans are called once more in a bare loop;
// the difference of the smallest times of both is reported, because noise only adds.
//
// --ops prints the median time of a step's plans, summed over those of one op at one place of the layers, and the bytes
// of weights that they read. Each step has another token, so that other experts are chosen. With --prompt it is a step
// that reads a prompt of so many tokens.
//
// On a device that works beside the host, three medians are printed: of a step whose tokens the host reads before it
// gives the next one, of a step of a row of those that take their tokens from the step before on the device
// (InferEngine::submit), and of the host's part of the latter. What the first is longer than the second is what waiting
// for the host costs. With --random MODEL is a config.json, and weights are random.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>
#include <map>
#include <numeric>
#include <string>
#include <vector>

#include "eadem/engine/infer_engine.h"

namespace {

using namespace eadem;
using Clock = std::chrono::steady_clock;

constexpr int kPromptStep = 512;  // tokens of a step before those that are timed

double microseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// The bytes of weights that a node reads: of expert stacks those of one expert for each row.
double weight_bytes(const pipeline::Program& program, size_t node) {
  double bytes = 0;
  if (program.graph().nodes()[node].op->name() == "embedding") return bytes;  // a row of each token
  program.each_parameter([&](size_t n, size_t port, pipeline::ValueId, const Encoding*) {
    if (n != node) return;
    const auto& inputs = program.call(n).inputs;
    const TensorView& weight = inputs[port];
    double share = 1;
    if (weight.shape.rank() == 3)
      share = std::min(1.0, static_cast<double>(inputs[0].shape[0]) / static_cast<double>(weight.shape[0]));
    int64_t size = weight.encoding == nullptr ? weight.size_bytes() : 0;
    if (weight.encoding != nullptr)
      for (const PlaneSpec& plane : weight.encoding->planes(weight.shape)) size += plane.size_bytes();
    bytes += share * static_cast<double>(size);
  });
  return bytes;
}

// Times plans one by one. `step` runs a whole step, with the token that it is given.
template <typename Step>
void print_ops(const pipeline::Program& program, int steps, int64_t vocab, const Step& step) {
  const auto& nodes = program.graph().nodes();
  std::vector<std::vector<double>> times(nodes.size());
  for (int i = 0; i < steps; ++i) {
    step(static_cast<int32_t>((7919LL * i + 5) % vocab));
    for (size_t n = 0; n < nodes.size(); ++n) {
      const kernels::Plan* plan = program.plan(n);
      if (plan == nullptr) continue;
      const Clock::time_point start = Clock::now();
      plan->run(program.call(n));
      times[n].push_back(microseconds_since(start));
    }
  }
  struct Total {
    int calls = 0;
    double us = 0, bytes = 0;
  };
  std::map<std::string, Total> totals;
  Total all;
  for (size_t n = 0; n < nodes.size(); ++n) {
    if (times[n].empty()) continue;
    const std::string& scope = nodes[n].scope;
    const std::string place = nodes[n].layer < 0 ? scope : scope.substr(scope.find_last_of('.') + 1);
    for (Total* total : {&totals[fmt::format("{} {}", nodes[n].op->name(), place)], &all}) {
      total->calls += 1;
      total->us += median(times[n]);
      total->bytes += weight_bytes(program, n);
    }
  }
  std::vector<std::pair<std::string, Total>> rows(totals.begin(), totals.end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.us > b.second.us; });
  rows.emplace_back("all", all);
  for (const auto& [name, total] : rows)
    fmt::print("{:<52} {:>4} {:>9.1f} us {:>8.2f} MB {:>6.1f} GB/s\n", name, total.calls, total.us, total.bytes * 1e-6,
               total.bytes * 1e-3 / total.us);
}

void run_plans(const pipeline::Program& program) {
  for (size_t n = 0; n < program.graph().nodes().size(); ++n)
    if (const kernels::Plan* plan = program.plan(n)) plan->run(program.call(n));
}

// The ops of steps that read a prompt of `tokens` tokens.
void print_prompt_ops(engine::InferEngine& engine, int steps, int tokens) {
  const int64_t vocab = engine.model().info().vocab;
  engine::InferEngine::Input input;
  input.input_lengths = {tokens};
  input.cache_lengths = {0};
  print_ops(engine.prefill_program(), steps, vocab, [&](int32_t first) {
    input.input_ids.clear();
    for (int64_t i = 0; i < tokens; ++i) input.input_ids.push_back(static_cast<int32_t>((first + 7919 * i) % vocab));
    engine.forward(input);
  });
}

// Lets every sequence have `depth` tokens.
void read_depth(engine::InferEngine& engine, int batch, int depth) {
  const auto size = static_cast<size_t>(batch);
  engine::InferEngine::Input input;
  for (int cached = 0, most = std::max(1, kPromptStep / batch); cached < depth; cached += most) {
    const int tokens = std::min(most, depth - cached);
    input.input_ids.assign(size * static_cast<size_t>(tokens), 5);
    input.input_lengths.assign(size, tokens);
    input.cache_lengths.assign(size, cached);
    engine.forward(input);
  }
}

// Decodes the tokens behind `depth` again and again, kRun of them in a row.
void measure_beside_host(engine::InferEngine& engine, int batch, int steps, int depth) {
  constexpr int kRun = 32, kAhead = 3;
  const int32_t token = 5;
  std::vector<int32_t> rows(static_cast<size_t>(batch));
  std::iota(rows.begin(), rows.end(), 0);
  const auto plan = [&](int index, bool feeds_back) {
    std::vector<engine::StepSequence> sequences;
    for (int s = 0; s < batch; ++s)
      sequences.push_back({.tokens = {&token, 1},
                           .cached = depth + index,
                           .blocks = {&rows[static_cast<size_t>(s)], 1},
                           .row = feeds_back ? s : -1});
    return sequences;
  };
  std::vector<double> alone, in_row, host;
  for (int run = 0; run < steps / kRun + 2; ++run) {
    Clock::time_point start = Clock::now();
    for (int i = 0; i < kRun; ++i) engine.forward(plan(i, false));
    alone.push_back(microseconds_since(start) / kRun);
    start = Clock::now();
    for (int i = 0; i < kRun; ++i) {
      const std::vector<engine::StepSequence> next = plan(i, i > 0);
      const Clock::time_point submitted = Clock::now();
      engine.submit(next);
      host.push_back(microseconds_since(submitted));
      if (engine.num_waiting() > kAhead) engine.collect();
    }
    while (engine.num_waiting() > 0) engine.collect();
    in_row.push_back(microseconds_since(start) / kRun);
  }
  fmt::print("batch {:3}: step {:8.1f} us, of a row {:8.1f} us, host {:6.1f} us\n", batch, median(alone),
             median(in_row), median(host));
}

// Decodes the same token of every sequence again and again, behind `depth` others.
void measure(engine::InferEngine& engine, int batch, int steps, int depth, bool ops) {
  read_depth(engine, batch, depth);
  if (!engine.device()->host_accessible()) return measure_beside_host(engine, batch, steps, depth);
  const auto size = static_cast<size_t>(batch);
  engine::InferEngine::Input input;
  input.input_ids.assign(size, 5);
  input.input_lengths.assign(size, 1);
  input.cache_lengths.assign(size, depth);
  if (ops)
    return print_ops(engine.decode_program(), steps, engine.model().info().vocab, [&](int32_t token) {
      input.input_ids.assign(size, token);
      engine.forward(input);
    });
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
  std::string model, device_name = "cpu";
  bool random = false;
  std::vector<int> batches = {1, 32};
  int steps = 2000, threads = 1, depth = 16, prompt = 0;
  bool ops = false;
  app.add_option("model", model, "a checkpoint")->required();
  app.add_option("--device", device_name, "cpu, cuda, cuda:1");
  app.add_flag("--random", random, "MODEL is a config.json");
  app.add_option("--batch", batches, "sequences of a step")->delimiter(',');
  app.add_option("--steps", steps, "steps that are timed");
  app.add_option("--threads", threads, "threads of the device");
  app.add_option("--depth", depth, "tokens of a sequence that are cached")->check(CLI::Range(1, 1 << 20));
  app.add_flag("--ops", ops, "the time of each op instead");
  app.add_option("--prompt", prompt, "tokens of a prompt, whose ops are timed")->check(CLI::Range(1, 1 << 20));
  CLI11_PARSE(app, argc, argv);
  try {
    const std::shared_ptr<Device> device = open_device(device_name, {.num_threads = threads});
    if (!device->host_accessible() && (ops || prompt > 0))
      throw InvalidArgument("--ops and --prompt time the ops of a CPU; --device is {}", device_name);
    const models::Checkpoint checkpoint =
        random ? models::Checkpoint{model, models::model_from_config(model), nullptr, model}
               : models::open_checkpoint(model);
    for (const int batch : batches) {
      engine::EngineOptions options;
      options.cache =
          engine::StaticKVCacheConfig{.max_batch_size = batch, .max_cache_len = std::max(depth, prompt) + 48};
      const auto engine =
          random ? std::make_unique<engine::InferEngine>(checkpoint.model, device, options, models::spec_of(checkpoint))
                 : engine::InferEngine::from_checkpoint(checkpoint, device, options);
      if (random) engine->load_random(1);
      if (prompt > 0)
        print_prompt_ops(*engine, steps, prompt);
      else
        measure(*engine, batch, steps, depth, ops);
    }
  } catch (const Error& error) {
    fmt::print(stderr, "eadem_host_time: {}\n", error.what());
    return 1;
  }
  return 0;
}
