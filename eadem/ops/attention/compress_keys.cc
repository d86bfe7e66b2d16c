// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/compress_keys.h"

#include <algorithm>

#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

void expect_grid(std::string_view op, const kernels::RowGrid& grid) {
  if (grid.stride <= 0 || grid.length <= 0 || grid.length % grid.stride != 0)
    throw InvalidArgument("{}: length is {} and stride is {}; expected a positive multiple of a positive number", op,
                          grid.length, grid.stride);
}

CompressKeys::CompressKeys(const kernels::CompressKeysAttrs& attrs) : attrs_(attrs) {
  if (attrs.heads <= 0 || attrs.width <= 0)
    throw InvalidArgument("compress_keys: heads is {} and width {}; expected positive numbers", attrs.heads,
                          attrs.width);
  expect_grid(name(), attrs.grid);
}

std::vector<Port> CompressKeys::inputs() const {
  const bool cached = attrs_.source == KvSource::cached;
  std::vector<Port> ports = {{"x", cached ? Port::Role::state : Port::Role::activation},
                             {"weight", Port::Role::parameter, /*optional=*/true},
                             {"position", Port::Role::parameter, /*optional=*/true},
                             {"query_start", Port::Role::index},
                             {"kv_length", Port::Role::index},
                             {"block_table", Port::Role::index, /*optional=*/true}};
  if (cached) {
    ports.push_back({"slots", Port::Role::index});
    ports.push_back({"rows", Port::Role::state});
  }
  return ports;
}

std::vector<Port> CompressKeys::outputs() const {
  if (attrs_.source == KvSource::cached) return {{"rows", Port::Role::state}};
  return {{"z"}};
}

std::string CompressKeys::attrs_text() const {
  return fmt::format("heads={} width={} length={} stride={} {}", attrs_.heads, attrs_.width, attrs_.grid.length,
                     attrs_.grid.stride, attrs_.source == KvSource::direct ? "direct" : "cached");
}

std::vector<TensorType> CompressKeys::infer_types(std::span<const TensorType> in) const {
  const bool cached = attrs_.source == KvSource::cached;
  if (!cached) expect_dtype(name(), "x", in[kX], kActivations);
  expect_keys(*this, kX, in[kX], attrs_.source, in[kX].dtype, cached ? Dim() : in[kX].dim(0), attrs_.heads,
              attrs_.width, "attribute width");
  const auto expect_parameter = [&](int port, std::string_view label, std::initializer_list<Dim> dims) {
    const TensorType& type = in[static_cast<size_t>(port)];
    if (kernels::is_unconnected(type)) return;
    expect_rank(name(), label, type, static_cast<int>(dims.size()));
    expect_dtype(name(), label, type, kF32);
    expect_plain(name(), label, type);
    int axis = 0;
    for (const Dim& dim : dims) expect_dim(name(), label, type, axis++, dim, "attributes heads, length and width");
  };
  expect_parameter(kWeight, "weight", {attrs_.heads, attrs_.grid.length});
  expect_parameter(kPosition, "position", {attrs_.heads, attrs_.grid.length, attrs_.width});
  expect_sequences(*this, in, kQueryStart, attrs_.source);
  if (!cached) return {plain_type(in[kX].dtype, in[kX].dims())};
  expect_rank(name(), "slots", in[kSlots], 1);
  expect_dtype(name(), "slots", in[kSlots], kI64);
  const TensorType& rows = in[kRows];
  expect_rank(name(), "rows", rows, 4);
  expect_dtype(name(), "rows", rows, kFloats);
  expect_plain(name(), "rows", rows);
  expect_dim(name(), "rows", rows, 1, Dim(attrs_.heads), "attribute heads");
  expect_dim(name(), "rows", rows, 2, Dim((in[kX].fixed(2) + attrs_.grid.stride - 1) / attrs_.grid.stride),
             "a row for each stride of a block of 'x'");
  expect_dim(name(), "rows", rows, 3, Dim(attrs_.width), "attribute width");
  return {plain_type(rows.dtype, rows.dims())};
}

DType CompressKeys::wanted_dtype(std::span<const TensorType> in, int port) const {
  const DType own = in[static_cast<size_t>(port)].dtype;
  if (port == kX && attrs_.source == KvSource::direct) return own == DType::bf16 ? DType::bf16 : DType::f32;
  return port == kWeight || port == kPosition ? DType::f32 : own;
}

std::vector<Sharding> CompressKeys::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& x = in[kX].sharding;
  if (!(x == Sharding::replicated()) && !(x == Sharding::along(1)))
    throw InvalidArgument("compress_keys: 'x' is {}; expected replicated or sharded(1), its heads", to_string(in[kX]));
  const Sharding parameter = x == Sharding::along(1) ? Sharding::along(0) : x;
  const auto expect = [&](int port, const Sharding& wanted) {
    const TensorType& type = in[static_cast<size_t>(port)];
    if (!kernels::is_unconnected(type) && !(type.sharding == wanted))
      throw InvalidArgument("compress_keys: '{}' is {} but 'x' is {}; expected both divided by heads",
                            inputs()[static_cast<size_t>(port)].name, to_string(type), to_string(in[kX]));
  };
  expect(kWeight, parameter);
  expect(kPosition, parameter);
  for (const int port : {kQueryStart, kKvLength, kBlockTable})
    expect_replicated(name(), inputs()[static_cast<size_t>(port)].name, in[static_cast<size_t>(port)],
                      "every rank sees every sequence");
  if (attrs_.source == KvSource::cached) {
    expect_replicated(name(), "slots", in[kSlots], "every rank sees every token");
    expect(kRows, x);
  }
  return {x};
}

std::vector<Saved> CompressKeys::saved() const {
  using enum Saved::Kind;
  return {{input, kX}, {input, kWeight}, {input, kPosition}, {input, kQueryStart}, {input, kKvLength}};
}

Cost CompressKeys::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                        const SymbolValues& symbols) const {
  const auto [length, stride] = attrs_.grid;
  const bool cached = attrs_.source == KvSource::cached;
  const int64_t tokens = cached ? in[kSlots].bind(symbols)[0] : in[kX].bind(symbols)[0];
  const double rows = static_cast<double>(tokens) / static_cast<double>(stride);
  const double elements = rows * static_cast<double>(attrs_.heads * attrs_.width * length);
  const double flops = (pass == Pass::backward ? 6 : 3) * elements;
  if (!cached) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  const int64_t sequences = std::max<int64_t>(1, in[kKvLength].bind(symbols)[0]);
  const TensorType key(in[kX].dtype, {attrs_.heads, attrs_.width}, in[kX].encoding), row(in[kRows].dtype, key.dims());
  const TensorType others[] = {in[kWeight], in[kPosition], in[kQueryStart], in[kKvLength], in[kBlockTable], in[kSlots]};
  // A sequence reads its new keys, and before them those that its first row shares.
  const double keys = static_cast<double>(tokens + sequences * (length - stride));
  return {flops, keys * static_cast<double>(key.size_bytes(symbols)) +
                     rows * static_cast<double>(row.size_bytes(symbols)) + traffic_bytes(others, {}, symbols)};
}

void CompressKeys::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto [length, stride] = attrs_.grid;
  const int64_t heads = attrs_.heads;
  const bool cached = attrs_.source == KvSource::cached, backward = pass == Pass::backward;
  const auto width = static_cast<size_t>(attrs_.width);
  const RefTensor &weight = in[kWeight], &position = in[kPosition];
  if (!cached) std::fill(out[0].data.begin(), out[0].data.end(), 0.0);  // z or dx
  for (const RefSequence& s : reference_sequences(in, kQueryStart, in[kX], attrs_.source))
    for (int64_t t = s.begin; t < s.end; ++t) {
      if (!attrs_.grid.ends_row(s.position(t))) continue;
      const int64_t start = s.position(t) + 1 - length;
      for (int64_t g = 0; g < heads; ++g) {
        auto z_row = static_cast<size_t>(t * heads + g);  // of z, or of dz
        if (cached) {
          const auto slot = static_cast<int64_t>(in[kSlots].data[static_cast<size_t>(t)]);
          if (slot < 0) continue;
          const int64_t block_size = in[kX].shape[2];
          z_row =
              static_cast<size_t>((slot / block_size * heads + g) * in[kRows].shape[2] + slot % block_size / stride);
          std::fill_n(out[0].data.begin() + static_cast<int64_t>(z_row * width), width, 0.0);
        }
        for (int64_t i = 0; i < length; ++i) {
          const auto place = static_cast<size_t>(g * length + i);
          const double w = weight.data.empty() ? 1.0 / static_cast<double>(length) : weight.data[place];
          const auto x_row = static_cast<size_t>(s.row(start + i, g, heads));
          for (size_t d = 0; d < width; ++d) {
            const double e = position.data.empty() ? 0.0 : position.data[place * width + d];
            const double sum = in[kX].data[x_row * width + d] + e;
            if (!backward) {
              out[0].data[z_row * width + d] += w * sum;
              continue;
            }
            const double dz = in[5].data[z_row * width + d];
            if (!out[0].data.empty()) out[0].data[x_row * width + d] += w * dz;
            if (!out[1].data.empty()) out[1].data[place] += dz * sum;
            if (!out[2].data.empty()) out[2].data[place * width + d] += w * dz;
          }
        }
      }
    }
}

std::vector<Workload> CompressKeys::workloads() {
  struct Row {
    std::string_view model;
    kernels::CompressKeysAttrs attrs;
    DType dtype;
    StepShape step;
  };
  std::vector<Workload> rows;
  for (const Row& r :
       {Row{"tiny", {2, 20, {4, 2}, KvSource::cached}, DType::f32, {"prefill-16", 16, 1, 16}},
        Row{"nsa-27b", {4, 192, {32, 16}, KvSource::cached}, DType::bf16, {"prefill-512", 512, 1, 4096}}}) {
    const SymbolValues symbols = symbols_of(r.step);
    const auto& [heads, width, grid, source] = r.attrs;
    rows.push_back(
        {workload_name(r.model, r.step, "compress_keys"),
         std::make_shared<CompressKeys>(r.attrs),
         {TensorType(r.dtype, {symbols[Symbol::max_blocks], heads, kWorkloadBlockSize, width}),
          TensorType(DType::f32, {heads, grid.length}), TensorType(DType::f32, {heads, grid.length, width}),
          TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
          TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks}), TensorType(DType::i64, {Symbol::tokens}),
          TensorType(r.dtype, {symbols[Symbol::max_blocks], heads, kWorkloadBlockSize / grid.stride, width})},
         symbols});
  }
  return rows;
}

}  // namespace eadem::ops
