// SPDX-License-Identifier: Apache-2.0
#include "tests/support/tolerance.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/error.h"

namespace eadem::test {

double gamma_f32(double n) {
  const double error = n * dtype_unit_roundoff(DType::f32);
  EADEM_CHECK(error < 0.5, "a sum of {} terms has no meaningful f32 bound", n);
  return error / (1 - error);
}

Tolerance Tolerance::sum(double n) {
  Tolerance result;
  result.terms_ = gamma_f32(n);
  return result;
}

Tolerance Tolerance::absolute(double bound) {
  Tolerance result;
  result.absolute_ = bound;
  return result;
}

Tolerance Tolerance::then_round(DType dtype) const {
  Tolerance result = *this;
  if (!is_floating(dtype)) return result;
  EADEM_CHECK(roundoff_ == 0, "a value is rounded to memory once");
  result.roundoff_ = dtype_unit_roundoff(dtype);
  switch (dtype) {
    case DType::f16:
      result.half_subnormal_ = 0x1p-25;
      result.overflow_ = 65520;
      break;
    case DType::f32:
    case DType::bf16:
      // Kernels may flush subnormals to zero, so the smallest normal number bounds the loss.
      result.half_subnormal_ = 0x1p-126;
      result.overflow_ = dtype == DType::f32 ? 0x1.ffffffp127 : 0x1.ffp127;
      break;
    default: break;
  }
  return result;
}

Tolerance operator+(const Tolerance& a, const Tolerance& b) {
  EADEM_CHECK(a.roundoff_ == 0 && b.roundoff_ == 0, "round after adding");
  Tolerance result;
  result.terms_ = a.terms_ + b.terms_ + a.terms_ * b.terms_;
  result.absolute_ = a.absolute_ + b.absolute_;
  return result;
}

double Tolerance::bound(double exact, double magnitude) const {
  const double computed = terms_ * magnitude + absolute_;
  return computed + roundoff_ * (std::fabs(exact) + computed) + half_subnormal_;
}

bool Tolerance::may_overflow(double exact, double magnitude) const {
  return overflow_ > 0 && std::fabs(exact) + terms_ * magnitude + absolute_ >= overflow_;
}

}  // namespace eadem::test
