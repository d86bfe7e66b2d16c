// SPDX-License-Identifier: Apache-2.0
//
// The bundled model is what its recipe's last checkpoint was, and writes what it wrote then.
#include <gtest/gtest.h>

#include <filesystem>

#include "eadem/engine/llm.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/files/sha256.h"

namespace eadem::engine {
namespace {

namespace fs = std::filesystem;

const fs::path kFolder = fs::path(EADEM_SOURCE_DIR) / "assets/stories";

TEST(Bundled, IsTheCheckpointOfItsRecipe) {
  const io::JsonReader checkpoint = io::JsonReader::read((kFolder / "checkpoint.json").string());
  EXPECT_EQ(io::sha256_hex_of_file((kFolder / "recipe.toml").string()), checkpoint.string("recipe_sha256"));
  EXPECT_EQ(io::sha256_hex_of_file((kFolder / "architecture.json").string()), checkpoint.string("architecture_sha256"));
  EXPECT_EQ(io::sha256_hex_of_file((kFolder / "tokenizer.json").string()), checkpoint.string("tokenizer_sha256"));
  EXPECT_EQ(io::sha256_hex_of_file((kFolder / "model.safetensors").string()), checkpoint.string("model_sha256"));
}

TEST(Bundled, FitsItsBudget) {
  int64_t total = 0;
  for (const char* name :
       {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    total += static_cast<int64_t>(fs::file_size(kFolder / name));
  EXPECT_LE(total, 8 << 20);
}

TEST(Bundled, WritesTheSameStoryOnEveryInstructionSet) {
  const std::string expected = io::read_file((kFolder / "greedy.txt").string(), 1 << 20);
  for (Isa isa : available_isas()) {
    LLM llm(kFolder.string(), open_device("cpu", {.num_threads = 2, .isa = isa_name(isa)}), {});
    SamplingParams params;
    params.temperature = 0;
    params.max_tokens = 150;
    const std::vector<Completion> completions = llm.generate({"Once upon a time"}, params);
    EXPECT_EQ("Once upon a time" + completions[0].text + "\n", expected) << isa_name(isa);
  }
}

}  // namespace
}  // namespace eadem::engine
