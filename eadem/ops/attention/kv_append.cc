// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/kv_append.h"

#include "eadem/ops/model_shapes.h"

namespace eadem::ops {

std::vector<Port> KvAppend::inputs() const {
  return {{"k"}, {"v"}, {"slots", Port::Role::index}, {"cache_k", Port::Role::state}, {"cache_v", Port::Role::state}};
}
std::vector<Port> KvAppend::outputs() const { return {{"cache_k", Port::Role::state}, {"cache_v", Port::Role::state}}; }

AttrsRef KvAppend::attrs() const {
  static constexpr kernels::NoAttrs kNone;
  return AttrsRef(kNone);
}

std::vector<TensorType> KvAppend::infer_types(std::span<const TensorType> in) const {
  expect_rank(name(), "k", in[kK], 3);
  expect_dtype(name(), "k", in[kK], kActivations);
  expect_plain(name(), "k", in[kK]);
  expect_same_dims(name(), "v", in[kV], in[kK], "k");
  const DType like_k[] = {in[kK].dtype};
  expect_dtype(name(), "v", in[kV], like_k);
  expect_plain(name(), "v", in[kV]);
  expect_rank(name(), "slots", in[kSlots], 1);
  expect_dtype(name(), "slots", in[kSlots], kI64);
  expect_dim(name(), "slots", in[kSlots], 0, in[kK].dim(0), "tokens of 'k'");
  expect_rank(name(), "cache_k", in[kCacheK], 4);
  expect_dtype(name(), "cache_k", in[kCacheK], kFloats);
  expect_dim(name(), "cache_k", in[kCacheK], 1, in[kK].dim(1), "kv_heads of 'k'");
  expect_dim(name(), "cache_k", in[kCacheK], 3, in[kK].dim(2), "head_dim of 'k'");
  expect_cache(name(), "cache_k", in[kCacheK]);
  expect_same_dims(name(), "cache_v", in[kCacheV], in[kCacheK], "cache_k");
  const DType like_cache[] = {in[kCacheK].dtype};
  expect_dtype(name(), "cache_v", in[kCacheV], like_cache);
  expect_cache(name(), "cache_v", in[kCacheV]);
  if (in[kCacheV].encoding != in[kCacheK].encoding)
    throw InvalidArgument("kv_append: 'cache_v' is {} but 'cache_k' is {}; expected both stored alike",
                          to_string(in[kCacheV]), to_string(in[kCacheK]));
  const auto stored = [](const TensorType& cache) { return TensorType(cache.dtype, cache.dims(), cache.encoding); };
  return {stored(in[kCacheK]), stored(in[kCacheV])};
}

DType KvAppend::wanted_dtype(std::span<const TensorType> in, int port) const {
  if (port == kK || port == kV) return in[kK].dtype == DType::bf16 ? DType::bf16 : DType::f32;
  return in[static_cast<size_t>(port)].dtype;
}

std::vector<Sharding> KvAppend::infer_sharding(std::span<const TensorType> in) const {
  const Sharding& k = in[kK].sharding;
  if (!(k == Sharding::replicated()) && !(k == Sharding::along(1)))
    throw InvalidArgument("kv_append: 'k' is {}; expected replicated or sharded(1), its heads", to_string(in[kK]));
  for (int port : {kV, kCacheK, kCacheV})
    if (!(in[static_cast<size_t>(port)].sharding == k))
      throw InvalidArgument("kv_append: '{}' is {} but 'k' is {}; expected both divided alike",
                            inputs()[static_cast<size_t>(port)].name, to_string(in[static_cast<size_t>(port)].sharding),
                            to_string(k));
  expect_replicated(name(), "slots", in[kSlots], "every rank sees every token");
  return {k, k};
}

Cost KvAppend::cost(Pass /*pass*/, std::span<const TensorType> in, std::span<const TensorType> /*out*/,
                    const SymbolValues& symbols) const {
  const TensorType written(in[kCacheK].dtype, in[kK].dims(), in[kCacheK].encoding);
  return {0, 2 * static_cast<double>(in[kK].size_bytes(symbols) + written.size_bytes(symbols)) +
                 static_cast<double>(in[kSlots].size_bytes(symbols))};
}

void KvAppend::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const Shape &k = in[kK].shape, &cache = in[kCacheK].shape;
  const int64_t kv_heads = k[1], head_dim = k[2], block_size = cache[2];
  for (int64_t t = 0; t < k[0]; ++t) {
    const auto slot = static_cast<int64_t>(in[kSlots].data[static_cast<size_t>(t)]);
    if (slot < 0) continue;
    for (int64_t g = 0; g < kv_heads; ++g)
      for (int64_t d = 0; d < head_dim; ++d) {
        const auto from = static_cast<size_t>((t * kv_heads + g) * head_dim + d);
        const auto to =
            static_cast<size_t>(((slot / block_size * kv_heads + g) * block_size + slot % block_size) * head_dim + d);
        out[0].data[to] = in[kK].data[from];
        out[1].data[to] = in[kV].data[from];
      }
  }
}

std::vector<Workload> KvAppend::workloads() {
  std::vector<Workload> rows;
  for (const ModelShape& model : model_shapes())
    for (const StepShape& step : step_shapes()) {
      const SymbolValues symbols = symbols_of(step);
      const TensorType kv(model.dtype, {Symbol::tokens, model.kv_heads, model.head_dim});
      const TensorType cache(model.dtype, {step.sequences * symbols[Symbol::max_blocks], model.kv_heads,
                                           kWorkloadBlockSize, model.head_dim});
      rows.push_back({workload_name(model, step, "kv_append"),
                      std::make_shared<KvAppend>(),
                      {kv, kv, TensorType(DType::i64, {Symbol::tokens}), cache, cache},
                      symbols});
    }
  return rows;
}

}  // namespace eadem::ops
