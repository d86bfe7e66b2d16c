// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/gguf.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/gguf_parts.h"
#include "eadem/io/text.h"
#include "eadem/io/weights_internal.h"

namespace eadem::io {

// ---- Types -----------------------------------------------------------------------------------------------------

namespace {

constexpr std::array<std::string_view, 13> kTypeNames = {"u8",      "i8",     "u16",   "i16", "u32", "i32", "f32",
                                                         "boolean", "string", "array", "u64", "i64", "f64"};

// Q8_1 (9) is absent: it only ever holds activations, and its size has changed between versions of ggml.
constexpr auto kGgmlTypes = std::to_array<GgmlType>({
    {0, "F32", 1, 4, DType::f32},  {1, "F16", 1, 2, DType::f16},
    {2, "Q4_0", 32, 18, {}},       {3, "Q4_1", 32, 20, {}},
    {6, "Q5_0", 32, 22, {}},       {7, "Q5_1", 32, 24, {}},
    {8, "Q8_0", 32, 34, {}},       {10, "Q2_K", 256, 84, {}},
    {11, "Q3_K", 256, 110, {}},    {12, "Q4_K", 256, 144, {}},
    {13, "Q5_K", 256, 176, {}},    {14, "Q6_K", 256, 210, {}},
    {15, "Q8_K", 256, 292, {}},    {16, "IQ2_XXS", 256, 66, {}},
    {17, "IQ2_XS", 256, 74, {}},   {18, "IQ3_XXS", 256, 98, {}},
    {19, "IQ1_S", 256, 50, {}},    {20, "IQ4_NL", 32, 18, {}},
    {21, "IQ3_S", 256, 110, {}},   {22, "IQ2_S", 256, 82, {}},
    {23, "IQ4_XS", 256, 136, {}},  {24, "I8", 1, 1, {}},
    {25, "I16", 1, 2, {}},         {26, "I32", 1, 4, DType::i32},
    {27, "I64", 1, 8, DType::i64}, {28, "F64", 1, 8, DType::f64},
    {29, "IQ1_M", 256, 56, {}},    {30, "BF16", 1, 2, DType::bf16},
    {34, "TQ1_0", 256, 54, {}},    {35, "TQ2_0", 256, 66, {}},
    {39, "MXFP4", 32, 17, {}},     {40, "NVFP4", 64, 36, {}},
    {41, "Q1_0", 128, 18, {}},
});

// The bytes of a scalar of that type in the file; 0 for strings and arrays.
constexpr size_t scalar_size(GgufType type) {
  switch (type) {
    case GgufType::u8:
    case GgufType::i8:
    case GgufType::boolean: return 1;
    case GgufType::u16:
    case GgufType::i16: return 2;
    case GgufType::u32:
    case GgufType::i32:
    case GgufType::f32: return 4;
    case GgufType::u64:
    case GgufType::i64:
    case GgufType::f64: return 8;
    case GgufType::string:
    case GgufType::array: return 0;
  }
  return 0;
}

template <typename T>
T load_as(const char* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// The scalar that lies at `bytes`.
GgufValue load_scalar(GgufType type, const char* bytes) {
  switch (type) {
    case GgufType::u8: return GgufValue::scalar(load_as<uint8_t>(bytes));
    case GgufType::i8: return GgufValue::scalar(load_as<int8_t>(bytes));
    case GgufType::u16: return GgufValue::scalar(load_as<uint16_t>(bytes));
    case GgufType::i16: return GgufValue::scalar(load_as<int16_t>(bytes));
    case GgufType::u32: return GgufValue::scalar(load_as<uint32_t>(bytes));
    case GgufType::i32: return GgufValue::scalar(load_as<int32_t>(bytes));
    case GgufType::f32: return GgufValue::scalar(load_as<float>(bytes));
    case GgufType::boolean: return GgufValue::boolean(*bytes != 0);
    case GgufType::u64: return GgufValue::scalar(load_as<uint64_t>(bytes));
    case GgufType::i64: return GgufValue::scalar(load_as<int64_t>(bytes));
    case GgufType::f64: return GgufValue::scalar(load_as<double>(bytes));
    case GgufType::string:
    case GgufType::array: break;
  }
  EADEM_UNREACHABLE("{} is not a scalar", gguf_type_name(type));
}

}  // namespace

std::string_view gguf_type_name(GgufType type) { return kTypeNames[static_cast<size_t>(type)]; }

const GgmlType* find_ggml_type(uint32_t id) {
  const auto it = std::find_if(kGgmlTypes.begin(), kGgmlTypes.end(), [&](const auto& type) { return type.id == id; });
  return it == kGgmlTypes.end() ? nullptr : &*it;
}

std::optional<WeightType> GgmlType::weight_type() const {
  if (dtype) return WeightType{*dtype};
  std::string encoding_name(name);
  for (char& c : encoding_name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  const BlockEncoding* encoding = BlockEncoding::find(encoding_name);
  if (encoding == nullptr) return std::nullopt;
  EADEM_CHECK(encoding->format().block_size == block_size && encoding->format().block_bytes == block_bytes,
              "{} in two sizes", name);
  return WeightType{DType::f32, encoding};
}

size_t GgufArray::size() const {
  if (element_type == GgufType::string) return strings.size();
  if (element_type == GgufType::array) return arrays.size();
  return scalars.size() / scalar_size(element_type);
}

// ---- Reader ----------------------------------------------------------------------------------------------------

namespace {

constexpr int kMaxArrayDepth = 8;
// Far above any real file; they bound the memory that a hostile header can ask for.
constexpr uint64_t kMaxPairs = 1 << 20;
constexpr uint64_t kMaxTensors = 1 << 20;
constexpr uint64_t kMaxArrayElements = 1 << 24;  // summed over all arrays of strings and of arrays

// Reads the header front to back; every read is checked against the end of the file.
class HeaderReader {
 public:
  HeaderReader(const std::string& path, std::span<const std::byte> bytes) : path_(path), bytes_(bytes) {}

  size_t pos() const { return pos_; }
  size_t remaining() const { return bytes_.size() - pos_; }
  void set_version(uint32_t version) { version_ = version; }

  [[noreturn]] void fail(const std::string& problem) const {
    throw DataCorrupted("{}: byte {}: {}", path_, pos_, problem);
  }

  const char* take(uint64_t count, std::string_view what) {
    if (count > remaining())
      fail(fmt::format("{} takes {} bytes, but the file ends after {} more", what, count, remaining()));
    const char* result = reinterpret_cast<const char*>(bytes_.data()) + pos_;
    pos_ += count;
    return result;
  }

  uint32_t u32(std::string_view what) { return load_as<uint32_t>(take(4, what)); }
  uint64_t u64(std::string_view what) { return load_as<uint64_t>(take(8, what)); }
  // Counts, lengths and extents: 32 bits in version 1, 64 bits since.
  uint64_t size(std::string_view what) { return version_ == 1 ? u32(what) : u64(what); }
  size_t size_bytes() const { return version_ == 1 ? 4 : 8; }

  // A count of things that take at least `min_bytes` each: refused when they cannot fit, before anyone reserves.
  uint64_t count(std::string_view what, uint64_t min_bytes, uint64_t max) {
    const uint64_t value = size(what);
    check_count(value, what, min_bytes, max);
    return value;
  }
  void check_count(uint64_t value, std::string_view what, uint64_t min_bytes, uint64_t max) const {
    if (value > remaining() / min_bytes)
      fail(fmt::format("{} {} cannot fit in the {} bytes that follow", value, what, remaining()));
    if (value > max) fail(fmt::format("{} {}; at most {} are accepted", value, what, max));
  }

  std::string_view string(std::string_view what) {
    const uint64_t length = size(what);
    return {take(length, what), length};
  }

  std::string name(std::string_view what) {
    const std::string_view text = string(what);
    if (text.empty()) fail(fmt::format("{} is empty", what));
    if (!is_valid_utf8(text)) fail(fmt::format("{} {} is not valid UTF-8", what, quote(text)));
    return std::string(text);
  }

  GgufType type(std::string_view what) {
    const uint32_t value = u32(what);
    if (value >= kTypeNames.size()) fail(fmt::format("{} is {}; expected 0 to {}", what, value, kTypeNames.size() - 1));
    return static_cast<GgufType>(value);
  }

  GgufValue value(const std::string& key) {
    const GgufType value_type = type("value type");
    if (value_type == GgufType::string) return GgufValue::string(std::string(string("a string")));
    if (value_type == GgufType::array) return {GgufType::array, array(key, 1)};
    const char* bytes = take(scalar_size(value_type), "a value");
    check_boolean(value_type, *bytes, key);
    return load_scalar(value_type, bytes);
  }

 private:
  void check_boolean(GgufType value_type, char byte, const std::string& key) const {
    if (value_type == GgufType::boolean && byte != 0 && byte != 1)
      fail(fmt::format("{} holds the boolean {}; expected 0 or 1", quote(key), static_cast<uint8_t>(byte)));
  }

  GgufArray array(const std::string& key, int depth) {
    if (depth > kMaxArrayDepth) fail(fmt::format("{} nests arrays deeper than {} levels", quote(key), kMaxArrayDepth));
    GgufArray result;
    result.element_type = type("array element type");
    if (result.element_type == GgufType::string) {
      const uint64_t num_strings = count("strings", size_bytes(), kMaxArrayElements - num_array_elements_);
      num_array_elements_ += num_strings;
      result.strings.reserve(num_strings);
      for (uint64_t i = 0; i < num_strings; ++i) result.strings.emplace_back(string("a string"));
    } else if (result.element_type == GgufType::array) {
      const uint64_t num_arrays = count("arrays", 4 + size_bytes(), kMaxArrayElements - num_array_elements_);
      num_array_elements_ += num_arrays;
      for (uint64_t i = 0; i < num_arrays; ++i) result.arrays.push_back(array(key, depth + 1));
    } else {
      const uint64_t num_scalars = count("array elements", scalar_size(result.element_type), UINT64_MAX);
      result.scalars.assign(take(num_scalars * scalar_size(result.element_type), "an array"),
                            num_scalars * scalar_size(result.element_type));
      for (const char byte : result.scalars) check_boolean(result.element_type, byte, key);
    }
    return result;
  }

  const std::string& path_;
  std::span<const std::byte> bytes_;
  size_t pos_ = 0;
  uint32_t version_ = 0;
  uint64_t num_array_elements_ = 0;
};

struct TensorRange {
  uint64_t offset = 0;  // counted from the beginning of the data section
  uint64_t size = 0;
};

std::pair<WeightInfo, TensorRange> read_tensor_info(HeaderReader& reader, const std::string& path) {
  WeightInfo info;
  info.name = reader.name("tensor name");
  const std::string name = quote(info.name);
  const uint32_t rank = reader.u32("number of dimensions");
  if (rank > 4) reader.fail(fmt::format("tensor {} has {} dimensions; expected at most 4", name, rank));
  std::vector<uint64_t> dims(rank);
  for (uint64_t& dim : dims) dim = reader.size("extent");
  const uint64_t row = dims.empty() ? 1 : dims[0];
  std::reverse(dims.begin(), dims.end());
  info.shape = checked_shape(dims, path, info.name);

  const uint32_t type_id = reader.u32("tensor type");
  const GgmlType* type = find_ggml_type(type_id);
  if (type == nullptr) throw Unsupported("{}: tensor {} has the unknown ggml type {}", path, name, type_id);
  info.type_name = type->name;
  info.type = type->weight_type();
  const auto block_size = static_cast<uint64_t>(type->block_size);
  if (row % block_size != 0)
    reader.fail(
        fmt::format("tensor {} has rows of {} values; {} needs a multiple of {}", name, row, type->name, block_size));
  const std::optional<uint64_t> size = checked_mul(static_cast<uint64_t>(info.shape.num_elements()) / block_size,
                                                   static_cast<uint64_t>(type->block_bytes));
  if (!size || *size > static_cast<uint64_t>(INT64_MAX))
    reader.fail(fmt::format("the size of tensor {} {} {} overflows", name, type->name, to_string(info.shape)));
  info.size_bytes = static_cast<int64_t>(*size);
  const uint64_t offset = reader.u64("tensor offset");
  return {std::move(info), TensorRange{offset, *size}};
}

// The data section of `data_size` bytes holds every range, aligned and without overlap.
void check_ranges(const std::vector<WeightInfo>& infos, const std::vector<TensorRange>& ranges, uint64_t alignment,
                  uint64_t data_size, const std::string& path) {
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (ranges[i].offset % alignment != 0)
      throw DataCorrupted("{}: tensor {} is at offset {}, which is not a multiple of the alignment {}", path,
                          quote(infos[i].name), ranges[i].offset, alignment);
    const std::optional<uint64_t> end = checked_add(ranges[i].offset, ranges[i].size);
    if (!end || *end > data_size)
      throw DataCorrupted("{}: tensor {} ({} {}) takes {} bytes at offset {}, but the data section has {} bytes", path,
                          quote(infos[i].name), infos[i].type_name, to_string(infos[i].shape), ranges[i].size,
                          ranges[i].offset, data_size);
  }
  std::vector<size_t> order;
  for (size_t i = 0; i < ranges.size(); ++i)
    if (ranges[i].size > 0) order.push_back(i);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return ranges[a].offset < ranges[b].offset; });
  for (size_t i = 1; i < order.size(); ++i) {
    const TensorRange& before = ranges[order[i - 1]];
    if (ranges[order[i]].offset < before.offset + before.size)
      throw DataCorrupted("{}: tensors {} and {} overlap at offset {}", path, quote(infos[order[i - 1]].name),
                          quote(infos[order[i]].name), ranges[order[i]].offset);
  }
}

}  // namespace

GgufFile::GgufFile(const std::string& path, std::span<const std::byte> bytes, std::shared_ptr<const void> owner)
    : WeightSource(path), owner_(std::move(owner)) {
  HeaderReader reader(path, bytes);
  const std::string_view magic(reader.take(4, "the magic"), 4);
  if (magic != "GGUF") throw DataCorrupted("{}: begins with {}; expected 'GGUF'", path, quote(magic));
  version_ = reader.u32("the version");
  if (version_ != 0 && (version_ & 0xffffu) == 0)
    throw Unsupported("{}: a big-endian GGUF file; only little endian is read", path);
  if (version_ < 1 || version_ > 3) throw Unsupported("{}: GGUF version {}; versions 1 to 3 are read", path, version_);
  reader.set_version(version_);

  const uint64_t num_tensors = reader.size("number of tensors");
  // The least a pair takes: a key's length and one byte, a type, one byte. A tensor: a name, rank, type, offset.
  const uint64_t min_name_bytes = reader.size_bytes() + 1;
  const uint64_t num_pairs = reader.count("metadata pairs", min_name_bytes + 4 + 1, kMaxPairs);
  reader.check_count(num_tensors, "tensors", min_name_bytes + 4 + 4 + 8, kMaxTensors);

  metadata_.reserve(num_pairs);  // metadata_index_ views the keys, so they must not move
  for (uint64_t i = 0; i < num_pairs; ++i) {
    std::string key = reader.name("metadata key");
    GgufValue value = reader.value(key);
    metadata_.emplace_back(std::move(key), std::move(value));
    if (!metadata_index_.emplace(metadata_.back().first, i).second)
      reader.fail(fmt::format("the metadata key {} appears twice", quote(metadata_.back().first)));
  }
  const auto alignment = static_cast<uint64_t>(optional_integer("general.alignment", 1, UINT32_MAX).value_or(32));
  if (!std::has_single_bit(alignment)) fail("general.alignment", "a power of two");

  std::vector<WeightInfo> infos;
  std::vector<TensorRange> ranges;
  infos.reserve(num_tensors);
  for (uint64_t i = 0; i < num_tensors; ++i) {
    auto [info, range] = read_tensor_info(reader, path);
    infos.push_back(std::move(info));
    ranges.push_back(range);
  }
  if (num_tensors > 0) {
    const uint64_t data_begin = (reader.pos() + alignment - 1) / alignment * alignment;
    const uint64_t data_size = bytes.size() - std::min<uint64_t>(data_begin, bytes.size());
    check_ranges(infos, ranges, alignment, data_size, path);
    for (const TensorRange& range : ranges)
      data_.push_back(range.size == 0 ? std::span<const std::byte>()
                                      : bytes.subspan(data_begin + range.offset, range.size));
  }
  set_tensors(std::move(infos));
}

GgufFile::GgufFile(const std::string& path, uint32_t version, GgufMetadata metadata)
    : WeightSource(path), version_(version), metadata_(std::move(metadata)) {
  for (size_t i = 0; i < metadata_.size(); ++i)
    EADEM_CHECK(metadata_index_.emplace(metadata_[i].first, i).second, "{}: {} twice", path, metadata_[i].first);
}

std::shared_ptr<const GgufFile> GgufFile::parse(const std::string& path, std::span<const std::byte> bytes,
                                                std::shared_ptr<const void> owner) {
  return std::shared_ptr<const GgufFile>(new GgufFile(path, bytes, std::move(owner)));
}

bool is_gguf_file(const std::string& path) {
  if (path.ends_with(".gguf")) return true;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return false;  // what a pipe gives cannot be read twice
  char magic[4] = {};
  std::ifstream(path, std::ios::binary).read(magic, sizeof magic);
  return std::string_view(magic, sizeof magic) == "GGUF";
}

std::shared_ptr<const GgufFile> GgufFile::open(const std::string& path) { return open(MappedFile::open(path)); }

std::shared_ptr<const GgufFile> GgufFile::open(const std::shared_ptr<const MappedFile>& mapping) {
  std::shared_ptr<const GgufFile> file = open_alone(mapping);
  return is_gguf_part(*file) ? open_gguf_parts(file) : file;
}

std::shared_ptr<const GgufFile> GgufFile::open_alone(const std::shared_ptr<const MappedFile>& mapping) {
  std::shared_ptr<GgufFile> file(new GgufFile(mapping->path(), mapping->bytes(), mapping));
  file->mapping_ = mapping;
  return file;
}

void GgufFile::release(std::string_view name) const {
  const WeightInfo* info = find(name);
  if (info != nullptr && mapping_ != nullptr) mapping_->release(data_[static_cast<size_t>(info - tensors().data())]);
}

std::vector<std::shared_ptr<const MappedFile>> GgufFile::files() const {
  if (mapping_ == nullptr) return {};
  return {mapping_};
}

Tensor GgufFile::load(size_t index) const {
  const WeightInfo& info = tensors()[index];
  return tensor_over(data_[index], *info.type, info.shape, owner_);
}

Tensor GgufFile::load_bytes(size_t index) const {
  return tensor_over(data_[index], DType::u8, Shape{tensors()[index].size_bytes}, owner_);
}

// ---- Typed metadata --------------------------------------------------------------------------------------------

std::string to_string(const GgufValue& value) {
  const std::string_view type = gguf_type_name(value.type);
  switch (value.type) {
    case GgufType::string: return fmt::format("a string {}", quote(std::get<std::string>(value.data)));
    case GgufType::array: {
      const auto& array = std::get<GgufArray>(value.data);
      return fmt::format("an array of {} {}", array.size(), gguf_type_name(array.element_type));
    }
    case GgufType::boolean: return std::get<bool>(value.data) ? "true" : "false";
    case GgufType::f32:
    case GgufType::f64: return fmt::format("{} {}", type, std::get<double>(value.data));
    default: break;
  }
  if (const auto* integer = std::get_if<int64_t>(&value.data)) return fmt::format("{} {}", type, *integer);
  return fmt::format("{} {}", type, std::get<uint64_t>(value.data));
}

namespace {

std::optional<int64_t> as_integer(const GgufValue& value, int64_t min, int64_t max) {
  int64_t result = 0;
  if (const auto* integer = std::get_if<int64_t>(&value.data)) {
    result = *integer;
  } else if (const auto* natural = std::get_if<uint64_t>(&value.data)) {
    if (*natural > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    result = static_cast<int64_t>(*natural);
  } else {
    return std::nullopt;
  }
  if (result < min || result > max) return std::nullopt;
  return result;
}

std::optional<double> as_number(const GgufValue& value) {
  if (const auto* number = std::get_if<double>(&value.data)) return *number;
  if (const auto* integer = std::get_if<int64_t>(&value.data)) return static_cast<double>(*integer);
  if (const auto* natural = std::get_if<uint64_t>(&value.data)) return static_cast<double>(*natural);
  return std::nullopt;
}

const GgufArray* scalar_array(const GgufValue* value) {
  const auto* array = value == nullptr ? nullptr : std::get_if<GgufArray>(&value->data);
  if (array == nullptr || scalar_size(array->element_type) == 0) return nullptr;
  return array;
}

GgufValue array_element(const GgufArray& array, size_t index) {
  return load_scalar(array.element_type, array.scalars.data() + index * scalar_size(array.element_type));
}

}  // namespace

const GgufValue* GgufFile::find_metadata(std::string_view key) const {
  const auto it = metadata_index_.find(key);
  return it == metadata_index_.end() ? nullptr : &metadata_[it->second].second;
}

void GgufFile::fail(std::string_view key, std::string_view expected) const {
  const GgufValue* value = find_metadata(key);
  if (value == nullptr) throw DataCorrupted("{}: metadata {} is missing; expected {}", path(), quote(key), expected);
  throw DataCorrupted("{}: {} is {}; expected {}", path(), quote(key), to_string(*value), expected);
}

int64_t GgufFile::integer(std::string_view key, int64_t min, int64_t max) const {
  const GgufValue* value = find_metadata(key);
  const std::optional<int64_t> result = value == nullptr ? std::nullopt : as_integer(*value, min, max);
  if (!result) fail(key, fmt::format("an integer in [{}, {}]", min, max));
  return *result;
}

std::optional<int64_t> GgufFile::optional_integer(std::string_view key, int64_t min, int64_t max) const {
  if (find_metadata(key) == nullptr) return std::nullopt;
  return integer(key, min, max);
}

double GgufFile::number(std::string_view key) const {
  const GgufValue* value = find_metadata(key);
  const std::optional<double> result = value == nullptr ? std::nullopt : as_number(*value);
  if (!result) fail(key, "a number");
  return *result;
}

std::optional<double> GgufFile::optional_number(std::string_view key) const {
  if (find_metadata(key) == nullptr) return std::nullopt;
  return number(key);
}

bool GgufFile::boolean(std::string_view key) const {
  const GgufValue* value = find_metadata(key);
  if (value == nullptr || value->type != GgufType::boolean) fail(key, "a boolean");
  return std::get<bool>(value->data);
}

std::optional<bool> GgufFile::optional_boolean(std::string_view key) const {
  if (find_metadata(key) == nullptr) return std::nullopt;
  return boolean(key);
}

const std::string& GgufFile::string(std::string_view key) const {
  const GgufValue* value = find_metadata(key);
  if (value == nullptr || value->type != GgufType::string) fail(key, "a string");
  return std::get<std::string>(value->data);
}

std::optional<std::string> GgufFile::optional_string(std::string_view key) const {
  if (find_metadata(key) == nullptr) return std::nullopt;
  return string(key);
}

const std::vector<std::string>& GgufFile::strings(std::string_view key) const {
  const GgufValue* value = find_metadata(key);
  const auto* array = value == nullptr ? nullptr : std::get_if<GgufArray>(&value->data);
  if (array == nullptr || array->element_type != GgufType::string) fail(key, "an array of strings");
  return array->strings;
}

std::vector<int64_t> GgufFile::integers(std::string_view key, int64_t min, int64_t max) const {
  const GgufArray* array = scalar_array(find_metadata(key));
  if (array == nullptr) fail(key, "an array of integers");
  std::vector<int64_t> result;
  for (size_t i = 0; i < array->size(); ++i) {
    const GgufValue element = array_element(*array, i);
    const std::optional<int64_t> integer = as_integer(element, min, max);
    if (!integer)
      throw DataCorrupted("{}: {}[{}] is {}; expected an integer in [{}, {}]", path(), quote(key), i,
                          to_string(element), min, max);
    result.push_back(*integer);
  }
  return result;
}

std::vector<float> GgufFile::numbers(std::string_view key) const {
  const GgufArray* array = scalar_array(find_metadata(key));
  if (array == nullptr || array->element_type == GgufType::boolean) fail(key, "an array of numbers");
  std::vector<float> result;
  for (size_t i = 0; i < array->size(); ++i) result.push_back(static_cast<float>(*as_number(array_element(*array, i))));
  return result;
}

}  // namespace eadem::io
