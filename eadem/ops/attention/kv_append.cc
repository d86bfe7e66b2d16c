// SPDX-License-Identifier: Apache-2.0
#include "eadem/ops/attention/kv_append.h"

#include <algorithm>

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
  expect_rank(name(), "v", in[kV], 3);
  expect_dim(name(), "v", in[kV], 0, in[kK].dim(0), "tokens of 'k'");
  expect_dim(name(), "v", in[kV], 1, in[kK].dim(1), "kv_heads of 'k'");
  const DType like_k[] = {in[kK].dtype};
  expect_dtype(name(), "v", in[kV], like_k);
  expect_plain(name(), "v", in[kV]);
  expect_rank(name(), "slots", in[kSlots], 1);
  expect_dtype(name(), "slots", in[kSlots], kI64);
  expect_dim(name(), "slots", in[kSlots], 0, in[kK].dim(0), "tokens of 'k'");
  expect_rank(name(), "cache_k", in[kCacheK], 4);
  expect_dtype(name(), "cache_k", in[kCacheK], kFloats);
  expect_dim(name(), "cache_k", in[kCacheK], 1, in[kK].dim(1), "kv_heads of 'k'");
  expect_dim(name(), "cache_k", in[kCacheK], 3, in[kK].dim(2), "width of 'k'");
  expect_cache(name(), "cache_k", in[kCacheK]);
  TensorType like_v = in[kCacheK];  // as wide as values
  like_v.dim(-1) = in[kV].dim(2);
  expect_same_dims(name(), "cache_v", in[kCacheV], like_v, "cache_k");
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
  int64_t bytes = in[kSlots].size_bytes(symbols);
  for (const int port : {kK, kV}) {
    const auto& rows = in[static_cast<size_t>(port)];
    bytes +=
        rows.size_bytes(symbols) + TensorType(in[kCacheK].dtype, rows.dims(), in[kCacheK].encoding).size_bytes(symbols);
  }
  return {0, static_cast<double>(bytes)};
}

void KvAppend::reference(Pass /*pass*/, std::span<const RefTensor> in, std::span<RefTensor> out) const {
  const int64_t tokens = in[kK].shape[0], kv_heads = in[kK].shape[1], block_size = in[kCacheK].shape[2];
  for (int64_t t = 0; t < tokens; ++t) {
    const auto slot = static_cast<int64_t>(in[kSlots].data[static_cast<size_t>(t)]);
    if (slot < 0) continue;
    for (int64_t g = 0; g < kv_heads; ++g)
      for (const int port : {kK, kV}) {
        const RefTensor& rows = in[static_cast<size_t>(port)];
        const int64_t width = rows.shape[2], from = (t * kv_heads + g) * width,
                      to = ((slot / block_size * kv_heads + g) * block_size + slot % block_size) * width;
        std::copy_n(rows.data.begin() + from, width, out[port == kK ? 0 : 1].data.begin() + to);
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
