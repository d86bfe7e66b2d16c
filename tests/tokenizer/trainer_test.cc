// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <sstream>

#include "eadem/core/error.h"
#include "eadem/io/json.h"
#include "eadem/io/tokenizer/models/bpe_trainer.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "tests/tokenizer/shared_tokenizers.h"

namespace eadem::io {
namespace {

BpeTrainerOptions options_for(int32_t vocab_size, KnownPattern pattern = KnownPattern::kGpt2) {
  BpeTrainerOptions options;
  options.vocab_size = vocab_size;
  options.special_tokens = {"<|endoftext|>"};
  options.pattern = pattern;
  return options;
}

TEST(BpeTrainer, EqualsTheReferenceCase) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const auto folder = shared_tokenizers() / "bpe-training";
  BpeTrainer trainer(options_for(500));
  trainer.add_text(read_text(folder / "corpus.en"));
  const TokenizerSpec spec = trainer.train();
  std::map<int32_t, std::string> texts;
  for (const VocabEntry& entry : spec.vocab) texts.emplace(entry.id, entry.text);

  std::istringstream lines(read_text(folder / "reference-merges.txt"));
  size_t num_merges = 0;
  for (std::string line; std::getline(lines, line); ++num_merges) {
    ASSERT_LT(num_merges, spec.merges.size());
    const Merge& merge = spec.merges[num_merges];
    EXPECT_EQ(texts.at(merge.left) + " " + texts.at(merge.right), line) << "merge " << num_merges;
  }
  EXPECT_EQ(num_merges, spec.merges.size());
  const JsonReader vocab = JsonReader::read((folder / "reference-vocab.json").string());
  ASSERT_EQ(spec.vocab.size(), vocab.value().as_object().size());
  for (const VocabEntry& entry : spec.vocab) EXPECT_EQ(vocab.integer(entry.text, 0), entry.id) << entry.text;
}

// The definition, on words of at most a few letters.
std::vector<std::pair<std::string, std::string>> train_slowly(const std::vector<std::string>& words,
                                                              size_t num_merges) {
  std::vector<std::vector<std::string>> split;
  for (const std::string& word : words) {
    split.emplace_back();
    for (const char c : word) split.back().emplace_back(1, c);
  }
  std::vector<std::pair<std::string, std::string>> merges;
  while (merges.size() < num_merges) {
    std::map<std::pair<std::string, std::string>, int> counts;
    for (const auto& word : split) {
      for (size_t i = 0; i + 1 < word.size(); ++i) ++counts[{word[i], word[i + 1]}];
    }
    const auto best = std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) {
      return std::tie(a.second, a.first) < std::tie(b.second, b.first);
    });
    if (best == counts.end() || best->second < 2) break;
    merges.push_back(best->first);
    for (auto& word : split) {
      for (size_t i = 0; i + 1 < word.size(); ++i) {
        if (word[i] != best->first.first || word[i + 1] != best->first.second) continue;
        word[i] += word[i + 1];
        word.erase(word.begin() + static_cast<ptrdiff_t>(i) + 1);
      }
    }
  }
  return merges;
}

TEST(BpeTrainer, EqualsTheDefinition) {
  std::mt19937 random(5);
  for (int repeat = 0; repeat < 20; ++repeat) {
    std::vector<std::string> words;
    BpeTrainer trainer(options_for(257 + 60));
    for (int i = 0; i < 200; ++i) {
      std::string word;
      for (unsigned n = random() % 9 + 1; n > 0; --n) word += static_cast<char>('a' + random() % 3);
      words.push_back(word);
      trainer.add_text(word);
    }
    const TokenizerSpec spec = trainer.train();
    std::map<int32_t, std::string> texts;
    for (const VocabEntry& entry : spec.vocab) texts.emplace(entry.id, entry.text);
    std::vector<std::pair<std::string, std::string>> merges;
    for (const Merge& merge : spec.merges) merges.emplace_back(texts.at(merge.left), texts.at(merge.right));
    const auto expected = train_slowly(words, merges.size());
    EXPECT_EQ(merges, expected) << "repeat " << repeat;
  }
}

TEST(BpeTrainer, WritesWhatItReads) {
  const std::string text =
      "It was the best of times, it was the worst of times; it was 1775.\n\nIt\xE2\x80\x99s caf\xC3\xA9 "
      "time<|endoftext|>";
  for (const KnownPattern pattern : {KnownPattern::kGpt2, KnownPattern::kLlama3, KnownPattern::kQwen2}) {
    BpeTrainerOptions options = options_for(300, pattern);
    options.special_tokens.push_back("<s>");
    options.bos_token = "<s>";
    options.eos_token = "<|endoftext|>";
    options.add_bos = true;
    BpeTrainer trainer(options);
    trainer.add_text(text);
    const TokenizerSpec spec = trainer.train();
    const TemporaryDirectory folder;
    save_tokenizer(spec, folder.path().string());
    const Tokenizer made(spec);
    const Tokenizer read = Tokenizer::from_file(folder.path().string());
    EXPECT_EQ(made.encode(text), read.encode(text));
    EXPECT_EQ(read.encode("").size(), 1u);
    EXPECT_EQ(read.bos(), 1);
    EXPECT_EQ(read.eos(), 0);
    EXPECT_EQ(read.encode(text).back(), 0);
    EXPECT_EQ(read.decode(read.encode(text), false), "<s>" + text);
    EXPECT_LT(read.encode(text).size(), text.size() * 3 / 4);
    EXPECT_EQ(read.chat_template(), "");
    write_text(folder.path() / "chat_template.jinja", "{{ messages }}");
    EXPECT_EQ(Tokenizer::from_file(folder.path().string()).chat_template(), "{{ messages }}");
  }
}

TEST(BpeTrainer, OrderOfTextsDoesNotMatter) {
  std::vector<std::string> texts;
  std::mt19937 random(9);
  for (int i = 0; i < 300; ++i) {
    std::string text;
    for (int k = 0; k < 10; ++k)
      text += std::string(1, static_cast<char>('a' + random() % 6)) + (random() % 3 ? "" : " ");
    texts.push_back(text);
  }
  const auto train = [&] {
    BpeTrainer trainer(options_for(400));
    for (const std::string& text : texts) trainer.add_text(text);
    return to_tokenizer_json(trainer.train());
  };
  const std::string first = train();
  std::shuffle(texts.begin(), texts.end(), random);
  EXPECT_EQ(train(), first);
}

TEST(BpeTrainer, StopsWhenNothingRepeats) {
  BpeTrainer trainer(options_for(1000));
  trainer.add_text("ab ab");
  // "ab" and, as a pair of equal count, " ab" only once: one merge.
  EXPECT_EQ(trainer.train().merges.size(), 1u);
  EXPECT_EQ(BpeTrainer(options_for(1000)).train().vocab.size(), 257u);
}

TEST(BpeTrainer, RefusesBadOptions) {
  EXPECT_THROW(BpeTrainer(options_for(256)), InvalidArgument);
  EXPECT_THROW(BpeTrainer(options_for(1 << 30)), InvalidArgument);
  BpeTrainerOptions options = options_for(300);
  options.special_tokens = {"a"};
  EXPECT_THROW(BpeTrainer{options}, InvalidArgument);
  options.special_tokens = {"<s>", "<s>"};
  EXPECT_THROW(BpeTrainer{options}, InvalidArgument);
  options.special_tokens = {"<s>"};
  options.bos_token = "<bos>";
  EXPECT_THROW(BpeTrainer{options}, InvalidArgument);
  options.bos_token.reset();
  options.add_bos = true;
  EXPECT_THROW(BpeTrainer{options}, InvalidArgument);
  BpeTrainer trainer(options_for(300));
  EXPECT_THROW(trainer.add_text("a\xFF"), InvalidArgument);
}

}  // namespace
}  // namespace eadem::io
