// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/error_bounds.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/ops/all_ops.h"
#include "tests/ops/attention_bounds.h"
#include "tests/ops/bound_terms.h"
#include "tests/ops/delta_rule_bounds.h"
#include "tests/ops/expert_bounds.h"
#include "tests/ops/latent_bounds.h"
#include "tests/ops/linear_bounds.h"
#include "tests/ops/recurrent_bounds.h"
#include "tests/ops/selected_bounds.h"
#include "tests/ops/state_space_cases.h"
#include "tests/ops/stream_bounds.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using kernels::ActivationKind;
using kernels::Pass;
using ops::RefTensor;

Bounds embedding(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const bool scaled_rows = op.attrs().get<kernels::EmbeddingAttrs>().scale != 1;
  if (pass != Pass::backward) return scaled_rows ? relative(kU, expected) : exact(expected);
  // At most every token hits one row; a scale is one more rounding of each term.
  const double additions = static_cast<double>(in[0].data.size()) + (scaled_rows ? 2 : 1);
  return {scaled(gamma_f32(additions), magnitudes(op, pass, in, initial)[0].data)};
}

Bounds rms_norm(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const double hidden = static_cast<double>(in[0].shape.back()), rows = static_cast<double>(in[0].shape.num_rows());
  if (pass != Pass::backward) {
    // The square root halves the error of the sum; then root, quotient and (for y) two products.
    const double inverse = gamma_f32(hidden + 2) / 2 + 3 * kU;
    return relative(inverse + 2 * kU, expected);
  }
  // dx = s w dy - s^3 x sum(dy w x) / hidden: the two terms' sizes add; dweight is a sum over rows.
  std::vector<double> dx(in[0].data.size());
  const auto n = static_cast<size_t>(hidden);
  for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
    const double s = in[2].data[r];
    const double* weight = &in[1].data[r * n % in[1].data.size()];
    double dot = 0;
    for (size_t i = 0; i < n; ++i) dot += std::fabs(in[3].data[r * n + i] * weight[i] * in[0].data[r * n + i]);
    for (size_t i = 0; i < n; ++i)
      dx[r * n + i] = gamma_f32(hidden + 8) * (std::fabs(s * weight[i] * in[3].data[r * n + i]) +
                                               std::fabs(s * s * s * in[0].data[r * n + i]) * dot / hidden);
  }
  if (expected[0].data.empty()) dx.clear();
  std::vector<RefTensor> sizes(initial.begin(), initial.end());
  sizes = absolute(sizes);
  sizes[0] = {};
  const std::vector<RefTensor> in_sizes = absolute(in);
  op.reference(pass, in_sizes, sizes);
  return {dx, scaled(gamma_f32(rows + 3), sizes[1].data)};
}

Bounds layer_norm(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  Bounds result = exact(expected);
  const auto n = static_cast<size_t>(in[0].shape.back()), rows = static_cast<size_t>(in[0].shape.num_rows());
  const double hidden = static_cast<double>(n),
               eps = static_cast<double>(op.attrs().get<kernels::LayerNormAttrs>().eps);
  for (size_t r = 0; r < rows; ++r) {
    const double* x = &in[0].data[r * n];
    if (pass == Pass::backward) {
      const double mean = in[2].data[r], s = in[3].data[r];
      const auto g = [&](size_t i) { return std::fabs(in[1].data[i] * in[4].data[r * n + i]); };
      const auto z = [&](size_t i) { return std::fabs((x[i] - mean) * s); };
      double g_sum = 0, gz_sum = 0;
      for (size_t i = 0; i < n; ++i) g_sum += g(i), gz_sum += g(i) * z(i);
      for (size_t i = 0; i < n && !result[0].empty(); ++i)
        result[0][r * n + i] = gamma_f32(hidden + 10) * s * (g(i) + (g_sum + z(i) * gz_sum) / hidden);
      // Sums over rows, onto what was there.
      const double error = gamma_f32(static_cast<double>(rows) + 5);
      for (size_t i = 0; i < n; ++i) {
        const double dy = std::fabs(in[4].data[r * n + i]), share = 1 / static_cast<double>(rows);
        if (!result[1].empty()) result[1][i] += error * (dy * z(i) + share * std::fabs(initial[1].data[i]));
        if (!result[2].empty()) result[2][i] += error * (dy + share * std::fabs(initial[2].data[i]));
      }
      continue;
    }
    double sum = 0, sizes = 0, squares = 0, distances = 0;
    for (size_t i = 0; i < n; ++i) sum += x[i], sizes += std::fabs(x[i]);
    const double mean = sum / hidden;
    for (size_t i = 0; i < n; ++i) squares += (x[i] - mean) * (x[i] - mean), distances += std::fabs(x[i] - mean);
    // The mean moves every difference alike, and each is rounded; their squares are summed, and the root halves the
    // error of the sum.
    const double mean_error = gamma_f32(hidden + 1) * sizes / hidden, variance = squares / hidden;
    const double variance_error = 2 * mean_error * distances / hidden + mean_error * mean_error +
                                  gamma_f32(hidden + 5) * (variance + mean_error * mean_error);
    const double inverse_error =
        variance_error / (2 * (variance + eps)) / (1 - std::min(0.5, variance_error / (variance + eps))) + 4 * kU;
    const double s = 1 / std::sqrt(variance + eps);
    for (size_t i = 0; i < n; ++i) {
      const double w = std::fabs(in[1].data[i]) * s, difference = std::fabs(x[i] - mean);
      result[0][r * n + i] = w * (mean_error + kU * difference) * (1 + inverse_error) +
                             w * difference * (inverse_error + 3 * kU) +
                             2 * kU * (std::fabs(expected[0].data[r * n + i]) + w * (difference + mean_error));
    }
    if (result.size() < 3) continue;
    if (!result[1].empty()) result[1][r] = mean_error;
    if (!result[2].empty()) result[2][r] = inverse_error * s;
  }
  return result;
}

// A soft cap's slope is 1 - t^2, whose t has the error of its argument and of the hyperbolic tangent. At a limit that a
// rounding may reach the slope may be any.
Bounds scale(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  const auto attrs = op.attrs().get<kernels::ScaleAttrs>();
  if (attrs.softcap == 0) {
    Bounds result = relative(kU, expected);
    const double limit = static_cast<double>(attrs.limit), factor = std::fabs(static_cast<double>(attrs.factor));
    for (size_t i = 0; pass == Pass::backward && limit > 0 && i < result[0].size(); ++i)
      if (std::fabs(factor * std::fabs(in[0].data[i]) - limit) <= kU * limit)
        result[0][i] = factor * std::fabs(in[1].data[i]);
    return result;
  }
  const double cap = static_cast<double>(attrs.softcap), factor = std::fabs(static_cast<double>(attrs.factor));
  Bounds result = exact(expected);
  for (size_t i = 0; i < result[0].size(); ++i) {
    const double argument = factor * std::fabs(in[0].data[i]) / cap, t = std::tanh(argument);
    const double t_error = kTanh * t + 3 * kU * argument * (1 - t * t) + 0x1p-44;
    result[0][i] =
        pass == Pass::backward ? factor * std::fabs(in[1].data[i]) * (2 * t_error + 6 * kU) : cap * (t_error + kU * t);
  }
  return result;
}

// One product. Gradients of scales are sums in f64, rounded, and added to what is there.
Bounds scale_by(Pass pass, Inputs expected, Inputs initial) {
  Bounds result = relative(kU, expected);
  if (pass != Pass::backward) return result;
  for (size_t j = 0; j < result[1].size(); ++j) {
    const double sum = expected[1].data[j] - initial[1].data[j];
    result[1][j] = (kU + 0x1p-40) * (std::fabs(sum) + std::fabs(expected[1].data[j])) + 0x1p-40;
  }
  return result;
}

// Bounds of f and f' at x, f32.
struct ActivationBound {
  double value, slope;
};

ActivationBound activation_bound(ActivationKind kind, double x) {
  const double a = std::fabs(x);
  switch (kind) {
    case ActivationKind::silu: {
      // sigmoid: exponential, sum, quotient.
      const double sigmoid = 1 / (1 + std::exp(-x)), rest = 1 / (1 + std::exp(x)), error = kExp + 2 * kU;
      return {a * sigmoid * (error + kU) + kUnderflow, sigmoid * (1 + a * rest) * (2 * error + 3 * kU) + kUnderflow};
    }
    case ActivationKind::gelu: {
      // Phi with small relative error in its lower tail: exp(-x^2/2) (two exponentials and their product), times a
      // polynomial in one quotient (ten steps, each at most one rounding of a positive partial sum).
      const double cdf = 0.5 * std::erfc(-x / std::sqrt(2.0));
      const double density = std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
      const double error = 2 * kExp + 16 * kU;
      return {a * cdf * (error + kU) + kUnderflow, (cdf + a * density) * (error + 3 * kU) + kUnderflow};
    }
    case ActivationKind::gelu_tanh: {
      // x sigmoid(w), w = 2 sqrt(2/pi) (x + 0.044715 x^3): six roundings of terms of one sign, which the exponential
      // turns into a relative error of 6u |w| (1 - sigmoid).
      const double c = 2 * std::sqrt(2 / M_PI), w = c * (x + 0.044715 * x * x * x);
      const double sigmoid = 1 / (1 + std::exp(-w)), rest = 1 / (1 + std::exp(w));
      const double error = kExp + 2 * kU + 6 * kU * std::fabs(w);
      const double slope = c * (1 + 3 * 0.044715 * x * x);
      return {a * sigmoid * (error + kU) + kUnderflow,
              sigmoid * (1 + a * rest * slope) * (2 * error + 6 * kU) + kUnderflow};
    }
    case ActivationKind::relu: return {0, 0};
    case ActivationKind::relu2: return {kU * x * x, 2 * kU * a};
    case ActivationKind::sigmoid: {
      const double sigmoid = 1 / (1 + std::exp(-x)), rest = 1 / (1 + std::exp(x)), error = kExp + 2 * kU;
      return {sigmoid * error + kUnderflow, sigmoid * rest * (2 * error + kU) + kUnderflow};
    }
  }
  return {};
}

double activation_size(ActivationKind kind, double x) {  // |f(x)| and |f'(x)| are below these
  return kind == ActivationKind::relu2 ? x * x : kind == ActivationKind::sigmoid ? 1 : std::fabs(x);
}
double slope_size(ActivationKind kind, double x) { return kind == ActivationKind::relu2 ? 2 * std::fabs(x) : 1.2; }

Bounds activation(const ops::Op& op, Pass pass, Inputs in, Inputs expected) {
  const ActivationKind kind = op.attrs().get<kernels::ActivationAttrs>().kind;
  const bool gated = op.name() == "gated_activation", backward = pass == Pass::backward;
  Bounds result = exact(expected);
  for (size_t i = 0; i < in[0].data.size(); ++i) {
    const double x = in[0].data[i], up = gated ? std::fabs(in[1].data[i]) : 1;
    const double dy = backward ? std::fabs(in.back().data[i]) : 1;
    const ActivationBound f = activation_bound(kind, x);
    // Up to two products follow.
    if (!result[0].empty())
      result[0][i] = backward ? dy * up * (f.slope + 2 * kU * slope_size(kind, x))
                              : up * (f.value + (gated ? kU * activation_size(kind, x) : 0));
    if (backward && gated && !result[1].empty()) result[1][i] = dy * (f.value + kU * activation_size(kind, x));
  }
  return result;
}

Bounds rope(const ops::Op& op, Inputs in, Pass pass, Inputs expected) {
  // A difference of two products. On absolute values one direction of rotation subtracts and the other adds, so the
  // larger of the two is the sum of the terms' sizes.
  const RefTensor &x = pass == Pass::backward ? in[1] : in[0], &table = pass == Pass::backward ? in[0] : in[1];
  const RefTensor forward_in[] = {absolute(x), absolute(table)}, backward_in[] = {absolute(table), absolute(x)};
  std::vector<RefTensor> forward = {{x.shape, std::vector<double>(x.data.size())}}, backward = forward;
  op.reference(Pass::inference, forward_in, forward);
  op.reference(Pass::backward, backward_in, backward);
  Bounds result = exact(expected);
  for (size_t i = 0; i < result[0].size(); ++i)
    result[0][i] = gamma_f32(2) * std::max(std::fabs(forward[0].data[i]), std::fabs(backward[0].data[i]));
  return result;
}

Bounds softmax(Pass pass, Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto n = static_cast<size_t>(in[0].shape.back());
  const double sum = gamma_f32(static_cast<double>(n) + 2);
  for (size_t r = 0; r < static_cast<size_t>(in[0].shape.num_rows()) && !result[0].empty(); ++r) {
    const double* x = &in[0].data[r * n];
    if (pass == Pass::backward) {
      double dot = 0;
      for (size_t i = 0; i < n; ++i) dot += std::fabs(x[i] * in[1].data[r * n + i]);
      for (size_t i = 0; i < n; ++i)
        result[0][r * n + i] = std::fabs(x[i]) * (2 * kU * std::fabs(in[1].data[r * n + i]) + (sum + 2 * kU) * dot);
      continue;
    }
    // The argument x - max is rounded once; its error is relative to its own size, and so is that of every term.
    double largest = -HUGE_VAL, widest = 0;
    for (size_t i = 0; i < n; ++i) largest = std::max(largest, x[i]);
    for (size_t i = 0; i < n; ++i) widest = std::max(widest, largest - x[i]);
    for (size_t i = 0; i < n; ++i)
      result[0][r * n + i] =
          (2 * (kExp + kU * widest) + sum + 2 * kU) * std::fabs(expected[0].data[r * n + i]) + kUnderflow;
  }
  return result;
}

// Bounds the error of the logarithm of the sum of exponentials of x[0, n). The argument x - max is rounded once; the
// relative error of the sum is the absolute error of its logarithm; the logarithm itself (2 ulp) and one addition
// follow.
double log_sum_exp_error(const double* x, size_t n) {
  double largest = -HUGE_VAL, widest = 0, sum = 0;
  for (size_t i = 0; i < n; ++i) largest = std::max(largest, x[i]);
  for (size_t i = 0; i < n; ++i) {
    widest = std::max(widest, largest - x[i]);
    sum += std::exp(x[i] - largest);
  }
  return kExp + kU * widest + gamma_f32(static_cast<double>(n)) + 4 * kU * std::log(sum) +
         kU * (std::fabs(largest) + std::log(sum));
}

Bounds cross_entropy(Pass pass, Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto rows = static_cast<size_t>(in[0].shape[0]), n = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    const double* x = &in[0].data[r * n];
    const auto label = static_cast<int64_t>(in[1].data[r]);
    if (pass == Pass::backward) {
      if (result[0].empty()) break;
      for (size_t i = 0; i < n && label >= 0; ++i) {
        const double p = std::exp(x[i] - in[2].data[r]);
        const double argument = kU * (std::fabs(x[i]) + std::fabs(in[2].data[r]));
        const double target = static_cast<int64_t>(i) == label ? 1 : 0;
        result[0][r * n + i] = std::fabs(in[3].data[r]) * (p * (kExp + argument) + 2 * kU * (p + target)) + kUnderflow;
      }
      continue;
    }
    const double lse = log_sum_exp_error(x, n);
    result[0][r] = label < 0 ? 0 : lse + kU * std::fabs(x[label]);
    if (pass == Pass::forward && !result[1].empty()) result[1][r] = lse;
  }
  return result;
}

// The tokens are exact (the cases stay away from borders; the likeliest ones stand in the order of the logits
// themselves); a log-probability is a logit less the log-sum-exp.
Bounds sample(Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto rows = static_cast<size_t>(in[0].shape[0]), n = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    if (expected[0].data[r] < 0) continue;
    const double* x = &in[0].data[r * n];
    const double lse = log_sum_exp_error(x, n);
    const auto bound = [&](double token) { return lse + kU * std::fabs(x[static_cast<size_t>(token)]); };
    result[1][r] = bound(expected[0].data[r]);
    for (size_t i = r * kernels::kMostTopLogprobs; i < (r + 1) * kernels::kMostTopLogprobs; ++i)
      if (expected[2].data[i] >= 0) result[3][i] = bound(expected[2].data[i]);
  }
  return result;
}

Bounds adamw(const ops::Op& op, Inputs in, Inputs expected) {
  const std::vector<double>& hyper = in[2].data;
  const double b1 = hyper[kernels::kHyperBeta1], b2 = hyper[kernels::kHyperBeta2];
  const double max_norm = hyper[kernels::kHyperMaxNorm], lr = hyper[kernels::kHyperLearningRate];
  const double clip = max_norm > 0 ? std::min(1.0, max_norm / (in[1].data[0] + 1e-6)) : 1.0;
  const double c1 = hyper[kernels::kHyperBiasCorrection1], c2 = hyper[kernels::kHyperBiasCorrection2];
  const double decay = op.attrs().get<kernels::AdamWAttrs>().decay ? hyper[kernels::kHyperWeightDecay] : 0;
  Bounds result = exact(expected);
  for (size_t i = 0; i < in[0].data.size(); ++i) {
    const double g = clip * in[0].data[i];  // norm + 1e-6, quotient, product: three roundings
    const double m_size = std::fabs(b1 * in[4].data[i]) + (1 - b1) * std::fabs(g);
    const double v_size = b2 * in[5].data[i] + (1 - b2) * g * g;
    result[1][i] = gamma_f32(3 + 3) * m_size;      // 1 - b1, product, sum
    result[2][i] = gamma_f32(2 * 3 + 4) * v_size;  // g twice, 1 - b2, two products, sum
    // m / c1 / (sqrt(v / c2) + eps): m cancels, v does not; quotient and root, sum, two quotients.
    const double denominator = std::sqrt(expected[2].data[i] / c2) + hyper[kernels::kHyperEps];
    const double step_size = m_size / c1 / denominator;
    const double step_error = (gamma_f32(6) + gamma_f32(10) / 2 + gamma_f32(5)) * step_size;
    const double decayed = decay * std::fabs(in[3].data[i]);
    result[0][i] = lr * (step_error + gamma_f32(4) * (step_size + decayed)) + kU * std::fabs(expected[0].data[i]);
    if (!result[3].empty()) result[3][i] = result[0][i] + kU * std::fabs(expected[0].data[i]);
  }
  return result;
}

// m and z are exact. l: the exponentials, whose arguments are rounded, and their sum.
Bounds softmax_state(Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto rows = static_cast<size_t>(in[0].shape[0]), n = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    double widest = 0;
    for (size_t i = 0; i < n; ++i) widest = std::max(widest, expected[0].data[3 * r] - in[0].data[r * n + i]);
    result[0][3 * r + 1] = expected[0].data[3 * r + 1] * (kExp + kU * widest + gamma_f32(static_cast<double>(n) + 1));
  }
  return result;
}

// The differences of largest logits are rounded before their exponential is taken in f64; so is the label's logit from
// the largest one, the sum of the labels' logits, and the loss. The gradient is that of cross_entropy.
Bounds parallel_cross_entropy(Pass pass, Inputs in, Inputs expected) {
  Bounds result = exact(expected);
  const auto rows = static_cast<size_t>(in[0].shape[0]), n = static_cast<size_t>(in[0].shape[1]);
  for (size_t r = 0; r < rows; ++r) {
    if (pass == Pass::backward) {
      const double lse = std::fabs(in[2].data[r]), dloss = std::fabs(in[3].data[r]);
      for (size_t i = 0; !result[0].empty() && in[1].data[r] >= 0 && i < n; ++i) {
        const double p = std::exp(in[0].data[r * n + i] - in[2].data[r]);
        const double argument = kU * (std::fabs(in[0].data[r * n + i]) + lse);
        result[0][r * n + i] = dloss * (p * (kExp + argument) + 2 * kU * (p + 1)) + kUnderflow;
      }
      continue;
    }
    double sizes = 0;
    const auto words = static_cast<size_t>(in[2].shape[1]);
    for (size_t word = 0; word < words; ++word)
      if (word % 3 != 1) sizes += std::fabs(in[2].data[r * words + word]);
    const double lse = 2 * kU * sizes + kU * std::log(300.0);
    if (in[1].data[r] >= 0) result[0][r] = lse + 3 * kU * sizes;
    if (pass == Pass::forward && !result[1].empty()) result[1][r] = lse;
  }
  return result;
}

// Products and their sums, over the streams or, for the gradients of weights, over the columns.
Bounds streams(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const std::vector<RefTensor> sizes = magnitudes(op, pass, in, initial);
  const double n = static_cast<double>(in[0].shape[1]), hidden = static_cast<double>(in[0].shape[2]);
  Bounds result;
  for (size_t i = 0; i < expected.size(); ++i) {
    const bool weights = pass == Pass::backward && i + 1 == expected.size();
    result.push_back(scaled(gamma_f32(weights ? hidden + 2 : n + 2), sizes[i].data));
  }
  return result;
}

}  // namespace

Bounds error_bounds(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial, const TensorView& encoded,
                    bool rounds_to_bf16, bool bf16_parts) {
  const std::string_view name = op.name();
  if (name == "embedding") return embedding(op, pass, in, expected, initial);
  if (name == "linear") return linear_bounds(op, pass, in, initial, encoded, rounds_to_bf16);
  if (name == "rms_norm") return rms_norm(op, pass, in, expected, initial);
  if (name == "layer_norm") return layer_norm(op, pass, in, expected, initial);
  if (name == "scale") return scale(op, pass, in, expected);
  if (name == "scale_by") return scale_by(pass, expected, initial);
  if (name == "add" || name == "mul") return relative(kU, expected);  // one operation
  // A term goes through as many additions as there are others, at most.
  if (name == "shard_sum")
    return {scaled(gamma_f32(static_cast<double>(in.size()) - 1), magnitudes(op, pass, in, initial)[0].data)};
  if (name == "activation" || name == "gated_activation") return activation(op, pass, in, expected);
  if (name == "rope") return rope(op, in, pass, expected);
  if (name == "scale_by_position") return relative(gamma_f32(2), expected);  // a factor that is rounded, and a product
  // Queries are rounded as the keys of an int8 cache are, but on a GPU.
  if (name == "attention")
    return attention_bounds(op, pass, in, expected, encoded.encoding == &RowEncoding::int8() && !rounds_to_bf16,
                            rounds_to_bf16, bf16_parts);
  if (name == "selected_attention") return selected_bounds(op, pass, in, expected);
  if (name == "latent_attention")
    return latent_bounds(op, in, encoded.encoding == &RowEncoding::int8(), rounds_to_bf16, bf16_parts);
  if (name == "compressed_attention") return compressed_bounds(op, pass, in, expected);
  if (name == "compress_keys") return compress_bounds(op, pass, in, expected, initial);
  if (name == "pool_keys") return pool_bounds(op, pass, in, expected, initial);
  if (name == "pooled_attention") return pooled_bounds(op, pass, in, expected, initial);
  if (name == "stream_weights") return stream_weights_bounds(op, pass, in, expected);
  if (name == "collapse_streams" || name == "expand_streams") return streams(op, pass, in, expected, initial);
  if (name == "softmax") return softmax(pass, in, expected);
  if (name == "cross_entropy") return cross_entropy(pass, in, expected);
  if (name == "softmax_state") return softmax_state(in, expected);
  if (name == "parallel_cross_entropy") return parallel_cross_entropy(pass, in, expected);
  if (name == "add_bias" && pass != Pass::backward) return relative(kU, expected);
  if (name == "add_bias") {
    Bounds result = exact(expected);
    if (!result[1].empty())
      result[1] = scaled(gamma_f32(static_cast<double>(in[0].shape[0]) + 1), magnitudes(op, pass, in, initial)[1].data);
    return result;
  }
  // Copies of a head are added in order.
  if (name == "select_heads" && pass == Pass::backward)
    return {scaled(gamma_f32(static_cast<double>(in[0].shape[1])), magnitudes(op, pass, in, initial)[0].data)};
  if (name == "state_space_scan") return state_space_bounds(op, pass, in, expected, initial);
  if (name == "sample") return sample(in, expected);
  if (name == "adamw") return adamw(op, in, expected);
  // The angle is reduced in double; its rounding (u pi), sine or cosine within 2 ulp (4u) and the scale.
  if (name == "rope_table") {
    Bounds result = exact(expected);
    const double scale = std::fabs(static_cast<double>(op.attrs().get<kernels::RopeTableAttrs>().scale));
    for (double& bound : result[0]) bound = 9 * kU * scale;
    return result;
  }
  if (name == "route" || name == "permute" || name == "grouped_linear" || name == "unpermute" ||
      name == "clamped_swiglu" || name == "gate_rows" || name == "identity_experts" || name == "load_balancing_loss" ||
      name == "head_linear")
    return expert_bounds(op, pass, in, expected, initial, encoded, rounds_to_bf16);
  if (name == "short_convolution") return recurrent_bounds(op, pass, in, expected, initial);
  if (name == "gated_delta_rule") return delta_rule_bounds(op, pass, in, expected, initial);
  // Squares and their sums in double.
  if (name == "grad_norm") return relative(0x1p-40, expected);
  return exact(expected);
}

}  // namespace eadem::test
