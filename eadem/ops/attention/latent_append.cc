// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/latent_append.h"

#include <algorithm>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

LatentAppend::LatentAppend(const kernels::LatentAppendAttrs& attrs) : attrs_(attrs) {
  if (attrs.stride < 1 || (attrs.stride > 1 && attrs.block_size < 1))
    throw InvalidArgument("latent_append: stride is {} and block_size {}; expected positive numbers", attrs.stride,
                          attrs.block_size);
}

std::string LatentAppend::attrs_text() const {
  return attrs_.stride == 1 ? "" : fmt::format("stride={} block_size={}", attrs_.stride, attrs_.block_size);
}

std::vector<TensorType> LatentAppend::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "rows", in[kRows], 3);
  expect_dtype(name(), "rows", in[kRows], kActivations);
  expect_plain(name(), "rows", in[kRows]);
  expect_rank(name(), "slots", in[kSlots], 1);
  expect_dtype(name(), "slots", in[kSlots], kI64);
  expect_dim(name(), "slots", in[kSlots], 0, in[kRows].dim(0), "tokens of 'rows'");
  expect_rank(name(), "cache", in[kCache], 4);
  expect_dtype(name(), "cache", in[kCache], kFloats);
  expect_cache(name(), "cache", in[kCache]);
  expect_dim(name(), "cache", in[kCache], 1, in[kRows].dim(1), "kv_heads of 'rows'");
  expect_dim(name(), "cache", in[kCache], 3, in[kRows].dim(2), "width of 'rows'");
  if (attrs_.stride > 1)
    expect_dim(name(), "cache", in[kCache], 2, (attrs_.block_size + attrs_.stride - 1) / attrs_.stride,
               "attributes block_size and stride");
  return {TensorType(in[kCache].dtype, in[kCache].dims(), in[kCache].encoding)};
}

DType LatentAppend::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kRows) return in[kRows].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> LatentAppend::infer_sharding(std::span<const TensorType> in) const {
  for (const int port : {kRows, kSlots, kCache})
    expect_replicated(name(), inputs()[static_cast<size_t>(port)].name, in[static_cast<size_t>(port)],
                      "every rank keeps every row");
  return {Sharding::replicated()};
}

Cost LatentAppend::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> /*out*/,
                        const SymbolValues& symbols) const {
  const TensorType stored(in[kCache].dtype, in[kRows].dims(), in[kCache].encoding);
  const double rows = static_cast<double>(in[kRows].size_bytes(symbols) + stored.size_bytes(symbols));
  return {0, static_cast<double>(in[kSlots].size_bytes(symbols)) + rows / static_cast<double>(attrs_.stride)};
}

void LatentAppend::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const int64_t tokens = in[kRows].shape[0], heads = in[kRows].shape[1], width = in[kRows].shape[2],
                block_rows = in[kCache].shape[2], stride = attrs_.stride,
                block_size = stride == 1 ? block_rows : attrs_.block_size;
  for (int64_t t = 0; t < tokens; ++t) {
    const auto slot = static_cast<int64_t>(in[kSlots].data[static_cast<size_t>(t)]);
    if (slot < 0 || (slot % block_size + 1) % stride != 0) continue;
    for (int64_t g = 0; g < heads; ++g)
      std::copy_n(
          in[kRows].data.begin() + (t * heads + g) * width, width,
          out[0].data.begin() + ((slot / block_size * heads + g) * block_rows + slot % block_size / stride) * width);
  }
}

std::vector<Workload> LatentAppend::workloads() {
  std::vector<Workload> rows;
  for (const LatentShape& model : latent_shapes())
    for (const StepShape& step : step_shapes()) {
      const SymbolValues symbols = symbols_of(step);
      const TensorType cache(model.dtype,
                             {step.sequences * symbols[Symbol::max_blocks], 1, kWorkloadBlockSize, model.row()});
      rows.push_back(
          {workload_name(model.name, step, "latent_append"),
           std::make_shared<LatentAppend>(),
           {TensorType(model.dtype, {Symbol::tokens, 1, model.row()}), TensorType(DType::i64, {Symbol::tokens}), cache},
           symbols});
    }
  return rows;
}

}  // namespace eadem::ops
