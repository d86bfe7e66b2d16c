// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/parallel/select_heads.h"

#include <algorithm>

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

SelectHeads::SelectHeads(const kernels::SelectHeadsAttrs& attrs) : attrs_(attrs) {
  if (attrs.own_heads < 1 || attrs.run < 1 || attrs.group < 1 || attrs.first_query < 0 ||
      attrs.head(attrs.own_heads - 1) >= attrs.heads)
    throw InvalidArgument("select_heads: {} heads of {} from query head {} in runs of {}, {} query heads each",
                          attrs.own_heads, attrs.heads, attrs.first_query, attrs.run, attrs.group);
}

std::string SelectHeads::attrs_text() const {
  return fmt::format("heads={} own_heads={} first={}", attrs_.heads, attrs_.own_heads, attrs_.head(0));
}

std::vector<TensorType> SelectHeads::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "x", in[0], 3);
  expect_dtype(name(), "x", in[0], kActivations);
  expect_plain(name(), "x", in[0]);
  expect_dim(name(), "x", in[0], 1, Dim(attrs_.heads), "attribute heads");
  return {TensorType(in[0].dtype, {in[0].dim(0), attrs_.own_heads, in[0].dim(2)})};
}

std::vector<Sharding> SelectHeads::infer_sharding(std::span<const TensorType> in) const {
  expect_replicated(name(), "x", in[0], "a rank selects from all heads");
  return {Sharding::along(1)};
}

Cost SelectHeads::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                       const SymbolValues& symbols) const {
  const auto selected = static_cast<double>(out[0].size_bytes(symbols));
  return {0, selected + (pass == Pass::backward ? static_cast<double>(in[0].size_bytes(symbols)) : selected)};
}

void SelectHeads::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor& source = in[0];
  if (out[0].data.empty()) return;
  const auto tokens = static_cast<size_t>(source.shape[0]), width = static_cast<size_t>(source.shape[2]);
  const auto heads = static_cast<size_t>(attrs_.heads), own = static_cast<size_t>(attrs_.own_heads);
  if (pass == Pass::backward) std::fill(out[0].data.begin(), out[0].data.end(), 0.0);
  for (size_t t = 0; t < tokens; ++t)
    for (size_t i = 0; i < own; ++i) {
      const auto head = static_cast<size_t>(attrs_.head(static_cast<int64_t>(i)));
      for (size_t d = 0; d < width; ++d) {
        const size_t whole = (t * heads + head) * width + d, part = (t * own + i) * width + d;
        if (pass == Pass::backward)
          out[0].data[whole] += source.data[part];
        else
          out[0].data[part] = source.data[whole];
      }
    }
}

// As for one more rank than there are key-value heads.
std::vector<Workload> SelectHeads::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes())
      rows.push_back({workload_name(model, step, "select_heads"),
                      std::make_shared<SelectHeads>(
                          kernels::SelectHeadsAttrs{.heads = model.kv_heads, .own_heads = 1, .first_query = 0}),
                      {TensorType(model.dtype, {Symbol::tokens, model.kv_heads, model.head_dim})},
                      symbols_of(step)});
  return rows;
}

}  // namespace eadem::ops
