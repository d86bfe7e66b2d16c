// SPDX-License-Identifier: Apache-2.0
//
// cpu_fp8_tensor: products of two matrices in 8-bit floats with a scale each (Fp8TensorEncoding).
//
//   forward, inference   y  = x weight^T + bias     e4m3, e4m3
//   backward             dx = dy weight             e5m2, e4m3
//                        dweight += dy^T x          e5m2, e4m3
//
// Operands are decoded to f32 in each call and multiplied as such: for tests and comparison, not for speed. The
// gradient of the bias is that of plain values and has a node of its own.
#include "eadem/kernels/cpu/linear/fp8_tensor.h"

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/cpu/linear/matmul.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/linear.h"

namespace eadem::kernels::cpu {

namespace {

struct TensorPort {
  enum Input { x, weight, bias, dy = 2 };
  enum Output { dx, dweight, dbias };
};
using TensorKind = Fp8TensorEncoding::Kind;

int64_t tensor_values_bytes(const Shape& shape) {
  constexpr int64_t kAlignment = 64;
  return round_up(shape.num_elements() * static_cast<int64_t>(sizeof(float)), kAlignment);
}

// The values of a matrix, or of the transposed one, at `values`.
void decode_tensor(CpuDevice& device, float* values, const TensorView& encoded, bool transposed) {
  EADEM_CHECK(encoded.encoding != nullptr, "{} is not rounded: its graph has no quantize before it",
              to_string(encoded));
  const int64_t rows = encoded.shape[0], columns = encoded.shape[1];
  const auto& encoding = static_cast<const Fp8TensorEncoding&>(*encoded.encoding);
  if (!transposed) {
    device.pool().parallel_ranges(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) encoding.decode_row(values + r * columns, encoded, r);
    });
    return;
  }
  const float scale = Fp8TensorEncoding::scale(encoded);
  const auto* codes = static_cast<const uint8_t*>(encoded.plane(0));
  device.pool().parallel_ranges(columns, 1, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c)
      for (int64_t r = 0; r < rows; ++r)
        values[c * rows + r] = scale * fp8_to_float(encoding.kind(), codes[r * columns + c]);
  });
}

// The product of a, or of a transposed, with b, or with b transposed. Memory of a call: a, b, what the product asks
// for.
class TensorProduct {
 public:
  TensorProduct(const CpuDevice& device, const Shape& a, const Shape& b, bool a_is_transposed, bool b_is_transposed,
                MatmulTypes::Finish finish, std::optional<DType> bias)
      : a_is_transposed_(a_is_transposed),
        b_is_transposed_(b_is_transposed),
        product_(device, {.source = MatmulTypes::Source::matrix, .finish = finish, .bias = bias}),
        a_bytes_(tensor_values_bytes(a)),
        b_bytes_(tensor_values_bytes(b)),
        product_bytes_(product_.scratch_bytes(device, a[a_is_transposed ? 1 : 0], a[a_is_transposed ? 0 : 1])) {}

  int64_t scratch_bytes() const { return a_bytes_ + b_bytes_ + product_bytes_; }

  void run(CpuDevice& device, const TensorView& a, const TensorView& b, const void* bias, float* y,
           void* scratch) const {
    auto* memory = static_cast<std::byte*>(scratch);
    auto *a_values = reinterpret_cast<float*>(memory), *b_values = reinterpret_cast<float*>(memory + a_bytes_);
    decode_tensor(device, a_values, a, !a_is_transposed_);  // the product reads it by columns
    decode_tensor(device, b_values, b, b_is_transposed_);
    Matmul m;
    m.rows = a.shape[a_is_transposed_ ? 1 : 0];
    m.k_size = a.shape[a_is_transposed_ ? 0 : 1];
    m.outputs = b.shape[b_is_transposed_ ? 0 : 1];
    m.a = a_values;
    m.a_row_stride = 1;
    m.a_k_stride = m.rows;
    m.b.data = b_values;
    m.bias = bias;
    m.y = y;
    product_.run(device, m, memory + a_bytes_ + b_bytes_);
  }

 private:
  bool a_is_transposed_, b_is_transposed_;
  MatmulPlan product_;
  int64_t a_bytes_, b_bytes_, product_bytes_;
};

const Fp8TensorEncoding* encoding_of_weight(const KernelRequest& r) {
  return Fp8TensorEncoding::of(r.inputs[TensorPort::weight].encoding);
}

// The encoding of x or of dy beside a weight.
const Encoding* encoding_beside(const KernelRequest& r, TensorKind kind) {
  const Fp8TensorEncoding* weight = encoding_of_weight(r);
  return weight == nullptr ? nullptr : &Fp8TensorEncoding::of(kind, weight->is_delayed());
}

Requirements tensor_requirements(const KernelRequest& r) {
  const MatmulInput input = r.attrs.get<LinearAttrs>().matmul_input;
  const Fp8TensorEncoding* weight = encoding_of_weight(r);
  Requirements requirements(r);
  requirements
      .require(weight != nullptr && weight->kind() == TensorKind::e4m3,
               fmt::format("takes a weight in e4m3 with one scale; it is {}", to_string(r.inputs[TensorPort::weight])))
      .require(input == MatmulInput::int8,
               fmt::format("rounds operands to 8-bit floats; matmul_input is {}", matmul_input_name(input)))
      .f32("x", r.inputs[TensorPort::x], encoding_beside(r, TensorKind::e4m3));
  return requirements;
}

constexpr std::string_view kTensorReason = "decodes in each call";

Verdict can_multiply_tensors(const KernelRequest& r) {
  return tensor_requirements(r)
      .one_of("bias", r.inputs[TensorPort::bias], kStorageDTypes)
      .f32("y", r.outputs[0])
      .verdict({.reason = std::string(kTensorReason)});
}

Verdict can_differentiate_tensors(const KernelRequest& r) {
  return tensor_requirements(r)
      .require(is_unconnected(r.outputs[TensorPort::dbias]), "gives dx and dweight; dbias is that of plain values")
      .f32("dy", r.inputs[TensorPort::dy], encoding_beside(r, TensorKind::e5m2))
      .f32("dx", r.outputs[TensorPort::dx])
      .f32("dweight", r.outputs[TensorPort::dweight])
      .verdict({.reason = std::string(kTensorReason)});
}

const Encoding* wanted_beside_weight(const KernelRequest& r, int input) {
  return input == TensorPort::x ? encoding_beside(r, TensorKind::e4m3) : nullptr;
}

// x is wanted in 8 bits even where only dx is made, so that no plain x has to be kept for its shape.
const Encoding* wanted_beside_weight_backward(const KernelRequest& r, int input) {
  return input == TensorPort::x    ? encoding_beside(r, TensorKind::e4m3)
         : input == TensorPort::dy ? encoding_beside(r, TensorKind::e5m2)
                                   : nullptr;
}

PlanPtr prepare_tensor_product(const KernelRequest& r, Context&) {
  const TensorType& bias = r.inputs[TensorPort::bias];
  const TensorProduct product(cpu_device(r), r.inputs[TensorPort::x].bind(r.bounds),
                              r.inputs[TensorPort::weight].bind(r.bounds), false, true, MatmulTypes::Finish::store,
                              is_unconnected(bias) ? std::nullopt : std::optional<DType>(bias.dtype));
  return make_plan(
      [product](const KernelCall& call) {
        product.run(cpu_device(call), call.inputs[TensorPort::x], call.inputs[TensorPort::weight],
                    call.inputs[TensorPort::bias].data, elements<float>(call.outputs[0]), call.scratch.data);
      },
      product.scratch_bytes());
}

PlanPtr prepare_tensor_gradients(const KernelRequest& r, Context&) {
  const Shape x = r.inputs[TensorPort::x].bind(r.bounds), weight = r.inputs[TensorPort::weight].bind(r.bounds),
              dy = r.inputs[TensorPort::dy].bind(r.bounds);
  const TensorProduct dx(cpu_device(r), dy, weight, false, false, MatmulTypes::Finish::store, std::nullopt),
      dweight(cpu_device(r), dy, x, true, false, MatmulTypes::Finish::accumulate, std::nullopt);
  return make_plan(
      [dx, dweight](const KernelCall& call) {
        CpuDevice& device = cpu_device(call);
        if (float* y = elements<float>(call.outputs[TensorPort::dx]); y != nullptr)
          dx.run(device, call.inputs[TensorPort::dy], call.inputs[TensorPort::weight], nullptr, y, call.scratch.data);
        if (float* y = elements<float>(call.outputs[TensorPort::dweight]); y != nullptr)
          dweight.run(device, call.inputs[TensorPort::dy], call.inputs[TensorPort::x], nullptr, y, call.scratch.data);
      },
      std::max(is_unconnected(r.outputs[TensorPort::dx]) ? 0 : dx.scratch_bytes(),
               is_unconnected(r.outputs[TensorPort::dweight]) ? 0 : dweight.scratch_bytes()));
}

constexpr Kernel kTensorProductInference{.name = "cpu_fp8_tensor",
                                         .pass = Pass::inference,
                                         .can_handle = can_multiply_tensors,
                                         .prepare = prepare_tensor_product,
                                         .wanted_encoding = wanted_beside_weight};
constexpr Kernel kTensorProductForward{.name = "cpu_fp8_tensor",
                                       .pass = Pass::forward,
                                       .can_handle = can_multiply_tensors,
                                       .prepare = prepare_tensor_product,
                                       .wanted_encoding = wanted_beside_weight};
constexpr Kernel kTensorProductBackward{.name = "cpu_fp8_tensor",
                                        .pass = Pass::backward,
                                        .can_handle = can_differentiate_tensors,
                                        .prepare = prepare_tensor_gradients,
                                        .wanted_encoding = wanted_beside_weight_backward};

}  // namespace

KernelList fp8_tensor_kernels() { return {&kTensorProductInference, &kTensorProductForward, &kTensorProductBackward}; }

}  // namespace eadem::kernels::cpu
