// SPDX-License-Identifier: Apache-2.0
//
// The cache of Hugging Face's hub, as huggingface_hub writes it:
//
//   models--ORG--NAME/refs/main                     the commit of a branch or tag, 40 hexadecimal digits
//   models--ORG--NAME/snapshots/COMMIT/config.json  a link to ../../blobs/HASH, or a file
//   models--ORG--NAME/blobs/HASH                    a content, or a link to one that repositories share
//   models--ORG--NAME/blobs/HASH.incomplete         a download that has not ended
//
// A file appears in a snapshot when its download has ended, so an interrupted download leaves a snapshot that lacks
// some.
#include <fmt/format.h>

#include <algorithm>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/io/json.h"
#include "eadem/io/text.h"
#include "eadem/models/locator/model_stores.h"

namespace eadem::models {

namespace {

namespace fs = std::filesystem;

constexpr int64_t kMaxIndexBytes = 64 << 20;
constexpr size_t kMaxFiles = 100'000;  // of a snapshot

struct Snapshot {
  std::string commit;
  std::string label;  // "main", or empty
  fs::file_time_type changed;
};

bool is_commit(std::string_view text) {
  return text.size() == 40 && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// The commit that refs/REF names; nothing when there is no such file.
std::optional<std::string> read_ref(const fs::path& root, const fs::path& repository, const std::string& ref) {
  const std::optional<fs::path> file = inside(root, repository / "refs" / ref);
  std::error_code ignored;
  if (!file || !fs::is_regular_file(*file, ignored)) return std::nullopt;
  std::string commit = io::read_file(file->string(), 4096);
  while (!commit.empty() && (commit.back() == '\n' || commit.back() == ' ')) commit.pop_back();
  if (!is_commit(commit)) throw DataCorrupted("{} holds {}, which is no commit", file->string(), io::quote(commit));
  return commit;
}

std::vector<Snapshot> all_snapshots(const fs::path& root, const fs::path& repository) {
  std::vector<Snapshot> snapshots;
  std::error_code error;
  for (fs::directory_iterator it(repository / "snapshots", error), end; !error && it != end; it.increment(error)) {
    const std::string commit = it->path().filename().string();
    std::error_code ignored;
    if (is_commit(commit) && inside(root, it->path()) && fs::is_directory(it->path(), ignored))
      snapshots.push_back({commit, "", fs::last_write_time(it->path(), ignored)});
  }
  std::sort(snapshots.begin(), snapshots.end(), [](const Snapshot& a, const Snapshot& b) {
    return std::tie(b.changed, a.commit) < std::tie(a.changed, b.commit);
  });
  return snapshots;
}

// The snapshots that the name may mean, the preferred one first.
std::vector<Snapshot> candidates(const ModelName& name, const fs::path& root, const fs::path& repository) {
  std::vector<Snapshot> snapshots = all_snapshots(root, repository);
  const std::string ref = name.revision.empty() ? "main" : name.revision;
  std::optional<std::string> commit;
  if (ref.find("..") == std::string::npos && !ref.starts_with('/')) commit = read_ref(root, repository, ref);
  if (!name.revision.empty()) {
    const std::string start = commit.value_or(name.revision);
    std::erase_if(snapshots, [&](const Snapshot& s) { return !s.commit.starts_with(start); });
    if (snapshots.size() > 1)
      throw InvalidArgument("{}@{} may be any of {} commits in {}; say more of it", name.repository(), name.revision,
                            snapshots.size(), repository.string());
  }
  for (Snapshot& snapshot : snapshots)
    if (snapshot.commit == commit) snapshot.label = ref;
  std::stable_partition(snapshots.begin(), snapshots.end(), [](const Snapshot& s) { return !s.label.empty(); });
  return snapshots;
}

// The files of a snapshot by their paths in it. A link that leads nowhere is put into `lacking`.
std::vector<std::string> files_of(const fs::path& root, const fs::path& snapshot, std::string& lacking) {
  std::vector<std::string> files;
  std::error_code error;
  for (fs::recursive_directory_iterator it(snapshot, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (fs::is_directory(it->symlink_status(ignored))) continue;
    const std::string file = it->path().lexically_relative(snapshot).string();
    const std::optional<fs::path> target = inside(root, it->path());
    if (!target || target->extension() == ".incomplete") {
      lacking = file;
      continue;
    }
    files.push_back(file);
    if (files.size() > kMaxFiles) throw DataCorrupted("{} holds more than {} files", snapshot.string(), kMaxFiles);
  }
  if (error) throw IoError("cannot list {}: {}", snapshot.string(), error.message());
  std::sort(files.begin(), files.end());
  return files;
}

// The first shard of the index that `files` does not have; nothing when all are there.
std::optional<std::string> missing_shard(const fs::path& index, const std::vector<std::string>& files) {
  const io::JsonReader reader = io::JsonReader::read(index.string(), {.max_bytes = kMaxIndexBytes});
  const io::JsonReader weight_map = reader.object("weight_map");
  for (const io::JsonMember& member : weight_map.value().as_object()) {
    if (!member.value.is_string()) weight_map.fail(member.key, "the name of a file");
    const std::string& shard = member.value.as_string();
    if (!std::binary_search(files.begin(), files.end(), shard)) return shard;
  }
  return std::nullopt;
}

// The path to open in a snapshot; nothing, and why in `reason`, when it is not complete.
std::optional<std::string> path_in_snapshot(const ModelName& name, const fs::path& root, const fs::path& snapshot,
                                            std::string& reason) {
  std::string lacking;
  const std::vector<std::string> files = files_of(root, snapshot, lacking);
  const auto has = [&](const char* file) { return std::binary_search(files.begin(), files.end(), file); };
  if (!lacking.empty()) {
    reason = "lacks the content of " + lacking;
    return std::nullopt;
  }
  if (name.tag.empty() && has("config.json")) {
    if (has("model.safetensors")) return snapshot.string();
    if (has("model.safetensors.index.json")) {
      const auto missing = missing_shard(snapshot / "model.safetensors.index.json", files);
      if (!missing) return snapshot.string();
      reason = "lacks " + *missing;
      return std::nullopt;
    }
  }
  if (const auto file = choose_gguf(name, files, snapshot.string())) {
    const auto missing = missing_part(*file, files);
    if (!missing) return (snapshot / *file).string();
    reason = "lacks " + *missing;
    return std::nullopt;
  }
  // Files of pickles are left to the reader of weights, which says why it does not read them.
  if (name.tag.empty() && has("config.json") && (has("pytorch_model.bin") || has("pytorch_model.bin.index.json")))
    return snapshot.string();
  reason = name.tag.empty() ? "holds neither a config.json with safetensors nor a GGUF file"
                            : fmt::format("holds no GGUF file of the tag {}", name.tag);
  return std::nullopt;
}

bool has_unfinished(const fs::path& repository) {
  std::error_code error;
  for (fs::directory_iterator it(repository / "blobs", error), end; !error && it != end; it.increment(error))
    if (it->path().extension() == ".incomplete") return true;
  return false;
}

}  // namespace

std::optional<FoundModel> find_in_hub(const ModelName& name, const std::string& folder, Obstacles& obstacles) {
  const std::optional<fs::path> root = existing_folder(folder);
  if (!root || name.parts.size() > 2) return std::nullopt;
  const fs::path repository = *root / fmt::format("models--{}", fmt::join(name.parts, "--"));
  if (!inside(*root, repository)) return std::nullopt;

  const std::vector<Snapshot> snapshots = candidates(name, *root, repository);
  std::string passed_over;
  for (const Snapshot& snapshot : snapshots) {
    const std::string which =
        fmt::format("{}{}", snapshot.label.empty() ? "" : snapshot.label + " at ", snapshot.commit.substr(0, 7));
    std::string reason;
    if (const auto path = path_in_snapshot(name, *root, repository / "snapshots" / snapshot.commit, reason))
      return FoundModel{*path, fmt::format("the Hugging Face cache, {}{}{}", which, passed_over,
                                           has_unfinished(repository) ? "; a download into it has not ended" : "")};
    passed_over += fmt::format("; {} {}", which, reason);
    obstacles.push_back(fmt::format("{} in {} {}", which, repository.string(), reason));
  }
  if (snapshots.empty())
    obstacles.push_back(fmt::format("{} holds no snapshot{}", repository.string(),
                                    name.revision.empty() ? "" : " of the revision " + name.revision));
  return std::nullopt;
}

}  // namespace eadem::models
