// SPDX-License-Identifier: Apache-2.0
//
// Shared by the readers and writers of weight files; not for use outside eadem/io.
#pragma once

#include <bit>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "eadem/core/tensor.h"
#include "eadem/io/weight_writer.h"
#include "eadem/io/weights.h"

namespace eadem::io {

static_assert(std::endian::native == std::endian::little, "safetensors and GGUF are read and written as they lie");

// A tensor over `bytes` (exactly its size), which `owner` keeps alive; a copy when they are misaligned. Encodings of
// one plane only.
Tensor tensor_over(std::span<const std::byte> bytes, const WeightType& type, const Shape& shape,
                   const std::shared_ptr<const void>& owner);

// The shape of extents that a file claims, with its element count proven to fit int64_t. Throws DataCorrupted or
// Unsupported (rank), naming `file` and `tensor`.
Shape checked_shape(std::span<const uint64_t> dims, const std::string& file, std::string_view tensor);

// Refuses what cannot be written (duplicate or malformed names) by InvalidArgument.
void check_writable(const std::string& path, std::span<const TensorHeader> tensors);
// Headers of whole tensors. Refuses strided views by InvalidArgument.
std::vector<TensorHeader> headers_of(const std::string& path, std::span<const NamedTensor> tensors);

// Bytes of a tensor, plain or in an encoding of one plane, as a file holds it.
int64_t stored_bytes(const WeightType& type, const Shape& shape);
inline int64_t stored_bytes(const TensorView& view) { return stored_bytes({view.dtype, view.encoding}, view.shape); }

// Bytes from `size` to the next multiple of `alignment`.
inline int64_t padding_of(int64_t size, int64_t alignment) { return (alignment - size % alignment) % alignment; }

inline std::span<const std::byte> bytes_of(const TensorView& view) {
  return {static_cast<const std::byte*>(view.data), static_cast<size_t>(stored_bytes(view))};
}

}  // namespace eadem::io
