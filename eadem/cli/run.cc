// SPDX-License-Identifier: Apache-2.0
//
// eadem run: text from a prompt, as it is drawn.
#include <iostream>
#include <random>
#include <utility>

#include "eadem/cli/arguments.h"
#include "eadem/cli/commands.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/machine.h"
#include "eadem/cli/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/engine/llm.h"
#include "eadem/io/json.h"
#include "eadem/io/mapped_file.h"

namespace eadem::cli {

namespace {

using engine::Completion;
using engine::FinishReason;
using engine::GenerationStats;
using engine::LLM;
using engine::SamplingParams;

constexpr int64_t kMaxPromptBytes = 256 << 20;
// Tokens that texts of unknown length get; a longer context is asked for with --context.
constexpr int64_t kUsualContext = 4096;

struct RunOptions {
  ModelOptions model;
  std::optional<std::string> prompt, file;
  std::optional<int64_t> max_tokens, top_k, seed, context;
  std::optional<double> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::vector<std::string> stop;
  bool parse_special = false, ignore_eos = false, chat = false, json = false, quiet = false;
};

std::string read_stdin() {
  std::string text;
  char buffer[65536];
  while (std::cin.read(buffer, sizeof buffer) || std::cin.gcount() > 0) {
    text.append(buffer, static_cast<size_t>(std::cin.gcount()));
    if (text.size() > static_cast<size_t>(kMaxPromptBytes))
      throw InvalidArgument("standard input: more than {} bytes of prompt", kMaxPromptBytes);
    stop_if_interrupted();
  }
  stop_if_interrupted();
  return text;
}

// The prompt, or nothing when it is to be asked for on the terminal.
std::optional<std::string> read_prompt(const RunOptions& options) {
  if (options.prompt && options.file) throw UsageError("-p and -f both give the prompt; give one");
  if (options.prompt) return options.prompt;
  if (!options.file && stdin_is_terminal()) return std::nullopt;
  const bool from_stdin = !options.file || *options.file == "-";
  std::string text = from_stdin ? read_stdin() : io::read_file(*options.file, kMaxPromptBytes);
  if (text.empty())
    throw InvalidArgument("{} is empty; `-p \"\"` starts from the beginning of a text",
                          from_stdin ? "standard input, which gives the prompt," : *options.file);
  return text;
}

SamplingParams sampling_of(const RunOptions& options, SamplingParams params) {
  if (options.temperature) params.temperature = *options.temperature;
  if (options.top_k) params.top_k = *options.top_k;
  if (options.top_p) params.top_p = *options.top_p;
  if (options.min_p) params.min_p = *options.min_p;
  if (options.repetition_penalty) params.repetition_penalty = *options.repetition_penalty;
  if (options.presence_penalty) params.presence_penalty = *options.presence_penalty;
  if (options.frequency_penalty) params.frequency_penalty = *options.frequency_penalty;
  if (options.max_tokens) params.max_tokens = *options.max_tokens;
  params.stop.insert(params.stop.end(), options.stop.begin(), options.stop.end());
  params.ignore_eos = options.ignore_eos;
  params.seed = options.seed ? *options.seed : static_cast<int64_t>(std::random_device{}() & 0x7fffffff);
  params.validate();
  return params;
}

double per_second(int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0.0; }

// What the last steps of a text read: all weights, and the keys and values of a text of mean length.
double bytes_per_token(const LLM& llm, engine::InferEngine& engine, const Completion& completion) {
  const double mean_length =
      static_cast<double>(completion.prompt_tokens) + 0.5 * static_cast<double>(llm.last_stats().decode_tokens);
  return weight_bytes_per_step(engine) + mean_length * kv_bytes_per_cached_token(engine);
}

struct Report {
  MemoryUse memory;
  double bytes_per_token = 0;
  bool in_cache = false;
  std::optional<MachineRates> rates;
};

Report make_report(LLM& llm, const Completion& completion) {
  Report report;
  report.memory = memory_use(llm.engine());  // before measuring takes memory of its own
  report.bytes_per_token = bytes_per_token(llm, llm.engine(), completion);
  report.in_cache = lies_in_cache(report.bytes_per_token, *llm.engine().device());
  if (!report.in_cache && llm.last_stats().decode_tokens > 0)
    report.rates = machine_rates(*llm.engine().device(), false);
  return report;
}

std::string finish_text(const LLM& llm, const Completion& completion, const SamplingParams& params, int64_t context) {
  switch (completion.finish_reason) {
    case FinishReason::stop: return "end of text";
    case FinishReason::cancelled: return "stopped by you";
    case FinishReason::error: return "failed";
    case FinishReason::length: break;
  }
  const auto drawn = static_cast<int64_t>(completion.token_ids.size());
  if (drawn >= params.max_tokens) return fmt::format("--max-tokens {}", params.max_tokens);
  return fmt::format("the context of {} tokens is full{}", context,
                     context < llm.checkpoint().model->info().max_positions ? " (--context gives more)" : "");
}

void print_report(LLM& llm, const Completion& completion, const SamplingParams& params) {
  const GenerationStats& stats = llm.last_stats();
  const Report report = make_report(llm, completion);
  const double decode = per_second(stats.decode_tokens, stats.decode_seconds);
  std::string text = fmt::format(
      "prompt  {} tokens, {:.1f} tokens/s, first token after {}\n"
      "decode  {} tokens, {:.1f} tokens/s, ended by: {}\n"
      "memory  {}\n",
      stats.prompt_tokens, per_second(stats.prompt_tokens, stats.prompt_seconds),
      seconds_text(stats.first_token_seconds + stats.tokenize_seconds), stats.decode_tokens, decode,
      finish_text(llm, completion, params, llm.engine().max_sequence_length()), memory_text(report.memory));
  if (stats.decode_tokens > 0)
    text += fmt::format("limit   {}: {} of weights, keys and values read per token\n",
                        report.in_cache ? std::string("in cache, where memory is no limit")
                                        : limit_text(report.bytes_per_token, decode, *report.rates),
                        bytes_text(report.bytes_per_token));
  print_error("\n" + dim_error(text));
}

void print_json(LLM& llm, const Completion& completion, const SamplingParams& params) {
  const GenerationStats& stats = llm.last_stats();
  const Report report = make_report(llm, completion);
  io::JsonValue ids = io::JsonValue::array();
  for (int32_t id : completion.token_ids) ids.push_back(id);
  io::JsonValue sampling = io::JsonValue::object();
  sampling.set("temperature", params.temperature).set("top_k", params.top_k).set("top_p", params.top_p);
  sampling.set("min_p", params.min_p).set("repetition_penalty", params.repetition_penalty);
  sampling.set("presence_penalty", params.presence_penalty).set("frequency_penalty", params.frequency_penalty);
  sampling.set("max_tokens", params.max_tokens).set("seed", completion.seed);
  io::JsonValue json = io::JsonValue::object();
  json.set("text", completion.text).set("token_ids", std::move(ids));
  json.set("finish_reason", std::string(finish_reason_name(completion.finish_reason)));
  json.set("sampling", std::move(sampling)).set("prompt_tokens", stats.prompt_tokens);
  json.set("decode_tokens", stats.decode_tokens);
  json.set("prompt_tokens_per_second", per_second(stats.prompt_tokens, stats.prompt_seconds));
  json.set("decode_tokens_per_second", per_second(stats.decode_tokens, stats.decode_seconds));
  json.set("first_token_seconds", stats.first_token_seconds + stats.tokenize_seconds);
  set_memory(json, report.memory);
  json.set("bytes_per_token", report.bytes_per_token);
  json.set("in_cache", report.in_cache);
  if (report.rates)
    json.set("read_bytes_per_second", report.rates->read_bytes_per_second)
        .set("fraction_of_limit", report.bytes_per_token * per_second(stats.decode_tokens, stats.decode_seconds) /
                                      report.rates->read_bytes_per_second);
  print(io::to_json(json) + "\n");
}

// One text. Throws the completion's own error.
Completion complete(LLM& llm, const std::string& prompt, const SamplingParams& params, const RunOptions& options,
                    const std::atomic<bool>& stop) {
  // The prompt is shown with the first piece, so that a refused one leaves stdout empty.
  bool prompt_shown = options.json;
  const auto show_prompt = [&] {
    if (!std::exchange(prompt_shown, true)) print(prompt);
  };
  const engine::LLM::OnText on_text = [&](size_t, std::string_view piece) {
    if (options.json) return;
    show_prompt();
    print(piece, true);
  };
  Completion completion = std::move(llm.generate({prompt}, params, on_text, &stop, options.parse_special)[0]);
  if (!completion.error.empty()) {
    if (prompt_shown && !options.json) print("\n", true);
    throw InvalidArgument("{}", completion.error);
  }
  show_prompt();
  if (!options.json) print("\n", true);
  if (options.json)
    print_json(llm, completion, params);
  else if (!options.quiet)
    print_report(llm, completion, params);
  return completion;
}

int interact(LLM& llm, const SamplingParams& params, const RunOptions& options, const std::atomic<bool>& stop) {
  note("type the beginning of a text; Ctrl-D ends");
  std::string line;
  while (true) {
    print_error("> ");
    if (!std::getline(std::cin, line)) break;
    if (line.empty()) continue;
    try {
      if (complete(llm, line, params, options, stop).finish_reason == FinishReason::cancelled) return kInterrupted;
    } catch (const InvalidArgument& error) {
      note("{}", error.what());
    }
  }
  print_error("\n");
  return interrupted() ? kInterrupted : kOk;
}

}  // namespace

int run(CommandLine command_line) {
  RunOptions options;
  Arguments arguments(
      "run",
      "Generates text from a prompt and streams it to stdout. Without a prompt it reads standard input, "
      "or, on a terminal, asks for one text after another.");
  options.model.add_operand(arguments);
  arguments.section("Prompt");
  arguments.option("-p,--prompt", "TEXT", options.prompt, "the beginning of the text; \"\" starts from nothing");
  arguments.option("-f,--file", "FILE", options.file, "read the prompt from a file; - is standard input");
  arguments.flag("--parse-special", options.parse_special, "read special tokens such as <|im_end|> from the prompt");
  arguments.flag("--chat", options.chat, "use the model's chat template (not in this build: refused)");
  arguments.section("Sampling (defaults: the model's generation_config.json)");
  arguments.option("-n,--max-tokens", "N", options.max_tokens, "tokens to draw at most (default: 256)");
  arguments.option("--temperature", "X", options.temperature, "0 is greedy (default: 1)");
  arguments.option("--top-k", "N", options.top_k, "draw from the N likeliest tokens; 0 is off");
  arguments.option("--top-p", "X", options.top_p, "draw from the likeliest tokens of this total probability; 1 is off");
  arguments.option("--min-p", "X", options.min_p, "drop tokens below this share of the likeliest one's; 0 is off");
  arguments.option("--repetition-penalty", "X", options.repetition_penalty,
                   "divide the logits of tokens that prompt or text have by this; 1 is off");
  arguments.option("--presence-penalty", "X", options.presence_penalty,
                   "subtract this from the logits of tokens that the text has; 0 is off");
  arguments.option("--frequency-penalty", "X", options.frequency_penalty,
                   "likewise, times how often the text has the token; 0 is off");
  arguments.option("--seed", "N", options.seed, "the same seed gives the same text (default: a fresh one, printed)");
  arguments.list("--stop", "TEXT", options.stop, "end before this text; may be repeated");
  arguments.flag("--ignore-eos", options.ignore_eos, "go on after the end-of-text token");
  arguments.section("Output");
  arguments.flag("--json", options.json, "one JSON object with text, token ids and statistics, at the end");
  arguments.flag("-q,--quiet", options.quiet, "no statistics");
  arguments.option("--context", "N", options.context, "tokens that the KV cache holds (default: as many as needed)");
  options.model.add_device(arguments);
  options.model.add_precision(arguments);
  options.model.add_loading(arguments);
  arguments.example("eadem run -p \"Once upon a time\"", "a story by the bundled model");
  arguments.example("eadem run model.gguf -p \"The sea\" -n 100 --temperature 0", "100 tokens, greedy");
  arguments.example("eadem run path/to/model -f prompt.txt --seed 7 > story.txt", "a file in, a file out, repeatable");
  arguments.example("echo \"Hello\" | eadem run --json | jq -r .text", "the answer for another program");
  if (!arguments.parse(command_line)) return kOk;
  if (options.chat)
    throw Unsupported("--chat: this build has no engine for chat templates; write the prompt as the model expects it");
  if (options.context && *options.context < 1)
    throw UsageError(fmt::format("--context is {}; expected at least 1", *options.context));

  try {
    sampling_of(options, {});  // refuses bad values before anything is read
  } catch (const InvalidArgument& error) {
    throw UsageError(error.what());
  }

  const std::atomic<bool>& stop = listen_for_interrupt();
  const std::optional<std::string> prompt = read_prompt(options);
  const std::string path = resolve_model(options.model.model);

  engine::EngineOptions engine_options = options.model.engine_options();
  engine::StaticKVCacheConfig cache;
  models::Checkpoint checkpoint = models::open_checkpoint(path);
  const int64_t model_context = checkpoint.model->info().max_positions;
  if (options.context) {
    cache.max_cache_len = *options.context;
  } else {
    // A token is at least a byte of the prompt, or one of the few that a tokenizer adds; no need for more cache.
    constexpr int64_t kAddedTokens = 16;
    const int64_t most =
        prompt ? static_cast<int64_t>(prompt->size()) + kAddedTokens + options.max_tokens.value_or(kUsualContext)
               : kUsualContext;
    if (most < model_context) cache.max_cache_len = most;
  }
  engine_options.cache = cache;

  std::optional<ProgressBar> bar(std::in_place, "loading");
  const auto progress = [&](int64_t done, int64_t total) {
    stop_if_interrupted();
    bar->update(static_cast<double>(done), static_cast<double>(total));
  };
  LLM llm(std::move(checkpoint), options.model.open(), engine_options, cli_logger(), progress);
  bar.reset();
  const SamplingParams params = sampling_of(options, llm.default_params());
  if (!options.quiet) note("{}, seed {}, on {}", to_string(params), *params.seed, llm.engine().device()->description());
  if (!prompt) return interact(llm, params, options, stop);
  return complete(llm, *prompt, params, options, stop).finish_reason == FinishReason::cancelled ? kInterrupted : kOk;
}

}  // namespace eadem::cli
