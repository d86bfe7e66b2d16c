// SPDX-License-Identifier: Apache-2.0
//
// grouped_linear: the products of linear (kernels/cpu/linear), of all experts that have rows at once.
#include <algorithm>
#include <new>
#include <span>

#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/cpu/weight_reader.h"
#include "eadem/kernels/experts.h"

namespace eadem::kernels::cpu {

namespace {

enum GroupedInput { kX, kWeight, kOffsets, kBias };
enum GroupedBackwardInput { kDy = kBias };
enum GroupedOutput { kDx, kDweight, kDbias };

// Calls expert(e, first row, rows) for each expert that has rows.
template <typename Expert>
void for_each_expert(const TensorView& offsets, Expert&& expert) {
  const auto* begin = elements<const int32_t>(offsets);
  for (int64_t e = 0; e + 1 < offsets.shape[0]; ++e)
    if (begin[e + 1] > begin[e]) expert(e, int64_t{begin[e]}, int64_t{begin[e + 1] - begin[e]});
}

// The rows of no expert stand behind those of all experts.
void clear_other_rows(float* rows, const TensorView& offsets, int64_t count, int64_t width) {
  const int64_t first = elements<const int32_t>(offsets)[offsets.shape[0] - 1];
  std::fill(rows + first * width, rows + count * width, 0.0f);
}

// How far x may be rounded.
MatmulInput input_of(const KernelRequest& r) { return r.attrs.get<GroupedLinearAttrs>().matmul_input; }

// The packing in which products read the matrix of an expert, or null if none reads it.
const Encoding* forward_matrix(const KernelRequest& r) {
  const TensorType& weight = r.inputs[kWeight];
  const Encoding* stored = matrix_encoding(weight.encoding);
  const Encoding* panels = PackedPanels::of_forward(weight.dtype, cpu_device(r).isa(), input_of(r));
  if (stored == nullptr || stored == panels) return panels;
  if (const Encoding* quantized = quantized_packing_of(stored)) return quantized;
  return Fp8Panels::of(stored);
}

const Encoding* pack_experts(const KernelRequest& r, int input) {
  return input == kWeight ? stack_encoding(forward_matrix(r)) : nullptr;
}

bool has_whole_steps(const TensorType& weight, const Encoding* matrix) {
  return GroupPanels::of(matrix) == nullptr || weight.fixed(2) % kStep == 0;
}

// The encoding to which x is rounded before the products read it, or null: they read it as it is, or round it
// themselves because each expert's columns have an order of their own.
const Encoding* rounding_of_x(const KernelRequest& r, int input) {
  const Encoding* matrix = input == kX ? forward_matrix(r) : nullptr;
  if (matrix == nullptr) return nullptr;
  const MatmulTypes types = WeightReader(matrix, input_of(r)).types();
  return types.source == MatmulTypes::Source::quantized && !types.has_order ? &Int8Rows::of(*types.layout) : nullptr;
}

Verdict can_grouped(const KernelRequest& r) {
  const TensorType& weight = r.inputs[kWeight];
  const Encoding* matrix = forward_matrix(r);
  return Requirements(r)
      .require(matrix != nullptr, fmt::format("reads no weight in {}", to_string(weight)))
      .require(matrix == nullptr || has_whole_steps(weight, matrix),
               fmt::format("takes weight in rows of whole steps of {}; it is {}", kStep, to_string(weight)))
      .f32("x", r.inputs[kX], rounding_of_x(r, kX))
      .one_of("bias", r.inputs[kBias], kStorageDTypes)
      .f32("y", r.outputs[0])
      .verdict();
}

struct GroupedForward {
  WeightReader reader;
  MatrixStack experts;
  MatmulPlan product;
  size_t bias_bytes;  // of a value
};

// The experts that have rows, as groups of the product, in memory for all experts.
std::span<const MatmulGroup> groups_of(const GroupedForward& plan, const KernelCall& call, MatmulGroup* memory) {
  const TensorView &weights = call.inputs[kWeight], &bias = call.inputs[kBias];
  const int64_t outputs = weights.shape[1];
  size_t count = 0;
  for_each_expert(call.inputs[kOffsets], [&](int64_t e, int64_t first, int64_t rows) {
    MatmulGroup& group =
        *new (memory + count++) MatmulGroup{first, rows, plan.reader.read(plan.experts.matrix(weights, e))};
    if (bias.defined())
      group.bias = static_cast<const std::byte*>(bias.data) + static_cast<size_t>(e * outputs) * plan.bias_bytes;
  });
  return {memory, count};
}

void run_grouped(const GroupedForward& plan, const KernelCall& call, int64_t group_bytes) {
  const TensorView& x = call.inputs[kX];
  Matmul m;
  m.rows = x.shape[0];
  m.k_size = m.a_row_stride = x.shape[1];
  m.outputs = call.inputs[kWeight].shape[1];
  if (x.encoding == nullptr)
    m.a = elements<const float>(x);
  else
    m.a_codes = int8_row_planes(x);
  m.y = elements<float>(call.outputs[0]);
  auto* memory = static_cast<std::byte*>(call.scratch.data);
  plan.product.run_groups(cpu_device(call), m, groups_of(plan, call, reinterpret_cast<MatmulGroup*>(memory)),
                          memory + group_bytes);
  clear_other_rows(m.y, call.inputs[kOffsets], m.rows, m.outputs);
}

PlanPtr prepare_grouped(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const TensorType &weight = r.inputs[kWeight], &bias = r.inputs[kBias];
  const Encoding* packing = forward_matrix(r);
  const WeightReader reader(packing, input_of(r));
  MatmulTypes types = reader.types();
  if (!is_unconnected(bias)) types.bias = bias.dtype;
  const GroupedForward plan{reader, MatrixStack(stack_encoding(packing), weight.dtype, weight.bind({})),
                            MatmulPlan(device, types), dtype_size(bias.dtype)};
  const Shape x = r.inputs[kX].bind(r.bounds);
  const int64_t group_bytes = round_up(weight.fixed(0) * static_cast<int64_t>(sizeof(MatmulGroup)), 64);
  return make_plan([=](const KernelCall& call) { run_grouped(plan, call, group_bytes); },
                   group_bytes + plan.product.scratch_bytes(device, x[0], x[1], r.inputs[kX].encoding != nullptr));
}

// ---- Backward

const PackedPanels* backward_matrix(const KernelRequest& r) {
  return PackedPanels::of(r.inputs[kWeight].dtype, PackedPanels::Side::transposed);
}

const Encoding* pack_experts_transposed(const KernelRequest& r, int input) {
  return input == kWeight ? stack_encoding(backward_matrix(r)) : nullptr;
}

Verdict can_grouped_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[kX])
      .packed("weight", r.inputs[kWeight], kStorageDTypes, pack_experts_transposed(r, kWeight))
      .f32("dy", r.inputs[kDy])
      .f32("dx", r.outputs[kDx])
      .f32("dweight", r.outputs[kDweight])
      .f32("dbias", r.outputs[kDbias])
      .verdict();
}

struct GroupedBackward {
  WeightReader reader;
  MatrixStack experts;
  MatmulPlan dx, dweight;
};

// dbias[n] += sum_r dy[r, n]: each column is one chain over r, then one addition.
void add_column_sums(float* dbias, const float* dy, int64_t rows, int64_t outputs) {
  constexpr int64_t kColumns = 64;
  for (int64_t n = 0; n < outputs; n += kColumns) {
    const int64_t columns = std::min(kColumns, outputs - n);
    float sums[kColumns] = {};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < columns; ++i) sums[i] += dy[r * outputs + n + i];
    for (int64_t i = 0; i < columns; ++i) dbias[n + i] += sums[i];
  }
}

void run_grouped_backward(const GroupedBackward& plan, const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const int64_t width = call.inputs[kX].shape[1], outputs = call.inputs[kDy].shape[1];
  const float* x = elements<const float>(call.inputs[kX]);
  const float* dy = elements<const float>(call.inputs[kDy]);
  float* dx = elements<float>(call.outputs[kDx]);
  float* dweight = elements<float>(call.outputs[kDweight]);
  float* dbias = elements<float>(call.outputs[kDbias]);
  for_each_expert(call.inputs[kOffsets], [&](int64_t e, int64_t first, int64_t rows) {
    // 1. dx = dy weight
    if (dx != nullptr) {
      Matmul m;
      m.rows = rows;
      m.k_size = m.a_row_stride = outputs;
      m.outputs = width;
      m.a = dy + first * outputs;
      m.b = plan.reader.read(plan.experts.matrix(call.inputs[kWeight], e));
      m.y = dx + first * width;
      plan.dx.run(device, m, call.scratch.data);
    }
    // 2. dweight += dy^T x: rows are outputs, k runs over the rows of the expert.
    if (dweight != nullptr) {
      Matmul m;
      m.rows = outputs;
      m.k_size = rows;
      m.outputs = width;
      m.a = dy + first * outputs;
      m.a_row_stride = 1;
      m.a_k_stride = outputs;
      m.b.data = x + first * width;
      m.y = dweight + e * outputs * width;
      plan.dweight.run(device, m, call.scratch.data);
    }
    // 3. dbias += column sums of dy
    if (dbias != nullptr) add_column_sums(dbias + e * outputs, dy + first * outputs, rows, outputs);
  });
  if (dx != nullptr) clear_other_rows(dx, call.inputs[kOffsets], call.inputs[kX].shape[0], width);
}

PlanPtr prepare_grouped_backward(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const TensorType& weight = r.inputs[kWeight];
  const Encoding* packing = backward_matrix(r);
  const WeightReader reader(packing, MatmulInput::f32);
  const GroupedBackward plan{
      reader, MatrixStack(stack_encoding(packing), weight.dtype, weight.bind({})), MatmulPlan(device, reader.types()),
      MatmulPlan(device, {.source = MatmulTypes::Source::matrix, .finish = MatmulTypes::Finish::accumulate})};
  return make_plan([plan](const KernelCall& call) { run_grouped_backward(plan, call); },
                   std::max(plan.dx.scratch_bytes(device, 0, 0), plan.dweight.scratch_bytes(device, 0, 0)));
}

constexpr Kernel grouped_kernel(Pass pass) {
  return {.name = "cpu_expert_panels",
          .pass = pass,
          .can_handle = can_grouped,
          .prepare = prepare_grouped,
          .packing = pack_experts,
          .wanted_encoding = rounding_of_x};
}
constexpr Kernel kForward = grouped_kernel(Pass::forward);
constexpr Kernel kInference = grouped_kernel(Pass::inference);
constexpr Kernel kBackward{"cpu_expert_panels", Pass::backward, can_grouped_backward, prepare_grouped_backward,
                           pack_experts_transposed};

}  // namespace

KernelList grouped_linear_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace eadem::kernels::cpu
