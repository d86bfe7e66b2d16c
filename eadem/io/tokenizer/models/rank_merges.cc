// SPDX-License-Identifier: Apache-2.0
//
// Merges of vocabularies that give every token a rank and list no merges: SentencePiece in GGUF, and tiktoken.
#include <algorithm>
#include <functional>
#include <numeric>

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_model.h"
#include "eadem/io/tokenizer/text_work.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

// A vocabulary of 262144 tokens has about 3 million merges; tokens such as a, aa, aaa ... have half their square.
constexpr size_t kMaxMerges = size_t{1} << 24;

// A token with a rank, or an extra symbol, which only ever is a part of a token.
struct Part {
  std::string_view text;
  int32_t id;
};

// Finds, for every part, the other parts that it begins with (or ends with: `less` and `contains` say which), and calls
// `found(part, those)` with indices, the shortest first.
//
// Parts are sorted, so that those beginning with a text follow it without a gap. So the parts that the current one
// begins with form a stack: one that does not fit any more will not fit later either. Comparisons take time
// proportional to the bytes of all texts, times the logarithm of their number.
template <typename Less, typename Contains, typename Found>
void for_each_with_affixes(const std::vector<Part>& parts, TextWork& work, const Less& less, const Contains& contains,
                           const Found& found) {
  std::vector<uint32_t> order(parts.size());
  std::iota(order.begin(), order.end(), 0u);
  std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    work.tick();
    return less(parts[a].text, parts[b].text);
  });
  std::vector<uint32_t> stack;
  for (const uint32_t i : order) {
    work.tick();
    while (!stack.empty() && !contains(parts[i].text, parts[stack.back()].text)) stack.pop_back();
    found(i, stack);
    stack.push_back(i);
  }
}

}  // namespace

void merges_from_ranks(const std::vector<std::string>& texts, const std::vector<uint32_t>& rank_by_id, bool byte_level,
                       TokenizerSpec& spec, const std::atomic<bool>* cancel) {
  TextWork work(0, cancel);
  const auto ranked = [&](size_t id) { return rank_by_id[id] != MergeTable::kNoRank && !texts[id].empty(); };
  std::vector<Part> parts;
  StringMap<int32_t> chars;
  StringMap<bool> seen;
  for (size_t id = 0; id < texts.size(); ++id) {
    work.tick();
    if (!ranked(id) || !seen.emplace(texts[id], true).second) continue;
    parts.push_back({texts[id], static_cast<int32_t>(id)});
    if (!byte_level && static_cast<size_t>(next_utf8(texts[id], 0).length) == texts[id].size()) {
      chars.emplace(texts[id], static_cast<int32_t>(id));
    }
  }
  const size_t num_tokens = parts.size();
  for (size_t i = 0; i < num_tokens && !byte_level; ++i) {
    const std::string_view text = parts[i].text;
    for (size_t pos = 0; pos < text.size();) {
      work.tick();
      const std::string_view c = text.substr(pos, static_cast<size_t>(next_utf8(text, pos).length));
      pos += c.size();
      const int32_t next = kMaxVocab + static_cast<int32_t>(spec.extra_symbols.size());
      if (!chars.emplace(c, next).second) continue;
      spec.extra_symbols.emplace_back(c);
      parts.push_back({c, next});
    }
  }

  // Prefixes of part i are prefixes[begin[i]] .. prefixes[begin[i] + count[i] - 1], the shortest first.
  std::vector<uint32_t> prefixes;
  std::vector<size_t> begin(parts.size()), count(parts.size());
  for_each_with_affixes(
      parts, work, std::less<>(), [](std::string_view a, std::string_view b) { return a.starts_with(b); },
      [&](uint32_t i, const std::vector<uint32_t>& stack) {
        begin[i] = prefixes.size();
        count[i] = stack.size();
        prefixes.insert(prefixes.end(), stack.begin(), stack.end());
      });
  const size_t first_merge = spec.merges.size();
  for_each_with_affixes(
      parts, work,
      [](std::string_view a, std::string_view b) {
        return std::lexicographical_compare(a.rbegin(), a.rend(), b.rbegin(), b.rend());
      },
      [](std::string_view a, std::string_view b) { return a.ends_with(b); },
      [&](uint32_t i, const std::vector<uint32_t>& suffixes) {
        if (i >= num_tokens) return;
        size_t s = suffixes.size();
        for (size_t p = begin[i]; p < begin[i] + count[i]; ++p) {
          work.tick();
          const Part& left = parts[prefixes[p]];
          const size_t rest = parts[i].text.size() - left.text.size();
          while (s > 0 && parts[suffixes[s - 1]].text.size() > rest) --s;
          if (s == 0) break;
          const Part& right = parts[suffixes[s - 1]];
          if (right.text.size() != rest) continue;
          if (spec.merges.size() >= kMaxMerges) {
            throw DataCorrupted("{}: the tokens are made of each other in more than {} ways", spec.source, kMaxMerges);
          }
          spec.merges.push_back({left.id, right.id, parts[i].id, rank_by_id[static_cast<size_t>(parts[i].id)]});
        }
      });
  // By token, and of one token the shortest left part first, as the vocabulary is read.
  std::stable_sort(spec.merges.begin() + static_cast<ptrdiff_t>(first_merge), spec.merges.end(),
                   [](const Merge& a, const Merge& b) { return a.result < b.result; });
}

}  // namespace eadem::io
