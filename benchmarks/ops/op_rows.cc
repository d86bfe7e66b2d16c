// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/ops/op_rows.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>

#include "eadem/core/encodings/block_encoding.h"
#include "eadem/ops/all_ops.h"
#include "eadem/ops/model_shapes.h"
#include "tests/workloads/inputs.h"

namespace eadem::op_bench {

namespace {

using kernels::Pass;
using ops::Port;
using ops::Workload;

// The tensors of a row that move to the dtype in which a device computes.
enum class Moved : uint8_t { nothing, activations, vectors, everything };

// The op of a row with its attribute out_dtype set.
template <typename Op, typename Attrs>
ops::OpPtr with_out_dtype(const Workload& row, DType dtype) {
  auto attrs = row.op->attrs().get<Attrs>();
  attrs.out_dtype = dtype;
  return std::make_shared<Op>(attrs);
}

// The rows come in their models' dtypes. A device computes activations in the dtype it prefers; parameters stay, but
// those that must agree with an activation (the weights of norms) and caches follow where no kernel takes less.
Workload moved_to(const Workload& row, DType dtype, Moved moved) {
  Workload result = row;
  if (moved == Moved::nothing) return result;
  const std::string_view name = row.op->name();
  if (name == "linear") result.op = with_out_dtype<ops::Linear, kernels::LinearAttrs>(row, dtype);
  if (name == "embedding") result.op = with_out_dtype<ops::Embedding, kernels::EmbeddingAttrs>(row, dtype);
  if (name == "head_linear") result.op = with_out_dtype<ops::HeadLinear, kernels::HeadLinearAttrs>(row, dtype);
  if (name == "grouped_linear") result.op = with_out_dtype<ops::GroupedLinear, kernels::GroupedLinearAttrs>(row, dtype);
  const std::vector<Port> ports = row.op->inputs();
  for (size_t i = 0; i < result.inputs.size(); ++i) {
    TensorType& type = result.inputs[i];
    if (kernels::is_unconnected(type) || type.encoding != nullptr || !is_floating(type.dtype)) continue;
    const bool activation = ports[i].role == Port::Role::activation;
    const bool vector = ports[i].role == Port::Role::parameter && type.rank() == 1;
    if (activation || (vector && moved >= Moved::vectors) || moved == Moved::everything) type.dtype = dtype;
  }
  return result;
}

bool some_kernel_takes(const Workload& row, const Device& device) {
  for (Pass pass : {Pass::inference, Pass::forward}) {
    const PassTypes types = pass_types(row, pass);
    for (const kernels::Kernel* kernel : row.op->kernels(kernels::backend_of(device)))
      if (kernel->pass == pass && kernel->can_handle(request_of(row, pass, types, device)).accepted) return true;
  }
  return false;
}

// The least moved form of the row that a kernel takes, or nothing.
std::optional<Workload> fitting_form(const Workload& row, const Device& device) {
  for (Moved moved : {Moved::nothing, Moved::activations, Moved::vectors, Moved::everything}) {
    Workload form = moved_to(row, device.preferred_activations(), moved);
    try {
      if (some_kernel_takes(form, device)) return form;
    } catch (const InvalidArgument&) {  // the op itself refuses the mixture
    }
  }
  return std::nullopt;
}

// Few tokens, of a context no more than some blocks where its reference is slow, few experts, and of the vocabulary or
// the outputs no more than a few panels and a ragged one.
Workload small_of(const Workload& row) {
  constexpr int64_t kTokens = 3, kWide = 16384, kFewer = 1003, kOutputs = 203, kBlocks = 9, kExperts = 9;
  Workload result = row;
  SymbolValues& symbols = result.symbols;
  symbols[Symbol::tokens] =
      std::min(symbols[Symbol::tokens], kTokens * std::max<int64_t>(1, symbols[Symbol::sequences]));
  const bool linear = row.op->name() == "linear";
  if (row.op->name() == "grouped_linear") {  // weight and bias [experts, outputs, …], offsets [experts + 1]
    const int64_t experts = std::min(row.inputs[1].fixed(0), kExperts);
    for (const size_t port : {size_t{1}, size_t{3}}) {
      TensorType& type = result.inputs[port];
      if (kernels::is_unconnected(type)) continue;
      type.dim(0).value = experts;
      type.dim(1).value = std::min(type.dim(1).value, kOutputs);
    }
    result.inputs[2].dim(0).value = experts + 1;
  }
  if (row.op->name() == "embedding") {
    auto attrs = row.op->attrs().get<kernels::EmbeddingAttrs>();
    attrs.vocab = std::min(attrs.vocab, kFewer);
    result.op = std::make_shared<ops::Embedding>(attrs);
  }
  // The reference of latent_attention makes the keys of every position.
  if (row.op->name() == "latent_attention")
    symbols[Symbol::max_blocks] = std::min(symbols[Symbol::max_blocks], kBlocks);
  for (size_t i = 0; i < result.inputs.size(); ++i) {
    TensorType& type = result.inputs[i];
    if (kernels::is_unconnected(type)) continue;
    if (linear && i > 0) type.dim(0).value = std::min(type.dim(0).value, kOutputs);
    if (row.op->name() == "adamw" || row.op->name() == "grad_norm") {
      if (type.rank() == 2) type.dim(0).value = std::min(type.dim(0).value, int64_t{17});
      continue;
    }
    if (!linear && row.op->name() != "gated_delta_rule")  // whose state has one length
      for (int axis = 0; axis < type.rank(); ++axis)
        if (type.dim(axis).is_fixed() && type.dim(axis).value > kWide) type.dim(axis).value = kFewer;
  }
  return result;
}

void append_forms(std::vector<Workload>& rows, const Workload& row) {
  rows.push_back(row);
  rows.back().name += fmt::format("/{}", dtype_name(row.inputs[1].dtype));
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    if (dtype == row.inputs[1].dtype) continue;
    Workload form = row;
    form.inputs[1].dtype = dtype;
    form.name += fmt::format("/{}", dtype_name(dtype));
    rows.push_back(std::move(form));
  }
  for (const BlockEncoding* encoding : BlockEncoding::all()) {
    if (row.inputs[1].fixed(1) % encoding->format().block_size != 0) continue;
    Workload form = row;
    form.inputs[1] = TensorType(DType::f32, row.inputs[1].dims(), encoding);
    form.name += fmt::format("/{}", encoding->name());
    rows.push_back(std::move(form));
  }
}

// The experts of a model take hundreds of megabytes: its dtype, and 4 bits in q4_k, or in mxfp4 where blocks of 256 do
// not fit.
void append_expert_forms(std::vector<Workload>& rows, const Workload& row) {
  rows.push_back(row);
  rows.back().name += fmt::format("/{}", dtype_name(row.inputs[1].dtype));
  for (const std::string_view name : {"q4_k", "mxfp4"}) {
    const BlockEncoding* encoding = BlockEncoding::find(name);
    if (row.inputs[1].fixed(2) % encoding->format().block_size != 0) continue;
    rows.push_back(row);
    rows.back().inputs[1] = TensorType(DType::f32, row.inputs[1].dims(), encoding);
    rows.back().name += fmt::format("/{}", name);
    return;
  }
}

bool matches(const std::string& name, const std::vector<std::string>& filter) {
  bool tiny = name.find("tiny ") != std::string::npos || name.find("stories260k ") != std::string::npos;
  for (const std::string& word : filter) {
    if (name.find(word) == std::string::npos) return false;
    if (word.starts_with("tiny") || word.starts_with("stories")) tiny = false;
  }
  return !tiny;
}

// Copies the first `filled_bytes` of `data` over the rest.
void repeat(std::byte* data, int64_t filled_bytes, int64_t total_bytes) {
  for (int64_t at = filled_bytes; at < total_bytes; at += filled_bytes)
    std::memcpy(data + at, data, static_cast<size_t>(std::min(filled_bytes, total_bytes - at)));
}

// A matrix, or a stack of some, whose rows repeat after kDistinctRows; block encodings are one plane of independent
// rows.
Tensor random_weight(const TensorType& type, uint64_t seed) {
  constexpr int64_t kDistinctRows = 64;
  const Shape shape = type.bind({});
  const int64_t columns = shape.back(), rows = shape.num_elements() / columns, distinct = std::min(rows, kDistinctRows);
  const Tensor values = workloads::random_tensor(type.dtype, {distinct, columns}, seed);
  Tensor result;
  if (type.encoding == nullptr) {
    result = Tensor::on_host(type.dtype, shape);
    std::memcpy(result.view.data, values.view.data, static_cast<size_t>(values.view.size_bytes()));
    repeat(static_cast<std::byte*>(result.view.data), values.view.size_bytes(), result.view.size_bytes());
    return result;
  }
  const PlaneSpec plane = type.encoding->planes(shape)[0];
  result = Tensor::on_host(plane.dtype, plane.shape);
  TensorView first(result.view.data, type.dtype, {distinct, columns});
  first.encoding = type.encoding;
  type.encoding->encode(first, values.view);
  repeat(static_cast<std::byte*>(result.view.data), plane.size_bytes() / rows * distinct, plane.size_bytes());
  result.view = TensorView(result.view.data, type.dtype, shape);
  result.view.encoding = type.encoding;
  return result;
}

}  // namespace

PassTypes pass_types(const Workload& work, Pass pass) {
  PassTypes types{work.inputs, work.op->infer_types(work.inputs)};
  if (pass == Pass::forward)
    for (const TensorType& extra : work.op->extra_types(work.inputs)) types.outputs.push_back(extra);
  if (pass == Pass::backward)
    types = {work.op->backward_input_types(work.inputs, types.outputs), work.op->backward_output_types(work.inputs)};
  return types;
}

kernels::KernelRequest request_of(const Workload& work, Pass pass, const PassTypes& types, const Device& device) {
  return {.op = work.op->name(),
          .pass = pass,
          .device = &device,
          .attrs = work.op->attrs(),
          .inputs = types.inputs,
          .outputs = types.outputs,
          .bounds = work.symbols,
          .cost = work.op->cost(pass, work.inputs, work.op->infer_types(work.inputs), work.symbols),
          .definition = work.op.get()};
}

std::vector<BenchRow> bench_rows(const Device& device, const std::vector<std::string>& filter) {
  std::vector<BenchRow> result;
  for (const Workload& row : ops::all_workloads()) {
    std::vector<Workload> forms;
    if (row.op->name() == "linear")
      append_forms(forms, row);
    else if (row.op->name() == "grouped_linear")
      append_expert_forms(forms, row);
    else
      forms.push_back(row);
    for (Workload& form : forms) {
      const std::string name = fmt::format("{}/{}", row.op->name(), form.name);
      if (!matches(name, filter)) continue;
      std::optional<Workload> fitting = fitting_form(form, device);
      if (!fitting) continue;
      fitting->name = name;
      result.push_back({name, *fitting, small_of(*fitting)});
    }
  }
  return result;
}

std::vector<std::string> ops_without_rows(const Device& device) {
  std::map<std::string, bool> has_rows;
  for (const Workload& row : ops::all_workloads()) {
    if (!matches(row.name, {})) continue;
    bool& found = has_rows[std::string(row.op->name())];
    found = found || fitting_form(row, device).has_value();
  }
  std::vector<std::string> without;
  for (const auto& [op, found] : has_rows)
    if (!found) without.push_back(op);
  return without;
}

bool chooses_weights(const Workload& work) { return work.op->name() == "grouped_linear"; }

double unread_bytes(const Workload& work, Pass pass, const std::vector<Tensor>& inputs) {
  if (!chooses_weights(work)) return 0;
  const TensorType& weight = work.inputs[1];
  const int64_t experts = weight.fixed(0), counted = std::min(inputs[0].shape()[0], experts);
  const auto* begin = inputs[2].view.as<int32_t>();
  int64_t read = 0;
  for (int64_t e = 0; e < experts; ++e) read += begin[e] < begin[e + 1] ? 1 : 0;
  double bytes = static_cast<double>(weight.size_bytes(work.symbols));
  if (pass == Pass::backward)  // a gradient in f32 is read and written
    bytes += 2 * static_cast<double>(sizeof(float)) * static_cast<double>(weight.num_elements(work.symbols));
  return static_cast<double>(counted - read) / static_cast<double>(experts) * bytes;
}

std::vector<Tensor> row_inputs(const Workload& work, uint64_t seed, bool with_weight) {
  const bool large_weight = work.op->name() == "linear" || work.op->name() == "grouped_linear";
  std::vector<TensorType> types = work.inputs;
  if (large_weight) types[1] = kernels::unconnected_port();
  std::vector<Tensor> inputs = workloads::make_inputs(*work.op, types, work.symbols, seed, workloads::StepKind::plain);
  if (large_weight && with_weight) inputs[1] = random_weight(work.inputs[1], seed + 1);
  return inputs;
}

}  // namespace eadem::op_bench
