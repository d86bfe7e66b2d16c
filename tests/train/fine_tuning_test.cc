// SPDX-License-Identifier: Apache-2.0
//
// Fine-tuning: from directories and from GGUF files, with the tokenizer that is there.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "eadem/engine/llm.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"
#include "eadem/train/checkpoint.h"
#include "tests/support/refusal.h"
#include "tests/train/run_fixture.h"

namespace eadem::train {
namespace {

using test::refusal;

const fs::path kStories = fs::path(EADEM_SHARED_DATA) / "models/stories260K";

class FineTuning : public TrainingRun {
 protected:
  Recipe fine_tune(const std::string& output, const std::string& from,
                   const std::string& data = "train = [\"text.txt\"]", const std::string& training = "") {
    const std::string path = (root_ / (output + ".toml")).string();
    io::write_file_atomically(path, fmt::format("[model]\ninit_from = \"{}\"\n[data]\n{}\n[training]\nsteps = 4\n"
                                                "batch_tokens = 96\nsequence_length = 24\nwarmup_steps = 0\n"
                                                "checkpoint_interval = 2\n{}\n[output]\ndirectory = \"{}\"\n",
                                                from, data, training, output));
    return load_recipe(path);
  }
  static std::string text_of(const fs::path& path) { return io::read_file(path.string(), 1 << 24); }
};

TEST_F(FineTuning, FromADirectoryWithItsTokenizerAndGenerationConfig) {
  const Recipe base = recipe("base", "f32");
  run(base, options());
  const fs::path model = fs::path(base.output) / "final";
  const std::string generation = "{\"temperature\": 0.5, \"eos_token_id\": 1}";
  io::write_file_atomically((model / "generation_config.json").string(), generation);
  const Recipe r = fine_tune("tuned", model.string(), "train = [\"text.txt\"]", "learning_rate = 5e-5");
  EXPECT_DOUBLE_EQ(r.training.min_learning_rate, 5e-6);
  run_until(r, 1);
  EXPECT_EQ(first_step_of_rest(r), 2);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"})
    EXPECT_EQ(text_of(fs::path(r.output) / "final" / name), text_of(root_ / "tokenizer" / name));
  EXPECT_EQ(text_of(fs::path(r.output) / "final/generation_config.json"), generation);

  // Other weights to begin with are another run.
  const Recipe other = recipe("base", "f32", "", 13);
  run(other, options());
  EXPECT_HAS(refusal([&] { run(r, options()); }), "model.init_from (hash of its weights) is ");
}

TEST_F(FineTuning, ATokenizerIsNeededFromScratch) {
  const std::string path = (root_ / "bare.toml").string();
  io::write_file_atomically(path,
                            "[model]\nconfig = \"config.json\"\n[data]\ntrain = [\"text.txt\"]\n[training]\n"
                            "steps = 1\n[output]\ndirectory = \"bare\"\n");
  EXPECT_HAS(refusal([&] { load_recipe(path); }), "[tokenizer] needs 'path'");
}

// Two ways to hold the same documents train the same model.
TEST_F(FineTuning, JsonLinesAndPlainTextAreTheSameDocuments) {
  const Recipe plain = recipe("plain", "f32");
  run(plain, options());
  std::string lines;
  Texts texts;
  for_each_document(texts, "text.txt", text_of(root_ / "text.txt"), [&](std::string_view text, int64_t, int64_t) {
    lines += io::to_compact_json(io::JsonValue::object().set("body", text)) + "\n";
  });
  io::write_file_atomically((root_ / "text.jsonl").string(), lines);
  std::string toml = text_of(root_ / "plain.toml");
  for (size_t at; (at = toml.find("text.txt")) != std::string::npos;) toml.replace(at, 8, "text.jsonl");
  toml.replace(toml.find("directory = \"plain\""), 19, "directory = \"lines\"");
  toml.replace(toml.find("[training]"), 10, "text_key = \"body\"\n[training]");
  io::write_file_atomically((root_ / "lines.toml").string(), toml);
  const Recipe r = load_recipe((root_ / "lines.toml").string());
  run(r, options());
  EXPECT_EQ(model_hash(r), model_hash(plain));
}

TEST_F(FineTuning, SpecialTokensInDocumentsAreReadWhenTheRecipeSaysSo) {
  const Recipe base = recipe("base", "f32");
  run(base, options());
  io::write_file_atomically((root_ / "chat.jsonl").string(), "{\"text\": \"a cat<|bos|>by the sea\"}\n");
  const auto tokens_of = [&](const std::string& output, const std::string& extra) {
    const Recipe r =
        fine_tune(output, (fs::path(base.output) / "final").string(), "train = [\"chat.jsonl\"]\n" + extra);
    run(r, options());
    return fs::file_size(fs::path(r.output) / "tokens/train.tok");
  };
  EXPECT_LT(tokens_of("read", "parse_special = true"), tokens_of("plain", ""));
}

TEST_F(FineTuning, WhatCannotBeTrainedOnIsRefusedBeforeTheFirstStep) {
  const Recipe base = recipe("base", "f32");
  run(base, options());
  const std::string model = (fs::path(base.output) / "final").string();
  const auto refused = [&](const std::string& data) {
    return refusal([&] { run(fine_tune("tuned", model, data), options()); });
  };
  io::write_file_atomically((root_ / "empty.txt").string(), "");
  io::write_file_atomically((root_ / "blank.txt").string(), " \n<|endoftext|>\n ");
  io::write_file_atomically((root_ / "bad.jsonl").string(), "{\"text\": \"a\"}\n{\"text\": \n");
  io::write_file_atomically((root_ / "bytes.txt").string(), "abc\xff");
  EXPECT_HAS(refused("train = [\"empty.txt\"]"), "nothing but white space");
  EXPECT_HAS(refused("train = [\"blank.txt\"]"), "blank.txt");
  EXPECT_HAS(refused("train = [\"text.txt\"]\neval = [\"empty.txt\"]"), "empty.txt");
  EXPECT_HAS(refused("train = [\"bad.jsonl\"]"), "bad.jsonl:2");
  EXPECT_HAS(refused("train = [\"bytes.txt\"]"), "bytes.txt: document at byte 0");
  EXPECT_HAS(refused("train = [\"absent.txt\"]"), "absent.txt: No such file");
  EXPECT_HAS(refused("train = [\".\"]"), "it is a directory");
  ASSERT_EQ(::mkfifo((root_ / "fifo").c_str(), 0600), 0);
  EXPECT_HAS(refused("train = [\"fifo\"]"), "not a regular file");
  EXPECT_HAS(refused("train = [\"text.txt\"]\nformat = \"json\""),
             "'data.format' is 'json'; expected one of text, jsonl");
  EXPECT_HAS(refusal([&] { load_recipe((root_ / "fifo").string()); }), "not a regular file");
  EXPECT_HAS(refusal([&] { load_recipe(root_.string()); }), "it is a directory");
  EXPECT_HAS(refusal([&] { run(fine_tune("tuned", (root_ / "fifo").string()), options()); }), "not a regular file");
  EXPECT_HAS(refusal([&] { run(fine_tune("tuned", (root_ / "absent").string()), options()); }), "absent");
  EXPECT_FALSE(fs::exists(root_ / "tuned/checkpoints"));
}

// Interleaved rotary rows and a tokenizer in metadata: steps of size 0 change nothing, so what is saved must write the
// story that the GGUF file writes.
TEST_F(FineTuning, FromAGgufFile) {
  if (!fs::exists(kStories / "stories260K.gguf")) GTEST_SKIP() << kStories << " is absent";
  const Recipe still =
      fine_tune("still", (kStories / "stories260K.gguf").string(), "train = [\"text.txt\"]", "learning_rate = 0.0");
  run_until(still, 1);
  EXPECT_EQ(first_step_of_rest(still), 2);
  const auto story = [&](const std::string& path) {
    engine::LLM llm(path, open_device("cpu", {.num_threads = 1}), {});
    engine::SamplingParams params;
    params.temperature = 0;
    params.max_tokens = 200;
    params.ignore_eos = true;
    return llm.generate({std::string("")}, params).front().text;
  };
  const std::string expected = story((kStories / "stories260K.gguf").string());
  EXPECT_GT(expected.size(), 100u);
  EXPECT_EQ(story((fs::path(still.output) / "final").string()), expected);

  const Recipe tuned =
      fine_tune("tuned", (kStories / "stories260K.gguf").string(), "train = [\"text.txt\"]", "learning_rate = 1e-3");
  std::vector<double> losses;
  RunOptions o = options();
  o.on_step = [&](const Progress& p) { losses.push_back(p.loss); };
  run(tuned, o);
  EXPECT_LT(losses.back(), losses.front());
}

}  // namespace
}  // namespace eadem::train
