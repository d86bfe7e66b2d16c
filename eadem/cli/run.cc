// SPDX-License-Identifier: Apache-2.0
//
// eadem run: continues a prompt, printing text as it is generated.
#include <algorithm>
#include <random>
#include <utility>

#include "eadem/cli/arguments.h"
#include "eadem/cli/bench/machine.h"
#include "eadem/cli/commands.h"
#include "eadem/cli/interactive/session.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/model_options.h"
#include "eadem/cli/standard_input.h"
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
// The cache length for texts of unknown length; --context requests a longer one.
constexpr int64_t kUsualContext = 4096;

struct RunOptions {
  ModelOptions model;
  std::optional<std::string> prompt, text, file, default_prompt;  // --prompt, PROMPT, --file, --default-prompt
  std::optional<int64_t> max_tokens, top_k, seed, context;
  std::optional<double> temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty;
  std::vector<std::string> stop;
  bool parse_special = false, ignore_eos = false, chat = false, interactive = false, json = false, quiet = false,
       verbose = false;
};

// Refuses more than one prompt.
void check_prompt(const RunOptions& options) {
  std::string_view given;
  const auto one_more = [&](bool is_given, std::string_view name) {
    if (!is_given) return;
    if (!given.empty()) throw UsageError(fmt::format("{} and {} both give the prompt; give one", given, name));
    given = name;
  };
  one_more(options.prompt.has_value(), "-p");
  one_more(options.text.has_value(), "PROMPT");
  one_more(options.file.has_value(), "-f");
  if (options.interactive && !given.empty())
    throw UsageError(fmt::format("--interactive asks for texts, and {} gives one; give one of them", given));
}

// Returns the prompt, or nothing if texts are read interactively.
std::optional<std::string> read_prompt(const RunOptions& options) {
  if (options.prompt) return options.prompt;
  if (options.text) return options.text;
  if (options.interactive) return std::nullopt;
  if (!options.file && options.default_prompt) return options.default_prompt;
  if (!options.file && stdin_is_terminal()) return std::nullopt;
  const bool from_stdin = !options.file || *options.file == "-";
  std::string text = from_stdin ? read_stdin(kMaxPromptBytes) : io::read_file(*options.file, kMaxPromptBytes);
  // The line end that `echo` and editors put after a text is no part of it.
  if (text.ends_with('\n')) text.pop_back();
  if (text.ends_with('\r')) text.pop_back();
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
  // -1: until the text ends, or the context is full.
  if (options.max_tokens) params.max_tokens = *options.max_tokens == -1 ? INT32_MAX : *options.max_tokens;
  params.stop.insert(params.stop.end(), options.stop.begin(), options.stop.end());
  params.ignore_eos = options.ignore_eos;
  params.seed = options.seed ? *options.seed : static_cast<int64_t>(std::random_device{}() & 0x7fffffff);
  params.validate();
  return params;
}

// Replaces the name of a parameter at the start of a message by its option: "max_tokens is 0" becomes "--max-tokens is
// 0".
std::string with_option_names(std::string message) {
  const size_t end = std::min(message.find(' '), message.size());
  std::replace(message.begin(), message.begin() + static_cast<ptrdiff_t>(end), '_', '-');
  return "--" + message;
}

// A lone operand is the model. One that is no model may have been meant as a prompt.
std::string resolve_run_model(const RunOptions& options) {
  try {
    return resolve_model(options.model.model);
  } catch (const NotFound& error) {
    const bool has_prompt = options.prompt || options.text || options.file || !options.model.model;
    throw NotFound("{}{}", error.what(), has_prompt ? "" : "; a text to continue is given with -p, or after MODEL");
  }
}

double per_second(int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0.0; }

// Bytes that a late step of a text reads: all weights, and the keys and values of a text of mean length.
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
  report.memory = memory_use(llm.engine());  // taken now: measuring takes memory, too
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
                        report.in_cache ? std::string("weights fit in the cache, memory sets none")
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

// Generates one text and streams it. Throws the completion's own error.
Completion complete(LLM& llm, const std::string& prompt, const SamplingParams& params, const RunOptions& options,
                    const std::atomic<bool>& stop) {
  // The prompt is printed with the first piece, so that a refused prompt leaves stdout empty.
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
  return completion;
}

// The sums of a session, for its end.
struct SessionStats {
  int64_t texts = 0;
  GenerationStats sum;

  void add(const GenerationStats& stats) {
    ++texts;
    sum.prompt_tokens += stats.prompt_tokens;
    sum.prompt_seconds += stats.prompt_seconds;
    sum.decode_tokens += stats.decode_tokens;
    sum.decode_seconds += stats.decode_seconds;
  }
};

void print_session_report(LLM& llm, const SessionStats& stats) {
  const GenerationStats& sum = stats.sum;
  print_error("\n" +
              dim_error(fmt::format("texts   {}\n"
                                    "prompt  {} tokens, {:.1f} tokens/s\n"
                                    "decode  {} tokens, {:.1f} tokens/s\n"
                                    "memory  {}\n",
                                    stats.texts, sum.prompt_tokens, per_second(sum.prompt_tokens, sum.prompt_seconds),
                                    sum.decode_tokens, per_second(sum.decode_tokens, sum.decode_seconds),
                                    memory_text(memory_use(llm.engine())))));
}

int interact(LLM& llm, const SamplingParams& params, const RunOptions& options, const std::atomic<bool>& stop) {
  SessionStats stats;
  Session session;
  session.greeting = "type the beginning of a text; /help lists commands, /bye or Ctrl-D ends";
  session.answer = [&](const std::string& text) {
    const Completion completion = complete(llm, text, params, options, stop);
    stats.add(llm.last_stats());
    if (options.json)
      print_json(llm, completion, params);
    else if (options.verbose)
      print_report(llm, completion, params);
  };
  const int code = converse(session);
  if (stats.texts > 0 && !options.json && !options.quiet) print_session_report(llm, stats);
  return code;
}

// Returns nothing when help was asked for.
std::optional<RunOptions> parse_run(CommandLine command_line) {
  RunOptions options;
  Arguments arguments(
      "run",
      "Generates text from a prompt and streams it to stdout. Without a prompt it reads standard input, "
      "or, on a terminal, asks for one text after another.");
  options.model.add_operand(arguments);
  arguments.operand("PROMPT", options.text, "the beginning of the text, as with -p");
  arguments.section("Prompt");
  arguments.text("-p,--prompt", "TEXT", options.prompt, "the beginning of the text; \"\" starts from nothing");
  arguments.option("-f,--file", "FILE", options.file,
                   "read the prompt from a file; - is standard input. A line end after the text is dropped");
  arguments.flag("-i,--interactive", options.interactive, "ask for one text after another, also without a terminal");
  arguments.text("--default-prompt", "TEXT", options.default_prompt,
                 "with no other prompt, this one instead of reading standard input or asking");
  arguments.flag("--parse-special", options.parse_special, "read special tokens such as <|im_end|> from the prompt");
  arguments.flag("--chat", options.chat, "use the model's chat template (not in this build: refused)");
  arguments.section("Sampling (defaults: the model's generation_config.json)");
  arguments.option("-n,--max-tokens", "N", options.max_tokens,
                   "tokens to draw at most (default: 256); -1: until the text ends");
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
  arguments.flag("-v,--verbose", options.verbose, "statistics after every text, not only at the end of a session");
  arguments.option("--context", "N", options.context, "tokens that the KV cache holds (default: as many as needed)");
  options.model.add_device(arguments);
  options.model.add_precision(arguments);
  options.model.add_loading(arguments);
  arguments.note(
      "In a session, Ctrl-C stops an answer and /help lists commands. Lines are remembered in "
      "~/.local/state/eadem/history, or below $XDG_STATE_HOME.");
  arguments.note(
      "Names that llama.cpp, Ollama, vLLM and transformers use are understood: --temp, -c, --ctx-size, "
      "--max-model-len, --n-predict, --max-new-tokens, -s, and more.");
  arguments.example("eadem run -p \"Once upon a time\"", "a story by the bundled model");
  arguments.example("eadem run model.gguf -p \"The sea\" -n 100 --temperature 0", "100 tokens, greedy");
  arguments.example("eadem run path/to/model", "a session: type texts, Ctrl-C stops an answer, Ctrl-D ends");
  arguments.example("eadem run path/to/model -f prompt.txt --seed 7 > story.txt", "a file in, a file out, repeatable");
  arguments.example("echo \"Hello\" | eadem run --json | jq -r .text", "the answer for another program");
  if (!arguments.parse(command_line)) return std::nullopt;
  if (options.chat)
    throw Unsupported("--chat: this build has no engine for chat templates; write the prompt as the model expects it");
  if (options.context && *options.context < 1)
    throw UsageError(fmt::format("--context is {}; expected at least 1", *options.context));

  if (options.quiet && options.verbose) throw UsageError("--quiet and --verbose: give one");
  check_prompt(options);
  try {
    sampling_of(options, {});  // refuses bad values before anything is read
  } catch (const InvalidArgument& error) {
    throw UsageError(with_option_names(error.what()));
  }
  return options;
}

// Tokens that the KV cache is to hold. 0: the model's context.
int64_t cache_length(const RunOptions& options, const std::optional<std::string>& prompt, int64_t model_context) {
  if (options.context.value_or(0) > model_context)
    throw InvalidArgument("--context is {}; the model's context is {} tokens", *options.context, model_context);
  if (options.context) return *options.context;
  if (!prompt) return std::min(kUsualContext, model_context);
  // A token is at least a byte of the prompt, or one of the few that a tokenizer adds; no need for more cache.
  constexpr int64_t kAddedTokens = 16;
  const int64_t drawn = options.max_tokens.value_or(-1) == -1 ? kUsualContext : *options.max_tokens;
  const int64_t most = static_cast<int64_t>(prompt->size()) + kAddedTokens + drawn;
  return most < model_context ? most : 0;
}

}  // namespace

int run(CommandLine command_line) {
  const std::optional<RunOptions> parsed = parse_run(command_line);
  if (!parsed) return kOk;
  const RunOptions& options = *parsed;
  const std::atomic<bool>& stop = listen_for_interrupt();
  // The model is found before standard input is read, so that a mistyped name is reported at once.
  const std::string path = resolve_run_model(options);
  const std::optional<std::string> prompt = read_prompt(options);

  models::Checkpoint checkpoint = models::open_checkpoint(path);
  engine::EngineOptions engine_options = options.model.engine_options();
  engine_options.cache = engine::StaticKVCacheConfig{
      .max_cache_len = cache_length(options, prompt, checkpoint.model->info().max_positions)};
  std::optional<ProgressBar> bar(std::in_place, "loading");
  const auto progress = [&](int64_t done, int64_t total) {
    stop_if_interrupted();
    bar->update(static_cast<double>(done), static_cast<double>(total));
  };
  LLM llm(std::move(checkpoint), options.model.open(), engine_options, cli_logger(), progress);
  bar.reset();
  SamplingParams params = sampling_of(options, llm.default_params());
  if (options.max_tokens == -1) params.max_tokens = llm.engine().max_sequence_length();
  if (!options.quiet) note("{}, seed {}, on {}", to_string(params), *params.seed, llm.engine().device()->description());
  if (!prompt) return interact(llm, params, options, stop);
  const Completion completion = complete(llm, *prompt, params, options, stop);
  if (options.json)
    print_json(llm, completion, params);
  else if (!options.quiet)
    print_report(llm, completion, params);
  return completion.finish_reason == FinishReason::cancelled ? kInterrupted : kOk;
}

}  // namespace eadem::cli
