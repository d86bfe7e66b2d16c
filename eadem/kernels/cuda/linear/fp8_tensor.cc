// SPDX-License-Identifier: Apache-2.0
//
// cuda_fp8_tensor: products of two matrices in 8-bit floats with a scale each (Fp8TensorEncoding), by cuBLASLt.
//
//   forward, inference   y  = x weight^T + bias     e4m3, e4m3
//   backward             dx = dy weight             e5m2, e4m3
//                        dweight += dy^T x          e5m2, e4m3
//
// The library wants the terms of a sum to be neighbours in both operands, so the gradients read transposed codes. Its
// "fast" sums, which keep fewer bits, are not used. The gradient of the bias is that of plain values and has a node of
// its own (linear_backward.cc).
#include <algorithm>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/linear/product_test.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/linear.h"

namespace eadem::kernels::cuda {

namespace {

struct TensorPort {
  enum Input { x, weight, bias, dy = 2 };
  enum Output { dx, dweight, dbias };
};
using TensorKind = Fp8TensorEncoding::Kind;

const Fp8TensorEncoding* weight_with_one_scale(const KernelRequest& request) {
  return Fp8TensorEncoding::of(request.inputs[TensorPort::weight].encoding);
}

// The encoding of x or of dy beside a weight.
const Encoding* beside_weight(const KernelRequest& request, TensorKind kind) {
  const Fp8TensorEncoding* weight = weight_with_one_scale(request);
  return weight == nullptr ? nullptr : &Fp8TensorEncoding::of(kind, weight->is_delayed());
}

Requirements tensor_requirements(const KernelRequest& request, std::initializer_list<size_t> encoded_inputs) {
  constexpr int64_t kMultiple = Fp8TensorEncoding::kRowMultiple;
  const TensorType &weight = request.inputs[TensorPort::weight], &x = request.inputs[TensorPort::x];
  const Fp8TensorEncoding* encoding = weight_with_one_scale(request);
  const MatmulInput input = request.attrs.get<LinearAttrs>().matmul_input;
  Requirements requirements(request, encoded_inputs);
  requirements.hopper()
      .require(encoding != nullptr && encoding->kind() == TensorKind::e4m3,
               fmt::format("takes a weight in e4m3 with one scale; it is {}", to_string(weight)))
      .require(x.encoding == nullptr || x.encoding == beside_weight(request, TensorKind::e4m3),
               fmt::format("x is {}; the weight is {}", to_string(x), to_string(weight)))
      .dtype("x", x, kActivationDTypes)
      .require(input == MatmulInput::int8,
               fmt::format("rounds operands to 8-bit floats; matmul_input is {}", matmul_input_name(input)))
      .require(weight.rank() == 2 && weight.fixed(0) % kMultiple == 0 && weight.fixed(1) % kMultiple == 0,
               fmt::format("sides of the weight have to be multiples of {} (it is {})", kMultiple, to_string(weight)));
  return requirements;
}

Estimate tensor_estimate() {
  constexpr double kShare = 2.0;  // of the bf16 rate, by the nominal rates
  return {.flops_share = kShare, .reason = "tensor cores, 8-bit floats"};
}

Verdict can_multiply_tensors(const KernelRequest& request) {
  const TensorType &bias = request.inputs[TensorPort::bias], &y = request.outputs[0];
  return tensor_requirements(request, {TensorPort::x, TensorPort::weight})
      .dtype("y", y, kActivationDTypes)
      .same_dtype("bias", bias, "y", y)
      .require(is_unconnected(bias) || y.dtype == DType::bf16, "with a bias, y has to be bf16")
      .verdict(tensor_estimate());
}

Verdict can_differentiate_tensors(const KernelRequest& request) {
  const TensorType& dy = request.inputs[TensorPort::dy];
  return tensor_requirements(request, {TensorPort::x, TensorPort::weight, TensorPort::dy})
      .require(is_unconnected(request.outputs[TensorPort::dbias]),
               "gives dx and dweight; dbias is that of plain values")
      .require(dy.encoding == nullptr || dy.encoding == beside_weight(request, TensorKind::e5m2),
               fmt::format("dy is {}", to_string(dy)))
      .dtype("dy", dy, kActivationDTypes)
      .dtype("dx", request.outputs[TensorPort::dx], kActivationDTypes)
      .dtype("dweight", request.outputs[TensorPort::dweight], {DType::f32})
      .verdict(tensor_estimate());
}

const Encoding* wanted_beside_weight(const KernelRequest& request, int input) {
  return input == TensorPort::x ? beside_weight(request, TensorKind::e4m3) : nullptr;
}

// x is wanted in 8 bits even where only dx is made, so that no plain x has to be kept for its shape.
const Encoding* wanted_beside_weight_backward(const KernelRequest& request, int input) {
  return input == TensorPort::x    ? beside_weight(request, TensorKind::e4m3)
         : input == TensorPort::dy ? beside_weight(request, TensorKind::e5m2)
                                   : nullptr;
}

const float* scale_of(const TensorView& encoded) { return static_cast<const float*>(encoded.plane(2)); }

PlanPtr prepare_tensor_product(const KernelRequest& request, Context& context) {
  CudaDevice& device = static_cast<CudaDevice&>(context.device);
  const TensorType& weight = request.inputs[TensorPort::weight];
  const CudaMatmul::Plan* plan =
      &fastest_plan(device,
                    {.in = weight.fixed(1),
                     .out = weight.fixed(0),
                     .result = request.outputs[0].dtype,
                     .bias = !is_unconnected(request.inputs[TensorPort::bias]),
                     .e4m3 = true,
                     .one_scale = true},
                    std::max<int64_t>(request.inputs[TensorPort::x].dim(0).bind(request.bounds), 1));
  return make_plan([&device, plan](const KernelCall& call) {
    const TensorView &x = call.inputs[TensorPort::x], &weight = call.inputs[TensorPort::weight];
    device.matmul().run(*plan,
                        {.x = x.plane(0),
                         .weight = weight.plane(0),
                         .bias = elements(call.inputs[TensorPort::bias]),
                         .y = elements(call.outputs[0]),
                         .rows = x.shape[0],
                         .x_scales = scale_of(x),
                         .weight_scales = scale_of(weight)},
                        device.stream());
  });
}

PlanPtr prepare_tensor_gradients(const KernelRequest& request, Context& context) {
  CudaDevice& device = static_cast<CudaDevice&>(context.device);
  const TensorType &weight = request.inputs[TensorPort::weight], &dx = request.outputs[TensorPort::dx];
  const int64_t most_rows = std::max<int64_t>(request.inputs[TensorPort::dy].dim(0).bind(request.bounds), 1);
  // dx is a product of dy with the transposed weight.
  const CudaMatmul::Plan* of_x = is_unconnected(dx) ? nullptr
                                                    : &fastest_plan(device,
                                                                    {.in = weight.fixed(0),
                                                                     .out = weight.fixed(1),
                                                                     .result = dx.dtype,
                                                                     .e4m3 = true,
                                                                     .one_scale = true,
                                                                     .x_is_e5m2 = true},
                                                                    most_rows);
  const CudaMatmul::Plan* of_weight = is_unconnected(request.outputs[TensorPort::dweight])
                                          ? nullptr
                                          : &fastest_plan(device,
                                                          {.in = weight.fixed(1),
                                                           .out = weight.fixed(0),
                                                           .result = DType::f32,
                                                           .form = MatmulForm::weight_gradient,
                                                           .e4m3 = true,
                                                           .one_scale = true,
                                                           .x_is_e5m2 = true},
                                                          Fp8TensorEncoding::padded_rows(most_rows));
  return make_plan([&device, of_x, of_weight](const KernelCall& call) {
    const TensorView &x = call.inputs[TensorPort::x], &weight = call.inputs[TensorPort::weight],
                     &dy = call.inputs[TensorPort::dy];
    if (void* y = elements(call.outputs[TensorPort::dx]); y != nullptr)
      device.matmul().run(*of_x,
                          {.x = dy.plane(0),
                           .weight = weight.plane(1),
                           .y = y,
                           .rows = dy.shape[0],
                           .x_scales = scale_of(dy),
                           .weight_scales = scale_of(weight)},
                          device.stream());
    // Added rows are zeros.
    if (void* y = elements(call.outputs[TensorPort::dweight]); y != nullptr)
      device.matmul().run(*of_weight,
                          {.x = dy.plane(1),
                           .weight = x.plane(1),
                           .y = y,
                           .rows = Fp8TensorEncoding::padded_rows(dy.shape[0]),
                           .x_scales = scale_of(dy),
                           .weight_scales = scale_of(x)},
                          device.stream());
  });
}

constexpr Kernel kTensorProduct{.name = "cuda_fp8_tensor",
                                .pass = Pass::inference,
                                .can_handle = can_multiply_tensors,
                                .prepare = prepare_tensor_product,
                                .alignment_bytes = CudaMatmul::kAlignment,
                                .wanted_encoding = wanted_beside_weight};
constexpr Kernel kTensorProductForward = in_forward(kTensorProduct);
constexpr Kernel kTensorGradients{.name = "cuda_fp8_tensor",
                                  .pass = Pass::backward,
                                  .can_handle = can_differentiate_tensors,
                                  .prepare = prepare_tensor_gradients,
                                  .alignment_bytes = CudaMatmul::kAlignment,
                                  .wanted_encoding = wanted_beside_weight_backward};

}  // namespace

KernelList linear_fp8_tensor_kernels() { return {&kTensorProduct, &kTensorProductForward, &kTensorGradients}; }

}  // namespace eadem::kernels::cuda
