// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/models/bpe_trainer.h"

#include <algorithm>
#include <queue>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/added_tokens.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/normalizer.h"
#include "eadem/io/tokenizer/unicode.h"

namespace eadem::io {
namespace {

struct Word {
  std::vector<int32_t> symbols;
  uint64_t count;
};

// Counts of adjacent pairs, and the words in which each has occurred.
class PairCounts {
 public:
  using Pair = uint64_t;
  static Pair key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  static int32_t left(Pair pair) { return static_cast<int32_t>(pair >> 32); }
  static int32_t right(Pair pair) { return static_cast<int32_t>(pair & UINT32_MAX); }

  explicit PairCounts(const std::vector<std::string>& tokens) : queue_(Less{&tokens}) {}

  void add(Pair pair, uint64_t count, uint32_t word) {
    Entry& entry = entries_[pair];
    entry.count += count;
    if (entry.words.empty() || entry.words.back() != word) entry.words.push_back(word);
  }
  void subtract(Pair pair, uint64_t count) { entries_.at(pair).count -= count; }
  uint64_t count(Pair pair) const {
    const auto found = entries_.find(pair);
    return found == entries_.end() ? 0 : found->second.count;
  }

  // Counts that grew must be queued again; those that shrank are corrected when they come up.
  void queue(Pair pair) { queue_.push({count(pair), pair}); }
  void queue_all() {
    for (const auto& [pair, entry] : entries_) queue_.push({entry.count, pair});
  }
  // The most frequent pair, or a count of 0.
  std::pair<uint64_t, Pair> pop() {
    while (!queue_.empty()) {
      const auto top = queue_.top();
      queue_.pop();
      const uint64_t now = count(top.second);
      if (now == top.first && now > 0) return top;
      if (now > 0) queue_.push({now, top.second});
    }
    return {0, 0};
  }
  // The words that may hold the pair. Forgets the pair's list.
  std::vector<uint32_t> take_words(Pair pair) { return std::move(entries_.at(pair).words); }

 private:
  struct Entry {
    uint64_t count = 0;
    std::vector<uint32_t> words;
  };
  struct Less {
    const std::vector<std::string>* tokens;
    bool operator()(const std::pair<uint64_t, Pair>& a, const std::pair<uint64_t, Pair>& b) const {
      if (a.first != b.first) return a.first < b.first;
      const auto text = [this](int32_t id) -> const std::string& { return (*tokens)[static_cast<size_t>(id)]; };
      // std::string compares bytes as unsigned char.
      const int by_left = text(left(a.second)).compare(text(left(b.second)));
      return by_left != 0 ? by_left < 0 : text(right(a.second)) < text(right(b.second));
    }
  };
  std::unordered_map<Pair, Entry> entries_;
  std::priority_queue<std::pair<uint64_t, Pair>, std::vector<std::pair<uint64_t, Pair>>, Less> queue_;
};

// Replaces the pair by `merged` in one word and moves the counts of the pairs around it.
void merge_word(Word& word, uint32_t word_idx, PairCounts::Pair pair, int32_t merged, PairCounts& counts,
                std::vector<PairCounts::Pair>& grown) {
  const int32_t left = PairCounts::left(pair), right = PairCounts::right(pair);
  auto& symbols = word.symbols;
  bool found = false;
  for (size_t i = 0; i + 1 < symbols.size() && !found; ++i) found = symbols[i] == left && symbols[i + 1] == right;
  if (!found) return;
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    counts.subtract(PairCounts::key(symbols[i], symbols[i + 1]), word.count);
  }
  size_t out = 0;
  for (size_t i = 0; i < symbols.size(); ++out) {
    const bool match = i + 1 < symbols.size() && symbols[i] == left && symbols[i + 1] == right;
    symbols[out] = match ? merged : symbols[i];
    i += match ? 2 : 1;
  }
  symbols.resize(out);
  for (size_t i = 0; i + 1 < symbols.size(); ++i) {
    const auto key = PairCounts::key(symbols[i], symbols[i + 1]);
    counts.add(key, word.count, word_idx);
    if (symbols[i] == merged || symbols[i + 1] == merged) grown.push_back(key);
  }
}

}  // namespace

BpeTrainer::BpeTrainer(BpeTrainerOptions options) : options_(std::move(options)) {
  const int64_t least = 256 + static_cast<int64_t>(options_.special_tokens.size());
  if (options_.vocab_size < least || options_.vocab_size > kMaxVocab) {
    throw InvalidArgument("vocab_size {}: must be in {} .. {} (256 bytes and {} special tokens)", options_.vocab_size,
                          least, kMaxVocab, options_.special_tokens.size());
  }
  if (options_.min_frequency < 1) throw InvalidArgument("min_frequency 0: must be at least 1");
  for (size_t i = 0; i < options_.special_tokens.size(); ++i) {
    const std::string& token = options_.special_tokens[i];
    if (token.empty()) throw InvalidArgument("special_tokens[{}] is empty", i);
    if (find_invalid_utf8(token) != std::string::npos) throw InvalidArgument("special_tokens[{}] is not UTF-8", i);
    std::string bytes;
    if (bytes_from_alphabet(bytes, token) && bytes.size() == 1) {
      throw InvalidArgument("special_tokens[{}] is {}, which spells a byte token", i, quote(token));
    }
    for (size_t k = 0; k < i; ++k) {
      if (options_.special_tokens[k] == token) throw InvalidArgument("special token {} is listed twice", quote(token));
    }
  }
  const auto check_role = [this](const char* role, const std::optional<std::string>& token) {
    const auto& all = options_.special_tokens;
    if (token && std::find(all.begin(), all.end(), *token) == all.end()) {
      throw InvalidArgument("{} {} is not one of special_tokens", role, quote(*token));
    }
  };
  check_role("bos_token", options_.bos_token);
  check_role("eos_token", options_.eos_token);
  check_role("pad_token", options_.pad_token);
  if (options_.add_bos && !options_.bos_token) throw InvalidArgument("add_bos without bos_token");

  std::vector<std::pair<std::string, AddedToken>> specials;
  for (const std::string& token : options_.special_tokens) {
    AddedToken added;
    added.id = 0;
    added.content = token;
    specials.emplace_back(token, added);
  }
  specials_ = std::make_unique<AddedTokenMatcher>(std::move(specials), "special_tokens");
  // Qwen2 tokenizers normalize before they split: train on what they will see.
  std::vector<NormalizerStep> steps;
  if (options_.pattern == KnownPattern::kQwen2) steps.push_back(nfc_step());
  normalizer_ = std::make_unique<Normalizer>(steps, "trainer");
}

BpeTrainer::~BpeTrainer() = default;

void BpeTrainer::add_text(std::string_view text, const std::atomic<bool>* cancel) {
  TextWork work(text.size(), cancel);
  if (const size_t bad = find_invalid_utf8(text); bad != std::string_view::npos) {
    throw InvalidArgument("training text is not UTF-8 at byte {} of {}", bad, text.size());
  }
  std::string piece;
  std::string stretch;
  for (const auto& section : specials_->split(text, true, work)) {
    if (section.id >= 0) continue;
    stretch.assign(text.substr(section.begin, section.end - section.begin));
    normalizer_->apply(stretch, work);
    for (size_t pos = 0; pos < stretch.size();) {
      work.tick();
      const size_t end = match_pattern(options_.pattern, stretch, pos);
      piece.assign(stretch, pos, end - pos);
      ++piece_counts_[piece];
      pos = end;
    }
  }
}

TokenizerSpec BpeTrainer::train(const std::atomic<bool>* cancel) const {
  TextWork work(0, cancel);
  TokenizerSpec spec;
  spec.source = "trained tokenizer";
  std::vector<std::string> tokens;  // bytes by id; the text for special tokens
  for (const std::string& token : options_.special_tokens) {
    AddedToken added;
    added.id = static_cast<int32_t>(tokens.size());
    added.content = token;
    added.special = true;
    spec.added_tokens.push_back(added);
    spec.vocab.push_back({token, added.id});
    if (options_.bos_token == token) spec.bos = added.id;
    if (options_.eos_token == token) spec.eos = added.id;
    if (options_.pad_token == token) spec.pad = added.id;
    tokens.push_back(token);
  }
  if (options_.add_bos) spec.prefix_ids = {*spec.bos};
  std::vector<int> alphabet(256);
  for (int byte = 0; byte < 256; ++byte) alphabet[static_cast<size_t>(byte)] = byte;
  std::sort(alphabet.begin(), alphabet.end(), [](int a, int b) {
    return char_from_byte(static_cast<uint8_t>(a)) < char_from_byte(static_cast<uint8_t>(b));
  });
  std::vector<int32_t> byte_ids(256);
  for (const int byte : alphabet) {
    const std::string bytes(1, static_cast<char>(byte));
    byte_ids[static_cast<size_t>(byte)] = static_cast<int32_t>(tokens.size());
    spec.vocab.push_back({alphabet_from_bytes(bytes), static_cast<int32_t>(tokens.size())});
    tokens.push_back(bytes);
  }
  tokens.reserve(static_cast<size_t>(options_.vocab_size));

  std::vector<Word> words;
  words.reserve(piece_counts_.size());
  for (const auto& [piece, count] : piece_counts_) {
    Word word{{}, count};
    for (const char byte : piece) word.symbols.push_back(byte_ids[static_cast<uint8_t>(byte)]);
    if (word.symbols.size() > 1) words.push_back(std::move(word));
  }
  PairCounts counts(tokens);
  for (size_t w = 0; w < words.size(); ++w) {
    work.tick();
    const auto& symbols = words[w].symbols;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      counts.add(PairCounts::key(symbols[i], symbols[i + 1]), words[w].count, static_cast<uint32_t>(w));
    }
  }
  counts.queue_all();

  std::unordered_map<std::string, int32_t> known;  // texts taken so far
  for (const VocabEntry& entry : spec.vocab) known.emplace(entry.text, entry.id);
  std::vector<PairCounts::Pair> grown;
  while (static_cast<int32_t>(tokens.size()) < options_.vocab_size) {
    const auto [count, pair] = counts.pop();
    if (count < options_.min_frequency) break;
    const int32_t left = PairCounts::left(pair), right = PairCounts::right(pair);
    std::string bytes = tokens[static_cast<size_t>(left)] + tokens[static_cast<size_t>(right)];
    std::string text = alphabet_from_bytes(bytes);
    // Two pairs can give one text ("a" + "aa", "aa" + "a"): the second merge then leads to the token of the
    // first. A special token's spelling stays out of reach of ordinary text.
    const auto [existing, is_new] = known.try_emplace(text, static_cast<int32_t>(tokens.size()));
    const int32_t merged = existing->second;
    if (!is_new && merged < static_cast<int32_t>(options_.special_tokens.size())) continue;
    if (is_new) {
      spec.vocab.push_back({std::move(text), merged});
      tokens.push_back(std::move(bytes));
    }
    spec.merges.push_back({left, right, merged, static_cast<uint32_t>(spec.merges.size())});
    grown.clear();
    for (const uint32_t w : counts.take_words(pair)) {
      work.tick();
      merge_word(words[w], w, pair, merged, counts, grown);
    }
    work.check();
    std::sort(grown.begin(), grown.end());
    grown.erase(std::unique(grown.begin(), grown.end()), grown.end());
    for (const auto& key : grown) counts.queue(key);
  }
  if (options_.pattern == KnownPattern::kQwen2) spec.normalizers.push_back(nfc_step());
  use_byte_level(options_.pattern, spec);
  return spec;
}

}  // namespace eadem::io
