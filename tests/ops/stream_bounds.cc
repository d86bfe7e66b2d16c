// SPDX-License-Identifier: Apache-2.0
//
// comb after k divisions of rows and columns is u_i A_ij v_j, A being what the softmax gave, and a division of columns
// makes v_j = 1 / (sum over i of u_i A_ij + eps / v_j). Of the logarithm of that, the derivatives by those of u, of A
// and of v are no larger than 1 in sum: an error of them is not amplified, whatever the matrix. So with e the relative
// error of an element of A, to which each division adds that of its sum and quotient, u and v have after k divisions at
// most the sum of the e of each, and comb e and twice that.
#include "tests/ops/stream_bounds.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/streams/stream_weights.h"
#include "tests/ops/bound_terms.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using ops::MixingSteps;
using ops::RefTensor;

double logistic(double x) { return 1 / (1 + std::exp(-x)); }

// A token's scaled logits, and how far each may be off: a product and a sum, which the kernel may round once.
struct ScaledLogits {
  std::vector<double> z, errors;
};

ScaledLogits scaled_logits(const kernels::StreamWeightsAttrs& attrs, std::span<const RefTensor> in, size_t t) {
  const auto n = static_cast<size_t>(attrs.streams), width = static_cast<size_t>(attrs.width());
  ScaledLogits result;
  for (size_t i = 0; i < width; ++i) {
    const double product = in[2].data[std::min<size_t>(i / n, 2)] * in[0].data[t * width + i];
    result.z.push_back(product + in[1].data[i]);
    result.errors.push_back(gamma_f32(2) * (std::fabs(product) + std::fabs(in[1].data[i])));
  }
  return result;
}

// The relative errors of comb after each division, the first before any.
std::vector<double> mixing_errors(const kernels::StreamWeightsAttrs& attrs, const ScaledLogits& logits) {
  const auto n = static_cast<size_t>(attrs.streams);
  // A softmax: the differences of logits and their exponentials, twice, a sum and a quotient; then eps.
  double widest = 0, worst = 0;
  for (size_t i = 2 * n; i < logits.z.size(); ++i) {
    worst = std::max(worst, logits.errors[i]);
    for (size_t j = i / n * n; j < (i / n + 1) * n; ++j)
      widest = std::max(widest, std::fabs(logits.z[i] - logits.z[j]));
  }
  double element = 2 * (2 * worst + kU * widest + kExp) + gamma_f32(static_cast<double>(n) + 2), scales = 0;
  std::vector<double> errors = {element};
  for (int64_t k = 0; k < attrs.divisions(); ++k) {
    element += gamma_f32(static_cast<double>(n) + 2);
    scales += element;
    errors.push_back(element + 2 * scales);
  }
  return errors;
}

// How far the gradient of comb's logits may be off: every step of the reference, with the errors of what it reads and
// its own roundings.
std::vector<double> mixing_gradient_errors(const kernels::StreamWeightsAttrs& attrs, const ScaledLogits& logits,
                                           const double* dcomb) {
  const auto n = static_cast<size_t>(attrs.streams);
  const double over_n = gamma_f32(static_cast<double>(n) + 2);
  const MixingSteps steps = ops::mixing_steps(attrs, std::span(logits.z).subspan(2 * n));
  const std::vector<double> errors = mixing_errors(attrs, logits);
  std::vector<double> d(dcomb, dcomb + n * n), e(n * n, 0.0);
  const auto subtract_mean = [&](size_t across, size_t along, size_t i, const std::vector<double>& by, double by_error,
                                 auto&& finish) {
    double dot = 0, dot_error = 0;
    for (size_t j = 0; j < n; ++j) {
      const size_t at = i * across + j * along;
      dot += d[at] * by[at];
      dot_error += e[at] * by[at] * (1 + by_error) + std::fabs(d[at]) * by[at] * (by_error + over_n);
    }
    for (size_t j = 0; j < n; ++j) {
      const size_t at = i * across + j * along;
      const double value = d[at] - dot;
      finish(at, value, e[at] + dot_error + kU * (std::fabs(d[at]) + std::fabs(dot)));
    }
  };
  for (size_t k = steps.divisors.size(); k-- > 0;) {
    const size_t along = MixingSteps::divides_columns(k) ? n : 1, across = MixingSteps::divides_columns(k) ? 1 : n;
    for (size_t i = 0; i < n; ++i) {
      const double divisor = steps.divisors[k][i], divisor_error = errors[k] + over_n;
      subtract_mean(across, along, i, steps.states[k + 1], errors[k + 1], [&](size_t at, double value, double error) {
        d[at] = value / divisor;
        e[at] = (error * (1 + 2 * divisor_error) + std::fabs(value) * (2 * divisor_error + kU)) / divisor;
      });
    }
  }
  // Of p + eps the kernel subtracts eps again, which is another rounding of the sum.
  std::vector<double> p = steps.states[0], bounds(n * n);
  for (double& value : p) value -= static_cast<double>(attrs.eps);
  for (size_t i = 0; i < n; ++i) {
    double p_error = 0;
    for (size_t j = 0; j < n; ++j)
      p_error = std::max(p_error, (errors[0] + 2 * kU) * steps.states[0][i * n + j] / std::max(p[i * n + j], 1e-30));
    subtract_mean(n, 1, i, p, p_error, [&](size_t at, double value, double error) {
      bounds[at] = p[at] * (error * (1 + p_error) + std::fabs(value) * (p_error + kU));
    });
  }
  return bounds;
}

}  // namespace

Bounds stream_weights_bounds(const ops::Op& op, kernels::Pass pass, std::span<const RefTensor> in,
                             std::span<const RefTensor> expected) {
  const auto attrs = op.attrs().get<kernels::StreamWeightsAttrs>();
  const auto n = static_cast<size_t>(attrs.streams), width = static_cast<size_t>(attrs.width());
  const auto tokens = static_cast<size_t>(in[0].shape[0]);
  const double eps = static_cast<double>(attrs.eps);
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  for (size_t t = 0; t < tokens; ++t) {
    const ScaledLogits logits = scaled_logits(attrs, in, t);
    if (pass != kernels::Pass::backward) {
      // A sigmoid: its argument, an exponential, a sum and a quotient; then eps, or the factor 2, which is exact.
      for (size_t i = 0; i < std::min(width, 2 * n); ++i)
        result[0][t * width + i] =
            (i < n ? 1 : 2) * logistic(logits.z[i]) * (logits.errors[i] + kExp + gamma_f32(3)) + kU * eps + kUnderflow;
      if (attrs.merges) continue;
      const double error = mixing_errors(attrs, logits).back();
      for (size_t i = 2 * n; i < width; ++i)
        result[0][t * width + i] = error * expected[0].data[t * width + i] + kUnderflow;
      continue;
    }
    const double* dweights = &in[3].data[t * width];
    std::vector<double> dz(width, 0.0), sizes(width, 0.0);
    for (size_t i = 0; i < std::min(width, 2 * n); ++i) {
      sizes[i] = (i < n ? 1 : 2) * std::fabs(dweights[i]) * logistic(logits.z[i]) * logistic(-logits.z[i]);
      dz[i] = sizes[i] * (2 * (logits.errors[i] + kExp + gamma_f32(2)) + gamma_f32(3));
    }
    if (!attrs.merges) {
      const std::vector<double> mixing = mixing_gradient_errors(attrs, logits, dweights + 2 * n);
      std::copy(mixing.begin(), mixing.end(), dz.begin() + static_cast<std::ptrdiff_t>(2 * n));
    }
    // The sums are in double.
    for (size_t i = 0; i < width; ++i) {
      const size_t part = std::min<size_t>(i / n, 2);
      const double scale = std::fabs(in[2].data[part]);
      if (!result[0].empty())
        result[0][t * width + i] =
            scale * dz[i] * (1 + kU) + kU * std::fabs(expected[0].data[t * width + i]) + kUnderflow;
      if (!result[1].empty()) result[1][i] += dz[i];
      if (!result[2].empty()) result[2][part] += dz[i] * std::fabs(in[0].data[t * width + i]);
    }
  }
  // The sum is rounded, and added to what was there.
  for (size_t i = 1; i < result.size() && pass == kernels::Pass::backward; ++i)
    for (size_t j = 0; j < result[i].size(); ++j)
      result[i][j] += kU * (2 * std::fabs(expected[i].data[j]) + result[i][j] + 1);
  return result;
}

}  // namespace eadem::test
