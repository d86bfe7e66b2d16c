// SPDX-License-Identifier: Apache-2.0
//
// Typed views of memory. `Buffer` owns bytes on a device, `TensorView` says how to read them and is the type that
// functions take, `Tensor` is both. No op, gradient or device code is here.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "eadem/core/dtype.h"
#include "eadem/core/encoding.h"
#include "eadem/core/shape.h"

namespace eadem {

class Device;

// A non-owning view: pointers, dtype, shape and strides (in elements, logical order). Cheap to copy; never
// allocates. For encoded tensors `planes` holds the encoding's planes, `shape` stays the logical shape, and
// strides are unused. Constness of the elements is not tracked: a kernel writes only its outputs.
struct TensorView {
  void* data = nullptr;  // == planes[0]
  DType dtype = DType::f32;
  Shape shape;
  Shape strides;
  const Encoding* encoding = nullptr;               // null: plain
  std::array<void*, kMaxPlanes - 1> more_planes{};  // planes[1..]

  TensorView() = default;
  // A contiguous view of plain values.
  TensorView(void* data, DType dtype, const Shape& shape);

  // The typed element pointer. A mismatch of T and dtype is a bug.
  template <typename T>
  T* as() const {
    EADEM_CHECK(dtype_of<std::remove_const_t<T>> == dtype, "view of {} read as {}", dtype_name(dtype),
                dtype_name(dtype_of<std::remove_const_t<T>>));
    return static_cast<T*>(data);
  }
  void* plane(int index) const { return index == 0 ? data : more_planes[index - 1]; }

  bool defined() const { return data != nullptr; }
  int64_t num_elements() const { return shape.num_elements(); }
  // Bytes of a plain, contiguous tensor of this dtype and shape.
  int64_t size_bytes() const { return num_elements() * static_cast<int64_t>(dtype_size(dtype)); }
  bool is_contiguous() const;

  // Same elements under another shape of as many elements; requires contiguity.
  TensorView reshaped(const Shape& new_shape) const;
  // Rows [begin, begin + count) of the first axis.
  TensorView rows(int64_t begin, int64_t count) const;
};

// "f32 [3, 64]"
std::string to_string(const TensorView& view);

// An encoded view of planes that lie one after another from `base`: encoded_bytes(encoding, shape) bytes.
TensorView view_of_planes(void* base, const Encoding& encoding, DType dtype, const Shape& shape);

// Bytes on a device, freed on destruction. Move-only. Made by Device::allocate or Buffer::wrap.
class Buffer {
 public:
  using Deleter = void (*)(void* data, int64_t size_bytes, void* owner);

  Buffer() = default;
  Buffer(void* data, int64_t size_bytes, Deleter deleter, void* owner)
      : data_(data), size_bytes_(size_bytes), deleter_(deleter), owner_(owner) {}
  Buffer(Buffer&& other) noexcept { swap(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    Buffer(std::move(other)).swap(*this);
    return *this;
  }
  ~Buffer() {
    if (deleter_ != nullptr) deleter_(data_, size_bytes_, owner_);
  }

  void* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

 private:
  void swap(Buffer& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_bytes_, other.size_bytes_);
    std::swap(deleter_, other.deleter_);
    std::swap(owner_, other.owner_);
  }

  void* data_ = nullptr;
  int64_t size_bytes_ = 0;
  Deleter deleter_ = nullptr;
  void* owner_ = nullptr;
};

// A view that shares ownership of its bytes. Copies share; the bytes live as long as any of them.
// `storage` may be a Buffer, a mapped file, or an array that another runtime owns.
struct Tensor {
  TensorView view;
  std::shared_ptr<const void> storage;

  Tensor() = default;
  Tensor(const TensorView& view, std::shared_ptr<const void> storage) : view(view), storage(std::move(storage)) {}

  // A new uninitialized contiguous tensor in host memory (64-byte aligned). Throws OutOfMemory.
  static Tensor on_host(DType dtype, const Shape& shape);
  // A new uninitialized host tensor in the planes of `encoding`, each aligned. Throws OutOfMemory.
  static Tensor on_host(DType dtype, const Shape& shape, const Encoding& encoding);
  // A new uninitialized host tensor whose planes follow one another without padding, as view_of_planes, files and
  // devices expect: the first plane is aligned, values in later ones need not be.
  static Tensor in_one_piece(DType dtype, const Shape& shape, const Encoding& encoding);

  bool defined() const { return view.defined(); }
  DType dtype() const { return view.dtype; }
  const Shape& shape() const { return view.shape; }
};

// Element-wise conversion between floating dtypes on the host (any of f32, bf16, f16, f64), or a copy when
// the dtypes agree. Shapes must match; both contiguous. Rounds to nearest even.
void convert_on_host(const TensorView& dst, const TensorView& src);

// Row `index` (all but the last axis flattened) of a host tensor, plain and contiguous or encoded, as f32. Values
// beyond f32 become infinities.
void row_as_f32(float* row, const TensorView& view, int64_t index);

// A host copy of `src` with dtype `dtype`.
Tensor converted_on_host(const TensorView& src, DType dtype);

}  // namespace eadem
