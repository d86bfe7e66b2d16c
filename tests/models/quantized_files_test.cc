// SPDX-License-Identifier: Apache-2.0
//
// GGUF files with weights in block types: what the `gguf` package wrote gives the weights that it reads, bit for bit,
// and a file that is not what it says is refused before a model runs on it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/gguf.h"
#include "tests/support/refusal.h"

namespace eadem::models {
namespace {

using test::refusal;

namespace fs = std::filesystem;

// ---- Files of the package --------------------------------------------------------------------------------------

class PackageFile : public testing::TestWithParam<const BlockEncoding*> {};
INSTANTIATE_TEST_SUITE_P(All, PackageFile, testing::ValuesIn(BlockEncoding::all()),
                         [](const auto& info) { return std::string(info.param->name()); });

TEST_P(PackageFile, GivesTheWeightsThatThePackageReads) {
  const auto file = io::GgufFile::open(EADEM_SOURCE_DIR "/tests/data/quantized/every_type.gguf");
  const std::string name(GetParam()->name());
  const Tensor stored = file->get(name), expected = file->get(name + ".values");
  ASSERT_EQ(stored.view.encoding, GetParam());
  const int64_t rows = GetParam()->is_writable() ? 4 : 1;
  ASSERT_EQ(expected.shape(), (Shape{rows, 512}));
  for (const BlockEncoding* declared : {GetParam(), static_cast<const BlockEncoding*>(nullptr)}) {
    pipeline::ParameterStore store(open_device("cpu", {.num_threads = 2}));
    store.declare("w", TensorType(DType::f32, {rows, 512}, declared));
    store.layout("w", nullptr);
    store.load("w", stored.view, file->path());
    const Tensor actual = store.to_host("w");
    ASSERT_EQ(actual.view.size_bytes(), expected.view.size_bytes());
    EXPECT_EQ(std::memcmp(actual.view.data, expected.view.data, static_cast<size_t>(actual.view.size_bytes())), 0);
  }
}

// ---- Hostile models --------------------------------------------------------------------------------------------

constexpr uint64_t kHidden = 256, kVocab = 16;

template <typename T>
std::string bytes(T value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}
std::string text(const std::string& value) { return bytes<uint64_t>(value.size()) + value; }

struct FileTensor {
  std::string name;
  std::vector<uint64_t> extents;  // innermost first, as in the file
  uint32_t type;
  std::string data;
  std::optional<uint64_t> offset;  // where the data is said to be, if elsewhere
};

// A Llama of one layer whose matrices are all Q8_0, written byte by byte so that every field can lie.
class HostileModel : public testing::Test {
 protected:
  void SetUp() override {
    std::string pattern = (fs::temp_directory_path() / "eadem_hostile_XXXXXX").string();
    ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
    folder_ = pattern;
    const auto matrix = [&](const std::string& name, uint64_t in, uint64_t out) {
      // Scales of 2^-10 and codes of every size.
      std::string data;
      for (uint64_t b = 0; b < in * out / 32; ++b) {
        data += bytes<uint16_t>(0x1400);
        for (uint64_t i = 0; i < 32; ++i) data += static_cast<char>(static_cast<int>((b * 37 + i * 11) % 255) - 127);
      }
      tensors_.push_back({name + ".weight", {in, out}, 8, data, {}});
    };
    const auto norm = [&](const std::string& name) {
      std::string data;
      for (uint64_t i = 0; i < kHidden; ++i) data += bytes(1.0f);
      tensors_.push_back({name + ".weight", {kHidden}, 0, data, {}});
    };
    matrix("token_embd", kHidden, kVocab);
    norm("blk.0.attn_norm");
    for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output"})
      matrix(std::string("blk.0.") + name, kHidden, kHidden);
    norm("blk.0.ffn_norm");
    for (const char* name : {"ffn_gate", "ffn_up", "ffn_down"}) matrix(std::string("blk.0.") + name, kHidden, kHidden);
    norm("output_norm");
  }
  void TearDown() override { fs::remove_all(folder_); }

  FileTensor& tensor(const std::string& name) {
    for (FileTensor& candidate : tensors_)
      if (candidate.name == name) return candidate;
    throw std::logic_error(name);
  }

  std::string file() const { return (folder_ / "m.gguf").string(); }
  void write(int64_t dropped_bytes = 0) const {
    const std::vector<std::pair<std::string, uint32_t>> numbers = {
        {"llama.block_count", 1},          {"llama.embedding_length", kHidden}, {"llama.feed_forward_length", kHidden},
        {"llama.attention.head_count", 4}, {"llama.context_length", 64},        {"llama.vocab_size", kVocab}};
    std::string content = "GGUF" + bytes<uint32_t>(3) + bytes<uint64_t>(tensors_.size()) +
                          bytes<uint64_t>(numbers.size() + 2) + text("general.architecture") + bytes<uint32_t>(8) +
                          text("llama") + text("llama.attention.layer_norm_rms_epsilon") + bytes<uint32_t>(6) +
                          bytes(1e-5f);
    for (const auto& [key, value] : numbers) content += text(key) + bytes<uint32_t>(4) + bytes(value);
    std::string data;
    for (const FileTensor& t : tensors_) {
      content += text(t.name) + bytes(static_cast<uint32_t>(t.extents.size()));
      for (const uint64_t extent : t.extents) content += bytes(extent);
      content += bytes(t.type) + bytes<uint64_t>(t.offset.value_or(data.size()));
      data += t.data;
      data.append((32 - data.size() % 32) % 32, '\0');
    }
    content.append((32 - content.size() % 32) % 32, '\0');
    content += data;
    content.resize(content.size() - static_cast<size_t>(dropped_bytes));
    std::ofstream(file(), std::ios::binary) << content;
  }
  // The refusal of opening or loading; empty without one.
  std::string refusal_of_written(int64_t dropped_bytes = 0) const {
    write(dropped_bytes);
    return refusal([&] {
      engine::InferEngine::from_checkpoint(open_checkpoint(file()), open_device("cpu", {.num_threads = 2}), {});
    });
  }

  fs::path folder_;
  std::vector<FileTensor> tensors_;
};

TEST_F(HostileModel, UnchangedLoadsAndRuns) {
  ASSERT_EQ(refusal_of_written(), "");
  const auto engine =
      engine::InferEngine::from_checkpoint(open_checkpoint(file()), open_device("cpu", {.num_threads = 2}), {});
  EXPECT_NE(engine->forward({.input_ids = {1, 2}, .input_lengths = {2}, .cache_lengths = {0}}).output_ids[0], -1);
}

// Chunks do not change bits, whatever the types of the matrices.
TEST_F(HostileModel, TypesThatAreOnlyReadRun) {
  for (const BlockEncoding* blocks : BlockEncoding::all().subspan(BlockEncoding::writable().size())) {
    SCOPED_TRACE(blocks->name());
    uint32_t id = 0;
    while (io::find_ggml_type(id) == nullptr || io::find_ggml_type(id)->weight_type() != WeightType(DType::f32, blocks))
      ASSERT_LT(++id, 64u);
    for (FileTensor& t : tensors_) {
      if (t.extents.size() != 2) continue;
      const auto count = static_cast<int64_t>(t.extents[0] * t.extents[1]) / kMaxBlockSize;
      t.type = id;
      t.data.resize(static_cast<size_t>(count * blocks->format().block_bytes));
      blocks->fill_random(reinterpret_cast<uint8_t*>(t.data.data()), 0, count, 0.1, t.name.size());
    }
    ASSERT_EQ(refusal_of_written(), "");
    const auto engine =
        engine::InferEngine::from_checkpoint(open_checkpoint(file()), open_device("cpu", {.num_threads = 2}), {});
    const auto logits = [&](const std::vector<int>& ids, int before) {
      engine->forward({.input_ids = {ids.begin(), ids.end()},
                       .input_lengths = {static_cast<int32_t>(ids.size())},
                       .cache_lengths = {before}});
      const Tensor all = engine->logits();
      return std::vector<float>(all.view.as<float>(), all.view.as<float>() + kVocab);
    };
    const std::vector<float> whole = logits({1, 2, 3}, 0);
    for (float logit : whole) ASSERT_TRUE(std::isfinite(logit));
    engine->reset_cache();
    logits({1, 2}, 0);
    EXPECT_EQ(logits({3}, 2), whole);
  }
}

TEST_F(HostileModel, RowsThatAreNoWholeBlocks) {
  tensor("blk.0.attn_q.weight").extents = {kHidden - 16, kHidden};
  const std::string said = refusal_of_written();
  EXPECT_HAS(said, "DataCorrupted: " + file());
  EXPECT_HAS(said, "'blk.0.attn_q.weight' has rows of 240 values; Q8_0 needs a multiple of 32");
}

TEST_F(HostileModel, TruncatedData) {
  const auto last = static_cast<int64_t>(tensors_.back().data.size());
  for (const int64_t dropped : {int64_t{1}, last / 2, last}) {
    const std::string said = refusal_of_written(dropped);
    EXPECT_HAS(said, "DataCorrupted: " + file());
    EXPECT_HAS(said, "'output_norm.weight'");
  }
  const std::string said = refusal_of_written(last + 100);  // into the blocks of the tensor before
  EXPECT_HAS(said, "'blk.0.ffn_down.weight' (Q8_0 [256, 256])");
}

TEST_F(HostileModel, OverlappingTensors) {
  tensor("blk.0.attn_k.weight").offset = 32;  // inside the embedding
  const std::string said = refusal_of_written();
  EXPECT_HAS(said, "DataCorrupted: " + file());
  EXPECT_HAS(said, "'token_embd.weight' and 'blk.0.attn_k.weight' overlap at offset 32");
}

TEST_F(HostileModel, ScalesThatAreNotFinite) {
  for (const uint16_t bits : {0x7c00, 0xfc00, 0x7e00, 0x7c01}) {
    for (const char* name : {"token_embd.weight", "blk.0.attn_v.weight"}) {
      const std::string good = tensor(name).data;
      std::memcpy(tensor(name).data.data() + 34 * 19, &bits, sizeof bits);  // block 19: row 2, column 96
      const std::string said = refusal_of_written();
      EXPECT_HAS(said, "InvalidArgument: " + file());
      EXPECT_HAS(said, std::string(name).starts_with("token") ? "'model.embed_tokens.weight'" : "v_proj.weight'");
      EXPECT_HAS(said, "flat index 608 of");
      tensor(name).data = good;
    }
  }
}

TEST_F(HostileModel, ZeroSize) {
  for (const std::vector<uint64_t>& extents : {std::vector<uint64_t>{0, kHidden}, {kHidden, 0}, {0, 0}}) {
    tensor("blk.0.attn_q.weight").extents = extents;
    tensor("blk.0.attn_q.weight").data.clear();
    const std::string said = refusal_of_written();
    EXPECT_HAS(said, file());
    EXPECT_HAS(said, "q_proj.weight'");
    EXPECT_HAS(said, "[256, 256]");
  }
}

TEST_F(HostileModel, TypesThatCannotBeReadAreNamed) {
  struct Other {
    uint32_t id;
    const char* name;
    size_t block_bytes;
  };
  for (const Other& other : {Other{41, "Q1_0", 36}, Other{15, "Q8_K", 292}}) {
    FileTensor& target = tensor("blk.0.ffn_up.weight");
    target.type = other.id;
    target.data = std::string(other.block_bytes * kHidden, '\0');
    const std::string said = refusal_of_written();
    EXPECT_HAS(said, "Unsupported: " + file());
    EXPECT_HAS(said, other.name);
    EXPECT_HAS(said, "'blk.0.ffn_up.weight'");
  }
}

}  // namespace
}  // namespace eadem::models
