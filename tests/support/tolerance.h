// SPDX-License-Identifier: Apache-2.0
//
// Tolerances are derived from what a kernel does, never tuned. A tolerance bounds the distance between a computed
// value and the exact one:
//
//   |actual - exact| <= e + roundoff(dtype) * (|exact| + e) + half the smallest subnormal of dtype,   e = terms *
//   magnitude
//
// where `magnitude` is the sum of the absolute values of the terms that were added (|exact| itself when nothing can
// cancel) and `terms` the relative error that their products and sums pick up. Source of the model: Higham 2002,
// "Accuracy and Stability of Numerical Algorithms", section 3.1 (gamma_n).
#pragma once

#include "eadem/core/dtype.h"

namespace eadem::test {

class Tolerance {
 public:
  // The result is the exact one; only a rounding may follow.
  static Tolerance exact() { return {}; }
  // `n` roundings to f32 one after the other: gamma_n = n u / (1 - n u). A sum of n products, in any order, takes n.
  static Tolerance sum(double n);
  // A bound in absolute units.
  static Tolerance absolute(double bound);

  // The result is rounded once to `dtype` on its way to memory. An exact value beyond the largest number of `dtype`
  // may arrive as infinity.
  Tolerance then_round(DType dtype) const;

  // Errors of independent causes add up.
  friend Tolerance operator+(const Tolerance& a, const Tolerance& b);

  double bound(double exact, double magnitude) const;
  double bound(double exact) const { return bound(exact, exact < 0 ? -exact : exact); }
  // Whether an exact value of this size may be rounded to infinity.
  bool may_overflow(double exact, double magnitude) const;

 private:
  double terms_ = 0;           // relative to the magnitude
  double absolute_ = 0;        // in units
  double roundoff_ = 0;        // of the final rounding
  double half_subnormal_ = 0;  // likewise
  double overflow_ = 0;        // values from here on round to infinity; 0: none do
};

// gamma_n in f32.
double gamma_f32(double n);

}  // namespace eadem::test
