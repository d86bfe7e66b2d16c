// SPDX-License-Identifier: Apache-2.0
//
// The gradients of linear: dx = dy weight, dweight += dy^T x, dbias += the sum of dy over the tokens.
//   cublaslt      bf16 or f32 operands of one dtype, sums in f32
//   cuda_threads  any mix of element types, f32 FMA
#include <algorithm>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/product_test.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/linear.h"

namespace eadem::kernels::cuda {

namespace {

enum Input { kX, kWeight, kDy };
enum Output { kDx, kDweight, kDbias };

Requirements common(const KernelRequest& request, std::initializer_list<size_t> encoded_inputs = {}) {
  return Requirements(request, encoded_inputs)
      .dtype("x", request.inputs[kX], kActivationDTypes)
      .dtype("weight", request.inputs[kWeight], kStorageDTypes)
      .dtype("dy", request.inputs[kDy], kActivationDTypes)
      .dtype("dx", request.outputs[kDx], kActivationDTypes)
      .require(is_unconnected(request.outputs[kDweight]) ||
                   Fp8TensorEncoding::of(request.inputs[kWeight].encoding) == nullptr,
               "the gradient of a weight with one scale multiplies 8-bit floats")
      .dtype("dweight", request.outputs[kDweight], {DType::f32})
      .dtype("dbias", request.outputs[kDbias], {DType::f32});
}

// Whether cuBLASLt computes the products: it asks for rows of multiples of 16 bytes.
bool takes_cublaslt(const KernelRequest& request) {
  const TensorType &weight = request.inputs[kWeight], &dx = request.outputs[kDx];
  const DType operands = request.inputs[kX].dtype;
  const int64_t elements = CudaMatmul::kAlignment / static_cast<int64_t>(dtype_size(operands));
  return weight.dtype == operands && request.inputs[kDy].dtype == operands &&
         (is_unconnected(dx) || dx.dtype == operands) && weight.fixed(0) % elements == 0 &&
         weight.fixed(1) % elements == 0 && weight.fixed(0) > 0 && weight.fixed(1) > 0;
}

Verdict can_use_cublaslt(const KernelRequest& request) {
  constexpr double kF32Share = 0.08;  // of the bf16 rate
  const bool is_f32 = request.inputs[kX].dtype == DType::f32;
  // Only dx reads the weight.
  return (is_unconnected(request.outputs[kDx]) ? common(request, {kWeight}) : common(request))
      .require(takes_cublaslt(request),
               fmt::format("x, weight and dy have to be of one dtype and their rows multiples of {} bytes",
                           CudaMatmul::kAlignment))
      .verdict({.flops_share = is_f32 ? kF32Share : 1.0, .reason = is_f32 ? "f32 units" : "tensor cores"});
}

Verdict can_use_threads(const KernelRequest& request) {
  constexpr double kShare = 0.005;  // of the bf16 rate
  return common(request)
      .require(!takes_cublaslt(request), "cublaslt takes it")
      .verdict({.flops_share = kShare, .reason = "f32 FMA, one thread for each element"});
}

// Bytes of the partial sums of dbias.
int64_t bias_scratch_bytes(const KernelRequest& request) {
  if (is_unconnected(request.outputs[kDbias])) return 0;
  const int64_t tokens = request.inputs[kDy].dim(0).bind(request.bounds);
  const int64_t parts = (tokens + kColumnSumRows - 1) / kColumnSumRows;
  return parts * request.inputs[kWeight].fixed(0) * static_cast<int64_t>(sizeof(float));
}

void add_bias_gradient(const KernelCall& call) {
  const TensorView& dy = call.inputs[kDy];
  float* dbias = elements<float>(call.outputs[kDbias]);
  if (dbias == nullptr) return;
  EADEM_CUDA_CALL(launch_column_sums({.dy = elements(dy),
                                      .dbias = dbias,
                                      .parts = static_cast<float*>(call.scratch.data),
                                      .tokens = dy.shape[0],
                                      .out = dy.shape[1],
                                      .dtype = dy.dtype},
                                     stream_of(call)));
}

PlanPtr prepare_cublaslt(const KernelRequest& request, Context& context) {
  CudaDevice& device = static_cast<CudaDevice&>(context.device);
  const DType operands = request.inputs[kX].dtype;
  const int64_t most_rows = std::max<int64_t>(request.inputs[kDy].dim(0).bind(request.bounds), 1);
  CudaMatmulProblem problem{.in = request.inputs[kWeight].fixed(1),
                            .out = request.inputs[kWeight].fixed(0),
                            .operands = operands,
                            .result = operands,
                            .form = MatmulForm::input_gradient};
  const CudaMatmul::Plan* dx =
      is_unconnected(request.outputs[kDx]) ? nullptr : &fastest_plan(device, problem, most_rows);
  problem.result = DType::f32, problem.form = MatmulForm::weight_gradient;
  const CudaMatmul::Plan* dweight =
      is_unconnected(request.outputs[kDweight]) ? nullptr : &fastest_plan(device, problem, most_rows);
  return make_plan(
      [&device, dx, dweight](const KernelCall& call) {
        const TensorView &x = call.inputs[kX], &weight = call.inputs[kWeight], &dy = call.inputs[kDy];
        const int64_t rows = dy.shape[0];
        if (void* y = elements(call.outputs[kDx]); y != nullptr)
          device.matmul().run(*dx, {.x = elements(dy), .weight = elements(weight), .y = y, .rows = rows},
                              device.stream());
        if (void* y = elements(call.outputs[kDweight]); y != nullptr)
          device.matmul().run(*dweight, {.x = elements(dy), .weight = elements(x), .y = y, .rows = rows},
                              device.stream());
        add_bias_gradient(call);
      },
      bias_scratch_bytes(request));
}

PlanPtr prepare_threads(const KernelRequest& request, Context&) {
  return make_plan(
      [](const KernelCall& call) {
        const TensorView &x = call.inputs[kX], &weight = call.inputs[kWeight], &dy = call.inputs[kDy];
        EADEM_CUDA_CALL(launch_linear_backward({.x = elements(x),
                                                .weight = elements(weight),
                                                .dy = elements(dy),
                                                .dx = elements(call.outputs[kDx]),
                                                .dweight = elements<float>(call.outputs[kDweight]),
                                                .tokens = dy.shape[0],
                                                .in = weight.shape[1],
                                                .out = weight.shape[0],
                                                .x_dtype = x.dtype,
                                                .weight_dtype = weight.dtype,
                                                .dy_dtype = dy.dtype,
                                                .dx_dtype = call.outputs[kDx].dtype},
                                               stream_of(call)));
        add_bias_gradient(call);
      },
      bias_scratch_bytes(request));
}

constexpr Kernel kCublasLt{.name = "cublaslt",
                           .pass = Pass::backward,
                           .can_handle = can_use_cublaslt,
                           .prepare = prepare_cublaslt,
                           .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kThreads{"cuda_threads", Pass::backward, can_use_threads, prepare_threads};

}  // namespace

KernelList linear_backward_kernels() { return {&kCublasLt, &kThreads}; }

}  // namespace eadem::kernels::cuda
