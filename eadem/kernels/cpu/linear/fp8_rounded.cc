// SPDX-License-Identifier: Apache-2.0
//
// cpu_fp8_rows: products of rows in e4m3 (RowEncoding) with a weight in e4m3 as an Fp8Encoding stores it.
//
//   forward, inference   y  = x weight^T + bias
//   backward             dx = dy weight, where a scale belongs to a square block of the weight, or to all of it: then
//                        the transposed codes are those of the transposed weight
//
// Rows that arrive plain are rounded first. Each call packs the weight, then computes what cpu_fp8_panels computes of
// the values that the rows decode to.
#include "eadem/kernels/cpu/linear/fp8_rounded.h"

#include <cstring>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/cpu/support.h"
#include "eadem/kernels/cpu/weight_reader.h"
#include "eadem/kernels/linear.h"

namespace eadem::kernels::cpu {

namespace {

struct RowsPort {
  enum Input { x, weight, bias, dy = 2 };
  enum Output { dx, dweight, dbias };
};

constexpr int64_t kAlignment = 64;

// y [rows, n] = decoded rows of x [rows, k] times the weight [n, k]. Memory of a call, in this order: x as rows of
// codes if it arrives plain, x decoded, the weight packed, what the product asks for.
class RowsProduct {
 public:
  RowsProduct(const CpuDevice& device, const Fp8Encoding& weight, const Shape& x, int64_t n, bool x_is_plain,
              std::optional<DType> bias)
      : panels_(*Fp8Panels::of(&weight)),
        reader_(&panels_, MatmulInput::f32),
        product_(device, types(reader_, bias)),
        rows_bytes_(x_is_plain ? round_up(encoded_bytes(RowEncoding::fp8_e4m3(), x), kAlignment) : 0),
        values_bytes_(round_up(x.num_elements() * static_cast<int64_t>(sizeof(float)), kAlignment)),
        panels_bytes_(round_up(encoded_bytes(panels_, {n, x[1]}), kAlignment)),
        product_bytes_(product_.scratch_bytes(device, x[0], x[1])) {}

  int64_t scratch_bytes() const { return rows_bytes_ + values_bytes_ + panels_bytes_ + product_bytes_; }

  // `weight` is [n, k] in its Fp8Encoding.
  void run(CpuDevice& device, const TensorView& x, const TensorView& weight, const void* bias, float* y,
           void* scratch) const {
    auto* memory = static_cast<std::byte*>(scratch);
    const auto parallel_for = [&](int64_t num_tasks, FunctionRef<void(int64_t)> task) {
      device.host_parallel_for(num_tasks, task);
    };
    const RowEncoding& encoding = RowEncoding::fp8_e4m3();
    TensorView rows = x;
    if (x.encoding == nullptr) {
      rows = view_of_planes(memory, encoding, DType::f32, x.shape);
      encoding.encode(rows, x, parallel_for);
    }
    auto* values = reinterpret_cast<float*>(memory + rows_bytes_);
    device.pool().parallel_ranges(x.shape[0], 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) encoding.decode_row(values + r * x.shape[1], rows, r);
    });
    const TensorView packed = view_of_planes(memory + rows_bytes_ + values_bytes_, panels_, DType::f32, weight.shape);
    panels_.encode(packed, weight, parallel_for);
    Matmul m;
    m.rows = x.shape[0];
    m.k_size = m.a_row_stride = x.shape[1];
    m.outputs = weight.shape[0];
    m.a = values;
    m.b = reader_.read(packed);
    m.bias = bias;
    m.y = y;
    product_.run(device, m, memory + rows_bytes_ + values_bytes_ + panels_bytes_);
  }

 private:
  static MatmulTypes types(const WeightReader& reader, std::optional<DType> bias) {
    MatmulTypes types = reader.types();
    types.bias = bias;
    return types;
  }

  const Fp8Panels& panels_;
  WeightReader reader_;
  MatmulPlan product_;
  int64_t rows_bytes_, values_bytes_, panels_bytes_, product_bytes_;
};

// The transposed weight; its planes are at `memory`.
TensorView transposed(CpuDevice& device, const TensorView& weight, void* memory) {
  constexpr int64_t kTile = 64;
  const Shape& shape = weight.shape;
  const TensorView result = view_of_planes(memory, *weight.encoding, weight.dtype, {shape[1], shape[0]});
  const auto* from = static_cast<const uint8_t*>(weight.plane(0));
  auto* to = static_cast<uint8_t*>(result.plane(0));
  device.pool().parallel_for(ceil_div(shape[1], kTile), [&](int64_t tile, int) {
    const int64_t end = std::min(shape[1], (tile + 1) * kTile);
    for (int64_t first = 0; first < shape[0]; first += kTile)
      for (int64_t column = tile * kTile; column < end; ++column)
        for (int64_t row = first; row < std::min(shape[0], first + kTile); ++row)
          to[column * shape[0] + row] = from[row * shape[1] + column];
  });
  const Shape scales = weight.encoding->planes(shape)[1].shape;
  // Behind an odd number of codes they are not aligned.
  const auto* from_scales = static_cast<const std::byte*>(weight.plane(1));
  auto* to_scales = static_cast<std::byte*>(result.plane(1));
  constexpr int64_t kSize = sizeof(float);
  for (int64_t row = 0; row < scales[0]; ++row)
    for (int64_t column = 0; column < scales[1]; ++column)
      std::memcpy(to_scales + (column * scales[0] + row) * kSize, from_scales + (row * scales[1] + column) * kSize,
                  kSize);
  return result;
}

const Fp8Encoding* e4m3_weight(const KernelRequest& r) {
  const Fp8Encoding* floats = Fp8Encoding::of(r.inputs[RowsPort::weight].encoding);
  return floats != nullptr && floats->format().kind == Fp8Format::Kind::e4m3 ? floats : nullptr;
}

Requirements common(const KernelRequest& r) {
  const MatmulInput input = r.attrs.get<LinearAttrs>().matmul_input;
  Requirements requirements(r);
  requirements
      .require(e4m3_weight(r) != nullptr,
               fmt::format("takes a weight in fp8_e4m3; it is {}", to_string(r.inputs[RowsPort::weight])))
      .require(input == MatmulInput::int8,
               fmt::format("rounds rows to fp8_e4m3; matmul_input is {}", matmul_input_name(input)));
  return requirements;
}

// Packing reads the codes and writes them once more.
Estimate estimate_of(const KernelRequest& r) {
  return {.extra_bytes = 2 * static_cast<double>(r.inputs[RowsPort::weight].size_bytes({})),
          .reason = "packs in each call"};
}

Verdict can_multiply(const KernelRequest& r) {
  return common(r)
      .f32("x", r.inputs[RowsPort::x], &RowEncoding::fp8_e4m3())
      .one_of("bias", r.inputs[RowsPort::bias], kStorageDTypes)
      .f32("y", r.outputs[0])
      .verdict(estimate_of(r));
}

Verdict can_transpose(const KernelRequest& r) {
  const Fp8Encoding* floats = e4m3_weight(r);
  return common(r)
      .require(floats == nullptr || floats->format().block_rows == floats->format().block_columns,
               "a scale belongs to a row of the weight; the transposed product takes square blocks")
      .require(is_unconnected(r.outputs[RowsPort::dweight]) && is_unconnected(r.outputs[RowsPort::dbias]),
               "gives dx alone")
      .f32("dy", r.inputs[RowsPort::dy], &RowEncoding::fp8_e4m3())
      .f32("dx", r.outputs[RowsPort::dx])
      .verdict(estimate_of(r));
}

template <RowsPort::Input kRows>
const Encoding* wanted(const KernelRequest&, int input) {
  return input == kRows ? &RowEncoding::fp8_e4m3() : nullptr;
}

PlanPtr prepare_product(const KernelRequest& r, Context&) {
  const TensorType &x = r.inputs[RowsPort::x], &bias = r.inputs[RowsPort::bias];
  const RowsProduct product(cpu_device(r), *e4m3_weight(r), x.bind(r.bounds), r.inputs[RowsPort::weight].fixed(0),
                            x.encoding == nullptr,
                            is_unconnected(bias) ? std::nullopt : std::optional<DType>(bias.dtype));
  return make_plan(
      [product](const KernelCall& call) {
        product.run(cpu_device(call), call.inputs[RowsPort::x], call.inputs[RowsPort::weight],
                    call.inputs[RowsPort::bias].data, elements<float>(call.outputs[0]), call.scratch.data);
      },
      product.scratch_bytes());
}

PlanPtr prepare_gradient(const KernelRequest& r, Context&) {
  const TensorType &dy = r.inputs[RowsPort::dy], &weight = r.inputs[RowsPort::weight];
  const Shape whole = weight.bind(r.bounds);
  const RowsProduct product(cpu_device(r), *e4m3_weight(r), dy.bind(r.bounds), whole[1], dy.encoding == nullptr,
                            std::nullopt);
  const int64_t product_bytes = round_up(product.scratch_bytes(), kAlignment);
  return make_plan(
      [product, product_bytes](const KernelCall& call) {
        CpuDevice& device = cpu_device(call);
        auto* scratch = static_cast<std::byte*>(call.scratch.data);
        product.run(device, call.inputs[RowsPort::dy],
                    transposed(device, call.inputs[RowsPort::weight], scratch + product_bytes), nullptr,
                    elements<float>(call.outputs[RowsPort::dx]), scratch);
      },
      product_bytes + encoded_bytes(*weight.encoding, {whole[1], whole[0]}));
}

constexpr Kernel kRowsInference{.name = "cpu_fp8_rows",
                                .pass = Pass::inference,
                                .can_handle = can_multiply,
                                .prepare = prepare_product,
                                .wanted_encoding = wanted<RowsPort::x>};
constexpr Kernel kRowsForward{.name = "cpu_fp8_rows",
                              .pass = Pass::forward,
                              .can_handle = can_multiply,
                              .prepare = prepare_product,
                              .wanted_encoding = wanted<RowsPort::x>};
constexpr Kernel kRowsBackward{.name = "cpu_fp8_rows",
                               .pass = Pass::backward,
                               .can_handle = can_transpose,
                               .prepare = prepare_gradient,
                               .wanted_encoding = wanted<RowsPort::dy>};

}  // namespace

KernelList fp8_rounded_kernels() { return {&kRowsInference, &kRowsForward, &kRowsBackward}; }

}  // namespace eadem::kernels::cpu
