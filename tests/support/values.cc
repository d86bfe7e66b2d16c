// SPDX-License-Identifier: Apache-2.0
#include "tests/support/values.h"

#include <algorithm>
#include <cstring>

namespace eadem::test {

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

std::vector<RefTensor> widen(const std::vector<Tensor>& host) {
  std::vector<RefTensor> result;
  for (const Tensor& tensor : host) result.push_back(widen(tensor.view));
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

RefTensor zeros(const Shape& shape) {
  return {shape, std::vector<double>(static_cast<size_t>(shape.num_elements()), 0.0)};
}

testing::AssertionResult same_bits(const TensorView& a, const TensorView& b) {
  if (a.dtype != b.dtype || !(a.shape == b.shape) || a.encoding != b.encoding)
    return testing::AssertionFailure() << to_string(a) << " against " << to_string(b);
  if (a.encoding != nullptr) {
    const std::vector<PlaneSpec> planes = a.encoding->planes(a.shape);
    for (size_t i = 0; i < planes.size(); ++i) {
      const auto view = [&](const TensorView& of) {
        return TensorView(of.plane(static_cast<int>(i)), planes[i].dtype, planes[i].shape);
      };
      if (testing::AssertionResult same = same_bits(view(a), view(b)); !same)
        return testing::AssertionFailure() << to_string(a) << ", plane " << planes[i].name << ", " << same.message();
    }
    return testing::AssertionSuccess();
  }
  const auto* left = static_cast<const unsigned char*>(a.data);
  const auto* right = static_cast<const unsigned char*>(b.data);
  const auto size = static_cast<int64_t>(dtype_size(a.dtype));
  for (int64_t i = 0; i < a.num_elements(); ++i)
    if (std::memcmp(left + i * size, right + i * size, static_cast<size_t>(size)) != 0)
      return testing::AssertionFailure() << "element " << i << " of " << to_string(a) << ": "
                                         << fmt::format("{:.9g}", widen(a).data[static_cast<size_t>(i)]) << " against "
                                         << fmt::format("{:.9g}", widen(b).data[static_cast<size_t>(i)]);
  return testing::AssertionSuccess();
}

}  // namespace eadem::test
