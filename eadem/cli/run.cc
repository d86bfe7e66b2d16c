// SPDX-License-Identifier: Apache-2.0
//
// eadem run: continues a prompt, printing text as it is generated.
#include <algorithm>
#include <cmath>
#include <map>
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
#include "eadem/engine/model_files.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/generation_config.h"
#include "eadem/io/json.h"

namespace eadem::cli {

namespace {

using engine::Completion;
using engine::FinishReason;
using engine::GenerationStats;
using engine::LLM;
using engine::SamplingParams;

constexpr int64_t kMaxPromptBytes = 256 << 20;
constexpr int64_t kMostSideBySide = 16;  // answers to a prompt; more of them wait
constexpr int64_t kScoredRows = 64;      // tokens of a prompt whose log-probabilities a step computes

struct RunOptions {
  ModelOptions model;
  std::optional<std::string> prompt, text, file, default_prompt;  // --prompt, PROMPT, --file, --default-prompt
  SamplingOptions sampling;
  std::optional<int64_t> context;
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
  if (options.chat && options.sampling.n.value_or(1) != 1)
    throw UsageError(fmt::format("--n is {} and --chat is given, which gives 1 answer", *options.sampling.n));
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

using Completions = std::vector<Completion>;  // answers to one prompt

// Answers that a step continues, on average.
double mean_rows(engine::InferEngine& engine, const Completions& completions) {
  size_t sum = 0, longest = 1;
  for (const Completion& completion : completions) {
    sum += completion.token_ids.size();
    longest = std::max(longest, completion.token_ids.size());
  }
  const double rows = static_cast<double>(sum) / static_cast<double>(longest);
  return std::clamp(rows, 1.0, static_cast<double>(engine.max_batch_size()));
}

// Bytes that a late step reads for each of its tokens: its share of all weights, and the keys and values of a text of
// mean length.
double bytes_per_token(const LLM& llm, engine::InferEngine& engine, const Completions& completions) {
  const auto answers = static_cast<double>(completions.size());
  const double mean_length = static_cast<double>(completions[0].prompt_tokens) +
                             0.5 * static_cast<double>(llm.last_stats().decode_tokens) / answers;
  const double rows = mean_rows(engine, completions);
  return weight_bytes_per_step(engine, std::llround(rows)) / rows + kv_bytes_of_sequence(engine, mean_length);
}

// Why the answers ended, each reason with the number of answers if there are several.
std::string finish_texts(LLM& llm, const Completions& completions, const SamplingParams& params) {
  if (completions.size() == 1) return finish_text(llm, completions[0], params);
  std::map<std::string, int64_t> reasons;
  for (const Completion& completion : completions) ++reasons[finish_text(llm, completion, params)];
  std::string text;
  for (const auto& [reason, count] : reasons) text += fmt::format("{}{} ({})", text.empty() ? "" : ", ", reason, count);
  return text;
}

struct Report {
  MemoryUse memory;
  double bytes_per_token = 0;
  bool in_cache = false;
  std::optional<MachineRates> rates;
};

Report make_report(LLM& llm, const Completions& completions) {
  Report report;
  report.memory = memory_use(llm.engine());  // taken now: measuring takes memory, too
  report.bytes_per_token = bytes_per_token(llm, llm.engine(), completions);
  const double bytes_per_step = report.bytes_per_token * mean_rows(llm.engine(), completions);
  report.in_cache = lies_in_cache(bytes_per_step, *llm.engine().device());
  if (!report.in_cache && llm.last_stats().decode_tokens > 0)
    report.rates = machine_rates(*llm.engine().device(), false);
  return report;
}

void print_report(LLM& llm, const Completions& completions, const SamplingParams& params) {
  const GenerationStats& stats = llm.last_stats();
  const Report report = make_report(llm, completions);
  const double decode = per_second(stats.decode_tokens, stats.decode_seconds);
  std::string text = fmt::format(
      "prompt  {} tokens, {:.1f} tokens/s, first token after {}\n"
      "decode  {} tokens, {:.1f} tokens/s, ended by: {}\n"
      "{}"
      "memory  {}\n",
      stats.prompt_tokens, per_second(stats.prompt_tokens, stats.prompt_seconds),
      seconds_text(stats.first_token_seconds + stats.tokenize_seconds), stats.decode_tokens, decode,
      finish_texts(llm, completions, params), speculation_text(stats), memory_text(report.memory));
  if (stats.decode_tokens > 0)
    text += fmt::format("limit   {}: {} of weights, keys and values read per token\n",
                        report.in_cache ? std::string("weights fit in the cache, memory sets none")
                                        : limit_text(report.bytes_per_token, decode, *report.rates),
                        bytes_text(report.bytes_per_token));
  print_error("\n" + dim_error(text));
}

// null stands for what JSON has no number for: the first token of a prompt has NaN.
io::JsonValue logprob_list(const std::vector<float>& logprobs) {
  io::JsonValue list = io::JsonValue::array();
  for (const float logprob : logprobs)
    list.push_back(std::isfinite(logprob) ? io::JsonValue(static_cast<double>(logprob)) : io::JsonValue());
  return list;
}

io::JsonValue top_list(const std::vector<std::vector<engine::TokenLogprob>>& places) {
  io::JsonValue top = io::JsonValue::array();
  for (const std::vector<engine::TokenLogprob>& place : places) {
    io::JsonValue list = io::JsonValue::array();
    for (const engine::TokenLogprob& each : place) {
      io::JsonValue entry = io::JsonValue::object();
      entry.set("token_id", each.token).set("logprob", static_cast<double>(each.logprob));
      list.push_back(std::move(entry));
    }
    top.push_back(std::move(list));
  }
  return top;
}

// Sets the fields that each answer has by itself. `reasoning` is the model's reasoning, which came before the text.
void set_answer(io::JsonValue& json, const Completion& completion, const SamplingParams& params,
                const std::string& reasoning) {
  io::JsonValue ids = io::JsonValue::array();
  for (int32_t id : completion.token_ids) ids.push_back(id);
  json.set("text", completion.text);
  if (!reasoning.empty()) json.set("reasoning_content", reasoning);
  json.set("token_ids", std::move(ids));
  if (params.logprobs > 0)
    json.set("logprobs", logprob_list(completion.logprobs)).set("top_logprobs", top_list(completion.top_logprobs));
  json.set("finish_reason", std::string(finish_reason_name(completion.finish_reason)));
}

io::JsonValue answer_list(const Completions& completions, const SamplingParams& params) {
  io::JsonValue answers = io::JsonValue::array();
  for (const Completion& completion : completions) {
    io::JsonValue answer = io::JsonValue::object();
    set_answer(answer, completion, params, "");
    answer.set("cached_tokens", completion.cached_tokens);
    if (params.num_beams > 1)
      answer.set("score", completion.score);
    else
      answer.set("seed", completion.seed);
    answers.push_back(std::move(answer));
  }
  return answers;
}

void print_json(LLM& llm, const Completions& completions, const SamplingParams& params, const std::string& reasoning) {
  const GenerationStats& stats = llm.last_stats();
  const Report report = make_report(llm, completions);
  const Completion& completion = completions[0];
  int64_t proposed = 0, accepted = 0;
  for (const Completion& each : completions) proposed += each.proposed_tokens, accepted += each.accepted_tokens;
  io::JsonValue sampling = io::JsonValue::object();
  sampling.set("temperature", params.temperature).set("top_k", params.top_k).set("top_p", params.top_p);
  sampling.set("min_p", params.min_p).set("typical_p", params.typical_p);
  sampling.set("repetition_penalty", params.repetition_penalty);
  sampling.set("presence_penalty", params.presence_penalty).set("frequency_penalty", params.frequency_penalty);
  sampling.set("max_tokens", params.max_tokens).set("seed", completion.seed).set("n", params.n);
  io::JsonValue json = io::JsonValue::object();
  if (completions.size() == 1)
    set_answer(json, completion, params, reasoning);
  else
    json.set("answers", answer_list(completions, params));
  if (params.prompt_logprobs) json.set("prompt_logprobs", logprob_list(completion.prompt_logprobs));
  if (params.prompt_logprobs.value_or(0) > 0) json.set("prompt_top_logprobs", top_list(completion.prompt_top_logprobs));
  json.set("sampling", std::move(sampling)).set("prompt_tokens", completion.prompt_tokens);
  if (completions.size() == 1) json.set("cached_tokens", completion.cached_tokens);
  json.set("decode_tokens", stats.decode_tokens);
  json.set("proposed_tokens", proposed).set("accepted_tokens", accepted);
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

// Generates the answers to a prompt. The first one is streamed, and the others follow it. Throws an answer's own error.
Completions complete(LLM& llm, const std::string& prompt, const SamplingParams& params, const RunOptions& options,
                     const std::atomic<bool>& stop) {
  // The prompt is printed with the first piece, so that a refused prompt leaves stdout empty.
  bool prompt_shown = options.json;
  const auto show_prompt = [&] {
    if (!std::exchange(prompt_shown, true)) print(prompt);
  };
  const engine::LLM::OnText on_text = [&](size_t answer, std::string_view piece) {
    if (options.json || answer > 0) return;
    show_prompt();
    print(piece, true);
  };
  Completions completions = llm.generate({prompt}, params, on_text, &stop, options.parse_special);
  for (const Completion& completion : completions)
    if (!completion.error.empty()) {
      if (prompt_shown && !options.json) print("\n", true);
      throw InvalidArgument("{}", completion.error);
    }
  show_prompt();
  if (options.json) return completions;
  print("\n", true);
  for (size_t i = 1; i < completions.size(); ++i) print(fmt::format("\n{}{}\n", prompt, completions[i].text), true);
  return completions;
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
    const Completions completions = complete(llm, text, params, options, stop);
    stats.add(llm.last_stats());
    if (options.json)
      print_json(llm, completions, params, "");
    else if (options.verbose)
      print_report(llm, completions, params);
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
  arguments.option("--n", "N", options.sampling.n,
                   "N answers to the prompt, with seeds from --seed on; they are printed one after the other, with an "
                   "empty line between them, and are a list `answers` in --json (default: 1)");
  arguments.section("Output");
  arguments.flag("--json", options.json, "one JSON object with text, token ids and statistics, at the end");
  arguments.option("--logprobs", "N", options.sampling.logprobs,
                   "in it, log-probabilities and the N likeliest tokens at each place");
  arguments.option("--prompt-logprobs", "N", options.sampling.prompt_logprobs,
                   "in it, those of the prompt's tokens, the first of which has none; with 0 no likeliest ones");
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
  for (const auto& [given, name] : {std::pair{options.sampling.logprobs.has_value(), "--logprobs"},
                                    {options.sampling.prompt_logprobs.has_value(), "--prompt-logprobs"}})
    if (given && !options.json) throw UsageError(fmt::format("{} is for --json: give it, too", name));
  options.sampling.check();  // before anything is read
  return options;
}

// Answers to the prompt: as many as --n says, or as the model's authors recommend.
int64_t num_answers(const RunOptions& options, const models::Checkpoint& checkpoint) {
  if (options.chat) return 1;
  if (options.sampling.n) return *options.sampling.n;
  const std::optional<std::string> path = engine::generation_config_path(checkpoint);
  return path ? io::read_generation_config(*path).num_return_sequences.value_or(1) : 1;
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
  const int64_t sequences = std::min(num_answers(options, checkpoint), kMostSideBySide);
  const LoadedLlm loaded = load_llm(std::move(checkpoint), options.model,
                                    {.context = context,
                                     .sequences = sequences,
                                     .logit_rows = options.sampling.prompt_logprobs ? kScoredRows : 0,
                                     .answers_at_once = prompt.has_value()});
  LLM& llm = *loaded.llm;
  SamplingParams params = options.sampling.over(llm.default_params(), llm.engine().max_sequence_length());
  if (options.chat) params.n = 1;  // whatever number the model's authors recommend
  if (!params.seed) params.seed = fresh_seed();
  if (!options.quiet) note("{}, seed {}, on {}", to_string(params), *params.seed, llm.engine().device()->description());
  if (!prompt) return interact(llm, params, options, stop);
  std::string reasoning;
  const Completions completions = options.chat
                                      ? Completions{answer(llm, *prompt, params, options, chat_options, reasoning)}
                                      : complete(llm, *prompt, params, options, stop);
  if (options.json)
    print_json(llm, completions, params, reasoning);
  else if (!options.quiet)
    print_report(llm, completions, params);
  const bool stopped = std::any_of(completions.begin(), completions.end(), [](const Completion& completion) {
    return completion.finish_reason == FinishReason::cancelled;
  });
  return stopped ? kInterrupted : kOk;
}

}  // namespace eadem::cli
