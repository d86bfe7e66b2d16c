// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/factory/linear_factory.h"

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/ops/add_bias.h"
#include "eadem/ops/linear.h"

namespace eadem::modules {

namespace {

// Decode reads every weight once per token: bytes are the cost that matters between encodings.
Verdict at_cost_of(const LinearRequest& request, double bytes_per_weight) {
  const double bytes = static_cast<double>(request.in) * static_cast<double>(request.out) * bytes_per_weight;
  return Verdict::yes(1e6 * bytes / request.device->rates().bytes_per_second);
}

template <DType kWeights>
Verdict can_handle_dense(const LinearRequest& request) {
  if (!(request.weights == WeightType(kWeights)))
    return Verdict::no(fmt::format("weights are {}", request.weights.name()));
  return at_cost_of(request, dtype_size(kWeights));
}

// The columns and rows of a rank's part of the weight.
PartRange columns_of(const LinearRequest& request) {
  return request.parallel == Parallel::row ? part_of(request.in, request.num_ranks, request.rank)
                                           : PartRange{0, request.in};
}
PartRange rows_of(const LinearRequest& request) {
  return request.parallel == Parallel::column ? part_of(request.out, request.num_ranks, request.rank)
                                              : PartRange{0, request.out};
}
bool has_whole(const PartRange& part, int64_t block) { return part.begin % block == 0 && part.size % block == 0; }

Verdict can_handle_blocks(const LinearRequest& request) {
  const BlockEncoding* encoding = BlockEncoding::of(request.weights.encoding);
  if (encoding == nullptr) return Verdict::no(fmt::format("weights are {}", request.weights.name()));
  const BlockFormat& format = encoding->format();
  const PartRange columns = columns_of(request);
  if (!has_whole(columns, format.block_size))
    return Verdict::no(
        fmt::format("a rank's rows of {} values are not whole blocks of {}", columns.size, format.block_size));
  return at_cost_of(request, static_cast<double>(format.block_bytes) / format.block_size);
}

Verdict can_handle_groups(const LinearRequest& request) {
  const GroupEncoding* encoding = GroupEncoding::of(request.weights.encoding);
  if (encoding == nullptr) return Verdict::no(fmt::format("weights are {}", request.weights.name()));
  const GroupFormat& format = encoding->format();
  const PartRange part = columns_of(request);
  const int64_t columns = part.size;
  if (columns != request.in && format.has_order)
    return Verdict::no("columns have an order of their own, which cannot be divided between ranks");
  if (!has_whole(part, encoding->group_columns(columns)))
    return Verdict::no(
        fmt::format("a rank's rows of {} values are not whole groups of {}", columns, format.group_size));
  const double scale_bytes = static_cast<double>(dtype_size(format.scale)) + (format.has_zeros ? 1 : 0);
  return at_cost_of(request, format.bits / 8.0 + scale_bytes / static_cast<double>(encoding->group_columns(columns)));
}

Verdict can_handle_fp8(const LinearRequest& request) {
  const Fp8Encoding* encoding = Fp8Encoding::of(request.weights.encoding);
  if (encoding == nullptr) return Verdict::no(fmt::format("weights are {}", request.weights.name()));
  const Fp8Format& format = encoding->format();
  const PartRange rows = rows_of(request), columns = columns_of(request);
  if ((rows.size != request.out && format.block_rows > 1 && !has_whole(rows, format.block_rows)) ||
      (columns.size != request.in && format.block_columns > 1 && !has_whole(columns, format.block_columns)))
    return Verdict::no(
        fmt::format("a rank's {} x {} weights are not whole blocks of {}", rows.size, columns.size, format.block_rows));
  return at_cost_of(request, 1.0);
}

ValueId build_linear(BuildContext& context, const LinearRequest& request, ValueId x) {
  Graph& graph = context.graph;
  const int shard_axis = request.parallel == Parallel::column ? 0 : request.parallel == Parallel::row ? 1 : -1;
  // A row-parallel product is summed over the ranks first: each would add the bias.
  const bool bias_after_sum = request.bias && request.parallel == Parallel::row && context.num_ranks > 1;
  std::vector<ValueId> inputs = {
      x, graph.add_parameter(graph.scoped_name(request.name + ".weight"),
                             TensorType(request.weights.dtype, {request.out, request.in}, request.weights.encoding),
                             shard_axis)};
  ValueId bias = pipeline::kNoValue;
  if (request.bias)
    bias = graph.add_parameter(graph.scoped_name(request.name + ".bias"),
                               TensorType(request.hardware->precision.activations.value, {request.out}),
                               request.parallel == Parallel::column ? 0 : -1);
  const bool has_bias = request.bias && !bias_after_sum;
  if (has_bias) inputs.push_back(bias);
  const Graph::Scope scope(graph, request.name);
  const ValueId y = graph.add1(std::make_shared<ops::Linear>(kernels::LinearAttrs{
                                   .has_bias = has_bias, .out_dtype = request.hardware->precision.activations.value}),
                               inputs);
  return bias_after_sum ? graph.add1(std::make_shared<ops::AddBias>(), {y, bias}) : y;
}

template <DType kWeights>
constexpr LinearStrategy kDense = {kWeights == DType::f32    ? std::string_view("dense_f32")
                                   : kWeights == DType::bf16 ? std::string_view("dense_bf16")
                                                             : std::string_view("dense_f16"),
                                   can_handle_dense<kWeights>, build_linear};

// The quantized types of GGUF.
constexpr LinearStrategy kBlocks = {"quantized_blocks", can_handle_blocks, build_linear};

// Integers with scales of groups or rows: GPTQ, AWQ, compressed-tensors.
constexpr LinearStrategy kGroups = {"quantized_groups", can_handle_groups, build_linear};

// 8-bit floats with scales.
constexpr LinearStrategy kFp8 = {"fp8", can_handle_fp8, build_linear};

constexpr const LinearStrategy* kLinearStrategies[] = {
    &kDense<DType::f32>, &kDense<DType::bf16>, &kDense<DType::f16>, &kBlocks, &kGroups, &kFp8};

}  // namespace

std::span<const LinearStrategy* const> LinearFactory::strategies() { return kLinearStrategies; }

ValueId LinearFactory::build(BuildContext& context, LinearRequest request, ValueId x) {
  request.device = &context.device;
  request.num_ranks = context.num_ranks;
  request.rank = context.rank;
  request.weights = context.hardware.weight_type(*request.hardware, context.graph.scoped_name(request.name + ".weight"),
                                                 columns_of(request).size);
  Decision decision{"linear " + context.graph.scoped_name(request.name), {}, {}};
  const LinearStrategy* strategy = select(strategies(), request, decision);
  if (strategy == nullptr) throw_no_candidate(decision);
  context.decisions.push_back(std::move(decision));
  return strategy->build(context, request, x);
}

}  // namespace eadem::modules
