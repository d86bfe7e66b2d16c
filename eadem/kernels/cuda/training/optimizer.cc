// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/training/optimizer.h"

#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

// ---- grad_norm

int64_t num_blocks(int64_t size) { return (size + kGradNormBlock - 1) / kGradNormBlock; }

Verdict can_grad_norm(const KernelRequest& request) {
  Requirements requirements(request);
  for (const TensorType& type : request.inputs) requirements.dtype("a gradient", type, {DType::f32});
  return requirements.dtype("norm", request.outputs[0], {DType::f32}).verdict();
}

PlanPtr prepare_grad_norm(const KernelRequest& request, Context&) {
  int64_t blocks = 0;
  for (const TensorType& type : request.inputs) blocks += num_blocks(type.num_elements(request.bounds));
  return make_plan(
      [](const KernelCall& call) {
        double* sums = static_cast<double*>(call.scratch.data);
        int64_t count = 0;
        for (const TensorView& input : call.inputs) {
          const int64_t size = input.num_elements();
          EADEM_CUDA_CALL(launch_sum_squares(elements<const float>(input), size, sums + count, stream_of(call)));
          count += num_blocks(size);
        }
        EADEM_CUDA_CALL(launch_norm(sums, count, elements<float>(call.outputs[0]), stream_of(call)));
      },
      blocks * static_cast<int64_t>(sizeof(double)));
}

// ---- adamw

enum AdamWInput { kGrad, kNorm, kHyper, kMaster, kM, kV, kWeight };

Verdict can_adamw(const KernelRequest& request) {
  Requirements requirements(request);
  for (size_t i : {kGrad, kNorm, kHyper, kMaster, kM, kV})
    requirements.dtype("an input", request.inputs[i], {DType::f32});
  if (request.inputs.size() > kWeight) requirements.dtype("weight", request.inputs[kWeight], {DType::bf16, DType::f16});
  return requirements.verdict();
}

PlanPtr prepare_adamw(const KernelRequest& request, Context&) {
  return make_plan([decay = request.attrs.get<AdamWAttrs>().decay](const KernelCall& call) {
    const bool has_weight = call.inputs.size() > kWeight && call.inputs[kWeight].data != nullptr;
    EADEM_CUDA_CALL(launch_adamw({.grad = elements<const float>(call.inputs[kGrad]),
                                  .norm = elements<const float>(call.inputs[kNorm]),
                                  .hyper = elements<const float>(call.inputs[kHyper]),
                                  .master = elements<float>(call.inputs[kMaster]),
                                  .m = elements<float>(call.inputs[kM]),
                                  .v = elements<float>(call.inputs[kV]),
                                  .weight = has_weight ? elements(call.inputs[kWeight]) : nullptr,
                                  .size = call.inputs[kGrad].num_elements(),
                                  .decay = decay,
                                  .weight_dtype = has_weight ? call.inputs[kWeight].dtype : DType::bf16},
                                 stream_of(call)));
  });
}

constexpr Kernel kGradNorm{"cuda_f64_blocks", Pass::inference, can_grad_norm, prepare_grad_norm};
constexpr Kernel kAdamW{"cuda_elements", Pass::inference, can_adamw, prepare_adamw};

}  // namespace

KernelList grad_norm_kernels() { return {&kGradNorm}; }
KernelList adamw_kernels() { return {&kAdamW}; }

}  // namespace eadem::kernels::cuda
