// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/factory/attention_factory.h"

#include "eadem/modules/base/kv_cache_store.h"
#include "eadem/ops/attention.h"

namespace eadem::modules {

namespace {

std::string_view layout_name(CacheLayout layout) {
  switch (layout) {
    case CacheLayout::none: return "no cache";
    case CacheLayout::contiguous: return "a contiguous cache";
    case CacheLayout::paged: return "a paged cache";
  }
  return "?";
}

template <CacheLayout kLayout, bool kWindowed>
Verdict can_handle(const AttentionRequest& request) {
  if (request.cache.layout != kLayout)
    return Verdict::no(fmt::format("there is {}", layout_name(request.cache.layout)));
  if (kWindowed && request.window == 0) return Verdict::no("every token sees all earlier ones");
  if (!kWindowed && request.window > 0) return Verdict::no(fmt::format("tokens see a window of {}", request.window));
  return Verdict::yes(0.0);
}

kernels::AttentionAttrs attributes(const AttentionRequest& request, kernels::KvSource source) {
  return {.heads = request.heads,
          .kv_heads = request.kv_heads,
          .head_dim = request.head_dim,
          .scale = static_cast<float>(request.scale),
          .window = request.window,
          .source = source};
}

ValueId build_direct(BuildContext& context, const AttentionRequest& request, ValueId q, ValueId k, ValueId v) {
  return context.graph.add1(std::make_shared<ops::Attention>(attributes(request, kernels::KvSource::direct)),
                            {q, k, v, context.step.query_start, context.step.kv_length});
}

ValueId build_cached(BuildContext& context, const AttentionRequest& request, ValueId q, ValueId k, ValueId v) {
  const KvCacheStore store(request.kv_heads, request.head_dim);
  const KvCacheStore::Caches caches = store.build(context, k, v, request.layer);
  return context.graph.add1(
      std::make_shared<ops::Attention>(attributes(request, kernels::KvSource::cached)),
      {q, caches.k, caches.v, context.step.query_start, context.step.kv_length, context.step.block_table});
}

constexpr AttentionStrategy kDirect = {"direct", can_handle<CacheLayout::none, false>, build_direct};
constexpr AttentionStrategy kDirectWindow = {"direct_sliding_window", can_handle<CacheLayout::none, true>,
                                             build_direct};
constexpr AttentionStrategy kContiguous = {"contiguous", can_handle<CacheLayout::contiguous, false>, build_cached};
constexpr AttentionStrategy kContiguousWindow = {"contiguous_sliding_window", can_handle<CacheLayout::contiguous, true>,
                                                 build_cached};
constexpr AttentionStrategy kPaged = {"paged", can_handle<CacheLayout::paged, false>, build_cached};
constexpr AttentionStrategy kPagedWindow = {"paged_sliding_window", can_handle<CacheLayout::paged, true>, build_cached};

constexpr const AttentionStrategy* kAttentionStrategies[] = {&kDirect,           &kDirectWindow, &kContiguous,
                                                             &kContiguousWindow, &kPaged,        &kPagedWindow};

}  // namespace

std::span<const AttentionStrategy* const> AttentionFactory::strategies() { return kAttentionStrategies; }

ValueId AttentionFactory::build(BuildContext& context, AttentionRequest request, ValueId q, ValueId k, ValueId v) {
  request.cache = context.cache;
  Decision decision{"attention " + context.graph.scope(), {}, {}};
  const AttentionStrategy* strategy = select(strategies(), request, decision);
  if (strategy == nullptr) throw_no_candidate(decision);
  context.decisions.push_back(std::move(decision));
  return strategy->build(context, request, q, k, v);
}

}  // namespace eadem::modules
