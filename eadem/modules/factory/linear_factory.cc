// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/factory/linear_factory.h"

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/core/function_ref.h"
#include "eadem/ops/attention/head_linear.h"
#include "eadem/ops/elementwise/add_bias.h"
#include "eadem/ops/experts/grouped_linear.h"
#include "eadem/ops/linear.h"
#include "eadem/ops/parallel/virtual_shards.h"

namespace eadem::modules {

namespace {

// A rank's part of a weight [out, in].
struct WeightPart {
  PartRange rows, columns;
  bool divides_rows, divides_columns;
};

WeightPart part_of_rank(const LinearRequest& request, int ranks, int rank) {
  WeightPart part{{0, request.out}, {0, request.in}, false, false};
  if (request.parallel == Parallel::column) part.rows = part_of(request.out, ranks, rank);
  if (request.parallel == Parallel::row) part.columns = part_of(request.in, ranks, rank);
  part.divides_rows = part.rows.size != request.out;
  part.divides_columns = part.columns.size != request.in;
  return part;
}

WeightPart part_of_rank(const BuildContext& context, const LinearRequest& request) {
  return part_of_rank(request, context.num_ranks, context.rank);
}

bool has_whole(const PartRange& part, int64_t block) { return part.begin % block == 0 && part.size % block == 0; }

// The reason why a rank cannot hold its part of a weight in each encoding; empty if it can.
std::string refusal_of(const BlockFormat& format, const WeightPart& part) {
  if (has_whole(part.columns, format.block_size)) return "";
  return fmt::format("a rank's rows of {} values are not whole blocks of {}", part.columns.size, format.block_size);
}

std::string refusal_of(const GroupEncoding& encoding, const WeightPart& part) {
  if (part.divides_columns && encoding.format().has_order)
    return "columns have an order of their own, which cannot be divided between ranks";
  if (has_whole(part.columns, encoding.group_columns(part.columns.size))) return "";
  return fmt::format("a rank's rows of {} values are not whole groups of {}", part.columns.size,
                     encoding.format().group_size);
}

std::string refusal_of(const Fp8Format& format, const WeightPart& part) {
  if (!(part.divides_rows && format.block_rows > 1 && !has_whole(part.rows, format.block_rows)) &&
      !(part.divides_columns && format.block_columns > 1 && !has_whole(part.columns, format.block_columns)))
    return "";
  return fmt::format("a rank's {} x {} weights are not whole blocks of {}", part.rows.size, part.columns.size,
                     format.block_rows);
}

std::string refusal_of(const WeightType& weights, const WeightPart& part) {
  if (const BlockEncoding* blocks = BlockEncoding::of(weights.encoding)) return refusal_of(blocks->format(), part);
  if (const GroupEncoding* groups = GroupEncoding::of(weights.encoding)) return refusal_of(*groups, part);
  if (const Fp8Encoding* floats = Fp8Encoding::of(weights.encoding)) return refusal_of(floats->format(), part);
  const bool plain =
      weights == WeightType(DType::f32) || weights == WeightType(DType::bf16) || weights == WeightType(DType::f16);
  return plain ? "" : "no product reads such weights";
}

// Returns the weight that products read: the parameter, or a plain parameter rounded as the configuration says.
ValueId rounded_weight(BuildContext& context, const LinearRequest& request, ValueId weight) {
  const Encoding* to = request.hardware->precision.rounded_weights.value;
  if (to == nullptr || context.graph.value(weight).type.encoding != nullptr) return weight;
  if (const Fp8Encoding* floats = Fp8Encoding::of(to))
    if (const std::string refusal = refusal_of(floats->format(), part_of_rank(context, request)); !refusal.empty())
      throw Unsupported("linear {}: weights are rounded to {}: {}", context.graph.scoped_name(request.name), to->name(),
                        refusal);
  const Graph::Scope scope(context.graph, request.name);
  return context.rounded(weight, to);
}

void refuse_rounding(const BuildContext& context, const LinearRequest& request) {
  if (const Encoding* to = request.hardware->precision.rounded_weights.value)
    throw Unsupported("linear {}: weights of several matrices are not rounded to {}; expected plain products",
                      context.graph.scoped_name(request.name), to->name());
}

// Whether the bits of a layer must not depend on the number of ranks, and would.
bool has_shards(const BuildContext& context, const LinearRequest& request) {
  return context.same_bits_on && (request.parallel == Parallel::row || request.in_heads > 0);
}

// The reason why `ranks` cannot divide the columns of a layer's weight; empty if they can.
std::string refusal_of(const LinearRequest& request, const WeightType& weights, int ranks) {
  // Kernels read integers in steps of 32, and with the option every rank reads what one rank does.
  constexpr int64_t kStep = 32;
  LinearRequest divided = request;
  divided.parallel = Parallel::row;
  for (int rank = 0; rank < ranks; ++rank) {
    const WeightPart part = part_of_rank(divided, ranks, rank);
    if (const std::string refusal = refusal_of(weights, part); !refusal.empty()) return refusal;
    if (GroupEncoding::of(weights.encoding) != nullptr && part.divides_columns && !has_whole(part.columns, kStep))
      return fmt::format("a rank's rows of {} values are not whole steps of {}", part.columns.size, kStep);
  }
  return "";
}

// The virtual shards of a layer: between the borders of all numbers of ranks that can divide it.
VirtualShards shards_of(const BuildContext& context, const LinearRequest& request, const WeightType& weights) {
  std::vector<int> counts;
  for (const int ranks : *context.same_bits_on)
    if ((request.in_heads > 0 ? request.in_heads % ranks == 0 : request.in >= ranks) &&
        refusal_of(request, weights, ranks).empty())
      counts.push_back(ranks);
  return VirtualShards::of(request.in, counts);
}

// Adds `product` of each virtual shard of this rank, with x cut to its columns, and the sum of those of all ranks.
// `product` is given the columns of the shard, the place of that within the rank's part, and makes f32.
ValueId build_shards(BuildContext& context, const LinearRequest& request, const VirtualShards& shards, ValueId x,
                     FunctionRef<ValueId(ValueId x, PartRange columns, int64_t begin)> product) {
  Graph& graph = context.graph;
  const Graph::Scope scope(graph, request.name);
  const PartRange part = part_of_rank(context, request).columns;
  kernels::ShardSumAttrs sum{.tree = shards.tree, .out_dtype = request.hardware->precision.activations.value};
  if (request.parallel == Parallel::row) {
    sum.rank = context.rank;
    for (int rank = 0; rank < context.num_ranks; ++rank)
      sum.owners.push_back(shards.within(part_of(request.in, context.num_ranks, rank)));
  } else {
    sum.owners.push_back({0, shards.size()});
  }
  const ShardRange own = sum.own();
  std::vector<ValueId> cut = {x};
  if (own.size() > 1) {
    kernels::CutColumnsAttrs widths;
    for (int shard = own.begin; shard < own.end; ++shard) widths.widths.push_back(shards.range(shard).size);
    cut = graph.add(std::make_shared<ops::CutColumns>(widths), {x});
  }
  std::vector<ValueId> partials;
  for (int shard = own.begin; shard < own.end; ++shard) {
    const PartRange columns = shards.range(shard);
    partials.push_back(product(cut[static_cast<size_t>(shard - own.begin)], columns, columns.begin - part.begin));
  }
  return graph.add1(std::make_shared<ops::ShardSum>(sum), std::move(partials));
}

// A virtual shard's columns of a weight whose parts have this type but for them.
ValueId add_columns(BuildContext& context, const LinearRequest& request, TensorType type, PartRange columns,
                    int64_t begin, bool has_experts) {
  const WeightPart part = part_of_rank(context, request);
  type.dim(-1) = columns.size;
  if (part.divides_columns) type.sharding = Sharding::along(type.rank() - 1, request.in);
  const std::string name = context.graph.scoped_name("weight");
  return context.graph.add_parameter_columns(
      fmt::format("{}.columns_{}_{}", name, columns.begin, columns.begin + columns.size),
      {.parameter = name, .begin = begin, .of = part.columns.size}, type, has_experts);
}

kernels::LinearAttrs linear_attrs(const LinearRequest& request, bool has_bias, DType out_dtype) {
  return {.has_bias = has_bias, .out_dtype = out_dtype, .matmul_input = request.hardware->precision.matmul_input.value};
}

ValueId build_linear_in_shards(BuildContext& context, const LinearRequest& request, const WeightType& weights,
                               const VirtualShards& shards, ValueId x) {
  Graph& graph = context.graph;
  const TensorType type(weights.dtype, {request.out, request.in}, weights.encoding);
  const auto linear = std::make_shared<ops::Linear>(linear_attrs(request, false, DType::f32));
  const ValueId y = build_shards(context, request, shards, x, [&](ValueId x_part, PartRange columns, int64_t begin) {
    return graph.add1(linear, {x_part, add_columns(context, request, type, columns, begin, false)});
  });
  if (!request.bias) return y;
  const ValueId bias = graph.add_parameter(graph.scoped_name(request.name + ".bias"),
                                           TensorType(request.hardware->precision.activations.value, {request.out}));
  const Graph::Scope scope(graph, request.name);
  return graph.add1(std::make_shared<ops::AddBias>(), {y, bias});
}

ValueId build_linear(BuildContext& context, const LinearRequest& request, const WeightType& weights, ValueId x) {
  Graph& graph = context.graph;
  if (has_shards(context, request))
    if (const VirtualShards shards = shards_of(context, request, weights); shards.size() > 1)
      return build_linear_in_shards(context, request, weights, shards, x);
  const int shard_axis = request.parallel == Parallel::column ? 0 : request.parallel == Parallel::row ? 1 : -1;
  // A row-parallel product is summed over the ranks first: each would add the bias.
  const bool bias_after_sum = request.bias && request.parallel == Parallel::row && context.num_ranks > 1;
  const ValueId weight =
      graph.add_parameter(graph.scoped_name(request.name + ".weight"),
                          TensorType(weights.dtype, {request.out, request.in}, weights.encoding), shard_axis);
  std::vector<ValueId> inputs = {x, rounded_weight(context, request, weight)};
  ValueId bias = pipeline::kNoValue;
  if (request.bias)
    bias = graph.add_parameter(graph.scoped_name(request.name + ".bias"),
                               TensorType(request.hardware->precision.activations.value, {request.out}),
                               request.parallel == Parallel::column ? 0 : -1);
  const bool has_bias = request.bias && !bias_after_sum;
  if (has_bias) inputs.push_back(bias);
  const Graph::Scope scope(graph, request.name);
  const ValueId y = graph.add1(
      std::make_shared<ops::Linear>(linear_attrs(request, has_bias, request.hardware->precision.activations.value)),
      inputs);
  return bias_after_sum ? graph.add1(std::make_shared<ops::AddBias>(), {y, bias}) : y;
}

// The type in which a matrix, or each of several, is stored; recorded for `explain`.
WeightType stored_type(BuildContext& context, const LinearRequest& request, int64_t matrices) {
  const std::string name = context.graph.scoped_name(request.name);
  const WeightPart part = part_of_rank(context, request);
  const int64_t columns = has_shards(context, request) ? request.in : part.columns.size;
  WeightType weights = context.hardware.weight_type(*request.hardware, name + ".weight", columns);
  weights.encoding = matrix_encoding(weights.encoding);
  std::string refusal = refusal_of(weights, part);
  if (refusal.empty() && context.same_bits_on && request.parallel == Parallel::row)
    refusal = refusal_of(request, weights, context.num_ranks);
  if (!refusal.empty()) throw Unsupported("linear {}: weights are {}: {}", name, weights.name(), refusal);
  if (const Encoding* to = request.hardware->precision.rounded_weights.value; to != nullptr && context.same_bits_on)
    throw Unsupported("linear {}: weights are rounded to {} in each step; deterministic_across_tp takes them as stored",
                      name, to->name());
  // Decode reads every weight once per token, of experts at most.
  const TensorType type(weights.dtype, {part.rows.size, part.columns.size}, weights.encoding);
  const double read_us =
      1e6 * static_cast<double>(matrices * type.size_bytes({})) / context.device.rates().bytes_per_second;
  context.decisions.push_back({"linear " + name, {{std::string(weights.name()), Verdict::yes(read_us)}}, 0});
  return weights;
}

}  // namespace

ValueId LinearFactory::build(BuildContext& context, const LinearRequest& request, ValueId x) {
  return build_linear(context, request, stored_type(context, request, 1), x);
}

ValueId LinearFactory::build_grouped(BuildContext& context, const LinearRequest& request, int64_t experts, ValueId x,
                                     ValueId offsets) {
  Graph& graph = context.graph;
  if (request.bias && request.parallel == Parallel::row && context.num_ranks > 1)
    throw Unsupported("linear {}: {} ranks divide the inputs of experts with biases, which each would add",
                      graph.scoped_name(request.name), context.num_ranks);
  refuse_rounding(context, request);
  const int64_t own = part_of(experts, context.expert_ranks, context.expert_rank).size;
  const WeightType weights = stored_type(context, request, own);
  const int shard_axis = request.parallel == Parallel::column ? 1 : request.parallel == Parallel::row ? 2 : -1;
  const TensorType type(weights.dtype, {experts, request.out, request.in}, stack_encoding(weights.encoding));
  const DType dtype = request.hardware->precision.activations.value;
  const auto grouped = [&](DType out_dtype) {
    return std::make_shared<ops::GroupedLinear>(kernels::GroupedLinearAttrs{
        .out_dtype = out_dtype, .matmul_input = request.hardware->precision.matmul_input.value});
  };
  if (has_shards(context, request))
    if (const VirtualShards shards = shards_of(context, request, weights); shards.size() > 1) {
      if (request.bias)
        throw Unsupported(
            "linear {}: experts have biases; deterministic_across_tp makes their products in {} shards, "
            "which each would add",
            graph.scoped_name(request.name), shards.size());
      return build_shards(context, request, shards, x, [&](ValueId x_part, PartRange columns, int64_t begin) {
        return graph.add1(grouped(DType::f32),
                          {x_part, add_columns(context, request, type, columns, begin, true), offsets});
      });
    }
  const ValueId weight =
      graph.add_parameter(graph.scoped_name(request.name + ".weight"), type, shard_axis, /*has_experts=*/true);
  const ValueId bias = request.bias
                           ? graph.add_parameter(graph.scoped_name(request.name + ".bias"),
                                                 TensorType(dtype, {experts, request.out}), shard_axis == 1 ? 1 : -1,
                                                 /*has_experts=*/true)
                           : pipeline::kNoValue;
  const Graph::Scope scope(graph, request.name);
  return graph.add1(grouped(dtype), {x, weight, offsets, bias});
}

ValueId LinearFactory::head_weight(BuildContext& context, const LinearRequest& request, int64_t heads) {
  EADEM_CHECK(!request.bias && request.parallel == Parallel::none, "{} has a matrix for each head", request.name);
  refuse_rounding(context, request);
  Graph& graph = context.graph;
  const WeightType weights = stored_type(context, request, heads);
  return graph.add_parameter(
      graph.scoped_name(request.name + ".weight"),
      TensorType(weights.dtype, {heads, request.out, request.in}, stack_encoding(weights.encoding)), 0);
}

ValueId LinearFactory::build_heads(BuildContext& context, const LinearRequest& request, int64_t heads, ValueId x) {
  Graph& graph = context.graph;
  const ValueId weight = head_weight(context, request, heads);
  const Graph::Scope scope(graph, request.name);
  return graph.add1(std::make_shared<ops::HeadLinear>(
                        kernels::HeadLinearAttrs{.out_dtype = request.hardware->precision.activations.value,
                                                 .matmul_input = request.hardware->precision.matmul_input.value}),
                    {x, weight});
}

}  // namespace eadem::modules
