// SPDX-License-Identifier: Apache-2.0
//
// eadem bench: how fast a model prefills and decodes, and what share of the machine's limits that is; or how long the
// requests of a trace take.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <numeric>

#include "eadem/cli/bench/machine.h"
#include "eadem/cli/bench/products.h"
#include "eadem/cli/bench/trace_bench.h"
#include "eadem/cli/commands.h"
#include "eadem/cli/completion_text.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/load_llm.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/convert/layers.h"
#include "eadem/convert/types.h"
#include "eadem/core/device/cpu_device.h"
#include "eadem/core/encodings/block_encoding.h"
#include "eadem/engine/llm.h"
#include "eadem/io/json.h"

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

// Makes a step of `tokens` new tokens in each of `batch` sequences that hold `depth` already and have a prompt of
// `prompt` tokens. Token values do not matter. The blocks of a sequence lie one after another, as a scheduler hands
// them out in an empty cache.
InferEngine::Input step_input(const InferEngine& engine, int64_t batch, int64_t tokens, int64_t depth, int64_t prompt) {
  const engine::SchedulerLimits limits = engine.limits();
  const int64_t blocks = (limits.max_sequence_length + limits.block_size - 1) / limits.block_size;
  InferEngine::Input input;
  for (int64_t s = 0; s < batch; ++s) {
    input.input_lengths.push_back(static_cast<int32_t>(tokens));
    input.cache_lengths.push_back(static_cast<int32_t>(depth));
    input.sampling.push_back({.prompt_length = static_cast<int32_t>(prompt)});
    for (int64_t t = 0; t < tokens; ++t)
      input.input_ids.push_back(static_cast<int32_t>((s * 31 + (depth + t) * 17 + 7) % limits.vocab));
    std::vector<int32_t>& table = input.block_tables.emplace_back(static_cast<size_t>(blocks));
    std::iota(table.begin(), table.end(), static_cast<int32_t>(s * blocks));
  }
  return input;
}

// Computes `tokens` tokens of every sequence from position `depth` on, in steps of at most `step` tokens in all.
void read_tokens(InferEngine& engine, int64_t batch, int64_t tokens, int64_t depth, int64_t step, int64_t prompt) {
  const int64_t per_sequence = std::max<int64_t>(1, step / batch);
  for (int64_t done = 0; done < tokens; done += per_sequence) {
    engine.forward(step_input(engine, batch, std::min(per_sequence, tokens - done), depth + done, prompt),
                   &interrupt_flag());
  }
}

// Draws `tokens` tokens of every sequence behind `depth` others. An asynchronous device gets each step before the
// results of the one before it are read, and feeds tokens back, as in EngineLoop; but not with windows or states per
// sequence. Token values do not matter.
void draw_tokens(InferEngine& engine, int64_t batch, int64_t tokens, int64_t depth) {
  const modules::CacheSpec& cache = engine.cache_spec();
  if (!engine.device()->is_asynchronous() || !cache.windows.empty() || cache.num_slots > 0)
    return read_tokens(engine, batch, tokens, depth, batch, depth);
  const InferEngine::Input first = step_input(engine, batch, 1, depth, depth);
  std::vector<engine::StepSequence> plan;
  for (int64_t i = 0; i < tokens; ++i) {
    plan.clear();
    for (size_t s = 0; s < first.input_ids.size(); ++s)
      plan.push_back({.tokens = std::span(first.input_ids).subspan(s, 1),
                      .cached = depth + i,
                      .blocks = first.block_tables[s],
                      .sampling = first.sampling[s],
                      .row = i == 0 ? -1 : static_cast<int32_t>(s)});
    engine.submit(plan, &interrupt_flag());
    if (engine.num_waiting() > 1) engine.collect();
  }
  engine.discard_submitted();
}

// The least time that the work and traffic of rank 0 take at its measured rates, for `tokens` new tokens of each
// sequence after `depth`. Products with weights count two operations per weight, attention four per element of head and
// cached token.
double roofline_seconds(const InferEngine& engine, const MachineRates& rates, int64_t batch, int64_t tokens,
                        int64_t depth, int64_t steps, const ModelProducts& products) {
  const models::ModelInfo& info = engine.model().info();
  const double rows = static_cast<double>(batch * tokens);
  const double mean_length = static_cast<double>(depth) + static_cast<double>(tokens + 1) / 2;
  const double attention = 4.0 * static_cast<double>(info.layers * info.heads * info.head_dim) * mean_length * rows /
                           engine.options().mesh().size(MeshAxis::tp);
  const double arithmetic = products.decoder.seconds(rates, rows) +
                            products.head.seconds(rates, static_cast<double>(batch * steps)) +
                            attention / rates.f32_flops_per_second;
  const double weight_bytes = weight_bytes_per_step(engine, (batch * tokens + steps - 1) / steps);
  const double bytes = static_cast<double>(steps) *
                       (weight_bytes + static_cast<double>(batch) * kv_bytes_of_sequence(engine, mean_length));
  return std::max(arithmetic, bytes / rates.read_bytes_per_second);
}

// Returns the type in which `eadem convert --type` would store a matrix of the model.
WeightType stored_type(const std::string& type_name, const models::ModelInfo& model,
                       const modules::ParameterInfo& parameter) {
  const int64_t columns = parameter.shape.back();
  if (convert::is_layer_type(type_name))
    return convert::layer_type_of(type_name, parameter.name, columns).value_or(DType::bf16);
  return convert::convert_type_of(type_name, model, parameter.name, columns);
}

std::string depth_text(const Row& row) { return row.depth == 0 ? "" : fmt::format(" after {}", row.depth); }

std::string share_text(const Row& row) {
  if (row.in_cache) return "in cache";
  return fmt::format("{:.0f} %", 100 * row.roofline);
}

struct BenchOptions {
  ModelOptions model;
  std::optional<std::string> random;
  std::string weights_type;
  std::vector<int64_t> depths, batches;
  int64_t prompt = 512, gen = 128, repeat = 5;
  TraceOptions trace;
  bool json = false;
};

// Returns nothing when help was asked for.
std::optional<BenchOptions> parse_bench(CommandLine command_line) {
  BenchOptions options;
  Arguments arguments(
      "bench",
      "Measures how fast a model reads prompts (prefill) and draws tokens (decode): median and spread of "
      "several runs, the share of what memory and arithmetic measured on this machine allow, and the "
      "whole way with tokenizing and sampling. With --trace: how long the requests of a recorded service take.");
  options.model.add_operand(arguments);
  arguments.section("What to measure");
  arguments.option("--random", "CONFIG", options.random,
                   "random weights in the shape of a config.json, or of a directory with one");
  std::vector<std::string> types = convert::all_type_names();
  for (const BlockEncoding* encoding : BlockEncoding::all())
    if (!encoding->is_writable()) types.emplace_back(encoding->name());
  arguments.choice("--type", types, options.weights_type,
                   "with --random: how the matrices are stored, as for `eadem convert`, or in one of the types that it "
                   "only reads (default: as the config states, else f32)");
  std::optional<int64_t> prompt, gen, repeat;
  arguments.option("-p,--prompt", "N", prompt, "tokens of a prompt (default: 512); 0: no prefill");
  arguments.option("-n,--gen", "N", gen, "tokens to decode (default: 128); 0: no decode");
  arguments.sizes("-d,--depth", "N,…", options.depths, "tokens that the cache holds before (default: 0)");
  arguments.sizes("--batch", "N,…", options.batches, "sequences at once (default: 1)");
  arguments.option("-r,--repeat", "N", repeat, "runs of each (default: 5)");
  arguments.flag("--json", options.json, "one JSON object");
  options.trace.add(arguments);
  options.model.add_device(arguments);
  options.model.add_ranks(arguments);
  options.model.add_precision(arguments);
  options.model.add_loading(arguments);
  options.model.add_speculation(arguments);
  arguments.example("eadem bench model.gguf --depth 0,4k", "short and long contexts");
  arguments.example("eadem bench --random my-1b/config.json --type q4_k_m --batch 1,8",
                    "an architecture without a download");
  arguments.example("eadem bench --trace AzureLLMInferenceTrace_conv.csv --trace-requests 500 --trace-divide 4",
                    "requests as they came to a service, a quarter as long");
  if (!arguments.parse(command_line)) return std::nullopt;
  options.model.check_ranks();
  options.model.check_speculation();
  options.trace.check();
  const auto without_trace = [&](const char* name, bool given) {
    if (given && options.trace.file)
      throw UsageError(fmt::format("{} and --trace both say what to measure; give one", name));
  };
  without_trace("--prompt", prompt.has_value());
  without_trace("--gen", gen.has_value());
  without_trace("--depth", !options.depths.empty());
  without_trace("--batch", !options.batches.empty());
  without_trace("--repeat", repeat.has_value());
  options.prompt = prompt.value_or(options.prompt);
  options.gen = gen.value_or(options.gen);
  options.repeat = repeat.value_or(options.repeat);
  if (options.depths.empty()) options.depths = {0};
  if (options.batches.empty()) options.batches = {1};
  if (options.random && options.model.speculate != "none")
    throw UsageError("--speculate is for the whole way of a MODEL; --random has no tokenizer");
  if (options.random && options.model.model) throw UsageError("MODEL and --random both say what to measure; give one");
  if (options.random && !options.model.pack_cache.empty())
    throw UsageError("--pack-cache is for a MODEL; --random loads none");
  if (!options.weights_type.empty() && !options.random) throw UsageError("--type is for --random; a MODEL has its own");
  const auto in_range = [](const char* name, int64_t value, int64_t min, int64_t max) {
    if (value < min || value > max) throw UsageError(fmt::format("{} is {}; expected {} to {}", name, value, min, max));
  };
  constexpr int64_t kMost = 1 << 24;
  in_range("--prompt", options.prompt, 0, kMost);
  in_range("--gen", options.gen, 0, kMost);
  in_range("--repeat", options.repeat, 1, 10000);
  for (int64_t depth : options.depths) in_range("--depth", depth, 0, kMost);
  for (int64_t batch : options.batches) in_range("--batch", batch, 1, 65536);
  if (options.prompt == 0 && options.gen == 0) throw UsageError("--prompt 0 and --gen 0 leave nothing to measure");
  return options;
}

// The model with the types of its stored weights: those of its files, or of --type.
modules::ModelSpec spec_of(const BenchOptions& options, const models::Checkpoint& checkpoint) {
  modules::ModelSpec spec = models::spec_of(checkpoint);
  if (options.weights_type.empty()) return spec;
  std::map<std::string, WeightType> types;
  int64_t largest = 0;
  for (const modules::ParameterInfo& parameter : checkpoint.model->parameters()) {
    if (parameter.shape.rank() < 2) continue;
    const WeightType type = types[parameter.name] =
        stored_type(options.weights_type, checkpoint.model->info(), parameter);
    // The matrices of the MLP are most of a model.
    if (parameter.name.find(".gate_proj.") == std::string::npos || largest > 0) continue;
    largest = parameter.shape.num_elements();
    spec.checkpoint_type = type;
  }
  spec.checkpoint_type_of = [types](const std::string& parameter) -> std::optional<WeightType> {
    const auto found = types.find(parameter);
    return found == types.end() ? std::nullopt : std::optional(found->second);
  };
  spec.checkpoint_source = "--type";
  return spec;
}

std::unique_ptr<InferEngine> open_engine(const BenchOptions& options, const models::Checkpoint& checkpoint,
                                         const modules::ModelSpec& spec, const std::shared_ptr<Device>& device,
                                         const engine::EngineOptions& engine_options) {
  ProgressBar bar(options.random ? "making random weights" : "loading");
  const auto progress = [&](int64_t done, int64_t total) {
    stop_if_interrupted();
    bar.update(static_cast<double>(done), static_cast<double>(total));
  };
  if (!options.random) return InferEngine::from_checkpoint(checkpoint, device, engine_options, progress, cli_logger());
  bar.update(0, 1);
  auto engine = std::make_unique<InferEngine>(checkpoint.model, device, engine_options, spec);
  bar.clear();
  note("making {} random weights", count_text(static_cast<double>(spec.num_parameters)));
  engine->load_random(1, 0.02, progress);
  return engine;
}

// The measurements, and the machine's limits that they are compared with.
struct Measurement {
  std::vector<Row> rows;
  bool stopped = false;
  double weight_bytes = 0;  // bytes of weights that a step of one token reads
  MemoryUse memory;
  MachineRates rates;
};

// Blocks of windows are divided among the sequences of the largest batch, and a smaller one needs more of each.
void clear_cache(InferEngine& engine, int64_t batch) {
  if (engine.cache_spec().windows.empty()) return engine.reset_cache();
  auto config = std::get<engine::PagedKVCacheConfig>(engine.options().cache);
  config.max_batch_size = batch;
  engine.reset_cache(config);
}

// Measures every combination of depth, batch and kind of step, or those before the user stopped. Their share of the
// roofline is left at 0.
void measure_rows(const BenchOptions& options, InferEngine& engine, Measurement& result) {
  const int64_t max_num_batched_tokens = engine.options().max_num_batched_tokens;
  constexpr int64_t kManyTokens = int64_t{1} << 24;  // that choose every expert, sooner or later
  const double all_weights = weight_bytes_per_step(engine, kManyTokens);
  ProgressBar progress("measuring");
  const size_t total = options.depths.size() * options.batches.size() * ((options.prompt > 0) + (options.gen > 0));
  const auto measure = [&](int64_t depth, int64_t batch, bool decoding) {
    const int64_t tokens = decoding ? options.gen : options.prompt;
    progress.update(static_cast<double>(result.rows.size()), static_cast<double>(total),
                    fmt::format("{} depth {} batch {}", decoding ? "decode" : "prefill", depth, batch));
    clear_cache(engine, batch);
    read_tokens(engine, batch, depth, 0, max_num_batched_tokens, depth);
    const int64_t step = decoding ? batch : std::max(max_num_batched_tokens, batch);
    const auto run = [&](int64_t count) {
      if (decoding)
        draw_tokens(engine, batch, count, depth);
      else
        read_tokens(engine, batch, count, depth, step, depth + count);
    };
    run(decoding ? std::min<int64_t>(tokens, 8) : tokens);  // warms up pages, caches and threads
    std::vector<double> speeds;
    for (int64_t r = 0; r < options.repeat; ++r) {
      const Clock::time_point start = Clock::now();
      run(tokens);
      speeds.push_back(static_cast<double>(batch * tokens) / seconds_since(start));
    }
    const int64_t per_step = std::max<int64_t>(1, step / batch);
    result.rows.push_back({.test = decoding ? "decode" : "prefill",
                           .tokens = tokens,
                           .depth = depth,
                           .batch = batch,
                           .steps = (tokens + per_step - 1) / per_step,
                           .rate = spread_of(speeds),
                           .in_cache = decoding && lies_in_cache(all_weights, *engine.device())});
  };
  try {
    for (int64_t depth : options.depths)
      for (int64_t batch : options.batches) {
        if (options.prompt > 0) measure(depth, batch, false);
        if (options.gen > 0) measure(depth, batch, true);
      }
  } catch (const Cancelled&) {
    result.stopped = true;
  }
}

Measurement measure(const BenchOptions& options, InferEngine& engine) {
  Measurement result;
  result.weight_bytes = weight_bytes_per_step(engine, 1);
  measure_rows(options, engine, result);
  if (result.stopped && result.rows.empty()) throw Cancelled("stopped before anything was measured");
  result.memory = memory_use(engine);  // taken now: measuring the machine takes memory, too
  result.rates = machine_rates(*engine.device(), true);
  const ModelProducts products = products_of(engine.decode_program().graph());
  for (Row& row : result.rows)
    row.roofline = roofline_seconds(engine, result.rates, row.batch, row.tokens, row.depth, row.steps, products) *
                   row.rate.median / static_cast<double>(row.batch * row.tokens);
  return result;
}

// One request from end to end: text to ids, prompt, sampled tokens, text.
struct EndToEnd {
  engine::GenerationStats stats;
  double seconds = 0;
  int64_t drawn = 0;
};

// Makes English text of at most `tokens` tokens, and nearly as many.
std::string text_of_length(const io::Tokenizer& tokenizer, int64_t tokens) {
  const std::string sentence = "Once upon a time. ";
  const auto repeated = [&](int64_t count) {
    std::string text;
    for (int64_t i = 0; i < count; ++i) text += sentence;
    return text.substr(0, text.size() - 2);  // without the last full stop
  };
  const auto length = [&](int64_t count) { return static_cast<int64_t>(tokenizer.encode(repeated(count)).size()); };
  constexpr int64_t kSample = 16;
  int64_t count = std::max<int64_t>(1, tokens * kSample / length(kSample));
  while (count > 1 && length(count) > tokens) count -= std::max<int64_t>(1, count / 64);
  return repeated(count);
}

EndToEnd measure_end_to_end(const BenchOptions& options, const models::Checkpoint& checkpoint,
                            const std::shared_ptr<Device>& device, engine::EngineOptions engine_options,
                            const engine::SpeculationOptions& speculation) {
  const int64_t context = checkpoint.model->info().max_positions;
  // The shortest text is 16 letters, which are at most 16 tokens, plus one at the start.
  engine_options.cache = engine::PagedKVCacheConfig{
      .max_batch_size = 1,
      .max_cache_len = std::min(context, std::max<int64_t>(options.prompt, 17) + options.gen + 1),
      .prefix_caching = false};  // the run that warms up has the same prompt
  engine::LLM llm(checkpoint, device, engine_options, cli_logger(), {}, speculation);
  const std::string text =
      text_of_length(llm.tokenizer(), std::max<int64_t>(1, std::min(options.prompt, context - options.gen) - 1));
  engine::SamplingParams params;
  params.temperature = 0.8;
  params.top_p = 0.95;
  params.seed = 1;
  params.max_tokens = options.gen;
  params.ignore_eos = true;
  llm.generate({text}, params, {}, &interrupt_flag());  // warms up
  const Clock::time_point start = Clock::now();
  const engine::Completion completion = llm.generate({text}, params, {}, &interrupt_flag())[0];
  const double seconds = seconds_since(start);
  if (!completion.error.empty()) throw InvalidArgument("{}", completion.error);
  stop_if_interrupted();
  return {llm.last_stats(), seconds, static_cast<int64_t>(completion.token_ids.size())};
}

// An object that says what was measured on what.
JsonValue described(const models::Checkpoint& checkpoint, int64_t num_parameters,
                    const std::shared_ptr<Device>& device) {
  JsonValue result = JsonValue::object();
  result.set("version", EADEM_VERSION).set("model", json_text(checkpoint.path)).set("device", device->description());
  if (const auto* cpu = dynamic_cast<const CpuDevice*>(device.get()))
    result.set("threads", cpu->decode_threads()).set("prefill_threads", cpu->prefill_threads());
  return result.set("parameters", num_parameters);
}

void print_json(const BenchOptions& options, const models::Checkpoint& checkpoint, int64_t num_parameters,
                const std::shared_ptr<Device>& device, const Measurement& measured,
                const std::optional<EndToEnd>& end_to_end) {
  JsonValue list = JsonValue::array();
  for (const Row& row : measured.rows) {
    JsonValue entry = JsonValue::object().set("test", row.test).set("tokens", row.tokens).set("depth", row.depth);
    entry.set("batch", row.batch).set("tokens_per_second", row.rate.median);
    entry.set("lowest", row.rate.low).set("highest", row.rate.high).set("share_of_roofline", row.roofline);
    list.push_back(entry.set("in_cache", row.in_cache));
  }
  JsonValue result = described(checkpoint, num_parameters, device);
  result.set("weight_bytes_per_step", measured.weight_bytes).set("repeat", options.repeat);
  result.set("read_bytes_per_second", measured.rates.read_bytes_per_second);
  result.set("f32_flops_per_second", measured.rates.f32_flops_per_second);
  result.set("int8_ops_per_second", measured.rates.int8_ops_per_second);
  result.set("bf16_flops_per_second", measured.rates.bf16_flops_per_second);
  result.set("int8_tile_ops_per_second", measured.rates.int8_tile_ops_per_second)
      .set("rates_measured", measured.rates.measured);
  set_memory(result, measured.memory);
  result.set("results", std::move(list));
  if (end_to_end)
    result.set("end_to_end", JsonValue::object()
                                 .set("prompt_tokens", end_to_end->stats.prompt_tokens)
                                 .set("drawn_tokens", end_to_end->drawn)
                                 .set("seconds", end_to_end->seconds)
                                 .set("tokenize_seconds", end_to_end->stats.tokenize_seconds)
                                 .set("prompt_seconds", end_to_end->stats.prompt_seconds)
                                 .set("decode_seconds", end_to_end->stats.decode_seconds)
                                 .set("first_token_seconds", end_to_end->stats.first_token_seconds)
                                 .set("proposed_tokens", end_to_end->stats.proposed_tokens)
                                 .set("accepted_tokens", end_to_end->stats.accepted_tokens));
  result.set("stopped", measured.stopped);
  print(io::to_json(result) + "\n");
}

void print_text(const BenchOptions& options, const models::Checkpoint& checkpoint, int64_t num_parameters,
                const std::shared_ptr<Device>& device, const Measurement& measured,
                const std::optional<EndToEnd>& end_to_end) {
  print(fmt::format("{}: {}, {} parameters, {} of weights per step, on {}\n", checkpoint.path,
                    checkpoint.model->info().architecture, count_text(static_cast<double>(num_parameters)),
                    bytes_text(measured.weight_bytes), device->description()));
  const MachineRates& rates = measured.rates;
  const auto limit = [](const char* name, double rate) {
    return rate > 0 ? fmt::format(", {} {:.1f} GOP/s", name, rate / 1e9) : std::string();
  };
  print(fmt::format("{}: reads {}/s, f32 {:.1f} GFLOP/s{}{}{}\n\n",
                    rates.measured ? "measured limits" : "nominal limits", bytes_text(rates.read_bytes_per_second),
                    rates.f32_flops_per_second / 1e9, limit("8-bit dot products", rates.int8_ops_per_second),
                    limit("products of bf16", rates.bf16_flops_per_second),
                    limit("tiles of int8", rates.int8_tile_ops_per_second)));
  print(
      fmt::format("{:<24} {:>6} {:>14} {:>22} {:>10}\n", "test", "batch", "tokens/s", "lowest – highest", "of limit"));
  for (const Row& row : measured.rows)
    print(fmt::format("{:<24} {:>6} {:>14.1f} {:>22} {:>10}\n",
                      fmt::format("{} {}{}", row.test, row.tokens, depth_text(row)), row.batch, row.rate.median,
                      fmt::format("{:.1f} – {:.1f}", row.rate.low, row.rate.high), share_text(row)));
  print(fmt::format("\nmemory: {}{}\n", memory_text(measured.memory),
                    options.random ? ", with what made the weights" : ""));
  if (end_to_end)
    print(fmt::format(
        "\nwhole way, one request: {} prompt tokens, {} drawn in {}\n"
        "  tokenizing {}, prompt {}, decoding {}, first token after {}, text and scheduling {}\n{}",
        end_to_end->stats.prompt_tokens, end_to_end->drawn, seconds_text(end_to_end->seconds),
        seconds_text(end_to_end->stats.tokenize_seconds), seconds_text(end_to_end->stats.prompt_seconds),
        seconds_text(end_to_end->stats.decode_seconds), seconds_text(end_to_end->stats.first_token_seconds),
        seconds_text(std::max(0.0, end_to_end->seconds - end_to_end->stats.tokenize_seconds -
                                       end_to_end->stats.prompt_seconds - end_to_end->stats.decode_seconds)),
        speculation_text(end_to_end->stats)));
}

// Replays a trace and prints the report.
int bench_trace(const BenchOptions& options, const models::Checkpoint& checkpoint, int64_t num_parameters,
                InferEngine& engine, const engine::SpeculationOptions& speculation, const Workload& workload) {
  std::unique_ptr<engine::Speculator> speculator;
  if (speculation.room() > 0)
    speculator =
        engine::make_speculator(speculation, checkpoint, engine, engine::open_tokenizer(checkpoint), cli_logger(), {});
  // A prompt warms up pages, caches and threads.
  const int64_t running = engine.max_batch_size(), step = engine.options().max_num_batched_tokens;
  const int64_t tokens = std::min(step, workload.longest());
  clear_cache(engine, 1);
  read_tokens(engine, 1, tokens, 0, step, tokens);
  clear_cache(engine, running);
  const Replay replay = run_replay(engine, speculator.get(), workload);
  if (replay.finished + replay.failed == 0) throw Cancelled("stopped before a request had ended");
  if (options.json) {
    JsonValue result = described(checkpoint, num_parameters, engine.device());
    set_replay(result, options.trace, workload, replay, engine, options.model.speculate);
    print(io::to_json(result.set("stopped", replay.stopped)) + "\n");
  } else {
    print(fmt::format("{}: {}, {} parameters, on {}\n", checkpoint.path, checkpoint.model->info().architecture,
                      count_text(static_cast<double>(num_parameters)), engine.device()->description()));
    print(replay_text(options.trace, workload, replay, engine, options.model.speculate));
  }
  if (!replay.stopped) return kOk;
  note("stopped; {} of {} requests had ended", replay.finished + replay.failed, workload.requests().size());
  return kInterrupted;
}

}  // namespace

int bench(CommandLine command_line) {
  const std::optional<BenchOptions> options = parse_bench(command_line);
  if (!options) return kOk;
  listen_for_interrupt();

  const models::Checkpoint checkpoint =
      options->random
          ? models::Checkpoint{*options->random, models::model_from_config(*options->random), nullptr, *options->random}
          : models::open_checkpoint(resolve_model(options->model.model));
  const modules::ModelSpec spec = spec_of(*options, checkpoint);
  const int64_t context = checkpoint.model->info().max_positions;
  std::optional<Workload> workload;
  if (options->trace.file) workload = options->trace.workload(context);
  const int64_t needed =
      *std::max_element(options->depths.begin(), options->depths.end()) + std::max(options->prompt, options->gen);
  if (!workload && needed > context)
    throw InvalidArgument("the deepest run needs {} tokens of context; the model has {}", needed, context);

  const engine::SpeculationOptions speculation = options->model.speculation();
  engine::EngineOptions engine_options = options->model.engine_options();
  engine_options.draft_tokens = speculation.room();
  engine_options.cache = engine::PagedKVCacheConfig{
      .max_batch_size = *std::max_element(options->batches.begin(), options->batches.end()), .max_cache_len = needed};
  if (workload) options->trace.set(engine_options, *workload);
  const std::unique_ptr<distributed::RankProcesses> ranks =
      start_ranks(options->model, *checkpoint.model, engine_options,
                  [&](std::shared_ptr<Device> device, const engine::EngineOptions& own) {
                    if (!options->random) return InferEngine::from_checkpoint(checkpoint, std::move(device), own);
                    return std::make_unique<InferEngine>(checkpoint.model, std::move(device), own, spec);
                  });
  const std::shared_ptr<Device> device = options->model.open();
  engine::require_proposer(speculation, checkpoint, device, engine_options);
  if (workload) options->trace.set_cache_bytes(engine_options, checkpoint, *device);
  std::unique_ptr<InferEngine> engine = open_engine(*options, checkpoint, spec, device, engine_options);
  stop_if_interrupted();
  if (workload) return bench_trace(*options, checkpoint, spec.num_parameters, *engine, speculation, *workload);
  Measurement measured = measure(*options, *engine);

  std::optional<EndToEnd> end_to_end;
  if (!options->random && !measured.stopped && options->gen > 0) {
    engine.reset();  // large models do not fit twice
    try {
      end_to_end = measure_end_to_end(*options, checkpoint, device, engine_options, speculation);
    } catch (const Cancelled&) {
      measured.stopped = true;
    }
  }
  (options->json ? print_json : print_text)(*options, checkpoint, spec.num_parameters, device, measured, end_to_end);
  if (measured.stopped && !options->json) note("stopped; the tests above were done");
  return measured.stopped ? kInterrupted : kOk;
}

}  // namespace eadem::cli
