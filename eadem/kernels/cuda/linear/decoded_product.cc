// SPDX-License-Identifier: Apache-2.0
//
// cuda_decoded: linear with an encoded weight, where the kernels for Hopper do not run. The weight is decoded to bf16
// in scratch memory for every call, and multiplied by cuBLASLt, by one algorithm for any number of rows: the bits are
// those of the kernel "cublaslt" with the decoded weight.
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/exact_product.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/linear.h"

namespace eadem::kernels::cuda {

namespace {

enum Input { kX, kWeight, kBias };

int64_t decoded_bytes(const TensorType& weight) { return weight.fixed(0) * weight.fixed(1) * 2; }

Verdict can_decode(const KernelRequest& request) {
  const TensorType &weight = request.inputs[kWeight], &y = request.outputs[0];
  // Both matrices are written and read; the cost of the op has the encoded one.
  return Requirements(request, {kWeight})
      .require(!runs_hopper_kernels(request), "is for devices that do not run the kernels for Hopper")
      .require(weight.encoding != nullptr, "the weight is plain")
      .dtype("x", request.inputs[kX], {DType::bf16})
      .dtype("y", y, kActivationDTypes)
      .same_dtype("bias", request.inputs[kBias], "y", y)
      .require(weight.fixed(1) > 0 && weight.fixed(1) % kLinearStreamMultiple == 0,
               fmt::format("rows of the weight have to be a multiple of {} (are {})", kLinearStreamMultiple,
                           weight.fixed(1)))
      .verdict({.extra_bytes = 2.0 * static_cast<double>(decoded_bytes(weight)),
                .reason = "tensor cores, the weight is decoded first"});
}

const Encoding* packing(const KernelRequest& request, int input) {
  return input == kWeight ? FragmentBlocks::of(request.inputs[kWeight].encoding) : nullptr;
}

PlanPtr prepare(const KernelRequest& request, Context& context) {
  CudaDevice& device = static_cast<CudaDevice&>(context.device);
  const CudaMatmul::Plan& product = device.matmul().plan(matmul_problem(request));
  return make_plan(
      [&device, &product, layout = *layout_of(request.inputs[kWeight])](const KernelCall& call) {
        const TensorView &x = call.inputs[kX], &weight = call.inputs[kWeight];
        if (x.shape[0] == 0) return;
        void* decoded = call.scratch.data;
        EADEM_CUDA_CALL(
            launch_unpack_blocks(layout, weight.plane(0), decoded, weight.shape[0], weight.shape[1], device.stream()));
        device.matmul().run(product,
                            {.x = elements(x),
                             .weight = decoded,
                             .bias = elements(call.inputs[kBias]),
                             .y = elements(call.outputs[0]),
                             .rows = x.shape[0]},
                            device.stream());
      },
      decoded_bytes(request.inputs[kWeight]));
}

constexpr Kernel kDecoded{.name = "cuda_decoded",
                          .pass = Pass::inference,
                          .can_handle = can_decode,
                          .prepare = prepare,
                          .packing = packing,
                          .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kDecodedForward = in_forward(kDecoded);

}  // namespace

KernelList linear_decoded_kernels() { return {&kDecoded, &kDecodedForward}; }

}  // namespace eadem::kernels::cuda
