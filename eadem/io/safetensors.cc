// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <unordered_map>

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"
#include "eadem/io/text.h"
#include "eadem/io/weights_internal.h"

namespace eadem::io {

namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the reference implementation's limit
constexpr std::string_view kMetadataKey = "__metadata__";

struct SafetensorsType {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};

constexpr auto kSafetensorsTypes = std::to_array<SafetensorsType>({
    {"F32", 32, DType::f32}, {"F16", 16, DType::f16}, {"BF16", 16, DType::bf16},
    {"F64", 64, DType::f64}, {"I32", 32, DType::i32}, {"I64", 64, DType::i64},
    {"U8", 8, DType::u8},    {"BOOL", 8, {}},         {"I8", 8, {}},
    {"I16", 16, {}},         {"U16", 16, {}},         {"U32", 32, {}},
    {"U64", 64, {}},         {"F8_E4M3", 8, {}},      {"F8_E5M2", 8, {}},
    {"F8_E8M0", 8, {}},      {"F6_E2M3", 6, {}},      {"F6_E3M2", 6, {}},
    {"F4", 4, {}},           {"C64", 64, {}},
});

const SafetensorsType* find_type(std::string_view name) {
  const auto it = std::find_if(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                               [&](const auto& type) { return type.name == name; });
  return it == kSafetensorsTypes.end() ? nullptr : &*it;
}

std::string_view type_name_of(DType dtype) {
  const auto it = std::find_if(kSafetensorsTypes.begin(), kSafetensorsTypes.end(),
                               [&](const auto& type) { return type.dtype == dtype; });
  EADEM_CHECK(it != kSafetensorsTypes.end(), "no safetensors type for {}", dtype_name(dtype));
  return it->name;
}

struct ByteRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// One entry of the header: its description, and its range relative to the data.
std::pair<WeightInfo, ByteRange> parse_entry(const JsonMember& member, const std::string& path, uint64_t data_size) {
  const auto fail = [&](const std::string& problem) {
    throw DataCorrupted("{}: tensor {}: {}", path, quote(member.key), problem);
  };
  if (member.key.empty()) fail("the name is empty");
  if (!member.value.is_object()) fail("its header entry is not an object");
  for (const JsonMember& field : member.value.as_object())
    if (field.key != "dtype" && field.key != "shape" && field.key != "data_offsets")
      fail(fmt::format("unknown field {}; expected dtype, shape and data_offsets", quote(field.key)));

  const auto extents = [&](const char* key) {
    std::vector<uint64_t> result;
    const JsonValue* value = member.value.find(key);
    if (value == nullptr || !value->is_array()) fail(fmt::format("'{}' is not an array", key));
    for (const JsonValue& element : value->as_array()) {
      if (element.kind() != JsonValue::Kind::integer || element.as_integer() < 0)
        fail(fmt::format("'{}' holds {}; expected integers >= 0", key, quote(to_compact_json(element))));
      result.push_back(static_cast<uint64_t>(element.as_integer()));
    }
    return result;
  };

  const JsonValue* dtype = member.value.find("dtype");
  if (dtype == nullptr || !dtype->is_string()) fail("'dtype' is not a string");
  const std::vector<uint64_t> offsets = extents("data_offsets");
  if (offsets.size() != 2) fail(fmt::format("'data_offsets' holds {} values; expected 2", offsets.size()));
  const ByteRange range{offsets[0], offsets[1]};
  if (range.begin > range.end || range.end > data_size)
    fail(fmt::format("its data_offsets [{}, {}] are not a range of the {} data bytes in the file", range.begin,
                     range.end, data_size));

  WeightInfo info;
  info.name = member.key;
  info.type_name = dtype->as_string();
  info.shape = checked_shape(extents("shape"), path, member.key);
  info.size_bytes = static_cast<int64_t>(range.end - range.begin);
  // The size of an unknown type cannot be checked; `get` does not give its bytes either.
  if (const SafetensorsType* type = find_type(info.type_name)) {
    if (type->dtype) info.type = WeightType{*type->dtype};
    const std::optional<uint64_t> bits =
        checked_mul(static_cast<uint64_t>(info.shape.num_elements()), static_cast<uint64_t>(type->bits));
    if (!bits) fail(fmt::format("the size of {} {} overflows", type->name, to_string(info.shape)));
    if (*bits % 8 != 0 || *bits / 8 != range.end - range.begin)
      fail(fmt::format("{} {} takes {} bytes, its data_offsets [{}, {}] hold {}", type->name, to_string(info.shape),
                       (*bits + 7) / 8, range.begin, range.end, range.end - range.begin));
  }
  return {std::move(info), range};
}

// The ranges must tile [0, data_size).
void check_coverage(const std::vector<WeightInfo>& infos, const std::vector<ByteRange>& ranges, uint64_t data_size,
                    const std::string& path) {
  std::vector<size_t> order(ranges.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::pair(ranges[a].begin, ranges[a].end) < std::pair(ranges[b].begin, ranges[b].end);
  });
  uint64_t covered = 0;
  for (const size_t i : order) {
    if (ranges[i].begin != covered)
      throw DataCorrupted("{}: tensor {} begins at data byte {}, but the tensors before it end at {} ({})", path,
                          quote(infos[i].name), ranges[i].begin, covered,
                          ranges[i].begin < covered ? "they overlap" : "there is a hole");
    covered = ranges[i].end;
  }
  if (covered != data_size)
    throw DataCorrupted("{}: the tensors end at data byte {}, but the file holds {} data bytes", path, covered,
                        data_size);
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner)
    : WeightSource(path), owner_(std::move(owner)) {
  if (bytes.size() < kLengthBytes)
    throw DataCorrupted("{}: {} bytes are too few for a safetensors file; the header length alone takes {}", path,
                        bytes.size(), kLengthBytes);
  uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), kLengthBytes);
  if (header_size > kMaxHeaderBytes)
    throw DataCorrupted("{}: a header of {} bytes; at most {} are accepted", path, header_size, kMaxHeaderBytes);
  if (header_size > bytes.size() - kLengthBytes)
    throw DataCorrupted("{}: a header of {} bytes in a file of {}: truncated, or not a safetensors file", path,
                        header_size, bytes.size());

  const std::string_view header(reinterpret_cast<const char*>(bytes.data()) + kLengthBytes, header_size);
  const std::span<const std::byte> data = bytes.subspan(kLengthBytes + header_size);
  if (!header.starts_with('{')) throw DataCorrupted("{}: the header does not begin with '{{'", path);
  JsonLimits limits;
  limits.max_bytes = kMaxHeaderBytes;
  limits.max_values = 4 << 20;  // about 500 thousand tensors
  limits.max_depth = 3;
  const JsonValue root = parse_json(header, path + " (header)", limits);

  std::vector<WeightInfo> infos;
  std::vector<ByteRange> ranges;
  for (const JsonMember& member : root.as_object()) {
    if (member.key == kMetadataKey) {
      if (member.value.is_null()) continue;  // MLX writes it so when there is none
      if (!member.value.is_object()) throw DataCorrupted("{}: __metadata__ is not an object", path);
      for (const JsonMember& entry : member.value.as_object()) {
        if (!entry.value.is_string())
          throw DataCorrupted("{}: __metadata__ {} is not a string", path, quote(entry.key));
        metadata_.emplace_back(entry.key, entry.value.as_string());
      }
      continue;
    }
    auto [info, range] = parse_entry(member, path, data.size());
    infos.push_back(std::move(info));
    ranges.push_back(range);
  }
  check_coverage(infos, ranges, data.size(), path);
  for (const ByteRange& range : ranges) data_.push_back(data.subspan(range.begin, range.end - range.begin));
  set_tensors(std::move(infos));
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::parse(const std::string& path, std::span<const std::byte> bytes,
                                                              std::shared_ptr<const void> owner) {
  return std::shared_ptr<const SafetensorsFile>(new SafetensorsFile(path, bytes, std::move(owner)));
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  return open(MappedFile::open(path));
}

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::shared_ptr<const MappedFile>& mapping) {
  std::shared_ptr<SafetensorsFile> file(new SafetensorsFile(mapping->path(), mapping->bytes(), mapping));
  file->mapping_ = mapping;
  return file;
}

void SafetensorsFile::release(std::string_view name) const {
  const WeightInfo* info = find(name);
  if (info != nullptr && mapping_ != nullptr) mapping_->release(data_[static_cast<size_t>(info - tensors().data())]);
}

std::vector<std::shared_ptr<const MappedFile>> SafetensorsFile::files() const {
  if (mapping_ == nullptr) return {};
  return {mapping_};
}

Tensor SafetensorsFile::load(size_t index) const {
  const WeightInfo& info = tensors()[index];
  return tensor_over(data_[index], *info.type, info.shape, owner_);
}

Tensor SafetensorsFile::load_bytes(size_t index) const {
  return tensor_over(data_[index], DType::u8, Shape{tensors()[index].size_bytes}, owner_);
}

// ---- Shards ----------------------------------------------------------------------------------------------------

namespace {

class ShardedSafetensors : public WeightSource {
 public:
  explicit ShardedSafetensors(const std::string& index_path) : WeightSource(index_path) {
    // The rest of an index (total_size and other notes) says nothing that the shards do not.
    const JsonReader index = JsonReader::read(index_path);
    if (!index.has("weight_map") && index.has("model_type"))
      throw InvalidArgument("{} is a model's configuration, without weights; name the directory that holds both",
                            index_path);
    const JsonReader weight_map = index.object("weight_map");
    const size_t slash = index_path.find_last_of('/');
    const std::string directory = slash == std::string::npos ? "" : index_path.substr(0, slash + 1);

    // 1. Open each shard once, under its plain file name.
    std::map<std::string, std::shared_ptr<const SafetensorsFile>, std::less<>> shards;
    for (const JsonMember& member : weight_map.value().as_object()) {
      if (!member.value.is_string()) weight_map.fail(member.key, "a string");
      const std::string& file = member.value.as_string();
      if (shards.contains(file)) continue;
      check_file_name(index_path, member.key, file);
      try {
        shards.emplace(file, SafetensorsFile::open(directory + file));
      } catch (const NotFound&) {
        throw NotFound("{}: tensor {} is in {}, but that shard is not there", index_path, quote(member.key),
                       quote(directory + file));
      }
    }
    if (shards.empty()) throw DataCorrupted("{}: 'weight_map' is empty", index_path);

    // 2. Each indexed tensor is in its shard.
    std::vector<WeightInfo> infos;
    std::unordered_map<std::string_view, std::string_view> file_of;
    for (const JsonMember& member : weight_map.value().as_object()) {
      file_of.emplace(member.key, member.value.as_string());
      const std::shared_ptr<const SafetensorsFile>& shard = shards.find(member.value.as_string())->second;
      const WeightInfo* info = shard->find(member.key);
      if (info == nullptr)
        throw DataCorrupted("{}: tensor {} should be in {}, which does not hold it", index_path, quote(member.key),
                            shard->path());
      infos.push_back(*info);
      shard_of_.push_back(shard);
    }

    // 3. No shard holds anything else.
    for (const auto& [file, shard] : shards) {
      for (const WeightInfo& info : shard->tensors()) {
        const auto indexed = file_of.find(info.name);
        if (indexed == file_of.end())
          throw DataCorrupted("{}: shard {} holds tensor {}, which the index does not name", index_path, quote(file),
                              quote(info.name));
        if (indexed->second != file)
          throw DataCorrupted("{}: tensor {} is in two shards, {} and {}", index_path, quote(info.name),
                              quote(indexed->second), quote(file));
      }
    }
    set_tensors(std::move(infos));
  }

  void release(std::string_view name) const override {
    const WeightInfo* info = find(name);
    if (info != nullptr) shard_of_[static_cast<size_t>(info - tensors().data())]->release(name);
  }

  std::vector<std::shared_ptr<const MappedFile>> files() const override {
    std::vector<std::shared_ptr<const MappedFile>> result;
    std::set<const SafetensorsFile*> seen;
    for (const auto& shard : shard_of_)
      if (seen.insert(shard.get()).second)
        for (auto& file : shard->files()) result.push_back(std::move(file));
    return result;
  }

 private:
  // A shard lies beside its index: a name with a directory in it would let an index reach any file.
  static void check_file_name(const std::string& index_path, std::string_view tensor, const std::string& file) {
    const bool is_plain = !file.empty() && file != "." && file != ".." &&
                          file.find_first_of(std::string_view("/\\\0", 3)) == std::string::npos;
    if (!is_plain)
      throw DataCorrupted("{}: tensor {} is said to be in {}; expected a plain file name beside the index", index_path,
                          quote(tensor), quote(file));
  }

  Tensor load(size_t index) const override { return shard_of_[index]->get(tensors()[index].name); }
  Tensor load_bytes(size_t index) const override { return shard_of_[index]->get_bytes(tensors()[index].name); }

  std::vector<std::shared_ptr<const SafetensorsFile>> shard_of_;
};

}  // namespace

std::shared_ptr<const WeightSource> open_sharded_safetensors(const std::string& index_path) {
  return std::make_shared<const ShardedSafetensors>(index_path);
}

// ---- Writer ----------------------------------------------------------------------------------------------------

std::unique_ptr<WeightWriter> begin_safetensors(const std::string& path, std::span<const TensorHeader> tensors,
                                                const SafetensorsFile::Metadata& metadata) {
  check_writable(path, tensors);
  JsonValue::Object header;
  if (!metadata.empty()) {
    JsonValue strings = JsonValue::object();
    for (const auto& [key, value] : metadata) strings.set(key, value);
    header.push_back({std::string(kMetadataKey), std::move(strings)});
  }
  int64_t end = 0;
  for (const TensorHeader& tensor : tensors) {
    if (tensor.type.encoding != nullptr)
      throw InvalidArgument("cannot write {}: safetensors has no type for tensor {}, which is {}", path,
                            quote(tensor.name), tensor.type.name());
    if (tensor.name == kMetadataKey) throw InvalidArgument("cannot write {}: '{}' is reserved", path, kMetadataKey);
    JsonValue shape = JsonValue::array();
    for (const int64_t dim : tensor.shape.dims()) shape.push_back(dim);
    const int64_t begin = end;
    end += stored_bytes(tensor.type, tensor.shape);
    JsonValue entry = JsonValue::object();
    const SafetensorsType* stored = find_type(tensor.stored_type);
    EADEM_CHECK(tensor.stored_type.empty() || (stored != nullptr && stored->bits == 8 && tensor.type == DType::u8),
                "'{}' as {}", tensor.name, tensor.stored_type);
    entry.set("dtype", stored != nullptr ? stored->name : type_name_of(tensor.type.dtype));
    entry.set("shape", std::move(shape));
    entry.set("data_offsets", JsonValue::Array{begin, end});
    header.push_back({tensor.name, std::move(entry)});
  }
  std::string json = to_compact_json(JsonValue(std::move(header)));
  json.append(static_cast<size_t>(padding_of(std::ssize(json), 8)), ' ');  // so that the data is aligned
  if (json.size() > kMaxHeaderBytes)
    throw InvalidArgument("cannot write {}: the header takes {} bytes; at most {} can be read", path, json.size(),
                          kMaxHeaderBytes);
  std::string text(sizeof(uint64_t), '\0');
  const uint64_t header_size = json.size();
  std::memcpy(text.data(), &header_size, sizeof header_size);
  return std::make_unique<WeightWriter>(path, text + json, std::vector(tensors.begin(), tensors.end()), 1);
}

void write_safetensors(const std::string& path, std::span<const NamedTensor> tensors,
                       const SafetensorsFile::Metadata& metadata) {
  const std::unique_ptr<WeightWriter> writer = begin_safetensors(path, headers_of(path, tensors), metadata);
  for (const NamedTensor& tensor : tensors) writer->write(tensor.view);
  writer->commit();
}

}  // namespace eadem::io
