// SPDX-License-Identifier: Apache-2.0
//
// BpeTrainer: learns a byte-level BPE vocabulary from texts.
//
// Ids: special tokens in the given order, the 256 bytes in the order of the byte alphabet, then one token per
// merge. Each step merges the pair that occurs most often; of equal pairs the greatest by (left bytes, right
// bytes). So the result depends on the multiset of texts alone, not on their order, the machine or the run.
// Source: Sennrich, Haddow, Birch 2016, algorithm 1; byte alphabet: Radford et al. 2019.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "eadem/io/tokenizer/files/spec.h"
#include "eadem/io/tokenizer/pattern_matchers.h"

namespace eadem::io {

class AddedTokenMatcher;
class Normalizer;

struct BpeTrainerOptions {
  int32_t vocab_size = 0;                   // at least 256 + special tokens; training stops early when nothing repeats
  std::vector<std::string> special_tokens;  // cut out of the texts; never merged
  KnownPattern pattern = KnownPattern::kGpt2;
  uint64_t min_frequency = 2;  // a pair that occurs less often is not merged
  // Roles, each one of special_tokens. With add_bos the tokenizer puts the BOS token before every text.
  std::optional<std::string> bos_token, eos_token, pad_token;
  bool add_bos = false;
};

// One thread at a time.
class BpeTrainer {
 public:
  // Throws InvalidArgument naming the option.
  explicit BpeTrainer(BpeTrainerOptions options);
  ~BpeTrainer();

  // Adds a text. Throws InvalidArgument, naming the byte offset, when `text` is not UTF-8. Pieces never span two texts.
  // Once `cancel` is set, add_text() and train() throw Cancelled.
  void add_text(std::string_view text, const std::atomic<bool>* cancel = nullptr);

  // Trains a tokenizer on the texts so far. Work is proportional to the distinct pieces that each merge touches.
  TokenizerSpec train(const std::atomic<bool>* cancel = nullptr) const;

 private:
  BpeTrainerOptions options_;
  std::unique_ptr<const AddedTokenMatcher> specials_;
  std::unique_ptr<const Normalizer> normalizer_;
  std::unordered_map<std::string, uint64_t> piece_counts_;
};

// Returns a specification as the text of a tokenizer.json, which from_json and the Hugging Face library read back.
// Throws Unsupported for one that the format cannot hold (extra symbols, merges of equal rank).
std::string to_tokenizer_json(const TokenizerSpec& spec);
// Returns a specification's roles and chat template as the text of a tokenizer_config.json.
std::string to_tokenizer_config_json(const TokenizerSpec& spec);
// Writes both into `directory`, which must exist, each atomically.
void save_tokenizer(const TokenizerSpec& spec, const std::string& directory);

}  // namespace eadem::io
