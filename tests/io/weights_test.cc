// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/weights.h"

#include "eadem/io/files/sha256.h"
#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"
#include "test_files.h"

namespace eadem::io {
namespace {

const std::string kData = std::string(EADEM_SOURCE_DIR) + "/tests/data/io";

// "type shape sha256" of a tensor, as digests.json writes it. Types that cannot be read are compared without bytes.
void expect_digests(const WeightSource& source, const JsonValue& expected) {
  EXPECT_EQ(source.tensors().size(), expected.as_object().size()) << source.path();
  for (const JsonMember& member : expected.as_object()) {
    const WeightInfo* info = source.find(member.key);
    ASSERT_NE(info, nullptr) << source.path() << ": " << member.key;
    std::string found = info->type_name + " " + to_string(info->shape) + " ";
    std::string wanted = member.value.as_string();
    if (info->type)
      found += sha256_hex(bytes_of_tensor(source.get(info->name).view));
    else
      wanted.resize(wanted.size() - 64);
    EXPECT_EQ(found, wanted) << source.path() << ": " << member.key;
  }
}

// Contents against the digests that the safetensors and gguf packages computed.
TEST(Weights, OwnFilesMatchThePackages) {
  const JsonValue digests = parse_json(content_of(kData + "/digests.json"), "digests.json");
  for (const JsonMember& file : digests.find("own")->as_object())
    expect_digests(*open_weights(kData + "/" + file.key), file.value);
}

TEST(Weights, SharedFilesMatchThePackages) {
  const JsonValue digests = parse_json(content_of(kData + "/digests.json"), "digests.json");
  for (const JsonMember& file : digests.find("shared")->as_object()) {
    const std::string path = std::string(EADEM_SHARED_DATA) + "/" + file.key;
    if (!std::filesystem::exists(path)) GTEST_SKIP() << path << " is absent";
    expect_digests(*open_weights(path), file.value);
  }
}

// The package does not read version 1; the same weights in version 3 are the oracle.
TEST(Weights, GgufVersion1EqualsVersion3) {
  const std::string v1_path =
      std::string(EADEM_SHARED_DATA) + "/models/stories260K/tinyllamas-stories-260k-f32.crabml.gguf";
  const std::string v3_path = std::string(EADEM_SOURCE_DIR) + "/tests/data/stories260K/stories260K.gguf";
  if (!std::filesystem::exists(v1_path)) GTEST_SKIP() << v1_path << " is absent";
  const auto v1 = GgufFile::open(v1_path);
  const auto v3 = GgufFile::open(v3_path);
  EXPECT_EQ(v1->version(), 1u);
  EXPECT_EQ(v3->version(), 3u);
  EXPECT_EQ(v1->tensors().size(), v3->tensors().size());
  for (const WeightInfo& info : v3->tensors()) {
    const Tensor a = v1->get(info.name);
    const Tensor b = v3->get(info.name);
    EXPECT_EQ(a.shape(), b.shape()) << info.name;
    EXPECT_EQ(bytes_of_tensor(a.view), bytes_of_tensor(b.view)) << info.name;
  }
  EXPECT_EQ(v1->strings("tokenizer.ggml.tokens").size(), 512u);
  for (const char* key : {"llama.block_count", "llama.embedding_length"})
    EXPECT_EQ(v1->integer(key, 1, 1000), v3->integer(key, 1, 1000)) << key;
}

TEST(Weights, ShardedEqualsItsShards) {
  const std::string directory = std::string(EADEM_SHARED_DATA) + "/models/random/mlxd-fixtures/tiny_qwen3_sharded";
  if (!std::filesystem::exists(directory)) GTEST_SKIP() << directory << " is absent";
  const auto all = open_weights(directory);
  size_t num_tensors = 0;
  for (const char* shard : {"/model-00001-of-00002.safetensors", "/model-00002-of-00002.safetensors"}) {
    const auto one = open_weights(directory + shard);
    num_tensors += one->tensors().size();
    for (const WeightInfo& info : one->tensors()) {
      ASSERT_NE(all->find(info.name), nullptr);
      if (info.type)
        EXPECT_EQ(bytes_of_tensor(all->get(info.name).view), bytes_of_tensor(one->get(info.name).view));
      else
        expect_error<Unsupported>([&] { all->get(info.name); }, {info.name, info.type_name});
    }
  }
  EXPECT_EQ(all->tensors().size(), num_tensors);
}

class OpenWeights : public testing::Test {
 protected:
  void write_model(const std::string& name) {
    write_safetensors(scratch_.file(name), std::vector<NamedTensor>{{"w", TensorView(data_, DType::f32, {1})}});
  }
  void write_index(const std::string& name, const std::string& shard) {
    scratch_.write(name, R"({"weight_map":{"w":")" + shard + R"("}})");
  }

  ScratchDirectory scratch_;
  float data_[1] = {4};
};

TEST_F(OpenWeights, ByContentNotByExtension) {
  write_model("model.bin");
  EXPECT_EQ(open_weights(scratch_.file("model.bin"))->get("w").view.as<float>()[0], 4.0f);
  write_gguf(scratch_.file("model.safetensors"), {},
             std::vector<NamedTensor>{{"g", TensorView(data_, DType::f32, {1})}});
  EXPECT_EQ(open_weights(scratch_.file("model.safetensors"))->get("g").view.as<float>()[0], 4.0f);
  write_index("index", "model.bin");
  EXPECT_EQ(open_weights(scratch_.file("index"))->get("w").view.as<float>()[0], 4.0f);
}

TEST_F(OpenWeights, Directories) {
  expect_error<NotFound>([&] { open_weights(scratch_.path()); }, {scratch_.path(), "holds no model.safetensors"});
  scratch_.write("pytorch_model.bin", "PK");
  expect_error<Unsupported>([&] { open_weights(scratch_.path()); }, {"pytorch_model.bin", "can run code", "convert"});
  write_gguf(scratch_.file("a.gguf"), {}, {});
  EXPECT_EQ(open_weights(scratch_.path())->path(), scratch_.file("a.gguf"));
  write_gguf(scratch_.file("b.gguf"), {}, {});
  expect_error<InvalidArgument>([&] { open_weights(scratch_.path()); },
                                {"2 GGUF files (a.gguf, b.gguf)", "name the one"});
  write_model("shard.safetensors");
  write_index("model.safetensors.index.json", "shard.safetensors");
  EXPECT_EQ(open_weights(scratch_.path())->path(), scratch_.file("model.safetensors.index.json"));
  write_model("model.safetensors");
  expect_error<DataCorrupted>([&] { open_weights(scratch_.path()); }, {"both model.safetensors and"});
  write_index("model.safetensors.index.json", "model.safetensors");
  EXPECT_EQ(open_weights(scratch_.path())->path(), scratch_.file("model.safetensors"));
  std::filesystem::remove(scratch_.file("model.safetensors.index.json"));
  EXPECT_EQ(open_weights(scratch_.path())->path(), scratch_.file("model.safetensors"));
}

TEST_F(OpenWeights, SaysWhatAFileIs) {
  const auto refuse = [&]<typename E>(E*, std::string_view content, std::initializer_list<std::string_view> words) {
    const std::string path = scratch_.write("f", content);
    expect_error<E>([&] { open_weights(path); }, {path});
    expect_error<E>([&] { open_weights(path); }, words);
  };
  constexpr DataCorrupted* corrupted = nullptr;
  constexpr Unsupported* unsupported = nullptr;
  expect_error<NotFound>([&] { open_weights(scratch_.file("none")); }, {scratch_.file("none"), "No such file"});
  refuse(corrupted, "", {"is empty", "expected a model directory"});
  refuse(corrupted, "version https://git-lfs.github.com/spec/v1\noid", {"Git LFS pointer", "git lfs pull"});
  refuse(unsupported, "PK\x03\x04zipzipzip", {"PyTorch pickle"});
  refuse(unsupported, "\x80\x02}q", {"PyTorch pickle"});
  refuse(unsupported, "tjgg\x03", {"older than GGUF"});
  refuse(corrupted, "hello\nworld", {"neither GGUF nor safetensors (it begins with 'hello\\x0awo')"});
  refuse(corrupted, "{}", {"'weight_map' is missing"});
}

// Pages of files that this process holds, as the system counts them.
int64_t resident_file_bytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0, shared = 0;
  statm >> size >> resident >> shared;
  return shared * ::sysconf(_SC_PAGESIZE);
}

TEST_F(OpenWeights, ReleasedTensorsLeaveMemory) {
  constexpr int64_t kBytes = int64_t{16} << 20;
  const Tensor big = Tensor::on_host(DType::f32, Shape{kBytes / 4});
  for (int64_t i = 0; i < kBytes / 4; ++i) big.view.as<float>()[i] = static_cast<float>(i % 1000);
  const std::vector<NamedTensor> tensors = {{"w", big.view}};
  write_gguf(scratch_.file("m.gguf"), {}, tensors);
  write_safetensors(scratch_.file("m.safetensors"), tensors, {});
  write_index("index", "m.safetensors");
  for (const char* name : {"m.gguf", "m.safetensors", "index"}) {
    SCOPED_TRACE(name);
    const auto source = open_weights(scratch_.file(name));
    const Tensor tensor = source->get("w");
    EXPECT_EQ(std::memcmp(tensor.view.data, big.view.data, kBytes), 0);
    const int64_t before = resident_file_bytes();
    source->release("w");
    EXPECT_LT(resident_file_bytes(), before - kBytes / 2);
    EXPECT_EQ(std::memcmp(tensor.view.data, big.view.data, kBytes), 0);  // and come back
  }
}

}  // namespace
}  // namespace eadem::io
