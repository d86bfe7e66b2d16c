// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/interactive/chat_session.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "eadem/cli/interactive/answer_printer.h"
#include "eadem/cli/interrupt.h"
#include "eadem/io/text.h"

namespace eadem::cli {

namespace {

namespace fs = std::filesystem;
using engine::SamplingParams;

std::string trimmed(std::string_view text) {
  const size_t begin = std::min(text.find_first_not_of(' '), text.size());
  return std::string(text.substr(begin, text.find_last_not_of(' ') + 1 - begin));
}

// The file that a command names.
std::string path_of(std::string_view argument, std::string_view command) {
  std::string path = trimmed(argument);
  if (path.empty()) throw InvalidArgument("{} needs the name of a file", command);
  return path;
}

std::string count_of(size_t count, std::string_view what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

// Parses "temperature 0.7" as the option --temperature=0.7 of the command line, with its names and its checks.
void set_option(SamplingOptions& options, const std::string& setting) {
  const size_t space = std::min(setting.find(' '), setting.size());
  const std::string name = setting.substr(0, space), value = trimmed(std::string_view(setting).substr(space));
  Arguments arguments("set", "");
  options.add(arguments, "");
  if (name == "help" || name.starts_with('-'))
    throw InvalidArgument("a setting is a name and a value, as in: /set temperature 0.7");
  try {
    const std::vector<std::string> words = {"--" + name + (value.empty() ? "" : "=" + value)};
    arguments.parse(words);
  } catch (const UsageError& error) {
    std::string message = error.what();
    for (size_t at = 0; (at = message.find("--", at)) != std::string::npos;) message.erase(at, 2);
    throw InvalidArgument("{}", message);
  }
}

}  // namespace

ChatSession::ChatSession(engine::LLM& llm, Conversation& conversation, SamplingOptions sampling, bool quiet)
    : llm_(llm), conversation_(conversation), sampling_(std::move(sampling)), quiet_(quiet) {}

int ChatSession::run(const std::string& greeting) {
  Session session;
  session.greeting = greeting;
  session.multi_line = true;
  session.commands = commands();
  session.answer = [this](const std::string& text) {
    show([&](const SamplingParams& params, const TurnEvents& events) {
      return conversation_.ask(text, params, events);
    });
  };
  const int code = converse(session);
  if (stats_.texts > 0 && !quiet_) print_error("\n" + dim_error(stats()));
  return code;
}

void ChatSession::show(const std::function<Turn(const SamplingParams& params, const TurnEvents& events)>& turn) {
  SamplingParams with_seed = params();
  with_seed.seed = static_cast<int64_t>(static_cast<uint64_t>(*with_seed.seed) + answers_++);
  AnswerPrinter printer;
  TurnEvents events;
  events.cancel = &interrupt_flag();
  events.on_piece = [&](const engine::ReasoningSplitter::Piece& piece) { printer.show(piece); };
  events.on_dropped = [](std::span<const io::JsonValue> messages) {
    note("the context is full: {} dropped, from {} on", count_of(messages.size(), "message"),
         io::quote(message_text(messages[0], "content")));
  };
  const Turn answered = [&] {
    try {
      return turn(with_seed, events);
    } catch (const ContextFull& error) {
      throw InvalidArgument("{}; /undo, /clear, --context and --when-full drop-oldest make room", error.what());
    }
  }();
  printer.end();
  stats_.add(llm_.last_stats());
  report(answered, with_seed);
}

void ChatSession::report(const Turn& turn, const SamplingParams& params) {
  using engine::FinishReason;
  const engine::Completion& completion = turn.completion;
  if (completion.finish_reason == FinishReason::cancelled && completion.token_ids.empty())
    note("stopped before the answer began: the conversation is as it was");
  else if (completion.finish_reason == FinishReason::length)
    note("the answer was cut: {}", finish_text(llm_, completion, params));
  if (quiet_) return;
  const engine::GenerationStats& stats = llm_.last_stats();
  const std::string per_step = stats.proposed_tokens > 0 ? fmt::format(", {:.2f} a step", stats.tokens_per_step()) : "";
  print_error(dim_error(fmt::format(
                  "[{} tokens read and {} from the cache in {}; {} drawn, {:.1f} tokens/s{}; context {} of {}]",
                  stats.prompt_tokens, stats.reused_tokens, seconds_text(stats.first_token_seconds),
                  completion.token_ids.size(), per_second(stats.decode_tokens, stats.decode_seconds), per_step,
                  completion.prompt_tokens + std::ssize(completion.token_ids), conversation_.context())) +
              "\n");
}

std::vector<SessionCommand> ChatSession::commands() {
  const auto nothing_after = [](auto work) { return [work](std::string_view) { work(); }; };
  const auto with_argument = [this](auto member) {
    return [this, member](std::string_view argument) { (this->*member)(argument); };
  };
  return {
      {"/system", "[TEXT]", "shows the system message, or sets it; \"\" removes it",
       with_argument(&ChatSession::system)},
      {"/clear", "", "forgets the conversation but the system message", nothing_after([this] {
         conversation_.clear();
         note("{} left", count_of(conversation_.messages().size(), "message"));
       })},
      {"/undo", "", "takes your last message and its answer back",
       nothing_after([this] { note("took back {}", io::quote(conversation_.undo())); })},
      {"/retry", "", "answers your last message again", nothing_after([this] {
         show([this](const SamplingParams& params, const TurnEvents& events) {
           return conversation_.retry(params, events);
         });
       })},
      {"/save", "FILE", "writes the conversation as JSON", with_argument(&ChatSession::save)},
      {"/load", "FILE", "goes on with a conversation from a file", with_argument(&ChatSession::load)},
      {"/stats", "", "what the conversation takes, and speeds", nothing_after([this] { print_error(stats()); })},
      {"/set", "[NAME VALUE]", "shows or sets how answers are drawn: temperature 0.7, top_k, top_p, seed ...",
       with_argument(&ChatSession::set)},
  };
}

void ChatSession::system(std::string_view argument) {
  const std::string text = trimmed(argument);
  if (text.empty()) return print_error(conversation_.system().value_or("(no system message)") + "\n");
  conversation_.set_system(text == "\"\"" ? "" : text);
}

void ChatSession::set(std::string_view argument) {
  SamplingOptions changed = sampling_;
  if (const std::string setting = trimmed(argument); !setting.empty()) set_option(changed, setting);
  changed.over(llm_.default_params(), conversation_.context());  // refuses values out of range
  sampling_ = std::move(changed);
  note("{}, seed {}", to_string(params()), *sampling_.seed);
}

void ChatSession::save(std::string_view argument) {
  const std::string path = path_of(argument, "/save");
  std::error_code ignored;
  if (path != file_ && fs::exists(path, ignored))
    throw InvalidArgument("{} exists, and this conversation did not come from it", path);
  write_messages(path, conversation_.messages());
  file_ = path;
  note("{} in {}", count_of(conversation_.messages().size(), "message"), path);
}

void ChatSession::load(std::string_view argument) {
  const std::string path = path_of(argument, "/load");
  try {
    conversation_.set_messages(read_messages(path));
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}: {}", path, error.what());
  }
  file_ = path;
  note("{} from {}", count_of(conversation_.messages().size(), "message"), path);
}

std::string ChatSession::stats() const {
  return fmt::format("context {} of {} tokens, {}\n", conversation_.messages().empty() ? 0 : conversation_.tokens(),
                     conversation_.context(), count_of(conversation_.messages().size(), "message")) +
         stats_.report(llm_);
}

}  // namespace eadem::cli
