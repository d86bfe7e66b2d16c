// SPDX-License-Identifier: Apache-2.0
//
// ReasoningSplitter: divides a streamed answer into the model's reasoning, which stands between <think> and </think> at
// its beginning, and the answer proper. Messages keep them apart, as `reasoning_content` and `content`, so that a chat
// template can leave the reasoning of earlier turns out.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "eadem/io/text_segment.h"

namespace eadem::engine {

class ReasoningSplitter {
 public:
  struct Piece {
    std::string reasoning, content;
  };

  // `begins_inside`: the prompt ends with <think>, so the answer begins within the reasoning.
  explicit ReasoningSplitter(bool begins_inside) : place_(begins_inside ? Place::reasoning : Place::before) {}

  // Takes the next piece of the answer and returns what is known to belong to either part, however the answer is cut.
  // White space around the reasoning and before the content that follows it belongs to neither.
  Piece feed(std::string_view text);
  // Ends the answer and returns what was held back.
  Piece finish();

 private:
  enum class Place : uint8_t { before, reasoning, after, content };

  // Reads `held_` as far as its place is certain. Returns whether the place changed, so that the rest can be read.
  bool advance(Piece& piece, bool at_end);

  Place place_;
  std::string held_;
  bool reasoning_began_ = false;
};

// Whether a prompt that a chat template wrote ends within the reasoning: with <think>, written by the template.
bool ends_inside_reasoning(std::span<const io::TextSegment> prompt);

}  // namespace eadem::engine
