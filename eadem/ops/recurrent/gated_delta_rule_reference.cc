// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/recurrent/gated_delta_rule_reference.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/recurrent/gated_delta_rule.h"
#include "eadem/ops/recurrent/sequence_ports.h"

namespace eadem::ops {

using kernels::GatedDeltaRuleAttrs;

namespace {

enum In { kQ, kK, kV, kA, kB, kALog, kDtBias, kQueryStart, kSlots, kState };

double logistic(double x) { return 1 / (1 + std::exp(-x)); }
double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }

// Where rows of a head begin.
size_t key_row(const GatedDeltaRuleAttrs& attrs, int64_t token, int64_t head) {
  return static_cast<size_t>((token * attrs.key_heads + attrs.key_head_of(head)) * attrs.key_dim);
}
size_t value_row(const GatedDeltaRuleAttrs& attrs, int64_t token, int64_t head) {
  return static_cast<size_t>((token * attrs.value_heads + head) * attrs.value_dim);
}
// Of dt_bias, and with a token before it of a.
size_t decay_at(const GatedDeltaRuleAttrs& attrs, int64_t head, size_t row) {
  return attrs.channel_decay ? static_cast<size_t>(head * attrs.key_dim) + row : static_cast<size_t>(head);
}

}  // namespace

DeltaToken delta_token(const GatedDeltaRuleAttrs& attrs, std::span<const RefTensor> in, int64_t t, int64_t head) {
  const auto dim = static_cast<size_t>(attrs.key_dim);
  DeltaToken token;
  const auto normalized = [&](const RefTensor& x, double factor, double& size) {
    const double* row = &x.data[key_row(attrs, t, head)];
    double squares = static_cast<double>(attrs.eps);
    for (size_t i = 0; i < dim; ++i) squares += row[i] * row[i];
    size = std::sqrt(squares);
    std::vector<double> result(row, row + dim);
    for (double& value : result) value *= factor / size;
    return result;
  };
  token.q = normalized(in[kQ], 1 / std::sqrt(static_cast<double>(dim)), token.q_size);
  token.k = normalized(in[kK], 1, token.k_size);
  token.beta = logistic(in[kB].data[static_cast<size_t>(t * attrs.value_heads + head)]);
  const double scale = std::exp(in[kALog].data[static_cast<size_t>(head)]);
  for (size_t i = 0; i < dim; ++i) {
    const size_t at = decay_at(attrs, head, i);
    const double a = in[kA].data[static_cast<size_t>(t * attrs.decays()) + at];
    token.rate.push_back(softplus(a + in[kDtBias].data[at]));
    token.decay.push_back(std::exp(-scale * token.rate.back()));
  }
  return token;
}

void delta_step(DeltaState& state, const DeltaToken& token, const double* v, std::vector<double>& d,
                std::vector<double>& read) {
  const size_t rows = token.k.size(), columns = state.size() / rows;
  d.assign(columns, 0.0);
  read.assign(columns, 0.0);
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < columns; ++j) {
      state[i * columns + j] *= token.decay[i];
      read[j] += state[i * columns + j] * token.k[i];
    }
  for (size_t j = 0; j < columns; ++j) d[j] = token.beta * (v[j] - read[j]);
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < columns; ++j) state[i * columns + j] += token.k[i] * d[j];
}

DeltaState DeltaGroupState::state() const {
  DeltaState result = whole;
  const size_t columns = whole.size() / fade.size();
  for (size_t at = 0; at < whole.size(); ++at) {
    result[at] *= fade[at / columns];
    for (size_t t = 0; t < keys.size(); ++t) result[at] += keys[t][at / columns] * corrections[t][at % columns];
  }
  return result;
}

void DeltaGroupState::append(const DeltaToken& token, const std::vector<double>& d, const DeltaState& state) {
  for (size_t i = 0; i < fade.size(); ++i) {
    fade[i] *= token.decay[i];
    for (std::vector<double>& key : keys) key[i] *= token.decay[i];
  }
  keys.push_back(token.k);
  corrections.push_back(d);
  if (std::ssize(keys) == GatedDeltaRuleAttrs::kGroup) *this = {state, {}, {}, std::vector<double>(fade.size(), 1.0)};
}

DeltaGroupState load_delta_state(const GatedDeltaRuleAttrs& attrs, const double* kept) {
  const auto row = [&](int64_t at, int64_t size) { return std::vector<double>(kept + at, kept + at + size); };
  DeltaGroupState state{row(attrs.matrix_at(), attrs.key_dim * attrs.value_dim),
                        {},
                        {},
                        std::vector<double>(static_cast<size_t>(attrs.key_dim), 1.0)};
  const auto count = static_cast<int64_t>(kept[attrs.count_at()]);
  for (int64_t t = 0; t < count; ++t) {
    state.keys.push_back(row(attrs.keys_at() + t * attrs.key_dim, attrs.key_dim));
    state.corrections.push_back(row(attrs.corrections_at() + t * attrs.value_dim, attrs.value_dim));
  }
  if (count > 0)
    for (size_t i = 0; i < state.fade.size(); ++i)
      state.fade[i] = kept[static_cast<size_t>(attrs.fade_at()) + (attrs.channel_decay ? i : 0)];
  return state;
}

void store_delta_state(const GatedDeltaRuleAttrs& attrs, const DeltaGroupState& state, double* kept) {
  std::copy(state.whole.begin(), state.whole.end(), kept + attrs.matrix_at());
  const auto count = std::ssize(state.keys);
  kept[attrs.count_at()] = static_cast<double>(count);
  for (int64_t t = 0; t < count; ++t) {
    const auto at = static_cast<size_t>(t);
    std::copy(state.keys[at].begin(), state.keys[at].end(), kept + attrs.keys_at() + t * attrs.key_dim);
    std::copy(state.corrections[at].begin(), state.corrections[at].end(),
              kept + attrs.corrections_at() + t * attrs.value_dim);
  }
  if (count > 0) std::copy_n(state.fade.begin(), attrs.decays_of_head(), kept + attrs.fade_at());
}

namespace {

void infer(const GatedDeltaRuleAttrs& attrs, std::span<const RefTensor> in, std::span<RefTensor> out) {
  const auto rows = static_cast<size_t>(attrs.key_dim), columns = static_cast<size_t>(attrs.value_dim);
  std::vector<double> d, read;
  for (const SequenceRange& sequence : sequences_of(in[kQueryStart], attrs.cached ? &in[kSlots] : nullptr))
    for (int64_t h = 0; h < attrs.value_heads; ++h) {
      const auto kept = static_cast<size_t>((sequence.slot * attrs.value_heads + h) * attrs.state_floats());
      const std::vector<double> none(static_cast<size_t>(attrs.state_floats()), 0.0);
      DeltaGroupState group = load_delta_state(attrs, sequence.slot < 0 ? none.data() : in[kState].data.data() + kept);
      DeltaState state = group.state();
      for (int64_t t = sequence.begin; t < sequence.end; ++t) {
        const DeltaToken token = delta_token(attrs, in, t, h);
        delta_step(state, token, &in[kV].data[value_row(attrs, t, h)], d, read);
        group.append(token, d, state);
        double* y = &out[0].data[value_row(attrs, t, h)];
        std::fill_n(y, columns, 0.0);
        for (size_t i = 0; i < rows; ++i)
          for (size_t j = 0; j < columns; ++j) y[j] += state[i * columns + j] * token.q[i];
      }
      if (sequence.slot >= 0 && sequence.begin < sequence.end)
        store_delta_state(attrs, group, out[1].data.data() + kept);
    }
}

// The gradients of one value head's tokens, backwards: with D = dL/dS after a token,
//   D += q dy^T;  dq = S dy;  dd = D^T k;  dk = D d + S' dr;  dr = -beta dd;  dv = beta dd;  dbeta = dd . (v - r)
//   D' = D + k dr^T;  dg[i] = decay[i] D'[i, :] . S_before[i, :];  D_before = diag(decay) D'
// where S' is the faded S_before and r = S'^T k. Gradients of normalized rows come back through
//   dx = (dn - n (n . dn)) / size, n the row of length one.
void backward(const GatedDeltaRuleAttrs& attrs, std::span<const RefTensor> in, std::span<RefTensor> out,
              const SequenceRange& sequence, int64_t h) {
  const auto rows = static_cast<size_t>(attrs.key_dim), columns = static_cast<size_t>(attrs.value_dim);
  const auto length = static_cast<size_t>(sequence.end - sequence.begin);
  std::vector<DeltaToken> tokens;
  std::vector<DeltaState> before;
  std::vector<std::vector<double>> d(length), read(length);
  DeltaState state(rows * columns, 0.0);
  for (size_t t = 0; t < length; ++t) {
    const int64_t position = sequence.begin + static_cast<int64_t>(t);
    tokens.push_back(delta_token(attrs, in, position, h));
    before.push_back(state);
    delta_step(state, tokens[t], &in[kV].data[value_row(attrs, position, h)], d[t], read[t]);
  }
  before.push_back(state);
  const auto add = [&](size_t output, size_t at, double value) {
    if (!out[output].data.empty()) out[output].data[at] += value;
  };
  const auto add_normalized = [&](size_t output, size_t at, const std::vector<double>& n, const std::vector<double>& dn,
                                  double factor, double size) {
    double along = 0;
    for (size_t i = 0; i < rows; ++i) along += n[i] / factor * dn[i];
    for (size_t i = 0; i < rows; ++i) add(output, at + i, factor * (dn[i] - n[i] / factor * along) / size);
  };
  const double scale = std::exp(in[kALog].data[static_cast<size_t>(h)]);
  const RefTensor& dy = in[kQueryStart + 1];
  DeltaState gradient(rows * columns, 0.0);
  for (size_t t = length; t-- > 0;) {
    const int64_t position = sequence.begin + static_cast<int64_t>(t);
    const DeltaToken& token = tokens[t];
    const size_t value = value_row(attrs, position, h), key = key_row(attrs, position, h);
    std::vector<double> dq(rows, 0.0), dk(rows, 0.0), dr(columns, 0.0);
    double dbeta = 0;
    for (size_t i = 0; i < rows; ++i)
      for (size_t j = 0; j < columns; ++j) {
        gradient[i * columns + j] += token.q[i] * dy.data[value + j];
        dr[j] -= token.beta * gradient[i * columns + j] * token.k[i];
      }
    for (size_t j = 0; j < columns; ++j) {
      add(kV, value + j, -dr[j]);
      dbeta -= dr[j] / token.beta * (in[kV].data[value + j] - read[t][j]);
    }
    for (size_t i = 0; i < rows; ++i) {
      double dg = 0;
      for (size_t j = 0; j < columns; ++j) {
        const size_t at = i * columns + j;
        dq[i] += before[t + 1][at] * dy.data[value + j];
        dk[i] += gradient[at] * d[t][j] + token.decay[i] * before[t][at] * dr[j];
        gradient[at] = token.decay[i] * (gradient[at] + token.k[i] * dr[j]);
        dg += gradient[at] * before[t][at];
      }
      const size_t at = decay_at(attrs, h, i), row = static_cast<size_t>(position * attrs.decays());
      const double slope = logistic(in[kA].data[row + at] + in[kDtBias].data[at]);
      add(kA, row + at, -dg * scale * slope);
      add(kDtBias, at, -dg * scale * slope);
      add(kALog, static_cast<size_t>(h), -dg * scale * token.rate[i]);
    }
    add(kB, static_cast<size_t>(position * attrs.value_heads + h), dbeta * token.beta * (1 - token.beta));
    add_normalized(kQ, key, token.q, dq, 1 / std::sqrt(static_cast<double>(rows)), token.q_size);
    add_normalized(kK, key, token.k, dk, 1, token.k_size);
  }
}

}  // namespace

void GatedDeltaRule::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass != Pass::backward) return infer(attrs_, in, out);
  for (const int port : {kQ, kK, kV, kA, kB})
    std::fill(out[static_cast<size_t>(port)].data.begin(), out[static_cast<size_t>(port)].data.end(), 0.0);
  for (const SequenceRange& sequence : sequences_of(in[kQueryStart], nullptr))
    for (int64_t h = 0; h < attrs_.value_heads; ++h) backward(attrs_, in, out, sequence, h);
}

}  // namespace eadem::ops
