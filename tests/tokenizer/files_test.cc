// SPDX-License-Identifier: Apache-2.0
//
// Tokenizers as the files beside a model: what is written reads back as the same tokenizer.
#include "eadem/core/error.h"
#include "eadem/io/gguf.h"
#include "eadem/io/tokenizer/files/tokenizer_files.h"
#include "eadem/io/tokenizer/models/bpe_trainer.h"
#include "tests/tokenizer/shared_tokenizers.h"

namespace eadem::io {
namespace {

namespace fs = std::filesystem;

std::vector<std::string> names(const std::vector<TokenizerFile>& files) {
  std::vector<std::string> result;
  for (const TokenizerFile& file : files) result.push_back(file.name);
  return result;
}

TEST(TokenizerFiles, OfADirectoryAreItsOwn) {
  const TemporaryDirectory from, to;
  BpeTrainer trainer({.vocab_size = 300, .special_tokens = {"<|end|>"}, .eos_token = "<|end|>"});
  trainer.add_text("the cat and the dog and the cat");
  save_tokenizer(trainer.train(), from.path().string());
  write_text(from.path() / "chat_template.jinja", "{{ messages }}");
  fs::create_directory(from.path() / "additional_chat_templates");
  write_text(from.path() / "additional_chat_templates/tool_use.jinja", "{{ tools }}");
  write_text(from.path() / "notes.txt", "no tokenizer's");
  const auto files = tokenizer_files(from.path().string());
  const std::vector<std::string> templates = {"chat_template.jinja", "additional_chat_templates/tool_use.jinja"};
  EXPECT_EQ(names(files),
            (std::vector<std::string>{"tokenizer.json", "tokenizer_config.json", templates[0], templates[1]}));
  write_tokenizer_files(files, to.path().string());
  for (const std::string& name : names(files)) EXPECT_EQ(read_text(to.path() / name), read_text(from.path() / name));

  // A file given by name gets the name that readers of a directory look for.
  fs::rename(from.path() / "tokenizer.json", from.path() / "mine.json");
  EXPECT_EQ(names(tokenizer_files((from.path() / "mine.json").string())), names(files));
  EXPECT_EQ(names(tokenizer_files(from.path().string())),
            (std::vector<std::string>{"tokenizer_config.json", templates[0], templates[1]}));
  EXPECT_THROW(tokenizer_files((from.path() / "absent.json").string()), NotFound);
  EXPECT_THROW(write_tokenizer_files(files, (to.path() / "absent").string()), IoError);
}

TEST(TokenizerFiles, OfAGgufFileReadItsTextsAlike) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  for (const char* name : {"llama-spm", "gpt-2", "qwen2", "llama-bpe"}) {
    const std::string path =
        (shared_tokenizers() / "ggml-vocab" / (std::string("ggml-vocab-") + name + ".gguf")).string();
    if (!fs::exists(path)) continue;
    const TemporaryDirectory to;
    write_tokenizer_files(tokenizer_files(path), to.path().string());
    const Tokenizer gguf = tokenizer_from_gguf(*GgufFile::open(path)), json = Tokenizer::from_file(to.path().string());
    const std::string wiki = read_text(wiki_path()).substr(0, 50000);
    EXPECT_EQ(gguf.encode(wiki), json.encode(wiki)) << name;
    EXPECT_EQ(gguf.eos(), json.eos()) << name;
    EXPECT_EQ(gguf.bos(), json.bos()) << name;
  }
}

}  // namespace
}  // namespace eadem::io
