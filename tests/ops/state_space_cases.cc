// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/state_space_cases.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/all_ops.h"
#include "tests/ops/bound_terms.h"
#include "tests/ops/op_cases.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using kernels::Pass;
using ops::RefTensor;

struct ScanCase {
  int64_t tokens, sequences, heads, head_dim, groups, state;
};

ops::Workload scan_case(const ScanCase& c, DType dtype, const kernels::StateSpaceScanAttrs& attrs) {
  const TensorType shared(dtype, {Symbol::tokens, c.groups, c.state}), each(DType::f32, {c.heads});
  std::vector<TensorType> types = {TensorType(dtype, {Symbol::tokens, c.heads, c.head_dim}),
                                   TensorType(dtype, {Symbol::tokens, c.heads}),
                                   shared,
                                   shared,
                                   each,
                                   each,
                                   each,
                                   TensorType(DType::i32, {Dim(Symbol::sequences, 1)})};
  if (attrs.cached) {
    types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::sequences});
    types.emplace_back(DType::f32, std::initializer_list<Dim>{c.sequences + 2, c.heads, c.state, c.head_dim});
  }
  SymbolValues symbols;
  symbols[Symbol::tokens] = c.tokens;
  symbols[Symbol::sequences] = c.sequences;
  return named_case(std::make_shared<ops::StateSpaceScan>(attrs), types, symbols);
}

// Magnitudes M of the states of a head, and bounds E of their errors, before every token of a sequence and after the
// last one. With L the relative error of a decay and r that of delta,
//   M' = decay M + delta |b x|,   E' = decay (E + (L + 3u) M) + (r + 4u) delta |b x|:
// a step rounds both products and their sum, and what is stored.
struct HeadStates {
  std::vector<std::vector<double>> size, error;
};

struct Steps {
  size_t heads, head_dim, groups, state;
  const kernels::StateSpaceScanAttrs& attrs;
  Inputs in;

  size_t shared(size_t t, size_t h) const { return (t * groups + h / (heads / groups)) * state; }
  size_t row(size_t t, size_t h) const { return (t * heads + h) * head_dim; }
  double z(size_t t, size_t h) const { return in[1].data[t * heads + h] + in[4].data[h]; }
  double rate(size_t h) const { return std::exp(in[5].data[h]); }
  double delta(size_t t, size_t h) const {
    const double v = z(t, h), softplus = std::max(v, 0.0) + std::log1p(std::exp(-std::fabs(v)));
    return std::clamp(softplus, static_cast<double>(attrs.dt_min), static_cast<double>(attrs.dt_max));
  }
  double decay(size_t t, size_t h) const { return std::exp(-rate(h) * delta(t, h)); }
  // The sum z is rounded, which e^z makes relative; then an exponential, a logarithm, a sum.
  double delta_error(size_t t, size_t h) const { return kU * std::fabs(z(t, h)) + 8 * kU; }
  double decay_error(size_t t, size_t h) const { return rate(h) * delta(t, h) * (delta_error(t, h) + 4 * kU) + 4 * kU; }

  HeadStates states(size_t begin, size_t end, size_t h, std::vector<double> first) const {
    HeadStates result{{std::move(first)}, {std::vector<double>(state * head_dim, 0.0)}};
    for (size_t t = begin; t < end; ++t) {
      std::vector<double> size = result.size.back(), error = result.error.back();
      for (size_t i = 0; i < size.size(); ++i) {
        const double term =
            delta(t, h) * std::fabs(in[2].data[shared(t, h) + i / head_dim] * in[0].data[row(t, h) + i % head_dim]);
        error[i] =
            decay(t, h) * (error[i] + (decay_error(t, h) + 3 * kU) * size[i]) + (delta_error(t, h) + 4 * kU) * term;
        size[i] = decay(t, h) * size[i] + term;
      }
      result.size.push_back(std::move(size));
      result.error.push_back(std::move(error));
    }
    return result;
  }
};

void forward_bounds(const Steps& s, size_t begin, size_t end, size_t h, std::vector<double> first, double* kept,
                    std::vector<double>& y) {
  const HeadStates all = s.states(begin, end, h, std::move(first));
  const double rounding = gamma_f32(static_cast<double>(s.state) + 2);
  for (size_t t = begin; t < end; ++t) {
    const std::vector<double>&size = all.size[t - begin + 1], &error = all.error[t - begin + 1];
    for (size_t p = 0; p < s.head_dim; ++p) {
      double bound = rounding * std::fabs(s.in[6].data[h] * s.in[0].data[s.row(t, h) + p]);
      for (size_t n = 0; n < s.state; ++n)
        bound += std::fabs(s.in[3].data[s.shared(t, h) + n]) *
                 (error[n * s.head_dim + p] + rounding * size[n * s.head_dim + p]);
      y[s.row(t, h) + p] = 1.01 * bound;
    }
  }
  if (kept != nullptr)
    for (size_t i = 0; i < all.error.back().size(); ++i) kept[i] = 1.01 * all.error.back()[i];
}

// Likewise with K and F for the gradients of the states. The loop is that of the reference, on absolute values.
void backward_bounds(const Steps& s, size_t begin, size_t end, size_t h, Bounds& result) {
  const HeadStates all = s.states(begin, end, h, std::vector<double>(s.state * s.head_dim, 0.0));
  const double sums = gamma_f32(static_cast<double>(s.state + s.head_dim * (s.heads / s.groups)) + 12),
               tokens = gamma_f32(static_cast<double>(s.in[0].shape[0]) + 8);
  const auto add = [&](size_t output, size_t at, double bound) {
    if (!result[output].empty()) result[output][at] += 1.01 * bound;
  };
  std::vector<double> size(s.state * s.head_dim, 0.0), error = size;
  for (size_t t = end; t-- > begin;) {
    const double delta = s.delta(t, h), decay = s.decay(t, h), r = s.delta_error(t, h);
    double inner = 0, inner_error = 0, along = 0, along_error = 0, skip = 0;
    for (size_t i = 0; i < size.size(); ++i) {
      const size_t row = s.row(t, h) + i % s.head_dim, shared = s.shared(t, h) + i / s.head_dim;
      const double x = std::fabs(s.in[0].data[row]), b = std::fabs(s.in[2].data[shared]),
                   c = std::fabs(s.in[3].data[shared]), dy = std::fabs(s.in[8].data[row]);
      const double before = all.size[t - begin][i], before_error = all.error[t - begin][i];
      size[i] += c * dy;
      error[i] += kU * size[i];
      add(3, shared, dy * (all.error[t - begin + 1][i] + sums * all.size[t - begin + 1][i]));
      add(2, shared, delta * x * (error[i] + (r + sums) * size[i]));
      add(0, row, delta * b * (error[i] + (r + sums) * size[i]));
      inner += x * b * size[i];
      inner_error += x * b * (error[i] + sums * size[i]);
      along += size[i] * before;
      along_error += error[i] * before + size[i] * before_error + sums * size[i] * before;
      error[i] = decay * (error[i] + (s.decay_error(t, h) + kU) * size[i]);
      size[i] *= decay;
    }
    for (size_t p = 0; p < s.head_dim; ++p) {
      const double dy = std::fabs(s.in[8].data[s.row(t, h) + p]);
      add(0, s.row(t, h) + p, sums * std::fabs(s.in[6].data[h]) * dy);
      skip += std::fabs(s.in[0].data[s.row(t, h) + p]) * dy;
    }
    const double rate = s.rate(h) * decay;
    along_error = rate * (along_error + (s.decay_error(t, h) + 4 * kU) * along);
    along *= rate;
    const double slope = 1 / (1 + std::exp(-s.z(t, h)));
    const double dz = slope * (inner + along), dz_error = slope * (inner_error + along_error) + (r + 4 * kU) * dz;
    add(1, t * s.heads + h, dz_error);
    add(4, h, dz_error + tokens * dz);
    add(5, h, delta * (along_error + (r + tokens) * along));
    add(6, h, (sums + tokens) * skip);
  }
}

}  // namespace

std::vector<ops::Workload> state_space_cases() {
  std::vector<ops::Workload> cases;
  const auto add = [&](const ScanCase& c, DType dtype = DType::f32, float dt_min = 0, float dt_max = HUGE_VALF) {
    for (bool cached : {false, true})
      cases.push_back(scan_case(c, dtype, {.cached = cached, .dt_min = dt_min, .dt_max = dt_max}));
  };
  // Widths of heads: vectors of 1 to 16 lanes in tiles of 8, 4, 2 and 1.
  for (int64_t head_dim : {1, 3, 7, 8, 9, 15, 17, 33, 64, 65, 130}) add({3, 1, 2, head_dim, 1, 5});
  // States: blocks of 32. Heads: groups, and slices of 8 of them.
  for (int64_t state : {1, 2, 31, 32, 33, 65}) add({4, 2, 2, 9, 2, state});
  for (int64_t heads : {1, 3, 8, 9, 18}) add({5, 2, heads, 5, 1, 3});
  add({5, 2, 18, 5, 2, 3});
  add({3, 1, 6, 4, 3, 3});
  // Tokens: chunks of 32 and of 64; sequences of none.
  for (int64_t tokens : {0, 1, 2, 31, 32, 33, 63, 64, 65, 130}) add({tokens, 1, 2, 5, 1, 4});
  for (int64_t sequences : {2, 5, 9}) add({7, sequences, 3, 5, 1, 4});
  add({6, 2, 2, 17, 1, 6}, DType::f32, 0.5f, 2.0f);
  add({6, 2, 4, 9, 2, 6}, DType::bf16);
  return cases;
}

Bounds state_space_bounds(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const auto& attrs = op.attrs().get<kernels::StateSpaceScanAttrs>();
  const auto extent = [](const RefTensor& tensor, int axis) { return static_cast<size_t>(tensor.shape[axis]); };
  const Steps steps{extent(in[0], 1), extent(in[0], 2), extent(in[2], 1), extent(in[2], 2), attrs, in};
  const size_t size = steps.state * steps.head_dim;
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  for (size_t s = 0; s + 1 < in[7].data.size(); ++s) {
    const auto begin = static_cast<size_t>(in[7].data[s]), end = static_cast<size_t>(in[7].data[s + 1]);
    for (size_t h = 0; h < steps.heads; ++h) {
      if (pass == Pass::backward) {
        backward_bounds(steps, begin, end, h, result);
        continue;
      }
      std::vector<double> first(size, 0.0);
      double* kept = nullptr;
      if (attrs.cached && in[8].data[s] >= 0) {
        const size_t at = (static_cast<size_t>(in[8].data[s]) * steps.heads + h) * size;
        for (size_t i = 0; i < size; ++i) first[i] = std::fabs(in[9].data[at + i]);
        kept = &result[1][at];
      }
      forward_bounds(steps, begin, end, h, std::move(first), kept, result[0]);
    }
  }
  if (pass == Pass::backward)
    for (size_t i = 4; i < 7; ++i)  // added to what is there
      for (size_t h = 0; h < result[i].size(); ++h)
        result[i][h] += static_cast<double>(in[7].data.size()) * kU *
                        (std::fabs(initial[i].data[h]) + std::fabs(expected[i].data[h]));
  return result;
}

}  // namespace eadem::test
