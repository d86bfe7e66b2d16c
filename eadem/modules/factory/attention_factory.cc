// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/factory/attention_factory.h"

#include "eadem/modules/base/kv_cache_store.h"
#include "eadem/ops/attention/attention.h"

namespace eadem::modules {

namespace {

kernels::AttentionAttrs attributes(const AttentionRequest& request, kernels::KvSource source) {
  return {.heads = request.heads,
          .kv_heads = request.kv_heads,
          .head_dim = request.head_dim,
          .scale = static_cast<float>(request.scale),
          .window = request.window,
          .source = source,
          .value_dim = request.value_dim,
          .softcap = static_cast<float>(request.softcap),
          .sinks = request.sinks};
}

ValueId add_attention(BuildContext& context, const kernels::AttentionAttrs& attrs, std::vector<ValueId> ports,
                      const AttentionInputs& inputs) {
  if (attrs.sinks) ports.push_back(inputs.sinks);
  return context.graph.add1(std::make_shared<ops::Attention>(attrs), std::move(ports));
}

// Those of the layer that the request names, or `own`, which later layers may name.
template <typename Own>
KvValues kv_of(BuildContext& context, const AttentionRequest& request, Own&& own) {
  if (!request.kv_layer) return context.step.layer_kv[request.layer] = own();
  const auto found = context.step.layer_kv.find(*request.kv_layer);
  if (found == context.step.layer_kv.end())
    throw Unsupported("layer {} reads the keys and values of layer {}, which is not in the same part of the model",
                      request.layer, *request.kv_layer);
  return found->second;
}

ValueId build_direct(BuildContext& context, const AttentionRequest& request, const AttentionInputs& inputs) {
  const KvValues kv = kv_of(context, request, [&] { return KvValues{inputs.k, inputs.v}; });
  return add_attention(context, attributes(request, kernels::KvSource::direct),
                       {inputs.q, kv.k, kv.v, context.step.query_start, context.step.kv_length, pipeline::kNoValue},
                       inputs);
}

ValueId build_cached(BuildContext& context, const AttentionRequest& request, const AttentionInputs& inputs) {
  const int64_t value_dim = request.value_dim == 0 ? request.head_dim : request.value_dim;
  const KvValues caches = kv_of(context, request, [&]() -> KvValues {
    const KvCacheStore store(request.kv_heads, request.head_dim, value_dim, request.window);
    if (!request.latent) return store.build(context, inputs.k, inputs.v, request.layer);
    const ValueId latent = store.build_latent(context, inputs.k, request.layer);
    return {latent, latent};
  });
  return add_attention(context, attributes(request, kernels::KvSource::cached),
                       {inputs.q, caches.k, caches.v, context.step.query_start, context.step.kv_length,
                        context.group_of(request.window).block_table},
                       inputs);
}

// The line that `explain` prints for a layer.
std::string description_of(const AttentionRequest& request) {
  std::string text = request.cache.layout == CacheLayout::none         ? "keys of the step"
                     : request.cache.layout == CacheLayout::contiguous ? "a contiguous cache"
                                                                       : "a paged cache";
  if (request.kv_layer) text += fmt::format(" of layer {}", *request.kv_layer);
  if (request.latent) text += fmt::format(", latent rows of {}", request.head_dim);
  if (request.window > 0) text += fmt::format(", a window of {}", request.window);
  if (request.softcap > 0) text += fmt::format(", scores capped at {}", request.softcap);
  if (request.sinks) text += ", sinks";
  return text;
}

Verdict can_build_direct(const AttentionRequest& request) {
  if (request.cache.layout != CacheLayout::none) return Verdict::no("there is a cache");
  return Verdict::yes(0.0, description_of(request));
}

Verdict can_build_cached(const AttentionRequest& request) {
  if (request.cache.layout == CacheLayout::none) return Verdict::no("there is no cache");
  return Verdict::yes(0.0, description_of(request));
}

constexpr AttentionStrategy kDirect = {"direct", can_build_direct, build_direct};
constexpr AttentionStrategy kCached = {"cached", can_build_cached, build_cached};

constexpr const AttentionStrategy* kAttentionStrategies[] = {&kDirect, &kCached};

}  // namespace

std::span<const AttentionStrategy* const> AttentionFactory::strategies() { return kAttentionStrategies; }

ValueId AttentionFactory::build(BuildContext& context, AttentionRequest request, const AttentionInputs& inputs) {
  request.cache = context.cache;
  Decision decision{"attention " + context.graph.scope(), {}, {}};
  const AttentionStrategy* strategy = select(strategies(), request, decision);
  if (strategy == nullptr) throw_no_candidate(decision);
  context.decisions.push_back(std::move(decision));
  return strategy->build(context, request, inputs);
}

}  // namespace eadem::modules
