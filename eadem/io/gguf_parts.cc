// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/gguf_parts.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

#include "eadem/io/text.h"

namespace eadem::io {

namespace {

constexpr std::string_view kNumber = "split.no", kCount = "split.count", kTensors = "split.tensors.count";
constexpr std::string_view kEnding = ".gguf";
constexpr size_t kDigits = 5;

// The number that exactly five digits are; nothing for anything else.
std::optional<int64_t> five_digits(std::string_view text) {
  if (text.size() != kDigits || text.find_first_not_of("0123456789") != std::string_view::npos) return std::nullopt;
  int64_t value = 0;
  for (const char digit : text) value = value * 10 + (digit - '0');
  return value;
}

// Whether parts of one model may have different values of this key.
bool is_of_one_part(std::string_view key) { return key.starts_with("split.") || key == "general.alignment"; }

// The part says of itself what its name says.
void check_place(const GgufFile& part, const GgufPartName& name) {
  if (const int64_t count = part.integer(kCount, 0, INT64_MAX); count != name.count)
    throw DataCorrupted("{}: '{}' is {}; by its name the file is part {} of {}", part.path(), kCount, count,
                        name.number, name.count);
  if (const int64_t number = part.integer(kNumber, 0, INT64_MAX); number != name.number - 1)
    throw DataCorrupted("{}: '{}' is {}; it counts from 0, and by its name the file is part {} of {}", part.path(),
                        kNumber, number, name.number, name.count);
}

// A part has no metadata of another model: whatever it has, the first part has too.
void check_metadata(const GgufFile& part, const GgufFile& first) {
  for (const auto& [key, value] : part.metadata()) {
    if (is_of_one_part(key)) continue;
    const GgufValue* expected = first.find_metadata(key);
    if (expected == nullptr)
      throw DataCorrupted("{}: {} is {}; {}, the first part, has no such key: they are not parts of one model",
                          part.path(), quote(key), to_string(value), first.path());
    if (*expected != value)
      throw DataCorrupted("{}: {} is {}; that of {}, the first part, is {}: they are not parts of one model",
                          part.path(), quote(key), to_string(value), first.path(), to_string(*expected));
  }
}

GgufMetadata metadata_of_all(const GgufFile& first) {
  GgufMetadata metadata = first.metadata();
  std::erase_if(metadata, [](const auto& entry) { return entry.first.starts_with("split."); });
  return metadata;
}

// Its own path is that of the first part.
class GgufParts final : public GgufFile {
 public:
  // Parts that are in their places.
  explicit GgufParts(std::vector<std::shared_ptr<const GgufFile>> parts)
      : GgufFile(parts[0]->path(), parts[0]->version(), metadata_of_all(*parts[0])), parts_(std::move(parts)) {
    std::vector<WeightInfo> infos;
    std::unordered_map<std::string_view, const GgufFile*> part_with;
    for (const std::shared_ptr<const GgufFile>& part : parts_) {
      check_metadata(*part, *parts_[0]);
      for (const WeightInfo& info : part->tensors()) {
        if (const auto [other, is_new] = part_with.emplace(info.name, part.get()); !is_new)
          throw DataCorrupted("{}: the tensor {} is in {} as well", part->path(), quote(info.name),
                              other->second->path());
        infos.push_back(info);
        part_of_.push_back(part.get());
      }
    }
    for (const std::shared_ptr<const GgufFile>& part : parts_)
      if (const int64_t count = part->integer(kTensors, 0, INT64_MAX); count != std::ssize(infos))
        throw DataCorrupted("{}: '{}' is {}; the {} parts have {} tensors", part->path(), kTensors, count,
                            parts_.size(), infos.size());
    set_tensors(std::move(infos));
  }

  void release(std::string_view name) const override {
    const WeightInfo* info = find(name);
    if (info != nullptr) part_of_[static_cast<size_t>(info - tensors().data())]->release(name);
  }

  std::vector<std::shared_ptr<const MappedFile>> files() const override {
    std::vector<std::shared_ptr<const MappedFile>> result;
    for (const std::shared_ptr<const GgufFile>& part : parts_)
      for (auto& file : part->files()) result.push_back(std::move(file));
    return result;
  }

 private:
  Tensor load(size_t index) const override { return part_of_[index]->get(tensors()[index].name); }
  Tensor load_bytes(size_t index) const override { return part_of_[index]->get_bytes(tensors()[index].name); }

  std::vector<std::shared_ptr<const GgufFile>> parts_;
  std::vector<const GgufFile*> part_of_;  // one per tensor
};

}  // namespace

std::optional<GgufPartName> GgufPartName::parse(std::string_view name) {
  constexpr std::string_view kOf = "-of-";
  constexpr size_t kTail = 1 + kDigits + kOf.size() + kDigits;  // "-00001-of-00003"
  if (!name.ends_with(kEnding) || name.size() <= kTail + kEnding.size()) return std::nullopt;
  name.remove_suffix(kEnding.size());
  const std::string_view stem = name.substr(0, name.size() - kTail), tail = name.substr(stem.size());
  const std::optional<int64_t> number = five_digits(tail.substr(1, kDigits)), count = five_digits(tail.substr(10));
  if (tail[0] != '-' || tail.substr(1 + kDigits, kOf.size()) != kOf || !number || !count) return std::nullopt;
  if (stem.ends_with('/') || *number < 1 || *number > *count) return std::nullopt;
  return GgufPartName{std::string(stem), *number, *count};
}

std::string GgufPartName::of(int64_t other) const {
  return fmt::format("{}-{:05}-of-{:05}{}", stem, other, count, kEnding);
}

bool is_gguf_part(const GgufFile& file) { return file.optional_integer(kCount, 0, INT64_MAX).value_or(0) > 1; }

std::shared_ptr<const GgufFile> open_gguf_parts(const std::shared_ptr<const GgufFile>& part) {
  const std::optional<GgufPartName> name = GgufPartName::parse(part->path());
  if (!name)
    throw NotFound(
        "{} is one of {} parts of a model, but not named NAME-00001-of-00002.gguf, by which its other "
        "parts would be found",
        part->path(), part->integer(kCount, 0, INT64_MAX));
  check_place(*part, *name);
  std::vector<std::shared_ptr<const GgufFile>> parts;
  for (int64_t number = 1; number <= name->count; ++number) {
    if (number == name->number) {
      parts.push_back(part);
      continue;
    }
    const std::string path = name->of(number);
    try {
      parts.push_back(GgufFile::open_alone(MappedFile::open(path)));
    } catch (const NotFound&) {
      throw NotFound("{}: its part {} of {}, {}, is not there", part->path(), number, name->count, quote(path));
    }
    check_place(*parts.back(), {name->stem, number, name->count});
  }
  return std::make_shared<const GgufParts>(std::move(parts));
}

}  // namespace eadem::io
