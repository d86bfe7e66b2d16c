// SPDX-License-Identifier: Apache-2.0
//
// grouped_linear: the products of linear (kernels/cpu/linear), one for each expert that has rows.
#include <algorithm>

#include "eadem/core/encodings/stacked_encoding.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/cpu/weight_reader.h"
#include "eadem/kernels/experts.h"

namespace eadem::kernels::cpu {

namespace {

enum GroupedInput { kX, kWeight, kOffsets, kDy };
enum GroupedOutput { kDx, kDweight };

// Calls expert(e, first row, rows) for each expert that has rows.
template <typename Expert>
void for_each_expert(const TensorView& offsets, Expert&& expert) {
  const auto* begin = elements<const int32_t>(offsets);
  for (int64_t e = 0; e + 1 < offsets.shape[0]; ++e)
    if (begin[e + 1] > begin[e]) expert(e, int64_t{begin[e]}, int64_t{begin[e + 1] - begin[e]});
}

// How far x may be rounded. Each expert's product rounds its rows itself.
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

Verdict can_grouped(const KernelRequest& r) {
  const TensorType& weight = r.inputs[kWeight];
  const Encoding* matrix = forward_matrix(r);
  return Requirements(r)
      .f32("x", r.inputs[kX])
      .require(matrix != nullptr, fmt::format("reads no weight in {}", to_string(weight)))
      .require(matrix == nullptr || has_whole_steps(weight, matrix),
               fmt::format("takes weight in rows of whole steps of {}; it is {}", kStep, to_string(weight)))
      .f32("y", r.outputs[0])
      .verdict();
}

PlanPtr prepare_grouped(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const TensorType& weight = r.inputs[kWeight];
  const Encoding* packing = forward_matrix(r);
  const WeightReader reader(packing, input_of(r));
  const MatmulPlan product(device, reader.types());
  const MatrixStack experts(stack_encoding(packing), weight.dtype, weight.bind({}));
  const Shape x = r.inputs[kX].bind(r.bounds);
  return make_plan(
      [=](const KernelCall& call) {
        const TensorView &in = call.inputs[kX], &weights = call.inputs[kWeight];
        const int64_t width = in.shape[1], outputs = weights.shape[1];
        for_each_expert(call.inputs[kOffsets], [&](int64_t e, int64_t first, int64_t rows) {
          Matmul m;
          m.rows = rows;
          m.k_size = m.a_row_stride = width;
          m.outputs = outputs;
          m.a = elements<const float>(in) + first * width;
          m.b = reader.read(experts.matrix(weights, e));
          m.y = elements<float>(call.outputs[0]) + first * outputs;
          product.run(cpu_device(call), m, call.scratch.data);
        });
      },
      product.scratch_bytes(device, x[0], x[1]));
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
      .verdict();
}

struct GroupedBackward {
  WeightReader reader;
  MatrixStack experts;
  MatmulPlan dx, dweight;
};

void run_grouped_backward(const GroupedBackward& plan, const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const int64_t width = call.inputs[kX].shape[1], outputs = call.inputs[kDy].shape[1];
  const float* x = elements<const float>(call.inputs[kX]);
  const float* dy = elements<const float>(call.inputs[kDy]);
  float* dx = elements<float>(call.outputs[kDx]);
  float* dweight = elements<float>(call.outputs[kDweight]);
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
  });
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

constexpr Kernel kForward{"cpu_expert_panels", Pass::forward, can_grouped, prepare_grouped, pack_experts};
constexpr Kernel kInference{"cpu_expert_panels", Pass::inference, can_grouped, prepare_grouped, pack_experts};
constexpr Kernel kBackward{"cpu_expert_panels", Pass::backward, can_grouped_backward, prepare_grouped_backward,
                           pack_experts_transposed};

}  // namespace

KernelList grouped_linear_kernels() { return {&kForward, &kInference, &kBackward}; }

}  // namespace eadem::kernels::cpu
