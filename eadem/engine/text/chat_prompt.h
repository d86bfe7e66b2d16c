// SPDX-License-Identifier: Apache-2.0
//
// ChatPrompt: conversations in the shapes of OpenAI's messages, written as the chat templates of a model say.
//
//   ChatPrompt chat(tokenizer);
//   std::vector<int32_t> prompt = chat.encode(messages);  // ends where the assistant begins to answer
//
// The reference is apply_chat_template of Hugging Face transformers 5 with sanitize_control_tokens: text of the
// conversation that spells a control token stays text. Control tokens are the special ones of the tokenizer, and those
// of its other added tokens that the template's own text holds, such as <think>.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/io/template/chat_template.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "eadem/models/auto_model.h"

namespace eadem::engine {

struct ChatOptions {
  // Arrays of objects, or null. Tools have the shape {"type": "function", "function": {"name": ..., ...}}.
  io::JsonValue tools, documents;
  // Ends the prompt with the beginning of an assistant's message.
  bool add_generation_prompt = true;
  // Ends the prompt within the last message, so that the model continues it. Needs add_generation_prompt = false.
  bool continue_final_message = false;
  // The name of one of the model's templates, or the text of a template. Empty: `tool_use` if there are tools and the
  // model has a template of that name, else `default`.
  std::string chat_template;
  // More variables of the template, such as {"enable_thinking": false}.
  io::JsonValue variables = io::JsonValue::object();
  // Messages come from OpenAI's API, whose spelling differs from what templates read: arguments of tool calls that are
  // JSON text become objects, and contents that are lists of text parts become one text each, the parts on lines of
  // their own, if the template reads no parts. A part that is no text is Unsupported.
  bool openai = false;
  // The local time that the template may write; the present if none.
  std::optional<std::tm> now;
};

// Immutable: const members may be called from any thread.
class ChatPrompt {
 public:
  // Compiles the tokenizer's templates. Throws DataCorrupted or Unsupported, with template, line and construct, when
  // the default one cannot be; another one that cannot be throws when it is chosen. A tokenizer without templates is
  // no error: render() needs one in its options then. `tokenizer` must outlive this.
  explicit ChatPrompt(const io::Tokenizer& tokenizer);
  ~ChatPrompt();
  ChatPrompt(ChatPrompt&&) noexcept;
  ChatPrompt& operator=(ChatPrompt&&) noexcept;

  // `messages` is an array of objects such as {"role": "user", "content": "Hi"}, of which there is at least one.
  // Keys whose value is null count as absent; reasoning is taken from reasoning_content, thinking or reasoning. Throws
  // NotFound when there is no template to use, and InvalidArgument for messages or options of another shape and for
  // what the template refuses, such as roles in an unexpected order.
  std::vector<io::TextSegment> render(const io::JsonValue& messages, const ChatOptions& options = {}) const;
  // The token ids of render(). The template writes BOS itself where the model wants one.
  std::vector<int32_t> encode(const io::JsonValue& messages, const ChatOptions& options = {}) const;

  // The special token that the default template writes after an assistant's text. None if there is no default template
  // or if it writes none there. Throws nothing.
  std::optional<int32_t> end_of_turn() const;

 private:
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

struct StopToken {
  int32_t id = 0;                    // may be no token of the tokenizer: vocabularies of models are padded
  std::vector<std::string> reasons;  // "the chat template's end of turn", "generation_config.json" ...
};

// The tokens that end an assistant's answer, each once, with the files that say so. Throws DataCorrupted for a
// malformed generation_config.json.
std::vector<StopToken> chat_stop_tokens(const models::Checkpoint& checkpoint, const io::Tokenizer& tokenizer,
                                        const ChatPrompt& chat);

// The ids of those that the model has: it draws no others.
std::vector<int32_t> ids_of_model(const std::vector<StopToken>& stops, const models::ModelInfo& model);

}  // namespace eadem::engine
