// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>

#include "eadem/core/error.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_model.h"

namespace eadem::io {
namespace {

AddedToken read_added(const JsonReader& reader) {
  AddedToken token;
  token.content = reader.string("content");
  token.lstrip = reader.optional_boolean("lstrip").value_or(false);
  token.rstrip = reader.optional_boolean("rstrip").value_or(false);
  token.single_word = reader.optional_boolean("single_word").value_or(false);
  token.special = reader.optional_boolean("special").value_or(false);
  token.normalized = reader.optional_boolean("normalized").value_or(!token.special);
  return token;
}

std::optional<int32_t> find_id(const TokenizerSpec& spec, std::string_view text) {
  for (const AddedToken& token : spec.added_tokens) {
    if (token.content == text) return token.id;
  }
  for (const VocabEntry& entry : spec.vocab) {
    if (entry.text == text) return entry.id;
  }
  return std::nullopt;
}

// bos_token and its kin: a string, or an object with `content`.
void read_role(const JsonReader& config, std::string_view key, const TokenizerSpec& spec, std::optional<int32_t>& id) {
  if (!config.has(key)) return;
  const JsonValue* value = config.raw(key);
  const std::string text = value->is_object() ? config.object(key).string("content") : config.string(key);
  id = find_id(spec, text);
  if (!id)
    throw DataCorrupted("{}: {} is {}, which is not a token of {}", config.file(), key, quote(text), spec.source);
}

// Hugging Face tokenizer classes rebuild the template from these two switches when a file has them.
void apply_switch(const JsonReader& config, std::string_view key, std::string_view role,
                  const std::optional<int32_t>& id, std::vector<int32_t>& ids, bool at_front) {
  const auto wanted = config.optional_boolean(key);
  if (!wanted) return;
  if (*wanted && !id) throw DataCorrupted("{}: {} is true, but there is no {}", config.file(), key, role);
  if (!id) return;
  const bool present = std::find(ids.begin(), ids.end(), *id) != ids.end();
  if (*wanted && !present) {
    ids.insert(at_front ? ids.begin() : ids.end(), *id);
  } else if (!*wanted && present) {
    std::erase(ids, *id);
  }
}

}  // namespace

void apply_tokenizer_config(const JsonReader& config, TokenizerSpec& spec) {
  if (const auto added = config.optional_object("added_tokens_decoder")) {
    StringMap<int32_t> ids;
    for (const AddedToken& token : spec.added_tokens) ids.emplace(token.content, token.id);
    for (const auto& [key, reader] : added->members()) {
      int32_t id = -1;
      const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
      if (error != std::errc() || end != key.data() + key.size() || id < 0 || id >= kMaxVocab) {
        throw DataCorrupted("{}: added_tokens_decoder: {} is not an id in 0 .. {}", config.file(), quote(key),
                            kMaxVocab - 1);
      }
      AddedToken token = read_added(reader);
      token.id = id;
      const auto [known, is_new] = ids.emplace(token.content, id);
      if (is_new) {
        spec.added_tokens.push_back(std::move(token));
      } else if (known->second != id) {
        throw DataCorrupted("{}: added_tokens_decoder gives {} the id {}; {} gives it {}", config.file(),
                            quote(token.content), id, spec.source, known->second);
      }
    }
  }
  read_role(config, "bos_token", spec, spec.bos);
  read_role(config, "eos_token", spec, spec.eos);
  read_role(config, "unk_token", spec, spec.unk);
  read_role(config, "pad_token", spec, spec.pad);
  apply_switch(config, "add_bos_token", "bos_token", spec.bos, spec.prefix_ids, true);
  apply_switch(config, "add_eos_token", "eos_token", spec.eos, spec.suffix_ids, false);
  spec.chat_templates = config_chat_templates(config);
}

}  // namespace eadem::io
