// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/latent_attention.h"

#include <algorithm>
#include <cmath>

#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

LatentAttention::LatentAttention(const kernels::LatentAttentionAttrs& attrs) : attrs_(attrs) {
  if (std::min({attrs.heads, attrs.latent_dim, attrs.nope_dim, attrs.rope_dim, attrs.value_dim}) <= 0)
    throw InvalidArgument(
        "latent_attention: heads is {}, latent_dim {}, nope_dim {}, rope_dim {} and value_dim {}; expected positive "
        "numbers",
        attrs.heads, attrs.latent_dim, attrs.nope_dim, attrs.rope_dim, attrs.value_dim);
  if (!std::isfinite(attrs.scale))
    throw InvalidArgument("latent_attention: scale is {}; expected a finite number", attrs.scale);
}

std::vector<Port> LatentAttention::inputs() const {
  return {{"q"},
          {"rows", Port::Role::state},
          {"k_b", Port::Role::parameter},
          {"v_b", Port::Role::parameter},
          {"query_start", Port::Role::index},
          {"kv_length", Port::Role::index},
          {"block_table", Port::Role::index},
          {"prompt_length", Port::Role::index}};
}

std::string LatentAttention::attrs_text() const {
  return fmt::format("heads={} latent_dim={} nope_dim={} rope_dim={} value_dim={} scale={}{}", attrs_.heads,
                     attrs_.latent_dim, attrs_.nope_dim, attrs_.rope_dim, attrs_.value_dim, attrs_.scale,
                     matmul_input_text(attrs_.matmul_input));
}

std::vector<TensorType> LatentAttention::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "q", in[kQ], 3);
  expect_dtype(name(), "q", in[kQ], kActivations);
  expect_plain(name(), "q", in[kQ]);
  expect_dim(name(), "q", in[kQ], 1, Dim(attrs_.heads), "attribute heads");
  expect_dim(name(), "q", in[kQ], 2, Dim(attrs_.head_dim()), "attributes nope_dim + rope_dim");
  expect_rank(name(), "rows", in[kRows], 4);
  expect_dtype(name(), "rows", in[kRows], kFloats);
  expect_cache(name(), "rows", in[kRows]);
  expect_dim(name(), "rows", in[kRows], 1, Dim(1), "one row for all heads");
  expect_dim(name(), "rows", in[kRows], 3, Dim(attrs_.row_dim()), "attributes latent_dim + rope_dim");
  const auto expect_matrices = [&](int port, std::string_view label, int64_t rows, std::string_view rows_because,
                                   int64_t columns, std::string_view columns_because) {
    const TensorType& weight = in[static_cast<size_t>(port)];
    expect_rank(name(), label, weight, 3);
    expect_dtype(name(), label, weight, kFloats);
    expect_dim(name(), label, weight, 0, Dim(attrs_.heads), "attribute heads");
    expect_dim(name(), label, weight, 1, Dim(rows), rows_because);
    expect_dim(name(), label, weight, 2, Dim(columns), columns_because);
  };
  expect_matrices(kKeyMatrix, "k_b", attrs_.latent_dim, "attribute latent_dim", attrs_.nope_dim, "attribute nope_dim");
  expect_matrices(kValueMatrix, "v_b", attrs_.value_dim, "attribute value_dim", attrs_.latent_dim,
                  "attribute latent_dim");
  expect_sequences(*this, in, kQueryStart, KvSource::cached);
  expect_rank(name(), "prompt_length", in[kPromptLength], 1);
  expect_dtype(name(), "prompt_length", in[kPromptLength], kI32);
  expect_dim(name(), "prompt_length", in[kPromptLength], 0, in[kKvLength].dim(0), "sequences of 'kv_length'");
  TensorType y = plain_type(in[kQ].dtype, in[kQ].dims());
  y.dim(-1) = attrs_.value_dim;
  return {y};
}

DType LatentAttention::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kQ) return in[kQ].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> LatentAttention::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& q = in[kQ].sharding;
  if (!(q == Sharding::replicated()) && !(q == Sharding::along(1)))
    throw InvalidArgument("latent_attention: 'q' is {}; expected replicated or sharded(1), its heads",
                          to_string(in[kQ]));
  const Sharding of_heads = q == Sharding::replicated() ? q : Sharding::along(0);
  for (const int port : {kKeyMatrix, kValueMatrix})
    if (const Sharding& own = in[static_cast<size_t>(port)].sharding; !(own == of_heads))
      throw InvalidArgument("latent_attention: '{}' is {} but 'q' is {}; expected both divided alike",
                            port == kKeyMatrix ? "k_b" : "v_b", to_string(own), to_string(q));
  expect_replicated(name(), "rows", in[kRows], "every head reads every row");
  for (const int port : {kQueryStart, kKvLength, kBlockTable, kPromptLength})
    expect_replicated(name(), inputs()[static_cast<size_t>(port)].name, in[static_cast<size_t>(port)],
                      "every rank sees every sequence");
  return {q};
}

Cost LatentAttention::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> out,
                           const SymbolValues& symbols) const {
  const int64_t tokens = in[kQ].bind(symbols)[0], sequences = std::max<int64_t>(1, in[kKvLength].bind(symbols)[0]);
  const int64_t queries = (tokens + sequences - 1) / sequences;
  const int64_t keys = std::max(queries, in[kBlockTable].bind(symbols)[1] * in[kRows].bind(symbols)[2]);
  const double n = static_cast<double>(queries), all = static_cast<double>(keys);
  const double share = static_cast<double>(tokens) / std::max(1.0, n);
  const double pairs = n * (all - n) + 0.5 * n * (n + 1);
  // The products with k_b and v_b: of every row, or in the absorbed form of every query and result. Then q k^T and p v,
  // and of a pair an exponential, its maximum and sum.
  const bool absorbed = tokens <= sequences;
  const double made =
      2.0 * static_cast<double>(attrs_.latent_dim) * static_cast<double>(attrs_.nope_dim + attrs_.value_dim);
  const int64_t pair_products = absorbed ? attrs_.row_dim() + attrs_.latent_dim : attrs_.head_dim() + attrs_.value_dim;
  const double pair = 2.0 * static_cast<double>(pair_products) + 13;
  const TensorType row(in[kRows].dtype, {1, attrs_.row_dim()}, in[kRows].encoding);
  const TensorType others[] = {in[kQ],        in[kKeyMatrix],  in[kValueMatrix], in[kQueryStart],
                               in[kKvLength], in[kBlockTable], in[kPromptLength]};
  return {share * static_cast<double>(attrs_.heads) * ((absorbed ? n : all) * made + pairs * pair),
          share * all * static_cast<double>(row.size_bytes(symbols)) + traffic_bytes(others, out, symbols)};
}

void LatentAttention::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &q = in[kQ], &rows = in[kRows], &k_b = in[kKeyMatrix], &v_b = in[kValueMatrix];
  const auto heads = static_cast<size_t>(attrs_.heads), latent = static_cast<size_t>(attrs_.latent_dim),
             nope = static_cast<size_t>(attrs_.nope_dim), rope = static_cast<size_t>(attrs_.rope_dim),
             value = static_cast<size_t>(attrs_.value_dim);
  for (const RefSequence& s : reference_sequences(in, kQueryStart, rows, KvSource::cached))
    for (size_t h = 0; h < heads; ++h) {
      // The keys and values of the head.
      std::vector<double> keys, values;
      for (int64_t j = 0; j < s.length; ++j) {
        const double* row = rows.data.data() + static_cast<size_t>(s.row(j, 0, 1)) * (latent + rope);
        for (size_t n = 0; n < nope; ++n) {
          double sum = 0;
          for (size_t l = 0; l < latent; ++l) sum += k_b.data[(h * latent + l) * nope + n] * row[l];
          keys.push_back(sum);
        }
        keys.insert(keys.end(), row + latent, row + latent + rope);
        for (size_t v = 0; v < value; ++v) {
          double sum = 0;
          for (size_t l = 0; l < latent; ++l) sum += v_b.data[(h * value + v) * latent + l] * row[l];
          values.push_back(sum);
        }
      }
      for (int64_t t = s.begin; t < s.end; ++t) {
        const double* query = q.data.data() + (static_cast<size_t>(t) * heads + h) * (nope + rope);
        const auto seen = static_cast<size_t>(s.position(t) + 1);
        std::vector<double> weights;
        for (size_t j = 0; j < seen; ++j) {
          double dot = 0;
          for (size_t d = 0; d < nope + rope; ++d) dot += query[d] * keys[j * (nope + rope) + d];
          weights.push_back(static_cast<double>(attrs_.scale) * dot);
        }
        const double largest = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        for (double& weight : weights) sum += weight = std::exp(weight - largest);
        for (size_t v = 0; v < value; ++v) {
          double y = 0;
          for (size_t j = 0; j < seen; ++j) y += weights[j] / sum * values[j * value + v];
          out[0].data[(static_cast<size_t>(t) * heads + h) * value + v] = y;
        }
      }
    }
}

std::vector<Workload> LatentAttention::workloads() {
  std::vector<Workload> rows;
  for (const LatentShape& model : latent_shapes()) {
    const kernels::LatentAttentionAttrs attrs{.heads = model.heads,
                                              .latent_dim = model.latent,
                                              .nope_dim = model.nope,
                                              .rope_dim = model.rope,
                                              .value_dim = model.value,
                                              .scale = 1.0f / std::sqrt(static_cast<float>(model.nope + model.rope))};
    for (const StepShape& step :
         {StepShape{"decode-1", 1, 1, 512}, StepShape{"decode-1 at 8192", 1, 1, 8192},
          StepShape{"prefill-512", 512, 1, 512}, StepShape{"prefill-512 at 8192", 512, 1, 8192}}) {
      if (model.dtype == DType::f32 && step.kv_length > 512) continue;
      const SymbolValues symbols = symbols_of(step);
      rows.push_back({workload_name(model.name, step, "latent_attention"),
                      std::make_shared<LatentAttention>(attrs),
                      {TensorType(model.dtype, {Symbol::tokens, model.heads, model.nope + model.rope}),
                       TensorType(model.dtype, {symbols[Symbol::max_blocks], 1, kWorkloadBlockSize, model.row()}),
                       TensorType(model.dtype, {model.heads, model.latent, model.nope}),
                       TensorType(model.dtype, {model.heads, model.value, model.latent}),
                       TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
                       TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks}),
                       TensorType(DType::i32, {Symbol::sequences})},
                      symbols});
    }
  }
  return rows;
}

}  // namespace eadem::ops
