// SPDX-License-Identifier: Apache-2.0
//
// A step maps a column s of S to (I - beta k k^T) diag(decay) s + beta v k. The matrix is a contraction, since beta <=
// 1 and |k| <= 1: what earlier steps got wrong, as the length of a column's error, does not grow. A bound is therefore
// the sum of what the steps get wrong by themselves; and likewise for the gradient of S, backwards. Products of errors
// are covered by a hundredth.
//
// Within a group of tokens a kernel has no S, but S0, keys, corrections and F. Bounds then are of the S that its
// numbers make, exactly: S is rounded after the last token alone. What one token gets wrong is relative to the sizes of
// the terms, S0 and each correction, which may cancel.
#include "tests/ops/delta_rule_bounds.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/recurrent/gated_delta_rule_reference.h"
#include "eadem/ops/recurrent/sequence_ports.h"
#include "tests/ops/bound_terms.h"
#include "tests/support/tolerance.h"

namespace eadem::test {

namespace {

using kernels::GatedDeltaRuleAttrs;
using kernels::Pass;
using ops::DeltaState;
using ops::DeltaToken;
using ops::RefTensor;
using Row = std::vector<double>;

constexpr double kSoftplus = 12 * kU, kSigmoid = kExp + 2 * kU, kSecondOrder = 1.01, kStateUnderflow = 0x1p-100;

enum Port { kQ, kK, kV, kA, kB, kALog, kDtBias, kQueryStart, kSlots, kState };

double length_of(const Row& x) {
  double squares = 0;
  for (double value : x) squares += value * value;
  return std::sqrt(squares);
}

Row column_lengths(const DeltaState& s, size_t columns) {
  Row result(columns, 0.0);
  for (size_t i = 0; i < s.size(); ++i) result[i % columns] += s[i] * s[i];
  for (double& value : result) value = std::sqrt(value);
  return result;
}

// One step of one value head: what goes in and out, and how far the kernel's numbers may be from it.
struct Step {
  DeltaToken token;
  DeltaState before, after;
  Row d, read, d_error, read_error;
  Row before_error, after_error;  // lengths of the errors of columns
  double decay_error = 0;         // relative, the largest of the rows
};

class Head {
 public:
  Head(const GatedDeltaRuleAttrs& attrs, Inputs in, int64_t head)
      : attrs_(attrs),
        in_(in),
        head_(head),
        rows_(static_cast<size_t>(attrs.key_dim)),
        columns_(static_cast<size_t>(attrs.value_dim)),
        sum_rows_(gamma_f32(static_cast<double>(rows_) + 3)),
        // The sum of squares, whose root halves its error, root, quotients and products.
        normal_(gamma_f32(static_cast<double>(rows_) + 4) / 2 + 6 * kU) {}

  size_t key_row(int64_t t) const {
    return static_cast<size_t>((t * attrs_.key_heads + attrs_.key_head_of(head_)) * attrs_.key_dim);
  }
  size_t value_row(int64_t t) const { return static_cast<size_t>((t * attrs_.value_heads + head_) * attrs_.value_dim); }
  size_t decay_row(int64_t t) const {
    return static_cast<size_t>(t * attrs_.decays() + (attrs_.channel_decay ? head_ * attrs_.key_dim : head_));
  }
  double scale() const { return std::exp(in_[kALog].data[static_cast<size_t>(head_)]); }
  double normal() const { return normal_; }
  double sum_rows() const { return sum_rows_; }
  size_t rows() const { return rows_; }
  size_t columns() const { return columns_; }

  // Relative, the largest of the rows.
  double decay_error(int64_t t, const DeltaToken& token) const {
    double result = 0;
    for (size_t i = 0; i < rows_; ++i) {
      const size_t own = attrs_.channel_decay ? i : 0;
      const double x = std::fabs(in_[kA].data[decay_row(t) + own] + in_[kDtBias].data[decay_row(0) + own]);
      result = std::max(result, kExp + scale() * (kU * x + token.rate[i] * (kSoftplus + kExp + 2 * kU)));
    }
    return result;
  }

  // One step by itself.
  Step step(int64_t t, const DeltaState& state, const Row& error) const {
    Step s;
    s.token = ops::delta_token(attrs_, in_, t, head_);
    s.before = s.after = state;
    s.before_error = error;
    const double* v = &in_[kV].data[value_row(t)];
    ops::delta_step(s.after, s.token, v, s.d, s.read);
    s.decay_error = decay_error(t, s.token);
    const double largest = *std::max_element(s.token.decay.begin(), s.token.decay.end());
    DeltaState faded = state;
    for (size_t i = 0; i < faded.size(); ++i) faded[i] *= s.token.decay[i / columns_];
    const Row faded_size = column_lengths(faded, columns_), after_size = column_lengths(s.after, columns_);
    const double k = length_of(s.token.k), beta = s.token.beta;
    for (size_t j = 0; j < columns_; ++j) {
      const double read = faded_size[j] * k * (sum_rows_ + normal_ + s.decay_error + kU);
      const double d = std::fabs(s.d[j]), rounding = d * (kSigmoid + 4 * kU) + kU * beta * std::fabs(v[j]);
      s.read_error.push_back(read + largest * error[j] * k);
      s.d_error.push_back(beta * s.read_error[j] + rounding);
      s.after_error.push_back(largest * error[j] + faded_size[j] * (s.decay_error + kU) + k * (beta * read + rounding) +
                              k * d * (normal_ + 2 * kU) + kU * after_size[j] + kStateUnderflow);
    }
    return s;
  }

 private:
  const GatedDeltaRuleAttrs& attrs_;
  Inputs in_;
  int64_t head_;
  size_t rows_, columns_;
  double sum_rows_, normal_;
};

// The steps of one value head in groups, and how far a kernel's numbers may be from them.
class GroupedHead {
 public:
  GroupedHead(const Head& head, const GatedDeltaRuleAttrs& attrs, ops::DeltaGroupState group)
      : head_(head),
        attrs_(attrs),
        group_(std::move(group)),
        state_(group_.state()),
        error_(head.columns(), 0.0),
        whole_error_(error_),
        key_errors_(group_.keys.size(), 0.0),
        correction_errors_(group_.keys.size(), error_) {}

  // Of y.
  Row step(const DeltaToken& token, const double* v, double decay_error) {
    const size_t columns = head_.columns();
    const double q = length_of(token.q), k = length_of(token.k), beta = token.beta,
                 largest = *std::max_element(token.decay.begin(), token.decay.end());
    const Row size = faded_sizes(token);
    Row d, read, result(columns), d_error(columns), all(columns);
    ops::delta_step(state_, token, v, d, read);
    for (size_t j = 0; j < columns; ++j) {
      const double own_read = size[j] * k * (head_.sum_rows() + head_.normal() + decay_error + 2 * kU);
      const double rounding = std::fabs(d[j]) * kSigmoid + 8 * kU * beta * (std::fabs(v[j]) + size[j] * k);
      all[j] = size[j] + k * std::fabs(d[j]);
      d_error[j] = beta * (own_read + largest * error_[j] * k) + rounding;
      error_[j] = largest * error_[j] + size[j] * (decay_error + kU) + k * (beta * own_read + rounding) +
                  k * std::fabs(d[j]) * (head_.normal() + 2 * kU) + kStateUnderflow;
      result[j] = kSecondOrder * q * (error_[j] + all[j] * (head_.sum_rows() + head_.normal() + decay_error + 8 * kU)) +
                  kStateUnderflow;
    }
    for (double& key_error : key_errors_) key_error += decay_error + kU;
    key_errors_.push_back(head_.normal());
    correction_errors_.push_back(d_error);
    fade_error_ += decay_error + kU;
    group_.append(token, d, state_);
    if (!group_.keys.empty()) return result;
    for (size_t j = 0; j < columns; ++j)
      whole_error_[j] = error_[j] += gamma_f32(kernels::GatedDeltaRuleAttrs::kGroup + 2) * all[j];
    key_errors_.clear();
    correction_errors_.clear();
    fade_error_ = 0;
    return result;
  }

  // Of what the state keeps.
  void bound_state(double* kept) const {
    ops::DeltaGroupState errors{DeltaState(group_.whole.size()), group_.keys, correction_errors_, group_.fade};
    for (size_t i = 0; i < errors.whole.size(); ++i) errors.whole[i] = kSecondOrder * whole_error_[i % head_.columns()];
    for (Row& correction : errors.corrections)
      for (double& x : correction) x *= kSecondOrder;
    for (size_t t = 0; t < errors.keys.size(); ++t)
      for (double& x : errors.keys[t]) x = kSecondOrder * key_errors_[t] * std::fabs(x) + kStateUnderflow;
    for (double& x : errors.fade) x = kSecondOrder * fade_error_ * x + kStateUnderflow;
    ops::store_delta_state(attrs_, errors, kept);
    kept[attrs_.count_at()] = 0;
  }

 private:
  // The lengths of columns of S0 and of the products of keys and corrections, faded by a token, added up.
  Row faded_sizes(const DeltaToken& token) const {
    const size_t columns = head_.columns();
    DeltaState faded = group_.whole;
    for (size_t at = 0; at < faded.size(); ++at) faded[at] *= group_.fade[at / columns] * token.decay[at / columns];
    Row result = column_lengths(faded, columns);
    for (size_t t = 0; t < group_.keys.size(); ++t) {
      Row key = group_.keys[t];
      for (size_t i = 0; i < key.size(); ++i) key[i] *= token.decay[i];
      for (size_t j = 0; j < columns; ++j) result[j] += length_of(key) * std::fabs(group_.corrections[t][j]);
    }
    return result;
  }

  const Head& head_;
  const GatedDeltaRuleAttrs& attrs_;
  ops::DeltaGroupState group_;
  DeltaState state_;
  Row error_, whole_error_;  // lengths of the errors of columns of S, and of S0
  Row key_errors_;           // relative, of each token of the group
  std::vector<Row> correction_errors_;
  double fade_error_ = 0;  // relative
};

void infer(const GatedDeltaRuleAttrs& attrs, Inputs in, Bounds& result) {
  const std::vector<double> none(static_cast<size_t>(attrs.state_floats()), 0.0);
  for (const ops::SequenceRange& sequence : ops::sequences_of(in[kQueryStart], attrs.cached ? &in[kSlots] : nullptr))
    for (int64_t h = 0; h < attrs.value_heads; ++h) {
      const Head head(attrs, in, h);
      const auto kept = static_cast<size_t>((sequence.slot * attrs.value_heads + h) * attrs.state_floats());
      GroupedHead grouped(
          head, attrs, ops::load_delta_state(attrs, sequence.slot < 0 ? none.data() : in[kState].data.data() + kept));
      for (int64_t t = sequence.begin; t < sequence.end; ++t) {
        const DeltaToken token = ops::delta_token(attrs, in, t, h);
        const Row y = grouped.step(token, &in[kV].data[head.value_row(t)], head.decay_error(t, token));
        std::copy(y.begin(), y.end(), result[0].begin() + static_cast<std::ptrdiff_t>(head.value_row(t)));
      }
      if (sequence.slot >= 0 && sequence.end > sequence.begin) grouped.bound_state(result[1].data() + kept);
    }
}

// Sums of absolute values, and of errors, of what is added up in an output.
struct Sums {
  std::vector<Row> size, error;
};

// The terms of ops/recurrent/gated_delta_rule_reference.cc, for one value head of one sequence. Gradients of q and k
// are those of normalized rows.
void step_back(const GatedDeltaRuleAttrs& attrs, Inputs in, const ops::SequenceRange& sequence, int64_t h, Sums& sums) {
  const Head head(attrs, in, h);
  const size_t rows = head.rows(), columns = head.columns();
  const double sum_columns = gamma_f32(static_cast<double>(columns) + 2), normal = head.normal();
  std::vector<Step> steps;
  DeltaState state(rows * columns, 0.0), gradient = state;
  Row error(columns, 0.0);
  for (int64_t t = sequence.begin; t < sequence.end; ++t) {
    steps.push_back(head.step(t, state, error));
    state = steps.back().after;
    error = steps.back().after_error;
  }
  error.assign(columns, 0.0);  // of columns of the gradient
  const auto add = [&](size_t output, size_t at, double size, double moved) {
    sums.size[output][at] += std::fabs(size);
    sums.error[output][at] += moved;
  };
  for (int64_t t = sequence.end; t-- > sequence.begin;) {
    const Step& s = steps[static_cast<size_t>(t - sequence.begin)];
    const double *dy = &in[kQueryStart + 1].data[head.value_row(t)], *v = &in[kV].data[head.value_row(t)];
    const double beta = s.token.beta, q = length_of(s.token.q), k = length_of(s.token.k);
    for (size_t i = 0; i < gradient.size(); ++i) gradient[i] += s.token.q[i / columns] * dy[i % columns];
    const Row with_y = column_lengths(gradient, columns);
    Row dr(columns, 0.0), dr_error(columns), own_error(columns);
    double dbeta = 0, dbeta_size = 0, dbeta_error = 0;
    for (size_t j = 0; j < columns; ++j) {
      for (size_t i = 0; i < rows; ++i) dr[j] -= beta * gradient[i * columns + j] * s.token.k[i];
      error[j] += q * std::fabs(dy[j]) * (normal + 2 * kU) + kU * with_y[j];
      const double own = with_y[j] * k * (head.sum_rows() + normal), dd = std::fabs(dr[j]) / beta,
                   left = std::fabs(v[j] - s.read[j]);
      own_error[j] = beta * own + std::fabs(dr[j]) * (kSigmoid + 2 * kU);
      dr_error[j] = own_error[j] + beta * error[j] * k;
      dbeta -= dr[j] / beta * (v[j] - s.read[j]);
      dbeta_size += dd * left;
      dbeta_error += (own + error[j] * k) * left + dd * (s.read_error[j] + kU * left);
      add(kV, head.value_row(t) + j, 0, dr_error[j]);
    }
    dbeta_error += sum_columns * dbeta_size;
    add(kB, static_cast<size_t>(t * attrs.value_heads + h), 0,
        dbeta_error * beta * (1 - beta) +
            std::fabs(dbeta) * beta * ((1 - beta) * (kSigmoid + 4 * kU) + beta * kSigmoid + kU));
    const double largest = *std::max_element(s.token.decay.begin(), s.token.decay.end());
    DeltaState next = gradient;
    for (size_t i = 0; i < next.size(); ++i) next[i] += s.token.k[i / columns] * dr[i % columns];
    const Row corrected = column_lengths(next, columns);
    for (size_t i = 0; i < next.size(); ++i) next[i] *= s.token.decay[i / columns];
    const Row faded = column_lengths(next, columns);
    Row next_error(columns);
    for (size_t j = 0; j < columns; ++j)
      next_error[j] =
          largest * (error[j] + k * own_error[j] + k * std::fabs(dr[j]) * (normal + 2 * kU) + kU * corrected[j]) +
          faded[j] * (s.decay_error + kU) + kStateUnderflow;
    double dg_total = 0, dg_total_error = 0, dg_sizes = 0;
    for (size_t i = 0; i < rows; ++i) {
      double dq = 0, dq_error = 0, dk = 0, dk_error = 0, dg = 0, dg_error = 0;
      for (size_t j = 0; j < columns; ++j) {
        const size_t at = i * columns + j;
        const double after = std::fabs(s.after[at]), before = std::fabs(s.before[at]), g = std::fabs(gradient[at]),
                     d = std::fabs(s.d[j]), decay = s.token.decay[i];
        dq += after * std::fabs(dy[j]);
        dq_error += (s.after_error[j] + sum_columns * after) * std::fabs(dy[j]);
        dk += g * d + decay * before * std::fabs(dr[j]);
        dk_error += error[j] * d + g * s.d_error[j] + sum_columns * g * d +
                    decay * (s.before_error[j] * std::fabs(dr[j]) + before * dr_error[j] +
                             (sum_columns + s.decay_error + kU) * before * std::fabs(dr[j]));
        dg += next[at] * s.before[at];
        dg_error += next_error[j] * before + std::fabs(next[at]) * (s.before_error[j] + sum_columns * before);
      }
      add(kQ, head.key_row(t) + i, dq, dq_error);
      add(kK, head.key_row(t) + i, dk, dk_error);
      dg_total += dg, dg_total_error += dg_error, dg_sizes += std::fabs(dg);
      if (!attrs.channel_decay && i + 1 < rows) continue;
      if (!attrs.channel_decay) {
        dg = dg_total;
        dg_error = dg_total_error + head.sum_rows() * dg_sizes;
      }
      const size_t own = attrs.channel_decay ? i : 0;
      const double x = in[kA].data[head.decay_row(t) + own] + in[kDtBias].data[head.decay_row(0) + own];
      const double slope = head.scale() / (1 + std::exp(-x));
      const double da_error = dg_error * slope + std::fabs(dg) * slope * (kExp + kSigmoid + 4 * kU + kU * std::fabs(x));
      add(kA, head.decay_row(t) + own, 0, da_error);
      add(kDtBias, head.decay_row(0) + own, dg * slope, da_error);
      const double rate = head.scale() * s.token.rate[i];
      add(kALog, static_cast<size_t>(h), dg * rate,
          (dg_error + std::fabs(dg) * (kExp + kSoftplus + 4 * kU)) * rate +
              std::fabs(dg) * head.scale() * kU * std::fabs(x));
    }
    gradient = next;
    error = next_error;
  }
}

// dx = factor (dn - n (n . dn)) / size, from bounds of |dn| and of its error.
void normalize_back(const GatedDeltaRuleAttrs& attrs, const RefTensor& x, double factor, const Row& size,
                    const Row& moved, Row& result) {
  const auto n = static_cast<size_t>(attrs.key_dim);
  const double normal = gamma_f32(static_cast<double>(n) + 4) / 2 + 6 * kU, sum = gamma_f32(static_cast<double>(n) + 3);
  for (size_t row = 0; row < result.size(); row += n) {
    double squares = static_cast<double>(attrs.eps);
    for (size_t i = row; i < row + n; ++i) squares += x.data[i] * x.data[i];
    const double length = std::sqrt(squares);
    double along = 0, along_error = 0;
    for (size_t i = row; i < row + n; ++i) {
      const double unit = std::fabs(x.data[i]) / length;
      along += unit * size[i];
      along_error += unit * (moved[i] + (sum + 2 * normal) * size[i]);
    }
    for (size_t i = row; i < row + n; ++i) {
      const double unit = std::fabs(x.data[i]) / length;
      result[i] = factor / length *
                  (moved[i] + unit * (along_error + along * (2 * normal + 4 * kU)) + size[i] * (normal + 4 * kU));
    }
  }
}

void differentiate(const GatedDeltaRuleAttrs& attrs, Inputs in, Inputs expected, Inputs initial, Bounds& result) {
  Sums sums;
  for (size_t port = kQ; port <= kDtBias; ++port) {
    sums.size.emplace_back(in[port].data.size(), 0.0);
    sums.error.emplace_back(in[port].data.size(), 0.0);
  }
  for (const ops::SequenceRange& sequence : ops::sequences_of(in[kQueryStart], nullptr))
    for (int64_t h = 0; h < attrs.value_heads; ++h) step_back(attrs, in, sequence, h, sums);
  // Rows of q and k are added up over the value heads of their key head.
  const double group = gamma_f32(static_cast<double>(attrs.value_heads / attrs.key_heads));
  for (const size_t port : {kQ, kK}) {
    for (size_t i = 0; i < sums.error[port].size(); ++i) sums.error[port][i] += group * sums.size[port][i];
    if (!result[port].empty())
      normalize_back(attrs, in[port], port == kQ ? 1 / std::sqrt(static_cast<double>(attrs.key_dim)) : 1,
                     sums.size[port], sums.error[port], result[port]);
  }
  const double additions = gamma_f32(static_cast<double>(in[kQ].shape[0]) + static_cast<double>(attrs.key_dim) + 3);
  for (const size_t port : {kV, kA, kB, kALog, kDtBias})
    for (size_t i = 0; i < result[port].size(); ++i) {
      const bool parameter = port == kALog || port == kDtBias;
      result[port][i] = sums.error[port][i] + kU * std::fabs(expected[port].data[i]);
      if (parameter) result[port][i] += additions * (sums.size[port][i] + std::fabs(initial[port].data[i]));
    }
  for (Row& bounds : result)
    for (double& bound : bounds) bound = kSecondOrder * bound + kStateUnderflow;
}

}  // namespace

Bounds delta_rule_bounds(const ops::Op& op, Pass pass, Inputs in, Inputs expected, Inputs initial) {
  const auto attrs = op.attrs().get<GatedDeltaRuleAttrs>();
  Bounds result;
  for (const RefTensor& tensor : expected) result.emplace_back(tensor.data.size(), 0.0);
  if (pass == Pass::backward)
    differentiate(attrs, in, expected, initial, result);
  else
    infer(attrs, in, result);
  return result;
}

}  // namespace eadem::test
