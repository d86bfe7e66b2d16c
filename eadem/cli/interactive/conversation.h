// SPDX-License-Identifier: Apache-2.0
//
// Conversation: messages in the shapes of OpenAI's, and a model that answers them. It stays in the model's cache: an
// answer computes only what is new. Prints nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "eadem/core/error.h"
#include "eadem/engine/llm.h"
#include "eadem/engine/text/chat_prompt.h"
#include "eadem/engine/text/reasoning.h"

namespace eadem::cli {

// The choices when a conversation grows beyond the context.
enum class WhenFull : uint8_t {
  refuse,       // the message is not taken
  drop_oldest,  // turns are dropped, the oldest first, until half of the context is free; the system message stays
};

// The messages do not fit the context.
class ContextFull : public InvalidArgument {
 public:
  using InvalidArgument::InvalidArgument;
};

struct Turn {
  engine::Completion completion;
  engine::ReasoningSplitter::Piece answer;  // all of it
};

struct TurnEvents {
  // Called for more of the answer.
  std::function<void(const engine::ReasoningSplitter::Piece& piece)> on_piece;
  // Called before the answer if turns are dropped, with the messages that go.
  std::function<void(std::span<const io::JsonValue> messages)> on_dropped;
  const std::atomic<bool>* cancel = nullptr;  // stops the answer; what there is of it stays in the conversation
};

// A call that throws changes nothing. One thread at a time; `llm` must outlive this.
class Conversation {
 public:
  using Messages = io::JsonValue::Array;

  // Throws NotFound when the model has no chat template and `options` gives none, DataCorrupted, Unsupported or
  // InvalidArgument when the template cannot be used.
  Conversation(engine::LLM& llm, engine::ChatOptions options, WhenFull when_full);

  // Answers one more message of the user. If `cancel` comes before the first token, the conversation stays as it was.
  // Throws InvalidArgument for messages that the template refuses, ContextFull for those that do not fit.
  Turn ask(const std::string& text, const engine::SamplingParams& params, const TurnEvents& events);
  // Answers the last message of the user again; the answer takes the place of the one before.
  Turn retry(const engine::SamplingParams& params, const TurnEvents& events);
  // Takes the user's last message back, with everything after it. Returns its text. Throws InvalidArgument if there is
  // none.
  std::string undo();
  // Removes every message but the system's.
  void clear();

  // The text of the system message; none if there is no such message.
  std::optional<std::string> system() const;
  // Sets it, or removes it if empty. Throws InvalidArgument when the template refuses it.
  void set_system(const std::string& text);

  const Messages& messages() const { return messages_; }
  // Throws InvalidArgument, saying which and why, when they are no messages that the template takes.
  void set_messages(Messages messages);

  // How many tokens the conversation has as a prompt.
  int64_t tokens() const { return static_cast<int64_t>(encode(messages_).size()); }
  int64_t context() const { return llm_.engine().max_sequence_length(); }
  const std::vector<engine::StopToken>& stop_tokens() const { return stop_tokens_; }

 private:
  std::vector<int32_t> encode(const Messages& messages) const { return prompt_.encode(messages, options_); }
  std::vector<int32_t> fit(Messages& messages, const engine::SamplingParams& params, const TurnEvents& events) const;
  Turn answer(Messages messages, const engine::SamplingParams& params, const TurnEvents& events);

  engine::LLM& llm_;
  engine::ChatPrompt prompt_;
  engine::ChatOptions options_;
  WhenFull when_full_;
  std::vector<engine::StopToken> stop_tokens_;
  Messages messages_;
};

// The messages in a file: a JSON array of messages, or an object that has one as `messages`. Throws NotFound, IoError,
// and DataCorrupted naming the file and the place.
Conversation::Messages read_messages(const std::string& path);
// Writes {"messages": [...]}. Throws IoError.
void write_messages(const std::string& path, const Conversation::Messages& messages);

// The text of a message's member, "" if it is absent or no text.
std::string message_text(const io::JsonValue& message, std::string_view key);

}  // namespace eadem::cli
