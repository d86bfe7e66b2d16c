// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/attention.h"

#include <algorithm>
#include <cmath>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/ops/attention/attention_ports.h"
#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

using kernels::KvSource;

Attention::Attention(const kernels::AttentionAttrs& attrs) : attrs_(attrs) {
  if (attrs.heads <= 0 || attrs.kv_heads <= 0 || attrs.heads % attrs.kv_heads != 0)
    throw InvalidArgument(
        "attention: heads is {} and kv_heads is {}; expected a positive multiple of a positive number", attrs.heads,
        attrs.kv_heads);
  if (attrs.head_dim <= 0)
    throw InvalidArgument("attention: head_dim is {}; expected a positive number", attrs.head_dim);
  if (attrs.value_dim < 0)
    throw InvalidArgument("attention: value_dim is {}; expected 0 (head_dim) or more", attrs.value_dim);
  if (attrs.window < 0) throw InvalidArgument("attention: window is {}; expected 0 (unlimited) or more", attrs.window);
  if (attrs.chunk < 0 || (attrs.chunk > 0 && attrs.window > 0))
    throw InvalidArgument("attention: chunk is {} and window {}; expected 0 (none) or more, and one of them at most",
                          attrs.chunk, attrs.window);
  if (attrs.sharing < 0)
    throw InvalidArgument("attention: sharing is {}; expected 0 (heads / kv_heads) or more", attrs.sharing);
  if (!std::isfinite(attrs.scale))
    throw InvalidArgument("attention: scale is {}; expected a finite number", attrs.scale);
  if (!std::isfinite(attrs.softcap) || attrs.softcap < 0)
    throw InvalidArgument("attention: softcap is {}; expected 0 (none) or a finite number above", attrs.softcap);
}

std::vector<Port> Attention::inputs() const {
  const Port::Role kv = attrs_.source == KvSource::direct ? Port::Role::activation : Port::Role::state;
  std::vector<Port> ports = {{"q"},
                             {"k", kv},
                             {"v", kv},
                             {"query_start", Port::Role::index},
                             {"kv_length", Port::Role::index},
                             {"block_table", Port::Role::index, /*optional=*/true}};
  if (attrs_.sinks) ports.push_back({"sinks", Port::Role::parameter});
  return ports;
}
std::vector<Port> Attention::outputs() const { return {{"y"}}; }

std::string Attention::attrs_text() const {
  const std::string dims = attrs_.values() == attrs_.head_dim
                               ? fmt::format("head_dim={}", attrs_.head_dim)
                               : fmt::format("head_dim={} value_dim={}", attrs_.head_dim, attrs_.values());
  std::string text = fmt::format("heads={} kv_heads={} {} scale={} window={} {}", attrs_.heads, attrs_.kv_heads, dims,
                                 attrs_.scale, attrs_.window, attrs_.source == KvSource::direct ? "direct" : "cached");
  if (attrs_.softcap > 0) text += fmt::format(" softcap={}", attrs_.softcap);
  if (attrs_.sinks) text += " sinks";
  if (attrs_.chunk > 0) text += fmt::format(" chunk={}", attrs_.chunk);
  if (attrs_.sharing > 0) text += fmt::format(" sharing={}", attrs_.sharing);
  if (attrs_.backward_input != MatmulInput::f32)
    text += fmt::format(" backward_input={}", matmul_input_name(attrs_.backward_input));
  return text;
}

std::vector<TensorType> Attention::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "q", in[kQ], 3);
  expect_dtype(name(), "q", in[kQ], kActivations);
  expect_plain(name(), "q", in[kQ]);
  expect_dim(name(), "q", in[kQ], 1, Dim(attrs_.heads), "attribute heads");
  expect_dim(name(), "q", in[kQ], 2, Dim(attrs_.head_dim), "attribute head_dim");
  // Values have a width of their own, or are the first columns of keys.
  const bool in_keys = attrs_.values() < attrs_.head_dim && in[kV].rank() > 0 && in[kV].dim(-1) == Dim(attrs_.head_dim);
  for (const int port : {kK, kV})
    expect_keys(*this, static_cast<size_t>(port), in[static_cast<size_t>(port)], attrs_.source, in[kQ].dtype,
                in[kQ].dim(0), attrs_.kv_heads, port == kK || in_keys ? attrs_.head_dim : attrs_.values(),
                port == kK ? "attribute head_dim" : "attribute value_dim");
  TensorType like_v = in[kK];  // but as wide as values
  like_v.dim(-1) = in[kV].dim(-1);
  expect_same_dims(name(), "v", in[kV], like_v, "k");
  const DType like_k[] = {in[kK].dtype};
  expect_dtype(name(), "v", in[kV], like_k);
  if (in[kV].encoding != in[kK].encoding)
    throw InvalidArgument("attention: 'v' is {} but 'k' is {}; expected both stored alike", to_string(in[kV]),
                          to_string(in[kK]));
  expect_sequences(*this, in, kQueryStart, attrs_.source);
  if (attrs_.sinks) {
    expect_present(name(), "sinks", in[kSinks]);
    expect_rank(name(), "sinks", in[kSinks], 1);
    expect_dtype(name(), "sinks", in[kSinks], kF32);
    expect_dim(name(), "sinks", in[kSinks], 0, Dim(attrs_.heads), "attribute heads");
  }
  TensorType y = plain_type(in[kQ].dtype, in[kQ].dims());
  y.dim(-1) = attrs_.values();
  return {y};
}

DType Attention::wanted_dtype(std::span<const TensorType> in, int port) const {
  const DType q = in[kQ].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  if (port == kQ || (attrs_.source == KvSource::direct && (port == kK || port == kV))) return q;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> Attention::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& q = in[kQ].sharding;
  if (!(q == Sharding::replicated()) && !(q == Sharding::along(1)))
    throw InvalidArgument("attention: 'q' is {}; expected replicated or sharded(1), its heads", to_string(in[kQ]));
  // A single head of keys, as in latent attention, may be whole on every rank.
  const bool shared = attrs_.kv_heads == 1 && in[kK].sharding == Sharding::replicated();
  for (int port : {kK, kV})
    if (const Sharding& own = in[static_cast<size_t>(port)].sharding;
        !(own == q) && !(shared && own == Sharding::replicated()))
      throw InvalidArgument("attention: '{}' is {} but 'q' is {}; expected both divided alike", port == kK ? "k" : "v",
                            to_string(in[static_cast<size_t>(port)].sharding), to_string(q));
  for (int port : {kQueryStart, kKvLength, kBlockTable})
    expect_replicated(name(), inputs()[static_cast<size_t>(port)].name, in[static_cast<size_t>(port)],
                      "every rank sees every sequence");
  const Sharding of_heads = q == Sharding::replicated() ? q : Sharding::along(0);
  if (attrs_.sinks && !(in[kSinks].sharding == of_heads))
    throw InvalidArgument("attention: 'sinks' is {} but 'q' is {}; expected both divided alike",
                          to_string(in[kSinks].sharding), to_string(q));
  return {q};
}

std::vector<Saved> Attention::saved() const {
  using enum Saved::Kind;
  std::vector<Saved> saved = {{input, kQ},        {input, kK}, {input, kV}, {input, kQueryStart},
                              {input, kKvLength}, {output, 0}, {extra, 0}};
  if (attrs_.sinks) saved.push_back({input, kSinks});
  return saved;
}

std::vector<TensorType> Attention::extra_types(std::span<const TensorType> in) const {
  if (attrs_.source == KvSource::cached) return {};
  return {TensorType(DType::f32, {in[kQ].dim(0), in[kQ].dim(1)})};
}

namespace {

// Pairs of a query and a key that it sees, of all queries before `position`, where attention is by chunks.
double pairs_in_chunks(int64_t chunk, int64_t position) {
  const double whole = static_cast<double>(position / chunk), size = static_cast<double>(chunk),
               rest = static_cast<double>(position % chunk);
  return 0.5 * (whole * size * (size + 1) + rest * (rest + 1));
}

// What the queries at positions [begin, end) of a sequence read.
struct SeenKeys {
  double pairs;  // of a query and a key that it sees
  int64_t keys;  // that any of them sees
};

// Query i sees begin + i + 1 keys, or the window's: an arithmetic series, and from its end on a constant.
SeenKeys seen_keys(const kernels::AttentionAttrs& attrs, int64_t begin, int64_t end) {
  const int64_t keys = end - (begin < end ? attrs.first_key(begin) : 0);
  if (attrs.chunk > 0) return {pairs_in_chunks(attrs.chunk, end) - pairs_in_chunks(attrs.chunk, begin), keys};
  const int64_t queries = end - begin, first = begin + 1;
  const int64_t growing = attrs.window > 0 ? std::clamp<int64_t>(attrs.window - first, 0, queries) : queries;
  return {0.5 * static_cast<double>(growing) * static_cast<double>(2 * first + growing - 1) +
              static_cast<double>(queries - growing) * static_cast<double>(attrs.window),
          keys};
}

}  // namespace

Cost Attention::cost(Pass pass, std::span<const TensorType> in, std::span<const TensorType> out,
                     const SymbolValues& symbols) const {
  const Shape q = in[kQ].bind(symbols);
  const int64_t tokens = q[0], sequences = std::max<int64_t>(1, in[kKvLength].bind(symbols)[0]);
  const int64_t queries = (tokens + sequences - 1) / sequences;
  int64_t keys = queries;
  if (attrs_.source == KvSource::cached)
    keys = std::max(queries, in[kBlockTable].bind(symbols)[1] * in[kK].bind(symbols)[2]);
  const SeenKeys seen = seen_keys(attrs_, keys - queries, keys);
  const double share = static_cast<double>(tokens) / static_cast<double>(std::max<int64_t>(1, queries));
  const double heads = static_cast<double>(attrs_.heads), head_dim = static_cast<double>(attrs_.head_dim),
               value_dim = static_cast<double>(attrs_.values());
  // Forward: q k^T and p v. Backward: s again, dq and dk, then dp and dv. Each pair also costs an exponential, its
  // maximum and sum; a soft cap a hyperbolic tangent.
  const bool backward = pass == Pass::backward;
  const double flops =
      share * seen.pairs * heads *
      ((backward ? 3 : 1) * 2 * head_dim + (backward ? 2 : 1) * 2 * value_dim + 13 + (attrs_.softcap > 0 ? 25 : 0));
  if (attrs_.source == KvSource::direct) return {flops, traffic_bytes(*this, pass, in, out, symbols)};
  const TensorType key(in[kK].dtype, {attrs_.kv_heads, attrs_.head_dim}, in[kK].encoding),
      value(in[kV].dtype, {attrs_.kv_heads, attrs_.values()}, in[kV].encoding);
  const bool shared = in[kV].fixed(3) != attrs_.values();  // values lie in the rows of keys
  const double kv_rows = static_cast<double>(key.size_bytes(symbols) + (shared ? 0 : value.size_bytes(symbols)));
  const TensorType others[] = {in[kQ], in[kQueryStart], in[kKvLength], in[kBlockTable]};
  return {flops, share * static_cast<double>(seen.keys) * kv_rows + traffic_bytes(others, out, symbols)};
}

void Attention::reference(Pass pass, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const RefTensor &q = in[kQ], &k = in[kK], &v = in[kV], &query_start = in[kQueryStart], &kv_length = in[kKvLength];
  const auto heads = attrs_.heads, kv_heads = attrs_.kv_heads, head_dim = attrs_.head_dim, value_dim = attrs_.values(),
             value_row = v.shape.back();
  const double scale = static_cast<double>(attrs_.scale), cap = static_cast<double>(attrs_.softcap);
  const bool cached = attrs_.source == KvSource::cached;
  const bool backward = pass == Pass::backward;
  if (backward)
    for (RefTensor& gradient : out.first(3)) std::fill(gradient.data.begin(), gradient.data.end(), 0.0);

  for (int64_t s = 0; s < kv_length.shape[0]; ++s) {
    const auto begin = static_cast<int64_t>(query_start.data[static_cast<size_t>(s)]);
    const auto end = static_cast<int64_t>(query_start.data[static_cast<size_t>(s) + 1]);
    const auto length = static_cast<int64_t>(kv_length.data[static_cast<size_t>(s)]);
    // The row of key position j of kv head g, in k and v alike.
    const auto kv_row = [&](int64_t j, int64_t g) {
      if (!cached) return (begin + j) * kv_heads + g;
      const RefTensor& table = in[kBlockTable];
      const int64_t block_size = k.shape[2];
      const auto block = static_cast<int64_t>(table.data[static_cast<size_t>(s * table.shape[1] + j / block_size)]);
      return (block * kv_heads + g) * block_size + j % block_size;
    };
    for (int64_t t = begin; t < end; ++t)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t g = h / (heads / kv_heads);
        const int64_t position = length - (end - begin) + (t - begin);
        const int64_t first = attrs_.first_key(position);
        const auto q_offset = static_cast<size_t>((t * heads + h) * head_dim),
                   y_offset = static_cast<size_t>((t * heads + h) * value_dim);
        const auto key_offset = [&](int64_t j) { return static_cast<size_t>(kv_row(j, g) * head_dim); };
        const auto value_offset = [&](int64_t j) { return static_cast<size_t>(kv_row(j, g) * value_row); };
        std::vector<double> score;
        for (int64_t j = first; j <= position; ++j) {
          double dot = 0;
          for (size_t d = 0; d < static_cast<size_t>(head_dim); ++d)
            dot += q.data[q_offset + d] * k.data[key_offset(j) + d];
          score.push_back(cap > 0 ? cap * std::tanh(scale * dot / cap) : scale * dot);
        }
        if (backward) {
          // p = exp(s - lse); dv_j = p_j dy; ds_j = p_j (dy . v_j - dy . y), also of the sink, whose value is 0
          const RefTensor &y = in[5], &lse = in[6], &dy = in.back();
          const double log_sum = lse.data[static_cast<size_t>(t * heads + h)];
          double dy_y = 0;
          for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d)
            dy_y += dy.data[y_offset + d] * y.data[y_offset + d];
          if (attrs_.sinks && !out[3].data.empty())
            out[3].data[static_cast<size_t>(h)] -= std::exp(in[7].data[static_cast<size_t>(h)] - log_sum) * dy_y;
          for (int64_t j = first; j <= position; ++j) {
            const double capped = score[static_cast<size_t>(j - first)], p = std::exp(capped - log_sum);
            const double slope = cap > 0 ? 1 - capped / cap * (capped / cap) : 1;
            const size_t key = key_offset(j), value = value_offset(j);
            double dy_v = 0;
            for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d)
              dy_v += dy.data[y_offset + d] * v.data[value + d];
            const double ds = p * (dy_v - dy_y) * slope * scale;
            for (size_t d = 0; d < static_cast<size_t>(head_dim); ++d) {
              if (!out[0].data.empty()) out[0].data[q_offset + d] += ds * k.data[key + d];
              if (!out[1].data.empty()) out[1].data[key + d] += ds * q.data[q_offset + d];
            }
            for (size_t d = 0; d < static_cast<size_t>(value_dim) && !out[2].data.empty(); ++d)
              out[2].data[value + d] += p * dy.data[y_offset + d];
          }
          continue;
        }
        double largest = *std::max_element(score.begin(), score.end()), sum = 0;
        if (attrs_.sinks) {
          const double sink = in[kSinks].data[static_cast<size_t>(h)];
          largest = std::max(largest, sink);
          sum = std::exp(sink - largest);
        }
        for (double value : score) sum += std::exp(value - largest);
        for (size_t d = 0; d < static_cast<size_t>(value_dim); ++d) {
          double y = 0;
          for (int64_t j = first; j <= position; ++j)
            y += std::exp(score[static_cast<size_t>(j - first)] - largest) / sum * v.data[value_offset(j) + d];
          out[0].data[y_offset + d] = y;
        }
        if (pass == Pass::forward && !cached && !out[1].data.empty())
          out[1].data[static_cast<size_t>(t * heads + h)] = largest + std::log(sum);
      }
  }
}

namespace {

// One token, or 512, at the end of a long contiguous cache, in every type of cache.
void append_long_contexts(std::vector<Workload>& rows, const ModelShape& model, kernels::AttentionAttrs attrs) {
  attrs.source = KvSource::cached;
  for (const int64_t length : {8192, 32768})
    for (const StepShape& step : {StepShape{"decode-1", 1, 1, length}, StepShape{"prefill-512", 512, 1, length}})
      for (const std::string_view name : {"f32", "bf16", "f16", "int8", "fp8_e4m3"}) {
        SymbolValues symbols = symbols_of(step);
        symbols[Symbol::max_blocks] = 1;
        const WeightType stored = kv_cache_type(name).value();
        const TensorType cache(stored.dtype, {1, model.kv_heads, length, model.head_dim}, stored.encoding);
        rows.push_back(
            {workload_name(model, step, fmt::format("attention at {} {}", length, name)),
             std::make_shared<Attention>(attrs),
             {TensorType(model.dtype, {Symbol::tokens, model.heads, model.head_dim}), cache, cache,
              TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
              TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
             symbols});
      }
}

// Chunks as in Llama 4: a token in the middle of one, and a prompt across the border of two.
void append_chunks(std::vector<Workload>& rows) {
  constexpr int64_t kHeads = 40, kKvHeads = 8, kHeadDim = 128, kChunk = 8192;
  for (const StepShape& step :
       {StepShape{"decode-1", 1, 1, kChunk + kChunk / 2}, StepShape{"prefill-512", 512, 1, kChunk + 256}}) {
    SymbolValues symbols = symbols_of(step);
    symbols[Symbol::max_blocks] = 1;
    const TensorType cache(DType::bf16, {1, kKvHeads, step.kv_length, kHeadDim});
    rows.push_back(
        {workload_name("llama-4-scout", step, "attention by chunks"),
         std::make_shared<Attention>(kernels::AttentionAttrs{.heads = kHeads,
                                                             .kv_heads = kKvHeads,
                                                             .head_dim = kHeadDim,
                                                             .scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim)),
                                                             .source = KvSource::cached,
                                                             .chunk = kChunk}),
         {TensorType(DType::bf16, {Symbol::tokens, kHeads, kHeadDim}), cache, cache,
          TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
          TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
         symbols});
  }
}

// A soft cap as in Gemma 2, and sinks as in gpt-oss.
void append_capped_and_sinks(std::vector<Workload>& rows) {
  ModelShape gemma{}, gpt_oss{};
  gemma.name = "gemma-2-2b", gemma.heads = 8, gemma.kv_heads = 4, gemma.head_dim = 256;
  gpt_oss.name = "gpt-oss-20b", gpt_oss.heads = 64, gpt_oss.kv_heads = 8, gpt_oss.head_dim = 64;
  gemma.dtype = gpt_oss.dtype = DType::bf16;
  for (const ModelShape& model : {gemma, gpt_oss})
    for (const StepShape& step : {StepShape{"decode-1", 1, 1, 8192}, StepShape{"prefill-512", 512, 1, 512}}) {
      const bool sinks = model.name == gpt_oss.name;
      SymbolValues symbols = symbols_of(step);
      symbols[Symbol::max_blocks] = 1;
      const TensorType cache(model.dtype, {1, model.kv_heads, step.kv_length, model.head_dim});
      std::vector<TensorType> types = {TensorType(model.dtype, {Symbol::tokens, model.heads, model.head_dim}),
                                       cache,
                                       cache,
                                       TensorType(DType::i32, {Dim(Symbol::sequences, 1)}),
                                       TensorType(DType::i32, {Symbol::sequences}),
                                       TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})};
      if (sinks) types.emplace_back(DType::f32, std::initializer_list<Dim>{model.heads});
      rows.push_back({workload_name(model, step, sinks ? "attention with sinks" : "attention with a soft cap"),
                      std::make_shared<Attention>(
                          kernels::AttentionAttrs{.heads = model.heads,
                                                  .kv_heads = model.kv_heads,
                                                  .head_dim = model.head_dim,
                                                  .scale = 1.0f / std::sqrt(static_cast<float>(model.head_dim)),
                                                  .window = sinks ? 128 : 4096,
                                                  .source = KvSource::cached,
                                                  .softcap = sinks ? 0.0f : 50.0f,
                                                  .sinks = sinks}),
                      std::move(types), symbols});
    }
}

// Latent attention: every head reads the same rows, of which the first columns are the values. One token at the end of
// a context, and a prompt.
void append_latent(std::vector<Workload>& rows, const LatentShape& model) {
  const kernels::AttentionAttrs attrs{.heads = model.heads,
                                      .kv_heads = 1,
                                      .head_dim = model.row(),
                                      .scale = 1.0f / std::sqrt(static_cast<float>(model.nope + model.rope)),
                                      .source = KvSource::cached,
                                      .value_dim = model.latent};
  for (const StepShape& step : {StepShape{"decode-1", 1, 1, 512}, StepShape{"decode-1 at 8192", 1, 1, 8192},
                                StepShape{"prefill-512", 512, 1, 512}}) {
    if (model.dtype == DType::f32 && step.kv_length > 512) continue;
    const SymbolValues symbols = symbols_of(step);
    const TensorType cache(model.dtype, {symbols[Symbol::max_blocks], 1, kWorkloadBlockSize, model.row()});
    rows.push_back({workload_name(model.name, step, "attention latent"),
                    std::make_shared<Attention>(attrs),
                    {TensorType(model.dtype, {Symbol::tokens, model.heads, model.row()}), cache, cache,
                     TensorType(DType::i32, {Dim(Symbol::sequences, 1)}), TensorType(DType::i32, {Symbol::sequences}),
                     TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
                    symbols});
  }
}

}  // namespace

std::vector<Workload> Attention::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes()) {
    kernels::AttentionAttrs attrs{.heads = model.heads,
                                  .kv_heads = model.kv_heads,
                                  .head_dim = model.head_dim,
                                  .scale = 1.0f / std::sqrt(static_cast<float>(model.head_dim))};
    const TensorType q(model.dtype, {Symbol::tokens, model.heads, model.head_dim});
    const TensorType kv(model.dtype, {Symbol::tokens, model.kv_heads, model.head_dim});
    const TensorType query_start(DType::i32, {Dim(Symbol::sequences, 1)}), kv_length(DType::i32, {Symbol::sequences});
    if (model.dtype != DType::f32) append_long_contexts(rows, model, attrs);  // the tiny models have no such context
    for (const StepShape& step : step_shapes()) {
      const SymbolValues symbols = symbols_of(step);
      const int64_t num_blocks = step.sequences * symbols[Symbol::max_blocks];
      const TensorType cache(model.dtype, {num_blocks, model.kv_heads, kWorkloadBlockSize, model.head_dim});
      attrs.source = KvSource::cached;
      rows.push_back(
          {workload_name(model, step, "attention paged"),
           std::make_shared<Attention>(attrs),
           {q, cache, cache, query_start, kv_length, TensorType(DType::i32, {Symbol::sequences, Symbol::max_blocks})},
           symbols});
      if (step.tokens != step.kv_length * step.sequences) continue;
      attrs.source = KvSource::direct;
      rows.push_back({workload_name(model, step, "attention direct"),
                      std::make_shared<Attention>(attrs),
                      {q, kv, kv, query_start, kv_length, kernels::unconnected_port()},
                      symbols});
    }
  }
  append_capped_and_sinks(rows);
  append_chunks(rows);
  for (const LatentShape& model : latent_shapes()) append_latent(rows, model);
  return rows;
}

}  // namespace eadem::ops
