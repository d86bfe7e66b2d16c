// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/models/token_model.h"

#include "eadem/core/error.h"
#include "eadem/io/tokenizer/models/bpe_model.h"
#include "eadem/io/tokenizer/models/unigram_model.h"
#include "eadem/io/tokenizer/models/word_piece_model.h"

namespace eadem::io {

std::unique_ptr<const TokenModel> make_token_model(const TokenizerSpec& spec, bool byte_level) {
  using Model = TokenizerSpec::Model;
  if (spec.model == Model::kBpe) return std::make_unique<const BpeModel>(spec, byte_level);
  if (byte_level) throw Unsupported("{}: pre_tokenizer: ByteLevel with a model other than BPE", spec.source);
  if (spec.model == Model::kUnigram) return std::make_unique<const UnigramModel>(spec);
  return std::make_unique<const WordPieceModel>(spec);
}

std::vector<int32_t> byte_token_ids(const TokenizerSpec& spec) {
  StringMap<int32_t> ids;
  for (const VocabEntry& entry : spec.vocab) {
    if (entry.text.size() == 6 && entry.text.starts_with("<0x")) ids.emplace(entry.text, entry.id);
  }
  std::vector<int32_t> result(256, -1);
  for (size_t byte = 0; byte < result.size(); ++byte) {
    const auto found = ids.find(fmt::format("<0x{:02X}>", byte));
    if (found != ids.end()) result[byte] = found->second;
  }
  return result;
}

}  // namespace eadem::io
