// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/tokenizer/files/tokenizer_files.h"

#include <algorithm>
#include <filesystem>

#include "eadem/core/error.h"
#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/text.h"
#include "eadem/io/tokenizer/files/readers.h"
#include "eadem/io/tokenizer/models/bpe_trainer.h"

namespace eadem::io {

namespace fs = std::filesystem;

std::vector<std::string> tokenizer_probes(const Tokenizer& tokenizer) {
  std::vector<std::string> texts = {
      "",
      "Once upon a time, there was a little girl named Lily. She didn't like IT'S or we'LL!",
      "  two  spaces,\ttabs\r\n\nand   lines \n ends ",
      "1 12 123 1234 12345 1,234.5 3.14159e-10 x2y3 \xC2\xBD \xE2\x85\xA7",
      "int main(void) { return a[i] += ~b ^ 0xFF; } // $#@!? <|none|> <s> </s>",
      "na\xC3\xAFve caf\xC3\xA9 \xC3\x9F\xC3\x84 e\xCC\x81 \xE2\x80\x94 \xE2\x80\x9Cquoted\xE2\x80\x9D\xE2\x80\xA6",
      "\xD0\x9F\xD1\x80\xD0\xB8\xD0\xB2\xD0\xB5\xD1\x82 \xE4\xBD\xA0\xE5\xA5\xBD\xE4\xB8\x96\xE7\x95\x8C "
      "\xE3\x81\x93\xE3\x82\x93 \xD8\xB3\xD9\x84\xD8\xA7\xD9\x85 "
      "\xF0\x9F\x98\x80\xF0\x9F\x91\xA8\xE2\x80\x8D\xF0\x9F\x91\xA9",
      std::string("\x01\x7F\0 ", 4) + "\xC2\xA0\xE3\x80\x80.",
  };
  std::string line;
  for (int32_t id = 0; id < tokenizer.vocab_size(); ++id) {
    if (!tokenizer.is_token(id) || tokenizer.is_special(id)) continue;
    const int32_t ids[] = {id};
    line += tokenizer.decode(ids, false);
    if (line.size() > 2000) texts.push_back(std::exchange(line, {}));
  }
  texts.push_back(line);
  return texts;
}

void require_same_tokens(const Tokenizer& from, const Tokenizer& to, std::string_view format) {
  for (const std::string& text : tokenizer_probes(from)) {
    std::vector<int32_t> a, b;
    try {
      a = from.encode(text);
    } catch (const InvalidArgument&) {
      continue;  // a vocabulary without this character
    }
    b = to.encode(text);
    if (a != b || from.decode(a) != to.decode(b))
      throw Unsupported("{}: this tokenizer has no form in {}: it would read {} differently", from.source(), format,
                        quote(text));
  }
}

std::vector<TokenizerFile> tokenizer_files(const GgufFile& file) {
  const TokenizerSpec original = spec_from_gguf(gguf_tokenizer_data(file));
  TokenizerSpec spec = original;
  // tokenizer.json has no equal ranks: among merges into tokens of equal score, the one with the lowest id goes first.
  // The check below finds out whether that changes anything.
  std::stable_sort(spec.merges.begin(), spec.merges.end(),
                   [](const Merge& a, const Merge& b) { return a.rank < b.rank; });
  for (size_t i = 0; i < spec.merges.size(); ++i) spec.merges[i].rank = static_cast<uint32_t>(i);
  std::vector<TokenizerFile> files = {{"tokenizer.json", to_tokenizer_json(spec)},
                                      {"tokenizer_config.json", to_tokenizer_config_json(spec)}};
  require_same_tokens(Tokenizer(original), Tokenizer::from_json(files[0].content, files[1].content, file.path()),
                      "tokenizer.json");
  return files;
}

std::vector<TokenizerFile> tokenizer_files(const std::string& path) {
  if (is_gguf_file(path)) return tokenizer_files(*GgufFile::open(path));
  std::error_code ignored;
  const bool directory = fs::is_directory(path, ignored);
  const fs::path folder = directory ? fs::path(path) : fs::path(path).parent_path();
  std::vector<TokenizerFile> files;
  // A file given by name is returned under the name that readers of a directory look for.
  if (!directory)
    files.push_back({fs::path(path).extension() != ".model"          ? "tokenizer.json"
                     : fs::path(path).filename() == "tiktoken.model" ? "tiktoken.model"
                                                                     : "tokenizer.model",
                     read_file(path, kMaxTokenizerFileBytes)});
  for (const char* name :
       {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model", "tiktoken.model",
        "tokenization_kimi.py", "tokenization_moonshot.py", "special_tokens_map.json", "added_tokens.json"}) {
    if ((directory || std::string_view(name) == "tokenizer_config.json") && fs::exists(folder / name, ignored))
      files.push_back({name, read_file((folder / name).string(), kMaxTokenizerFileBytes)});
  }
  for (const std::string& name : template_file_names(folder.string()))
    files.push_back({name, read_file((folder / name).string(), kMaxTokenizerFileBytes)});
  return files;
}

void write_tokenizer_files(const std::vector<TokenizerFile>& files, const std::string& directory) {
  for (const TokenizerFile& file : files) {
    const fs::path path = fs::path(directory) / file.name;
    std::error_code ignored;  // the file cannot be written then
    if (fs::path(file.name).has_parent_path()) fs::create_directory(path.parent_path(), ignored);
    write_file_atomically(path.string(), file.content);
  }
}

}  // namespace eadem::io
