// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/rope.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::RopeStyle;

RopeTable::RopeTable(const kernels::RopeTableAttrs& attrs) : attrs_(attrs) {
  if (!std::isfinite(attrs.scale))
    throw InvalidArgument("rope_table: scale is {}; expected a finite number", attrs.scale);
  if (attrs.stride < 1) throw InvalidArgument("rope_table: stride is {}; expected a positive number", attrs.stride);
}

std::vector<Port> RopeTable::inputs() const {
  return {{"positions", Port::Role::index}, {"inv_freq", Port::Role::constant}};
}
std::vector<Port> RopeTable::outputs() const { return {{"table", Port::Role::constant}}; }
std::string RopeTable::attrs_text() const {
  return fmt::format("scale={}{}", attrs_.scale, attrs_.stride == 1 ? "" : fmt::format(" stride={}", attrs_.stride));
}

std::vector<TensorType> RopeTable::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "positions", in[0], 1);
  expect_dtype(name(), "positions", in[0], kI32);
  expect_rank(name(), "inv_freq", in[1], 1);
  expect_dtype(name(), "inv_freq", in[1], kF32);
  if (!in[1].dim(0).is_fixed())
    throw InvalidArgument("rope_table: 'inv_freq' is {}; expected a fixed extent", to_string(in[1]));
  return {TensorType(DType::f32, {in[0].dim(0), 2 * in[1].fixed(0)})};
}

std::vector<Sharding> RopeTable::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "positions", in[0], "every rank makes the whole table");
  expect_replicated(name(), "inv_freq", in[1], "every rank makes the whole table");
  return {Sharding::replicated()};
}

Cost RopeTable::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) const {
  // A sine or cosine with its reduction in double counts as 20.
  return {20 * static_cast<double>(out[0].num_elements(symbols)), traffic_bytes(*this, pass, in, out, symbols)};
}

void RopeTable::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const size_t tokens = static_cast<size_t>(in[0].shape[0]), half = static_cast<size_t>(in[1].shape[0]);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t i = 0; i < half; ++i) {
      const double rest = std::fmod(in[0].data[t], static_cast<double>(attrs_.stride));
      const double angle = (in[0].data[t] - rest) * in[1].data[i];
      out[0].data[t * 2 * half + i] = static_cast<double>(attrs_.scale) * std::cos(angle);
      out[0].data[t * 2 * half + half + i] = static_cast<double>(attrs_.scale) * std::sin(angle);
    }
}

std::vector<Workload> RopeTable::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "rope_table"),
                      std::make_shared<RopeTable>(kernels::RopeTableAttrs{}),
                      {TensorType(DType::i32, {Symbol::tokens}), TensorType(DType::f32, {model.head_dim / 2})},
                      symbols_of(step)});
  return rows;
}

Rope::Rope(const kernels::RopeAttrs& attrs) : attrs_(attrs) {
  if (attrs.rotary_dim <= 0 || attrs.rotary_dim % 2 != 0)
    throw InvalidArgument("rope: rotary_dim is {}; expected a positive even number", attrs.rotary_dim);
}

std::vector<Port> Rope::inputs() const { return {{"x"}, {"table", Port::Role::constant}}; }
std::vector<Port> Rope::outputs() const { return {{"y"}}; }
std::string Rope::attrs_text() const {
  return fmt::format("{} rotary_dim={}{}", attrs_.style == RopeStyle::rotate_half ? "rotate_half" : "interleaved",
                     attrs_.rotary_dim, attrs_.last ? " last" : "");
}

std::vector<TensorType> Rope::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 3);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  if (!in[0].dim(2).is_fixed() || in[0].fixed(2) < attrs_.rotary_dim)
    throw InvalidArgument("rope: 'x' is {}; expected heads of at least rotary_dim {} elements", to_string(in[0]),
                          attrs_.rotary_dim);
  expect_rank(name(), "table", in[1], 2);
  expect_dtype(name(), "table", in[1], kF32);
  expect_dim(name(), "table", in[1], 0, in[0].dim(0), "tokens of 'x'");
  expect_dim(name(), "table", in[1], 1, Dim(attrs_.rotary_dim), "attribute rotary_dim");
  return {plain_type(in[0].dtype, in[0].dims())};
}

std::vector<Sharding> Rope::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "table", in[1], "every rank rotates every token");
  const Sharding& x = in[0].sharding;
  if (!(x == Sharding::replicated()) && !(x == Sharding::along(1)))
    throw InvalidArgument("rope: 'x' is {}; expected replicated or sharded(1), its heads", to_string(in[0]));
  return {x};
}

Cost Rope::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                const SymbolValues& symbols) const {
  const Shape x = in[0].bind(symbols);
  return {3.0 * static_cast<double>(x[0] * x[1] * attrs_.rotary_dim), traffic_bytes(*this, pass, in, out, symbols)};
}

void Rope::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const bool backward = pass == Pass::backward;
  const RefTensor &x = backward ? in[1] : in[0], &table = backward ? in[0] : in[1];
  if (out[0].data.empty()) return;
  const size_t heads = static_cast<size_t>(x.shape[1]), head_dim = static_cast<size_t>(x.shape[2]),
               rotary = static_cast<size_t>(attrs_.rotary_dim), half = rotary / 2;
  for (size_t t = 0; t < static_cast<size_t>(x.shape[0]); ++t)
    for (size_t h = 0; h < heads; ++h) {
      const size_t head = (t * heads + h) * head_dim, first_rotated = attrs_.last ? head_dim - rotary : 0;
      std::copy_n(&x.data[head], head_dim, &out[0].data[head]);
      const double* from = &x.data[head + first_rotated];
      double* to = &out[0].data[head + first_rotated];
      for (size_t i = 0; i < half; ++i) {
        const bool adjacent = attrs_.style == RopeStyle::interleaved;
        const size_t first = adjacent ? 2 * i : i, second = adjacent ? 2 * i + 1 : i + half;
        const double cos = table.data[t * rotary + i];
        const double sin = backward ? -table.data[t * rotary + half + i] : table.data[t * rotary + half + i];
        to[first] = from[first] * cos - from[second] * sin;
        to[second] = from[second] * cos + from[first] * sin;
      }
    }
}

std::vector<Workload> Rope::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "rope q"),
                      std::make_shared<Rope>(kernels::RopeAttrs{RopeStyle::rotate_half, model.head_dim}),
                      {TensorType(model.dtype, {Symbol::tokens, model.heads, model.head_dim}),
                       TensorType(DType::f32, {Symbol::tokens, model.head_dim})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
