// SPDX-License-Identifier: Apache-2.0
//
// ChatTemplate: turns a conversation into the text that a chat model was trained on, as the Jinja template of its
// checkpoint says. The reference is apply_chat_template of Hugging Face transformers: Jinja's sandboxed environment
// with trim_blocks, lstrip_blocks and loop controls, `tojson`, `raise_exception`, `strftime_now` and {% generation %}.
//
// The text comes in segments. Trusted ones are written by the template; the others come from the conversation, through
// whatever filters. Tokenizer::encode(segments) reads special tokens in trusted segments only, so that no message can
// forge the end of its turn.
#pragma once

#include <cstdint>
#include <ctime>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/io/text_segment.h"

namespace eadem::io {

// Bounds one rendering, whatever the template and the conversation hold.
struct TemplateLimits {
  uint64_t max_work = 256 << 20;   // evaluated nodes plus bytes and values made
  uint64_t max_output = 64 << 20;  // bytes of the text
  int max_depth = 400;             // nested statements, expressions and macro calls
  int64_t max_range = 100'000;     // numbers of one range()
};

struct TemplateInput {
  // An object: `messages`, `tools`, `documents`, `add_generation_prompt` and whatever else the template reads. Every
  // string in it is untrusted, except roles: see ChatTemplate::render.
  JsonValue variables = JsonValue::object();
  // An object of strings that the application vouches for, such as `bos_token`; goes after `variables`.
  JsonValue trusted = JsonValue::object();
  // The time that strftime_now shows.
  std::tm now = {};
};

// Immutable: render may be called from any thread.
class ChatTemplate {
 public:
  // `name` is for messages. Throws DataCorrupted for a syntax error and Unsupported for what this interpreter does not
  // know, with the line.
  ChatTemplate(std::string_view source, std::string name);
  ~ChatTemplate();
  ChatTemplate(ChatTemplate&&) noexcept;
  ChatTemplate& operator=(ChatTemplate&&) noexcept;

  // The segments of the text, no two adjacent ones of the same trust. Where Jinja raises an error, and where the
  // template calls raise_exception, this throws InvalidArgument with the line.
  //
  // The `role` of a message is trusted if it is one of the names that templates use (user, assistant, tool ...),
  // because many templates write it into a special token, as in <|{{ message.role }}|>.
  std::vector<TextSegment> render(const TemplateInput& input, const TemplateLimits& limits = {}) const;

  // The texts of the template: what stands outside of its tags, and the strings in its expressions.
  std::vector<std::string_view> literals() const;

 private:
  struct Impl;
  std::unique_ptr<const Impl> impl_;
};

// An input with the present local time and with the special tokens of `tokenizer` (bos_token, eos_token ...).
class Tokenizer;
TemplateInput template_input(const Tokenizer& tokenizer);

// The text of segments.
std::string join_segments(std::span<const TextSegment> segments);

}  // namespace eadem::io
