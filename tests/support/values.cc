// SPDX-License-Identifier: Apache-2.0
#include "tests/support/values.h"

#include <cstring>

namespace eadem::test {

std::vector<RefTensor> widen(const std::vector<Tensor>& host) {
  std::vector<RefTensor> result;
  for (const Tensor& tensor : host) result.push_back(widen(tensor.view));
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
