// SPDX-License-Identifier: Apache-2.0
//
// Shape: up to kMaxRank extents, in logical order, without an allocation.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

#include "eadem/core/error.h"

namespace eadem {

inline constexpr int kMaxRank = 5;

class Shape {
 public:
  constexpr Shape() = default;
  Shape(std::initializer_list<int64_t> dims) : Shape(std::span(dims.begin(), dims.size())) {}
  explicit Shape(std::span<const int64_t> dims) : rank_(static_cast<int>(dims.size())) {
    EADEM_CHECK(dims.size() <= kMaxRank, "rank {} > {}", dims.size(), kMaxRank);
    for (int i = 0; i < rank_; ++i) dims_[i] = dims[i];
  }

  int rank() const { return rank_; }
  int64_t operator[](int axis) const { return dims_[axis]; }
  int64_t& operator[](int axis) { return dims_[axis]; }
  int64_t back() const { return dims_[rank_ - 1]; }
  std::span<const int64_t> dims() const { return {dims_.data(), static_cast<size_t>(rank_)}; }

  // The product of all extents; 1 for rank 0. The caller has bounded the extents.
  int64_t num_elements() const {
    int64_t n = 1;
    for (int i = 0; i < rank_; ++i) n *= dims_[i];
    return n;
  }
  // Everything but the last axis, flattened: [a, b, c] has a * b rows of c elements.
  int64_t num_rows() const { return rank_ == 0 ? 1 : num_elements_until(rank_ - 1); }

  friend bool operator==(const Shape& a, const Shape& b) {
    if (a.rank_ != b.rank_) return false;
    for (int i = 0; i < a.rank_; ++i)
      if (a.dims_[i] != b.dims_[i]) return false;
    return true;
  }

 private:
  int64_t num_elements_until(int axis) const {
    int64_t n = 1;
    for (int i = 0; i < axis; ++i) n *= dims_[i];
    return n;
  }

  std::array<int64_t, kMaxRank> dims_{};
  int rank_ = 0;
};

// "[4096, 4000]"
std::string to_string(const Shape& shape);

}  // namespace eadem
