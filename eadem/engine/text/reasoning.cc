// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/text/reasoning.h"

#include <algorithm>
#include <utility>

namespace eadem::engine {

namespace {

constexpr std::string_view kOpen = "<think>", kClose = "</think>", kSpace = " \t\r\n";

size_t first_not_space(std::string_view text) { return std::min(text.find_first_not_of(kSpace), text.size()); }

std::string_view without_end_space(std::string_view text) {
  return text.substr(0, text.find_last_not_of(kSpace) + 1);  // npos + 1 is 0
}

// The length of the longest end of `text` that begins `word` without being all of it.
size_t begun(std::string_view text, std::string_view word) {
  for (size_t length = std::min(text.size(), word.size() - 1); length > 0; --length)
    if (text.ends_with(word.substr(0, length))) return length;
  return 0;
}

}  // namespace

ReasoningSplitter::Piece ReasoningSplitter::feed(std::string_view text) {
  held_ += text;
  Piece piece;
  while (advance(piece, false)) {
  }
  return piece;
}

ReasoningSplitter::Piece ReasoningSplitter::finish() {
  Piece piece;
  while (advance(piece, true)) {
  }
  return piece;
}

bool ReasoningSplitter::advance(Piece& piece, bool at_end) {
  const size_t begin = first_not_space(held_);
  const auto go_to = [this](Place place, size_t end) {
    held_.erase(0, end);
    place_ = place;
    return true;
  };
  switch (place_) {
    case Place::before: {
      const std::string_view seen = std::string_view(held_).substr(begin);
      if (seen.starts_with(kOpen)) return go_to(Place::reasoning, begin + kOpen.size());
      if (!at_end && kOpen.starts_with(seen)) return false;
      return go_to(Place::content, 0);
    }
    case Place::reasoning: {
      const size_t close = held_.find(kClose);
      const bool ends = close != std::string::npos;
      const std::string_view inside =
          std::string_view(held_).substr(0, ends ? close : held_.size() - (at_end ? 0 : begun(held_, kClose)));
      const std::string_view text = without_end_space(inside);
      if (const size_t from = reasoning_began_ ? 0 : begin; from < text.size()) {
        piece.reasoning += text.substr(from);
        reasoning_began_ = true;
      }
      if (ends) return go_to(Place::after, close + kClose.size());
      held_.erase(0, at_end ? held_.size() : text.size());
      return false;
    }
    case Place::after:
      if (begin == held_.size()) return false;
      return go_to(Place::content, begin);
    case Place::content: piece.content += std::exchange(held_, {}); return false;
  }
  return false;
}

bool ends_inside_reasoning(std::span<const io::TextSegment> prompt) {
  return !prompt.empty() && prompt.back().trusted && without_end_space(prompt.back().text).ends_with(kOpen);
}

}  // namespace eadem::engine
