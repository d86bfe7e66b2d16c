// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/safetensors.h"

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/io/files/mapped_file.h"
#include "test_files.h"

namespace eadem::io {
namespace {

std::string safetensors(std::string_view header, std::string_view data) {
  return bytes<uint64_t>(header.size()) + std::string(header) + std::string(data);
}

std::shared_ptr<const SafetensorsFile> parse(std::string_view content) {
  const OwnedBytes owned(content);
  return SafetensorsFile::parse("m.safetensors", owned.span(), owned.block);
}

template <typename E = DataCorrupted>
void refused(std::string_view header, std::string_view data, std::initializer_list<std::string_view> words) {
  expect_error<E>([&] { parse(safetensors(header, data)); }, {"m.safetensors"});
  expect_error<E>([&] { parse(safetensors(header, data)); }, words);
}

TEST(Safetensors, Reads) {
  const auto file = parse(safetensors(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"I32","shape":[2],"data_offsets":[4,12]},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"F16","shape":[3,0],"data_offsets":[12,12]}}   )",
      bytes(1.5f) + bytes<int32_t>(7) + bytes<int32_t>(-8)));
  EXPECT_EQ(file->metadata(), (SafetensorsFile::Metadata{{"format", "pt"}}));
  ASSERT_EQ(file->tensors().size(), 3u);
  EXPECT_EQ(file->tensors()[0].name, "b");  // the header's order
  EXPECT_EQ(file->tensors()[0].type_name, "I32");
  EXPECT_EQ(file->tensors()[0].type, WeightType(DType::i32));
  EXPECT_EQ(file->tensors()[0].size_bytes, 8);
  EXPECT_EQ(file->get("a").shape(), Shape{});
  EXPECT_EQ(file->get("a").view.as<float>()[0], 1.5f);
  EXPECT_EQ(file->get("b").view.as<int32_t>()[1], -8);
  EXPECT_EQ(file->get("e").shape(), (Shape{3, 0}));
  EXPECT_TRUE(file->get("e").defined());
  EXPECT_EQ(file->find("c"), nullptr);
  expect_error<NotFound>([&] { file->get("c"); }, {"m.safetensors", "'c'", "3"});
}

TEST(Safetensors, NullMetadataIsNone) {
  EXPECT_TRUE(parse(safetensors(R"({"__metadata__":null})", ""))->metadata().empty());
}

TEST(Safetensors, EmptyFileOfTensors) { EXPECT_TRUE(parse(safetensors("{}", ""))->tensors().empty()); }

TEST(Safetensors, OtherTypesAreListedAndRefusedOnAccess) {
  const auto file = parse(safetensors(
      R"({"w":{"dtype":"U32","shape":[1],"data_offsets":[0,4]},"f4":{"dtype":"F4","shape":[2],"data_offsets":[4,5]},"n":{"dtype":"Q9","shape":[8],"data_offsets":[5,6]}})",
      "123456"));
  EXPECT_EQ(file->find("w")->type, std::nullopt);
  EXPECT_EQ(file->find("w")->type_name, "U32");
  expect_error<Unsupported>([&] { file->get("w"); }, {"m.safetensors", "'w'", "U32", "[1]"});
  expect_error<Unsupported>([&] { file->get("n"); }, {"'n'", "Q9"});
}

TEST(Safetensors, MisalignedDataIsCopied) {
  const std::string content = safetensors(
      R"({"p":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"F32","shape":[2],"data_offsets":[1,9]}})",
      "!" + bytes(2.5f) + bytes(-1.0f));
  const Tensor x = parse(content)->get("x");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(x.view.data) % alignof(float), 0u);
  EXPECT_EQ(x.view.as<float>()[0], 2.5f);
  EXPECT_EQ(x.view.as<float>()[1], -1.0f);
}

TEST(Safetensors, HeaderLength) {
  expect_error<DataCorrupted>([] { parse(""); }, {"m.safetensors", "0 bytes", "too few"});
  expect_error<DataCorrupted>([] { parse("1234567"); }, {"7 bytes"});
  expect_error<DataCorrupted>([] { parse(bytes<uint64_t>(3) + "{}"); }, {"header of 3 bytes in a file of 10"});
  expect_error<DataCorrupted>([] { parse(bytes<uint64_t>(~0ull) + "{}"); },
                              {"18446744073709551615", "at most 100000000"});
  expect_error<DataCorrupted>([] { parse(bytes<uint64_t>(0) + "{}"); }, {"does not begin with '{'"});
}

TEST(Safetensors, HeaderContent) {
  refused("[1]", "", {"does not begin with '{'"});
  refused(" {}", "", {"does not begin with '{'"});
  refused("{", "", {"(header): byte 1", "the text ends"});
  refused("{}{}", "", {"after the end"});
  refused("{\"\xff\":{}}", "", {"UTF-8"});
  refused(R"({"a":1})", "", {"'a'", "is not an object"});
  refused(R"({"a":{}})", "", {"'a'", "'dtype' is not a string"});
  refused(R"({"a":{"dtype":"U8","shape":[1]}})", "", {"'data_offsets' is not an array"});
  refused(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", "1", {"'shape' is not an array"});
  refused(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", "1", {"'shape' holds '-1'"});
  refused(R"({"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}})", "1", {"'shape' holds '1.0'"});
  refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0]}})", "1", {"holds 1 values; expected 2"});
  refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,"1"]}})", "1", {"'data_offsets' holds '\"1\"'"});
  refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":1}})", "1", {"unknown field 'x'"});
  refused(R"({"":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "1", {"name is empty"});
  refused(R"({"__metadata__":[]})", "", {"__metadata__ is not an object"});
  refused(R"({"__metadata__":{"n":1}})", "", {"__metadata__ 'n' is not a string"});
  refused(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
      "1", {"'a' appears twice"});
  refused(R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", "1", {"deeper than 3"});
  refused<Unsupported>(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1],"data_offsets":[0,1]}})", "1",
                       {"'a'", "6 dimensions"});
}

TEST(Safetensors, RangesAndSizes) {
  refused(R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})", "1", {"'a'", "[0, 2]", "1 data bytes"});
  refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}})", "1", {"[1, 0]", "not a range"});
  refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[9223372036854775807,9223372036854775807]}})", "1",
          {"not a range"});
  refused(R"({"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,8]}})", "12345678",
          {"F32 [2, 3] takes 24 bytes", "[0, 8] hold 8"});
  refused(R"({"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}})", "12", {"F4 [3] takes 2 bytes"});
  refused(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}})", "",
          {"[4611686018427387904, 4]", "overflows"});
  refused(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4,0],"data_offsets":[0,0]}})", "", {"overflows"});
  refused(
      R"({"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}})",
      "123", {"'b' begins at data byte 1", "end at 2", "overlap"});
  refused(
      R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
      "123", {"'b' begins at data byte 2", "hole"});
  refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})", "12", {"hole"});
  refused(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})", "12", {"end at data byte 1", "2 data bytes"});
}

TEST(Safetensors, TruncatedAnywhereIsRefused) {
  const std::string content = content_of(std::string(EADEM_SOURCE_DIR) + "/tests/data/io/from_python.safetensors");
  ASSERT_GT(content.size(), 500u);
  for (size_t size = 0; size < content.size(); ++size)
    EXPECT_THROW(parse(content.substr(0, size)), DataCorrupted) << size;
  EXPECT_NO_THROW(parse(content));
}

// Every single-byte change either is refused or gives tensors whose bytes can all be read.
TEST(Safetensors, ChangedBytesNeverCrash) {
  const std::string content = content_of(std::string(EADEM_SOURCE_DIR) + "/tests/data/io/from_python.safetensors");
  uint64_t header_size = 0;
  std::memcpy(&header_size, content.data(), sizeof header_size);
  const size_t header_end = 8 + header_size;
  int num_accepted = 0;
  for (size_t pos = 0; pos < header_end; ++pos) {
    for (const char byte : {'\0', '0', '9', '"', '}', '\xff'}) {
      std::string changed = content;
      changed[pos] = byte;
      try {
        const auto file = parse(changed);
        ++num_accepted;
        for (const WeightInfo& info : file->tensors())
          if (info.type) {
            unsigned sum = 0;
            for (const char c : bytes_of_tensor(file->get(info.name).view)) sum += static_cast<uint8_t>(c);
            EXPECT_LT(sum, 1u << 20);
          }
      } catch (const Error&) {
      }
    }
  }
  EXPECT_GT(num_accepted, 0);
}

std::vector<NamedTensor> sample_tensors() {
  static float f32[6] = {1, 2, 3, 4, 5, 6};
  static uint8_t u8[3] = {7, 8, 9};
  static uint16_t half[4] = {0x3c00, 0xbc00, 0x7e00, 0};
  static int64_t i64[1] = {-5};
  static double f64[2] = {0.1, -0.2};
  return {{"layer.weight", TensorView(f32, DType::f32, {2, 3})}, {"u8", TensorView(u8, DType::u8, {3})},
          {"half", TensorView(half, DType::f16, {4, 1})},        {"bf16", TensorView(half, DType::bf16, {2, 2})},
          {"scalar", TensorView(i64, DType::i64, {})},           {"f64", TensorView(f64, DType::f64, {2})},
          {"empty", TensorView(f32, DType::f32, {0, 3})}};
}

TEST(SafetensorsWriter, RoundTrips) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("m.safetensors");
  const std::vector<NamedTensor> tensors = sample_tensors();
  const SafetensorsFile::Metadata metadata = {{"format", "pt"}, {"note", "a \"b\" ü"}};
  write_safetensors(path, tensors, metadata);
  const auto file = SafetensorsFile::open(path);
  EXPECT_EQ(file->metadata(), metadata);
  ASSERT_EQ(file->tensors().size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(file->tensors()[i].name, tensors[i].name);
    const Tensor read = file->get(tensors[i].name);
    EXPECT_EQ(read.dtype(), tensors[i].view.dtype);
    EXPECT_EQ(read.shape(), tensors[i].view.shape);
    EXPECT_EQ(bytes_of_tensor(read.view), bytes_of_tensor(tensors[i].view));
  }
  // A file that was read and written again has the bytes of the first.
  std::vector<NamedTensor> again;
  std::vector<Tensor> owners;
  for (const WeightInfo& info : file->tensors()) {
    owners.push_back(file->get(info.name));
    again.push_back({info.name, owners.back().view});
  }
  write_safetensors(scratch.file("again"), again, file->metadata());
  EXPECT_EQ(content_of(path), content_of(scratch.file("again")));
}

TEST(SafetensorsWriter, DataIsAlignedAndReadWithoutACopy) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("m.safetensors");
  write_safetensors(path, sample_tensors());
  const std::shared_ptr<const MappedFile> mapped = MappedFile::open(path);
  Tensor tensor;
  {
    const auto file = SafetensorsFile::parse(path, mapped->bytes(), mapped);
    tensor = file->get("layer.weight");
  }
  const auto* data = static_cast<const std::byte*>(tensor.view.data);
  EXPECT_GE(data, mapped->data());
  EXPECT_LE(data + 24, mapped->data() + mapped->size());
  EXPECT_EQ((data - mapped->data()) % 8, 0);
  EXPECT_EQ(tensor.view.as<float>()[5], 6.0f);  // the mapping outlives the file object
}

TEST(SafetensorsWriter, Refuses) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("m.safetensors");
  float data[4] = {};
  const TensorView view(data, DType::f32, {2, 2});
  const auto refuse = [&](std::vector<NamedTensor> tensors, std::initializer_list<std::string_view> words) {
    expect_error<InvalidArgument>([&] { write_safetensors(path, tensors); }, words);
  };
  refuse({{"a", view}, {"a", view}}, {path, "two tensors are named 'a'"});
  refuse({{"", view}}, {path, "not a tensor name"});
  refuse({{"\xff", view}}, {"not a tensor name"});
  refuse({{"__metadata__", view}}, {"reserved"});
  const uint8_t blocks[2 * 18] = {};
  TensorView encoded(const_cast<uint8_t*>(blocks), DType::f32, {2, 32});
  encoded.encoding = BlockEncoding::find("q4_0");
  refuse({{"a", encoded}}, {"'a'", "q4_0"});
  TensorView strided = view;
  strided.strides = Shape{1, 2};
  refuse({{"a", strided}}, {"'a'", "not contiguous"});
  expect_error<InvalidArgument>([&] { write_safetensors(path, {}, {{"k", "\xff"}}); }, {"UTF-8"});
  EXPECT_TRUE(scratch.names().empty());
  expect_error<IoError>([&] { write_safetensors(scratch.file("none/m"), {}); }, {"cannot write", "none/m"});
}

// ---- Shards ----

class Sharded : public testing::Test {
 protected:
  // Two shards with one tensor each, and an index.
  void SetUp() override {
    write_safetensors(scratch_.file("1.safetensors"), std::vector<NamedTensor>{{"a", view_}});
    write_safetensors(scratch_.file("2.safetensors"), std::vector<NamedTensor>{{"b", view_}});
  }
  std::shared_ptr<const WeightSource> open(std::string_view weight_map) const {
    return open_sharded_safetensors(
        scratch_.write("model.safetensors.index.json",
                       R"({"metadata":{"total_size":8},"weight_map":)" + std::string(weight_map) + "}"));
  }
  template <typename E>
  void refused(std::string_view weight_map, std::initializer_list<std::string_view> words) const {
    expect_error<E>([&] { open(weight_map); }, {"model.safetensors.index.json"});
    expect_error<E>([&] { open(weight_map); }, words);
  }

  ScratchDirectory scratch_;
  float data_[1] = {3};
  TensorView view_{data_, DType::f32, {1}};
};

TEST_F(Sharded, ReadsInTheOrderOfTheIndex) {
  const auto source = open(R"({"b":"2.safetensors","a":"1.safetensors"})");
  ASSERT_EQ(source->tensors().size(), 2u);
  EXPECT_EQ(source->tensors()[0].name, "b");
  EXPECT_EQ(source->get("a").view.as<float>()[0], 3.0f);
  EXPECT_EQ(source->get("b").view.as<float>()[0], 3.0f);
  expect_error<NotFound>([&] { source->get("c"); }, {"index.json", "'c'"});
}

TEST_F(Sharded, IndexAndShardsMustAgree) {
  refused<DataCorrupted>("{}", {"'weight_map' is empty"});
  refused<DataCorrupted>("[]", {"'weight_map' is []; expected an object"});
  refused<DataCorrupted>(R"({"a":1})", {"'weight_map.a' is 1; expected a string"});
  refused<NotFound>(R"({"a":"3.safetensors"})", {"'a'", "3.safetensors", "not there"});
  refused<DataCorrupted>(R"({"c":"1.safetensors"})", {"'c' should be in", "1.safetensors", "does not hold it"});
  refused<DataCorrupted>(R"({"a":"2.safetensors"})", {"'a' should be in"});
  write_safetensors(scratch_.file("2.safetensors"), std::vector<NamedTensor>{{"b", view_}, {"extra", view_}});
  refused<DataCorrupted>(R"({"a":"1.safetensors","b":"2.safetensors"})", {"2.safetensors", "'extra'", "does not name"});
  write_safetensors(scratch_.file("2.safetensors"), std::vector<NamedTensor>{{"b", view_}, {"a", view_}});
  refused<DataCorrupted>(R"({"a":"1.safetensors","b":"2.safetensors"})",
                         {"'a' is in two shards, '1.safetensors' and '2.safetensors'"});
}

TEST_F(Sharded, ShardsStayInTheirDirectory) {
  for (const char* name :
       {"../1.safetensors", "/etc/passwd", "sub/1.safetensors", "..", ".", "", "a\\\\b", "1.safetensors\\u0000"})
    refused<DataCorrupted>(R"({"a":")" + std::string(name) + R"("})", {"'a' is said to be in", "plain file name"});
}

TEST_F(Sharded, ABrokenShardIsNamed) {
  scratch_.write("2.safetensors", "short");
  expect_error<DataCorrupted>([&] { open(R"({"a":"1.safetensors","b":"2.safetensors"})"); },
                              {"2.safetensors", "5 bytes"});
}

}  // namespace
}  // namespace eadem::io
