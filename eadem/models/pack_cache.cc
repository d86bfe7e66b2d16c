// SPDX-License-Identifier: Apache-2.0
#include "eadem/models/pack_cache.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/weights.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;

// Raised when a packing writes other bytes than before (tests/kernels/packing_bytes_test.cc notices), or when the
// conversion of parameters changes.
constexpr int kPackingVersion = 2;
constexpr int64_t kMaxStampBytes = 1 << 20;
// The coarsest clock of a file system in use (FAT's). A file that changed more recently could change again without its
// times telling.
constexpr int64_t kClockTickNs = 2'000'000'000;

// Everything that decides the bytes of a layout, but for the model's.
std::string description_of(const pipeline::ParameterStore::LayoutOf& layout, const TensorType& type) {
  std::string text =
      fmt::format("{} {} as {}", layout.name, to_string(type), WeightType(type.dtype, type.encoding).name());
  const Encoding* encoding = layout.view.encoding;
  if (encoding == nullptr) return text;
  text += fmt::format(" in {}:", encoding->name());
  for (const PlaneSpec& plane : encoding->planes(layout.view.shape))
    text += fmt::format(" {} {} {}", plane.name, dtype_name(plane.dtype), to_string(plane.shape));
  return text;
}

bool holds_positions(const TensorView& view) {
  if (view.encoding == nullptr) return false;
  const std::vector<PlaneSpec> planes = view.encoding->planes(view.shape);
  return std::any_of(planes.begin(), planes.end(), [](const PlaneSpec& plane) { return plane.dtype == DType::i32; });
}

std::string text_of(const io::FileIdentity& file) {
  return fmt::format("{} bytes, device {}, inode {}, modified {}, changed {}", file.size, file.device, file.inode,
                     file.modified_ns, file.changed_ns);
}

}  // namespace

PackCache::PackCache(const std::string& folder, pipeline::ParameterStore& parameters, const Checkpoint& checkpoint,
                     const Logger& log)
    : parameters_(parameters),
      checkpoint_(checkpoint),
      reader_(checkpoint),
      log_(log),
      sources_(checkpoint.weights->files()) {
  const auto is_config = [&](const auto& file) { return file->path() == checkpoint.config_path; };
  // A configuration says how quantized weights are to be read.
  if (std::none_of(sources_.begin(), sources_.end(), is_config))
    sources_.push_back(io::MappedFile::open(checkpoint.config_path));
  plan();

  std::error_code ignored;
  const fs::path whole = fs::weakly_canonical(checkpoint.path, ignored);
  std::string key = whole.string();
  for (const io::PackPart& part : parts_) key += "\n" + part.description;
  const io::ContentHash hash = io::content_hash(std::as_bytes(std::span<const char>(key)));
  std::string name = whole.filename().string();
  name.resize(std::min<size_t>(name.size(), 100));
  path_ = (fs::path(folder) / fmt::format("{}-{}.pack", name, hash.hex().substr(0, 16))).string();
}

void PackCache::plan() {
  const int ranks = parameters_.num_ranks() * parameters_.num_ranks(MeshAxis::ep);
  parts_.push_back({fmt::format("eadem {}, packing version {}, rank {} of {}, expert rank {} of {}{}", EADEM_VERSION,
                                kPackingVersion, parameters_.rank(), parameters_.num_ranks(),
                                parameters_.rank(MeshAxis::ep), parameters_.num_ranks(MeshAxis::ep),
                                parameters_.encodes_before_cutting() ? ", encoded before it is cut" : "")});
  const std::vector<pipeline::ParameterStore::LayoutOf> all = parameters_.layouts();
  for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
    const std::string& name = all[begin].parameter;
    while (end < all.size() && all[end].parameter == name) ++end;
    const TensorType& type = parameters_.type(name);
    const WeightRecipe* recipe = reader_.recipe(name);
    const std::optional<RecipeType> stored = reader_.type(name);
    const bool as_in_file = recipe != nullptr && recipe->is_name() && stored &&
                            stored->type == WeightType(type.dtype, type.encoding) &&
                            stored->shape == parameters_.whole_shape(name) && ranks == 1;
    if (std::any_of(all.begin() + static_cast<std::ptrdiff_t>(begin), all.begin() + static_cast<std::ptrdiff_t>(end),
                    [](const auto& layout) { return holds_positions(layout.view); }))
      continue;
    std::vector<Layout>& layouts = forms_[name];
    for (size_t i = begin; i < end; ++i) {
      if (all[i].packing == nullptr && as_in_file && all[i].name == name) {
        layouts.push_back({name, nullptr, kInFile});
        continue;
      }
      layouts.push_back({all[i].name, all[i].packing, parts_.size()});
      parts_.push_back({description_of(all[i], parameters_.type(all[i].name)), all[i].size_bytes});
    }
  }
}

io::ContentHash PackCache::hash_of_sources() const {
  const auto parallel_for = [this](int64_t count, FunctionRef<void(int64_t)> task) {
    parameters_.device()->host_parallel_for(count, task);
  };
  std::vector<io::ContentHash> hashes;
  for (const auto& file : sources_) {
    hashes.push_back(io::content_hash(file->bytes(), parallel_for));
    file->release(file->bytes());
  }
  return io::content_hash(std::as_bytes(std::span(hashes)));
}

std::string PackCache::stamp(const io::PackFile& pack) const {
  std::string text =
      fmt::format("eadem pack stamp 1\npack {}\n{}\n", pack.checksum().hex(), text_of(pack.mapping()->identity()));
  for (const auto& file : sources_) text += text_of(file->identity()) + "\n";
  return text;
}

void PackCache::write_stamp(const io::PackFile& pack) const {
  const int64_t now =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  for (const auto& file : sources_)
    if (now - std::max(file->identity().modified_ns, file->identity().changed_ns) < kClockTickNs) return;
  io::write_file_atomically(path_ + ".stamp", stamp(pack));
}

bool PackCache::open() {
  try {
    auto pack = io::PackFile::open(path_, parts_);
    std::string found;
    try {
      found = io::read_file(path_ + ".stamp", kMaxStampBytes);
    } catch (const Error&) {  // as good as none
    }
    if (found != stamp(*pack)) {
      const auto parallel_for = [this](int64_t count, FunctionRef<void(int64_t)> task) {
        parameters_.device()->host_parallel_for(count, task);
      };
      if (hash_of_sources() != pack->source())
        throw DataCorrupted("{} was packed from other contents than {} has now", path_, checkpoint_.path);
      if (!pack->data_is_intact(parallel_for)) throw DataCorrupted("{}: its data does not match its checksum", path_);
      try {
        write_stamp(*pack);
      } catch (const IoError& error) {
        log_.log(LogLevel::info, "pack cache: {}", error.what());  // the next load compares again
      }
    }
    pack_ = std::move(pack);
    return true;
  } catch (const NotFound&) {
    log_.log(LogLevel::info, "pack cache: there is no {} yet", path_);
  } catch (const Error& error) {
    log_.log(LogLevel::warning, "pack cache: {}; packing again", error.what());
  }
  return false;
}

bool PackCache::place(const std::string& name) {
  const auto found = forms_.find(name);
  if (found == forms_.end()) return false;
  for (const Layout& layout : found->second) {
    if (layout.part != kInFile) {
      parameters_.place(layout.name, layout.packing, pack_->part(layout.part).data(), pack_);
    } else {
      const Tensor tensor = reader_.read(name);
      parameters_.place(layout.name, nullptr, tensor.view.data, tensor.storage);
    }
  }
  return true;
}

void PackCache::write() {
  try {
    const io::ContentHash source = hash_of_sources();
    for (const auto& file : sources_)
      if (!file->is_unchanged()) throw IoError("{} changed while it was read", file->path());
    std::error_code error;
    const fs::path folder = fs::path(path_).parent_path();
    fs::create_directories(folder, error);
    if (error) throw IoError("cannot make the folder {}: {}", folder.string(), error.message());
    std::vector<std::span<const std::byte>> data(parts_.size());
    for (const pipeline::ParameterStore::LayoutOf& layout : parameters_.layouts()) {
      const auto found = forms_.find(layout.parameter);
      if (found == forms_.end()) continue;
      for (const Layout& planned : found->second)
        if (planned.name == layout.name && planned.packing == layout.packing && planned.part != kInFile)
          data[planned.part] = {static_cast<const std::byte*>(layout.view.data),
                                static_cast<size_t>(layout.size_bytes)};
    }
    const auto parallel_for = [this](int64_t count, FunctionRef<void(int64_t)> task) {
      parameters_.device()->host_parallel_for(count, task);
    };
    const io::ContentHash checksum = io::write_pack_file(path_, parts_, source, data, parallel_for);
    const auto pack = io::PackFile::open(path_, parts_);
    if (pack->checksum() == checksum) write_stamp(*pack);  // else another process has written it since
    log_.log(LogLevel::info, "pack cache: wrote {}", path_);
  } catch (const Error& error) {
    log_.log(LogLevel::warning, "pack cache: {}; the next load packs again", error.what());
  }
}

}  // namespace eadem::models
