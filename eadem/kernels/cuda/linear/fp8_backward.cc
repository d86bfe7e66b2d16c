// SPDX-License-Identifier: Apache-2.0
//
// cuda_fp8, backward: dx = dy weight, with a weight in e4m3 whose scales belong to square blocks, and rows of dy in
// e4m3. The transposed codes are those of the transposed weight, so that dx is a product of linear's kernel of the same
// name, with its bits. The gradient of the weight is that of plain values (linear_backward.cc).
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/exact_product.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/linear.h"

namespace eadem::kernels::cuda {

namespace {

enum Input { kX, kWeight, kDy };
enum Output { kDx, kDweight, kDbias };

bool has_square_blocks(const TensorType& weight) {
  const Fp8Encoding* fp8 = Fp8Encoding::of(weight.encoding);
  return fp8 != nullptr && fp8->format() == Fp8Format{Fp8Format::Kind::e4m3, kFp8Multiple, kFp8Multiple};
}

TensorType transposed(const TensorType& weight) {
  return TensorType(weight.dtype, {weight.dim(1), weight.dim(0)}, weight.encoding);
}

Verdict can_use_fp8(const KernelRequest& request) {
  const TensorType &weight = request.inputs[kWeight], &dy = request.inputs[kDy], &dx = request.outputs[kDx];
  const MatmulInput input = request.attrs.get<LinearAttrs>().matmul_input;
  constexpr double kShare = 2.0;  // of the bf16 rate, by the nominal rates
  Requirements requirements(request, {kWeight, kDy});
  requirements.hopper()
      .require(has_square_blocks(weight),
               fmt::format("takes a weight in fp8_e4m3_block128; it is {}", to_string(weight)))
      .require(is_unconnected(request.outputs[kDweight]) && is_unconnected(request.outputs[kDbias]), "gives dx alone")
      .require(input == MatmulInput::int8,
               fmt::format("rounds dy to fp8_e4m3; matmul_input is {}", matmul_input_name(input)));
  if (has_square_blocks(weight)) {
    const TensorType types[] = {dy, transposed(weight)};
    KernelRequest product = request;
    product.inputs = types;
    requirements
        .require(takes_fp8_stream(product),
                 fmt::format("dy has to be bf16 (is {}) in rows of a multiple of {} (are {})", to_string(dy),
                             kFp8Multiple, weight.fixed(0)))
        .require(weight.fixed(1) % kFp8Multiple == 0,
                 fmt::format("rows of the weight have to be a multiple of {} (are {})", kFp8Multiple, weight.fixed(1)))
        .dtype("dx", dx, kActivationDTypes);
  }
  return requirements.verdict({.flops_share = kShare, .reason = "tensor cores, 8-bit floats"});
}

const Encoding* fp8_rows(const KernelRequest&, int input) { return input == kDy ? &RowEncoding::fp8_e4m3() : nullptr; }

PlanPtr prepare_fp8(const KernelRequest& request, Context& context) {
  const TensorType &weight = request.inputs[kWeight], &dy = request.inputs[kDy];
  const TensorType inputs[] = {TensorType(dy.dtype, dy.dims(), dy.encoding), transposed(weight), unconnected_port()};
  const TensorType outputs[] = {request.outputs[kDx]};
  const LinearAttrs attrs{.out_dtype = outputs[0].dtype};
  KernelRequest product = request;
  product.pass = Pass::inference, product.attrs = AttrsRef(attrs);
  product.inputs = inputs, product.outputs = outputs;
  std::shared_ptr<const Plan> plan = prepare_linear_fp8(product, context);
  constexpr int64_t kAlignment = ExactProduct::kScratchAlignment;
  const int64_t transposed_at = (plan->scratch_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  return make_plan(
      [plan = std::move(plan), transposed_at](const KernelCall& call) {
        const TensorView& from = call.inputs[kWeight];
        const TensorView to = view_of_planes(static_cast<char*>(call.scratch.data) + transposed_at, *from.encoding,
                                             from.dtype, {from.shape[1], from.shape[0]});
        EADEM_CUDA_CALL(launch_transpose_blocks({.codes = static_cast<const uint8_t*>(from.plane(0)),
                                                 .scales = static_cast<const float*>(from.plane(1)),
                                                 .transposed_codes = static_cast<uint8_t*>(to.plane(0)),
                                                 .transposed_scales = static_cast<float*>(to.plane(1)),
                                                 .rows = from.shape[0],
                                                 .columns = from.shape[1]},
                                                stream_of(call)));
        const TensorView operands[] = {call.inputs[kDy], to, {}};
        plan->run(
            {.inputs = operands, .outputs = call.outputs.first(1), .scratch = call.scratch, .context = call.context});
      },
      transposed_at + encoded_bytes(*weight.encoding, {weight.fixed(1), weight.fixed(0)}));
}

constexpr Kernel kFp8{.name = "cuda_fp8",
                      .pass = Pass::backward,
                      .can_handle = can_use_fp8,
                      .prepare = prepare_fp8,
                      .alignment_bytes = CudaMatmul::kAlignment,
                      .wanted_encoding = fp8_rows};

}  // namespace

KernelList linear_fp8_backward_kernels() { return {&kFp8}; }

}  // namespace eadem::kernels::cuda
