// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/reference/values.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace eadem::kernels::reference {

namespace {

// Calls fn with a pointer of the element type of `dtype`.
template <typename Fn>
void visit(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::f32: return fn(static_cast<float*>(nullptr));
    case DType::bf16: return fn(static_cast<bf16_t*>(nullptr));
    case DType::f16: return fn(static_cast<f16_t*>(nullptr));
    case DType::f64: return fn(static_cast<double*>(nullptr));
    case DType::i32: return fn(static_cast<int32_t*>(nullptr));
    case DType::i64: return fn(static_cast<int64_t*>(nullptr));
    case DType::u8: return fn(static_cast<uint8_t*>(nullptr));
  }
}

}  // namespace

RefTensor widen(const TensorView& host) {
  RefTensor result;
  if (!host.defined()) return result;
  result.shape = host.shape;
  result.data.resize(static_cast<size_t>(host.num_elements()));
  if (host.encoding != nullptr) {
    const Tensor decoded = Tensor::on_host(DType::f32, host.shape);
    host.encoding->decode(decoded.view, host);
    std::copy_n(decoded.view.as<float>(), result.data.size(), result.data.begin());
    return result;
  }
  EADEM_CHECK(host.is_contiguous(), "widen {}", to_string(host));
  visit(host.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const T* from = host.as<T>();
    for (size_t i = 0; i < result.data.size(); ++i) {
      if constexpr (std::is_arithmetic_v<T>)
        result.data[i] = static_cast<double>(from[i]);
      else
        result.data[i] = static_cast<double>(from[i].to_float());
    }
  });
  return result;
}

Tensor narrow(const RefTensor& values, DType dtype) {
  Tensor result = Tensor::on_host(dtype, values.shape);
  visit(dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* to = result.view.as<T>();
    for (size_t i = 0; i < values.data.size(); ++i) {
      if constexpr (std::is_arithmetic_v<T>)
        to[i] = static_cast<T>(values.data[i]);
      else
        to[i] = T::from_float(static_cast<float>(values.data[i]));
    }
  });
  return result;
}

}  // namespace eadem::kernels::reference
