// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/recurrent/gated_delta_rule.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"
#include "eadem/ops/recurrent/sequence_ports.h"

namespace eadem::ops {

using kernels::GatedDeltaRuleAttrs;

GatedDeltaRule::GatedDeltaRule(const kernels::GatedDeltaRuleAttrs& attrs) : attrs_(attrs) {
  if (attrs.key_heads <= 0 || attrs.value_heads <= 0 || attrs.value_heads % attrs.key_heads != 0)
    throw InvalidArgument(
        "gated_delta_rule: value_heads is {} and key_heads is {}; expected a positive multiple of a positive number",
        attrs.value_heads, attrs.key_heads);
  if (attrs.key_dim <= 0 || attrs.value_dim <= 0)
    throw InvalidArgument("gated_delta_rule: key_dim is {} and value_dim is {}; expected positive numbers",
                          attrs.key_dim, attrs.value_dim);
  if (!std::isfinite(attrs.eps) || attrs.eps <= 0)
    throw InvalidArgument("gated_delta_rule: eps is {}; expected a finite number > 0", attrs.eps);
}

std::vector<Port> GatedDeltaRule::inputs() const {
  using Role = Port::Role;
  std::vector<Port> ports = {{"q"},
                             {"k"},
                             {"v"},
                             {"a"},
                             {"b"},
                             {"a_log", Role::parameter},
                             {"dt_bias", Role::parameter},
                             {"query_start", Role::index}};
  if (attrs_.cached) {
    ports.push_back({"state_slots", Role::index});
    ports.push_back({"state", Role::state});
  }
  return ports;
}

std::vector<Port> GatedDeltaRule::outputs() const {
  if (!attrs_.cached) return {{"y"}};
  return {{"y"}, {"state", Port::Role::state}};
}

std::string GatedDeltaRule::attrs_text() const {
  return fmt::format("key_heads={} value_heads={} key_dim={} value_dim={}{}{} eps={}{}", attrs_.key_heads,
                     attrs_.value_heads, attrs_.key_dim, attrs_.value_dim, attrs_.channel_decay ? " channel_decay" : "",
                     attrs_.tiled ? " tiled" : "", attrs_.eps, attrs_.cached ? " cached" : "");
}

std::vector<TensorType> GatedDeltaRule::infer_types(std::span<const TensorType> in) const {
  const auto expect_rows = [&](int port, std::initializer_list<int64_t> dims) {
    const TensorType& type = in[static_cast<size_t>(port)];
    const std::string_view label = inputs()[static_cast<size_t>(port)].name;
    const DType like_q[] = {in[kQ].dtype};
    expect_rank(name(), label, type, static_cast<int>(dims.size()) + 1);
    if (port == kQ)
      expect_dtype(name(), label, type, kActivations);
    else
      expect_dtype(name(), label, type, like_q);
    expect_plain(name(), label, type);
    expect_dim(name(), label, type, 0, in[kQ].dim(0), "tokens of 'q'");
    int axis = 1;
    for (int64_t dim : dims) expect_dim(name(), label, type, axis++, Dim(dim), "the attributes");
  };
  expect_rows(kQ, {attrs_.key_heads, attrs_.key_dim});
  expect_rows(kK, {attrs_.key_heads, attrs_.key_dim});
  expect_rows(kV, {attrs_.value_heads, attrs_.value_dim});
  expect_rows(kA, {attrs_.decays()});
  expect_rows(kB, {attrs_.value_heads});
  for (const auto& [port, size] : {std::pair<int, int64_t>{kALog, attrs_.value_heads}, {kDtBias, attrs_.decays()}}) {
    const TensorType& type = in[static_cast<size_t>(port)];
    const std::string_view label = inputs()[static_cast<size_t>(port)].name;
    expect_rank(name(), label, type, 1);
    expect_dtype(name(), label, type, kF32);
    expect_dim(name(), label, type, 0, Dim(size), "the attributes");
  }
  expect_query_start(name(), in[kQueryStart]);
  const TensorType y = plain_type(in[kQ].dtype, in[kV].dims());
  if (!attrs_.cached) return {y};
  const Dim row[] = {attrs_.value_heads, attrs_.state_floats()};
  expect_sequence_state(name(), in[kQueryStart], in[kSlots], in[kState], row);
  return {y, plain_type(DType::f32, in[kState].dims())};
}

DType GatedDeltaRule::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port > kB) return in[static_cast<size_t>(port)].dtype;
  return in[kQ].dtype == DType::bf16 ? DType::bf16 : DType::f32;
}

std::vector<Sharding> GatedDeltaRule::infer_sharding(std::span<const TensorType> in) const {
  const bool divided = in[kQ].sharding == Sharding::along(1);
  if (divided && attrs_.tiled)
    throw InvalidArgument("gated_delta_rule: 'q' is {}; expected replicated, since value heads are tiled",
                          to_string(in[kQ]));
  if (!divided && !(in[kQ].sharding == Sharding::replicated()))
    throw InvalidArgument("gated_delta_rule: 'q' is {}; expected replicated or sharded(1), its heads",
                          to_string(in[kQ]));
  const auto like_q = [&](int port, int axis) {
    const TensorType& type = in[static_cast<size_t>(port)];
    if (!(type.sharding == (divided ? Sharding::along(axis) : Sharding::replicated())))
      throw InvalidArgument("gated_delta_rule: '{}' is {} but 'q' is {}; expected the heads divided alike",
                            inputs()[static_cast<size_t>(port)].name, to_string(type), to_string(in[kQ]));
  };
  for (const int port : {kK, kV, kA, kB}) like_q(port, 1);
  for (const int port : {kALog, kDtBias}) like_q(port, 0);
  if (!attrs_.cached) return {in[kQ].sharding};
  like_q(kState, 1);
  return {in[kQ].sharding, in[kState].sharding};
}

std::vector<Saved> GatedDeltaRule::saved() const {
  std::vector<Saved> saved;
  for (int port = kQ; port <= kQueryStart; ++port) saved.push_back({Saved::Kind::input, port});
  return saved;
}

Cost GatedDeltaRule::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                          const SymbolValues& symbols) const {
  // An element of S is read for d and for y of every token, and faded and corrected by all tokens of a group at once.
  // Backward: it is faded, read and corrected by each token, and the gradient of S goes through two corrections, a
  // fading, and five products with rows.
  const double elements = static_cast<double>(in[kV].num_elements(symbols)) * static_cast<double>(attrs_.key_dim);
  const double flops = elements * (pass == Pass::backward ? 22 : 6 + 1.0 / GatedDeltaRuleAttrs::kGroup);
  if (!attrs_.cached) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  // S is read for every step, and written after every group.
  const double states = state_traffic(in[kSlots], in[kState], symbols) / 2,
               tokens = static_cast<double>(in[kQ].dim(0).bind(symbols)),
               groups = tokens / static_cast<double>(GatedDeltaRuleAttrs::kGroup *
                                                     std::max<int64_t>(1, in[kSlots].dim(0).bind(symbols)));
  return {flops, traffic_bytes(in.first(kState), out.first(1), symbols) + states * (1 + std::min(1.0, groups))};
}

std::vector<Workload> GatedDeltaRule::workloads() {
  struct Shape {
    std::string_view model;
    int64_t key_heads, value_heads, key_dim, value_dim;
    bool channel_decay;
    DType dtype;
  };
  constexpr Shape kShapes[] = {{"tiny", 2, 4, 12, 20, false, DType::f32},
                               {"qwen3-next-80b-a3b", 16, 32, 128, 128, false, DType::bf16},
                               {"kimi-linear-48b-a3b", 32, 32, 128, 128, true, DType::bf16}};
  std::vector<Workload> rows;
  std::vector<StepShape> steps(step_shapes().begin(), step_shapes().end());
  steps.push_back({"prefill-2048", 2048, 1, 2048});
  for (const Shape& shape : kShapes)
    for (const StepShape& step : steps) {
      const kernels::GatedDeltaRuleAttrs attrs{.key_heads = shape.key_heads,
                                               .value_heads = shape.value_heads,
                                               .key_dim = shape.key_dim,
                                               .value_dim = shape.value_dim,
                                               .channel_decay = shape.channel_decay,
                                               .cached = true};
      const TensorType q(shape.dtype, {Symbol::tokens, shape.key_heads, shape.key_dim});
      rows.push_back({workload_name(shape.model, step, "gated delta rule"),
                      std::make_shared<GatedDeltaRule>(attrs),
                      {q, q, TensorType(shape.dtype, {Symbol::tokens, shape.value_heads, shape.value_dim}),
                       TensorType(shape.dtype, {Symbol::tokens, attrs.decays()}),
                       TensorType(shape.dtype, {Symbol::tokens, shape.value_heads}),
                       TensorType(DType::f32, {shape.value_heads}), TensorType(DType::f32, {attrs.decays()}),
                       TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
                       TensorType(DType::f32, {step.sequences, shape.value_heads, attrs.state_floats()})},
                      symbols_of(step)});
    }
  return rows;
}

}  // namespace eadem::ops
