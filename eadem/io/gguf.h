// SPDX-License-Identifier: Apache-2.0
//
// GGUF versions 1, 2 and 3, little endian: typed metadata, tensor descriptions, aligned data.
//
// GGUF lists extents innermost first (ne[0]); Eadem's shapes are row-major, so a linear weight is [out, in] here too.
// A model may be split into several files (gguf_parts.h). Source: github.com/ggerganov/ggml, docs/gguf.md.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/weight_writer.h"
#include "eadem/io/weights.h"

namespace eadem::io {

enum class GgufType : uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, string, array, u64, i64, f64 };

// "u32", "string", …
std::string_view gguf_type_name(GgufType type);

template <typename T>
inline constexpr GgufType gguf_type_of = [] { static_assert(sizeof(T) == 0, "no GGUF type for T"); }();
template <>
inline constexpr GgufType gguf_type_of<uint8_t> = GgufType::u8;
template <>
inline constexpr GgufType gguf_type_of<int8_t> = GgufType::i8;
template <>
inline constexpr GgufType gguf_type_of<uint16_t> = GgufType::u16;
template <>
inline constexpr GgufType gguf_type_of<int16_t> = GgufType::i16;
template <>
inline constexpr GgufType gguf_type_of<uint32_t> = GgufType::u32;
template <>
inline constexpr GgufType gguf_type_of<int32_t> = GgufType::i32;
template <>
inline constexpr GgufType gguf_type_of<float> = GgufType::f32;
template <>
inline constexpr GgufType gguf_type_of<uint64_t> = GgufType::u64;
template <>
inline constexpr GgufType gguf_type_of<int64_t> = GgufType::i64;
template <>
inline constexpr GgufType gguf_type_of<double> = GgufType::f64;

// An array of one element type: exactly one of the three members is in use.
struct GgufArray {
  GgufType element_type = GgufType::u8;
  std::string scalars;               // numbers and booleans, packed as in the file
  std::vector<std::string> strings;  // not checked to be UTF-8: vocabularies hold bytes
  std::vector<GgufArray> arrays;

  size_t size() const;
  friend bool operator==(const GgufArray&, const GgufArray&) = default;
};

struct GgufValue {
  GgufType type = GgufType::u8;
  // Unsigned types as uint64_t, signed as int64_t, f32 and f64 as double.
  std::variant<uint64_t, int64_t, double, bool, std::string, GgufArray> data;

  template <typename T>
  static GgufValue scalar(T value) {
    GgufValue result;
    result.type = gguf_type_of<T>;
    if constexpr (std::is_floating_point_v<T>)
      result.data = static_cast<double>(value);
    else if constexpr (std::is_signed_v<T>)
      result.data = static_cast<int64_t>(value);
    else
      result.data = static_cast<uint64_t>(value);
    return result;
  }
  static GgufValue boolean(bool value) { return {GgufType::boolean, value}; }
  static GgufValue string(std::string value) { return {GgufType::string, std::move(value)}; }
  static GgufValue strings(std::vector<std::string> values) {
    return {GgufType::array, GgufArray{GgufType::string, {}, std::move(values), {}}};
  }
  template <typename T>
  static GgufValue scalars(std::span<const T> values) {
    std::string packed(values.size_bytes(), '\0');
    if (!values.empty()) std::memcpy(packed.data(), values.data(), values.size_bytes());
    return {GgufType::array, GgufArray{gguf_type_of<T>, std::move(packed), {}, {}}};
  }

  friend bool operator==(const GgufValue&, const GgufValue&) = default;
};

// For messages: "u32 7", "a string 'abc'", "an array of 3 i32".
std::string to_string(const GgufValue& value);

using GgufMetadata = std::vector<std::pair<std::string, GgufValue>>;

// A ggml tensor type: `block_size` values take `block_bytes` bytes.
struct GgmlType {
  uint32_t id;
  std::string_view name;
  int block_size;
  int block_bytes;
  std::optional<DType> dtype;  // plain types that Eadem has only

  // Eadem's storage type; nothing for types that it cannot read.
  std::optional<WeightType> weight_type() const;
};

// Null for an id that is unknown or was withdrawn.
const GgmlType* find_ggml_type(uint32_t id);

// Whether a file is GGUF by its ending or by its first bytes (caches keep files under names without endings). False for
// what cannot be read.
bool is_gguf_file(const std::string& path);

class GgufFile : public WeightSource {
 public:
  // A part of a split model opens the whole: all of its parts, which lie beside it (gguf_parts.h). Throws NotFound,
  // IoError, DataCorrupted, or Unsupported (version, byte order, tensor type).
  static std::shared_ptr<const GgufFile> open(const std::string& path);
  static std::shared_ptr<const GgufFile> open(const std::shared_ptr<const MappedFile>& mapping);
  // Opens that file and no other, also when it is a part of a split model.
  static std::shared_ptr<const GgufFile> open_alone(const std::shared_ptr<const MappedFile>& mapping);
  // Reads a file, and no other, from memory that `owner` keeps alive; `path` is for messages.
  static std::shared_ptr<const GgufFile> parse(const std::string& path, std::span<const std::byte> bytes,
                                               std::shared_ptr<const void> owner);

  uint32_t version() const { return version_; }

  // In the order of the file.
  const GgufMetadata& metadata() const { return metadata_; }
  // Null when there is none of that key.
  const GgufValue* find_metadata(std::string_view key) const;

  // Typed access. The plain form needs the key (DataCorrupted when it is missing), the optional form does not.
  // All throw DataCorrupted for another type or a value out of range, for example
  //   tiny.gguf: 'llama.block_count' is a string 'abc'; expected an integer in [1, 1000]
  // Any integer type will do for an integer, and any number for a number.
  int64_t integer(std::string_view key, int64_t min, int64_t max) const;
  std::optional<int64_t> optional_integer(std::string_view key, int64_t min, int64_t max) const;
  double number(std::string_view key) const;
  std::optional<double> optional_number(std::string_view key) const;
  bool boolean(std::string_view key) const;
  std::optional<bool> optional_boolean(std::string_view key) const;
  const std::string& string(std::string_view key) const;
  std::optional<std::string> optional_string(std::string_view key) const;
  const std::vector<std::string>& strings(std::string_view key) const;
  std::vector<int64_t> integers(std::string_view key, int64_t min, int64_t max) const;
  std::vector<float> numbers(std::string_view key) const;

  void release(std::string_view name) const override;
  std::vector<std::shared_ptr<const MappedFile>> files() const override;

 protected:
  // Metadata alone, of a derived class that has the tensors.
  GgufFile(const std::string& path, uint32_t version, GgufMetadata metadata);
  Tensor load(size_t index) const override;
  Tensor load_bytes(size_t index) const override;

 private:
  GgufFile(const std::string& path, std::span<const std::byte> bytes, std::shared_ptr<const void> owner);
  [[noreturn]] void fail(std::string_view key, std::string_view expected) const;

  std::shared_ptr<const void> owner_;
  std::shared_ptr<const MappedFile> mapping_;  // null when the bytes are borrowed
  uint32_t version_ = 0;
  GgufMetadata metadata_;
  std::unordered_map<std::string_view, size_t> metadata_index_;  // keys view metadata_
  std::vector<std::span<const std::byte>> data_;                 // a view per tensor, in the order of tensors()
};

// Writes GGUF version 3, atomically (atomic_file.h): metadata and tensors in the given order, tensor data aligned to
// metadata's general.alignment (32 when absent). dtypes f32, f16, bf16, f64, i32, i64, and block encodings; rank at
// most 4. Throws InvalidArgument for what cannot be written, IoError for the rest.
std::unique_ptr<WeightWriter> begin_gguf(const std::string& path, const GgufMetadata& metadata,
                                         std::span<const TensorHeader> tensors);
// Writes a whole file from tensors in memory. Throws as begin_gguf does.
void write_gguf(const std::string& path, const GgufMetadata& metadata, std::span<const NamedTensor> tensors);

}  // namespace eadem::io
