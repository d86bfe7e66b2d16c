// SPDX-License-Identifier: Apache-2.0
//
// linear_cross_entropy in 8-bit floats, in double precision, and how far a kernel may be from that. The codes of a
// gradient of logits are those of a number somewhere between what the kernel's own errors leave open: near a border
// between two codes either may come out, elsewhere there is one.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "eadem/core/encodings/fp8_tensor_encoding.h"

namespace eadem::test {

struct HeadOperands {
  int64_t rows = 0, hidden = 0, vocab = 0;
  std::vector<float> x, weight;  // [rows, hidden], [vocab, hidden]: what the codes stand for
  std::vector<int32_t> labels;   // [rows]; negative: ignored
  std::vector<float> dloss;      // [rows]
  std::vector<float> before;     // [vocab, hidden]: what the gradient of the weight is added to
};

struct Bounded {
  double value = 0, bound = 0;
};
struct HeadResults {
  std::vector<Bounded> loss, dx, dweight;
  int64_t open_codes = 0;  // gradients of logits that may have more than one code
};

// Bounds take the magnitudes of products, in the order of their sum, and say how far the sum may be from the true one.
template <typename LogitBound, typename ProductBound>
HeadResults head_oracle(const HeadOperands& in, double dx_roundoff, LogitBound&& logit_bound,
                        ProductBound&& product_bound) {
  constexpr double kU = 0x1p-24;
  constexpr auto kKind = Fp8Format::Kind::e5m2;
  const auto rows = static_cast<size_t>(in.rows), hidden = static_cast<size_t>(in.hidden),
             vocab = static_cast<size_t>(in.vocab);
  const auto wide = [](float value) { return static_cast<double>(value); };
  float most = 0;
  for (const float value : in.dloss) most = std::max(most, std::fabs(value));
  const float scale = most / fp8_largest(kKind);
  const auto rounded = [&](double value) {
    return wide(scale * fp8_to_float(kKind, Fp8TensorEncoding::code_of(kKind, static_cast<float>(value), scale)));
  };

  HeadResults results;
  results.loss.resize(rows);
  std::vector<Bounded> gradients(rows * vocab);  // of the logits: the middle of what is open, and half of its width
  std::vector<double> magnitudes;
  for (size_t r = 0; r < rows; ++r) {
    std::vector<Bounded> logits(vocab);
    double largest = -INFINITY, loosest = 0;
    for (size_t v = 0; v < vocab; ++v) {
      magnitudes.clear();
      for (size_t k = 0; k < hidden; ++k) {
        const double term = wide(in.x[r * hidden + k]) * wide(in.weight[v * hidden + k]);
        logits[v].value += term;
        magnitudes.push_back(std::fabs(term));
      }
      logits[v].bound = logit_bound(magnitudes);
      largest = std::max(largest, logits[v].value);
      loosest = std::max(loosest, logits[v].bound);
    }
    double sum = 0;
    for (const Bounded& logit : logits) sum += std::exp(logit.value - largest);
    const double lse = largest + std::log(sum);
    // Logits that are off move lse by no more. Exponentials are off by 4 units in the last place, and their differences
    // from the largest logit by one; lse, the difference from it and the loss are rounded.
    const double size = std::fabs(largest) + std::fabs(lse) + std::log(static_cast<double>(vocab)) + 2 * loosest;
    const double lse_bound = loosest + 4 * kU * (size + 2);
    const int32_t label = in.labels[r];
    if (label >= 0) {
      const Bounded& scored = logits[static_cast<size_t>(label)];
      results.loss[r] = {lse - scored.value, lse_bound + scored.bound + 4 * kU * (size + std::fabs(scored.value))};
    }
    for (size_t v = 0; v < vocab && label >= 0; ++v) {
      const double p = std::exp(logits[v].value - lse), dloss = wide(in.dloss[r]);
      const double exponent = lse_bound + logits[v].bound + 2 * kU * (size + std::fabs(logits[v].value));
      const double target = static_cast<int64_t>(v) == label ? 1 : 0;
      const double bound = std::fabs(dloss) * (p * (std::expm1(exponent) + 8 * kU) + 2 * kU * target);
      const double gradient = dloss * (p - target);
      const double low = rounded(gradient - bound), high = rounded(gradient + bound);
      if (low != high) ++results.open_codes;
      gradients[r * vocab + v] = {(low + high) / 2, (high - low) / 2};
    }
  }

  results.dx.resize(rows * hidden);
  results.dweight.resize(vocab * hidden);
  const auto sum_of = [&](size_t terms, auto&& gradient_of, auto&& factor_of) {
    Bounded result;
    magnitudes.clear();
    for (size_t i = 0; i < terms; ++i) {
      const Bounded& gradient = gradient_of(i);
      const double factor = factor_of(i);
      result.value += gradient.value * factor;
      result.bound += gradient.bound * std::fabs(factor);
      magnitudes.push_back((std::fabs(gradient.value) + gradient.bound) * std::fabs(factor));
    }
    result.bound += product_bound(magnitudes);
    return result;
  };
  for (size_t r = 0; r < rows; ++r)
    for (size_t k = 0; k < hidden; ++k) {
      Bounded& dx = results.dx[r * hidden + k];
      dx = sum_of(
          vocab, [&](size_t v) -> const Bounded& { return gradients[r * vocab + v]; },
          [&](size_t v) { return wide(in.weight[v * hidden + k]); });
      dx.bound += (std::fabs(dx.value) + dx.bound) * dx_roundoff;
    }
  for (size_t v = 0; v < vocab; ++v)
    for (size_t k = 0; k < hidden; ++k) {
      Bounded& dweight = results.dweight[v * hidden + k];
      dweight = sum_of(
          rows, [&](size_t r) -> const Bounded& { return gradients[r * vocab + v]; },
          [&](size_t r) { return wide(in.x[r * hidden + k]); });
      const double old = in.before.empty() ? 0 : wide(in.before[v * hidden + k]);
      dweight.value += old;
      // Chunks of rows are added one after another, at most as many as there are rows by 16.
      dweight.bound +=
          (std::fabs(old) + std::fabs(dweight.value) + dweight.bound) * kU * (static_cast<double>(rows) / 16 + 2);
    }
  return results;
}

}  // namespace eadem::test
