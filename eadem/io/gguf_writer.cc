// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <set>

#include "eadem/io/gguf.h"
#include "eadem/io/text.h"
#include "eadem/io/weights_internal.h"

namespace eadem::io {

namespace {

// Appends to the header text.
class HeaderWriter {
 public:
  template <typename T>
  void scalar(T value) {
    text_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  void string(std::string_view value) {
    scalar<uint64_t>(value.size());
    text_ += value;
  }
  void array(const GgufArray& value) {
    scalar(static_cast<uint32_t>(value.element_type));
    scalar<uint64_t>(value.size());
    text_ += value.scalars;
    for (const std::string& element : value.strings) string(element);
    for (const GgufArray& element : value.arrays) array(element);
  }
  void value(const GgufValue& value) {
    scalar(static_cast<uint32_t>(value.type));
    switch (value.type) {
      case GgufType::u8: return scalar(static_cast<uint8_t>(std::get<uint64_t>(value.data)));
      case GgufType::u16: return scalar(static_cast<uint16_t>(std::get<uint64_t>(value.data)));
      case GgufType::u32: return scalar(static_cast<uint32_t>(std::get<uint64_t>(value.data)));
      case GgufType::u64: return scalar(std::get<uint64_t>(value.data));
      case GgufType::i8: return scalar(static_cast<int8_t>(std::get<int64_t>(value.data)));
      case GgufType::i16: return scalar(static_cast<int16_t>(std::get<int64_t>(value.data)));
      case GgufType::i32: return scalar(static_cast<int32_t>(std::get<int64_t>(value.data)));
      case GgufType::i64: return scalar(std::get<int64_t>(value.data));
      case GgufType::f32: return scalar(static_cast<float>(std::get<double>(value.data)));
      case GgufType::f64: return scalar(std::get<double>(value.data));
      case GgufType::boolean: return scalar(static_cast<uint8_t>(std::get<bool>(value.data)));
      case GgufType::string: return string(std::get<std::string>(value.data));
      case GgufType::array: return array(std::get<GgufArray>(value.data));
    }
  }

  const std::string& text() const { return text_; }

 private:
  std::string text_;
};

const GgmlType& ggml_type_of(const TensorHeader& tensor, const std::string& path) {
  for (uint32_t id = 0; id < 64; ++id)
    if (const GgmlType* type = find_ggml_type(id); type != nullptr && type->weight_type() == tensor.type) return *type;
  throw InvalidArgument("cannot write {}: GGUF has no type for tensor {}, which is {}", path, quote(tensor.name),
                        tensor.type.name());
}

int64_t alignment_of(const GgufMetadata& metadata, const std::string& path) {
  for (const auto& [key, value] : metadata) {
    if (key != "general.alignment") continue;
    const auto* alignment = std::get_if<uint64_t>(&value.data);
    if (value.type != GgufType::u32 || !std::has_single_bit(*alignment))
      throw InvalidArgument("cannot write {}: general.alignment must be a u32 power of two", path);
    return static_cast<int64_t>(*alignment);
  }
  return 32;
}

}  // namespace

std::unique_ptr<WeightWriter> begin_gguf(const std::string& path, const GgufMetadata& metadata,
                                         std::span<const TensorHeader> tensors) {
  check_writable(path, tensors);
  std::set<std::string_view> keys;
  for (const auto& [key, value] : metadata)
    if (key.empty() || !is_valid_utf8(key) || !keys.insert(key).second)
      throw InvalidArgument("cannot write {}: the metadata key {} is malformed or appears twice", path, quote(key));
  const int64_t alignment = alignment_of(metadata, path);

  HeaderWriter header;
  header.scalar<uint32_t>(0x46554747);  // "GGUF"
  header.scalar<uint32_t>(3);
  header.scalar<uint64_t>(tensors.size());
  header.scalar<uint64_t>(metadata.size());
  for (const auto& [key, value] : metadata) {
    header.string(key);
    header.value(value);
  }
  int64_t offset = 0;
  for (const TensorHeader& tensor : tensors) {
    if (tensor.shape.rank() > 4)
      throw InvalidArgument("cannot write {}: tensor {} {} has more than 4 dimensions", path, quote(tensor.name),
                            to_string(tensor.shape));
    header.string(tensor.name);
    header.scalar(static_cast<uint32_t>(tensor.shape.rank()));
    for (int axis = tensor.shape.rank() - 1; axis >= 0; --axis)
      header.scalar(static_cast<uint64_t>(tensor.shape[axis]));
    header.scalar(ggml_type_of(tensor, path).id);
    header.scalar(static_cast<uint64_t>(offset));
    const int64_t size = stored_bytes(tensor.type, tensor.shape);
    offset += size + padding_of(size, alignment);
  }
  std::string text = header.text();
  text.append(static_cast<size_t>(padding_of(std::ssize(text), alignment)), '\0');
  return std::make_unique<WeightWriter>(path, text, std::vector(tensors.begin(), tensors.end()), alignment);
}

void write_gguf(const std::string& path, const GgufMetadata& metadata, std::span<const NamedTensor> tensors) {
  const std::unique_ptr<WeightWriter> writer = begin_gguf(path, metadata, headers_of(path, tensors));
  for (const NamedTensor& tensor : tensors) writer->write(tensor.view);
  writer->commit();
}

}  // namespace eadem::io
