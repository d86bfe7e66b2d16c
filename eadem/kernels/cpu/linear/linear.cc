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

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/linear/bf16_gradient.h"
#include "eadem/kernels/cpu/linear/bf16_tile_rows.h"
#include "eadem/kernels/cpu/linear/fp8_panels.h"
#include "eadem/kernels/cpu/linear/fp8_rounded.h"
#include "eadem/kernels/cpu/linear/fp8_tensor.h"
#include "eadem/kernels/cpu/linear/group_panels.h"
#include "eadem/kernels/cpu/linear/matmul.h"
#include "eadem/kernels/cpu/linear/packed_panels.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/cpu/weight_reader.h"
#include "eadem/kernels/fusions.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "eadem/kernels/cpu/linear/linear.cc"
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

EADEM_CPU_EXPORT(add_column_sums);

namespace {

using Side = PackedPanels::Side;

// How far x may be rounded, of linear and its fusion with an addition, and of its fusion with a gate.
MatmulInput linear_input(const KernelRequest& r) { return r.attrs.get<LinearAttrs>().matmul_input; }
MatmulInput gated_input(const KernelRequest& r) { return r.attrs.get<LinearGatedActivationAttrs>().matmul_input; }

const PackedPanels* forward_packing(const KernelRequest& request, int input, MatmulInput x) {
  return PackedPanels::of_forward(request.inputs[static_cast<size_t>(input)].dtype, cpu_device(request).isa(), x);
}

// ---- Forward and inference. The kernels of all packings and fusions differ in what they accept, and share plans.

enum LinearInput { kX, kWeight, kBias, kResidual };
enum GatedInput { kGateWeight = 1, kUpWeight };

using Packing = const Encoding* (*)(const KernelRequest& request, int input);
using Input = MatmulInput (*)(const KernelRequest& request);

// The encoding to which x is rounded before products with a weight in `packing` read it, or null: they read it as it
// is, or round it to int8 rows themselves because the weight's columns have an order of their own.
const Encoding* rounding_for(const MatmulTypes& types) {
  if (types.has_order) return nullptr;
  switch (types.source) {
    case MatmulTypes::Source::quantized: return &Int8Rows::of(*types.layout);
    case MatmulTypes::Source::vnni: return &Bf16TileRows::instance();
    default: return nullptr;
  }
}

template <Packing kPacking, Input kInput>
const Encoding* rounding_of_x(const KernelRequest& r, int input) {
  if (input != kX) return nullptr;
  const Encoding* packing = kPacking(r, kWeight);
  return packing == nullptr ? nullptr : rounding_for(WeightReader(packing, kInput(r)).types());
}

void read_x(Matmul& m, const TensorView& x) {
  if (x.encoding == nullptr)
    m.a = elements<const float>(x);
  else if (x.encoding == &Bf16TileRows::instance())
    m.a_tiles = TileRows::in_order(x.data, x.shape[0]);
  else
    m.a_codes = int8_row_planes(x);
}

// y = x weight^T for the first weight.
Matmul forward_product(const KernelCall& call, const WeightReader& reader) {
  const TensorView &x = call.inputs[kX], &weight = call.inputs[kWeight];
  Matmul m;
  m.rows = x.shape[0];
  m.k_size = m.a_row_stride = x.shape[1];
  m.outputs = weight.shape[0];
  read_x(m, x);
  m.b = reader.read_or_pack(weight);
  if (const TensorView& y = call.outputs[0]; y.encoding == nullptr)
    m.y = elements<float>(y);
  else
    m.y_rows = int8_row_planes(y);
  return m;
}

int64_t forward_scratch(const KernelRequest& r, const MatmulPlan& product, const WeightReader& reader) {
  const CpuDevice& device = cpu_device(r);
  const Shape x = r.inputs[kX].bind(r.bounds);
  const bool is_rounded = r.inputs[kX].encoding != nullptr;
  const int64_t usual = product.scratch_bytes(device, x[0], x[1], is_rounded), panel = reader.panel_bytes(x[1]);
  return panel == 0 ? usual : std::max(usual, product.scratch_bytes_stored(device, x[0], x[1], panel, is_rounded));
}

// linear, and linear_add, which has a residual.
template <Packing kPacking>
PlanPtr prepare_linear(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const WeightReader reader(kPacking(r, kWeight), linear_input(r));
  MatmulTypes types = reader.types();
  if (!is_unconnected(r.inputs[kBias])) types.bias = r.inputs[kBias].dtype;
  const bool adds = r.inputs.size() > kResidual;
  const MatmulPlan product(device, types);
  return make_plan(
      [=](const KernelCall& call) {
        Matmul m = forward_product(call, reader);
        m.bias = call.inputs[kBias].data;
        if (adds) m.residual = elements<const float>(call.inputs[kResidual]);
        product.run(cpu_device(call), m, call.scratch.data);
      },
      forward_scratch(r, product, reader));
}

template <Packing kPacking>
PlanPtr prepare_gated(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  const WeightReader gate(kPacking(r, kGateWeight), gated_input(r)), up(kPacking(r, kUpWeight), gated_input(r));
  const auto& attrs = r.attrs.get<LinearGatedActivationAttrs>();
  MatmulTypes types = gate.types();
  types.finish = attrs.round_to != nullptr ? MatmulTypes::Finish::gated_rows : MatmulTypes::Finish::gated;
  types.activation = attrs.kind;
  const MatmulPlan product(device, types);
  return make_plan(
      [=](const KernelCall& call) {
        Matmul m = forward_product(call, gate);
        m.b_up = up.read_or_pack(call.inputs[kUpWeight]);
        product.run(cpu_device(call), m, call.scratch.data);
      },
      forward_scratch(r, product, gate));
}

// The ports besides the weights. linear_gated_activation has no bias and no residual.
Verdict verdict_on_ports(Requirements& requirements, const KernelRequest& r, bool gated, const Encoding* rounding) {
  const Encoding* y = gated ? r.attrs.get<LinearGatedActivationAttrs>().round_to : nullptr;
  requirements.require(y == nullptr || y == &Int8Rows::with_scale_per_step(),
                       "writes rounded rows with a scale for each step only");
  return requirements.f32("x", r.inputs[kX], rounding)
      .one_of("bias", gated ? unconnected_port() : r.inputs[kBias], kStorageDTypes)
      .f32("residual", r.inputs.size() > kResidual ? r.inputs[kResidual] : unconnected_port())
      .f32("y", r.outputs[0], y)
      .verdict();
}

// ---- Plain weights

const Encoding* pack_weight(const KernelRequest& r, int input) {
  return input == kWeight ? forward_packing(r, input, linear_input(r)) : nullptr;
}
const Encoding* pack_both_weights(const KernelRequest& r, int input) {
  return input == kGateWeight || input == kUpWeight ? forward_packing(r, input, gated_input(r)) : nullptr;
}

Verdict can_linear(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.packed("weight", r.inputs[kWeight], kStorageDTypes, pack_weight(r, kWeight));
  return verdict_on_ports(requirements, r, false, rounding_of_x<pack_weight, linear_input>(r, kX));
}

Verdict can_gated(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.packed("gate_weight", r.inputs[kGateWeight], kStorageDTypes, pack_both_weights(r, kGateWeight))
      .packed("up_weight", r.inputs[kUpWeight], {r.inputs[kGateWeight].dtype}, pack_both_weights(r, kUpWeight));
  return verdict_on_ports(requirements, r, true, rounding_of_x<pack_both_weights, gated_input>(r, kX));
}

// Kernels of linear and linear_add, and of linear_gated_activation, which have x rounded for their packing.
template <Packing kPacking>
constexpr Kernel linear_kernel(std::string_view name, Pass pass, Verdict (*can_handle)(const KernelRequest&)) {
  return {.name = name,
          .pass = pass,
          .can_handle = can_handle,
          .prepare = prepare_linear<kPacking>,
          .packing = kPacking,
          .wanted_encoding = rounding_of_x<kPacking, linear_input>,
          .reads_stored = true};
}
template <Packing kPacking>
constexpr Kernel gated_kernel(std::string_view name, Verdict (*can_handle)(const KernelRequest&)) {
  return {.name = name,
          .pass = Pass::inference,
          .can_handle = can_handle,
          .prepare = prepare_gated<kPacking>,
          .packing = kPacking,
          .wanted_encoding = rounding_of_x<kPacking, gated_input>,
          .reads_stored = true};
}

constexpr Kernel kForward = linear_kernel<pack_weight>("cpu_packed_panels", Pass::forward, can_linear);
constexpr Kernel kInference = linear_kernel<pack_weight>("cpu_packed_panels", Pass::inference, can_linear);
constexpr Kernel kGated = gated_kernel<pack_both_weights>("cpu_packed_panels", can_gated);

// ---- Quantized weights. x is rounded row by row to 8 bits, too (quantized_matmul.h), if it may be.

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

const Encoding* pack_quantized(const KernelRequest& r, int input) {
  return input == kWeight ? quantized_packing_of(r.inputs[kWeight].encoding) : nullptr;
}
const Encoding* pack_both_quantized(const KernelRequest& r, int input) {
  return input == kGateWeight || input == kUpWeight
             ? quantized_packing_of(r.inputs[static_cast<size_t>(input)].encoding)
             : nullptr;
}

// Kernels that round x to int8 rows, and those that do not, share the requests by how far x may be rounded.
Requirements& require_rounding(Requirements& requirements, MatmulInput x, bool rounds) {
  return rounds ? requirements.require(x == MatmulInput::int8,
                                       fmt::format("rounds x to int8; matmul_input is {}", matmul_input_name(x)))
                : requirements.require(x != MatmulInput::int8, "does not round x; matmul_input is int8");
}

template <bool kRounds>
Verdict can_quantized(const KernelRequest& r) {
  Requirements requirements(r);
  require_quantized(requirements, "weight", r.inputs[kWeight]);
  require_rounding(requirements, linear_input(r), kRounds);
  return verdict_on_ports(requirements, r, false, rounding_of_x<pack_quantized, linear_input>(r, kX));
}

template <bool kRounds>
Verdict can_quantized_gated(const KernelRequest& r) {
  const TensorType &gate = r.inputs[kGateWeight], &up = r.inputs[kUpWeight];
  Requirements requirements(r);
  require_quantized(requirements, "gate_weight", gate);
  require_rounding(requirements, gated_input(r), kRounds);
  require_quantized(requirements, "up_weight", up)
      .require(quantized_packing_of(gate.encoding) == quantized_packing_of(up.encoding),
               "takes gate_weight and up_weight in the same encoding")
      .require(!has_order(gate), "takes columns of gate_weight and up_weight in the order of x");
  return verdict_on_ports(requirements, r, true, rounding_of_x<pack_both_quantized, gated_input>(r, kX));
}

constexpr Kernel kQuantizedForward =
    linear_kernel<pack_quantized>("cpu_quantized_panels", Pass::forward, can_quantized<true>);
constexpr Kernel kQuantizedInference =
    linear_kernel<pack_quantized>("cpu_quantized_panels", Pass::inference, can_quantized<true>);
constexpr Kernel kQuantizedGated = gated_kernel<pack_both_quantized>("cpu_quantized_panels", can_quantized_gated<true>);

// Products with the values that the weights decode to, for x as it is.
constexpr Kernel kDecodedForward =
    linear_kernel<pack_quantized>("cpu_decoded_panels", Pass::forward, can_quantized<false>);
constexpr Kernel kDecodedInference =
    linear_kernel<pack_quantized>("cpu_decoded_panels", Pass::inference, can_quantized<false>);
constexpr Kernel kDecodedGated = gated_kernel<pack_both_quantized>("cpu_decoded_panels", can_quantized_gated<false>);

// ---- 8-bit floats. Products are as exact as with the f32 values that the weights decode to.

Requirements& require_fp8(Requirements& requirements, std::string_view port, const TensorType& weight) {
  return requirements.require(
      Fp8Panels::of(weight.encoding) != nullptr,
      fmt::format("takes {} in 8-bit floats; it is {}", port,
                  weight.encoding == nullptr ? dtype_name(weight.dtype) : weight.encoding->name()));
}

const Encoding* pack_fp8(const KernelRequest& r, int input) {
  return input == kWeight ? Fp8Panels::of(r.inputs[kWeight].encoding) : nullptr;
}
const Encoding* pack_both_fp8(const KernelRequest& r, int input) {
  return input == kGateWeight || input == kUpWeight ? Fp8Panels::of(r.inputs[static_cast<size_t>(input)].encoding)
                                                    : nullptr;
}

bool is_e5m2(const TensorType& weight) {
  const Fp8Panels* floats = Fp8Panels::of(weight.encoding);
  return floats != nullptr && floats->stored().format().kind == Fp8Format::Kind::e5m2;
}

Verdict can_fp8(const KernelRequest& r) {
  Requirements requirements(r);
  require_fp8(requirements, "weight", r.inputs[kWeight]);
  return verdict_on_ports(requirements, r, false, nullptr);
}

Verdict can_fp8_gated(const KernelRequest& r) {
  Requirements requirements(r);
  require_fp8(requirements, "gate_weight", r.inputs[kGateWeight]);
  require_fp8(requirements, "up_weight", r.inputs[kUpWeight])
      .require(is_e5m2(r.inputs[kGateWeight]) == is_e5m2(r.inputs[kUpWeight]),
               "takes gate_weight and up_weight in the same kind of 8-bit floats");
  return verdict_on_ports(requirements, r, true, nullptr);
}

constexpr Kernel kFp8Forward{"cpu_fp8_panels", Pass::forward, can_fp8, prepare_linear<pack_fp8>, pack_fp8};
constexpr Kernel kFp8Inference{"cpu_fp8_panels", Pass::inference, can_fp8, prepare_linear<pack_fp8>, pack_fp8};
constexpr Kernel kFp8Gated{"cpu_fp8_panels", Pass::inference, can_fp8_gated, prepare_gated<pack_both_fp8>,
                           pack_both_fp8};

// ---- Backward

enum LinearBackwardInput { kSavedX, kSavedWeight, kDy };
enum LinearBackwardOutput { kDx, kDweight, kDbias };

// Only dx reads the weight.
const Encoding* pack_weight_transposed(const KernelRequest& r, int input) {
  const bool is_read = input == kSavedWeight && !is_unconnected(r.outputs[kDx]);
  return is_read ? PackedPanels::of_backward(r.inputs[kSavedWeight].dtype, cpu_device(r).isa(), linear_input(r))
                 : nullptr;
}

// Whether x and dy are rounded to bf16 for the gradient of the weight. dy is then rounded for the gradient of x, too.
bool rounds_gradients(const KernelRequest& r) {
  const TensorType& weight = r.inputs[kSavedWeight];
  const bool is_plain =
      weight.encoding == nullptr || PackedPanels::of(weight.dtype, Side::vnni_transposed) == weight.encoding;
  return is_plain && PackedPanels::multiplies_in_bf16(weight.dtype, cpu_device(r).isa(), linear_input(r));
}

Verdict can_linear_backward(const KernelRequest& r) {
  Requirements requirements(r);
  requirements.f32("x", r.inputs[kSavedX]);
  requirements.require(
      is_unconnected(r.outputs[kDweight]) || Fp8TensorEncoding::of(r.inputs[kSavedWeight].encoding) == nullptr,
      "the gradient of a weight with one scale multiplies 8-bit floats");
  if (!is_unconnected(r.outputs[kDx]))
    requirements.packed("weight", r.inputs[kSavedWeight], kStorageDTypes, pack_weight_transposed(r, kSavedWeight));
  return requirements.f32("dy", r.inputs[kDy])
      .f32("dx", r.outputs[kDx])
      .f32("dweight", r.outputs[kDweight])
      .f32("dbias", r.outputs.size() > kDbias ? r.outputs[kDbias] : unconnected_port())
      .verdict();
}

struct LinearBackward {
  WeightReader reader;  // with dx
  std::optional<MatmulPlan> dx;
  MatmulPlan dweight;
  std::optional<Bf16WeightGradient> rounded_dweight;  // replaces dweight where products are of bf16
  void (*add_dbias)(float* dbias, const float* dy, int64_t tokens, int64_t out, int64_t begin, int64_t end);
};

void run_linear_backward(const LinearBackward& plan, const KernelCall& call) {
  CpuDevice& device = cpu_device(call);
  const TensorView& x = call.inputs[kSavedX];
  const TensorView& dy = call.inputs[kDy];
  const int64_t tokens = x.shape[0], in = x.shape[1], out = dy.shape[1];

  // 1. dx = dy weight
  if (call.outputs[kDx].defined()) {
    Matmul m;
    m.rows = tokens;
    m.k_size = out;
    m.outputs = in;
    m.a = elements<const float>(dy);
    m.a_row_stride = out;
    m.b = plan.reader.read(call.inputs[kSavedWeight]);
    m.y = elements<float>(call.outputs[kDx]);
    plan.dx->run(device, m, call.scratch.data);
  }

  // 2. dweight += dy^T x: rows are outputs, k runs over tokens.
  if (call.outputs[kDweight].defined() && plan.rounded_dweight) {
    plan.rounded_dweight->add(device, elements<float>(call.outputs[kDweight]),
                              {elements<const float>(x), elements<const float>(dy), tokens, out, in},
                              call.scratch.data);
  } else if (call.outputs[kDweight].defined()) {
    Matmul m;
    m.rows = out;
    m.k_size = tokens;
    m.outputs = in;
    m.a = elements<const float>(dy);
    m.a_row_stride = 1;
    m.a_k_stride = out;
    m.b.data = elements<const float>(x);
    m.y = elements<float>(call.outputs[kDweight]);
    plan.dweight.run(device, m, call.scratch.data);
  }

  // 3. dbias += column sums of dy
  if (call.outputs.size() > kDbias && call.outputs[kDbias].defined()) {
    float* dbias = elements<float>(call.outputs[kDbias]);
    const float* gradient = elements<const float>(dy);
    device.pool().parallel_for(ceil_div(out, 64), [&](int64_t block, int) {
      plan.add_dbias(dbias, gradient, tokens, out, block * 64, std::min(out, block * 64 + 64));
    });
  }
}

PlanPtr prepare_linear_backward(const KernelRequest& r, Context&) {
  const CpuDevice& device = cpu_device(r);
  LinearBackward plan{
      {},
      std::nullopt,
      MatmulPlan(device, {.source = MatmulTypes::Source::matrix, .finish = MatmulTypes::Finish::accumulate}),
      std::nullopt,
      EADEM_CPU_DISPATCH(add_column_sums, device.isa())};
  const Shape x = r.inputs[kSavedX].bind(r.bounds), dy = r.inputs[kDy].bind(r.bounds);
  int64_t scratch_bytes = plan.dweight.scratch_bytes(device, 0, 0);
  if (rounds_gradients(r)) {
    plan.rounded_dweight.emplace(device);
    scratch_bytes = plan.rounded_dweight->scratch_bytes(device, x[0], dy[1], x[1]);
  }
  if (!is_unconnected(r.outputs[kDx])) {
    plan.reader = WeightReader(pack_weight_transposed(r, kSavedWeight), MatmulInput::f32);
    plan.dx.emplace(device, plan.reader.types());
    scratch_bytes = std::max(scratch_bytes, plan.dx->scratch_bytes(device, dy[0], dy[1]));
  }
  return make_plan([plan](const KernelCall& call) { run_linear_backward(plan, call); }, scratch_bytes);
}

constexpr Kernel kBackward{"cpu_packed_panels", Pass::backward, can_linear_backward, prepare_linear_backward,
                           pack_weight_transposed};

}  // namespace

KernelList linear_kernels() {
  KernelList kernels = {&kForward,        &kBackward,         &kInference,  &kQuantizedForward, &kQuantizedInference,
                        &kDecodedForward, &kDecodedInference, &kFp8Forward, &kFp8Inference};
  for (const KernelList& rounded : {fp8_rounded_kernels(), fp8_tensor_kernels()})
    kernels.insert(kernels.end(), rounded.begin(), rounded.end());
  return kernels;
}
KernelList linear_add_kernels() { return {&kInference, &kQuantizedInference, &kDecodedInference, &kFp8Inference}; }
KernelList linear_gated_activation_kernels() { return {&kGated, &kQuantizedGated, &kDecodedGated, &kFp8Gated}; }
KernelList linear_gated_activation_quantize_kernels() { return linear_gated_activation_kernels(); }

}  // namespace eadem::kernels::cpu
#endif  // HWY_ONCE
