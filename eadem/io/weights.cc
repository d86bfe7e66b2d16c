// SPDX-License-Identifier: Apache-2.0
#include "eadem/io/weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>

#include "eadem/io/files/mapped_file.h"
#include "eadem/io/gguf.h"
#include "eadem/io/gguf_parts.h"
#include "eadem/io/json.h"
#include "eadem/io/safetensors.h"
#include "eadem/io/text.h"
#include "eadem/io/weights_internal.h"

namespace eadem::io {

// ---- WeightSource ----------------------------------------------------------------------------------------------

void WeightSource::set_tensors(std::vector<WeightInfo> tensors) {
  tensors_ = std::move(tensors);
  for (size_t i = 0; i < tensors_.size(); ++i)
    if (!index_of_.emplace(tensors_[i].name, i).second)
      throw DataCorrupted("{}: the tensor {} appears twice", path_, quote(tensors_[i].name));
}

const WeightInfo* WeightSource::find(std::string_view name) const {
  const auto it = index_of_.find(name);
  return it == index_of_.end() ? nullptr : &tensors_[it->second];
}

const WeightInfo& WeightSource::require(std::string_view name) const {
  const WeightInfo* info = find(name);
  if (info == nullptr) throw NotFound("{}: there is no tensor {} among its {}", path_, quote(name), tensors_.size());
  return *info;
}

Tensor WeightSource::get(std::string_view name) const {
  const WeightInfo& info = require(name);
  if (!info.type) {
    const bool has_scales = info.type_name == "I8" || info.type_name.starts_with("F8_");
    throw Unsupported(
        "{}: tensor {} {} has type {}, which {}", path_, quote(name), to_string(info.shape), info.type_name,
        has_scales
            ? "is read as the matrix 'X.weight' of a layer X only, with scales, where a quantization_config says which"
            : "cannot be read yet");
  }
  return load(static_cast<size_t>(&info - tensors_.data()));
}

Tensor WeightSource::get_bytes(std::string_view name) const {
  return load_bytes(static_cast<size_t>(&require(name) - tensors_.data()));
}

// ---- Helpers of the formats ------------------------------------------------------------------------------------

Tensor tensor_over(std::span<const std::byte> bytes, const WeightType& type, const Shape& shape,
                   const std::shared_ptr<const void>& owner) {
  TensorView view(const_cast<std::byte*>(bytes.data()), type.dtype, shape);
  if (type.encoding != nullptr) {
    // One plane of bytes, which may begin anywhere.
    view.encoding = type.encoding;
    EADEM_CHECK(bytes.size() == static_cast<size_t>(type.encoding->planes(shape).at(0).size_bytes()), "{} bytes for {}",
                bytes.size(), to_string(view));
    return Tensor(view, owner);
  }
  EADEM_CHECK(bytes.size() == static_cast<size_t>(view.size_bytes()), "{} bytes for {}", bytes.size(), to_string(view));
  const bool is_aligned = reinterpret_cast<uintptr_t>(bytes.data()) % dtype_size(type.dtype) == 0;
  if (is_aligned && !bytes.empty()) return Tensor(view, owner);
  Tensor copy = Tensor::on_host(type.dtype, shape);
  if (!bytes.empty()) std::memcpy(copy.view.data, bytes.data(), bytes.size());
  return copy;
}

int64_t stored_bytes(const WeightType& type, const Shape& shape) {
  if (type.encoding == nullptr) return shape.num_elements() * static_cast<int64_t>(dtype_size(type.dtype));
  return type.encoding->planes(shape).at(0).size_bytes();
}

Shape checked_shape(std::span<const uint64_t> dims, const std::string& file, std::string_view tensor) {
  if (dims.size() > kMaxRank)
    throw Unsupported("{}: tensor {} has {} dimensions; at most {} are supported", file, quote(tensor), dims.size(),
                      kMaxRank);
  // Bounds the product of the non-zero extents, so that no partial product of a shape with a zero overflows either.
  uint64_t num_elements = 1;
  std::vector<int64_t> extents;
  for (const uint64_t dim : dims) {
    const std::optional<uint64_t> product = checked_mul(num_elements, std::max<uint64_t>(dim, 1));
    if (!product || *product > static_cast<uint64_t>(INT64_MAX) / 8)
      throw DataCorrupted("{}: the shape [{}] of tensor {} overflows", file, fmt::join(dims, ", "), quote(tensor));
    num_elements = *product;
    extents.push_back(static_cast<int64_t>(dim));
  }
  return Shape(std::span<const int64_t>(extents));
}

void check_writable(const std::string& path, std::span<const TensorHeader> tensors) {
  std::set<std::string_view> names;
  for (const TensorHeader& tensor : tensors) {
    if (tensor.name.empty() || !is_valid_utf8(tensor.name))
      throw InvalidArgument("cannot write {}: {} is not a tensor name", path, quote(tensor.name));
    if (!names.insert(tensor.name).second)
      throw InvalidArgument("cannot write {}: two tensors are named {}", path, quote(tensor.name));
  }
}

std::vector<TensorHeader> headers_of(const std::string& path, std::span<const NamedTensor> tensors) {
  std::vector<TensorHeader> headers;
  for (const NamedTensor& tensor : tensors) {
    if (!tensor.view.is_contiguous())
      throw InvalidArgument("cannot write {}: tensor {} ({}) is not contiguous", path, quote(tensor.name),
                            to_string(tensor.view));
    headers.push_back({tensor.name, {tensor.view.dtype, tensor.view.encoding}, tensor.view.shape});
  }
  return headers;
}

// ---- open_weights ----------------------------------------------------------------------------------------------

namespace {

constexpr std::string_view kWhatOpens =
    "expected a model directory, a .safetensors file, a model.safetensors.index.json or a .gguf file";

// Whether an index names this one file, and no other.
bool is_index_of(const std::string& index_path, std::string_view file) {
  const JsonReader index = JsonReader::read(index_path);
  const JsonValue* weight_map = index.raw("weight_map");
  if (weight_map == nullptr || !weight_map->is_object()) return false;
  const auto& members = weight_map->as_object();
  return std::all_of(members.begin(), members.end(), [&](const JsonMember& member) {
    return member.value.is_string() && member.value.as_string() == file;
  });
}

std::shared_ptr<const WeightSource> open_directory(const std::string& path) {
  namespace fs = std::filesystem;
  const std::string single = (fs::path(path) / "model.safetensors").string();
  const std::string index = (fs::path(path) / "model.safetensors.index.json").string();
  std::error_code ignored;
  const bool has_single = fs::exists(single, ignored);
  const bool has_index = fs::exists(index, ignored);
  // Some programs write an index of the one file.
  if (has_single && has_index && !is_index_of(index, "model.safetensors"))
    throw DataCorrupted("{} holds both model.safetensors and model.safetensors.index.json; name the one to open", path);
  if (has_single) return open_weights(single);
  if (has_index) return open_sharded_safetensors(index);

  std::vector<std::string> ggufs;
  std::vector<std::string> pickles;
  std::error_code error;
  for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
    const std::string extension = it->path().extension().string();
    if (extension == ".gguf") ggufs.push_back(it->path().filename().string());
    if (extension == ".bin" || extension == ".pt" || extension == ".pth")
      pickles.push_back(it->path().filename().string());
  }
  if (error) throw IoError("cannot list {}: {}", path, error.message());
  std::sort(ggufs.begin(), ggufs.end());
  std::sort(pickles.begin(), pickles.end());
  // Parts of a split file count once.
  ggufs.erase(std::unique(ggufs.begin(), ggufs.end(),
                          [](const std::string& a, const std::string& b) {
                            const auto one = GgufPartName::parse(a), other = GgufPartName::parse(b);
                            return one && other && one->stem == other->stem && one->count == other->count;
                          }),
              ggufs.end());
  if (ggufs.size() == 1) return open_weights((fs::path(path) / ggufs[0]).string());
  if (ggufs.size() > 1)
    throw InvalidArgument("{} holds {} GGUF files ({}); name the one to open", path, ggufs.size(),
                          fmt::join(ggufs, ", "));
  if (!pickles.empty())
    throw Unsupported(
        "{} has no safetensors, only {}: PyTorch pickles can run code and are not read; convert them to "
        "safetensors",
        path, fmt::join(pickles, ", "));
  throw NotFound("{} holds no model.safetensors, model.safetensors.index.json or *.gguf", path);
}

}  // namespace

std::shared_ptr<const WeightSource> open_weights(const std::string& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return open_directory(path);

  const std::shared_ptr<const MappedFile> file = MappedFile::open(path);
  const std::string_view text(reinterpret_cast<const char*>(file->data()), file->size());
  if (text.starts_with("GGUF")) return GgufFile::open(file);
  if (text.size() > 8 && text[8] == '{') return SafetensorsFile::open(file);
  if (text.starts_with("{")) return open_sharded_safetensors(path);

  if (text.empty()) throw DataCorrupted("{} is empty; {}", path, kWhatOpens);
  if (text.starts_with("version https://git-lfs"))
    throw DataCorrupted("{} is a Git LFS pointer, not the file it stands for; fetch it with `git lfs pull`", path);
  if (text.starts_with("PK\x03\x04") || text.starts_with("\x80\x02"))
    throw Unsupported("{} is a PyTorch pickle, which can run code and is not read; convert it to safetensors", path);
  for (const std::string_view old_magic : {"lmgg", "fmgg", "tjgg", "algg"})
    if (text.starts_with(old_magic))
      throw Unsupported("{} is a GGML file of a format older than GGUF; convert it to GGUF", path);
  throw DataCorrupted("{} is neither GGUF nor safetensors (it begins with {}); {}", path, quote(text.substr(0, 8)),
                      kWhatOpens);
}

}  // namespace eadem::io
