// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/gguf.h"

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/io/files/mapped_file.h"
#include "test_files.h"

namespace eadem::io {
namespace gguf_test {

std::shared_ptr<const GgufFile> parse(std::string_view content) {
  const OwnedBytes owned(content);
  return GgufFile::parse("m.gguf", owned.span(), owned.block);
}

// Builds a file byte by byte, so that every field can lie.
struct Builder {
  uint32_t version = 3;
  uint64_t num_tensors = 0;
  uint64_t num_pairs = 0;
  std::string pairs;
  std::string infos;
  std::string data;
  uint64_t alignment = 32;

  std::string size(uint64_t value) const { return version == 1 ? bytes(static_cast<uint32_t>(value)) : bytes(value); }
  std::string string(std::string_view text) const { return size(text.size()) + std::string(text); }

  Builder& pair(std::string_view key, uint32_t type, std::string_view value) {
    ++num_pairs;
    pairs += string(key) + bytes(type) + std::string(value);
    return *this;
  }
  Builder& tensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
    ++num_tensors;
    infos += string(name) + bytes(static_cast<uint32_t>(dims.size()));
    for (const uint64_t dim : dims) infos += size(dim);
    infos += bytes(type) + bytes(offset);
    return *this;
  }
  std::string content() const {
    std::string result = "GGUF" + bytes(version) + size(num_tensors) + size(num_pairs) + pairs + infos;
    result.append((alignment - result.size() % alignment) % alignment, '\0');
    return result + data;
  }
};

template <typename E = DataCorrupted>
void refused(const Builder& builder, std::initializer_list<std::string_view> words) {
  expect_error<E>([&] { parse(builder.content()); }, {"m.gguf"});
  expect_error<E>([&] { parse(builder.content()); }, words);
}

std::string padded(std::string text, size_t alignment = 32) {
  text.append((alignment - text.size() % alignment) % alignment, '\0');
  return text;
}

TEST(Gguf, EveryVersion) {
  for (const uint32_t version : {1u, 2u, 3u}) {
    Builder builder;
    builder.version = version;
    builder.pair("n", 4, bytes<uint32_t>(5)).pair("s", 8, builder.string("text"));
    builder.pair("a", 9, bytes<uint32_t>(8) + builder.size(2) + builder.string("x") + builder.string(""));
    builder.tensor("w", {3, 2}, 0, 0).tensor("v", {2}, 1, 32);
    builder.data = padded(bytes(1.f) + bytes(2.f) + bytes(3.f) + bytes(4.f) + bytes(5.f) + bytes(6.f)) + "1234";
    const auto file = parse(builder.content());
    EXPECT_EQ(file->version(), version);
    EXPECT_EQ(file->integer("n", 0, 10), 5);
    EXPECT_EQ(file->string("s"), "text");
    EXPECT_EQ(file->strings("a"), (std::vector<std::string>{"x", ""}));
    EXPECT_EQ(file->get("w").shape(), (Shape{2, 3}));  // row-major: ne is [3, 2]
    EXPECT_EQ(file->get("w").view.as<float>()[5], 6.0f);
    EXPECT_EQ(file->get("v").dtype(), DType::f16);
    EXPECT_EQ(file->tensors()[1].size_bytes, 4);
  }
}

TEST(Gguf, HeaderOfAnotherKind) {
  expect_error<DataCorrupted>([] { parse(""); }, {"m.gguf: byte 0", "the magic takes 4 bytes"});
  expect_error<DataCorrupted>([] { parse("GGML" + std::string(50, '\0')); }, {"begins with 'GGML'"});
  Builder builder;
  builder.version = 4;
  refused<Unsupported>(builder, {"version 4", "1 to 3"});
  builder.version = 0;
  refused<Unsupported>(builder, {"version 0"});
  builder.version = 0x03000000;
  refused<Unsupported>(builder, {"big-endian"});
}

TEST(Gguf, CountsAreCheckedAgainstTheFile) {
  Builder builder;
  builder.num_tensors = 1;
  refused(builder, {"1 tensors cannot fit"});
  builder.num_tensors = ~0ull;
  refused(builder, {"18446744073709551615 tensors cannot fit"});
  builder = {};
  builder.num_pairs = 1ull << 60;
  refused(builder, {"metadata pairs cannot fit"});
  builder = {};
  builder.num_pairs = (1 << 20) + 1;
  builder.data = std::string(20 << 20, '\0');
  refused(builder, {"1048577 metadata pairs; at most 1048576"});
  builder = {};
  builder.pair("a", 9, bytes<uint32_t>(8) + bytes(1ull << 61));
  refused(builder, {"strings cannot fit"});
  builder = {};
  builder.pair("a", 9, bytes<uint32_t>(12) + bytes(1ull << 61));
  refused(builder, {"array elements cannot fit"});
  builder = {};
  builder.pair("a", 9, bytes<uint32_t>(9) + bytes(1ull << 61));
  refused(builder, {"arrays cannot fit"});
  builder = {};
  builder.pair("a", 8, bytes(~0ull));
  refused(builder, {"a string takes 18446744073709551615 bytes, but the file ends"});
}

TEST(Gguf, MetadataIsChecked) {
  refused(Builder().pair("a", 13, bytes(0ull)), {"value type is 13; expected 0 to 12"});
  refused(Builder().pair("a", 9, bytes<uint32_t>(99) + bytes(0ull)), {"array element type is 99"});
  refused(Builder().pair("a", 7, "\2"), {"'a' holds the boolean 2"});
  refused(Builder().pair("a", 9, bytes<uint32_t>(7) + bytes(2ull) + "\1\3"), {"'a' holds the boolean 3"});
  refused(Builder().pair("", 7, "\1"), {"metadata key is empty"});
  refused(Builder().pair("\xff", 7, "\1"), {"'\\xff' is not valid UTF-8"});
  refused(Builder().pair("a", 7, "\1").pair("a", 7, "\1"), {"the metadata key 'a' appears twice"});
  std::string nested;
  for (int i = 0; i < 8; ++i) nested += bytes<uint32_t>(9) + bytes(1ull);
  refused(Builder().pair("a", 9, nested + bytes<uint32_t>(0) + bytes(0ull)), {"'a' nests arrays deeper than 8"});
  EXPECT_NO_THROW(parse(Builder().pair("a", 9, nested.substr(12) + bytes<uint32_t>(0) + bytes(0ull)).content()));
}

TEST(Gguf, Alignment) {
  Builder builder;
  builder.alignment = 64;
  builder.pair("general.alignment", 4, bytes<uint32_t>(64));
  builder.tensor("a", {1}, 26, 0).tensor("b", {1}, 26, 64);
  builder.data = padded(bytes<int32_t>(1), 64) + bytes<int32_t>(2);
  EXPECT_EQ(parse(builder.content())->get("b").view.as<int32_t>()[0], 2);
  builder.infos.clear();
  builder.num_tensors = 0;
  builder.tensor("a", {1}, 26, 32);
  refused(builder, {"'a' is at offset 32", "multiple of the alignment 64"});

  for (const uint32_t bad : {3u, 24u, 0xffffffffu})
    refused(Builder().pair("general.alignment", 4, bytes(bad)), {"'general.alignment' is u32", "a power of two"});
  refused(Builder().pair("general.alignment", 4, bytes<uint32_t>(0)), {"'general.alignment' is u32 0"});
  refused(Builder().pair("general.alignment", 7, "\1"), {"'general.alignment' is true"});
}

TEST(Gguf, MisalignedDataIsCopied) {
  Builder builder;
  builder.alignment = 1;
  builder.pair("general.alignment", 4, bytes<uint32_t>(1));
  builder.tensor("pad", {1}, 24, 0).tensor("x", {2}, 0, 1);
  builder.data = "!" + bytes(2.5f) + bytes(-1.0f);
  for (int shift = 0; shift < 4; ++shift) {  // some placement is misaligned whatever the header's length
    builder.infos.clear();
    builder.num_tensors = 0;
    builder.tensor("pad" + std::string(shift, 'd'), {1}, 24, 0).tensor("x", {2}, 0, 1);
    const Tensor x = parse(builder.content())->get("x");
    EXPECT_EQ(reinterpret_cast<uintptr_t>(x.view.data) % alignof(float), 0u);
    EXPECT_EQ(x.view.as<float>()[1], -1.0f);
  }
}

TEST(Gguf, TensorsAreChecked) {
  Builder good;
  good.data = std::string(64, '\0');
  const auto with = [&](std::string_view name, const std::vector<uint64_t>& dims, uint32_t type, uint64_t offset) {
    Builder builder = good;
    return builder.tensor(name, dims, type, offset);
  };
  EXPECT_NO_THROW(parse(with("a", {16}, 0, 0).content()));
  EXPECT_EQ(parse(with("a", {}, 0, 0).content())->get("a").shape(), Shape{});
  EXPECT_EQ(parse(with("a", {4, 0}, 0, 0).content())->get("a").shape(), (Shape{0, 4}));
  refused(with("", {1}, 0, 0), {"tensor name is empty"});
  refused(with("\xff", {1}, 0, 0), {"tensor name '\\xff' is not valid UTF-8"});
  refused(with("a", {1, 1, 1, 1, 1}, 0, 0), {"'a' has 5 dimensions; expected at most 4"});
  refused(with("a", {1ull << 63}, 0, 0), {"[9223372036854775808]", "'a' overflows"});
  refused(with("a", {1ull << 32, 1ull << 32}, 0, 0), {"[4294967296, 4294967296]", "overflows"});
  refused(with("a", {1ull << 32, 1ull << 32, 0}, 0, 0), {"overflows"});
  refused<Unsupported>(with("a", {1}, 4, 0), {"'a'", "unknown ggml type 4"});
  refused<Unsupported>(with("a", {1}, 1000, 0), {"unknown ggml type 1000"});
  refused(with("a", {33}, 2, 0), {"rows of 33 values; Q4_0 needs a multiple of 32"});
  refused(with("a", {17}, 0, 0), {"'a' (F32 [17]) takes 68 bytes at offset 0", "64 bytes"});
  refused(with("a", {1}, 0, 64), {"takes 4 bytes at offset 64"});
  refused(with("a", {1}, 0, ~0ull - 31), {"takes 4 bytes at offset 18446744073709551584"});
  refused(with("a", {1}, 0, 4), {"offset 4, which is not a multiple of the alignment 32"});
  refused(with("a", {9}, 0, 0).tensor("b", {1}, 0, 32), {"'a' and 'b' overlap at offset 32"});
  refused(with("a", {1}, 0, 0).tensor("b", {1}, 0, 0), {"overlap at offset 0"});
  refused(with("a", {1}, 0, 0).tensor("a", {1}, 0, 32), {"the tensor 'a' appears twice"});
}

TEST(Gguf, BlockTypesAreReadAsTheyLie) {
  Builder builder;
  builder.tensor("q", {256, 2}, 12, 0);
  builder.data = std::string(2 * 144, '\0');
  const auto file = parse(builder.content());
  EXPECT_EQ(file->find("q")->type_name, "Q4_K");
  EXPECT_EQ(file->find("q")->size_bytes, 288);
  const TensorView view = file->get("q").view;
  EXPECT_EQ(view.encoding, BlockEncoding::find("q4_k"));
  EXPECT_EQ(view.shape, Shape({2, 256}));
}

TEST(Gguf, TypesWithoutAnEncodingAreListedAndRefusedOnAccess) {
  Builder builder;
  builder.tensor("q", {256, 2}, 15, 0);
  builder.data = std::string(2 * 292, '\0');
  const auto file = parse(builder.content());
  EXPECT_EQ(file->find("q")->type_name, "Q8_K");
  EXPECT_EQ(file->find("q")->size_bytes, 584);
  expect_error<Unsupported>([&] { file->get("q"); }, {"m.gguf", "'q' [2, 256]", "Q8_K"});
}

TEST(Gguf, TypedMetadata) {
  const std::string path = std::string(EADEM_SOURCE_DIR) + "/tests/data/io/from_python.gguf";
  const auto file = GgufFile::open(path);
  EXPECT_EQ(file->string("general.architecture"), "llama");
  EXPECT_EQ(file->integer("t.u8", 0, 255), 200);
  EXPECT_EQ(file->integer("t.i8", -100, 0), -100);
  EXPECT_EQ(file->integer("t.u16", 0, 60000), 60000);
  EXPECT_EQ(file->integer("t.i16", -30000, 0), -30000);
  EXPECT_EQ(file->integer("t.u32", 0, 4000000000), 4000000000);
  EXPECT_EQ(file->integer("t.i32", INT32_MIN, 0), -2000000000);
  EXPECT_EQ(file->integer("t.i64", INT64_MIN, 0), INT64_MIN);
  EXPECT_EQ(file->number("t.f32"), 1.5);
  EXPECT_EQ(file->number("t.f64"), 0.1);
  EXPECT_EQ(file->number("t.u64"), 0x1p64);
  EXPECT_EQ(file->boolean("t.true"), true);
  EXPECT_EQ(file->string("t.string"), "grüße");
  EXPECT_EQ(file->integers("t.ints", -2, 3), (std::vector<int64_t>{1, -2, 3}));
  EXPECT_EQ(file->numbers("t.floats"), (std::vector<float>{0.5f, -0.25f}));
  EXPECT_EQ(file->numbers("t.ints"), (std::vector<float>{1, -2, 3}));
  EXPECT_EQ(file->strings("t.strings"), (std::vector<std::string>{"a", "", "bc"}));
  const auto& nested = std::get<GgufArray>(file->find_metadata("t.nested")->data);
  EXPECT_EQ(nested.size(), 2u);
  EXPECT_EQ(nested.arrays[0].size(), 2u);
  EXPECT_EQ(std::get<GgufArray>(file->find_metadata("t.bools")->data).scalars, std::string("\1\0", 2));
  EXPECT_EQ(file->optional_integer("none", 0, 1), std::nullopt);
  EXPECT_EQ(file->optional_number("none"), std::nullopt);
  EXPECT_EQ(file->optional_boolean("none"), std::nullopt);
  EXPECT_EQ(file->optional_string("none"), std::nullopt);
  EXPECT_EQ(file->optional_string("t.string"), "grüße");

  const auto refuse = [&](auto&& action, std::string_view words) {
    expect_error<DataCorrupted>(action, {path, words});
  };
  refuse([&] { file->integer("none", 0, 1); }, "metadata 'none' is missing; expected an integer in [0, 1]");
  refuse([&] { file->integer("t.string", 0, 1); }, "'t.string' is a string 'grüße'; expected an integer in [0, 1]");
  refuse([&] { file->integer("t.u8", 0, 199); }, "'t.u8' is u8 200; expected an integer in [0, 199]");
  refuse([&] { file->integer("t.u64", 0, INT64_MAX); }, "'t.u64' is u64 18446744073709551615");
  refuse([&] { file->optional_integer("t.i8", 0, 9); }, "'t.i8' is i8 -100");
  refuse([&] { file->integer("t.f32", 0, 9); }, "'t.f32' is f32 1.5");
  refuse([&] { file->number("t.true"); }, "'t.true' is true; expected a number");
  refuse([&] { file->boolean("t.u8"); }, "expected a boolean");
  refuse([&] { file->string("t.ints"); }, "'t.ints' is an array of 3 i32; expected a string");
  refuse([&] { file->strings("t.ints"); }, "expected an array of strings");
  refuse([&] { file->integers("t.strings", 0, 9); },
         "'t.strings' is an array of 3 string; expected an array of integers");
  refuse([&] { file->integers("t.nested", 0, 9); }, "expected an array of integers");
  refuse([&] { file->integers("t.ints", 0, 9); }, "'t.ints'[1] is i32 -2; expected an integer in [0, 9]");
  refuse([&] { file->integers("t.floats", 0, 9); }, "'t.floats'[0] is f32 0.5");
  refuse([&] { file->numbers("t.bools"); }, "expected an array of numbers");
}

TEST(Gguf, TruncatedAnywhereIsRefused) {
  const std::string content = content_of(std::string(EADEM_SOURCE_DIR) + "/tests/data/io/from_python.gguf");
  // The last tensor holds 6 floats; what follows them is padding, which a file may lack.
  const size_t used = (content.size() - 32) + 24;
  for (size_t size = 0; size < used; ++size) EXPECT_THROW(parse(content.substr(0, size)), Error) << size;
  for (size_t size = used; size <= content.size(); ++size) EXPECT_NO_THROW(parse(content.substr(0, size))) << size;
}

// Every single-byte change either is refused or gives tensors whose bytes can all be read.
TEST(Gguf, ChangedBytesNeverCrash) {
  const std::string content = content_of(std::string(EADEM_SOURCE_DIR) + "/tests/data/io/from_python.gguf");
  int num_accepted = 0;
  for (size_t pos = 0; pos < content.size(); ++pos) {
    for (const char byte : {'\0', '\1', '\x7f', '\xff'}) {
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

TEST(GgufWriter, RoundTrips) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("m.gguf");
  GgufArray nested{GgufType::array, {}, {}, {}};
  const std::vector<int16_t> shorts = {-1, 2};
  nested.arrays.push_back(std::get<GgufArray>(GgufValue::scalars(std::span<const int16_t>(shorts)).data));
  nested.arrays.push_back(std::get<GgufArray>(GgufValue::strings({"x", ""}).data));
  const GgufMetadata metadata = {
      {"general.architecture", GgufValue::string("llama")},
      {"u8", GgufValue::scalar<uint8_t>(255)},
      {"i8", GgufValue::scalar<int8_t>(-128)},
      {"u16", GgufValue::scalar<uint16_t>(65535)},
      {"i16", GgufValue::scalar<int16_t>(-32768)},
      {"u32", GgufValue::scalar<uint32_t>(4294967295u)},
      {"i32", GgufValue::scalar<int32_t>(-5)},
      {"u64", GgufValue::scalar<uint64_t>(~0ull)},
      {"i64", GgufValue::scalar<int64_t>(INT64_MIN)},
      {"f32", GgufValue::scalar(0.1f)},
      {"f64", GgufValue::scalar(0.1)},
      {"yes", GgufValue::boolean(true)},
      {"general.alignment", GgufValue::scalar<uint32_t>(64)},
      {"tokens", GgufValue::strings({"<s>", "\xff", ""})},
      {"nested", GgufValue{GgufType::array, nested}},
      {"none", GgufValue::scalars(std::span<const float>())},
  };
  std::vector<float> values(24);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i) - 3;
  const std::vector<NamedTensor> tensors = {
      {"a", TensorView(values.data(), DType::f32, {2, 3, 4})}, {"b", TensorView(values.data(), DType::bf16, {3, 3})},
      {"c", TensorView(values.data(), DType::f16, {5})},       {"d", TensorView(values.data(), DType::i64, {})},
      {"e", TensorView(values.data(), DType::i32, {2, 0})},    {"f", TensorView(values.data(), DType::f64, {1, 2})}};
  write_gguf(path, metadata, tensors);
  const auto file = GgufFile::open(path);
  EXPECT_EQ(file->version(), 3u);
  EXPECT_EQ(file->metadata(), metadata);
  ASSERT_EQ(file->tensors().size(), tensors.size());
  for (const NamedTensor& tensor : tensors) {
    const Tensor read = file->get(tensor.name);
    EXPECT_EQ(read.dtype(), tensor.view.dtype);
    EXPECT_EQ(read.shape(), tensor.view.shape);
    EXPECT_EQ(bytes_of_tensor(read.view), bytes_of_tensor(tensor.view));
    if (tensor.name == "a") {
      EXPECT_EQ(reinterpret_cast<uintptr_t>(read.view.data) % 64, 0u);
    }
  }
}

// The header and padding that the gguf package writes for the same content.
TEST(GgufWriter, SameBytesAsThePackage) {
  const ScratchDirectory scratch;
  const std::string golden = std::string(EADEM_SOURCE_DIR) + "/tests/data/io/plain_from_python.gguf";
  const auto file = GgufFile::open(golden);
  std::vector<Tensor> owners;
  std::vector<NamedTensor> tensors;
  for (const WeightInfo& info : file->tensors()) {
    owners.push_back(file->get(info.name));
    tensors.push_back({info.name, owners.back().view});
  }
  write_gguf(scratch.file("again.gguf"), file->metadata(), tensors);
  EXPECT_EQ(content_of(scratch.file("again.gguf")), content_of(golden));
}

// Tensors that come row by row make the same file, which is not there before the last of them.
TEST(GgufWriter, WritesTensorsInParts) {
  const ScratchDirectory scratch;
  std::vector<float> values(3 * 64 + 5);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 17) - 8;
  const BlockEncoding* q4_0 = BlockEncoding::find("q4_0");
  std::vector<uint8_t> blocks(3 * static_cast<size_t>(q4_0->row_bytes(64)));
  TensorView encoded(blocks.data(), DType::f32, {3, 64});
  encoded.encoding = q4_0;
  q4_0->encode(encoded, TensorView(values.data(), DType::f32, {3, 64}));
  const std::vector<NamedTensor> tensors = {{"none", TensorView(values.data(), DType::f32, {0, 4})},
                                            {"encoded", encoded},
                                            {"plain", TensorView(values.data(), DType::bf16, {3, 5})},
                                            {"last", TensorView(values.data(), DType::f32, {2, 0})}};
  write_gguf(scratch.file("whole.gguf"), {}, tensors);
  const std::vector<std::string> before = scratch.names();

  const std::string path = scratch.file("parts.gguf");
  const std::vector<TensorHeader> headers = {{"none", DType::f32, {0, 4}},
                                             {"encoded", {DType::f32, q4_0}, {3, 64}},
                                             {"plain", DType::bf16, {3, 5}},
                                             {"last", DType::f32, {2, 0}}};
  const auto write_parts = [&](WeightWriter& writer) {
    for (int64_t row = 0; row < 3; ++row) {
      TensorView part(blocks.data() + row * q4_0->row_bytes(64), DType::f32, {1, 64});
      part.encoding = q4_0;
      writer.write(part);
    }
    auto* halves = reinterpret_cast<bf16_t*>(values.data());
    writer.write(TensorView(halves, DType::bf16, {1, 5}));
    writer.write(TensorView(halves + 5, DType::bf16, {2, 5}));
  };
  {
    const auto abandoned = begin_gguf(path, {}, headers);
    write_parts(*abandoned);
  }
  EXPECT_EQ(scratch.names(), before);
  const auto writer = begin_gguf(path, {}, headers);
  write_parts(*writer);
  writer->commit();
  EXPECT_EQ(content_of(path), content_of(scratch.file("whole.gguf")));
}

TEST(GgufWriter, Refuses) {
  const ScratchDirectory scratch;
  const std::string path = scratch.file("m.gguf");
  float data[4] = {};
  const TensorView view(data, DType::f32, {2, 2});
  const auto refuse = [&](const GgufMetadata& metadata, std::vector<NamedTensor> tensors,
                          std::initializer_list<std::string_view> words) {
    expect_error<InvalidArgument>([&] { write_gguf(path, metadata, tensors); }, words);
  };
  refuse({}, {{"a", view}, {"a", view}}, {path, "two tensors are named 'a'"});
  refuse({}, {{"a", TensorView(data, DType::u8, {4})}}, {path, "'a', which is u8"});
  refuse({}, {{"a", TensorView(data, DType::f32, {1, 1, 1, 2, 2})}}, {"'a' [1, 1, 1, 2, 2] has more than 4"});
  refuse({{"k", GgufValue::boolean(true)}, {"k", GgufValue::boolean(true)}}, {}, {"'k' is malformed or appears twice"});
  refuse({{"", GgufValue::boolean(true)}}, {}, {"''"});
  refuse({{"general.alignment", GgufValue::scalar<uint32_t>(48)}}, {}, {"general.alignment"});
  refuse({{"general.alignment", GgufValue::boolean(true)}}, {}, {"general.alignment"});
  EXPECT_TRUE(scratch.names().empty());
  expect_error<IoError>([&] { write_gguf(scratch.file("none/m"), {}, {}); }, {"cannot write", "none/m"});
}

}  // namespace gguf_test
}  // namespace eadem::io
