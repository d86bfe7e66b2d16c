// SPDX-License-Identifier: Apache-2.0
//
// Parameters on one device of one rank, in exactly the layouts that the compiled programs read: plain, packed for a
// kernel, or both. Programs say what they need when they compile; loading then fills those layouts and keeps nothing
// else.
//
// Not thread-safe; one store per rank.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/core/mesh/mesh.h"
#include "eadem/core/tensor_type.h"

namespace eadem::pipeline {

class ParameterStore {
 public:
  // The parts are those of this rank of tp, and of ep.
  ParameterStore(std::shared_ptr<Device> device, const Mesh& mesh);
  explicit ParameterStore(std::shared_ptr<Device> device, int rank = 0, int num_ranks = 1);  // of tp alone

  // Declares a parameter by the type of this rank's part. Declaring it again with the same type does nothing.
  void declare(const std::string& name, const TensorType& part);
  // Declares columns of a parameter, elements of its last axis, as something that programs read by a name of its own:
  // those from `begin` on of the `of` columns that this rank has. Loading fills them with the parameter; names() lists
  // the parameter alone.
  void declare_columns(const std::string& name, const TensorType& columns, const std::string& parameter, int64_t begin,
                       int64_t of);
  // From now on whole tensors are encoded before this rank's part is cut, where a parameter is stored in an encoding
  // that the tensor does not have. Scales of whole rows or tensors are then those of one rank.
  void encode_before_cutting() { encodes_before_cutting_ = true; }
  bool encodes_before_cutting() const { return encodes_before_cutting_; }

  // The packings of the layouts that programs asked for so far (null: as declared); none for an unknown parameter.
  std::vector<const Encoding*> packings(const std::string& name) const;
  // The view that programs read; allocated on first use. `packing` null: as it was declared. It holds until
  // `placement` changes. Throws Unsupported for a layout that is asked for only after the parameter was loaded.
  TensorView layout(const std::string& name, const Encoding* packing);
  // Says that some program cannot read the layout as the file stores it (kernels::Kernel::reads_stored). Packs it if it
  // is stored so.
  void require_packed(const std::string& name, const Encoding* packing);
  // Grows whenever the memory of a layout moves, so that programs know when to ask for views again.
  uint64_t placement() const { return placement_; }

  // Takes the whole tensor (on the host; of any floating dtype, or encoded), stores it as it was declared (decoding,
  // rounding or quantizing where it comes otherwise), cuts this rank's part and fills every layout. Throws NotFound (no
  // such parameter) or InvalidArgument (shape, or a value that is not finite), naming `source`, the file it comes from,
  // and both values. The parameter then counts as not loaded, if it was not loaded before.
  //
  // `owner`, if given, keeps the values in place and unchanged. A layout that would be a copy of them then refers to
  // them instead, if the device can. It is for programs that write no parameter.
  //
  // `release`, if given, says that the values will not be read soon again. With it and `owner`, a matrix of plain
  // values or of codes of 8 bits that all programs can read as the file stores it is looked at, but not packed before
  // pack_stored(), which releases it before and after.
  void load(const std::string& name, const TensorView& whole, const std::string& source,
            const std::shared_ptr<const void>& owner = {}, const std::function<void()>& release = {});
  // Packs what `load` left as the file stores it.
  bool has_stored() const { return num_stored_ > 0; }
  void pack_stored();
  // Which experts of a parameter this rank keeps; nothing where ranks do not divide them.
  std::optional<PartRange> own_experts(const std::string& name) const;
  // As `load`, of a tensor that has no other experts than own_experts().
  void load_experts(const std::string& name, const TensorView& experts, const std::string& source,
                    const std::shared_ptr<const void>& owner = {});

  // This rank's part, over ep and tp, of a tensor with the shape of the whole parameter, on the host: the tensor itself
  // where no axis divides it.
  Tensor part_of_whole(const std::string& name, const Tensor& whole) const;

  // The layouts that programs read, ordered by parameter and the name of the packing; plain ones first.
  struct LayoutOf {
    std::string name;         // as the programs read it
    std::string parameter;    // which it belongs to
    const Encoding* packing;  // null: as declared
    TensorView view;
    int64_t size_bytes;
  };
  std::vector<LayoutOf> layouts() const;
  // Lets one layout refer to bytes that `owner` keeps alive and that `load` would have filled it with. Needs a
  // host-accessible device. A parameter counts as loaded once every layout was placed.
  void place(const std::string& name, const Encoding* packing, const void* bytes,
             const std::shared_ptr<const void>& owner);

  // Makes the packed layouts again after the plain values have changed on the device: those of `names`.
  void refresh_packed(std::span<const std::string> names);

  // Throws NotFound listing parameters that were never loaded. `source` names the place that lacks them.
  void require_all_loaded(const std::string& source) const;

  std::vector<std::string> names() const;
  const TensorType& type(const std::string& name) const;
  bool contains(const std::string& name) const;
  // Shape of the whole parameter, over all ranks.
  Shape whole_shape(const std::string& name) const;
  // A host copy of this rank's part as plain values; decoded where it is encoded or packed (exact for the packings).
  Tensor to_host(const std::string& name) const;
  // Bytes of all layouts.
  int64_t size_bytes() const;
  int64_t num_parameters() const;  // elements of this rank's parts

  const std::shared_ptr<Device>& device() const { return device_; }
  int rank(MeshAxis axis = MeshAxis::tp) const { return place_[axis]; }
  int num_ranks(MeshAxis axis = MeshAxis::tp) const { return ranks_[axis]; }

 private:
  struct Layout {
    TensorView view;
    Buffer buffer;
    std::shared_ptr<const void> owner;  // keeps bytes alive that stand in for the buffer and are never written
    bool is_read_packed = false;        // by some program that cannot read it otherwise
    // Until it is packed: the values as the file stores them, which programs read, their owner and `release` of load().
    Tensor stored;
    std::function<void()> release;
  };
  struct Entry {
    TensorType type;
    std::map<const Encoding*, Layout> layouts;
    bool loaded = false;
    // Of columns: the parameter, and where they begin in it. Of a parameter: the names of its columns.
    std::string parameter = {};
    int64_t begin = 0;
    std::vector<std::string> columns = {};
    bool is_columns() const { return !parameter.empty(); }
  };

  const Entry& entry(const std::string& name) const;
  // The shape over all ranks of the axes.
  Shape shape_over(const TensorType& type, std::initializer_list<MeshAxis> axes) const;
  // This rank's part over an axis: a copy, unless the axis does not divide it.
  Tensor cut_part(const Entry& entry, const Tensor& whole, MeshAxis axis) const;
  // A parameter counts as loaded when its columns are.
  void mark_columns_loaded(const std::string& parameter);
  Tensor joined_columns(const Entry& entry) const;
  void store(const std::string& name, const Tensor& experts, const std::string& source,
             const std::shared_ptr<const void>& owner, const std::function<void()>& release = {});
  // Whether a layout may stay as the file stores it.
  bool may_stay_stored(const Entry& entry, const Layout& layout, const TensorView& host) const;
  void pack(Layout& layout);
  void forget_stored(Layout& layout);
  int64_t layout_bytes(const Layout& layout) const;
  void allocate(Layout& layout);
  void refer(Layout& layout, void* bytes, const std::shared_ptr<const void>& owner);
  void fill(Layout& layout, const TensorView& host, const std::shared_ptr<const void>& owner = {});
  // Whether fill_finite can fill the layout.
  bool packs_by_rows(const Layout& layout, const TensorView& host) const;
  // Fills a layout, and looks for values that are not finite while it has the rows in cache. Returns the flat index of
  // the first one, or -1. After one the layout holds anything.
  int64_t fill_finite(Layout& layout, const TensorView& host);
  // Each thread copies the share that it will read.
  void copy_to_device(void* dst, const void* src, int64_t size_bytes) const;
  // Encodes on the device's host threads.
  void encode(const TensorView& encoded, const TensorView& values) const;
  Tensor decoded(const TensorView& encoded) const;

  std::shared_ptr<Device> device_;
  MeshShape ranks_, place_;  // of tp and ep
  std::map<std::string, Entry> entries_;
  uint64_t placement_ = 0;
  int64_t num_stored_ = 0;
  bool encodes_before_cutting_ = false;
};

}  // namespace eadem::pipeline
