// SPDX-License-Identifier: Apache-2.0
//
// eadem bench: how fast a model reads prompts and decodes, and how far that is from what the machine can do.
#include <algorithm>
#include <chrono>
#include <cmath>

#include "eadem/cli/arguments.h"
#include "eadem/cli/commands.h"
#include "eadem/cli/convert/layers.h"
#include "eadem/cli/convert/types.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/machine.h"
#include "eadem/cli/model_options.h"
#include "eadem/cli/products.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/device/cpu_device.h"
#include "eadem/engine/llm.h"
#include "eadem/io/json.h"
#include "eadem/models/llama.h"

namespace eadem::cli {

namespace {

using Clock = std::chrono::steady_clock;
using engine::InferEngine;
using io::JsonValue;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Spread {
  double median = 0, low = 0, high = 0;
};

Spread spread_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {(values[(n - 1) / 2] + values[n / 2]) / 2, values.front(), values.back()};
}

// One row of the result: tokens per second, and the share of the roofline at the measured rates.
struct Row {
  std::string test;  // "prefill", "decode"
  int64_t tokens, depth, batch, steps;
  Spread rate;
  double roofline = 0;
  bool in_cache = false;
};

// Steps of `tokens` new tokens in each of `batch` sequences that hold `depth` already. The contents do not matter.
InferEngine::Input step_input(int64_t batch, int64_t tokens, int64_t depth, int64_t vocab) {
  InferEngine::Input input;
  for (int64_t s = 0; s < batch; ++s) {
    input.input_lengths.push_back(static_cast<int32_t>(tokens));
    input.cache_lengths.push_back(static_cast<int32_t>(depth));
    for (int64_t t = 0; t < tokens; ++t)
      input.input_ids.push_back(static_cast<int32_t>((s * 31 + (depth + t) * 17 + 7) % vocab));
  }
  return input;
}

// Reads `tokens` tokens into every sequence from position `depth` on, in steps of at most `step` tokens in all.
void read_tokens(InferEngine& engine, int64_t batch, int64_t tokens, int64_t depth, int64_t step) {
  const int64_t per_sequence = std::max<int64_t>(1, step / batch);
  for (int64_t done = 0; done < tokens; done += per_sequence) {
    engine.forward(step_input(batch, std::min(per_sequence, tokens - done), depth + done, engine.model().info().vocab),
                   &interrupt_flag());
  }
}

// The least time of work and traffic at the measured rates, for `tokens` new tokens of each sequence after `depth`.
// Products with weights count two operations per weight; attention four per element of head and cached token.
double roofline_seconds(const InferEngine& engine, const MachineRates& rates, int64_t batch, int64_t tokens,
                        int64_t depth, int64_t steps, double weight_bytes, const ModelProducts& products) {
  const models::ModelInfo& info = engine.model().info();
  const double rows = static_cast<double>(batch * tokens);
  const double mean_length = static_cast<double>(depth) + static_cast<double>(tokens + 1) / 2;
  const double attention = 4.0 * static_cast<double>(info.layers * info.heads * info.head_dim) * mean_length * rows;
  const double arithmetic = products.decoder.seconds(rates, rows) +
                            products.head.seconds(rates, static_cast<double>(batch * steps)) +
                            attention / rates.f32_flops_per_second;
  const double bytes = static_cast<double>(steps) *
                       (weight_bytes + static_cast<double>(batch) * mean_length * kv_bytes_per_cached_token(engine));
  return std::max(arithmetic, bytes / rates.read_bytes_per_second);
}

// How `eadem convert --type` would store a matrix of the model.
WeightType stored_type(const std::string& type_name, const models::LlamaConfig& config, const std::string& parameter) {
  const bool down = parameter.find(".down_proj.") != std::string::npos;
  const bool out = parameter.find(".o_proj.") != std::string::npos;
  const int64_t columns = down  ? config.intermediate_size
                          : out ? config.num_attention_heads * config.head_dim
                                : config.hidden_size;
  if (is_layer_type(type_name)) return layer_type_of(type_name, parameter, columns).value_or(DType::bf16);
  return convert_type_of(type_name, config, parameter, columns);
}

std::string depth_text(const Row& row) { return row.depth == 0 ? "" : fmt::format(" after {}", row.depth); }

std::string share_text(const Row& row) {
  if (row.in_cache) return "in cache";
  return fmt::format("{:.0f} %", 100 * row.roofline);
}

}  // namespace

int bench(CommandLine command_line) {
  ModelOptions options;
  std::optional<std::string> random;
  std::string weights_type;
  std::vector<int64_t> depths = {0}, batches = {1};
  int64_t prompt = 512, gen = 128, repeat = 5;
  bool json = false;
  Arguments arguments(
      "bench",
      "Measures how fast a model reads prompts (prefill) and draws tokens (decode): median and spread of "
      "several runs, the share of what memory and arithmetic measured on this machine allow, and the "
      "whole way with tokenizing and sampling.");
  options.add_operand(arguments);
  arguments.section("What to measure");
  arguments.option("--random", "CONFIG", random,
                   "random weights in the shape of a config.json, or of a directory with one");
  arguments.choice("--type", all_type_names(), weights_type,
                   "with --random: how the matrices are stored, as for `eadem convert` (default: as the config "
                   "states, else f32)");
  arguments.option("-p,--prompt", "N", prompt, "tokens of a prompt (default: 512); 0: no prefill");
  arguments.option("-n,--gen", "N", gen, "tokens to decode (default: 128); 0: no decode");
  arguments.sizes("-d,--depth", "N,…", depths, "tokens that the cache holds before (default: 0)");
  arguments.sizes("--batch", "N,…", batches, "sequences at once (default: 1)");
  arguments.option("-r,--repeat", "N", repeat, "runs of each (default: 5)");
  arguments.flag("--json", json, "one JSON object");
  options.add_device(arguments);
  options.add_precision(arguments);
  options.add_loading(arguments);
  arguments.example("eadem bench model.gguf --depth 0,4k", "short and long contexts");
  arguments.example("eadem bench --random llama-3.2-1b/config.json --type q4_k_m --batch 1,8",
                    "an architecture without a download");
  if (!arguments.parse(command_line)) return kOk;
  if (random && options.model) throw UsageError("MODEL and --random both say what to measure; give one");
  if (random && !options.pack_cache.empty()) throw UsageError("--pack-cache is for a MODEL; --random loads none");
  if (!weights_type.empty() && !random) throw UsageError("--type is for --random; a MODEL has its own");
  const auto in_range = [](const char* name, int64_t value, int64_t min, int64_t max) {
    if (value < min || value > max) throw UsageError(fmt::format("{} is {}; expected {} to {}", name, value, min, max));
  };
  constexpr int64_t kMost = 1 << 24;
  in_range("--prompt", prompt, 0, kMost);
  in_range("--gen", gen, 0, kMost);
  in_range("--repeat", repeat, 1, 10000);
  for (int64_t depth : depths) in_range("--depth", depth, 0, kMost);
  for (int64_t batch : batches) in_range("--batch", batch, 1, 65536);
  if (prompt == 0 && gen == 0) throw UsageError("--prompt 0 and --gen 0 leave nothing to measure");
  listen_for_interrupt();

  const std::shared_ptr<Device> device = options.open();
  models::Checkpoint checkpoint;
  if (random) {
    checkpoint = {*random, models::model_from_config(*random), nullptr, *random};
  } else {
    checkpoint = models::open_checkpoint(resolve_model(options.model));
  }
  modules::ModelSpec spec = models::spec_of(checkpoint);
  if (!weights_type.empty()) {
    const auto* llama = dynamic_cast<const models::Llama*>(checkpoint.model.get());
    if (llama == nullptr) throw Unsupported("--type: {} is no model of the Llama family", *random);
    const models::LlamaConfig& config = llama->config();
    spec.checkpoint_type = stored_type(weights_type, config, "model.layers.0.mlp.gate_proj.weight");
    spec.checkpoint_type_of = [&config, weights_type](const std::string& parameter) {
      return stored_type(weights_type, config, parameter);
    };
    spec.checkpoint_source = "--type";
  }
  const int64_t context = checkpoint.model->info().max_positions;
  const int64_t needed = *std::max_element(depths.begin(), depths.end()) + std::max(prompt, gen);
  if (needed > context)
    throw InvalidArgument("the deepest run needs {} tokens of context; the model has {}", needed, context);

  engine::EngineOptions engine_options = options.engine_options();
  engine_options.cache = engine::StaticKVCacheConfig{
      .max_batch_size = *std::max_element(batches.begin(), batches.end()), .max_cache_len = needed};
  std::optional<ProgressBar> bar(std::in_place, random ? "making random weights" : "loading");
  std::unique_ptr<InferEngine> engine;
  const auto progress = [&](int64_t done, int64_t total) {
    stop_if_interrupted();
    bar->update(static_cast<double>(done), static_cast<double>(total));
  };
  if (random) {
    bar->update(0, 1);
    engine = std::make_unique<InferEngine>(checkpoint.model, device, engine_options, spec);
    note("making {} random weights", count_text(static_cast<double>(spec.num_parameters)));
    engine->load_random(1, 0.02, progress);
  } else {
    engine = InferEngine::from_checkpoint(checkpoint, device, engine_options, progress, cli_logger());
  }
  bar.reset();
  stop_if_interrupted();

  const double weight_bytes = weight_bytes_per_step(*engine);
  const models::ModelInfo& info = checkpoint.model->info();

  std::vector<Row> rows;
  bool stopped = false;
  {
    ProgressBar progress("measuring");
    const size_t total = depths.size() * batches.size() * ((prompt > 0) + (gen > 0));
    size_t done = 0;
    try {
      for (int64_t depth : depths)
        for (int64_t batch : batches)
          for (const bool decoding : {false, true}) {
            const int64_t tokens = decoding ? gen : prompt;
            if (tokens == 0) continue;
            progress.update(static_cast<double>(done++), static_cast<double>(total),
                            fmt::format("{} depth {} batch {}", decoding ? "decode" : "prefill", depth, batch));
            engine->reset_cache();
            read_tokens(*engine, batch, depth, 0, engine_options.max_step_tokens);
            const int64_t step = decoding ? batch : std::max(engine_options.max_step_tokens, batch);
            const auto once = [&] { read_tokens(*engine, batch, tokens, depth, step); };
            // One run warms up: pages, caches, threads.
            read_tokens(*engine, batch, std::min<int64_t>(tokens, decoding ? 8 : tokens), depth, step);
            std::vector<double> speeds;
            for (int64_t r = 0; r < repeat; ++r) {
              const Clock::time_point start = Clock::now();
              once();
              speeds.push_back(static_cast<double>(batch * tokens) / seconds_since(start));
            }
            const int64_t per_step = std::max<int64_t>(1, step / batch);
            rows.push_back({.test = decoding ? "decode" : "prefill",
                            .tokens = tokens,
                            .depth = depth,
                            .batch = batch,
                            .steps = (tokens + per_step - 1) / per_step,
                            .rate = spread_of(speeds),
                            .in_cache = decoding && lies_in_cache(weight_bytes, *device)});
          }
    } catch (const Cancelled&) {
      stopped = true;
    }
  }

  if (stopped && rows.empty()) throw Cancelled("stopped before anything was measured");
  const MemoryUse memory = memory_use(*engine);  // before measuring takes memory of its own
  const MachineRates rates = machine_rates(*device, true);
  const ModelProducts products = products_of(engine->decode_program().graph());
  for (Row& row : rows)
    row.roofline =
        roofline_seconds(*engine, rates, row.batch, row.tokens, row.depth, row.steps, weight_bytes, products) *
        row.rate.median / static_cast<double>(row.batch * row.tokens);

  // The whole way of one request: text to ids, prompt, sampled tokens, text.
  std::optional<engine::GenerationStats> end_to_end;
  double end_to_end_seconds = 0;
  int64_t drawn = 0;
  if (!random && !stopped && gen > 0) {
    engine.reset();  // both would not fit for large models
    // The shortest text is 16 letters, which are that many tokens at most, and one to begin with.
    engine_options.cache =
        engine::StaticKVCacheConfig{.max_cache_len = std::min(context, std::max<int64_t>(prompt, 17) + gen + 1)};
    engine::LLM llm(checkpoint, device, engine_options, cli_logger());
    // English text of at most as many tokens as the prompts above.
    const int64_t wanted = std::max<int64_t>(1, std::min(prompt, context - gen) - 1);
    std::string text = "Once upon a time";
    while (static_cast<int64_t>(llm.tokenizer().encode(text + ". " + text).size()) <= wanted) text += ". " + text;
    engine::SamplingParams params;
    params.temperature = 0.8;
    params.top_p = 0.95;
    params.seed = 1;
    params.max_tokens = gen;
    params.ignore_eos = true;
    llm.generate({text}, params);  // warms up
    const Clock::time_point start = Clock::now();
    const std::vector<engine::Completion> completions = llm.generate({text}, params);
    end_to_end_seconds = seconds_since(start);
    if (!completions[0].error.empty()) throw InvalidArgument("{}", completions[0].error);
    end_to_end = llm.last_stats();
    drawn = static_cast<int64_t>(completions[0].token_ids.size());
  }

  if (json) {
    JsonValue list = JsonValue::array();
    for (const Row& row : rows) {
      JsonValue entry = JsonValue::object().set("test", row.test).set("tokens", row.tokens).set("depth", row.depth);
      entry.set("batch", row.batch).set("tokens_per_second", row.rate.median);
      entry.set("lowest", row.rate.low).set("highest", row.rate.high).set("share_of_roofline", row.roofline);
      list.push_back(entry.set("in_cache", row.in_cache));
    }
    JsonValue result = JsonValue::object();
    result.set("version", EADEM_VERSION).set("model", json_text(checkpoint.path)).set("device", device->description());
    if (const auto* cpu = dynamic_cast<const CpuDevice*>(device.get()))
      result.set("threads", cpu->decode_threads()).set("prefill_threads", cpu->prefill_threads());
    result.set("parameters", spec.num_parameters).set("weight_bytes_per_step", weight_bytes).set("repeat", repeat);
    result.set("read_bytes_per_second", rates.read_bytes_per_second);
    result.set("f32_flops_per_second", rates.f32_flops_per_second);
    result.set("int8_ops_per_second", rates.int8_ops_per_second);
    result.set("bf16_flops_per_second", rates.bf16_flops_per_second);
    result.set("int8_tile_ops_per_second", rates.int8_tile_ops_per_second).set("rates_measured", rates.measured);
    set_memory(result, memory);
    result.set("results", std::move(list));
    if (end_to_end)
      result.set("end_to_end", JsonValue::object()
                                   .set("prompt_tokens", end_to_end->prompt_tokens)
                                   .set("drawn_tokens", drawn)
                                   .set("seconds", end_to_end_seconds)
                                   .set("tokenize_seconds", end_to_end->tokenize_seconds)
                                   .set("prompt_seconds", end_to_end->prompt_seconds)
                                   .set("decode_seconds", end_to_end->decode_seconds)
                                   .set("first_token_seconds", end_to_end->first_token_seconds));
    result.set("stopped", stopped);
    print(io::to_json(result) + "\n");
    return stopped ? kInterrupted : kOk;
  }
  print(fmt::format("{}: {}, {} parameters, {} of weights per step, on {}\n", checkpoint.path, info.architecture,
                    count_text(static_cast<double>(spec.num_parameters)), bytes_text(weight_bytes),
                    device->description()));
  const auto limit = [](const char* name, double rate) {
    return rate > 0 ? fmt::format(", {} {:.1f} GOP/s", name, rate / 1e9) : std::string();
  };
  print(fmt::format("{}: reads {}/s, f32 {:.1f} GFLOP/s{}{}{}\n\n",
                    rates.measured ? "measured limits" : "nominal limits", bytes_text(rates.read_bytes_per_second),
                    rates.f32_flops_per_second / 1e9, limit("8-bit dot products", rates.int8_ops_per_second),
                    limit("tiles of bf16", rates.bf16_flops_per_second),
                    limit("tiles of int8", rates.int8_tile_ops_per_second)));
  print(
      fmt::format("{:<24} {:>6} {:>14} {:>22} {:>10}\n", "test", "batch", "tokens/s", "lowest – highest", "of limit"));
  for (const Row& row : rows)
    print(fmt::format("{:<24} {:>6} {:>14.1f} {:>22} {:>10}\n",
                      fmt::format("{} {}{}", row.test, row.tokens, depth_text(row)), row.batch, row.rate.median,
                      fmt::format("{:.1f} – {:.1f}", row.rate.low, row.rate.high), share_text(row)));
  print(fmt::format("\nmemory: {}{}\n", memory_text(memory), random ? ", with what made the weights" : ""));
  if (end_to_end)
    print(
        fmt::format("\nwhole way, one request: {} prompt tokens, {} drawn in {}\n"
                    "  tokenizing {}, prompt {}, decoding {}, first token after {}, text and scheduling {}\n",
                    end_to_end->prompt_tokens, drawn, seconds_text(end_to_end_seconds),
                    seconds_text(end_to_end->tokenize_seconds), seconds_text(end_to_end->prompt_seconds),
                    seconds_text(end_to_end->decode_seconds), seconds_text(end_to_end->first_token_seconds),
                    seconds_text(std::max(0.0, end_to_end_seconds - end_to_end->tokenize_seconds -
                                                   end_to_end->prompt_seconds - end_to_end->decode_seconds))));
  if (stopped) note("stopped; the tests above were done");
  return stopped ? kInterrupted : kOk;
}

}  // namespace eadem::cli
