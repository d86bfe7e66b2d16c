// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/parallel/virtual_shards.h"

#include <fmt/ranges.h>

#include <numeric>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

namespace {

std::vector<Port> ports_of(const std::vector<std::string>& names) {
  std::vector<Port> ports;
  for (const std::string& name : names) ports.push_back({name});
  return ports;
}

// The shards that 1, 2, 3 and 4 ranks share.
VirtualShards shards_of_four(int64_t columns) { return VirtualShards::of(columns, std::array{2, 4, 3}); }

}  // namespace

// --- cut_columns

CutColumns::CutColumns(const kernels::CutColumnsAttrs& attrs) : attrs_(attrs) {
  if (attrs.widths.size() < 2)
    throw InvalidArgument("cut_columns: {} widths; expected at least two", attrs.widths.size());
  for (size_t i = 0; i < attrs.widths.size(); ++i) {
    if (attrs.widths[i] <= 0)
      throw InvalidArgument("cut_columns: widths[{}] is {}; expected a positive number", i, attrs.widths[i]);
    port_names_.push_back(fmt::format("y{}", i));
  }
}

std::vector<Port> CutColumns::outputs() const { return ports_of(port_names_); }

std::string CutColumns::attrs_text() const { return fmt::format("widths={}", fmt::join(attrs_.widths, ",")); }

std::vector<TensorType> CutColumns::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 2);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  expect_dim(name(), "x", in[0], 1, Dim(std::accumulate(attrs_.widths.begin(), attrs_.widths.end(), int64_t{0})),
             "sum of the widths");
  std::vector<TensorType> result;
  for (const int64_t width : attrs_.widths) result.emplace_back(in[0].dtype, std::array{in[0].dim(0), Dim(width)});
  return result;
}

std::vector<Sharding> CutColumns::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& x = in[0].sharding;
  if (x.kind == Sharding::Kind::partial)
    throw InvalidArgument("cut_columns: 'x' is {}; expected it whole or divided", to_string(x));
  // Where x is divided by columns, the width of the whole does not follow from a rank's part: 0 says unknown.
  return std::vector<Sharding>(attrs_.widths.size(), Sharding{x.kind, x.axis, x.axis == 1 ? 0 : x.whole});
}

Cost CutColumns::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                      const SymbolValues& symbols) const {
  return {0, traffic_bytes(*this, pass, in, out, symbols)};
}

void CutColumns::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const auto rows = static_cast<size_t>(in[0].shape[0]), columns = static_cast<size_t>(in[0].shape[1]);
  size_t begin = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const auto width = static_cast<size_t>(attrs_.widths[i]);
    for (size_t k = 0; k < rows * width && !out[i].data.empty(); ++k)
      out[i].data[k] = in[0].data[k / width * columns + begin + k % width];
    begin += width;
  }
}

std::vector<Workload> CutColumns::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes()) {
      const VirtualShards shards = shards_of_four(model.ffn);
      kernels::CutColumnsAttrs attrs;
      for (int shard = 0; shard < shards.size(); ++shard) attrs.widths.push_back(shards.range(shard).size);
      rows.push_back({workload_name(model, step, "cut_columns of down_proj"),
                      std::make_shared<CutColumns>(attrs),
                      {TensorType(model.dtype, {Symbol::tokens, model.ffn})},
                      symbols_of(step)});
    }
  return rows;
}

// --- shard_sum

ShardSum::ShardSum(const kernels::ShardSumAttrs& attrs)
    : Collective("shard_sum", {.over = attrs.over, .ranks = attrs.ranks(), .rank = attrs.rank}), sum_(attrs) {
  if (attrs.rank < 0 || attrs.rank >= attrs.ranks())
    throw InvalidArgument("shard_sum: rank {} of {}", attrs.rank, attrs.ranks());
  int next = 0;
  for (int rank = 0; rank < attrs.ranks(); ++rank) {
    const ShardRange& own = attrs.owners[static_cast<size_t>(rank)];
    if (own.begin != next || own.end <= own.begin)
      throw InvalidArgument("shard_sum: rank {} owns the shards from {} to {}; expected some from {} on", rank,
                            own.begin, own.end, next);
    next = own.end;
  }
  if (next != attrs.tree.num_shards())
    throw InvalidArgument("shard_sum: the ranks own {} shards of {}", next, attrs.tree.num_shards());
  for (int i = 0; i < attrs.own().size(); ++i) port_names_.push_back(fmt::format("partial{}", i));
}

std::vector<Port> ShardSum::inputs() const { return ports_of(port_names_); }

std::string ShardSum::attrs_text() const {
  return fmt::format("over={} shards={}..{} of {} out_dtype={}", mesh_axis_name(sum_.over), sum_.own().begin,
                     sum_.own().end, sum_.tree.num_shards(), dtype_name(sum_.out_dtype));
}

std::vector<TensorType> ShardSum::infer_types(std::span<const TensorType> in) const {
  for (size_t i = 0; i < in.size(); ++i) {
    expect_rank(name(), port_names_[i], in[i], 2);
    expect_dtype(name(), port_names_[i], in[i], kF32);
    expect_plain(name(), port_names_[i], in[i]);
    expect_same_dims(name(), port_names_[i], in[i], in[0], port_names_[0]);
  }
  return {plain_type(sum_.out_dtype, in[0].dims())};
}

std::vector<Sharding> ShardSum::infer_sharding(std::span<const TensorType> in) const {
  for (size_t i = 0; i < in.size(); ++i)
    if (const Sharding wanted = sum_.ranks() > 1 ? Sharding::partial() : Sharding::replicated();
        !(in[i].sharding == wanted))
      throw InvalidArgument("shard_sum: '{}' is {}; expected {} on {} ranks", port_names_[i], to_string(in[i].sharding),
                            to_string(wanted), sum_.ranks());
  return {Sharding::replicated()};
}

Cost ShardSum::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                    const SymbolValues& symbols) const {
  if (pass == Pass::backward) return {};
  return {static_cast<double>(sum_.tree.num_shards() - 1) * static_cast<double>(out[0].num_elements(symbols)),
          traffic_bytes(in, out, symbols)};
}

void ShardSum::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  for (size_t i = 0; i < out[0].data.size(); ++i) {
    out[0].data[i] = 0;
    for (const RefTensor& partial : in) out[0].data[i] += partial.data[i];
  }
}

double ShardSum::wire_bytes(std::span<const TensorType> in, const SymbolValues& symbols) const {
  return static_cast<double>((sum_.ranks() - 1) * sum_.most_sums()) * static_cast<double>(in[0].size_bytes(symbols));
}

std::vector<Workload> ShardSum::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes()) {
      const VirtualShards shards = shards_of_four(model.ffn);
      const kernels::ShardSumAttrs attrs{.owners = {{0, shards.size()}}, .tree = shards.tree};
      rows.push_back({workload_name(model, step, "shard_sum of down_proj"), std::make_shared<ShardSum>(attrs),
                      std::vector<TensorType>(static_cast<size_t>(shards.size()),
                                              TensorType(DType::f32, {Symbol::tokens, model.hidden})),
                      symbols_of(step)});
    }
  return rows;
}

}  // namespace eadem::ops
