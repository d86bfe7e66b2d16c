// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/pooled/pool_keys.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

PoolKeys::PoolKeys(const kernels::PoolKeysAttrs& attrs) : attrs_(attrs) {
  if (attrs.width <= 0 || attrs.stride <= 0)
    throw InvalidArgument("pool_keys: width is {} and stride {}; expected positive numbers", attrs.width, attrs.stride);
  if (attrs.parts != 1 && attrs.parts != 2)
    throw InvalidArgument("pool_keys: parts is {}; expected 1 or 2", attrs.parts);
}

std::vector<Port> PoolKeys::inputs() const {
  const bool cached = attrs_.source == KvSource::cached;
  const Port::Role role = cached ? Port::Role::state : Port::Role::activation;
  std::vector<Port> ports = {{"x", role},
                             {"gate", role},
                             {"position", Port::Role::parameter},
                             {"query_start", Port::Role::index},
                             {"kv_length", Port::Role::index},
                             {"block_table", Port::Role::index, /*optional=*/true}};
  if (cached) ports.push_back({"slots", Port::Role::index});
  return ports;
}

std::string PoolKeys::attrs_text() const {
  return fmt::format("width={} stride={} parts={} {}", attrs_.width, attrs_.stride, attrs_.parts,
                     attrs_.source == KvSource::direct ? "direct" : "cached");
}

std::vector<TensorType> PoolKeys::infer_types(std::span<const TensorType> in) const {
  const bool cached = attrs_.source == KvSource::cached;
  if (!cached) expect_dtype(name(), "x", in[kX], kActivations);
  for (const size_t port : {kX, kGate}) {
    expect_keys(*this, port, in[port], attrs_.source, in[kX].dtype, cached ? Dim() : in[kX].dim(0), 1, attrs_.columns(),
                "attributes width and parts");
    expect_plain(name(), inputs()[port].name, in[port]);
  }
  expect_same_dims(name(), "gate", in[kGate], in[kX], "x");
  expect_rank(name(), "position", in[kPosition], 2);
  expect_dtype(name(), "position", in[kPosition], kF32);
  expect_plain(name(), "position", in[kPosition]);
  expect_dim(name(), "position", in[kPosition], 0, attrs_.stride, "attribute stride");
  expect_dim(name(), "position", in[kPosition], 1, attrs_.columns(), "attributes width and parts");
  expect_sequences(*this, in, kQueryStart, attrs_.source);
  if (!cached) return {TensorType(in[kX].dtype, {in[kX].dim(0), 1, attrs_.width})};
  expect_rank(name(), "slots", in[kSlots], 1);
  expect_dtype(name(), "slots", in[kSlots], kI64);
  return {TensorType(DType::f32, {in[kSlots].dim(0), 1, attrs_.width})};
}

DType PoolKeys::wanted_dtype(std::span<const TensorType> in, int port) const {
  const DType own = in[static_cast<size_t>(port)].dtype;
  if (port == kPosition) return DType::f32;
  const bool direct = attrs_.source == KvSource::direct && (port == kX || port == kGate);
  if (direct) return in[kX].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return own;
}

std::vector<Sharding> PoolKeys::infer_sharding(std::span<const TensorType> in) const {
  const std::vector<Port> ports = inputs();
  for (size_t port = 0; port < in.size(); ++port)
    if (!kernels::is_unconnected(in[port]))
      expect_replicated(name(), ports[port].name, in[port], "every rank has every row");
  return {Sharding::replicated()};
}

std::vector<Saved> PoolKeys::saved() const {
  using enum Saved::Kind;
  return {{input, kX}, {input, kGate}, {input, kPosition}, {input, kQueryStart}, {input, kKvLength}, {output, 0}};
}

Cost PoolKeys::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                    const SymbolValues& symbols) const {
  // For each token and column the sum of the gate and e, a comparison, an exponential (10) and two sums.
  const double tokens = static_cast<double>(out[0].bind(symbols)[0]), columns = static_cast<double>(attrs_.columns());
  const double flops = tokens * columns * (pass == Pass::backward ? 21 : 15);
  if (attrs_.source == KvSource::direct) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  const double sequences = static_cast<double>(std::max<int64_t>(1, in[kKvLength].bind(symbols)[0]));
  const TensorType key(in[kX].dtype, {2, attrs_.columns()});  // and a gate
  const TensorType others[] = {in[kPosition], in[kQueryStart], in[kKvLength], in[kBlockTable], in[kSlots]};
  // A sequence reads its new keys, and those that its first row shares with the step before.
  const double keys = tokens + sequences * static_cast<double>(attrs_.length() - 1);
  return {flops, keys * static_cast<double>(key.size_bytes(symbols)) + traffic_bytes(others, out, symbols)};
}

std::vector<PooledTerm> pooled_terms(const kernels::PoolKeysAttrs& attrs, int64_t last) {
  std::vector<PooledTerm> terms;
  for (int64_t i = 0; i < attrs.length(); ++i)
    if (const int64_t position = last + 1 - attrs.length() + i; position >= 0)
      terms.push_back({position, i / attrs.stride * attrs.width});
  return terms;
}

// With p the softmax: dx = p dz, dgate = p dz (x - z).
void PoolKeys::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const bool cached = attrs_.source == KvSource::cached, backward = pass == Pass::backward;
  const auto width = static_cast<size_t>(attrs_.width), columns = static_cast<size_t>(attrs_.columns());
  for (size_t i = 0; i < out.size(); ++i)
    if (!backward || i < 2) std::fill(out[i].data.begin(), out[i].data.end(), 0.0);
  for (const RefSequence& s : reference_sequences(in, kQueryStart, in[kX], attrs_.source))
    for (int64_t t = s.begin; t < s.end; ++t) {
      if (!attrs_.ends_row(s.position(t)) || (cached && in[kSlots].data[static_cast<size_t>(t)] < 0)) continue;
      const std::vector<PooledTerm> terms = pooled_terms(attrs_, s.position(t));
      for (size_t d = 0; d < width; ++d) {
        const size_t z = static_cast<size_t>(t) * width + d;
        std::vector<double> scores;
        std::vector<size_t> at, places;
        for (const PooledTerm& term : terms) {
          const size_t column = static_cast<size_t>(term.column) + d;
          at.push_back(static_cast<size_t>(s.row(term.position, 0, 1)) * columns + column);
          places.push_back(static_cast<size_t>(term.position % attrs_.stride) * columns + column);
          scores.push_back(in[kGate].data[at.back()] + in[kPosition].data[places.back()]);
        }
        const double largest = *std::max_element(scores.begin(), scores.end());
        double sum = 0;
        for (double& score : scores) sum += score = std::exp(score - largest);
        for (size_t i = 0; i < scores.size(); ++i) {
          const double p = scores[i] / sum;
          if (!backward) {
            out[0].data[z] += p * in[kX].data[at[i]];
            continue;
          }
          const double dz = in[6].data[z], dgate = p * dz * (in[kX].data[at[i]] - in[5].data[z]);
          if (!out[0].data.empty()) out[0].data[at[i]] = p * dz;
          if (!out[1].data.empty()) out[1].data[at[i]] = dgate;
          if (!out[2].data.empty()) out[2].data[places[i]] += dgate;
        }
      }
    }
}

std::vector<Workload> PoolKeys::workloads() {
  struct Row {
    std::string_view model;
    kernels::PoolKeysAttrs attrs;
    StepShape step;
  };
  std::vector<Workload> rows;
  for (const Row& r : {Row{"tiny", {20, 4, 2, KvSource::cached}, {"prefill-16", 16, 1, 16}},
                       Row{"deepseek-v4", {512, 4, 2, KvSource::cached}, {"prefill-512", 512, 1, 4096}},
                       Row{"deepseek-v4", {512, 128, 1, KvSource::cached}, {"prefill-512", 512, 1, 4096}}}) {
    const SymbolValues symbols = symbols_of(r.step);
    const TensorType cache(DType::f32, {symbols[Symbol::max_blocks], 1, kWorkloadBlockSize, r.attrs.columns()});
    rows.push_back(
        {workload_name(r.model, r.step, fmt::format("pool_keys of {}", r.attrs.stride)),
         std::make_shared<PoolKeys>(r.attrs),
         {cache, cache, TensorType(DType::f32, {r.attrs.stride, r.attrs.columns()}),
          TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
          TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks}), TensorType(DType::i64, {Symbol::tokens})},
         symbols});
  }
  return rows;
}

}  // namespace eadem::ops
