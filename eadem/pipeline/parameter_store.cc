// SPDX-License-Identifier: Apache-2.0
#include "eadem/pipeline/parameter_store.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <mutex>

#include "eadem/core/edit_distance.h"
#include "eadem/core/encodings/block_encoding.h"

namespace eadem::pipeline {

namespace {

// The bits of a value, and those among them of the exponent: all set in what is not finite.
template <typename T>
struct ExponentBits;
template <>
struct ExponentBits<bf16_t> {
  using Integer = uint16_t;
  static constexpr Integer kMask = 0x7f80;
};
template <>
struct ExponentBits<f16_t> {
  using Integer = uint16_t;
  static constexpr Integer kMask = 0x7c00;
};
template <>
struct ExponentBits<float> {
  using Integer = uint32_t;
  static constexpr Integer kMask = 0x7f800000;
};
template <>
struct ExponentBits<double> {
  using Integer = uint64_t;
  static constexpr Integer kMask = 0x7ff0000000000000;
};

template <typename T>
bool is_finite(T value) {
  constexpr auto kMask = ExponentBits<T>::kMask;
  return (std::bit_cast<typename ExponentBits<T>::Integer>(value) & kMask) != kMask;
}

// Whether all of `bytes`, a multiple of 8, are of finite values. Adding the lowest bit of the exponent to an exponent
// carries into the sign, which was masked, when all bits are set, so that a word tells of all values in it. Integers of
// one size and no comparison: compilers make vectors of this, and of maxima of 16-bit integers they did not.
template <typename T>
bool all_finite(const T* data, int64_t bytes) {
  using Integer = typename ExponentBits<T>::Integer;
  constexpr Integer kMask = ExponentBits<T>::kMask;
  constexpr uint64_t kEach = ~uint64_t{0} / static_cast<Integer>(~Integer{0});  // 1 in each value of a word
  constexpr uint64_t kMasks = kEach * kMask, kLowest = kEach * (kMask & (~kMask + 1u)),
                     kSigns = kEach << (8 * sizeof(T) - 1);
  const auto* from = reinterpret_cast<const std::byte*>(data);
  uint64_t carries = 0;
  for (int64_t i = 0; i < bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, from + i, sizeof(word));
    carries |= (word & kMasks) + kLowest;
  }
  return (carries & kSigns) == 0;
}

// The flat index of the first value in [begin, end) that is not finite, or -1. Looks at a run of values for any such
// before it looks for which.
template <typename T>
int64_t first_not_finite(const T* data, int64_t begin, int64_t end) {
  constexpr int64_t kRun = 512;
  while (begin < end) {
    if (end - begin >= kRun && all_finite(data + begin, kRun * static_cast<int64_t>(sizeof(T)))) {
      begin += kRun;
      continue;
    }
    for (const int64_t last = std::min(end, begin + kRun); begin < last; ++begin)
      if (!is_finite(data[begin])) return begin;
  }
  return -1;
}

int64_t first_not_finite(const TensorView& view, int64_t begin_row, int64_t end_row) {
  if (view.encoding != nullptr) return view.encoding->first_not_finite(view, begin_row, end_row);
  const int64_t columns = view.shape.rank() == 0 ? 1 : view.shape.back();
  const int64_t begin = begin_row * columns, end = end_row * columns;
  switch (view.dtype) {
    case DType::f32: return first_not_finite(view.as<float>(), begin, end);
    case DType::bf16: return first_not_finite(view.as<bf16_t>(), begin, end);
    case DType::f16: return first_not_finite(view.as<f16_t>(), begin, end);
    case DType::f64: return first_not_finite(view.as<double>(), begin, end);
    default: return -1;
  }
}

// The index of the first value of a whole tensor that is not finite. The device's threads share out the rows.
int64_t first_not_finite(Device& device, const TensorView& view) {
  const int64_t rows = view.shape.num_rows(), tasks = std::min<int64_t>(rows, 64);
  std::vector<int64_t> found(static_cast<size_t>(tasks));
  device.host_parallel_for(tasks, [&](int64_t task) {
    found[static_cast<size_t>(task)] = first_not_finite(view, task * rows / tasks, (task + 1) * rows / tasks);
  });
  const auto first = std::find_if(found.begin(), found.end(), [](int64_t index) { return index >= 0; });
  return first == found.end() ? -1 : *first;
}

// The values in another dtype. The device's threads share out the rows.
Tensor converted(Device& device, const TensorView& view, DType dtype) {
  const Tensor result = Tensor::on_host(dtype, view.shape);
  if (view.shape.rank() == 0 || view.shape[0] == 0) {
    convert_on_host(result.view, view);
    return result;
  }
  const int64_t rows = view.shape[0], tasks = std::min<int64_t>(rows, 64);
  device.host_parallel_for(tasks, [&](int64_t task) {
    const int64_t begin = task * rows / tasks, count = (task + 1) * rows / tasks - begin;
    convert_on_host(result.view.rows(begin, count), view.rows(begin, count));
  });
  return result;
}

// A copy of a range along an axis of a host tensor.
Tensor range_of(const TensorView& whole, int axis, PartRange range) {
  Shape part = whole.shape;
  part[axis] = range.size;
  if (whole.encoding != nullptr) {
    Tensor result = Tensor::in_one_piece(whole.dtype, part, *whole.encoding);
    whole.encoding->slice(result.view, whole, axis, range.begin);
    return result;
  }
  int64_t outer = 1, inner = static_cast<int64_t>(dtype_size(whole.dtype));
  for (int i = 0; i < axis; ++i) outer *= part[i];
  for (int i = axis + 1; i < part.rank(); ++i) inner *= part[i];
  const int64_t run = part[axis] * inner, whole_run = whole.shape[axis] * inner;
  const auto* first = static_cast<const std::byte*>(whole.data) + range.begin * inner;
  Tensor result = Tensor::on_host(whole.dtype, part);
  for (int64_t o = 0; o < outer; ++o)
    std::memcpy(static_cast<std::byte*>(result.view.data) + o * run, first + o * whole_run, static_cast<size_t>(run));
  return result;
}

// Whether the planes lie one after another, as those of a layout do.
bool planes_are_joined(const TensorView& view) {
  return view.encoding == nullptr ||
         view.more_planes == view_of_planes(view.data, *view.encoding, view.dtype, view.shape).more_planes;
}

}  // namespace

ParameterStore::ParameterStore(std::shared_ptr<Device> device, const Mesh& mesh)
    : device_(std::move(device)),
      ranks_{.tp = mesh.size(MeshAxis::tp), .ep = mesh.size(MeshAxis::ep)},
      place_{.dp = 0, .tp = mesh.rank(MeshAxis::tp), .pp = 0, .ep = mesh.rank(MeshAxis::ep)} {}

ParameterStore::ParameterStore(std::shared_ptr<Device> device, int rank, int num_ranks)
    : device_(std::move(device)), ranks_{.tp = num_ranks}, place_{.dp = 0, .tp = rank, .pp = 0, .ep = 0} {
  EADEM_CHECK(rank >= 0 && rank < num_ranks, "rank {} of {}", rank, num_ranks);
}

void ParameterStore::declare(const std::string& name, const TensorType& part) {
  const auto [found, inserted] = entries_.try_emplace(name);
  if (inserted) found->second.type = part;
  EADEM_CHECK(found->second.type == part, "'{}' declared as {} and {}", name, to_string(found->second.type),
              to_string(part));
}

void ParameterStore::declare_columns(const std::string& name, const TensorType& columns, const std::string& parameter,
                                     int64_t begin, int64_t of) {
  TensorType part = columns;
  part.dim(-1) = of;
  declare(parameter, part);
  declare(name, columns);
  EADEM_CHECK(begin >= 0 && begin + columns.fixed(-1) <= of, "columns of '{}' from {} to {} of {}", parameter, begin,
              begin + columns.fixed(-1), of);
  Entry& own = entries_.at(name);
  if (own.is_columns()) return;
  own.parameter = parameter;
  own.begin = begin;
  entries_.at(parameter).columns.push_back(name);
}

bool ParameterStore::contains(const std::string& name) const {
  const auto found = entries_.find(name);
  return found != entries_.end() && !found->second.is_columns();
}

const ParameterStore::Entry& ParameterStore::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  EADEM_CHECK(found != entries_.end(), "no parameter '{}'", name);
  return found->second;
}

std::vector<const Encoding*> ParameterStore::packings(const std::string& name) const {
  std::vector<const Encoding*> result;
  if (const auto found = entries_.find(name); found != entries_.end())
    for (const auto& [packing, layout] : found->second.layouts) result.push_back(packing);
  return result;
}

TensorView ParameterStore::layout(const std::string& name, const Encoding* encoding) {
  Entry& target = const_cast<Entry&>(entry(name));
  if (target.loaded && !target.layouts.contains(encoding))
    throw Unsupported("'{}' was loaded, and is not there in the layout '{}'", name,
                      encoding == nullptr ? "plain" : encoding->name());
  auto [found, inserted] = target.layouts.try_emplace(encoding);
  Layout& layout = found->second;
  if (inserted) {
    TensorType type = target.type;
    layout.view = TensorView(nullptr, type.dtype, type.bind({}));
    layout.view.encoding = encoding != nullptr ? encoding : type.encoding;
    allocate(layout);
  }
  return layout.stored.defined() ? layout.stored.view : layout.view;
}

void ParameterStore::require_packed(const std::string& name, const Encoding* packing) {
  Layout& layout = const_cast<Entry&>(entry(name)).layouts.at(packing);
  layout.is_read_packed = true;
  if (layout.stored.defined()) pack(layout);
}

bool ParameterStore::may_stay_stored(const Entry& target, const Layout& layout, const TensorView& host) const {
  // Codes of fewer than 8 bits are taken apart to be packed. Doing that twice costs a short answer more than the first
  // token gains.
  const BlockEncoding* blocks = BlockEncoding::of(host.encoding);
  return !layout.is_read_packed && host.shape.rank() == 2 && target.columns.empty() &&
         (host.encoding == nullptr || (blocks != nullptr && blocks->format().code_bits == 8));
}

void ParameterStore::pack(Layout& layout) {
  fill(layout, layout.stored.view);
  forget_stored(layout);
}

void ParameterStore::forget_stored(Layout& layout) {
  if (!layout.stored.defined()) return;
  layout.release();
  layout.stored = {};
  layout.release = {};
  --num_stored_;
  ++placement_;
}

void ParameterStore::pack_stored() {
  // Before there is any packed weight, no page of the file stays: both together would be more than the weights.
  for (auto& [name, target] : entries_)
    for (auto& [encoding, layout] : target.layouts)
      if (layout.stored.defined()) layout.release();
  for (auto& [name, target] : entries_)
    for (auto& [encoding, layout] : target.layouts)
      if (layout.stored.defined()) pack(layout);
}

int64_t ParameterStore::layout_bytes(const Layout& layout) const {
  return layout.view.encoding == nullptr ? layout.view.size_bytes()
                                         : encoded_bytes(*layout.view.encoding, layout.view.shape);
}

void ParameterStore::allocate(Layout& layout) {
  layout.buffer = device_->allocate(layout_bytes(layout));
  refer(layout, layout.buffer.data(), nullptr);
}

void ParameterStore::refer(Layout& layout, void* bytes, const std::shared_ptr<const void>& owner) {
  if (layout.view.defined()) ++placement_;
  layout.view = layout.view.encoding == nullptr
                    ? TensorView(bytes, layout.view.dtype, layout.view.shape)
                    : view_of_planes(bytes, *layout.view.encoding, layout.view.dtype, layout.view.shape);
  if (owner != nullptr) layout.buffer = {};
  layout.owner = owner;
}

Shape ParameterStore::shape_over(const TensorType& type, std::initializer_list<MeshAxis> axes) const {
  Shape shape = type.bind({});
  for (MeshAxis axis : axes)
    if (const Sharding sharding = type.over(axis); sharding.kind == Sharding::Kind::sharded)
      shape[sharding.axis] = sharding.whole > 0 ? sharding.whole : shape[sharding.axis] * ranks_[axis];
  return shape;
}

Shape ParameterStore::whole_shape(const std::string& name) const {
  return shape_over(entry(name).type, {MeshAxis::tp, MeshAxis::ep});
}

std::optional<PartRange> ParameterStore::own_experts(const std::string& name) const {
  const Sharding sharding = entry(name).type.over(MeshAxis::ep);
  if (sharding.kind != Sharding::Kind::sharded || ranks_.ep == 1) return std::nullopt;
  return part_of(whole_shape(name)[sharding.axis], ranks_.ep, place_.ep);
}

Tensor ParameterStore::cut_part(const Entry& target, const Tensor& tensor, MeshAxis over) const {
  const Sharding sharding = target.type.over(over);
  if (sharding.kind != Sharding::Kind::sharded || ranks_[over] == 1) return tensor;
  const int64_t whole = tensor.shape()[sharding.axis];
  return range_of(tensor.view, sharding.axis, part_of(whole, ranks_[over], place_[over]));
}

void ParameterStore::fill(Layout& layout, const TensorView& host, const std::shared_ptr<const void>& owner) {
  const Encoding* encoding = layout.view.encoding;
  if (encoding == host.encoding && owner != nullptr && device_->host_accessible() && planes_are_joined(host))
    return refer(layout, host.data, owner);
  if (layout.owner != nullptr) allocate(layout);
  if (encoding == host.encoding && planes_are_joined(host)) {
    copy_to_device(layout.view.data, host.data, layout_bytes(layout));
  } else if (encoding == host.encoding) {
    const std::vector<PlaneSpec> planes = encoding->planes(host.shape);
    for (size_t i = 0; i < planes.size(); ++i)
      copy_to_device(layout.view.plane(static_cast<int>(i)), host.plane(static_cast<int>(i)), planes[i].size_bytes());
  } else if (device_->host_accessible()) {
    // The pieces of a packed weight are its panels: each is written by the thread that decodes with it.
    encoding->encode(layout.view, host, [this](int64_t count, FunctionRef<void(int64_t)> task) {
      device_->host_parallel_shares(count, task);
    });
  } else {
    const Tensor staged = Tensor::in_one_piece(layout.view.dtype, layout.view.shape, *encoding);
    encode(staged.view, host);
    device_->copy_from_host(layout.view.data, staged.view.data, encoded_bytes(*encoding, layout.view.shape));
  }
}

bool ParameterStore::packs_by_rows(const Layout& layout, const TensorView& host) const {
  const Encoding* encoding = layout.view.encoding;
  return device_->host_accessible() && encoding != nullptr && encoding != host.encoding &&
         encoding->rows_of_piece(host.shape) > 0;
}

int64_t ParameterStore::fill_finite(Layout& layout, const TensorView& host) {
  if (layout.owner != nullptr) allocate(layout);
  const Encoding& encoding = *layout.view.encoding;
  const int64_t rows = host.shape.num_rows(), step = encoding.rows_of_piece(host.shape);
  std::mutex mutex;
  int64_t first = -1;
  parallel_pieces(
      encoding.num_pieces(host.shape),
      [this](int64_t count, FunctionRef<void(int64_t)> task) { device_->host_parallel_shares(count, task); },
      [&](int64_t begin, int64_t end) {
        for (int64_t piece = begin; piece < end; ++piece) {
          const int64_t found = pipeline::first_not_finite(host, piece * step, std::min(rows, (piece + 1) * step));
          if (found >= 0) {
            const std::lock_guard lock(mutex);
            if (first < 0 || found < first) first = found;
            return;
          }
          encoding.encode_pieces(layout.view, host, piece, piece + 1);
        }
      });
  return first;
}

void ParameterStore::copy_to_device(void* dst, const void* src, int64_t size_bytes) const {
  if (!device_->host_accessible()) return device_->copy_from_host(dst, src, size_bytes);
  constexpr int64_t kRun = 1 << 20;
  device_->host_parallel_shares((size_bytes + kRun - 1) / kRun, [&](int64_t run) {
    std::memcpy(static_cast<std::byte*>(dst) + run * kRun, static_cast<const std::byte*>(src) + run * kRun,
                static_cast<size_t>(std::min(kRun, size_bytes - run * kRun)));
  });
}

void ParameterStore::encode(const TensorView& encoded, const TensorView& values) const {
  encoded.encoding->encode(encoded, values, [this](int64_t count, FunctionRef<void(int64_t)> task) {
    device_->host_parallel_for(count, task);
  });
}

Tensor ParameterStore::decoded(const TensorView& encoded) const {
  Tensor result = Tensor::on_host(DType::f32, encoded.shape);
  const int64_t columns = encoded.shape[encoded.shape.rank() - 1];
  device_->host_parallel_for(encoded.shape.num_elements() / columns, [&](int64_t row) {
    encoded.encoding->decode_row(result.view.as<float>() + row * columns, encoded, row);
  });
  return result;
}

Tensor ParameterStore::part_of_whole(const std::string& name, const Tensor& whole) const {
  const Entry& own = entry(name);
  EADEM_CHECK(whole.shape() == whole_shape(name), "'{}' is {}, not {}", name, to_string(whole.shape()),
              to_string(whole_shape(name)));
  return cut_part(own, cut_part(own, whole, MeshAxis::ep), MeshAxis::tp);
}

void ParameterStore::load(const std::string& name, const TensorView& whole, const std::string& source,
                          const std::shared_ptr<const void>& owner, const std::function<void()>& release) {
  const auto found = entries_.find(name);
  if (found == entries_.end() || found->second.is_columns()) {
    const std::vector<std::string> known = names();
    throw NotFound("{}: the model has no parameter '{}'; the nearest names are {}", source, name,
                   nearest_names(name, {known.begin(), known.end()}));
  }
  const Shape expected = whole_shape(name);
  if (!(whole.shape == expected))
    throw InvalidArgument("{}: '{}' is {}; the model's config implies {}", source, name, to_string(whole.shape),
                          to_string(expected));
  store(name, cut_part(found->second, Tensor(whole, nullptr), MeshAxis::ep), source, owner, release);
}

void ParameterStore::load_experts(const std::string& name, const TensorView& experts, const std::string& source,
                                  const std::shared_ptr<const void>& owner) {
  const Shape expected = shape_over(entry(name).type, {MeshAxis::tp});
  if (!(experts.shape == expected))
    throw InvalidArgument("{}: the experts of '{}' that rank {} has are {}; the model's config implies {}", source,
                          name, place_.ep, to_string(experts.shape), to_string(expected));
  store(name, Tensor(experts, nullptr), source, owner);
}

// `experts`: those of this rank, whole over tp.
void ParameterStore::store(const std::string& name, const Tensor& experts, const std::string& source,
                           const std::shared_ptr<const void>& owner, const std::function<void()>& release) {
  Entry& target = entries_.at(name);
  const TensorView& whole = experts.view;
  if (!is_floating(whole.dtype))
    throw InvalidArgument("{}: '{}' is {}; expected a floating dtype", source, name, dtype_name(whole.dtype));
  const auto naming = [&](auto action) {
    try {
      action();
    } catch (const InvalidArgument& error) {
      throw InvalidArgument("{}: '{}': {}", source, name, error.what());
    }
  };
  // Values are looked at before anything else happens to them. Where they are packed as they are, that is done while
  // they are packed, because reading a weight from memory takes as long as packing it.
  const bool as_stored = whole.encoding == target.type.encoding &&
                         (whole.encoding != nullptr || whole.dtype == target.type.dtype) &&
                         (ranks_.tp == 1 || target.type.over(MeshAxis::tp).kind != Sharding::Kind::sharded);
  const auto packed = std::find_if(target.layouts.begin(), target.layouts.end(), [&](const auto& layout) {
    return as_stored && !target.loaded && packs_by_rows(layout.second, whole);
  });
  Layout* const filled = packed == target.layouts.end() ? nullptr : &packed->second;
  const bool stays_stored = release != nullptr && owner != nullptr && experts.storage == nullptr && filled != nullptr &&
                            may_stay_stored(target, *filled, whole);
  int64_t not_finite = -1;
  naming([&] {
    not_finite = filled != nullptr && !stays_stored ? fill_finite(*filled, whole) : first_not_finite(*device_, whole);
  });
  if (not_finite >= 0)
    throw InvalidArgument("{}: '{}' holds a value that is not finite (NaN or infinity) at flat index {} of {}", source,
                          name, not_finite, to_string(whole.shape));
  // Plain values in the dtype of the parameter.
  const auto in_dtype = [&](const Tensor& values) {
    if (values.view.encoding != nullptr || values.dtype() == target.type.dtype) return values;
    Tensor result = converted(*device_, values.view, target.type.dtype);
    if (const int64_t index = first_not_finite(*device_, result.view); index >= 0)
      throw InvalidArgument("{}: '{}' overflows {} at flat index {}", source, name, dtype_name(target.type.dtype),
                            index);
    return result;
  };
  const auto encoded = [&](const Tensor& values) {
    Tensor result = Tensor::in_one_piece(target.type.dtype, values.shape(), *target.type.encoding);
    naming([&] { encode(result.view, values.view); });
    return result;
  };
  if (stays_stored) {
    filled->stored = Tensor(whole, owner);
    filled->release = release;
    ++num_stored_;
    ++placement_;
  }
  // The whole as it is, or decoded where the model keeps it in another layout.
  const bool encodes = whole.encoding != target.type.encoding && target.type.encoding != nullptr;
  Tensor part = experts;
  if (whole.encoding != target.type.encoding && whole.encoding != nullptr) part = decoded(whole);
  if (encodes && encodes_before_cutting_) part = encoded(in_dtype(part));
  part = in_dtype(cut_part(target, part, MeshAxis::tp));
  if (encodes && !encodes_before_cutting_) part = encoded(part);
  // What was neither decoded, cut nor rounded lies where it lay.
  const std::shared_ptr<const void> kept = part.storage == nullptr ? owner : nullptr;
  for (auto& [encoding, layout] : target.layouts)
    if (&layout != filled) {
      naming([&, &layout = layout] { fill(layout, part.view, kept); });
      forget_stored(layout);
    }
  const int last = part.shape().rank() - 1;
  for (const std::string& columns : target.columns) {
    Entry& piece = entries_.at(columns);
    const Tensor values = range_of(part.view, last, {piece.begin, piece.type.fixed(last)});
    for (auto& [encoding, layout] : piece.layouts) naming([&, &layout = layout] { fill(layout, values.view); });
    piece.loaded = true;
  }
  target.loaded = true;
  if (release != nullptr && !stays_stored) release();
}

std::vector<ParameterStore::LayoutOf> ParameterStore::layouts() const {
  std::vector<LayoutOf> result;
  for (const auto& [name, target] : entries_) {
    const size_t begin = result.size();
    for (const auto& [packing, layout] : target.layouts)
      result.push_back({.name = name,
                        .parameter = target.is_columns() ? target.parameter : name,
                        .packing = packing,
                        .view = layout.view,
                        .size_bytes = layout_bytes(layout)});
    // Pointers have no order that lasts.
    std::sort(
        result.begin() + static_cast<std::ptrdiff_t>(begin), result.end(), [](const LayoutOf& a, const LayoutOf& b) {
          return (a.packing == nullptr ? "" : a.packing->name()) < (b.packing == nullptr ? "" : b.packing->name());
        });
  }
  return result;
}

void ParameterStore::place(const std::string& name, const Encoding* packing, const void* bytes,
                           const std::shared_ptr<const void>& owner) {
  Entry& target = const_cast<Entry&>(entry(name));
  const auto found = target.layouts.find(packing);
  EADEM_CHECK(found != target.layouts.end(), "'{}' has no such layout", name);
  EADEM_CHECK(device_->host_accessible(), "'{}' placed on {}", name, device_->description());
  refer(found->second, const_cast<void*>(bytes), owner);
  target.loaded = std::all_of(target.layouts.begin(), target.layouts.end(),
                              [](const auto& f) { return f.second.owner != nullptr; });
  if (target.is_columns()) mark_columns_loaded(target.parameter);
}

void ParameterStore::mark_columns_loaded(const std::string& parameter) {
  Entry& whole = entries_.at(parameter);
  whole.loaded = whole.layouts.empty() && std::all_of(whole.columns.begin(), whole.columns.end(),
                                                      [&](const auto& name) { return entries_.at(name).loaded; });
}

void ParameterStore::refresh_packed(std::span<const std::string> names) {
  struct Work {
    Layout* packed;
    TensorView plain;
  };
  std::vector<Work> work;
  for (const std::string& name : names) {
    Entry& target = const_cast<Entry&>(entry(name));
    EADEM_CHECK(target.columns.empty(), "'{}' changes but is read in columns", name);
    const auto plain = target.layouts.find(nullptr);
    for (auto& [encoding, layout] : target.layouts) {
      if (encoding == nullptr) continue;
      EADEM_CHECK(plain != target.layouts.end(), "'{}' changes but has no plain layout", name);
      EADEM_CHECK(layout.owner == nullptr && plain->second.owner == nullptr, "'{}' changes but is not ours", name);
      work.push_back({&layout, plain->second.view});
    }
  }
  if (device_->host_accessible()) {
    device_->host_parallel_for(static_cast<int64_t>(work.size()), [&](int64_t i) {
      const Work& item = work[static_cast<size_t>(i)];
      item.packed->view.encoding->encode(item.packed->view, item.plain);
    });
  } else {
    for (const Work& item : work) {
      const Tensor host = copy_to_host(*device_, item.plain);
      fill(*item.packed, host.view);
    }
  }
}

void ParameterStore::require_all_loaded(const std::string& source) const {
  std::string missing;
  size_t count = 0;
  for (const auto& [name, target] : entries_)
    if (!target.loaded && !target.is_columns() && ++count <= 5)
      missing += fmt::format("{}'{}' {}", count > 1 ? ", " : "", name, to_string(target.type));
  if (count > 0)
    throw NotFound("{}: {} of the model's {} tensors are missing: {}{}", source, count, names().size(), missing,
                   count > 5 ? ", …" : "");
}

std::vector<std::string> ParameterStore::names() const {
  std::vector<std::string> result;
  for (const auto& [name, target] : entries_)
    if (!target.is_columns()) result.push_back(name);
  return result;
}

const TensorType& ParameterStore::type(const std::string& name) const { return entry(name).type; }

Tensor ParameterStore::to_host(const std::string& name) const {
  const Entry& target = entry(name);
  if (target.layouts.empty() && !target.columns.empty()) return joined_columns(target);
  EADEM_CHECK(!target.layouts.empty(), "'{}' is read by no program", name);
  const auto stored = target.layouts.find(nullptr);
  const Layout& layout = stored != target.layouts.end() ? stored->second : target.layouts.begin()->second;
  if (const TensorView& kept = layout.stored.view; kept.defined())
    return converted_on_host(kept.encoding == nullptr ? kept : decoded(kept).view, target.type.dtype);
  const Tensor on_host = copy_to_host(*device_, layout.view);
  if (layout.view.encoding == nullptr) return on_host;
  const Tensor values = decoded(on_host.view);
  return target.type.dtype == DType::f32 ? values : converted_on_host(values.view, target.type.dtype);
}

Tensor ParameterStore::joined_columns(const Entry& target) const {
  Tensor result = Tensor::on_host(target.type.dtype, target.type.bind({}));
  const auto size = static_cast<int64_t>(dtype_size(target.type.dtype));
  const int64_t rows = result.shape().num_rows(), row_bytes = result.shape().back() * size;
  for (const std::string& name : target.columns) {
    const Tensor piece = to_host(name);
    const int64_t run = piece.shape().back() * size, offset = entry(name).begin * size;
    for (int64_t row = 0; row < rows; ++row)
      std::memcpy(static_cast<std::byte*>(result.view.data) + row * row_bytes + offset,
                  static_cast<const std::byte*>(piece.view.data) + row * run, static_cast<size_t>(run));
  }
  return result;
}

int64_t ParameterStore::size_bytes() const {
  int64_t total = 0;
  for (const auto& [name, target] : entries_)
    for (const auto& [encoding, layout] : target.layouts) total += layout_bytes(layout);
  return total;
}

int64_t ParameterStore::num_parameters() const {
  int64_t total = 0;
  for (const auto& [name, target] : entries_)
    if (!target.is_columns()) total += target.type.num_elements({});
  return total;
}

}  // namespace eadem::pipeline
