// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/bound_terms.h"

#include <cmath>

namespace eadem::test {

using ops::RefTensor;

RefTensor absolute(const RefTensor& x) {
  RefTensor result = x;
  for (double& value : result.data) value = std::fabs(value);
  return result;
}

std::vector<RefTensor> absolute(Inputs tensors) {
  std::vector<RefTensor> result;
  for (const RefTensor& tensor : tensors) result.push_back(absolute(tensor));
  return result;
}

std::vector<RefTensor> magnitudes(const ops::Op& op, kernels::Pass pass, Inputs in, Inputs initial) {
  const std::vector<RefTensor> sizes = absolute(in);
  std::vector<RefTensor> out = absolute(initial);
  op.reference(pass, sizes, out);
  return out;
}

std::vector<double> scaled(double factor, const std::vector<double>& values) {
  std::vector<double> result = values;
  for (double& value : result) value = factor * std::fabs(value);
  return result;
}

Bounds exact(Inputs expected) {
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  return result;
}

Bounds relative(double error, Inputs expected) {
  Bounds result;
  for (const RefTensor& tensor : expected) result.push_back(scaled(error, tensor.data));
  return result;
}

}  // namespace eadem::test
