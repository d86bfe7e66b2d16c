// SPDX-License-Identifier: Apache-2.0
#include "eadem/core/tensor.h"

#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace eadem {

namespace {

Shape contiguous_strides(const Shape& shape) {
  Shape strides = shape;
  int64_t step = 1;
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    strides[axis] = step;
    step *= shape[axis];
  }
  return strides;
}

template <typename T>
double load_element(const T& value) {
  if constexpr (std::is_arithmetic_v<T>)
    return static_cast<double>(value);
  else
    return value.to_float();
}

template <typename T>
void store_element(T& target, double value) {
  if constexpr (std::is_arithmetic_v<T>)
    target = static_cast<T>(value);
  else
    target = T::from_float(static_cast<float>(value));
}

// Calls fn with a null pointer of the element type of a floating `dtype`.
template <typename Fn>
void visit_floating(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::f32: return fn(static_cast<float*>(nullptr));
    case DType::bf16: return fn(static_cast<bf16_t*>(nullptr));
    case DType::f16: return fn(static_cast<f16_t*>(nullptr));
    case DType::f64: return fn(static_cast<double*>(nullptr));
    default: EADEM_UNREACHABLE("{} is not a floating dtype", dtype_name(dtype));
  }
}

}  // namespace

TensorView::TensorView(void* data, DType dtype, const Shape& shape)
    : data(data), dtype(dtype), shape(shape), strides(contiguous_strides(shape)) {}

bool TensorView::is_contiguous() const {
  int64_t step = 1;
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    if (shape[axis] != 1 && strides[axis] != step) return false;
    step *= shape[axis];
  }
  return true;
}

TensorView TensorView::reshaped(const Shape& new_shape) const {
  EADEM_CHECK(encoding == nullptr && is_contiguous(), "reshape of a strided or encoded view");
  EADEM_CHECK(new_shape.num_elements() == num_elements(), "reshape {} to {}", to_string(shape), to_string(new_shape));
  return TensorView(data, dtype, new_shape);
}

TensorView TensorView::rows(int64_t begin, int64_t count) const {
  EADEM_CHECK(encoding == nullptr && begin >= 0 && count >= 0 && begin + count <= shape[0], "rows [{}, {}) of {}",
              begin, begin + count, to_string(shape));
  TensorView result = *this;
  result.data = static_cast<std::byte*>(data) + begin * strides[0] * static_cast<int64_t>(dtype_size(dtype));
  result.shape[0] = count;
  return result;
}

std::string to_string(const TensorView& view) {
  return fmt::format("{} {}", view.encoding ? view.encoding->name() : dtype_name(view.dtype), to_string(view.shape));
}

TensorView view_of_planes(void* base, const Encoding& encoding, DType dtype, const Shape& shape) {
  TensorView view(base, dtype, shape);
  view.encoding = &encoding;
  auto* next = static_cast<std::byte*>(base);
  size_t index = 0;
  for (const PlaneSpec& plane : encoding.planes(shape)) {
    if (index > 0) view.more_planes[index - 1] = next;
    next += plane.size_bytes();
    ++index;
  }
  return view;
}

Tensor Tensor::on_host(DType dtype, const Shape& shape) {
  const int64_t size_bytes = shape.num_elements() * static_cast<int64_t>(dtype_size(dtype));
  // Not aligned_alloc: glibc's looks for more bytes than it keeps, so that a block that was freed is too small for the
  // next one of its size, and the heap grows by each.
  constexpr size_t kAlignment = 64;
  const size_t padded = (static_cast<size_t>(size_bytes) + 127) / 64 * 64;
  void* const block = std::malloc(padded + kAlignment);
  if (block == nullptr)
    throw OutOfMemory("cannot allocate {} bytes of host memory for a {} {} tensor", size_bytes, dtype_name(dtype),
                      to_string(shape));
  void* data = block;
  size_t space = padded + kAlignment;
  std::align(kAlignment, padded, data, space);
  return Tensor(TensorView(data, dtype, shape), std::shared_ptr<const void>(block, std::free));
}

Tensor Tensor::on_host(DType dtype, const Shape& shape, const Encoding& encoding) {
  auto planes = std::make_shared<std::vector<Tensor>>();
  TensorView view(nullptr, dtype, shape);
  view.encoding = &encoding;
  for (const PlaneSpec& spec : encoding.planes(shape)) {
    planes->push_back(on_host(spec.dtype, spec.shape));
    (planes->size() == 1 ? view.data : view.more_planes[planes->size() - 2]) = planes->back().view.data;
  }
  return Tensor(view, std::move(planes));
}

Tensor Tensor::in_one_piece(DType dtype, const Shape& shape, const Encoding& encoding) {
  Tensor result = on_host(DType::u8, Shape{encoded_bytes(encoding, shape)});
  result.view = view_of_planes(result.view.data, encoding, dtype, shape);
  return result;
}

void convert_on_host(const TensorView& dst, const TensorView& src) {
  EADEM_CHECK(dst.shape == src.shape && dst.is_contiguous() && src.is_contiguous() && !dst.encoding && !src.encoding,
              "convert {} from {}", to_string(dst), to_string(src));
  const int64_t count = src.num_elements();
  if (count == 0) return;
  if (dst.dtype == src.dtype) {
    std::memcpy(dst.data, src.data, static_cast<size_t>(src.size_bytes()));
    return;
  }
  visit_floating(dst.dtype, [&](auto* dst_type) {
    visit_floating(src.dtype, [&](auto* src_type) {
      auto* to = static_cast<decltype(dst_type)>(dst.data);
      const auto* from = static_cast<decltype(src_type)>(src.data);
      for (int64_t i = 0; i < count; ++i) store_element(to[i], load_element(from[i]));
    });
  });
}

void row_as_f32(float* row, const TensorView& view, int64_t index) {
  if (view.encoding != nullptr) return view.encoding->decode_row(row, view, index);
  const int64_t columns = view.shape.rank() == 0 ? 1 : view.shape.back();
  std::byte* source =
      static_cast<std::byte*>(view.data) + index * columns * static_cast<int64_t>(dtype_size(view.dtype));
  convert_on_host(TensorView(row, DType::f32, Shape{columns}), TensorView(source, view.dtype, Shape{columns}));
}

Tensor converted_on_host(const TensorView& src, DType dtype) {
  Tensor result = Tensor::on_host(dtype, src.shape);
  convert_on_host(result.view, src);
  return result;
}

}  // namespace eadem
