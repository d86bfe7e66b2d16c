// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/template/text_functions.h"

#include <algorithm>

namespace eadem::io::chat {
namespace {

bool strips(std::string_view text, size_t begin, size_t end, const std::string* chars) {
  if (chars == nullptr) return is_python_space(code_point_at(text, begin).value);
  return chars->find(text.substr(begin, end - begin)) != std::string::npos;
}

}  // namespace

Text strip_text(const Text& text, const std::string* chars, bool left, bool right) {
  const std::string_view bytes = text.bytes();
  size_t begin = 0, end = bytes.size();
  while (left && begin < end) {
    const size_t next = code_point_at(bytes, begin).end;
    if (!strips(bytes, begin, next, chars)) break;
    begin = next;
  }
  while (right && end > begin) {
    const size_t previous = code_point_before(bytes, end);
    if (!strips(bytes, previous, end, chars)) break;
    end = previous;
  }
  return text.slice(begin, end);
}

std::vector<TextRange> split_at(std::string_view text, std::string_view separator, int64_t limit, bool from_right) {
  std::vector<TextRange> parts;
  if (from_right) {
    size_t end = text.size();
    while (limit != 0 && end >= separator.size()) {
      const size_t at = text.substr(0, end).rfind(separator);
      if (at == std::string_view::npos) break;
      parts.push_back({at + separator.size(), end});
      end = at;
      --limit;
    }
    parts.push_back({0, end});
    std::reverse(parts.begin(), parts.end());
    return parts;
  }
  size_t begin = 0;
  for (size_t at; limit != 0 && (at = text.find(separator, begin)) != std::string_view::npos; --limit) {
    parts.push_back({begin, at});
    begin = at + separator.size();
  }
  parts.push_back({begin, text.size()});
  return parts;
}

std::vector<TextRange> split_at_space(std::string_view text, int64_t limit, bool from_right) {
  std::vector<TextRange> words;
  size_t begin = 0;
  bool in_word = false;
  for (size_t pos = 0; pos < text.size();) {
    const CodePoint c = code_point_at(text, pos);
    const bool space = is_python_space(c.value);
    if (space && in_word) words.push_back({begin, pos});
    if (!space && !in_word) begin = pos;
    in_word = !space;
    pos = c.end;
  }
  if (in_word) words.push_back({begin, text.size()});
  const size_t most = limit < 0 ? words.size() : static_cast<size_t>(limit) + 1;
  if (words.size() < most || limit < 0) return words;
  // What is left over is one part: it keeps the white space inside and, on its far side, loses none.
  if (from_right) {
    const size_t last = words.size() - most;
    std::vector<TextRange> parts{{0, words[last].end}};
    parts.insert(parts.end(), words.begin() + static_cast<ptrdiff_t>(last) + 1, words.end());
    return parts;
  }
  words.resize(most);
  words.back().end = text.size();
  return words;
}

Text replace_text(Heap& heap, const Text& text, std::string_view from, const Text& to, int64_t limit) {
  Text out;
  heap.charge(text.size());
  const auto put = [&](size_t begin, size_t end) {  // in the place of these bytes
    heap.charge(to.size());
    bool trusted = true;
    text.for_each_run(begin, end, [&](std::string_view, bool of_run) { trusted = trusted && of_run; });
    if (trusted) {
      out.append(to);
    } else {
      out.append(to.bytes(), false);
    }
  };
  if (from.empty()) {  // between all characters
    size_t pos = 0;
    for (; limit != 0; --limit) {
      put(pos > 0 ? pos - 1 : 0, std::min(pos + 1, text.size()));
      if (pos == text.size()) break;
      const size_t end = code_point_at(text.bytes(), pos).end;
      out.append(text, pos, end);
      pos = end;
    }
    out.append(text, pos, text.size());
    return out;
  }
  size_t done = 0;
  for (const TextRange part : split_at(text.bytes(), from, limit, false)) {
    if (done < part.begin) put(done, part.begin);
    out.append(text, part.begin, part.end);
    done = part.end;
  }
  return out;
}

Text title_text(const Text& text) {
  bool in_word = false;
  return text.map_runs([&](std::string_view run) {
    std::string out;
    for (size_t pos = 0; pos < run.size();) {
      const CodePoint c = code_point_at(run, pos);
      const std::string_view bytes = run.substr(pos, c.end - pos);
      out += in_word ? to_lower(bytes) : to_title(bytes);
      in_word = is_cased_char(c.value);
      pos = c.end;
    }
    return out;
  });
}

Text capitalize_text(const Text& text) {
  bool first = true;
  return text.map_runs([&](std::string_view run) {
    if (!first) return to_lower(run);
    first = false;
    const size_t end = code_point_at(run, 0).end;
    return to_title(run.substr(0, end)) + to_lower(run.substr(end));
  });
}

bool text_has_case(std::string_view text, bool upper) {
  bool cased = false;
  for (size_t pos = 0; pos < text.size();) {
    const CodePoint c = code_point_at(text, pos);
    if (is_cased_char(c.value)) {
      if ((upper ? is_upper_char(c.value) : is_lower_char(c.value)) == false) return false;
      cased = true;
    }
    pos = c.end;
  }
  return cased;
}

}  // namespace eadem::io::chat
