// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/recurrent/state_space_scan.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"
#include "eadem/ops/recurrent/sequence_ports.h"

namespace eadem::ops {

StateSpaceScan::StateSpaceScan(const kernels::StateSpaceScanAttrs& attrs) : attrs_(attrs) {
  if (!(attrs.dt_min >= 0 && attrs.dt_min <= attrs.dt_max))
    throw InvalidArgument("state_space_scan: dt_min is {} and dt_max is {}; expected 0 <= dt_min <= dt_max",
                          attrs.dt_min, attrs.dt_max);
}

std::vector<Port> StateSpaceScan::inputs() const {
  using Role = Port::Role;
  std::vector<Port> ports = {{"x"},
                             {"dt"},
                             {"b"},
                             {"c"},
                             {"dt_bias", Role::parameter},
                             {"a_log", Role::parameter},
                             {"d", Role::parameter},
                             {"query_start", Role::index}};
  if (attrs_.cached) {
    ports.push_back({"state_slots", Role::index});
    ports.push_back({"state", Role::state});
  }
  return ports;
}

std::vector<Port> StateSpaceScan::outputs() const {
  if (attrs_.cached) return {{"y"}, {"state", Port::Role::state}};
  return {{"y"}};
}

std::string StateSpaceScan::attrs_text() const {
  std::string text = attrs_.cached ? "cached" : "direct";
  if (attrs_.dt_min > 0 || std::isfinite(attrs_.dt_max))
    text += fmt::format(" dt_min={} dt_max={}", attrs_.dt_min, attrs_.dt_max);
  return text;
}

std::vector<TensorType> StateSpaceScan::infer_types(std::span<const TensorType> in) const {
  const TensorType& x = in[kX];
  const DType like_x[] = {x.dtype};
  const auto expect_activation = [&](int port, int rank) {
    const TensorType& type = in[static_cast<size_t>(port)];
    const std::string_view label = inputs()[static_cast<size_t>(port)].name;
    expect_rank(name(), label, type, rank);
    expect_dtype(name(), label, type, port == kX ? std::span<const DType>(kActivations) : like_x);
    expect_plain(name(), label, type);
    if (port != kX) expect_dim(name(), label, type, 0, x.dim(0), "tokens of 'x'");
  };
  expect_activation(kX, 3);
  expect_activation(kDt, 2);
  expect_dim(name(), "dt", in[kDt], 1, x.dim(1), "heads of 'x'");
  expect_activation(kB, 3);
  expect_activation(kC, 3);
  expect_same_dims(name(), "c", in[kC], in[kB], "b");
  if (const int64_t heads = x.fixed(1), groups = in[kB].fixed(1); groups < 1 || heads % groups != 0)
    throw InvalidArgument("state_space_scan: 'x' has {} heads and 'b' {} groups; expected a multiple of the groups",
                          heads, groups);
  for (int port : {kDtBias, kALog, kD}) {
    const std::string_view label = inputs()[static_cast<size_t>(port)].name;
    expect_rank(name(), label, in[static_cast<size_t>(port)], 1);
    expect_dtype(name(), label, in[static_cast<size_t>(port)], kF32);
    expect_plain(name(), label, in[static_cast<size_t>(port)]);
    expect_dim(name(), label, in[static_cast<size_t>(port)], 0, x.dim(1), "heads of 'x'");
  }
  expect_query_start(name(), in[kQueryStart]);
  const TensorType y = plain_type(x.dtype, x.dims());
  if (!attrs_.cached) return {y};
  const Dim row[] = {x.dim(1), in[kB].dim(2), x.dim(2)};
  expect_sequence_state(name(), in[kQueryStart], in[kStateSlots], in[kState], row);
  return {y, plain_type(DType::f32, in[kState].dims())};
}

DType StateSpaceScan::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port > kC) return in[static_cast<size_t>(port)].dtype;
  return in[kX].dtype == DType::bf16 ? DType::bf16 : DType::f32;
}

std::vector<Sharding> StateSpaceScan::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& x = in[kX].sharding;
  const bool divided = x == Sharding::along(1);
  if (!divided && !(x == Sharding::replicated()))
    throw InvalidArgument("state_space_scan: 'x' is {}; expected replicated or sharded(1), its heads",
                          to_string(in[kX]));
  const auto like_x = [&](int port, int axis) {
    const TensorType& type = in[static_cast<size_t>(port)];
    if (!(type.sharding == (divided ? Sharding::along(axis) : Sharding::replicated())))
      throw InvalidArgument("state_space_scan: '{}' is {} but 'x' is {}; expected the heads divided alike",
                            inputs()[static_cast<size_t>(port)].name, to_string(type), to_string(in[kX]));
  };
  for (const int port : {kDt, kB, kC}) like_x(port, 1);
  for (const int port : {kDtBias, kALog, kD}) like_x(port, 0);
  if (!attrs_.cached) return {x};
  like_x(kState, 1);
  return {x, in[kState].sharding};
}

std::vector<Saved> StateSpaceScan::saved() const {
  using enum Saved::Kind;
  return {{input, kX},      {input, kDt},   {input, kB}, {input, kC},
          {input, kDtBias}, {input, kALog}, {input, kD}, {input, kQueryStart}};
}

// A token takes 5 operations for each element of the state: the decay, the product of b and x and its sum, the product
// with c and its sum. Backward makes the states again (3) and the states' gradients (4), and takes four products with
// them: for db, dc, dx and the decay (8).
Cost StateSpaceScan::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                          const SymbolValues& symbols) const {
  const double elements = static_cast<double>(in[kX].num_elements(symbols)),
               state = static_cast<double>(in[kB].fixed(2)), steps = static_cast<double>(in[kDt].num_elements(symbols));
  const double flops =
      pass == Pass::backward ? elements * (15 * state + 8) + 60 * steps : elements * (5 * state + 3) + 45 * steps;
  if (!attrs_.cached) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  return {flops,
          state_traffic(in[kStateSlots], in[kState], symbols) + traffic_bytes(in.first(kState), out.first(1), symbols)};
}

namespace {

// The extents of a scan, and where its elements lie.
struct Extents {
  size_t heads, head_dim, groups, state;
  explicit Extents(std::span<const RefTensor> in)
      : heads(static_cast<size_t>(in[0].shape[1])),
        head_dim(static_cast<size_t>(in[0].shape[2])),
        groups(static_cast<size_t>(in[2].shape[1])),
        state(static_cast<size_t>(in[2].shape[2])) {}
  size_t size() const { return state * head_dim; }  // of a head's state
  size_t step(size_t t, size_t h) const { return t * heads + h; }
  size_t row(size_t t, size_t h) const { return step(t, h) * head_dim; }
  size_t shared(size_t t, size_t h) const { return (t * groups + h / (heads / groups)) * state; }
};

// One token of one head.
struct Step {
  double z, softplus, delta, decay;  // z: dt + dt_bias
  Step(const kernels::StateSpaceScanAttrs& attrs, std::span<const RefTensor> in, size_t at, size_t h)
      : z(in[1].data[at] + in[4].data[h]),
        softplus(std::max(z, 0.0) + std::log1p(std::exp(-std::fabs(z)))),
        delta(std::clamp(softplus, static_cast<double>(attrs.dt_min), static_cast<double>(attrs.dt_max))),
        decay(std::exp(-std::exp(in[5].data[h]) * delta)) {}
};

void advance(std::vector<double>& state, const Extents& e, const Step& step, std::span<const RefTensor> in, size_t t,
             size_t h) {
  for (size_t n = 0; n < e.state; ++n)
    for (size_t p = 0; p < e.head_dim; ++p)
      state[n * e.head_dim + p] = step.decay * state[n * e.head_dim + p] +
                                  step.delta * in[2].data[e.shared(t, h) + n] * in[0].data[e.row(t, h) + p];
}

// A sequence through head h.
void scan_head(const kernels::StateSpaceScanAttrs& attrs, std::span<const RefTensor> in, std::span<RefTensor> out,
               const SequenceRange& sequence, size_t h) {
  const Extents e(in);
  std::vector<double> state(e.size(), 0.0);
  const auto kept =
      static_cast<std::ptrdiff_t>((static_cast<size_t>(std::max<int64_t>(sequence.slot, 0)) * e.heads + h) * e.size());
  if (sequence.slot >= 0) std::copy_n(in[9].data.begin() + kept, e.size(), state.begin());
  for (auto t = static_cast<size_t>(sequence.begin); t < static_cast<size_t>(sequence.end); ++t) {
    advance(state, e, Step(attrs, in, e.step(t, h), h), in, t, h);
    // A step begins with what is stored, which is f32.
    if (attrs.cached)
      for (double& value : state) value = static_cast<float>(value);
    for (size_t p = 0; p < e.head_dim; ++p) {
      double y = in[6].data[h] * in[0].data[e.row(t, h) + p];
      for (size_t n = 0; n < e.state; ++n) y += in[3].data[e.shared(t, h) + n] * state[n * e.head_dim + p];
      out[0].data[e.row(t, h) + p] = y;
    }
  }
  if (sequence.slot >= 0) std::copy(state.begin(), state.end(), out[1].data.begin() + kept);
}

// The gradients of a sequence through head h. With G the gradient of the state after a token,
//   G = c dy + the next token's decay G;   db += delta G x;   dc += S dy;   dx = delta sum_n b G + d dy
// and what the decay adds to the gradient of delta is sum(G S of the token before) times -exp(a_log) decay.
void backward_head(const kernels::StateSpaceScanAttrs& attrs, std::span<const RefTensor> in, std::span<RefTensor> out,
                   const SequenceRange& sequence, size_t h) {
  const auto begin = static_cast<size_t>(sequence.begin), end = static_cast<size_t>(sequence.end);
  const Extents e(in);
  const RefTensor &x = in[0], &b = in[2], &c = in[3], &dy = in.back();
  std::vector<std::vector<double>> states = {std::vector<double>(e.size(), 0.0)};  // before token begin + i
  for (size_t t = begin; t < end; ++t) {
    states.push_back(states.back());
    advance(states.back(), e, Step(attrs, in, e.step(t, h), h), in, t, h);
  }
  std::vector<double> gradient(e.size(), 0.0);
  const auto add = [&](int output, size_t at, double value) {
    if (!out[static_cast<size_t>(output)].data.empty()) out[static_cast<size_t>(output)].data[at] += value;
  };
  const double rate = std::exp(in[5].data[h]);
  for (size_t t = end; t-- > begin;) {
    const Step step(attrs, in, e.step(t, h), h);
    const std::vector<double>&before = states[t - begin], &after = states[t - begin + 1];
    double ddelta = 0, ddecay = 0;
    for (size_t n = 0; n < e.state; ++n)
      for (size_t p = 0; p < e.head_dim; ++p) {
        const size_t at = n * e.head_dim + p, row = e.row(t, h) + p, shared = e.shared(t, h) + n;
        double& g = gradient[at];
        g += c.data[shared] * dy.data[row];
        add(3, shared, after[at] * dy.data[row]);
        add(2, shared, step.delta * g * x.data[row]);
        add(0, row, step.delta * g * b.data[shared]);
        ddelta += g * b.data[shared] * x.data[row];
        ddecay += g * before[at];
        g *= step.decay;
      }
    for (size_t p = 0; p < e.head_dim; ++p) {
      add(0, e.row(t, h) + p, in[6].data[h] * dy.data[e.row(t, h) + p]);
      add(6, h, x.data[e.row(t, h) + p] * dy.data[e.row(t, h) + p]);
    }
    const double along_decay = -rate * step.decay * ddecay;
    const double inside = step.softplus == step.delta ? 1.0 : 0.0;
    const double dz = inside * (ddelta + along_decay) / (1 + std::exp(-step.z));
    add(1, e.step(t, h), dz);
    add(4, h, dz);
    add(5, h, step.delta * along_decay);
  }
}

}  // namespace

void StateSpaceScan::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const Extents e(in);
  if (pass == Pass::backward)
    for (RefTensor& gradient : out.first(4)) std::fill(gradient.data.begin(), gradient.data.end(), 0.0);
  for (const SequenceRange& sequence : sequences_of(in[kQueryStart], attrs_.cached ? &in[kStateSlots] : nullptr))
    for (size_t h = 0; h < e.heads; ++h)
      if (pass == Pass::backward)
        backward_head(attrs_, in, out, sequence, h);
      else
        scan_head(attrs_, in, out, sequence, h);
}

std::vector<Workload> StateSpaceScan::workloads() {
  struct Shape {
    std::string_view model;
    int64_t heads, head_dim, groups, state;
  };
  constexpr Shape kShapes[] = {{"tiny", 6, 8, 2, 12},
                               {"granite-4.0-h-tiny", 48, 64, 1, 128},
                               {"falcon-h1-1.5b", 48, 64, 1, 256},
                               {"nemotron-3-nano-30b", 64, 64, 8, 128}};
  std::vector<Workload> rows;
  for (const Shape& shape : kShapes)
    for (const StepShape& step : step_shapes())
      for (const bool cached : {true, false}) {
        if (!cached && step.tokens != step.kv_length * step.sequences) continue;
        const TensorType shared(DType::f32, {Symbol::tokens, shape.groups, shape.state}),
            each(DType::f32, {shape.heads});
        std::vector<TensorType> types = {TensorType(DType::f32, {Symbol::tokens, shape.heads, shape.head_dim}),
                                         TensorType(DType::f32, {Symbol::tokens, shape.heads}),
                                         shared,
                                         shared,
                                         each,
                                         each,
                                         each,
                                         TensorType(DType::i32, {Dim(Symbol::sequences, 1)})};
        if (cached) {
          types.emplace_back(DType::i32, std::initializer_list<Dim>{Symbol::sequences});
          types.emplace_back(DType::f32,
                             std::initializer_list<Dim>{step.sequences, shape.heads, shape.state, shape.head_dim});
        }
        rows.push_back({workload_name(shape.model, step, cached ? "scan" : "scan of whole sequences"),
                        std::make_shared<StateSpaceScan>(kernels::StateSpaceScanAttrs{.cached = cached}),
                        std::move(types), symbols_of(step)});
      }
  return rows;
}

}  // namespace eadem::ops
