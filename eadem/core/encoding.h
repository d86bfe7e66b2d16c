// SPDX-License-Identifier: Apache-2.0
//
// Encoding: how a tensor's values are stored when they are not a plain strided array of its dtype.
//
// An encoding is a typed bundle of planes (packed values, scales, zero points, …). It owns their shapes and
// the conversion from and to plain values; nobody else knows the layout. A null Encoding pointer means
// plain. Encodings are stateless singletons: two tensors have the same encoding if the pointers are equal.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "eadem/core/dtype.h"
#include "eadem/core/function_ref.h"
#include "eadem/core/shape.h"

namespace eadem {

struct TensorView;

inline constexpr int kMaxPlanes = 4;

// One plane of an encoded tensor; contiguous, row-major.
struct PlaneSpec {
  std::string_view name;  // "data", "scales", …
  DType dtype;
  Shape shape;

  int64_t size_bytes() const { return shape.num_elements() * static_cast<int64_t>(dtype_size(dtype)); }
};

// Calls task(index) for every index in [0, count), on any threads in any order; tasks must not throw.
using ParallelFor = FunctionRef<void(int64_t count, FunctionRef<void(int64_t index)> task)>;

// Shares `count` pieces out as ranges, work(begin, end). Of several ranges' exceptions the first one's is thrown.
void parallel_pieces(int64_t count, ParallelFor parallel_for, FunctionRef<void(int64_t begin, int64_t end)> work);

class Encoding {
 public:
  virtual ~Encoding() = default;

  virtual std::string_view name() const = 0;

  // The planes that a tensor of logical `shape` consists of, in the order of TensorView::planes.
  // Throws InvalidArgument when the shape does not fit the encoding's blocks.
  virtual std::vector<PlaneSpec> planes(const Shape& shape) const = 0;

  // Writes the host tensor `values` ([shape], f32, bf16 or f16; plain, or in an encoding that this one repacks) into
  // the host planes of `encoded`. The work falls into `num_pieces` pieces (rows, panels …) that may be encoded
  // concurrently.
  virtual int64_t num_pieces(const Shape& shape) const = 0;
  virtual void encode_pieces(const TensorView& encoded, const TensorView& values, int64_t begin, int64_t end) const = 0;
  // How many rows of `values` (all but the last axis flattened) a piece reads: piece i reads rows [i * n, i * n + n),
  // as far as there are such, and no others. 0: pieces read something else.
  virtual int64_t rows_of_piece(const Shape& shape) const;
  void encode(const TensorView& encoded, const TensorView& values) const;
  // Encodes with the pieces shared out by `parallel_for`. If several pieces fail, the error of the first one is thrown.
  void encode(const TensorView& encoded, const TensorView& values, ParallelFor parallel_for) const;

  // One row (all but the last axis flattened) of a host tensor as f32, as exactly as the encoding allows.
  virtual void decode_row(float* row, const TensorView& encoded, int64_t index) const = 0;

  // The flat index of the first value in rows [begin, end) of a host tensor that is not finite, or -1. Of values that
  // stand or fall together (a block whose scale is infinite) the first may be named.
  virtual int64_t first_not_finite(const TensorView& encoded, int64_t begin, int64_t end) const;

  // The inverse of encode: `plain` is f32 on the host.
  void decode(const TensorView& plain, const TensorView& encoded) const;

  // Sharding: copies to `part` what of `whole` lies at [begin, begin + part.shape[axis]) along `axis`. Both are host
  // tensors of this encoding. Throws InvalidArgument when the cut goes through a block.
  virtual void slice(const TensorView& part, const TensorView& whole, int axis, int64_t begin) const = 0;
};

// Bytes of a tensor of `shape` in `encoding`: its planes, one after another.
int64_t encoded_bytes(const Encoding& encoding, const Shape& shape);

// The storage type of a weight or a KV cache: plain values of `dtype`, or `encoding`, which decodes to `dtype`.
struct WeightType {
  DType dtype;
  const Encoding* encoding;

  // Implicit, because a dtype is a storage type.
  WeightType(DType dtype = DType::f32, const Encoding* encoding = nullptr) : dtype(dtype), encoding(encoding) {}
  std::string_view name() const { return encoding == nullptr ? dtype_name(dtype) : encoding->name(); }
  friend bool operator==(const WeightType&, const WeightType&) = default;
};

}  // namespace eadem
