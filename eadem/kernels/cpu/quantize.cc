// SPDX-License-Identifier: Apache-2.0
//
// quantize:
//   cpu_rows      to the rows that products on the CPU read
//   cpu_encoding  to 8-bit floats, by the encoding itself
//   cpu_tensor    to 8-bit floats with one scale, current or delayed
#include "eadem/kernels/quantize.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/cpu/kernels.h"
#include "eadem/kernels/cpu/row_rounder.h"

namespace eadem::kernels::cpu {

namespace {

Verdict can_quantize(const KernelRequest& r) {
  const std::string refusal = RowRounder::refusal_of(r.attrs.get<QuantizeAttrs>().to, cpu_device(r));
  return Requirements(r).f32("x", r.inputs[0]).require(refusal.empty(), refusal).verdict();
}

PlanPtr prepare_quantize(const KernelRequest& r, Context&) {
  return make_plan([rounder = RowRounder(r.attrs.get<QuantizeAttrs>().to, cpu_device(r))](const KernelCall& call) {
    const TensorView& x = call.inputs[0];
    const RoundedSource source{elements<const float>(x), x.shape[1], x.shape[1]};
    cpu_device(call).pool().parallel_ranges(x.shape[0], rows_per_thread(x.shape[1]), [&](int64_t begin, int64_t end) {
      rounder.round(call.outputs[0], source, begin, end);
    });
  });
}

Verdict can_encode(const KernelRequest& r) {
  const Encoding* to = r.attrs.get<QuantizeAttrs>().to;
  return Requirements(r)
      .one_of("x", r.inputs[0], kStorageDTypes)
      .require(to == &RowEncoding::fp8_e4m3() || Fp8Encoding::of(to) != nullptr,
               fmt::format("rounds to 8-bit floats; {} is wanted", to->name()))
      .verdict();
}

PlanPtr prepare_encoding(const KernelRequest& r, Context&) {
  return make_plan([to = r.attrs.get<QuantizeAttrs>().to](const KernelCall& call) {
    to->encode(call.outputs[0], call.inputs[0], [&](int64_t num_tasks, FunctionRef<void(int64_t)> task) {
      cpu_device(call).host_parallel_for(num_tasks, task);
    });
  });
}

Verdict can_encode_tensor(const KernelRequest& r) {
  const Encoding* to = r.attrs.get<QuantizeAttrs>().to;
  return Requirements(r)
      .one_of("x", r.inputs[0], kStorageDTypes)
      .require(Fp8TensorEncoding::of(to) != nullptr,
               fmt::format("rounds to 8-bit floats with one scale; {} is wanted", to->name()))
      .verdict();
}

float larger(float a, float b) {
  return std::isfinite(a) && std::isfinite(b) ? std::max(a, b) : std::numeric_limits<float>::quiet_NaN();
}

// Rows are looked at in parts of so many.
constexpr int64_t kRowsOfPart = 64;

// The largest magnitude of x, NaN if a value is not finite. `most` has room for one of each part.
float largest_magnitude(CpuDevice& device, const TensorView& x, float* most) {
  const int64_t rows = x.shape[0], parts = ceil_div(rows, kRowsOfPart);
  device.pool().parallel_for(parts, [&](int64_t part, int) {
    most[part] = Fp8TensorEncoding::largest_magnitude(x, part * kRowsOfPart, std::min(rows, (part + 1) * kRowsOfPart));
  });
  float result = 0.0f;
  for (int64_t part = 0; part < parts; ++part) result = larger(result, most[part]);
  return result;
}

// `own` of every rank of tp, which each has a part of x; `all` has room for one more.
float largest_of_ranks(const KernelCall& call, float own, int ranks, float* all) {
  all[ranks] = own;
  call.context->mesh.along(MeshAxis::tp)
      .all_gather(call.context->device, TensorView(all, DType::f32, {ranks, 1}),
                  TensorView(all + ranks, DType::f32, {1}));
  float result = 0.0f;
  for (int rank = 0; rank < ranks; ++rank) result = larger(result, all[rank]);
  return result;
}

PlanPtr prepare_tensor(const KernelRequest& r, Context& context) {
  const bool is_part = r.inputs[0].over(MeshAxis::tp).kind == Sharding::Kind::sharded;
  const int ranks = is_part ? context.mesh.size(MeshAxis::tp) : 1;
  const auto run = [&to = *Fp8TensorEncoding::of(r.attrs.get<QuantizeAttrs>().to), records = r.pass == Pass::forward,
                    ranks](const KernelCall& call) {
    const TensorView &x = call.inputs[0], &y = call.outputs[0];
    float* scaling = to.is_delayed() ? elements<float>(call.inputs[1]) : nullptr;
    auto* scratch = static_cast<float*>(call.scratch.data);
    float seen = largest_magnitude(cpu_device(call), x, scratch);
    if (ranks > 1) seen = largest_of_ranks(call, seen, ranks, scratch);
    const float scale = to.scale_of(scaling != nullptr && scaling[0] > 0.0f ? scaling[0] : seen);
    if (scaling != nullptr && records && !(seen <= scaling[1])) scaling[1] = seen;
    Fp8TensorEncoding::set_scale(y, scale);
    cpu_device(call).pool().parallel_ranges(
        x.shape[0], 1, [&](int64_t begin, int64_t end) { to.encode_rows(y, x, scale, begin, end); });
  };
  // First those of the parts, then those of the ranks.
  const int64_t floats = std::max<int64_t>(ceil_div(r.inputs[0].bind(r.bounds)[0], kRowsOfPart), ranks + 1);
  return make_plan(run, floats * static_cast<int64_t>(sizeof(float)));
}

constexpr Kernel kTensorForward{"cpu_tensor", Pass::forward, can_encode_tensor, prepare_tensor};
constexpr Kernel kTensorInference{"cpu_tensor", Pass::inference, can_encode_tensor, prepare_tensor};
constexpr Kernel kEncodeForward{"cpu_encoding", Pass::forward, can_encode, prepare_encoding};
constexpr Kernel kEncodeInference{"cpu_encoding", Pass::inference, can_encode, prepare_encoding};
constexpr Kernel kQuantizeForward{"cpu_rows", Pass::forward, can_quantize, prepare_quantize};
constexpr Kernel kQuantizeInference{"cpu_rows", Pass::inference, can_quantize, prepare_quantize};

}  // namespace

KernelList quantize_kernels() {
  return {&kQuantizeForward, &kQuantizeInference, &kEncodeForward,
          &kEncodeInference, &kTensorForward,     &kTensorInference};
}

}  // namespace eadem::kernels::cpu
