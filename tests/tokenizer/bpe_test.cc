// SPDX-License-Identifier: Apache-2.0
//
// Merging itself: against a slow, obvious version, and in time on hostile texts.
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>
#include <thread>

#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_model.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "tests/tokenizer/shared_tokenizers.h"
#include "tests/tokenizer/small_goldens.h"

namespace eadem::io {
namespace {

// Random merges over the letters a .. d; tokens up to eight letters.
TokenizerSpec random_spec(unsigned seed) {
  std::mt19937 random(seed);
  TokenizerSpec spec;
  spec.source = "random";
  std::map<std::string, int32_t> ids;
  for (const char* c : {"a", "b", "c", "d"}) {
    ids.emplace(c, static_cast<int32_t>(ids.size()));
    spec.vocab.push_back({c, ids.at(c)});
  }
  while (spec.merges.size() < 60) {
    const std::string left = spec.vocab[random() % spec.vocab.size()].text;
    const std::string right = spec.vocab[random() % spec.vocab.size()].text;
    const std::string joined = left + right;
    if (joined.size() > 8 || ids.contains(joined)) continue;
    ids.emplace(joined, static_cast<int32_t>(ids.size()));
    spec.vocab.push_back({joined, ids.at(joined)});
    spec.merges.push_back({ids.at(left), ids.at(right), ids.at(joined), static_cast<uint32_t>(spec.merges.size())});
  }
  return spec;
}

// The definition: while any pair merges, merge the leftmost of lowest rank.
std::vector<int32_t> encode_slowly(const TokenizerSpec& spec, const std::string& text) {
  std::vector<int32_t> ids;
  for (const char c : text) ids.push_back(c - 'a');
  while (true) {
    size_t best_at = ids.size();
    const Merge* best = nullptr;
    for (size_t i = 0; i + 1 < ids.size(); ++i) {
      for (const Merge& merge : spec.merges) {
        if (merge.left != ids[i] || merge.right != ids[i + 1]) continue;
        if (best == nullptr || merge.rank < best->rank) best = &merge, best_at = i;
      }
    }
    if (best == nullptr) return ids;
    ids[best_at] = best->result;
    ids.erase(ids.begin() + static_cast<ptrdiff_t>(best_at) + 1);
  }
}

TEST(Bpe, EqualsTheDefinition) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    const TokenizerSpec spec = random_spec(seed);
    const BpeModel model(spec, true);
    BpeModel::Scratch scratch;
    std::mt19937 random(seed + 100);
    // Lengths on both sides of the change from the scan to the heap, which is at 48 symbols.
    for (const size_t length : {0, 1, 2, 3, 7, 20, 47, 48, 49, 50, 100, 300}) {
      for (int repeat = 0; repeat < 5; ++repeat) {
        std::string text;
        for (size_t i = 0; i < length; ++i) text += static_cast<char>('a' + random() % (repeat == 0 ? 1 : 4));
        std::vector<int32_t> ids;
        TextWork work(text.size());
        model.encode(text, scratch, ids, work);
        EXPECT_EQ(ids, encode_slowly(spec, text)) << "seed " << seed << ", " << text;
      }
    }
  }
}

// A text is cut at U+2581 only where no merge can join: with and without the cut the ids agree.
TEST(Bpe, MetaspaceCutIsExact) {
  const std::string mark = "\xE2\x96\x81";
  TokenizerSpec spec;
  spec.source = "metaspace";
  for (const std::string& text : {mark, std::string("a"), mark + mark, mark + "a", std::string("aa"), "a" + mark}) {
    spec.vocab.push_back({text, static_cast<int32_t>(spec.vocab.size())});
  }
  spec.merges = {{0, 0, 2, 0}, {0, 1, 3, 1}, {1, 1, 4, 2}};
  EXPECT_TRUE(BpeModel(spec, false).splits_at_metaspace());
  std::mt19937 random(3);
  const Tokenizer tokenizer(spec);
  const BpeModel model(spec, false);
  BpeModel::Scratch scratch;
  for (int i = 0; i < 2000; ++i) {
    std::string text;
    for (unsigned n = random() % 20; n > 0; --n) text += random() % 2 ? mark : "a";
    std::vector<int32_t> whole;
    TextWork work(text.size());
    model.encode(text, scratch, whole, work);
    EXPECT_EQ(tokenizer.encode(text), whole) << text;
  }
  spec.merges.push_back({1, 0, 5, 3});
  EXPECT_FALSE(BpeModel(spec, false).splits_at_metaspace());
}

// Tokens that are all made of each other, and one token of two million characters: every way to split each of them, as
// the definition finds it, and no more time than reading them takes.
TEST(Bpe, MergesOfRanksAreAllSplits) {
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 30; ++repeat) {
    std::vector<std::string> texts;
    std::set<std::string> known;
    while (texts.size() < 40) {
      std::string text;
      for (unsigned n = random() % 7 + 1; n > 0; --n) text += random() % 3 == 0 ? "\xC3\xA9" : random() % 2 ? "a" : "b";
      if (known.insert(text).second) texts.push_back(text);
    }
    std::vector<uint32_t> ranks(texts.size());
    for (uint32_t& rank : ranks) rank = random() % 8 == 0 ? MergeTable::kNoRank : random() % 20;
    for (const bool byte_level : {false, true}) {
      TokenizerSpec spec;
      merges_from_ranks(texts, ranks, byte_level, spec);
      const auto text_of = [&](int32_t id) {
        return id < kMaxVocab ? texts[static_cast<size_t>(id)]
                              : spec.extra_symbols[static_cast<size_t>(id - kMaxVocab)];
      };
      std::set<std::string> parts(spec.extra_symbols.begin(), spec.extra_symbols.end());
      for (size_t id = 0; id < texts.size(); ++id) {
        if (ranks[id] != MergeTable::kNoRank) parts.insert(texts[id]);
      }
      std::vector<std::tuple<std::string, std::string, uint32_t>> expected, found;
      for (size_t id = 0; id < texts.size(); ++id) {
        for (size_t cut = 1; cut < texts[id].size() && ranks[id] != MergeTable::kNoRank; ++cut) {
          const std::string left = texts[id].substr(0, cut), right = texts[id].substr(cut);
          if (parts.contains(left) && parts.contains(right)) expected.emplace_back(left, right, ranks[id]);
        }
      }
      for (const Merge& merge : spec.merges) {
        found.emplace_back(text_of(merge.left), text_of(merge.right), merge.rank);
        EXPECT_EQ(text_of(merge.left) + text_of(merge.right), text_of(merge.result));
      }
      EXPECT_EQ(found, expected);
    }
  }
}

TEST(Bpe, AHugeTokenLoadsInLinearTime) {
  GgufTokenizerData data;
  data.source = "huge.gguf";
  data.model = "llama";
  data.tokens = {"<unk>", "a", "b", "aa", std::string(2 << 20, 'a') + "b"};
  data.scores = {0, -1, -1, -2, -3};
  data.token_types = {2, 1, 1, 1, 1};
  data.unk = 0;
  data.add_bos = false;
  data.add_space_prefix = false;
  const Tokenizer tokenizer = Tokenizer::from_gguf(data);
  EXPECT_EQ(tokenizer.encode("aaab"), (std::vector<int32_t>{3, 1, 2}));
  EXPECT_EQ(tokenizer.encode(data.tokens[4]).size(), (1u << 20) + 1);
  const std::atomic<bool> cancel = true;
  EXPECT_THROW(Tokenizer::from_gguf(data, &cancel), Cancelled);
}

// Tokens a, aa, aaa ... are made of each other in as many ways as half the square of their number.
TEST(Bpe, TooManyMergesAreRefused) {
  GgufTokenizerData data;
  data.source = "chain.gguf";
  data.model = "llama";
  for (size_t n = 1; n <= 6000; ++n) data.tokens.push_back(std::string(n, 'a'));
  data.scores.assign(data.tokens.size(), 0);
  EXPECT_THROW(Tokenizer::from_gguf(data), DataCorrupted);
}

// Many pieces and no U+2581 in them: looking for one must stop at the end of the piece.
TEST(Bpe, PiecesWithoutMetaspaceTakeLinearTime) {
  TokenizerSpec spec;
  spec.source = "metaspace";
  spec.vocab = {{"\xE2\x96\x81", 0}, {"a", 1}};
  PreTokenizerStep split{};
  split.kind = PreTokenizerStep::Kind::kSplit;
  split.pattern = {Pattern::Kind::kString, "a"};
  spec.pre_tokenizers = {split};
  const std::string text(2 << 20, 'a');
  EXPECT_EQ(Tokenizer(spec).encode(text).size(), text.size());
}

// Quadratic work on these texts would take hours; the test's own timeout is the assertion.
void expect_hostile_texts_return(const std::vector<const Tokenizer*>& tokenizers) {
  std::mt19937 random(1);
  std::string letters;
  for (int i = 0; i < 1 << 20; ++i) letters += static_cast<char>('a' + random() % 26);
  const std::string same(1 << 20, 'a'), spaces(1 << 20, ' '), breaks(1 << 20, '\n');
  std::string emoji;
  while (emoji.size() < 1 << 20) emoji += "\xF0\x9F\xA6\x99";
  for (const std::string& text : {letters, same, spaces, breaks, emoji}) {
    for (const Tokenizer* tokenizer : tokenizers) {
      const auto ids = tokenizer->encode(text);
      EXPECT_TRUE(tokenizer->decode(ids) == text);
    }
  }
}

TEST(Bpe, HostileTextsTakeLinearithmicTime) {
  const JsonReader goldens = read_golden("pre_types.json");
  const Tokenizer stories = stories_tokenizer();
  std::vector<Tokenizer> byte_level;
  for (const char* name : {"gpt-2", "gpt-4o", "kimi-k2", "deepseek-llm"}) {
    byte_level.push_back(Tokenizer::from_gguf(small_gguf(goldens, "byte_level", name)));
  }
  std::vector<const Tokenizer*> all = {&stories};
  for (const Tokenizer& tokenizer : byte_level) all.push_back(&tokenizer);
  expect_hostile_texts_return(all);
}

TEST(Bpe, HostileTextsTakeLinearithmicTimeInRealVocabularies) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const std::string folder = shared_tokenizers().string();
  const Tokenizer gpt2 =
      Tokenizer::from_vocab_and_merges(folder + "/gpt2/vocab.json", folder + "/gpt2/merges.txt", KnownPattern::kGpt2);
  const Tokenizer llama2 = Tokenizer::from_json(repaired_llama2_json(), "", "llama2");
  expect_hostile_texts_return({&gpt2, &llama2});
}

TEST(Bpe, ManyThreadsShareATokenizer) {
  const JsonReader goldens = read_golden("pre_types.json");
  const Tokenizer tokenizer = Tokenizer::from_gguf(small_gguf(goldens, "byte_level", "gpt-4o"));
  std::string text;
  for (const std::string& part : goldens.strings("texts")) text += part + "\n";
  while (text.size() < 100000) text += text;
  const auto expected = tokenizer.encode(text);
  std::vector<std::thread> threads;
  std::atomic<int> num_equal = 0;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      if (tokenizer.encode(text) == expected && tokenizer.decode(expected) == text) ++num_equal;
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_equal, 4);
}

}  // namespace
}  // namespace eadem::io
