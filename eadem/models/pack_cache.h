// SPDX-License-Identifier: Apache-2.0
//
// PackCache: the packed layouts of a checkpoint's parameters in a file (io/pack_file.h), which a later load maps
// instead of packing again. Programs read the same bytes either way.
//
// In its folder there are, for each model and set of layouts, NAME-HASH.pack and NAME-HASH.pack.stamp. The pack holds
// the hash of all bytes of the model's files, and a checksum of its own. The stamp says that both were compared, and
// for which files, by size, device, inode and times: while those stay as they are, a load reads neither the model nor
// the pack to compare them; else it does, at the speed of memory, and writes the stamp anew. A pack that fails any of
// this is said to (one warning) and written again. Whoever may write to the folder is trusted as the model's owner is:
// the hashes guard against accidents.
//
// Not in it: layouts that are bytes of the model's files, and parameters whose packing holds positions of columns,
// which are taken from checked files only.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "eadem/core/log.h"
#include "eadem/io/pack_file.h"
#include "eadem/models/parameter_reader.h"

namespace eadem::models {

class PackCache {
 public:
  // For the layouts that `parameters` has now, whose device must be host-accessible. The parameters and the checkpoint
  // must outlive it.
  PackCache(const std::string& folder, pipeline::ParameterStore& parameters, const Checkpoint& checkpoint,
            const Logger& log);

  // Whether there is a pack of this model and these layouts. When there is one that cannot be used, warns saying why.
  bool open();
  // After `open` was true: lets the layouts of a parameter refer to the pack and to the model's file. False, and
  // nothing is done, for a parameter that is not in the pack.
  bool place(const std::string& name);
  // After all parameters were loaded: writes the pack, or warns saying why there is none.
  void write();

  const std::string& path() const { return path_; }

 private:
  struct Layout {
    std::string name;  // as ParameterStore::LayoutOf has it
    const Encoding* packing;
    size_t part;  // index of a part of the pack, or kInFile
  };
  static constexpr size_t kInFile = static_cast<size_t>(-1);

  void plan();
  io::ContentHash hash_of_sources() const;
  std::string stamp(const io::PackFile& pack) const;
  void write_stamp(const io::PackFile& pack) const;

  pipeline::ParameterStore& parameters_;
  const Checkpoint& checkpoint_;
  ParameterReader reader_;
  Logger log_;
  std::string path_;
  std::vector<std::shared_ptr<const io::MappedFile>> sources_;
  std::map<std::string, std::vector<Layout>> forms_;  // keyed by the parameters in the pack
  std::vector<io::PackPart> parts_;
  std::shared_ptr<const io::PackFile> pack_;
};

}  // namespace eadem::models
