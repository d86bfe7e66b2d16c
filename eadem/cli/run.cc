// SPDX-License-Identifier: Apache-2.0
//
// eadem run: continues a prompt, printing text as it is generated.
#include <utility>

#include "eadem/cli/bench/machine.h"
#include "eadem/cli/commands.h"
#include "eadem/cli/completion_text.h"
#include "eadem/cli/interactive/answer_printer.h"
#include "eadem/cli/interactive/conversation.h"
#include "eadem/cli/interactive/session.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/load_llm.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/chat_options.h"
#include "eadem/cli/options/sampling_options.h"
#include "eadem/cli/options/standard_input.h"
#include "eadem/cli/terminal.h"
#include "eadem/engine/llm.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"

namespace eadem::cli {

namespace {

using engine::Completion;
using engine::FinishReason;
using engine::GenerationStats;
using engine::LLM;
using engine::SamplingParams;

constexpr int64_t kMaxPromptBytes = 256 << 20;

struct RunOptions {
  ModelOptions model;
  std::optional<std::string> prompt, text, file, default_prompt;  // --prompt, PROMPT, --file, --default-prompt
  SamplingOptions sampling;
  std::optional<int64_t> context, logprobs;
  bool parse_special = false, chat = false, interactive = false, json = false, quiet = false, verbose = false;
  ChatTemplateOptions chat_template;
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

// Refuses options that make sense only with --chat, or only without.
void check_chat(const RunOptions& options) {
  if (const std::string_view given = options.chat_template.given(); !options.chat && !given.empty())
    throw UsageError(fmt::format("{} is for chat templates: give --chat, too", given));
  if (options.chat && options.parse_special)
    throw UsageError("--parse-special and --chat: a message holds no special tokens; give one of them");
  if (options.chat && options.interactive)
    throw UsageError("--interactive and --chat: `eadem chat` holds a conversation");
}

// Returns the prompt, or nothing if texts are read interactively.
std::optional<std::string> read_prompt(const RunOptions& options) {
  if (options.prompt) return options.prompt;
  if (options.text) return options.text;
  if (options.interactive) return std::nullopt;
  if (!options.file && options.default_prompt) return options.default_prompt;
  if (!options.file && stdin_is_terminal()) {
    if (options.chat) throw UsageError("--chat without a prompt: `eadem chat` holds a conversation");
    return std::nullopt;
  }
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

// A lone operand is the model. One that is no model may have been meant as a prompt.
std::string resolve_run_model(const RunOptions& options) {
  try {
    return resolve_model(options.model.model, options.chat ? kBundledChatModel : kBundledModel);
  } catch (const NotFound& error) {
    const bool has_prompt = options.prompt || options.text || options.file || !options.model.model;
    throw NotFound("{}{}", error.what(), has_prompt ? "" : "; a text to continue is given with -p, or after MODEL");
  }
}

// Bytes that a late step of a text reads: all weights, and the keys and values of a text of mean length.
double bytes_per_token(const LLM& llm, engine::InferEngine& engine, const Completion& completion) {
  const double mean_length =
      static_cast<double>(completion.prompt_tokens) + 0.5 * static_cast<double>(llm.last_stats().decode_tokens);
  return weight_bytes_per_step(engine, 1) + kv_bytes_of_sequence(engine, mean_length);
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

void print_report(LLM& llm, const Completion& completion, const SamplingParams& params) {
  const GenerationStats& stats = llm.last_stats();
  const Report report = make_report(llm, completion);
  const double decode = per_second(stats.decode_tokens, stats.decode_seconds);
  std::string text = fmt::format(
      "prompt  {} tokens, {:.1f} tokens/s, first token after {}\n"
      "decode  {} tokens, {:.1f} tokens/s, ended by: {}\n"
      "{}"
      "memory  {}\n",
      stats.prompt_tokens, per_second(stats.prompt_tokens, stats.prompt_seconds),
      seconds_text(stats.first_token_seconds + stats.tokenize_seconds), stats.decode_tokens, decode,
      finish_text(llm, completion, params), speculation_text(stats), memory_text(report.memory));
  if (stats.decode_tokens > 0)
    text += fmt::format("limit   {}: {} of weights, keys and values read per token\n",
                        report.in_cache ? std::string("weights fit in the cache, memory sets none")
                                        : limit_text(report.bytes_per_token, decode, *report.rates),
                        bytes_text(report.bytes_per_token));
  print_error("\n" + dim_error(text));
}

void set_logprobs(io::JsonValue& json, const Completion& completion) {
  io::JsonValue logprobs = io::JsonValue::array(), top = io::JsonValue::array();
  for (const float logprob : completion.logprobs) logprobs.push_back(static_cast<double>(logprob));
  for (const std::vector<engine::TokenLogprob>& place : completion.top_logprobs) {
    io::JsonValue list = io::JsonValue::array();
    for (const engine::TokenLogprob& each : place) {
      io::JsonValue entry = io::JsonValue::object();
      entry.set("token_id", each.token).set("logprob", static_cast<double>(each.logprob));
      list.push_back(std::move(entry));
    }
    top.push_back(std::move(list));
  }
  json.set("logprobs", std::move(logprobs)).set("top_logprobs", std::move(top));
}

// `reasoning` stood before the text.
void print_json(LLM& llm, const Completion& completion, const SamplingParams& params, const std::string& reasoning) {
  const GenerationStats& stats = llm.last_stats();
  const Report report = make_report(llm, completion);
  io::JsonValue ids = io::JsonValue::array();
  for (int32_t id : completion.token_ids) ids.push_back(id);
  io::JsonValue sampling = io::JsonValue::object();
  sampling.set("temperature", params.temperature).set("top_k", params.top_k).set("top_p", params.top_p);
  sampling.set("min_p", params.min_p).set("typical_p", params.typical_p);
  sampling.set("repetition_penalty", params.repetition_penalty);
  sampling.set("presence_penalty", params.presence_penalty).set("frequency_penalty", params.frequency_penalty);
  sampling.set("max_tokens", params.max_tokens).set("seed", completion.seed);
  io::JsonValue json = io::JsonValue::object();
  json.set("text", completion.text);
  if (!reasoning.empty()) json.set("reasoning_content", reasoning);
  json.set("token_ids", std::move(ids));
  if (params.logprobs > 0) set_logprobs(json, completion);
  json.set("finish_reason", std::string(finish_reason_name(completion.finish_reason)));
  json.set("sampling", std::move(sampling)).set("prompt_tokens", completion.prompt_tokens);
  json.set("cached_tokens", completion.cached_tokens);
  json.set("decode_tokens", stats.decode_tokens);
  json.set("proposed_tokens", completion.proposed_tokens).set("accepted_tokens", completion.accepted_tokens);
  json.set("tokens_per_step", stats.tokens_per_step());
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

// Answers one message through the chat template. Returns the answer without its reasoning.
Completion answer(LLM& llm, const std::string& message, const SamplingParams& params, const RunOptions& options,
                  const engine::ChatOptions& chat_options, std::string& reasoning) {
  Conversation conversation(llm, chat_options, WhenFull::refuse);
  if (options.chat_template.system) conversation.set_system(*options.chat_template.system);
  AnswerPrinter printer;
  TurnEvents events;
  events.cancel = &interrupt_flag();
  events.on_piece = [&](const engine::ReasoningSplitter::Piece& piece) {
    if (!options.json) printer.show(piece);
  };
  Turn turn = conversation.ask(message, params, events);
  printer.end();
  reasoning = turn.answer.reasoning;
  turn.completion.text = turn.answer.content;
  return std::move(turn.completion);
}

int interact(LLM& llm, const SamplingParams& params, const RunOptions& options, const std::atomic<bool>& stop) {
  SessionStats stats;
  Session session;
  session.greeting = "type the beginning of a text; /help lists commands, /bye or Ctrl-D ends";
  session.answer = [&](const std::string& text) {
    const Completion completion = complete(llm, text, params, options, stop);
    stats.add(llm.last_stats());
    if (options.json)
      print_json(llm, completion, params, "");
    else if (options.verbose)
      print_report(llm, completion, params);
  };
  const int code = converse(session);
  if (stats.texts > 0 && !options.json && !options.quiet) print_error("\n" + dim_error(stats.report(llm)));
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
  arguments.flag("--chat", options.chat,
                 "the prompt is a message, written through the model's chat template; only the answer is printed");
  options.chat_template.add(arguments);
  arguments.section("Sampling (defaults: the model's generation_config.json)");
  options.sampling.add(arguments, "256");
  arguments.section("Output");
  arguments.flag("--json", options.json, "one JSON object with text, token ids and statistics, at the end");
  arguments.option("--logprobs", "N", options.logprobs,
                   "in it, log-probabilities and the N likeliest tokens at each place");
  arguments.flag("-q,--quiet", options.quiet, "no statistics");
  arguments.flag("-v,--verbose", options.verbose, "statistics after every text, not only at the end of a session");
  add_context(arguments, options.context, "as many as needed");
  options.model.add_device(arguments);
  options.model.add_ranks(arguments);
  options.model.add_precision(arguments);
  options.model.add_loading(arguments);
  options.model.add_speculation(arguments);
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
  check_context(options.context);
  options.model.check_ranks();
  options.model.check_speculation();
  if (options.quiet && options.verbose) throw UsageError("--quiet and --verbose: give one");
  check_prompt(options);
  check_chat(options);
  if (options.logprobs && !options.json) throw UsageError("--logprobs is for --json: give it, too");
  if (options.logprobs && (*options.logprobs < 0 || *options.logprobs > kernels::kMostTopLogprobs))
    throw UsageError(fmt::format("--logprobs is {}; expected 0 to {}", *options.logprobs, kernels::kMostTopLogprobs));
  options.sampling.check();  // before anything is read
  return options;
}

// Tokens that the KV cache is to hold. 0: the model's context.
int64_t cache_length(const RunOptions& options, const std::optional<std::string>& prompt,
                     const models::ModelInfo& info) {
  check_context(options.context, info.max_positions);
  const int64_t model_context = info.default_context();
  if (options.context) return *options.context;
  if (!prompt) return std::min(kUsualContext, model_context);
  // A token is at least a byte of the prompt, or one of the few that a tokenizer adds; no need for more cache.
  constexpr int64_t kAddedTokens = 16;
  // A chat template writes tokens around a message, sometimes with instructions of its own.
  const int64_t template_tokens = options.chat ? kUsualContext : 0;
  const int64_t drawn = options.sampling.max_tokens.value_or(-1) == -1 ? kUsualContext : *options.sampling.max_tokens;
  const int64_t most = static_cast<int64_t>(prompt->size() + options.chat_template.system.value_or("").size()) +
                       template_tokens + kAddedTokens + drawn;
  return most < model_context ? most : 0;
}

}  // namespace

int run(CommandLine command_line) {
  const std::optional<RunOptions> parsed = parse_run(command_line);
  if (!parsed) return kOk;
  const RunOptions& options = *parsed;
  const engine::ChatOptions chat_options = options.chat_template.options();
  const std::atomic<bool>& stop = listen_for_interrupt();
  // The model is found before standard input is read, so that a mistyped name is reported at once.
  const std::string path = resolve_run_model(options);
  const std::optional<std::string> prompt = options.model.follows() ? "" : read_prompt(options);

  models::Checkpoint checkpoint = models::open_checkpoint(path);
  const int64_t context = cache_length(options, prompt, checkpoint.model->info());
  const LoadedLlm loaded = load_llm(std::move(checkpoint), options.model, context);
  LLM& llm = *loaded.llm;
  SamplingParams params = options.sampling.over(llm.default_params(), llm.engine().max_sequence_length());
  params.logprobs = options.logprobs.value_or(params.logprobs);
  if (!params.seed) params.seed = fresh_seed();
  if (!options.quiet) note("{}, seed {}, on {}", to_string(params), *params.seed, llm.engine().device()->description());
  if (!prompt) return interact(llm, params, options, stop);
  std::string reasoning;
  const Completion completion = options.chat ? answer(llm, *prompt, params, options, chat_options, reasoning)
                                             : complete(llm, *prompt, params, options, stop);
  if (options.json)
    print_json(llm, completion, params, reasoning);
  else if (!options.quiet)
    print_report(llm, completion, params);
  return completion.finish_reason == FinishReason::cancelled ? kInterrupted : kOk;
}

}  // namespace eadem::cli
