// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/text/chat_prompt.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "eadem/core/error.h"
#include "eadem/engine/model_files.h"
#include "eadem/engine/text/openai_messages.h"
#include "eadem/io/generation_config.h"
#include "eadem/io/template/python_text.h"
#include "eadem/io/text.h"

namespace eadem::engine {

namespace {

using io::ChatTemplate;
using io::JsonValue;
using io::TextSegment;
using Segments = std::vector<TextSegment>;

// Stands at the end of the message that is to be continued, so that its end is found in the text. The space tells
// whether the template removes white space there.
constexpr std::string_view kEndMark = "CONTINUE_FINAL_MESSAGE_TAG ";

// The added tokens that a template speaks of, in rising order: its special tokens in all but name, such as <think>.
// White space is text.
std::vector<int32_t> control_tokens(const ChatTemplate& chat, const io::Tokenizer& tokenizer) {
  const std::vector<std::string_view> literals = chat.literals();
  std::vector<int32_t> control;
  for (const int32_t id : tokenizer.added_ids()) {
    const std::string_view token = tokenizer.token_text(id);
    if (token.find_first_not_of(" \t\r\n") == std::string_view::npos) continue;
    const auto has_token = [&](std::string_view text) { return text.find(token) != std::string_view::npos; };
    if (std::any_of(literals.begin(), literals.end(), has_token)) control.push_back(id);
  }
  return control;
}

// Messages as transformers hands them to templates: without the keys that are null, and with the reasoning of an
// answer under both names that templates read, whichever of three it came under.
JsonValue normalized(const JsonValue& messages) {
  constexpr const char* kReasoning[] = {"reasoning_content", "thinking", "reasoning"};
  JsonValue::Array all;
  for (const JsonValue& message : messages.as_array()) {
    JsonValue::Object members;
    for (const io::JsonMember& member : message.as_object()) {
      if (!member.value.is_null()) members.push_back(member);
    }
    JsonValue copy(std::move(members));
    for (const char* key : kReasoning) {
      const JsonValue* found = copy.find(key);
      if (found == nullptr) continue;
      const JsonValue reasoning = *found;
      if (copy.find("thinking") == nullptr) copy.set("thinking", reasoning);
      copy.set("reasoning_content", reasoning);
      break;
    }
    all.push_back(std::move(copy));
  }
  return all;
}

void check_objects(const JsonValue& list, std::string_view what) {
  if (!list.is_array()) throw InvalidArgument("{} must be a list of objects", what);
  for (size_t i = 0; i < list.as_array().size(); ++i) {
    if (!list.as_array()[i].is_object()) throw InvalidArgument("{}[{}] is not an object", what, i);
  }
}

void check_messages(const JsonValue& messages) {
  check_objects(messages, "messages");
  for (size_t i = 0; i < messages.as_array().size(); ++i) {
    const JsonValue* role = messages.as_array()[i].find("role");
    if (role == nullptr || !role->is_string())
      throw InvalidArgument("messages[{}] has no 'role', which must be a string such as \"user\"", i);
  }
}

void check(const JsonValue& messages, const ChatOptions& options) {
  check_messages(messages);
  if (messages.as_array().empty()) throw InvalidArgument("messages is empty; a conversation has at least one message");
  if (!options.tools.is_null()) check_objects(options.tools, "tools");
  if (!options.documents.is_null()) check_objects(options.documents, "documents");
  if (options.continue_final_message && options.add_generation_prompt)
    throw InvalidArgument("continue_final_message continues the last message and add_generation_prompt begins another");
  if (!options.variables.is_object()) throw InvalidArgument("the template's variables must be an object");
  for (const char* own : {"messages", "tools", "documents", "add_generation_prompt"}) {
    if (options.variables.find(own) != nullptr)
      throw InvalidArgument("'{}' is an option of its own and cannot be one of the template's variables", own);
  }
}

// The text of a message that is to be continued: its content, or the last part of it that has a text. Null: none.
const JsonValue* text_to_continue(const JsonValue& message) {
  const JsonValue* content = message.find("content");
  if (content == nullptr || content->is_string()) return content;
  if (!content->is_array()) return nullptr;
  const JsonValue::Array& parts = content->as_array();
  for (size_t i = parts.size(); i-- > 0;) {
    const JsonValue* text = parts[i].is_object() ? parts[i].find("text") : nullptr;
    if (text != nullptr && text->is_string()) return text;
  }
  return nullptr;
}

// `messages` with kEndMark after the text of the last one.
JsonValue with_end_mark(const JsonValue& messages) {
  const JsonValue& last = messages.as_array().back();
  const JsonValue* text = text_to_continue(last);
  if (text == nullptr) throw InvalidArgument("continue_final_message needs a last message with a text to continue");
  const JsonValue marked = text->as_string() + std::string(kEndMark);
  JsonValue::Array all = messages.as_array();
  const JsonValue& content = *last.find("content");
  if (content.is_string()) {
    all.back().set("content", marked);
    return all;
  }
  JsonValue::Array parts;
  for (const JsonValue& part : content.as_array()) {
    const bool is_last = part.is_object() && part.find("text") == text;
    parts.push_back(is_last ? JsonValue(part).set("text", marked) : part);
  }
  all.back().set("content", std::move(parts));
  return all;
}

// The segments before byte `end` of their joined text.
Segments cut(Segments segments, size_t end) {
  for (size_t i = 0; i < segments.size(); ++i) {
    std::string& text = segments[i].text;
    if (end <= text.size()) {
      text.resize(end);
      segments.resize(end > 0 ? i + 1 : i);
      break;
    }
    end -= text.size();
  }
  return segments;
}

// `last`: the message that is continued.
Segments cut_at_end_mark(Segments segments, const JsonValue& last) {
  using io::chat::strip_left, io::chat::strip_right;
  const std::string text = io::join_segments(segments);
  const std::string_view bare = kEndMark.substr(0, kEndMark.size() - 1);
  size_t end = text.rfind(bare);
  if (end == std::string::npos)
    throw InvalidArgument("continue_final_message: the chat template does not write the last message's text");
  if (text.find(strip_left(strip_right(text_to_continue(last)->as_string()))) == std::string::npos)
    throw InvalidArgument(
        "continue_final_message: the chat template changes the last message's text, so that it cannot be continued");
  if (!std::string_view(text).substr(end).starts_with(kEndMark)) {
    // The template strips messages; what is continued is stripped too.
    end = strip_right(std::string_view(text).substr(0, end)).size();
  }
  return cut(std::move(segments), end);
}

// The text that is trusted after the last place where the conversation's `mark` stands.
std::string trusted_after(const Segments& segments, std::string_view mark) {
  size_t i = segments.size();
  while (i > 0 && (segments[i - 1].trusted || segments[i - 1].text.find(mark) == std::string::npos)) --i;
  return i > 0 && i < segments.size() ? segments[i].text : std::string();
}

}  // namespace

struct ChatPrompt::Impl {
  // A template, or why it cannot be compiled.
  struct Compiled {
    std::string name;
    std::optional<ChatTemplate> chat;
    std::exception_ptr error;
    std::vector<int32_t> control;  // see control_tokens
  };

  static Compiled compile(const io::NamedTemplate& named, const io::Tokenizer& tokenizer) {
    Compiled result{named.name, {}, {}, {}};
    try {
      result.chat.emplace(named.source, named.place);
      result.control = control_tokens(*result.chat, tokenizer);
    } catch (const Error&) {
      result.error = std::current_exception();
    }
    return result;
  }

  const io::Tokenizer* tokenizer;
  std::vector<std::shared_ptr<const Compiled>> templates;
  std::optional<int32_t> end_of_turn;

  std::shared_ptr<const Compiled> find(std::string_view name) const {
    for (const auto& one : templates) {
      if (one->name == name) return one;
    }
    return nullptr;
  }
  std::string names() const {
    std::vector<std::string> names;
    for (const auto& one : templates) names.push_back(io::quote(one->name));
    return names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "));
  }

  std::shared_ptr<const Compiled> choose(const ChatOptions& options) const {
    std::shared_ptr<const Compiled> one;
    if (!options.chat_template.empty()) {
      one = find(options.chat_template);
      if (one == nullptr && options.chat_template.find('{') != std::string::npos)  // a template's text is no name
        one = std::make_shared<Compiled>(compile({{}, options.chat_template, "chat_template"}, *tokenizer));
      if (one == nullptr)
        throw NotFound("{}: no chat template is named {}; there is {}", tokenizer->source(),
                       io::quote(options.chat_template), names());
    } else {
      if (!options.tools.is_null()) one = find("tool_use");
      if (one == nullptr) one = find("default");
      if (one == nullptr && templates.empty())
        throw NotFound("{}: the model has no chat template, so nothing says how it writes conversations",
                       tokenizer->source());
      if (one == nullptr)
        throw NotFound("{}: no chat template is named default; choose one of {}", tokenizer->source(), names());
    }
    if (one->error) std::rethrow_exception(one->error);
    return one;
  }

  Segments render(const JsonValue& given, const ChatOptions& options, const Compiled& chosen) const {
    JsonValue messages = normalized(given);
    if (!options.openai) return write(messages, options, chosen);
    for (const std::string& role : roles_with_parts(messages)) {
      JsonValue joined = with_joined_parts(messages, role);
      if (!are_equal(joined, with_one_part(messages, role), options, chosen)) messages = std::move(joined);
    }
    return write_calls(messages, options, chosen);
  }

  // With tool calls' arguments as objects, or as texts where the template wants these.
  Segments write_calls(const JsonValue& messages, const ChatOptions& options, const Compiled& chosen) const {
    const JsonValue changed = with_object_arguments(messages);
    try {
      return write(changed, options, chosen);
    } catch (const InvalidArgument&) {
      if (changed == messages) throw;
      const std::exception_ptr first = std::current_exception();
      try {
        return write(messages, options, chosen);
      } catch (const InvalidArgument&) {
        std::rethrow_exception(first);
      }
    }
  }

  // Whether the template writes both conversations alike.
  bool are_equal(const JsonValue& a, const JsonValue& b, const ChatOptions& options, const Compiled& chosen) const {
    try {
      return io::join_segments(write_calls(a, options, chosen)) == io::join_segments(write_calls(b, options, chosen));
    } catch (const InvalidArgument&) {
      return false;
    }
  }

  Segments write(const JsonValue& messages, const ChatOptions& options, const Compiled& chosen) const {
    io::TemplateInput input = io::template_input(*tokenizer);
    if (options.now) input.now = *options.now;
    for (const io::JsonMember& variable : options.variables.as_object())
      input.variables.set(variable.key, variable.value);
    JsonValue::Object trusted;  // variables of the caller go before special tokens of the same name
    for (const io::JsonMember& token : input.trusted.as_object()) {
      if (options.variables.find(token.key) == nullptr) trusted.push_back(token);
    }
    input.trusted = std::move(trusted);
    input.variables.set("messages", options.continue_final_message ? with_end_mark(messages) : messages);
    input.variables.set("tools", options.tools).set("documents", options.documents);
    input.variables.set("add_generation_prompt", options.add_generation_prompt);
    Segments segments = chosen.chat->render(input);
    return options.continue_final_message ? cut_at_end_mark(std::move(segments), messages.as_array().back()) : segments;
  }

  // The first special token of a trusted text; `directly`: only if nothing but white space stands before it.
  std::optional<int32_t> special_token_in(std::string_view text, bool directly) const {
    text.remove_prefix(std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    const Segments segments = {{std::string(text), true}};
    for (const int32_t id : tokenizer->encode(segments, {.add_special_tokens = false})) {
      if (tokenizer->is_special(id)) return id;
      if (directly) break;
    }
    return std::nullopt;
  }

  // Most templates end each message with a token. Where the last message has none, as with GLM 4, the token that begins
  // the next one ends it.
  std::optional<int32_t> find_end_of_turn() const {
    const auto one = find("default");
    if (one == nullptr || one->error) return std::nullopt;
    constexpr std::string_view kMark = "eadem7answer";
    const auto message = [](const char* role, std::string_view text) {
      return JsonValue::object().set("role", role).set("content", text);
    };
    for (const JsonValue& tools : {JsonValue(), JsonValue::array()}) {
      JsonValue messages = JsonValue::array();
      messages.push_back(message("user", "Hello")).push_back(message("assistant", kMark));
      const ChatOptions options{.tools = tools, .add_generation_prompt = false};
      try {
        if (const auto id = special_token_in(trusted_after(render(messages, options, *one), kMark), false)) return id;
        messages.push_back(message("user", "Hello"));
        return special_token_in(trusted_after(render(messages, options, *one), kMark), true);
      } catch (const Error&) {  // a template that wants other conversations, or a list of tools
      }
    }
    return std::nullopt;
  }
};

ChatPrompt::ChatPrompt(const io::Tokenizer& tokenizer) {
  Impl impl{&tokenizer, {}, {}};
  for (const io::NamedTemplate& named : tokenizer.chat_templates())
    impl.templates.push_back(std::make_shared<Impl::Compiled>(Impl::compile(named, tokenizer)));
  if (const auto one = impl.find("default"); one != nullptr && one->error) std::rethrow_exception(one->error);
  impl.end_of_turn = impl.find_end_of_turn();
  impl_ = std::make_unique<const Impl>(std::move(impl));
}
ChatPrompt::~ChatPrompt() = default;
ChatPrompt::ChatPrompt(ChatPrompt&&) noexcept = default;
ChatPrompt& ChatPrompt::operator=(ChatPrompt&&) noexcept = default;

Segments ChatPrompt::render(const JsonValue& messages, const ChatOptions& options) const {
  check(messages, options);
  return impl_->render(messages, options, *impl_->choose(options));
}

std::vector<int32_t> ChatPrompt::encode(const JsonValue& messages, const ChatOptions& options) const {
  check(messages, options);
  const auto chosen = impl_->choose(options);
  return impl_->tokenizer->encode(impl_->render(messages, options, *chosen),
                                  {.add_special_tokens = false, .control = chosen->control});
}

std::optional<int32_t> ChatPrompt::end_of_turn() const { return impl_->end_of_turn; }

std::vector<StopToken> chat_stop_tokens(const models::Checkpoint& checkpoint, const io::Tokenizer& tokenizer,
                                        const ChatPrompt& chat) {
  std::vector<StopToken> stops;
  const auto add = [&](int64_t id, const std::string& reason) {
    const auto known = std::find_if(stops.begin(), stops.end(), [&](const StopToken& stop) { return stop.id == id; });
    StopToken& stop = known == stops.end() ? stops.emplace_back(StopToken{static_cast<int32_t>(id), {}}) : *known;
    if (std::find(stop.reasons.begin(), stop.reasons.end(), reason) == stop.reasons.end())
      stop.reasons.push_back(reason);
  };
  if (const auto id = chat.end_of_turn()) add(*id, "the chat template's end of turn");
  std::vector<int64_t> configured;
  if (const auto path = generation_config_path(checkpoint))
    configured = io::read_generation_config(*path).eos_token_ids;
  for (const int64_t id : configured) add(id, "generation_config.json");
  // A GGUF file has no other EOS than its tokenizer's.
  if (configured.empty() && !checkpoint.config_path.ends_with(".gguf"))
    for (const int64_t id : checkpoint.model->info().eos_token_ids) add(id, "config.json");
  if (tokenizer.eos()) add(*tokenizer.eos(), "the tokenizer's EOS");
  for (const io::EndToken& end : tokenizer.end_tokens()) add(end.id, end.key);
  return stops;
}

std::vector<int32_t> ids_of_model(const std::vector<StopToken>& stops, const models::ModelInfo& model) {
  std::vector<int32_t> ids;
  for (const StopToken& stop : stops)
    if (model.has_token(stop.id)) ids.push_back(stop.id);
  return ids;
}

}  // namespace eadem::engine
