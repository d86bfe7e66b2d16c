// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/recurrent/short_convolution.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"
#include "eadem/ops/recurrent/sequence_ports.h"

namespace eadem::ops {

ShortConvolution::ShortConvolution(const kernels::ShortConvolutionAttrs& attrs) : attrs_(attrs) {
  if (attrs.taps < 2 || attrs.taps > kernels::kMaxTaps)
    throw InvalidArgument("short_convolution: taps is {}; expected 2 to {}", attrs.taps, kernels::kMaxTaps);
}

std::vector<Port> ShortConvolution::inputs() const {
  std::vector<Port> ports = {{"x"},
                             {"weight", Port::Role::parameter},
                             {"bias", Port::Role::parameter, /*optional=*/true},
                             {"query_start", Port::Role::index}};
  if (attrs_.cached) {
    ports.push_back({"state_slots", Port::Role::index});
    ports.push_back({"state", Port::Role::state});
  }
  return ports;
}

std::vector<Port> ShortConvolution::outputs() const {
  if (!attrs_.cached) return {{"y"}};
  return {{"y"}, {"state", Port::Role::state}};
}

std::string ShortConvolution::attrs_text() const {
  return fmt::format("taps={}{}{}", attrs_.taps, attrs_.silu ? " silu" : "", attrs_.cached ? " cached" : "");
}

std::vector<TensorType> ShortConvolution::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[kX], 2);
  expect_dtype(name(), "x", in[kX], kActivations);
  expect_plain(name(), "x", in[kX]);
  expect_rank(name(), "weight", in[kWeight], 2);
  expect_dtype(name(), "weight", in[kWeight], kF32);
  expect_plain(name(), "weight", in[kWeight]);
  expect_dim(name(), "weight", in[kWeight], 0, Dim(attrs_.taps), "attribute taps");
  expect_dim(name(), "weight", in[kWeight], 1, in[kX].dim(1), "channels of 'x'");
  if (!kernels::is_unconnected(in[kBias])) {
    expect_rank(name(), "bias", in[kBias], 1);
    expect_dtype(name(), "bias", in[kBias], kF32);
    expect_dim(name(), "bias", in[kBias], 0, in[kX].dim(1), "channels of 'x'");
  }
  expect_query_start(name(), in[kQueryStart]);
  const TensorType y = plain_type(in[kX].dtype, in[kX].dims());
  if (!attrs_.cached) return {y};
  const Dim row[] = {attrs_.taps - 1, in[kX].dim(1)};
  expect_sequence_state(name(), in[kQueryStart], in[kSlots], in[kState], row);
  return {y, plain_type(DType::f32, in[kState].dims())};
}

DType ShortConvolution::wanted_dtype(std::span<const TensorType> in, int port) const {
  const DType own = in[static_cast<size_t>(port)].dtype;
  return port == kX ? (own == DType::bf16 ? own : DType::f32) : own;
}

std::vector<Sharding> ShortConvolution::infer_sharding(std::span<const TensorType> in) const {
  const bool divided = in[kX].sharding == Sharding::along(1);
  if (!divided && !(in[kX].sharding == Sharding::replicated()))
    throw InvalidArgument("short_convolution: 'x' is {}; expected replicated or sharded(1), its channels",
                          to_string(in[kX]));
  const auto like_x = [&](int port, int axis) {
    const TensorType& type = in[static_cast<size_t>(port)];
    if (!(type.sharding == (divided ? Sharding::along(axis) : Sharding::replicated())))
      throw InvalidArgument("short_convolution: '{}' is {} but 'x' is {}; expected the channels divided alike",
                            inputs()[static_cast<size_t>(port)].name, to_string(type), to_string(in[kX]));
  };
  like_x(kWeight, 1);
  if (!kernels::is_unconnected(in[kBias])) like_x(kBias, 0);
  if (!attrs_.cached) return {in[kX].sharding};
  like_x(kState, 2);
  return {in[kX].sharding, in[kState].sharding};
}

std::vector<Saved> ShortConvolution::saved() const {
  using enum Saved::Kind;
  return {{input, kX}, {input, kWeight}, {input, kBias}, {input, kQueryStart}};
}

Cost ShortConvolution::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                            const SymbolValues& symbols) const {
  const double elements = static_cast<double>(in[kX].num_elements(symbols)), taps = static_cast<double>(attrs_.taps);
  // Backward: z again, then a product with x and one with the weight for each tap.
  const double flops =
      elements * (pass == Pass::backward ? 6 * taps + (attrs_.silu ? 40 : 0) : 2 * taps + (attrs_.silu ? 20 : 0));
  if (!attrs_.cached) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  return {flops,
          traffic_bytes(in.first(kState), out.first(1), symbols) + state_traffic(in[kSlots], in[kState], symbols)};
}

namespace {

double silu_gate(double x) { return 1 / (1 + std::exp(-x)); }

// Row `i` of x, where those before the first token are negative: -1 is the newest that the state has. Null: zeros.
const double* convolved_row(const RefTensor& x, const RefTensor* state, const SequenceRange& sequence, int64_t i) {
  const int64_t channels = x.shape[1];
  if (i >= 0) return &x.data[static_cast<size_t>((sequence.begin + i) * channels)];
  if (state == nullptr || sequence.slot < 0) return nullptr;
  const int64_t kept = state->shape[1];
  return kept + i < 0 ? nullptr : &state->data[static_cast<size_t>((sequence.slot * kept + kept + i) * channels)];
}

// z[t, c] before the activation.
double convolved(std::span<const RefTensor> in, const RefTensor* state, const SequenceRange& sequence, int64_t i,
                 size_t c) {
  const RefTensor &weight = in[1], &bias = in[2];
  const int64_t taps = weight.shape[0];
  double z = bias.data.empty() ? 0 : bias.data[c];
  for (int64_t j = 0; j < taps; ++j)
    if (const double* row = convolved_row(in[0], state, sequence, i - (taps - 1) + j); row != nullptr)
      z += weight.data[static_cast<size_t>(j * weight.shape[1]) + c] * row[c];
  return z;
}

}  // namespace

void ShortConvolution::backward_reference(std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &x = in[kX], &weight = in[kWeight], &dy = in[4];
  const auto channels = static_cast<size_t>(x.shape[1]);
  if (!out[0].data.empty()) std::fill(out[0].data.begin(), out[0].data.end(), 0.0);
  for (const SequenceRange& sequence : sequences_of(in[kQueryStart], nullptr))
    for (int64_t i = 0; i < sequence.end - sequence.begin; ++i)
      for (size_t c = 0; c < channels; ++c) {
        const double z = convolved(in, nullptr, sequence, i, c), s = silu_gate(z);
        const double slope = attrs_.silu ? s * (1 + z * (1 - s)) : 1;
        const double dz = dy.data[static_cast<size_t>(sequence.begin + i) * channels + c] * slope;
        if (!out[2].data.empty()) out[2].data[c] += dz;
        for (int64_t j = 0; j < attrs_.taps; ++j) {
          const int64_t from = i - (attrs_.taps - 1) + j;
          if (from < 0) continue;
          const auto element = static_cast<size_t>(sequence.begin + from) * channels + c;
          const auto tap = static_cast<size_t>(j) * channels + c;
          if (!out[0].data.empty()) out[0].data[element] += weight.data[tap] * dz;
          if (!out[1].data.empty()) out[1].data[tap] += x.data[element] * dz;
        }
      }
}

void ShortConvolution::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  if (pass == Pass::backward) return backward_reference(in, out);
  const auto channels = static_cast<size_t>(in[kX].shape[1]);
  const RefTensor* state = attrs_.cached ? &in[kState] : nullptr;
  for (const SequenceRange& sequence : sequences_of(in[kQueryStart], attrs_.cached ? &in[kSlots] : nullptr)) {
    const int64_t tokens = sequence.end - sequence.begin, kept = attrs_.taps - 1;
    for (int64_t i = 0; i < tokens; ++i)
      for (size_t c = 0; c < channels; ++c) {
        const double z = convolved(in, state, sequence, i, c);
        out[0].data[static_cast<size_t>(sequence.begin + i) * channels + c] = attrs_.silu ? z * silu_gate(z) : z;
      }
    for (int64_t r = 0; r < kept && sequence.slot >= 0; ++r)
      std::copy_n(convolved_row(in[kX], state, sequence, tokens - kept + r), channels,
                  &out[1].data[static_cast<size_t>(sequence.slot * kept + r) * channels]);
  }
}

std::vector<Workload> ShortConvolution::workloads() {
  struct Shape {
    std::string_view model;
    int64_t channels, taps;
    bool bias;
    DType dtype;
  };
  constexpr Shape kShapes[] = {{"tiny", 44, 4, true, DType::f32},
                               {"qwen3-next-80b-a3b", 8192, 4, false, DType::bf16},
                               {"nemotron-nano-9b-v2", 12288, 4, true, DType::bf16}};
  std::vector<Workload> rows;
  for (const Shape& shape : kShapes)
    for (const StepShape& step : step_shapes()) {
      const TensorType weight(DType::f32, {shape.taps, shape.channels});
      rows.push_back({workload_name(shape.model, step, "short convolution"),
                      std::make_shared<ShortConvolution>(kernels::ShortConvolutionAttrs{shape.taps, true, true}),
                      {TensorType(shape.dtype, {Symbol::tokens, shape.channels}), weight,
                       shape.bias ? TensorType(DType::f32, {shape.channels}) : kernels::unconnected_port(),
                       TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
                       TensorType(DType::f32, {step.sequences, shape.taps - 1, shape.channels})},
                      symbols_of(step)});
    }
  return rows;
}

}  // namespace eadem::ops
