// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/expert_bounds.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/bound_terms.h"
#include "tests/ops/error_bounds.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using kernels::Pass;
using ops::RefTensor;

Bounds zero_bounds(Inputs expected) {
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  return result;
}

// What a row of logits says of the errors of its scores.
struct Scores {
  std::vector<double> exact;
  double error;  // relative
};

Scores scores_of(const kernels::RouteAttrs& attrs, const double* logits, size_t experts) {
  std::vector<double> exact(experts);
  if (attrs.scoring == kernels::RouteAttrs::Scoring::sigmoid) {
    for (size_t e = 0; e < experts; ++e) exact[e] = 1 / (1 + std::exp(-logits[e]));
    return {exact, kExp + 2 * kU};  // exponential, sum, quotient
  }
  if (attrs.scoring == kernels::RouteAttrs::Scoring::sqrt_softplus) {
    for (size_t e = 0; e < experts; ++e)
      exact[e] = std::sqrt(std::max(logits[e], 0.0) + std::log1p(std::exp(-std::fabs(logits[e]))));
    return {exact, kExp + 3 * kU};  // exponential, logarithm, sum; a root, which halves their error
  }
  // The bound of softmax in error_bounds.cc.
  const auto [least, most] = std::minmax_element(logits, logits + experts);
  double sum = 0;
  for (size_t e = 0; e < experts; ++e) sum += exact[e] = std::exp(logits[e] - *most);
  for (double& score : exact) score /= sum;
  return {exact, 2 * (kExp + kU * (*most - *least)) + gamma_f32(static_cast<double>(experts) + 2) + 2 * kU};
}

// The choice is exact: it compares logits (or, with a bias, sums that the cases keep apart).
Bounds route(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  const auto attrs = op.attrs().get<kernels::RouteAttrs>();
  const auto experts = static_cast<size_t>(in[0].shape[1]), top_k = static_cast<size_t>(attrs.top_k);
  const double scale = std::fabs(static_cast<double>(attrs.scale));
  Bounds result = zero_bounds(expected);
  for (size_t t = 0; t < static_cast<size_t>(in[0].shape[0]); ++t) {
    const Scores scores = scores_of(attrs, &in[0].data[t * experts], experts);
    if (pass != Pass::backward) {
      // A score over a sum of scores, of k additions, and the scale.
      const double error = 2 * scores.error + gamma_f32(static_cast<double>(top_k) + 4);
      for (size_t j = t * top_k; j < (t + 1) * top_k; ++j)
        result[1][j] = error * std::fabs(expected[1].data[j]) + kUnderflow;
      continue;
    }
    if (result[0].empty()) break;
    // The terms of ops/experts/route.cc in absolute values. A term has at most six scores or their sums as factors or
    // divisors, three sums over k, and ten operations between them.
    double sum = attrs.epsilon, weighted = 0, dot = 0;
    std::vector<double> g(experts, 0.0);
    const auto expert = [&](size_t j) { return static_cast<size_t>(in[1].data[t * top_k + j]); };
    const auto dw = [&](size_t j) { return std::fabs(in[2].data[t * top_k + j]); };
    for (size_t j = 0; j < top_k; ++j) {
      sum += scores.exact[expert(j)];
      weighted += dw(j) * scores.exact[expert(j)];
    }
    sum = std::max(sum, static_cast<double>(attrs.least_sum));
    for (size_t j = 0; j < top_k; ++j) {
      const double own = scale * (attrs.renormalize ? (dw(j) + weighted / sum) / sum : dw(j));
      g[expert(j)] += own;
      dot += own * scores.exact[expert(j)];
    }
    if (attrs.scoring != kernels::RouteAttrs::Scoring::softmax) dot = 0;
    // The derivative of a score, of which it is a factor or at most that.
    const auto slope = [&](size_t e) {
      if (attrs.scoring != kernels::RouteAttrs::Scoring::sqrt_softplus) return scores.exact[e];
      return 0.5 / (1 + std::exp(-in[0].data[t * experts + e])) / scores.exact[e];
    };
    const double error = 6 * scores.error + gamma_f32(3 * static_cast<double>(top_k) + 10);
    for (size_t e = 0; e < experts; ++e) result[0][t * experts + e] = error * slope(e) * (g[e] + dot) + kUnderflow;
  }
  return result;
}

// Fractions are exact, and sums of probabilities are in f64: the loss is as far off as the worst probability. Of a
// gradient two factors are probabilities, one in a sum over the experts.
Bounds load_balancing_loss(Pass pass, Inputs in, Inputs expected) {
  Bounds result = zero_bounds(expected);
  const size_t layers = pass == Pass::backward ? expected.size() : in.size();
  const auto tokens = static_cast<size_t>(in[0].shape[0]), experts = static_cast<size_t>(in[0].shape[1]);
  double worst = 0;
  for (size_t layer = 0; layer < layers; ++layer)
    for (size_t t = 0; t < tokens; ++t) {
      const Scores scores = scores_of({}, &in[layer].data[t * experts], experts);
      worst = std::max(worst, scores.error);
      if (pass != Pass::backward || result[layer].empty()) continue;
      const std::vector<double>& fractions = in[layers].data;
      const double scale =
          std::fabs(in[layers + 1].data[0]) * static_cast<double>(experts) / static_cast<double>(tokens * layers);
      double mean = 0;
      for (size_t e = 0; e < experts; ++e) mean += scores.exact[e] * fractions[e];
      const double error = 2 * scores.error + gamma_f32(static_cast<double>(experts) + 5);
      for (size_t e = 0; e < experts; ++e)
        result[layer][t * experts + e] = error * scale * scores.exact[e] * (fractions[e] + mean) + kUnderflow;
    }
  if (pass != Pass::backward) result[0][0] = 2 * worst * expected[0].data[0];
  return result;
}

// Sums of the absolute values of the terms: the op on absolute values; indices are not negative anyway.
Bounds magnitudes(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  std::vector<RefTensor> sizes(in.begin(), in.end()), out(expected.begin(), expected.end());
  for (RefTensor& tensor : sizes)
    for (double& value : tensor.data) value = std::fabs(value);
  op.reference(pass, sizes, out);
  Bounds result;
  for (RefTensor& tensor : out) result.push_back(std::move(tensor.data));
  return result;
}

// Copies of rows, or sums of k; with weights each is a product, and a weight's gradient a sum over hidden.
Bounds moved_rows(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  const bool backward = pass == Pass::backward, sums = (op.name() == "unpermute") != backward;
  const bool weighted = op.name() == "unpermute" ? op.attrs().get<kernels::UnpermuteAttrs>().weighted
                                                 : op.attrs().get<kernels::PermuteAttrs>().weighted;
  if (!weighted && !sums) return zero_bounds(expected);
  Bounds result = magnitudes(op, pass, in, expected);
  const RefTensor& rows = in[backward && !weighted ? 0 : 1];
  const double top_k = static_cast<double>(rows.shape[1]), hidden = static_cast<double>(in.back().shape[1]);
  for (double& size : result[0]) size *= sums ? gamma_f32(top_k + (weighted ? 1 : 0)) : kU;
  if (backward && weighted)
    for (double& size : result[1]) size *= gamma_f32(hidden + 2);
  return result;
}

// Slices [begin, begin + count) of the first axis; nothing of nothing.
RefTensor slices(const RefTensor& tensor, size_t begin, size_t count) {
  if (tensor.data.empty()) return {};
  Shape shape = tensor.shape;
  const auto size = static_cast<std::ptrdiff_t>(shape.num_elements() / shape[0]);
  shape[0] = static_cast<int64_t>(count);
  const auto first = tensor.data.begin() + static_cast<std::ptrdiff_t>(begin) * size;
  return {shape, {first, first + static_cast<std::ptrdiff_t>(count) * size}};
}

RefTensor matrix_of(const RefTensor& stack, size_t index) {
  RefTensor result = slices(stack, index, 1);
  if (!result.data.empty()) result.shape = Shape{stack.shape[1], stack.shape[2]};
  return result;
}

RefTensor row_of(const RefTensor& matrix, size_t index) {
  RefTensor result = slices(matrix, index, 1);
  if (!result.data.empty()) result.shape = Shape{matrix.shape[1]};
  return result;
}

void place(std::vector<double>& all, const std::vector<double>& part, size_t begin) {
  std::copy(part.begin(), part.end(), all.begin() + static_cast<std::ptrdiff_t>(begin));
}

// The bound of silu in error_bounds.cc, at alpha g: the factor's rounding adds a relative error of u |alpha g| to the
// exponential. The sum of up and offset, and at most three products follow.
Bounds clamped_swiglu(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  const auto attrs = op.attrs().get<kernels::ClampedSwigluAttrs>();
  const double limit = attrs.limit;
  Bounds result = zero_bounds(expected);
  for (size_t i = 0; i < in[0].data.size(); ++i) {
    const double g = std::min(in[0].data[i], limit), w = attrs.alpha * g, size = std::fabs(w);
    const double u = std::fabs(std::clamp(in[1].data[i], -limit, limit) + attrs.offset),
                 sum_error = kU * (std::fabs(in[1].data[i]) + std::fabs(static_cast<double>(attrs.offset)));
    const double s = 1 / (1 + std::exp(-w)), rest = 1 / (1 + std::exp(w)), error = kExp + (2 + size) * kU;
    const double dy = pass == Pass::backward ? std::fabs(in[2].data[i]) : 1;
    const double gated = std::fabs(g) * s, slope = s * (1 + size * rest);
    if (pass != Pass::backward) {
      result[0][i] = gated * (u * (error + 3 * kU) + sum_error) + kUnderflow;
      continue;
    }
    if (!result[0].empty()) result[0][i] = dy * slope * (u * (2 * error + 6 * kU) + sum_error) + kUnderflow;
    if (!result[1].empty()) result[1][i] = dy * gated * (error + 3 * kU) + kUnderflow;
  }
  return result;
}

// A sigmoid (exponential, sum, quotient) and a product; backward two sigmoids and a sum over hidden.
Bounds gate_rows(Inputs in, Inputs expected) {
  constexpr double kSigmoid = kExp + 2 * kU;
  Bounds result = zero_bounds(expected);
  for (size_t i = 0; i < result[0].size(); ++i)
    result[0][i] = std::fabs(expected[0].data[i]) * (kSigmoid + kU) + kUnderflow;
  if (result.size() < 2 || result[1].empty()) return result;
  const size_t rows = result[1].size(), hidden = static_cast<size_t>(in[0].shape[1] / in[1].shape[1]);
  for (size_t t = 0; t < rows; ++t) {
    const double s = 1 / (1 + std::exp(-in[1].data[t])), rest = 1 / (1 + std::exp(in[1].data[t]));
    double sum = 0;
    for (size_t i = t * hidden; i < (t + 1) * hidden; ++i) sum += std::fabs(in[0].data[i] * in[2].data[i]);
    result[1][t] = sum * s * rest * (2 * kSigmoid + gamma_f32(static_cast<double>(hidden) + 4)) + kUnderflow;
  }
  return result;
}

// A sum over k and a product; backward a sum over hidden as well.
Bounds identity_experts(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  Bounds result = magnitudes(op, pass, in, expected);
  for (double& size : result[0]) size *= gamma_f32(static_cast<double>(in[1].shape[1]) + 1);
  if (pass == Pass::backward)
    for (double& size : result[1]) size *= gamma_f32(static_cast<double>(in[0].shape[1]) + 1);
  return result;
}

// Each expert is a linear layer.
Bounds grouped_linear(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial,
                      const TensorView& encoded, bool rounds_to_bf16) {
  const bool backward = pass == Pass::backward;
  const auto& attrs = op.attrs().get<kernels::GroupedLinearAttrs>();
  const bool has_bias = backward ? !initial[2].data.empty() : !in[3].data.empty();
  const ops::Linear linear({has_bias, attrs.out_dtype, attrs.matmul_input});
  const size_t experts = in[2].data.size() - 1, width = static_cast<size_t>(in[1].shape[2]),
               outputs = static_cast<size_t>(in[1].shape[1]);
  Bounds result = zero_bounds(expected);
  for (size_t e = 0; e < experts; ++e) {
    const auto begin = static_cast<size_t>(in[2].data[e]), rows = static_cast<size_t>(in[2].data[e + 1]) - begin;
    if (rows == 0) continue;
    std::vector<RefTensor> own = {slices(in[0], begin, rows), matrix_of(in[1], e), RefTensor{}};
    std::vector<RefTensor> want = {slices(expected[0], begin, rows)}, before = {slices(initial[0], begin, rows)};
    if (backward) {
      own[2] = slices(in[3], begin, rows);
      want.insert(want.end(), {matrix_of(expected[1], e), row_of(expected[2], e)});
      before.insert(before.end(), {matrix_of(initial[1], e), row_of(initial[2], e)});
    } else {
      own[2] = row_of(in[3], e);
    }
    const TensorView weight =
        encoded.defined() ? MatrixStack(encoded).matrix(encoded, static_cast<int64_t>(e)) : TensorView{};
    const Bounds bounds = error_bounds(linear, pass, own, want, before, weight, rounds_to_bf16);
    if (!result[0].empty()) place(result[0], bounds[0], begin * (backward ? width : outputs));
    if (backward && !result[1].empty()) place(result[1], bounds[1], e * outputs * width);
    if (backward && !result[2].empty()) place(result[2], bounds[2], e * outputs);
  }
  return result;
}

// Rows [tokens, heads, n] as [heads * tokens, n], head by head, or back.
RefTensor by_head(const RefTensor& rows, size_t tokens, size_t heads, bool back = false) {
  if (rows.data.empty()) return {rows.shape, {}};
  const size_t n = rows.data.size() / (tokens * heads);
  RefTensor result{Shape{static_cast<int64_t>(heads * tokens), static_cast<int64_t>(n)},
                   std::vector<double>(rows.data.size())};
  for (size_t t = 0; t < tokens; ++t)
    for (size_t h = 0; h < heads; ++h)
      for (size_t i = 0; i < n; ++i) {
        const size_t apart = (t * heads + h) * n + i, together = (h * tokens + t) * n + i;
        result.data[back ? apart : together] = rows.data[back ? together : apart];
      }
  return result;
}

// Each head is a linear layer: a group of grouped_linear.
Bounds head_linear(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial, const TensorView& encoded,
                   bool rounds_to_bf16) {
  const bool backward = pass == Pass::backward;
  const auto& attrs = op.attrs().get<kernels::HeadLinearAttrs>();
  const auto tokens = static_cast<size_t>(in[0].shape[0]), heads = static_cast<size_t>(in[1].shape[0]);
  if (tokens == 0) return zero_bounds(expected);
  const auto group = [&](const RefTensor& rows) { return by_head(rows, tokens, heads); };
  RefTensor offsets{Shape{static_cast<int64_t>(heads) + 1}, {}};
  for (size_t h = 0; h <= heads; ++h) offsets.data.push_back(static_cast<double>(h * tokens));
  std::vector<RefTensor> own = {group(in[0]), in[1], offsets}, want = {group(expected[0])},
                         before = {group(initial[0])};
  if (backward) {
    own.push_back(group(in[2]));
    want.insert(want.end(), {expected[1], RefTensor{}});  // no bias
    before.insert(before.end(), {initial[1], RefTensor{}});
  } else {
    own.emplace_back();
  }
  Bounds result = grouped_linear(ops::GroupedLinear({attrs.out_dtype, attrs.matmul_input}), pass, own, want, before,
                                 encoded, rounds_to_bf16);
  result[0] = by_head({want[0].shape, result[0]}, tokens, heads, true).data;
  return result;
}

}  // namespace

Bounds expert_bounds(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial,
                     const TensorView& encoded, bool rounds_to_bf16) {
  const std::string_view name = op.name();
  if (name == "route") return route(op, pass, in, expected);
  if (name == "load_balancing_loss") return load_balancing_loss(pass, in, expected);
  if (name == "permute" || name == "unpermute") return moved_rows(op, pass, in, expected);
  if (name == "head_linear") return head_linear(op, pass, in, expected, initial, encoded, rounds_to_bf16);
  if (name == "clamped_swiglu") return clamped_swiglu(op, pass, in, expected);
  if (name == "gate_rows") return gate_rows(in, expected);
  if (name == "identity_experts") return identity_experts(op, pass, in, expected);
  return grouped_linear(op, pass, in, expected, initial, encoded, rounds_to_bf16);
}

}  // namespace eadem::test
