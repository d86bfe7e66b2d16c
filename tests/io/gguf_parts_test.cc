// SPDX-License-Identifier: Apache-2.0
//
// Split GGUF models: those that the `gguf` package writes, and parts that contradict one another.
#include "eadem/io/gguf_parts.h"

#include "test_files.h"
#include "tests/support/split_gguf.h"

namespace eadem::io {
namespace gguf_parts_test {

namespace fs = std::filesystem;

const std::string kData = std::string(EADEM_SOURCE_DIR) + "/tests/data/io";

void expect_same_model(const GgufFile& actual, const GgufFile& expected) {
  EXPECT_EQ(actual.metadata(), expected.metadata());
  ASSERT_EQ(actual.tensors().size(), expected.tensors().size());
  for (size_t i = 0; i < expected.tensors().size(); ++i) {
    const WeightInfo& info = expected.tensors()[i];
    EXPECT_EQ(actual.tensors()[i].name, info.name);
    EXPECT_EQ(actual.tensors()[i].type_name, info.type_name);
    EXPECT_EQ(actual.tensors()[i].shape, info.shape);
    EXPECT_EQ(bytes_of_tensor(actual.get_bytes(info.name).view), bytes_of_tensor(expected.get_bytes(info.name).view));
    EXPECT_EQ(bytes_of_tensor(actual.get(info.name).view), bytes_of_tensor(expected.get(info.name).view));
  }
}

TEST(GgufPartName, IsReadFromTheEndOfAName) {
  const auto name = GgufPartName::parse("a/b-Q4_K_M-00002-of-00010.gguf");
  ASSERT_TRUE(name);
  EXPECT_EQ(name->stem, "a/b-Q4_K_M");
  EXPECT_EQ(name->number, 2);
  EXPECT_EQ(name->count, 10);
  EXPECT_EQ(name->of(10), "a/b-Q4_K_M-00010-of-00010.gguf");
  for (const char* other : {"", ".gguf", "m.gguf", "-00001-of-00002.gguf", "a/-00001-of-00002.gguf", "m-00001-of-00002",
                            "m-0001-of-0002.gguf", "m-000001-of-000002.gguf", "m-00003-of-00002.gguf",
                            "m-00000-of-00002.gguf", "m-00001-of-0000x.gguf", "m-0000 1-of-00002.gguf",
                            "m_00001-of-00002.gguf", "m-00001_of-00002.gguf", "m-+0001-of-00002.gguf"})
    EXPECT_FALSE(GgufPartName::parse(other)) << other;
}

class GgufParts : public testing::Test {
 protected:
  void SetUp() override {
    paths_ = test::split_gguf(kData + "/from_python.gguf", scratch_.file("m"), 3);
    ASSERT_EQ(paths_.size(), 3u);
  }

  // A part that is written anew, with one tensor of 4 floats.
  struct Part {
    uint16_t number = 0, count = 3;
    int32_t num_tensors = 5;
    GgufMetadata more;
    std::string tensor = "t";
  };
  void rewrite(size_t index, const Part& part) {
    GgufMetadata metadata = part.more;
    metadata.emplace_back("split.no", GgufValue::scalar(part.number));
    metadata.emplace_back("split.count", GgufValue::scalar(part.count));
    metadata.emplace_back("split.tensors.count", GgufValue::scalar(part.num_tensors));
    write_gguf(paths_[index], metadata, std::vector<NamedTensor>{{part.tensor, TensorView(data_, DType::f32, {4})}});
  }
  template <typename E = DataCorrupted>
  void refused(std::initializer_list<std::string_view> words) const {
    for (const std::string& path : paths_)
      if (fs::exists(path)) expect_error<E>([&] { open_weights(path); }, words);
  }

  ScratchDirectory scratch_;
  std::vector<std::string> paths_;
  float data_[4] = {1, 2, 3, 4};
};

// The same tensors and metadata, written by the package into one file and into parts.
TEST_F(GgufParts, OfThePackageEqualItsFile) {
  const auto whole = GgufFile::open(kData + "/from_python.gguf");
  for (const int64_t number : {1, 2, 3})
    expect_same_model(*GgufFile::open(GgufPartName{kData + "/split_from_python", 1, 3}.of(number)), *whole);
}

TEST_F(GgufParts, AnyPartAndTheirDirectoryOpenTheModel) {
  const auto whole = GgufFile::open(kData + "/from_python.gguf");
  std::vector<std::string> all = paths_;
  all.push_back(scratch_.path());
  for (const std::string& path : all) {
    SCOPED_TRACE(path);
    const auto model = std::dynamic_pointer_cast<const GgufFile>(open_weights(path));
    ASSERT_NE(model, nullptr);
    EXPECT_EQ(model->path(), paths_[0]);
    expect_same_model(*model, *whole);
    const auto files = model->files();
    ASSERT_EQ(files.size(), 3u);
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(files[i]->path(), paths_[i]);
    for (const WeightInfo& info : model->tensors()) model->release(info.name);
    expect_same_model(*model, *whole);
  }
  EXPECT_EQ(GgufFile::open_alone(MappedFile::open(paths_[1]))->tensors().size(), 2u);
}

TEST_F(GgufParts, CountOnceInADirectory) {
  write_gguf(scratch_.file("other.gguf"), {}, {});
  expect_error<InvalidArgument>([&] { open_weights(scratch_.path()); },
                                {"2 GGUF files (m-00001-of-00003.gguf, other.gguf)", "name the one"});
}

TEST_F(GgufParts, OnePartIsAFile) {
  const std::string path = scratch_.file("one.gguf");
  for (const uint16_t count : {0, 1}) {
    write_gguf(path, {{"split.no", GgufValue::scalar<uint16_t>(0)}, {"split.count", GgufValue::scalar(count)}},
               std::vector<NamedTensor>{{"t", TensorView(data_, DType::f32, {4})}});
    EXPECT_EQ(open_weights(path)->tensors().size(), 1u);
  }
}

TEST_F(GgufParts, AMissingPartIsNamed) {
  fs::remove(paths_[1]);
  refused<NotFound>({"its part 2 of 3", "m-00002-of-00003.gguf'", "is not there"});
  expect_error<NotFound>([&] { open_weights(scratch_.path()); }, {"its part 2 of 3"});
}

TEST_F(GgufParts, APartWithoutItsNameIsRefused) {
  fs::rename(paths_[1], scratch_.file("blob"));
  expect_error<NotFound>([&] { open_weights(scratch_.file("blob")); },
                         {"blob is one of 3 parts", "not named NAME-00001-of-00002.gguf"});
}

TEST_F(GgufParts, NamesAndNumbersAgree) {
  // The second and third part have each other's names.
  fs::rename(paths_[1], scratch_.file("x"));
  fs::rename(paths_[2], paths_[1]);
  fs::rename(scratch_.file("x"), paths_[2]);
  expect_error<DataCorrupted>([&] { open_weights(paths_[0]); }, {paths_[1], "'split.no' is 2", "part 2 of 3"});
  expect_error<DataCorrupted>([&] { open_weights(paths_[2]); }, {paths_[2], "'split.no' is 1", "part 3 of 3"});
  // A name with another count.
  fs::rename(paths_[0], scratch_.file("m-00001-of-00002.gguf"));
  expect_error<DataCorrupted>([&] { open_weights(scratch_.file("m-00001-of-00002.gguf")); },
                              {"m-00001-of-00002.gguf: 'split.count' is 3", "part 1 of 2"});
}

TEST_F(GgufParts, TheSameFileTwice) {
  fs::remove(paths_[1]);
  fs::create_symlink(paths_[2], paths_[1]);
  expect_error<DataCorrupted>([&] { open_weights(paths_[0]); }, {paths_[1], "'split.no' is 2", "part 2 of 3"});
}

TEST_F(GgufParts, CountsOfAllPartsAgree) {
  rewrite(1, {.number = 1, .count = 4});
  expect_error<DataCorrupted>([&] { open_weights(paths_[0]); }, {paths_[1], "'split.count' is 4", "part 2 of 3"});
  rewrite(1, {.number = 1});  // one tensor in the place of two
  refused({paths_[0], "'split.tensors.count' is 5; the 3 parts have 4 tensors"});
  rewrite(1, {.number = 1, .num_tensors = -1});
  refused({"'split.tensors.count' is"});
}

TEST_F(GgufParts, ATensorInTwoParts) {
  rewrite(1, {.number = 1, .tensor = "vector"});
  refused({paths_[2], "the tensor 'vector' is in " + paths_[1] + " as well"});
}

TEST_F(GgufParts, PartsOfAnotherModel) {
  rewrite(1, {.number = 1, .more = {{"general.architecture", GgufValue::string("gemma3")}}});
  refused({paths_[1], "'general.architecture' is a string 'gemma3'; that of " + paths_[0],
           "is a string 'llama': they are not parts of one model"});
  rewrite(1, {.number = 1, .more = {{"llama.block_count", GgufValue::scalar<uint32_t>(7)}}});
  refused({paths_[1], "'llama.block_count' is u32 7", paths_[0] + ", the first part, has no such key"});
  // What it repeats it may have, and an alignment of its own.
  rewrite(1, {.number = 1,
              .num_tensors = 5,
              .more = {{"general.architecture", GgufValue::string("llama")},
                       {"general.alignment", GgufValue::scalar<uint32_t>(64)}}});
  refused({"the 3 parts have 4 tensors"});
}

TEST_F(GgufParts, PartsThatSayNothingOfTheirPlace) {
  write_gguf(paths_[1], {}, {});
  expect_error<DataCorrupted>([&] { open_weights(paths_[0]); }, {paths_[1], "'split.count' is missing"});
  write_gguf(paths_[1], {{"split.count", GgufValue::scalar<uint16_t>(3)}}, {});
  refused({paths_[1], "'split.no' is missing"});
  write_gguf(paths_[1], {{"split.count", GgufValue::scalar<uint16_t>(3)}, {"split.no", GgufValue::string("1")}}, {});
  refused({paths_[1], "'split.no' is a string '1'; expected an integer"});
}

TEST_F(GgufParts, PartsThatAreNoGgufFiles) {
  for (const std::string_view content : {"", "GGU", "version https://git-lfs.github.com/spec/v1"}) {
    std::ofstream(paths_[2], std::ios::binary) << content;
    expect_error<DataCorrupted>([&] { open_weights(paths_[0]); }, {paths_[2]});
  }
  fs::remove(paths_[2]);
  fs::create_directory(paths_[2]);
  expect_error<IoError>([&] { open_weights(paths_[0]); }, {paths_[2]});
}

TEST_F(GgufParts, ATruncatedPartIsRefused) {
  const std::string content = content_of(paths_[1]);
  const size_t used = content.size() - 32;  // more than the padding of the last tensor
  for (size_t size = 0; size < used; ++size) {
    std::ofstream(paths_[1], std::ios::binary) << content.substr(0, size);
    expect_error<DataCorrupted>([&] { open_weights(paths_[0]); }, {paths_[1]});
  }
}

// Every single-byte change of a part is either refused or gives tensors whose bytes can all be read.
TEST_F(GgufParts, ChangedBytesNeverCrash) {
  for (const size_t index : {0u, 1u}) {
    const std::string content = content_of(paths_[index]);
    int num_accepted = 0;
    for (size_t pos = 0; pos < content.size(); ++pos) {
      for (const char byte : {'\0', '\x7f', '\xff'}) {
        std::string changed = content;
        changed[pos] = byte;
        std::ofstream(paths_[index], std::ios::binary) << changed;
        try {
          const auto file = open_weights(paths_[2]);
          ++num_accepted;
          unsigned sum = 0;
          for (const WeightInfo& info : file->tensors())
            for (const char c : bytes_of_tensor(file->get_bytes(info.name).view)) sum += static_cast<uint8_t>(c);
          EXPECT_LT(sum, 1u << 20);
        } catch (const Error&) {
        }
      }
    }
    EXPECT_GT(num_accepted, 0);
    std::ofstream(paths_[index], std::ios::binary) << content;
  }
}

}  // namespace gguf_parts_test
}  // namespace eadem::io
