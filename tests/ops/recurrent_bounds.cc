// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/recurrent_bounds.h"

#include <cmath>

#include "eadem/ops/all_ops.h"
#include "tests/ops/bound_terms.h"
#include "tests/support/tolerance.h"
#include "tests/support/values.h"

namespace eadem::test {

namespace {

using kernels::Pass;
using ops::RefTensor;

// z of every token and channel, and the sum of the absolute values of its terms.
struct Convolved {
  RefTensor z, size;
};

Convolved convolved(const kernels::ShortConvolutionAttrs& attrs, Inputs in) {
  const ops::ShortConvolution linear({attrs.taps, false, attrs.cached});
  const auto run = [&](Inputs inputs) {
    std::vector<RefTensor> out = {zeros(inputs[0].shape)};
    if (attrs.cached) out.push_back(inputs[5]);
    linear.reference(Pass::inference, inputs, out);
    return out[0];
  };
  return {run(in), run(absolute(in))};
}

// The sum of a bias and `taps` products; silu is sigmoid (an exponential, a sum, a quotient) times z, |silu'| < 1.1.
Bounds short_convolution(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const auto attrs = op.attrs().get<kernels::ShortConvolutionAttrs>();
  const double sum = gamma_f32(static_cast<double>(attrs.taps) + 1);
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  const Convolved own = convolved(attrs, pass == Pass::backward ? in.first(4) : in);
  if (pass != Pass::backward) {
    for (size_t i = 0; i < result[0].size(); ++i) {
      const double z_error = sum * own.size.data[i];
      result[0][i] =
          attrs.silu ? 1.1 * z_error + (kExp + 3 * kU) * std::fabs(expected[0].data[i]) + kUnderflow : z_error;
    }
    return result;
  }
  // |silu'| < 1.1 has the error of two sigmoids and of z, |silu''| <= 0.5. What is then added up is dz times what the
  // convolution without silu would add: its gradients of the absolute values.
  std::vector<RefTensor> sizes = absolute(in.first(4)), moved = sizes;
  RefTensor dz = in[4];
  for (double& value : dz.data) value = std::fabs(value);
  RefTensor error = dz;
  for (size_t i = 0; i < dz.data.size() && attrs.silu; ++i) {
    const double z_error = sum * own.size.data[i];
    error.data[i] = dz.data[i] * (0.5 * z_error + 1.1 * (2 * kExp + 6 * kU));
    dz.data[i] *= 1.1;
  }
  if (!attrs.silu) std::fill(error.data.begin(), error.data.end(), 0.0);
  sizes.push_back(dz);
  moved.push_back(error);
  const ops::ShortConvolution linear({attrs.taps, false, false});
  std::vector<RefTensor> size_sums = absolute(initial), error_sums = absolute(initial);
  for (RefTensor& tensor : error_sums) std::fill(tensor.data.begin(), tensor.data.end(), 0.0);
  linear.reference(Pass::backward, sizes, size_sums);
  linear.reference(Pass::backward, moved, error_sums);
  const double tokens = static_cast<double>(in[0].shape[0]);
  for (size_t port = 0; port < 3; ++port) {
    const double additions = gamma_f32(port == 0 ? static_cast<double>(attrs.taps) + 1 : tokens + 2);
    for (size_t i = 0; i < result[port].size(); ++i)
      result[port][i] = additions * size_sums[port].data[i] + (1 + additions) * error_sums[port].data[i] + kUnderflow;
  }
  return result;
}

}  // namespace

Bounds recurrent_bounds(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  if (op.name() == "short_convolution") return short_convolution(op, pass, in, expected, initial);
  EADEM_UNREACHABLE("no bounds for op '{}'", op.name());
}

}  // namespace eadem::test
