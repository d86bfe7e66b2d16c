// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/interactive/conversation.h"

#include <algorithm>
#include <utility>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/mapped_file.h"

namespace eadem::cli {

namespace {

using engine::ReasoningSplitter;
using engine::SamplingParams;
using io::JsonValue;
using Messages = Conversation::Messages;

constexpr int64_t kMaxConversationBytes = 64 << 20;

JsonValue message_of(std::string_view role, const std::string& content) {
  return JsonValue::object().set("role", role).set("content", content);
}

bool is_from(const JsonValue& message, std::string_view role) { return message_text(message, "role") == role; }

bool is_instruction(const JsonValue& message) { return is_from(message, "system") || is_from(message, "developer"); }

// Where the last turn begins: at the last message of the user. None: messages.size().
size_t last_turn(const Messages& messages) {
  for (size_t i = messages.size(); i-- > 0;)
    if (is_from(messages[i], "user")) return i;
  return messages.size();
}

// The oldest turn: what follows the instructions, up to the next message of the user. Empty if that is the last turn.
std::pair<size_t, size_t> oldest_turn(const Messages& messages) {
  size_t begin = 0;
  while (begin < messages.size() && is_instruction(messages[begin])) ++begin;
  for (size_t end = begin + 1; end < messages.size(); ++end)
    if (is_from(messages[end], "user")) return {begin, end};
  return {begin, begin};
}

JsonValue answer_message(const ReasoningSplitter::Piece& answer) {
  JsonValue message = message_of("assistant", answer.content);
  if (!answer.reasoning.empty()) message.set("reasoning_content", answer.reasoning);
  return message;
}

}  // namespace

std::string message_text(const JsonValue& message, std::string_view key) {
  const JsonValue* value = message.is_object() ? message.find(key) : nullptr;
  return value != nullptr && value->is_string() ? value->as_string() : "";
}

Conversation::Conversation(engine::LLM& llm, engine::ChatOptions options, WhenFull when_full)
    : llm_(llm),
      prompt_(llm.tokenizer()),
      options_(std::move(options)),
      when_full_(when_full),
      stop_tokens_(engine::chat_stop_tokens(llm.checkpoint(), llm.tokenizer(), prompt_)) {
  if (options_.chat_template.empty() && llm.tokenizer().chat_templates().empty())
    throw NotFound(
        "{}: the model has no chat template, which would say how it writes conversations. Looked for "
        "chat_template.jinja, additional_chat_templates/*.jinja and the key 'chat_template' of tokenizer_config.json, "
        "or for tokenizer.chat_template in GGUF. --chat-template gives one; `eadem run` continues texts without any",
        llm.checkpoint().path);
  encode({message_of("user", "Hello")});  // a template that cannot be used is refused now
}

Turn Conversation::ask(const std::string& text, const SamplingParams& params, const TurnEvents& events) {
  Messages messages = messages_;
  messages.push_back(message_of("user", text));
  return answer(std::move(messages), params, events);
}

Turn Conversation::retry(const SamplingParams& params, const TurnEvents& events) {
  Messages messages = messages_;
  const size_t question = last_turn(messages);
  if (question == messages.size()) throw InvalidArgument("there is no message to answer again");
  messages.resize(question + 1);
  return answer(std::move(messages), params, events);
}

Turn Conversation::answer(Messages messages, const SamplingParams& params, const TurnEvents& events) {
  const std::vector<int32_t> prompt = fit(messages, params, events);
  SamplingParams with_stops = params;
  if (!params.ignore_eos)
    for (const int32_t id : engine::ids_of_model(stop_tokens_, llm_.checkpoint().model->info()))
      with_stops.stop_token_ids.push_back(id);
  Turn turn;
  ReasoningSplitter splitter(engine::ends_inside_reasoning(prompt_.render(messages, options_)));
  const auto take = [&](const ReasoningSplitter::Piece& piece) {
    turn.answer.reasoning += piece.reasoning;
    turn.answer.content += piece.content;
    if (events.on_piece) events.on_piece(piece);
  };
  turn.completion = llm_.continue_ids(
      prompt, with_stops, [&](size_t, std::string_view piece) { take(splitter.feed(piece)); }, events.cancel);
  take(splitter.finish());
  if (!turn.completion.error.empty()) throw InvalidArgument("{}", turn.completion.error);
  const bool unanswered =
      turn.completion.finish_reason == engine::FinishReason::cancelled && turn.completion.token_ids.empty();
  if (unanswered) return turn;
  messages.push_back(answer_message(turn.answer));
  messages_ = std::move(messages);
  return turn;
}

// Returns the prompt of `messages`, without those that have to go.
std::vector<int32_t> Conversation::fit(Messages& messages, const SamplingParams& params,
                                       const TurnEvents& events) const {
  std::vector<int32_t> prompt = encode(messages);
  // Turns are dropped before the context is full to the last token, because the answer needs room, and more of them
  // than are in the way, because everything after them is computed again.
  const int64_t room = std::min(params.max_tokens, context() / 4);
  Messages dropped;
  if (when_full_ == WhenFull::drop_oldest && std::ssize(prompt) + room > context())
    while (std::ssize(prompt) + 2 * room > context()) {
      const auto [begin, end] = oldest_turn(messages);
      if (begin == end) break;
      const auto first = messages.begin() + static_cast<ptrdiff_t>(begin);
      const auto last = messages.begin() + static_cast<ptrdiff_t>(end);
      std::move(first, last, std::back_inserter(dropped));
      messages.erase(first, last);
      prompt = encode(messages);
    }
  if (std::ssize(prompt) >= context())
    throw ContextFull("the conversation would have {} tokens{}, and the context holds {}", prompt.size(),
                      dropped.empty() ? "" : " without its earlier turns", context());
  if (!dropped.empty() && events.on_dropped) events.on_dropped(dropped);
  return prompt;
}

std::string Conversation::undo() {
  const size_t question = last_turn(messages_);
  if (question == messages_.size()) throw InvalidArgument("there is no message to take back");
  std::string text = message_text(messages_[question], "content");
  messages_.resize(question);
  return text;
}

void Conversation::clear() {
  std::erase_if(messages_, [](const JsonValue& message) { return !is_instruction(message); });
}

std::optional<std::string> Conversation::system() const {
  if (messages_.empty() || !is_instruction(messages_[0])) return std::nullopt;
  return message_text(messages_[0], "content");
}

void Conversation::set_system(const std::string& text) {
  Messages messages = messages_;
  if (system()) messages.erase(messages.begin());
  if (!text.empty()) messages.insert(messages.begin(), message_of("system", text));
  set_messages(std::move(messages));
}

void Conversation::set_messages(Messages messages) {
  Messages with_question = messages;
  if (with_question.empty() || !is_from(with_question.back(), "user"))
    with_question.push_back(message_of("user", "Hello"));  // the template sees what the next prompt will be like
  encode(with_question);
  messages_ = std::move(messages);
}

Messages read_messages(const std::string& path) {
  const JsonValue json = io::parse_json(io::read_file(path, kMaxConversationBytes), path);
  const JsonValue* messages = json.is_object() ? json.find("messages") : &json;
  if (messages == nullptr || !messages->is_array())
    throw DataCorrupted("{}: expected a JSON array of messages, or an object with one as 'messages'", path);
  return messages->as_array();
}

void write_messages(const std::string& path, const Messages& messages) {
  io::write_file_atomically(path, io::to_json(JsonValue::object().set("messages", messages)) + "\n");
}

}  // namespace eadem::cli
