// SPDX-License-Identifier: Apache-2.0
//
// linear and the fusions linear_add and linear_gated_activation, over packed weights: plain weights
// (cpu_packed_panels), quantized weights (cpu_quantized_panels) and 8-bit floats (cpu_fp8_panels).
//
// The passes share one matrix product (matmul.h): the forward pass reads the weight packed by outputs, the gradient of
// x reads it packed by inputs (PackedPanels, transposed), and the gradient of the weight takes x as the panels and
// the gradient of y as the broadcast side.
#include "eadem/kernels/linear.h"

#include <algorithm>
#include <optional>

#include "eadem/kernels/backends.h"
#include "eadem/kernels/cpu/fp8_panels.h"
#include "eadem/kernels/cpu/group_panels.h"
#include "eadem/kernels/cpu/matmul.h"
#include "eadem/kernels/cpu/packed_panels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/fusions.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear.cc"
#include <hwy/foreach_target.h>

#include "eadem/kernels/cpu/dispatch.h"
#include "eadem/kernels/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace eadem::kernels::cpu::HWY_NAMESPACE {
namespace {

// dbias[n] += sum_t dy[t, n] for n in [begin, end): each column is one chain over t, then one addition.
void add_column_sums(float* dbias, const float* dy, int64_t tokens, int64_t out, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; n += kLanes) {
    const int64_t lanes = std::min(kLanes, end - n);
    Vec sum = zero();
    for (int64_t t = 0; t < tokens; ++t) {
      const float* p = dy + t * out + n;
      sum = hn::Add(sum, lanes == kLanes ? load(p) : load_n(p, lanes));
    }
    map(
        dbias + n, lanes, [&](Vec d) { return hn::Add(d, sum); }, dbias + n);
  }
}

}  // namespace
}  // namespace eadem::kernels::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eadem::kernels::cpu {

HWY_EXPORT(add_column_sums);

namespace {

using Side = PackedPanels::Side;

const PackedPanels* forward_packing(const KernelRequest& request, int input) {
  return PackedPanels::of_forward(request.inputs[static_cast<size_t>(input)].dtype, cpu_device(request).isa());
}

// Returns `weight` after checking that it is packed as `packing`.
const TensorView& packed(const TensorView& weight, const Encoding* packing) {
  EADEM_CHECK(weight.encoding == packing, "weight {} is not packed as was asked", to_string(weight));
  return weight;
}
const TensorView& packed_forward(const KernelCall& call, size_t input) {
  const TensorView& weight = call.inputs[input];
  return packed(weight, PackedPanels::of_forward(weight.dtype, cpu_device(call).isa()));
}

// Returns the planes of a weight packed for quantized products, in blocks or groups; nothing for other weights.
std::optional<QuantizedWeight> quantized_weight(const TensorView& weight) {
  QuantizedWeight result;
  result.quants = static_cast<const uint8_t*>(weight.plane(0));
  if (const QuantizedPanels* blocks = QuantizedPanels::of(weight.encoding)) {
    result.layout = &blocks->layout();
    result.scales = static_cast<const uint8_t*>(weight.plane(1));
    result.super_scales = static_cast<const f16_t*>(weight.plane(2));
    return result;
  }
  const GroupPanels* groups = GroupPanels::of(weight.encoding);
  if (groups == nullptr) return std::nullopt;
  const GroupFormat& format = groups->stored().format();
  result.layout = &groups->layout();
  result.scales = static_cast<const uint8_t*>(weight.plane(1));
  if (format.has_zeros) result.zeros = static_cast<const uint8_t*>(weight.plane(2));
  if (format.has_order) result.order = static_cast<const int32_t*>(weight.plane(format.has_zeros ? 3 : 2));
  return result;
}

Fp8Weight fp8_weight(const TensorView& weight, const Fp8Panels& panels) {
  const Fp8Format& format = panels.stored().format();
  return {static_cast<const uint8_t*>(weight.plane(0)), static_cast<const float*>(weight.plane(1)),
          format.block_columns, format.kind == Fp8Format::Kind::e5m2};
}

double product_flops(const KernelRequest& request, const TensorType& x, const TensorType& weight) {
  return 2.0 * elements_of(request, x) * static_cast<double>(weight.dim(0).bind(request.bounds));
}

int64_t row_scratch_bytes(const KernelRequest& request, Matmul::Source source) {
  const TensorType& x = request.inputs[0];
  return matmul_scratch_bytes(cpu_device(request), source, x.dim(0).bind(request.bounds),
                              x.dim(1).bind(request.bounds));
}

int64_t scratch_bytes(const KernelRequest& request) {
  return row_scratch_bytes(request, source_of(forward_packing(request, 1)->side()));
}

int64_t fp8_scratch_bytes(const KernelRequest& request) {
  return matmul_scratch_bytes(cpu_device(request), Matmul::Source::fp8);
}

int64_t quantized_scratch_bytes(const KernelRequest& request) {
  return row_scratch_bytes(request, Matmul::Source::quantized);
}

int64_t backward_scratch_bytes(const KernelRequest& request) {
  const CpuDevice& device = cpu_device(request);
  return std::max(matmul_scratch_bytes(device, Matmul::Source::panels),
                  matmul_scratch_bytes(device, Matmul::Source::matrix));
}

Matmul forward_product(const KernelCall& call) {
  const TensorView &y = call.outputs[0], &x = call.inputs[0], &weight = call.inputs[1];
  Matmul m;
  m.rows = x.shape[0];
  m.k_size = x.shape[1];
  m.outputs = weight.shape[0];
  m.a = elements<const float>(x);
  m.a_row_stride = m.k_size;
  m.y = elements<float>(y);
  if (const auto quantized = quantized_weight(weight)) {
    m.b_source = Matmul::Source::quantized;
    m.quantized = *quantized;
  } else if (const Fp8Panels* floats = Fp8Panels::of(weight.encoding)) {
    m.b_source = Matmul::Source::fp8;
    m.fp8 = fp8_weight(weight, *floats);
  } else {
    set_panels(m, packed_forward(call, 1));
  }
  return m;
}

void set_bias(Matmul& m, const TensorView& bias) {
  if (!bias.defined()) return;
  m.bias = bias.data;
  m.bias_dtype = bias.dtype;
}

// ---- linear, forward and inference

Verdict can_linear(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .packed("weight", r.inputs[1], {DType::f32, DType::bf16, DType::f16}, forward_packing(r, 1))
      .one_of("bias", r.inputs[2], {DType::f32, DType::bf16, DType::f16})
      .f32("y", r.outputs[0])
      .at_cost(product_flops(r, r.inputs[0], r.inputs[1]));
}

const Encoding* pack_weight(const KernelRequest& r, int input) { return input == 1 ? forward_packing(r, 1) : nullptr; }

void run_linear(const KernelCall& call) {
  Matmul m = forward_product(call);
  set_bias(m, call.inputs[2]);
  matmul(cpu_device(call), m, call.scratch.data);
}

constexpr Kernel kForward{"cpu_packed_panels", Pass::forward, can_linear, run_linear, scratch_bytes, pack_weight};
constexpr Kernel kInference{"cpu_packed_panels", Pass::inference, can_linear, run_linear, scratch_bytes, pack_weight};

// ---- linear, backward

Verdict can_linear_backward(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .packed("weight", r.inputs[1], {DType::f32, DType::bf16, DType::f16},
              PackedPanels::of(r.inputs[1].dtype, Side::transposed))
      .f32("dy", r.inputs[2])
      .f32("dx", r.outputs[0])
      .f32("dweight", r.outputs[1])
      .f32("dbias", r.outputs.size() > 2 ? r.outputs[2] : absent_port())
      .at_cost(2.0 * product_flops(r, r.inputs[0], r.inputs[1]));
}

const Encoding* pack_weight_transposed(const KernelRequest& r, int input) {
  return input == 1 ? PackedPanels::of(r.inputs[1].dtype, Side::transposed) : nullptr;
}

void run_linear_backward(const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const TensorView& x = call.inputs[0];
  const TensorView& weight = call.inputs[1];
  const TensorView& dy = call.inputs[2];
  const int64_t tokens = x.shape[0], in = x.shape[1], out = dy.shape[1];

  // 1. dx = dy weight
  if (call.outputs[0].defined()) {
    Matmul m;
    m.rows = tokens;
    m.k_size = out;
    m.outputs = in;
    m.a = elements<const float>(dy);
    m.a_row_stride = out;
    set_panels(m, packed(weight, PackedPanels::of(weight.dtype, Side::transposed)));
    m.y = elements<float>(call.outputs[0]);
    matmul(device, m, call.scratch.data);
  }

  // 2. dweight += dy^T x: rows are outputs, k runs over tokens.
  if (call.outputs[1].defined()) {
    Matmul m;
    m.rows = out;
    m.k_size = tokens;
    m.outputs = in;
    m.a = elements<const float>(dy);
    m.a_row_stride = 1;
    m.a_k_stride = out;
    m.b_source = Matmul::Source::matrix;
    m.b = elements<const float>(x);
    m.finish = Matmul::Finish::accumulate;
    m.y = elements<float>(call.outputs[1]);
    matmul(device, m, call.scratch.data);
  }

  // 3. dbias += column sums of dy
  if (call.outputs.size() > 2 && call.outputs[2].defined()) {
    const auto task = EADEM_CPU_DISPATCH(add_column_sums, device.isa());
    float* dbias = elements<float>(call.outputs[2]);
    const float* gradient = elements<const float>(dy);
    device.pool().parallel_for(ceil_div(out, 64), [&](int64_t block, int) {
      task(dbias, gradient, tokens, out, block * 64, std::min(out, block * 64 + 64));
    });
  }
}

constexpr Kernel kBackward{"cpu_packed_panels", Pass::backward,         can_linear_backward,
                           run_linear_backward, backward_scratch_bytes, pack_weight_transposed};

// ---- linear_add

Verdict can_linear_add(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .packed("weight", r.inputs[1], {DType::f32, DType::bf16, DType::f16}, forward_packing(r, 1))
      .one_of("bias", r.inputs[2], {DType::f32, DType::bf16, DType::f16})
      .f32("residual", r.inputs[3])
      .f32("y", r.outputs[0])
      .at_cost(product_flops(r, r.inputs[0], r.inputs[1]));
}

void run_linear_add(const KernelCall& call) {
  Matmul m = forward_product(call);
  set_bias(m, call.inputs[2]);
  m.residual = elements<const float>(call.inputs[3]);
  matmul(cpu_device(call), m, call.scratch.data);
}

constexpr Kernel kLinearAdd{"cpu_packed_panels", Pass::inference, can_linear_add,
                            run_linear_add,      scratch_bytes,   pack_weight};

// ---- linear_gated_activation

Verdict can_linear_gated(const KernelRequest& r) {
  return Requirements(r)
      .f32("x", r.inputs[0])
      .packed("gate_weight", r.inputs[1], {DType::f32, DType::bf16, DType::f16}, forward_packing(r, 1))
      .packed("up_weight", r.inputs[2], {r.inputs[1].dtype}, forward_packing(r, 2))
      .f32("y", r.outputs[0])
      .at_cost(2.0 * product_flops(r, r.inputs[0], r.inputs[1]));
}

const Encoding* pack_both_weights(const KernelRequest& r, int input) {
  return input == 1 || input == 2 ? forward_packing(r, input) : nullptr;
}

void run_linear_gated(const KernelCall& call) {
  Matmul m = forward_product(call);
  if (m.b_source == Matmul::Source::quantized)
    m.quantized_up = quantized_weight(call.inputs[2]).value();
  else if (m.b_source == Matmul::Source::fp8)
    m.fp8_up = fp8_weight(call.inputs[2], *Fp8Panels::of(call.inputs[2].encoding));
  else
    m.b_up = packed_forward(call, 2).data;
  m.finish = Matmul::Finish::gated;
  m.activation = call.attrs.get<LinearGatedActivationAttrs>().kind;
  matmul(cpu_device(call), m, call.scratch.data);
}

constexpr Kernel kLinearGated{"cpu_packed_panels", Pass::inference, can_linear_gated,
                              run_linear_gated,    scratch_bytes,   pack_both_weights};

// ---- Quantized weights. x is quantized row by row to 8 bits, too (quantized_matmul.h).

// The reason why these kernels do not take a weight; empty if they do.
std::string refusal_of(std::string_view port, const TensorType& weight) {
  if (quantized_packing_of(weight.encoding) == nullptr)
    return fmt::format("takes {} in quantized blocks or groups; it is {}", port,
                       weight.encoding == nullptr ? dtype_name(weight.dtype) : weight.encoding->name());
  if (GroupPanels::of(weight.encoding) != nullptr && weight.fixed(1) % kStep != 0)
    return fmt::format("takes {} in rows of whole steps of {}; it is {}", port, kStep, to_string(weight));
  return "";
}

Requirements& require_quantized(Requirements& requirements, std::string_view port, const TensorType& weight) {
  const std::string refusal = refusal_of(port, weight);
  return requirements.require(refusal.empty(), refusal);
}

bool has_order(const TensorType& weight) {
  const GroupPanels* groups = GroupPanels::of(weight.encoding);
  return groups != nullptr && groups->stored().format().has_order;
}

Verdict can_quantized(const KernelRequest& r) {
  Requirements requirements(r);
  return require_quantized(requirements, "weight", r.inputs[1])
      .f32("x", r.inputs[0])
      .one_of("bias", r.inputs[2], {DType::f32, DType::bf16, DType::f16})
      .f32("residual", r.inputs.size() > 3 ? r.inputs[3] : absent_port())
      .f32("y", r.outputs[0])
      .at_cost(product_flops(r, r.inputs[0], r.inputs[1]));
}

Verdict can_quantized_gated(const KernelRequest& r) {
  Requirements requirements(r);
  require_quantized(requirements, "gate_weight", r.inputs[1]);
  return require_quantized(requirements, "up_weight", r.inputs[2])
      .require(quantized_packing_of(r.inputs[1].encoding) == quantized_packing_of(r.inputs[2].encoding),
               "takes gate_weight and up_weight in the same encoding")
      .require(!has_order(r.inputs[1]), "takes columns of gate_weight and up_weight in the order of x")
      .f32("x", r.inputs[0])
      .f32("y", r.outputs[0])
      .at_cost(2.0 * product_flops(r, r.inputs[0], r.inputs[1]));
}

const Encoding* pack_quantized(const KernelRequest& r, int input) {
  return input == 1 ? quantized_packing_of(r.inputs[1].encoding) : nullptr;
}

const Encoding* pack_both_quantized(const KernelRequest& r, int input) {
  return input == 1 || input == 2 ? quantized_packing_of(r.inputs[static_cast<size_t>(input)].encoding) : nullptr;
}

constexpr Kernel kQuantizedForward{"cpu_quantized_panels",  Pass::forward, can_quantized, run_linear,
                                   quantized_scratch_bytes, pack_quantized};
constexpr Kernel kQuantizedInference{"cpu_quantized_panels",  Pass::inference, can_quantized, run_linear,
                                     quantized_scratch_bytes, pack_quantized};
constexpr Kernel kQuantizedAdd{"cpu_quantized_panels", Pass::inference,         can_quantized,
                               run_linear_add,         quantized_scratch_bytes, pack_quantized};
constexpr Kernel kQuantizedGated{"cpu_quantized_panels", Pass::inference,         can_quantized_gated,
                                 run_linear_gated,       quantized_scratch_bytes, pack_both_quantized};

// ---- 8-bit floats. Products are as exact as with the f32 values that the weights decode to.

Requirements& require_fp8(Requirements& requirements, std::string_view port, const TensorType& weight) {
  return requirements.require(
      Fp8Panels::of(weight.encoding) != nullptr,
      fmt::format("takes {} in 8-bit floats; it is {}", port,
                  weight.encoding == nullptr ? dtype_name(weight.dtype) : weight.encoding->name()));
}

Verdict can_fp8(const KernelRequest& r) {
  Requirements requirements(r);
  return require_fp8(requirements, "weight", r.inputs[1])
      .f32("x", r.inputs[0])
      .one_of("bias", r.inputs[2], {DType::f32, DType::bf16, DType::f16})
      .f32("residual", r.inputs.size() > 3 ? r.inputs[3] : absent_port())
      .f32("y", r.outputs[0])
      .at_cost(product_flops(r, r.inputs[0], r.inputs[1]));
}

Verdict can_fp8_gated(const KernelRequest& r) {
  Requirements requirements(r);
  require_fp8(requirements, "gate_weight", r.inputs[1]);
  return require_fp8(requirements, "up_weight", r.inputs[2])
      .f32("x", r.inputs[0])
      .f32("y", r.outputs[0])
      .at_cost(2.0 * product_flops(r, r.inputs[0], r.inputs[1]));
}

const Encoding* pack_fp8(const KernelRequest& r, int input) {
  return input == 1 ? Fp8Panels::of(r.inputs[1].encoding) : nullptr;
}

const Encoding* pack_both_fp8(const KernelRequest& r, int input) {
  return input == 1 || input == 2 ? Fp8Panels::of(r.inputs[static_cast<size_t>(input)].encoding) : nullptr;
}

constexpr Kernel kFp8Forward{"cpu_fp8_panels", Pass::forward, can_fp8, run_linear, fp8_scratch_bytes, pack_fp8};
constexpr Kernel kFp8Inference{"cpu_fp8_panels", Pass::inference, can_fp8, run_linear, fp8_scratch_bytes, pack_fp8};
constexpr Kernel kFp8Add{"cpu_fp8_panels", Pass::inference, can_fp8, run_linear_add, fp8_scratch_bytes, pack_fp8};
constexpr Kernel kFp8Gated{"cpu_fp8_panels", Pass::inference,   can_fp8_gated,
                           run_linear_gated, fp8_scratch_bytes, pack_both_fp8};

}  // namespace

KernelList linear_kernels() {
  return {&kForward, &kBackward, &kInference, &kQuantizedForward, &kQuantizedInference, &kFp8Forward, &kFp8Inference};
}
KernelList linear_add_kernels() { return {&kLinearAdd, &kQuantizedAdd, &kFp8Add}; }
KernelList linear_gated_activation_kernels() { return {&kLinearGated, &kQuantizedGated, &kFp8Gated}; }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
