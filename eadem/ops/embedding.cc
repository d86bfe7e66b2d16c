// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/embedding.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

Embedding::Embedding(const kernels::EmbeddingAttrs& attrs) : attrs_(attrs) {
  if (std::find(std::begin(kFloats), std::end(kFloats), attrs.out_dtype) == std::end(kFloats))
    throw InvalidArgument("embedding: out_dtype is {}; expected f32, bf16 or f16", dtype_name(attrs.out_dtype));
  if (attrs.vocab <= 0) throw InvalidArgument("embedding: vocab is {}; expected a positive number", attrs.vocab);
  if (!std::isfinite(attrs.scale)) throw InvalidArgument("embedding: scale is {}", attrs.scale);
}

std::vector<Port> Embedding::inputs() const { return {{"table", Port::Role::parameter}, {"ids", Port::Role::index}}; }
std::vector<Port> Embedding::outputs() const { return {{"y"}}; }

std::string Embedding::attrs_text() const {
  const std::string first = attrs_.first > 0 ? fmt::format(" first={}", attrs_.first) : "";
  const std::string scale = attrs_.scale != 1 ? fmt::format(" scale={}", attrs_.scale) : "";
  return fmt::format("vocab={}{} out_dtype={}{}", attrs_.vocab, first, dtype_name(attrs_.out_dtype), scale);
}

std::vector<TensorType> Embedding::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "table", in[kTable], 2);
  expect_dtype(name(), "table", in[kTable], kFloats);
  expect_dim(name(), "table", in[kTable], 0, Dim(attrs_.vocab), "attribute vocab");
  expect_rank(name(), "ids", in[kIds], 1);
  expect_dtype(name(), "ids", in[kIds], kI32);
  return {TensorType(attrs_.out_dtype, {in[kIds].dim(0), in[kTable].dim(1)})};
}

std::vector<Sharding> Embedding::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "ids", in[kIds], "every rank looks up every token");
  if (in[kTable].sharding == Sharding::along(0)) return {Sharding::partial()};
  if (in[kTable].sharding == Sharding::replicated()) return {Sharding::replicated()};
  throw InvalidArgument("embedding: 'table' is {}; expected replicated or sharded(0)", to_string(in[kTable]));
}

Cost Embedding::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) const {
  const double elements = static_cast<double>(out[0].num_elements(symbols));
  const double ids = static_cast<double>(in[kIds].size_bytes(symbols));
  const double row_bytes = elements * static_cast<double>(dtype_size(out[0].dtype));
  if (pass == Pass::backward) return {elements, ids + row_bytes + 2 * 4 * elements};  // dy, and dtable in f32 both ways
  return {0, ids + row_bytes + elements * static_cast<double>(dtype_size(in[kTable].dtype))};
}

void Embedding::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const double scale = attrs_.scale;
  // The row of a token's id, or -1 where another rank has it.
  const auto row_of = [&](const RefTensor& ids, int64_t t) {
    const int64_t row = static_cast<int64_t>(ids.data[static_cast<size_t>(t)]) - attrs_.first;
    return row >= 0 && row < attrs_.vocab ? row : -1;
  };
  if (pass == Pass::backward) {
    const RefTensor &ids = in[0], &dy = in[1];
    if (out[0].data.empty()) return;
    const int64_t hidden = dy.shape[1];
    for (int64_t t = 0; t < dy.shape[0]; ++t) {
      const int64_t row = row_of(ids, t);
      for (int64_t h = 0; row >= 0 && h < hidden; ++h)
        out[0].data[static_cast<size_t>(row * hidden + h)] += scale * dy.data[static_cast<size_t>(t * hidden + h)];
    }
    return;
  }
  const int64_t hidden = in[kTable].shape[1];
  for (int64_t t = 0; t < in[kIds].shape[0]; ++t) {
    const int64_t row = row_of(in[kIds], t);
    for (int64_t h = 0; h < hidden; ++h)
      out[0].data[static_cast<size_t>(t * hidden + h)] =
          row < 0 ? 0 : scale * in[kTable].data[static_cast<size_t>(row * hidden + h)];
  }
}

std::vector<Workload> Embedding::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "embed_tokens"),
                      std::make_shared<Embedding>(kernels::EmbeddingAttrs{model.dtype, model.vocab}),
                      {TensorType(model.dtype, {model.vocab, model.hidden}), TensorType(DType::i32, {Symbol::tokens})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
