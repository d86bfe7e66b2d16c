// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/tensor_type.h"

namespace eadem {

std::string to_string(const Sharding& sharding) {
  switch (sharding.kind) {
    case Sharding::Kind::replicated: return "replicated";
    case Sharding::Kind::sharded: return fmt::format("sharded({})", sharding.axis);
    case Sharding::Kind::partial: return "partial";
  }
  return "?";
}

TensorType::TensorType(DType dtype, std::span<const Dim> dims, const Encoding* encoding)
    : dtype(dtype), encoding(encoding), rank_(static_cast<int>(dims.size())) {
  EADEM_CHECK(dims.size() <= kMaxRank, "rank {} > {}", dims.size(), kMaxRank);
  for (size_t i = 0; i < dims.size(); ++i) dims_[i] = dims[i];
}

Sharding TensorType::over(MeshAxis axis) const {
  switch (axis) {
    case MeshAxis::dp: return data_sharding;
    case MeshAxis::tp: return sharding;
    case MeshAxis::ep: return expert_sharding;
    case MeshAxis::pp: break;
  }
  return Sharding::replicated();
}

void TensorType::set_over(MeshAxis axis, Sharding value) {
  switch (axis) {
    case MeshAxis::dp: data_sharding = value; return;
    case MeshAxis::tp: sharding = value; return;
    case MeshAxis::ep: expert_sharding = value; return;
    case MeshAxis::pp: EADEM_CHECK(value == Sharding::replicated(), "{} over pp", to_string(value));
  }
}

TensorType TensorType::seen_along(MeshAxis axis) const {
  TensorType seen = *this;
  seen.sharding = over(axis);
  return seen;
}

int64_t TensorType::fixed(int axis) const {
  const Dim& d = dim(axis);
  EADEM_CHECK(d.is_fixed(), "dimension {} of {} is symbolic", axis, to_string(*this));
  return d.value;
}

bool TensorType::same_dims(const TensorType& other) const {
  if (rank_ != other.rank_) return false;
  for (int i = 0; i < rank_; ++i)
    if (!(dim(i) == other.dim(i))) return false;
  return true;
}

Shape TensorType::bind(const SymbolValues& symbols) const {
  Shape shape(std::span<const int64_t>(std::array<int64_t, kMaxRank>{}.data(), static_cast<size_t>(rank_)));
  for (int i = 0; i < rank_; ++i) shape[i] = dim(i).bind(symbols);
  return shape;
}

int64_t TensorType::size_bytes(const SymbolValues& symbols) const {
  const Shape shape = bind(symbols);
  if (encoding == nullptr) return shape.num_elements() * static_cast<int64_t>(dtype_size(dtype));
  int64_t total = 0;
  for (const PlaneSpec& plane : encoding->planes(shape)) total += plane.size_bytes();
  return total;
}

std::string to_string(const TensorType& type) {
  std::string text(type.encoding ? type.encoding->name() : dtype_name(type.dtype));
  text += " [";
  for (int i = 0; i < type.rank(); ++i) text += (i ? ", " : "") + to_string(type.dim(i));
  text += "]";
  if (type.sharding.kind != Sharding::Kind::replicated) text += " " + to_string(type.sharding);
  for (MeshAxis axis : {MeshAxis::dp, MeshAxis::ep})
    if (type.over(axis).kind != Sharding::Kind::replicated)
      text += fmt::format(" {} over {}", to_string(type.over(axis)), mesh_axis_name(axis));
  return text;
}

}  // namespace eadem
