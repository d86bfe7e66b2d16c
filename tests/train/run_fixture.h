// SPDX-License-Identifier: Apache-2.0
//
// A tiny model, tokenizer, text and recipe in a directory of their own.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <string>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/sha256.h"
#include "eadem/io/tokenizer/models/bpe_trainer.h"
#include "eadem/train/train.h"

namespace eadem::train {

namespace fs = std::filesystem;

class TrainingRun : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_train_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    root_ = pattern;
    fs::create_directories(root_ / "tokenizer");
    std::string text;
    for (int i = 0; i < 60; ++i)
      text += fmt::format("Story {} tells of a cat that saw {} birds and {} fish by the sea.\n<|endoftext|>\n", i,
                          i * 7 % 13, i * 5 % 11);
    io::write_file_atomically((root_ / "text.txt").string(), text);
    io::BpeTrainerOptions options;
    options.vocab_size = 300;
    options.special_tokens = {"<|bos|>", "<|endoftext|>"};
    options.bos_token = "<|bos|>";
    options.eos_token = "<|endoftext|>";
    options.add_bos = true;
    io::BpeTrainer trainer(options);
    trainer.add_text(text);
    io::save_tokenizer(trainer.train(), (root_ / "tokenizer").string());
    io::write_file_atomically((root_ / "config.json").string(),
                              R"({"model_type": "llama", "vocab_size": 300, "hidden_size": 32,
      "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
      "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": true, "bos_token_id": 0, "eos_token_id": 1})");
  }
  void TearDown() override { fs::remove_all(root_); }

  // `extra` goes to the end of [training].
  Recipe recipe(const std::string& output, const std::string& weights, const std::string& extra = "",
                int64_t steps = 12) {
    const std::string path = (root_ / (output + ".toml")).string();
    io::write_file_atomically(path, fmt::format(R"([model]
config = "config.json"
[tokenizer]
path = "tokenizer"
[data]
train = ["text.txt"]
eval = ["text.txt"]
[training]
steps = {}
batch_tokens = 96
accumulation = 2
sequence_length = 24
weights = "{}"
warmup_steps = 3
eval_interval = 4
checkpoint_interval = 3
{}
[output]
directory = "{}"
)",
                                                steps, weights, extra, output));
    return load_recipe(path);
  }
  static RunOptions options(int threads = 2) { return {.device = open_device("cpu", {.num_threads = threads})}; }
  static std::string model_hash(const Recipe& recipe) {
    return io::sha256_hex_of_file((fs::path(recipe.output) / "final" / "model.safetensors").string());
  }

  // Runs until `step` is done and saves it.
  static void run_until(const Recipe& recipe, int64_t step) {
    std::atomic<bool> cancel{false};
    RunOptions o = options();
    o.cancel = &cancel;
    o.on_step = [&](const Progress& p) { cancel = p.step == step; };
    EXPECT_TRUE(run(recipe, o).cancelled);
  }
  // Runs to the end and returns the first step that it did, 0 if none.
  static int64_t first_step_of_rest(const Recipe& recipe, const Logger& log = Logger(LogLevel::off)) {
    int64_t first = 0;
    RunOptions o = options();
    o.on_step = [&](const Progress& p) { first = first == 0 ? p.step : first; };
    run(recipe, o, log);
    return first;
  }
  static fs::path checkpoint(const Recipe& recipe, int64_t step) {
    return fs::path(recipe.output) / "checkpoints" / fmt::format("step_{:08}", step);
  }

  fs::path root_;
};

}  // namespace eadem::train
