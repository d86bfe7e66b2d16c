// SPDX-License-Identifier: Apache-2.0
//
// Ids against two independent references: the golden files of llama.cpp and the Hugging Face `tokenizers` package
// (tests/data/tokenizer/make_goldens.py).
#include <sstream>

#include "eadem/core/error.h"
#include "eadem/io/files/sha256.h"
#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/io/tokenizer/tokenizer.h"
#include "tests/tokenizer/shared_tokenizers.h"

namespace eadem::io {
namespace {

std::string path(const std::string& name) { return (shared_tokenizers() / name).string(); }

Tokenizer load_gpt2() {
  return Tokenizer::from_vocab_and_merges(path("gpt2/vocab.json"), path("gpt2/merges.txt"), KnownPattern::kGpt2);
}
Tokenizer load_qwen2() { return Tokenizer::from_file(path("qwen2")); }
Tokenizer load_llama3() { return Tokenizer::from_file(path("llama3/tokenizer.model")); }
Tokenizer load_llama2() {
  return Tokenizer::from_json(repaired_llama2_json(), read_text(path("llama2-hf/tokenizer_config.json")), "llama2");
}
Tokenizer load_gguf(const std::string& name) {
  return tokenizer_from_gguf(*GgufFile::open(path("ggml-vocab/ggml-vocab-" + name + ".gguf")));
}

std::vector<std::string> split(const std::string& text, const std::string& separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  for (size_t at; (at = text.find(separator, begin)) != std::string::npos; begin = at + separator.size()) {
    parts.push_back(text.substr(begin, at - begin));
  }
  parts.push_back(text.substr(begin));
  return parts;
}

// Cases are separated by a marker line; the ids of each are one line, without BOS.
void expect_ggml_goldens(const Tokenizer& tokenizer, const std::string& name, bool leading_space) {
  const std::string base = path("ggml-vocab/ggml-vocab-" + name + ".gguf");
  const auto texts = split(read_text(base + ".inp"), "\n__ggml_vocab_test__\n");
  std::istringstream lines(read_text(base + ".out"));
  int num_cases = 0;
  for (const std::string& text : texts) {
    std::string line;
    std::getline(lines, line);
    std::istringstream numbers(line);
    std::vector<int32_t> expected;
    for (int32_t id; numbers >> id;) expected.push_back(id);
    const auto ids = tokenizer.encode(text, {.add_special_tokens = false});
    EXPECT_EQ(ids, expected) << name << " case " << num_cases << ": '" << text << "'";
    EXPECT_EQ(tokenizer.decode(ids, false), text) << name << " case " << num_cases;
    ++num_cases;
  }
  EXPECT_EQ(num_cases, 47);
  std::string rest;
  EXPECT_FALSE(std::getline(lines, rest) && !rest.empty());
  EXPECT_EQ(tokenizer.encode("x", {.add_special_tokens = false}).size(), 1u);
  EXPECT_EQ(tokenizer.token_bytes(tokenizer.encode("x", {.add_special_tokens = false})[0]), leading_space ? " x" : "x");
}

TEST(GgmlGoldens, LlamaSpm) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_ggml_goldens(load_gguf("llama-spm"), "llama-spm", true);
}
TEST(GgmlGoldens, LlamaSpmFromTokenizerJson) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_ggml_goldens(load_llama2(), "llama-spm", true);
}
TEST(GgmlGoldens, LlamaBpeFromTiktoken) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_ggml_goldens(load_llama3(), "llama-bpe", false);
}
TEST(GgmlGoldens, Qwen2FromVocabAndMerges) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_ggml_goldens(load_qwen2(), "qwen2", false);
}
TEST(GgmlGoldens, Gpt2) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_ggml_goldens(load_gguf("gpt-2"), "gpt-2", false);
}
TEST(GgmlGoldens, Gpt2FromVocabAndMerges) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_ggml_goldens(load_gpt2(), "gpt-2", false);
}
TEST(GgmlGoldens, DeepseekLlm) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_ggml_goldens(load_gguf("deepseek-llm"), "deepseek-llm", false);
}

void expect_hf_goldens(const Tokenizer& tokenizer, const std::string& name) {
  const JsonReader goldens = JsonReader::read(std::string(EADEM_SOURCE_DIR) + "/tests/data/tokenizer/goldens.json");
  const JsonReader golden = goldens.object("tokenizers").object(name);
  const std::string wiki = read_text(wiki_path());
  const auto ids = tokenizer.encode(wiki, {.add_special_tokens = false});
  EXPECT_EQ(static_cast<int64_t>(ids.size()), golden.integer("wiki_count", 0));
  const auto first = golden.integers("wiki_first", 0);
  ASSERT_GE(ids.size(), first.size());
  for (size_t i = 0; i < first.size(); ++i) EXPECT_EQ(ids[i], first[i]) << i;
  std::string packed;
  for (const int32_t id : ids) {
    for (int shift = 0; shift < 32; shift += 8) packed.push_back(static_cast<char>(id >> shift & 0xFF));
  }
  EXPECT_EQ(sha256_hex(packed), golden.string("wiki_sha256"));
  const std::string decoded = tokenizer.decode(ids, false);
  EXPECT_EQ(sha256_hex(decoded), golden.string("wiki_decoded_sha256"));
  EXPECT_TRUE(decoded == wiki) << "decode(encode(wiki.test.raw)) differs";

  const auto texts = goldens.strings("texts");
  const auto& text_ids = golden.raw("text_ids")->as_array();
  ASSERT_EQ(texts.size(), text_ids.size());
  for (size_t i = 0; i < texts.size(); ++i) {
    std::vector<int32_t> expected;
    for (const JsonValue& id : text_ids[i].as_array()) expected.push_back(static_cast<int32_t>(id.as_integer()));
    EXPECT_EQ(tokenizer.encode(texts[i], {.add_special_tokens = false}), expected) << name << " text " << i;
  }
}

TEST(HuggingFaceGoldens, Gpt2) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_hf_goldens(load_gpt2(), "gpt2");
}
TEST(HuggingFaceGoldens, Qwen2) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_hf_goldens(load_qwen2(), "qwen2");
}
TEST(HuggingFaceGoldens, Llama3) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_hf_goldens(load_llama3(), "llama3");
}
TEST(HuggingFaceGoldens, Llama2) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  expect_hf_goldens(load_llama2(), "llama2");
}
// The scores in GGUF and the merges in tokenizer.json are two orders of the same merges.
TEST(HuggingFaceGoldens, Llama2FromGguf) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const Tokenizer gguf = load_gguf("llama-spm"), json = load_llama2();
  const std::string wiki = read_text(wiki_path());
  EXPECT_TRUE(gguf.encode(wiki) == json.encode(wiki));
  EXPECT_EQ(gguf.vocab_size(), json.vocab_size());
}

TEST(SharedTokenizers, DamagedLlama2IsRefused) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  EXPECT_THROW(Tokenizer::from_file(path("llama2-hf")), DataCorrupted);
}

TEST(SharedTokenizers, RolesAndTemplates) {
  EADEM_SKIP_WITHOUT_SHARED_TOKENIZERS();
  const Tokenizer qwen2 = load_qwen2();
  EXPECT_EQ(qwen2.bos(), std::nullopt);
  EXPECT_EQ(qwen2.eos(), 151643);
  EXPECT_EQ(qwen2.pad(), 151643);
  EXPECT_TRUE(qwen2.is_special(151644));
  EXPECT_NE(qwen2.chat_template().find("<|im_start|>"), std::string::npos);
  EXPECT_EQ(qwen2.encode("<|im_end|>").size(), 1u);
  EXPECT_GT(qwen2.encode("<|im_end|>", {.parse_special = false}).size(), 1u);
  EXPECT_EQ(qwen2.decode(qwen2.encode("<|im_start|>hi<|im_end|>")), "hi");

  const Tokenizer llama2 = load_llama2();
  EXPECT_EQ(llama2.bos(), 1);
  EXPECT_EQ(llama2.eos(), 2);
  EXPECT_EQ(llama2.unk(), 0);
  EXPECT_EQ(llama2.encode("hi"), (std::vector<int32_t>{1, 7251}));
  EXPECT_EQ(llama2.decode(llama2.encode("hi")), "hi");

  const Tokenizer llama3 = load_llama3();
  EXPECT_EQ(llama3.vocab_size(), 128256);
  EXPECT_EQ(llama3.token_text(128009), "<|eot_id|>");
  EXPECT_EQ(llama3.token_text(128255), "<|reserved_special_token_247|>");
  EXPECT_EQ(llama3.encode("").front(), 128000);
}

}  // namespace
}  // namespace eadem::io
