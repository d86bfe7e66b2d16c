// SPDX-License-Identifier: Apache-2.0
//
// eadem chat: a conversation with a model that has a chat template.
#include <algorithm>
#include <utility>

#include "eadem/cli/commands.h"
#include "eadem/cli/interactive/chat_session.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/load_llm.h"
#include "eadem/cli/options/chat_options.h"
#include "eadem/cli/terminal.h"

namespace eadem::cli {

namespace {

struct ChatCommand {
  ModelOptions model;
  ChatTemplateOptions chat;
  SamplingOptions sampling{.max_tokens = -1};
  std::optional<int64_t> context;
  std::string when_full = "refuse";
  bool quiet = false;
};

// Returns nothing when help was asked for.
std::optional<ChatCommand> parse_chat(CommandLine command_line) {
  ChatCommand options;
  Arguments arguments("chat",
                      "Talks with a model through its chat template. The conversation stays in the model's cache, so "
                      "each turn reads only what is new. Answers go to stdout, everything else to stderr.");
  options.model.add_operand(arguments);
  arguments.section("Conversation");
  options.chat.add(arguments);
  add_context(arguments, options.context, "4096, or the model's if that is less");
  arguments.choice("--when-full", {"refuse", "drop-oldest"}, options.when_full,
                   "when the context is full: refuse the message, or drop the oldest turns but not the system message "
                   "(default: refuse)");
  arguments.flag("-q,--quiet", options.quiet, "no statistics");
  arguments.section("Sampling (defaults: the model's generation_config.json)");
  options.sampling.add(arguments, "-1");
  options.model.add_device(arguments);
  options.model.add_ranks(arguments);
  options.model.add_precision(arguments);
  options.model.add_loading(arguments);
  options.model.add_speculation(arguments);
  arguments.note(
      "Ctrl-C stops an answer, which stays in the conversation as far as it came; twice at an empty prompt it ends the "
      "program. /help lists the commands. An input of several lines stands between two lines of \"\"\", or has a "
      "backslash at the end of each line but the last. Lines are remembered in ~/.local/state/eadem/history, or below "
      "$XDG_STATE_HOME.");
  arguments.note(
      "The reasoning of models that write it between <think> and </think> is shown dimmed and kept apart from the "
      "answer; the template says whether later turns see it.");
  arguments.example("eadem chat", "a conversation with the bundled chat model, which tells stories");
  arguments.example("eadem chat path/to/chat-model", "one with another model");
  arguments.example("eadem chat path/to/chat-model --system \"Answer in one sentence.\" --when-full drop-oldest",
                    "one that may go on for ever");
  arguments.example(
      "eadem chat path/to/chat-model --template-arg enable_thinking=false --temperature 0 --max-tokens 100",
      "a short answer without reasoning, where the template knows that variable");
  arguments.example(
      R"(eadem chat stories --stop . --chat-template '{{ bos_token }}{% for m in messages %}{{ m.content }})"
      R"({{ ". " if m.role == "assistant" }}{% endfor %}')",
      "a story told in turns: a bundled model without a template, with one of a line");
  if (!arguments.parse(command_line)) return std::nullopt;
  check_context(options.context);
  options.model.check_ranks();
  options.model.check_speculation();
  options.sampling.check();
  return options;
}

}  // namespace

int chat(CommandLine command_line) {
  std::optional<ChatCommand> options = parse_chat(command_line);
  if (!options) return kOk;
  const engine::ChatOptions chat_options = options->chat.options();
  listen_for_interrupt();
  const std::string path = resolve_model(options->model.model, kBundledChatModel);
  models::Checkpoint checkpoint = models::open_checkpoint(path);
  const models::ModelInfo& info = checkpoint.model->info();
  check_context(options->context, info.max_positions);
  const int64_t context = options->context.value_or(std::min(kUsualContext, info.default_context()));
  const LoadedLlm loaded = load_llm(std::move(checkpoint), options->model, {.context = context});
  engine::LLM& llm = *loaded.llm;
  Conversation conversation(llm, chat_options,
                            options->when_full == "refuse" ? WhenFull::refuse : WhenFull::drop_oldest);
  if (options->chat.system) conversation.set_system(*options->chat.system);
  if (!options->sampling.seed) options->sampling.seed = fresh_seed();
  ChatSession session(llm, conversation, options->sampling, options->quiet);
  if (!options->quiet)
    note("{}, seed {}, on {}", to_string(session.params()), *options->sampling.seed,
         llm.engine().device()->description());
  return session.run("type a message; /help lists commands, /bye or Ctrl-D ends");
}

}  // namespace eadem::cli
