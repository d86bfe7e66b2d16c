// SPDX-License-Identifier: Apache-2.0
//
// linear and the fusion linear_add: cuBLASLt where it has the mix of element types, else plain f32 tiles. Both keep
// the promise that a row's bits do not depend on the rows beside it.
#include "eadem/kernels/linear.h"

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

// Shares of the device's bf16 rate: f32 products of cuBLASLt (67 of 989 TFLOP/s on an H100), and the tiles.
constexpr double kF32Share = 0.08;
constexpr double kTilesShare = 0.01;

double product_flops(const KernelRequest& request) {
  return 2.0 * elements_of(request, request.inputs[0]) * static_cast<double>(request.inputs[1].fixed(0));
}

Requirements common(const KernelRequest& request) {
  Requirements requirements(request);
  requirements.dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("weight", request.inputs[1], kStorageDTypes)
      .dtype("bias", request.inputs[2], kStorageDTypes)
      .dtype("y", request.outputs[0], kActivationDTypes)
      .require(request.inputs[1].fixed(1) > 0, "the sum has no terms");
  if (request.inputs.size() > 3) requirements.same_dtype("residual", request.inputs[3], "y", request.outputs[0]);
  return requirements;
}

Verdict can_use_cublaslt(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1], &y = request.outputs[0];
  const double share = x.dtype == DType::f32 ? kF32Share : 1.0;
  const int64_t row_bytes = weight.fixed(1) * static_cast<int64_t>(dtype_size(weight.dtype));
  return common(request)
      .same_dtype("weight", weight, "x", x)
      .same_dtype("bias", request.inputs[2], "y", y)  // the epilogue adds it before the one rounding
      .require(x.dtype != DType::f32 || y.dtype == DType::f32, "x is f32 and y is bf16; cuBLASLt gives f32 from f32")
      .require(row_bytes % CudaMatmul::kAlignment == 0,
               fmt::format("a row of weight is {} bytes, not a multiple of {}", row_bytes, CudaMatmul::kAlignment))
      .at_cost(product_flops(request) / share);
}

// Never cheaper than cuBLASLt: weights are read once per 64 rows, and a tile is computed whole.
Verdict can_use_tiles(const KernelRequest& request) {
  Verdict verdict = common(request).at_cost(product_flops(request) / kTilesShare);
  verdict.cost_us *= 2.0;
  return verdict;
}

LinearParams linear_params(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &weight = call.inputs[1], &bias = call.inputs[2], &y = call.outputs[0];
  return {.x = elements(x),
          .weight = elements(weight),
          .bias = elements(bias),
          .residual = call.inputs.size() > 3 ? elements(call.inputs[3]) : nullptr,
          .y = elements(y),
          .tokens = x.shape[0],
          .in = x.shape[1],
          .out = weight.shape[0],
          .x_dtype = x.dtype,
          .weight_dtype = weight.dtype,
          .bias_dtype = bias.dtype,
          .y_dtype = y.dtype};
}

void run_cublaslt(const KernelCall& call) {
  const LinearParams p = linear_params(call);
  CudaDevice& device = cuda_device(call);
  device.matmul().run(
      {.in = p.in, .out = p.out, .operands = p.x_dtype, .result = p.y_dtype, .bias = p.bias != nullptr},
      {.x = p.x, .weight = p.weight, .bias = p.bias, .residual = p.residual, .y = p.y, .rows = p.tokens},
      device.stream());
}

void run_tiles(const KernelCall& call) { EADEM_CUDA_CALL(launch_linear_tiles(linear_params(call), stream_of(call))); }

constexpr Kernel kCublasLt{.name = "cublaslt",
                           .pass = Pass::inference,
                           .can_handle = can_use_cublaslt,
                           .run = run_cublaslt,
                           .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kTiles{"cuda_tiles", Pass::inference, can_use_tiles, run_tiles};

}  // namespace

KernelList linear_kernels() { return {&kCublasLt, &kTiles}; }
KernelList linear_add_kernels() { return {&kCublasLt, &kTiles}; }

}  // namespace eadem::kernels::cuda
