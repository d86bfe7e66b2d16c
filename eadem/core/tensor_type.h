// SPDX-License-Identifier: Apache-2.0
//
// TensorType: what is known of a tensor before it has bytes. Dimensions may be symbolic (core/symbol.h); how it is
// divided over the ranks of a tensor-parallel group is part of the type.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "eadem/core/dtype.h"
#include "eadem/core/encoding.h"
#include "eadem/core/mesh/mesh_axis.h"
#include "eadem/core/shape.h"
#include "eadem/core/symbol.h"
#include "eadem/core/tensor.h"

namespace eadem {

// The way in which the ranks of one axis of a mesh hold a tensor.
struct Sharding {
  enum class Kind : uint8_t {
    replicated,  // every rank has all of it
    sharded,     // rank r has the r-th part along dimension `axis`; the type's dims are the part's
    partial,     // the tensor is the sum of what the ranks have
  };
  Kind kind = Kind::replicated;
  int8_t axis = 0;
  int64_t whole = 0;  // extent of `axis` over all ranks where their parts differ in size; 0: they are equal

  static constexpr Sharding replicated() { return {}; }
  static constexpr Sharding along(int axis, int64_t whole = 0) {
    return {Kind::sharded, static_cast<int8_t>(axis), whole};
  }
  static constexpr Sharding partial() { return {Kind::partial, 0}; }
  // The division that a type's extents already tell is not compared.
  friend bool operator==(const Sharding& a, const Sharding& b) { return a.kind == b.kind && a.axis == b.axis; }
};

std::string to_string(const Sharding& sharding);

class TensorType {
 public:
  TensorType() = default;
  TensorType(DType dtype, std::initializer_list<Dim> dims, const Encoding* encoding = nullptr)
      : TensorType(dtype, std::span(dims.begin(), dims.size()), encoding) {}
  TensorType(DType dtype, std::span<const Dim> dims, const Encoding* encoding = nullptr);

  DType dtype = DType::f32;
  const Encoding* encoding = nullptr;  // null: plain
  Sharding sharding;         // over tp; type rules, which know one axis at a time, find the one they are asked for here
  Sharding data_sharding;    // over dp
  Sharding expert_sharding;  // over ep

  // Over pp nothing is divided: a value lies whole where it is made.
  Sharding over(MeshAxis axis) const;
  void set_over(MeshAxis axis, Sharding value);
  // As a type rule sees it that is asked for `axis`.
  TensorType seen_along(MeshAxis axis) const;

  int rank() const { return rank_; }
  std::span<const Dim> dims() const { return {dims_.data(), static_cast<size_t>(rank_)}; }
  const Dim& dim(int axis) const { return dims_[static_cast<size_t>(axis < 0 ? axis + rank_ : axis)]; }
  Dim& dim(int axis) { return dims_[static_cast<size_t>(axis < 0 ? axis + rank_ : axis)]; }
  // The extent of a fixed dimension; a symbolic one is a bug in the caller.
  int64_t fixed(int axis) const;

  bool same_dims(const TensorType& other) const;
  Shape bind(const SymbolValues& symbols) const;
  // Elements of one row times rows, with symbols bound.
  int64_t num_elements(const SymbolValues& symbols) const { return bind(symbols).num_elements(); }
  int64_t size_bytes(const SymbolValues& symbols) const;

  TensorType with_dtype(DType new_dtype) const {
    TensorType result = *this;
    result.dtype = new_dtype;
    return result;
  }

  friend bool operator==(const TensorType& a, const TensorType& b) {
    return a.dtype == b.dtype && a.encoding == b.encoding && a.sharding == b.sharding &&
           a.data_sharding == b.data_sharding && a.expert_sharding == b.expert_sharding && a.same_dims(b);
  }

 private:
  std::array<Dim, kMaxRank> dims_{};
  int rank_ = 0;
};

// "bf16 [tokens, 2048]", "f32 [sequences+1]", "bf16 [4096, 512] sharded(1)"
std::string to_string(const TensorType& type);

}  // namespace eadem
