// SPDX-License-Identifier: Apache-2.0
//
// head_linear: the products of linear, one for each head, whose rows lie between those of the other heads.
#include "eadem/kernels/head_linear.h"

#include <algorithm>

#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/linear/head_matrix.h"

namespace eadem::kernels::cpu {

namespace {

enum HeadInput { kHeadX, kHeadWeight, kHeadDy };
enum HeadOutput { kHeadDx, kHeadDweight };

MatmulInput head_input_of(const KernelRequest& r) { return r.attrs.get<HeadLinearAttrs>().matmul_input; }

const Encoding* matrix_of(const KernelRequest& r) { return head_matrix(r, r.inputs[kHeadWeight], head_input_of(r)); }

const Encoding* pack_heads(const KernelRequest& r, int input) {
  return input == kHeadWeight ? stack_encoding(matrix_of(r)) : nullptr;
}

Verdict can_head_linear(const KernelRequest& r) {
  const TensorType& weight = r.inputs[kHeadWeight];
  const Encoding* matrix = matrix_of(r);
  const bool whole_steps = GroupPanels::of(matrix) == nullptr || weight.fixed(2) % kStep == 0;
  return Requirements(r)
      .f32("x", r.inputs[kHeadX])
      .require(matrix != nullptr, fmt::format("reads no weight in {}", to_string(weight)))
      .require(whole_steps,
               fmt::format("takes weight in rows of whole steps of {}; it is {}", kStep, to_string(weight)))
      .f32("y", r.outputs[0])
      .verdict();
}

PlanPtr prepare_head_linear(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const TensorType& weight = r.inputs[kHeadWeight];
  const Encoding* packing = matrix_of(r);
  const WeightReader reader(packing, head_input_of(r));
  const MatmulPlan product(device, reader.types());
  const MatrixStack matrices(stack_encoding(packing), weight.dtype, weight.bind({}));
  const Shape x = r.inputs[kHeadX].bind(r.bounds);
  return make_plan(
      [=](const KernelCall& call) {
        const TensorView &in = call.inputs[kHeadX], &weights = call.inputs[kHeadWeight];
        const int64_t heads = weights.shape[0], outputs = weights.shape[1], width = weights.shape[2];
        product.run_each(
            cpu_device(call), heads,
            [&](int64_t h) {
              Matmul m;
              m.rows = in.shape[0];
              m.k_size = width;
              m.outputs = outputs;
              m.a = elements<const float>(in) + h * width;
              m.a_row_stride = heads * width;
              m.b = reader.read(matrices.matrix(weights, h));
              m.y = elements<float>(call.outputs[0]) + h * outputs;
              m.y_row_stride = heads * outputs;
              return m;
            },
            call.scratch.data);
      },
      product.scratch_bytes_each(device, x[0], x[2]));
}

// ---- Backward

const PackedPanels* transposed_head(const KernelRequest& r) {
  return PackedPanels::of(r.inputs[kHeadWeight].dtype, PackedPanels::Side::transposed);
}

const Encoding* pack_heads_transposed(const KernelRequest& r, int input) {
  return input == kHeadWeight ? stack_encoding(transposed_head(r)) : nullptr;
}

Verdict can_head_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[kHeadX])
      .packed("weight", r.inputs[kHeadWeight], kStorageDTypes, pack_heads_transposed(r, kHeadWeight))
      .f32("dy", r.inputs[kHeadDy])
      .f32("dx", r.outputs[kHeadDx])
      .f32("dweight", r.outputs[kHeadDweight])
      .verdict();
}

struct HeadBackward {
  WeightReader reader;
  MatrixStack matrices;
  MatmulPlan dx, dweight;
};

void run_head_backward(const HeadBackward& plan, const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const TensorView& weights = call.inputs[kHeadWeight];
  const int64_t tokens = call.inputs[kHeadX].shape[0], heads = weights.shape[0], outputs = weights.shape[1],
                width = weights.shape[2];
  const float* x = elements<const float>(call.inputs[kHeadX]);
  const float* dy = elements<const float>(call.inputs[kHeadDy]);
  // 1. dx = dy weight
  if (float* dx = elements<float>(call.outputs[kHeadDx]); dx != nullptr)
    plan.dx.run_each(
        device, heads,
        [&](int64_t h) {
          Matmul m;
          m.rows = tokens;
          m.k_size = outputs;
          m.outputs = width;
          m.a = dy + h * outputs;
          m.a_row_stride = heads * outputs;
          m.b = plan.reader.read(plan.matrices.matrix(weights, h));
          m.y = dx + h * width;
          m.y_row_stride = heads * width;
          return m;
        },
        call.scratch.data);
  // 2. dweight += dy^T x: rows are outputs, k runs over tokens.
  if (float* dweight = elements<float>(call.outputs[kHeadDweight]); dweight != nullptr)
    plan.dweight.run_each(
        device, heads,
        [&](int64_t h) {
          Matmul m;
          m.rows = outputs;
          m.k_size = tokens;
          m.outputs = width;
          m.a = dy + h * outputs;
          m.a_row_stride = 1;
          m.a_k_stride = heads * outputs;
          m.b.data = x + h * width;
          m.b_row_stride = heads * width;
          m.y = dweight + h * outputs * width;
          return m;
        },
        call.scratch.data);
}

PlanPtr prepare_head_backward(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const TensorType& weight = r.inputs[kHeadWeight];
  const Encoding* packing = transposed_head(r);
  const WeightReader reader(packing, MatmulInput::f32);
  const HeadBackward plan{
      reader, MatrixStack(stack_encoding(packing), weight.dtype, weight.bind({})), MatmulPlan(device, reader.types()),
      MatmulPlan(device, {.source = MatmulTypes::Source::matrix, .finish = MatmulTypes::Finish::accumulate})};
  return make_plan([plan](const KernelCall& call) { run_head_backward(plan, call); },
                   std::max(plan.dx.scratch_bytes_each(device, 0, 0), plan.dweight.scratch_bytes_each(device, 0, 0)));
}

constexpr Kernel kHeadForward{"cpu_head_panels", Pass::forward, can_head_linear, prepare_head_linear, pack_heads};
constexpr Kernel kHeadInference{"cpu_head_panels", Pass::inference, can_head_linear, prepare_head_linear, pack_heads};
constexpr Kernel kHeadBackward{"cpu_head_panels", Pass::backward, can_head_backward, prepare_head_backward,
                               pack_heads_transposed};

}  // namespace

KernelList head_linear_kernels() { return {&kHeadForward, &kHeadInference, &kHeadBackward}; }

}  // namespace eadem::kernels::cpu
