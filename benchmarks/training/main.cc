// SPDX-License-Identifier: Apache-2.0
//
//   eadem_training_bench CONFIG [--device cuda] [--weights bf16] [--products plain] [--head-products plain]
//                        [--batch 8] [--sequence 2048] [--steps 5] [--json | --ops]
//
// Times optimizer steps of a model with random weights in the shape of a config.json, on random tokens: the forward
// pass, the backward pass and AdamW. One step is a pass over batch x sequence tokens; two steps go before those that
// are timed. The share of the limit counts 6 operations per parameter of a matrix product and token (of experts, of
// those that a token chooses), and 6 * layers * heads * head_dim * sequence for causal attention, nothing for what is
// computed twice; the limit is the rate that the device states for large products.
//
// --ops adds one step in which the device is idle after each kernel, and prints the time of each op and pass in it.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "eadem/models/config/model_config.h"
#include "eadem/train/trainer.h"

namespace {

using namespace eadem;
using Clock = std::chrono::steady_clock;

struct Options {
  std::string config, device = "cpu", weights = "bf16", products = "plain", head_products = "plain";
  int64_t batch = 8, sequence = 2048;
  int steps = 5;
  bool json = false, ops = false, recompute = false;
};

train::Batch random_batch(const Options& options, int64_t vocab) {
  std::mt19937 random(1);
  std::uniform_int_distribution<uint32_t> token(0, static_cast<uint32_t>(vocab - 1));
  train::Batch batch;
  clear(batch);
  for (int64_t s = 0; s < options.batch; ++s) {
    std::vector<uint32_t> document(static_cast<size_t>(options.sequence) + 1);
    for (uint32_t& id : document) id = token(random);
    append_piece(batch, document, 0, options.sequence);
  }
  return batch;
}

// Operations of one token, forward and backward.
double flops_of_token(const models::Model& model, int64_t parameters, int64_t sequence) {
  const models::ModelInfo& info = model.info();
  // A table that is no head as well is only read.
  int64_t multiplied = info.tied ? parameters : parameters - info.vocab * info.hidden;
  if (const models::ModelConfig* config = model.config(); config != nullptr && config->num_experts > 0)
    for (const models::ParameterInfo& each : model.parameters())
      if (each.name.find(".experts.") != std::string::npos)
        multiplied -=
            each.shape.num_elements() / config->num_experts * (config->num_experts - config->num_experts_per_tok);
  return 6 * static_cast<double>(multiplied) +
         6 * static_cast<double>(info.layers * info.heads * info.head_dim) * static_cast<double>(sequence);
}

// One step, with the time of each op and pass.
void print_ops(train::Trainer& trainer, const train::Batch& batch, Device& device) {
  struct Total {
    int calls = 0;
    double seconds = 0;
  };
  std::map<std::pair<std::string, kernels::Pass>, Total> totals;
  device.synchronize();  // the update of the step before may still run
  Clock::time_point last = Clock::now();
  const pipeline::StepObserver observer = [&](const pipeline::Node& node, auto, auto) {
    const Clock::time_point now = Clock::now();
    // Before the first op a step clears the gradients.
    const std::string name = fmt::format("{}{}", totals.empty() ? "clearing, " : "", node.op->name());
    Total& total = totals[{name, node.pass}];
    total.calls += 1;
    total.seconds += std::chrono::duration<double>(now - last).count();
    last = Clock::now();
  };
  trainer.step(std::span(&batch, 1), 1e-5, &observer);
  std::vector<std::pair<std::pair<std::string, kernels::Pass>, Total>> rows(totals.begin(), totals.end());
  std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
  fmt::print("{:<28} {:<10} {:>6} {:>10}\n", "op", "pass", "calls", "ms");
  for (const auto& [key, total] : rows)
    fmt::print("{:<28} {:<10} {:>6} {:>10.2f}\n", key.first, kernels::pass_name(key.second), total.calls,
               1e3 * total.seconds);
}

void measure(const Options& options) {
  const std::shared_ptr<const models::Model> model = models::model_from_config(options.config);
  const std::shared_ptr<Device> device = open_device(options.device);
  train::Trainer trainer(model, device,
                         {.weights = options.weights == "f32" ? DType::f32 : DType::bf16,
                          .products = train::products_from_name(options.products),
                          .head_products = train::head_products_from_name(options.head_products),
                          .batch_tokens = options.batch * options.sequence,
                          .recompute_layers = options.recompute});
  trainer.load_random(1, 0.02);
  const train::Batch batch = random_batch(options, model->info().vocab);
  double loss = 0;
  std::vector<double> seconds;
  for (int step = -2; step < options.steps; ++step) {
    const Clock::time_point start = Clock::now();
    loss = trainer.step(std::span(&batch, 1), 1e-5).loss;
    if (step >= 0) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  const auto tokens = static_cast<double>(options.batch * options.sequence);
  const double flops = flops_of_token(*model, trainer.num_parameters(), options.sequence) * tokens / median;
  if (options.json) {
    // One row in the form of `eadem bench --json`.
    fmt::print(
        "{{\"schema\": \"eadem_training_bench/1\", \"device\": \"{}\", \"weights\": \"{}\", \"products\": \"{}\", "
        "\"head_products\": \"{}\", \"recompute\": {}, \"parameters\": {}, \"arena_bytes\": {}, "
        "\"flops_per_second\": {:.6g}, \"loss\": {:.6f}, \"results\": [{{\"test\": \"training\", \"tokens\": {}, "
        "\"depth\": 0, \"batch\": {}, \"tokens_per_second\": {:.1f}, \"lowest\": {:.1f}, \"highest\": {:.1f}, "
        "\"share_of_roofline\": {:.4f}}}]}}\n",
        device->description(), options.weights, options.products, options.head_products, options.recompute,
        trainer.num_parameters(), trainer.training_program().memory_plan().arena_bytes, flops, loss, options.sequence,
        options.batch, tokens / median, tokens / seconds.back(), tokens / seconds.front(),
        flops / device->rates().flops_per_second);
    return;
  }
  const double values = static_cast<double>(trainer.training_program().memory_plan().arena_bytes);
  fmt::print(
      "{} on {}: {:.0f} tokens/s, {:.1f} ms a step ({:.1f} to {:.1f}), {:.1f} TFLOP/s, loss {:.4f}, {:.0f} MB of "
      "values\n",
      options.config, device->description(), tokens / median, 1e3 * median, 1e3 * seconds.front(), 1e3 * seconds.back(),
      flops * 1e-12, loss, 1e-6 * values);
  if (options.ops) print_ops(trainer, batch, *device);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times the optimizer steps of a model with random weights.");
  Options options;
  app.add_option("config", options.config, "a config.json")->required();
  app.add_option("--device", options.device, "cpu, cuda, cuda:1");
  app.add_option("--weights", options.weights, "f32 or bf16")->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--products", options.products, "what linear layers multiply")
      ->check(CLI::IsMember(train::product_names()));
  app.add_flag("--recompute", options.recompute, "computes the values of layers again in the backward pass");
  app.add_option("--head-products", options.head_products, "what the output layer multiplies")
      ->check(CLI::IsMember(train::head_product_names()));
  app.add_option("--batch", options.batch, "sequences of a step")->check(CLI::Range(int64_t{1}, int64_t{65536}));
  app.add_option("--sequence", options.sequence, "tokens of a sequence")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 20));
  app.add_option("--steps", options.steps, "steps that are timed")->check(CLI::Range(1, 100000));
  CLI::Option* json = app.add_flag("--json", options.json, "one JSON object");
  app.add_flag("--ops", options.ops, "the time of each op, in a step of its own")->excludes(json);
  CLI11_PARSE(app, argc, argv);
  try {
    measure(options);
  } catch (const Error& error) {
    fmt::print(stderr, "eadem_training_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
