// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/generation_config.h"

#include "test_files.h"

namespace eadem::io {
namespace generation_config_test {

GenerationConfig parse(std::string_view text) { return parse_generation_config(text, "generation_config.json"); }

TEST(GenerationConfig, ReadsEveryField) {
  const GenerationConfig config = parse(R"({
    "_from_model_config": true, "transformers_version": "4.40.0",
    "do_sample": true, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.05, "typical_p": 1,
    "repetition_penalty": 1.1, "max_new_tokens": 64, "min_new_tokens": 0, "max_length": 4096, "min_length": 1,
    "bad_words_ids": [[3], [4, 5]], "suppress_tokens": [6, 7], "stop_strings": ["a", "b"], "num_return_sequences": 2,
    "num_beams": 3, "length_penalty": -0.5, "early_stopping": "never",
    "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [151643, 151645]})");
  EXPECT_EQ(config.do_sample, true);
  EXPECT_EQ(config.temperature, 0.7);
  EXPECT_EQ(config.top_k, 20);
  EXPECT_EQ(config.top_p, 0.8);
  EXPECT_EQ(config.min_p, 0.05);
  EXPECT_EQ(config.typical_p, 1.0);
  EXPECT_EQ(config.repetition_penalty, 1.1);
  EXPECT_EQ(config.max_new_tokens, 64);
  EXPECT_EQ(config.min_new_tokens, 0);
  EXPECT_EQ(config.max_length, 4096);
  EXPECT_EQ(config.min_length, 1);
  EXPECT_EQ(config.bos_token_id, 1);
  EXPECT_EQ(config.pad_token_id, 0);
  EXPECT_EQ(config.eos_token_ids, (std::vector<int64_t>{151643, 151645}));
  EXPECT_EQ(config.bad_words_ids, (std::vector<std::vector<int64_t>>{{3}, {4, 5}}));
  EXPECT_EQ(config.suppress_tokens, (std::vector<int64_t>{6, 7}));
  EXPECT_EQ(config.stop_strings, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(config.num_return_sequences, 2);
  EXPECT_EQ(config.num_beams, 3);
  EXPECT_EQ(config.length_penalty, -0.5);
  EXPECT_EQ(config.early_stopping, "never");
  EXPECT_TRUE(config.unknown_keys.empty());
  EXPECT_EQ(parse(R"({"early_stopping": true, "stop_strings": "a"})").early_stopping, "true");
}

TEST(GenerationConfig, AbsentNullAndUnknown) {
  const GenerationConfig empty = parse("{}");
  EXPECT_FALSE(empty.do_sample || empty.temperature || empty.top_k || empty.top_p || empty.bos_token_id);
  EXPECT_TRUE(empty.eos_token_ids.empty());
  const GenerationConfig config = parse(
      R"({"temperature": null, "eos_token_id": null, "pad_token_id": -1, "penalty_alpha": 4, "guidance": {"a": 1}})");
  EXPECT_FALSE(config.temperature || config.pad_token_id);
  EXPECT_TRUE(config.eos_token_ids.empty());
  EXPECT_EQ(config.unknown_keys, (std::vector<std::string>{"penalty_alpha", "guidance"}));
  EXPECT_EQ(parse(R"({"eos_token_id": 2})").eos_token_ids, std::vector<int64_t>{2});
}

TEST(GenerationConfig, RefusesByNameValueAndRange) {
  const auto refused = [](std::string_view text, std::string_view words) {
    expect_error<DataCorrupted>([&] { parse(text); }, {"generation_config.json", words});
  };
  refused(R"({"temperature": "hot"})", "'temperature' is \"hot\"; expected a number >= 0");
  refused(R"({"temperature": -1})", "'temperature' is -1");
  refused(R"({"top_k": 1.5})", "'top_k' is 1.5; expected an integer >= 0");
  refused(R"({"top_k": -1})", "'top_k' is -1");
  refused(R"({"top_p": 0})", "'top_p' is 0; expected a number in (0, 1]");
  refused(R"({"top_p": 1.5})", "'top_p' is 1.5");
  refused(R"({"min_p": 1.5})", "expected a number in [0, 1]");
  refused(R"({"typical_p": 0})", "'typical_p' is 0");
  refused(R"({"repetition_penalty": 0})", "'repetition_penalty' is 0; expected a number > 0");
  refused(R"({"max_new_tokens": 0})", "'max_new_tokens' is 0");
  refused(R"({"do_sample": 1})", "'do_sample' is 1; expected true or false");
  refused(R"({"bos_token_id": 4294967296})", "'bos_token_id' is 4294967296");
  refused(R"({"pad_token_id": -2})", "'pad_token_id' is -2");
  refused(R"({"eos_token_id": [1, -1]})", "'eos_token_id' is [1,-1]");
  refused(R"({"eos_token_id": "</s>"})", "'eos_token_id' is \"</s>\"");
  refused(R"({"bad_words_ids": [[]]})", "'bad_words_ids' is [[]]; expected a list of lists of token ids");
  refused(R"({"bad_words_ids": [[1, -1]]})", "'bad_words_ids' is [[1,-1]]");
  refused(R"({"suppress_tokens": [-5]})", "'suppress_tokens' is [-5]");
  refused(R"({"stop_strings": [""]})", "'stop_strings' is [\"\"]; expected a text or texts that are not empty");
  refused(R"({"early_stopping": 1})", "'early_stopping' is 1; expected true, false or \"never\"");
  refused(R"({"num_beams": 0})", "'num_beams' is 0");
  refused("[]", "the document is []; expected an object");
  refused("{", "byte 1");
}

TEST(GenerationConfig, SharedFiles) {
  const std::string directory = std::string(EADEM_SHARED_DATA) + "/models/random/mlxd-fixtures/";
  if (!std::filesystem::exists(directory)) GTEST_SKIP() << directory << " is absent";
  const GenerationConfig config = read_generation_config(directory + "model_config_qwen3/generation_config.json");
  EXPECT_EQ(config.temperature, 0.7);
  EXPECT_EQ(config.eos_token_ids.size(), 2u);
  expect_error<DataCorrupted>(
      [&] { read_generation_config(directory + "model_config_gen_bad/generation_config.json"); },
      {"model_config_gen_bad/generation_config.json", "'top_p' is 0"});
  expect_error<NotFound>([&] { read_generation_config(directory + "none.json"); }, {"none.json"});
}

}  // namespace generation_config_test
}  // namespace eadem::io
