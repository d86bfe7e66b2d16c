// SPDX-License-Identifier: Apache-2.0
#include "tests/support/compare.h"

#include <cmath>

namespace eadem::test {

namespace {

std::string index_text(const Shape& shape, size_t flat) {
  std::string text = "]";
  auto rest = static_cast<int64_t>(flat);
  for (int axis = shape.rank() - 1; axis >= 0; --axis) {
    text = fmt::format("{}{}", rest % shape[axis], text.front() == ']' ? "]" : ", " + text);
    rest /= shape[axis];
  }
  return shape.rank() == 0 ? "[]" : "[" + text;
}

struct Allowed {
  double bound;
  bool overflow;  // infinity will do
};

template <typename AllowedAt>
testing::AssertionResult compare(const RefTensor& actual, const RefTensor& expected, AllowedAt&& allowed_at) {
  if (!(actual.shape == expected.shape))
    return testing::AssertionFailure() << "shape " << to_string(actual.shape) << ", expected "
                                       << to_string(expected.shape);
  if (actual.data.size() != expected.data.size())
    return testing::AssertionFailure() << actual.data.size() << " values, expected " << expected.data.size();
  size_t mismatches = 0, first = 0, worst = 0;
  double worst_excess = 0;
  for (size_t i = 0; i < actual.data.size(); ++i) {
    const double a = actual.data[i], e = expected.data[i];
    const Allowed allowed = allowed_at(i);
    bool matches = std::fabs(a - e) <= allowed.bound;  // false if either is NaN, or infinite
    if (std::isnan(e)) matches = std::isnan(a);
    if (std::isinf(e)) matches = a == e;
    if (std::isinf(a) && std::isfinite(e)) matches = allowed.overflow && std::signbit(a) == std::signbit(e);
    if (matches) continue;
    const double distance = std::fabs(a - e);
    const double excess = std::isfinite(distance) ? distance / std::max(allowed.bound, 1e-300) : HUGE_VAL;
    if (mismatches == 0) first = i;
    if (excess > worst_excess) worst = i, worst_excess = excess;
    ++mismatches;
  }
  if (mismatches == 0) return testing::AssertionSuccess();
  const auto line = [&](size_t i) {
    return fmt::format("at {}: {:.9g}, expected {:.9g}, difference {:.3g}, bound {:.3g}", index_text(actual.shape, i),
                       actual.data[i], expected.data[i], std::fabs(actual.data[i] - expected.data[i]),
                       allowed_at(i).bound);
  };
  return testing::AssertionFailure() << mismatches << " of " << actual.data.size() << " values differ; first "
                                     << line(first) << "; worst " << line(worst);
}

}  // namespace

testing::AssertionResult is_close(const RefTensor& actual, const RefTensor& expected, const Tolerance& tolerance,
                                  std::span<const double> magnitudes) {
  if (!magnitudes.empty() && magnitudes.size() != expected.data.size())
    return testing::AssertionFailure() << magnitudes.size() << " magnitudes for " << expected.data.size() << " values";
  return compare(actual, expected, [&](size_t i) {
    const double exact = expected.data[i], magnitude = magnitudes.empty() ? std::fabs(exact) : magnitudes[i];
    return Allowed{tolerance.bound(exact, magnitude), tolerance.may_overflow(exact, magnitude)};
  });
}

testing::AssertionResult is_within(const RefTensor& actual, const RefTensor& expected, std::span<const double> bounds,
                                   const Tolerance& rounding) {
  if (bounds.size() != expected.data.size())
    return testing::AssertionFailure() << bounds.size() << " bounds for " << expected.data.size() << " values";
  return compare(actual, expected, [&](size_t i) {
    const double exact = expected.data[i], widest = std::fabs(exact) + bounds[i];
    return Allowed{bounds[i] + rounding.bound(widest, 0), rounding.may_overflow(widest, 0)};
  });
}

}  // namespace eadem::test
