// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/factory/attention_factory.h"

#include <algorithm>

#include "eadem/modules/base/kv_cache_store.h"
#include "eadem/ops/attention/attention.h"
#include "eadem/ops/attention/selected_attention.h"

namespace eadem::modules {

namespace {

// Gradients are multiplied in bf16 where weights are.
MatmulInput backward_input(const HardwareConfig& hardware, kernels::KvSource source) {
  const WeightType& weights = hardware.precision.weights.value;
  if (source != kernels::KvSource::direct || weights.dtype != DType::bf16 || weights.encoding != nullptr)
    return MatmulInput::f32;
  return std::min(hardware.precision.matmul_input.value, MatmulInput::bf16);
}

kernels::AttentionAttrs attributes(const BuildContext& context, const AttentionRequest& request,
                                   kernels::KvSource source) {
  return {.heads = request.heads,
          .kv_heads = request.kv_heads,
          .head_dim = request.head_dim,
          .scale = static_cast<float>(request.scale),
          .window = request.window,
          .source = source,
          .value_dim = request.value_dim,
          .softcap = static_cast<float>(request.softcap),
          .sinks = request.sinks,
          .chunk = request.chunk,
          .backward_input = backward_input(context.hardware.of(Role::attention, request.layer), source),
          .sharing = request.sharing * request.kv_heads == request.heads ? 0 : request.sharing};
}

// Where keys and values lie, and the table that finds them.
struct KeyPorts {
  ValueId k, v;
  ValueId block_table = pipeline::kNoValue;
};

ValueId add_attention(BuildContext& context, const AttentionRequest& request, kernels::KvSource source,
                      const KeyPorts& keys, const AttentionInputs& inputs) {
  std::vector<ValueId> ports = {inputs.q, keys.k, keys.v};
  if (request.selected > 0) ports.push_back(inputs.selection);
  ports.insert(ports.end(), {context.step.query_start, context.step.kv_length, keys.block_table});
  if (request.selected > 0) {
    const kernels::SelectedAttentionAttrs attrs{
        .heads = request.heads,
        .kv_heads = request.kv_heads,
        .head_dim = request.head_dim,
        .value_dim = request.value_dim == 0 ? request.head_dim : request.value_dim,
        .scale = static_cast<float>(request.scale),
        .span = request.span,
        .source = source};
    return context.graph.add1(std::make_shared<ops::SelectedAttention>(attrs), std::move(ports));
  }
  const kernels::AttentionAttrs attrs = attributes(context, request, source);
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
  return add_attention(context, request, kernels::KvSource::direct, {kv.k, kv.v}, inputs);
}

ValueId build_cached(BuildContext& context, const AttentionRequest& request, const AttentionInputs& inputs) {
  const int64_t value_dim = request.value_dim == 0 ? request.head_dim : request.value_dim;
  const KvValues caches = kv_of(context, request, [&]() -> KvValues {
    const KvCacheStore store(request.kv_heads, request.head_dim, value_dim, request.reach());
    if (!request.latent) return store.build(context, inputs.k, inputs.v, request.layer);
    const ValueId latent = store.build_latent(context, inputs.k, request.layer);
    return {latent, latent};
  });
  return add_attention(context, request, kernels::KvSource::cached,
                       {caches.k, caches.v, context.group_of(request.reach()).block_table}, inputs);
}

// The line that `explain` prints for a layer.
std::string description_of(const AttentionRequest& request) {
  std::string text = request.cache.layout == CacheLayout::none         ? "keys of the step"
                     : request.cache.layout == CacheLayout::contiguous ? "a contiguous cache"
                                                                       : "a paged cache";
  if (request.kv_layer) text += fmt::format(" of layer {}", *request.kv_layer);
  if (request.latent) text += fmt::format(", latent rows of {}", request.head_dim);
  if (request.window > 0) text += fmt::format(", a window of {}", request.window);
  if (request.chunk > 0) text += fmt::format(", chunks of {}", request.chunk);
  if (request.softcap > 0) text += fmt::format(", scores capped at {}", request.softcap);
  if (request.sinks) text += ", sinks";
  if (request.selected > 0 && request.span == 1)
    text += fmt::format(", the {} keys that an indexer selects", request.selected);
  if (request.selected > 0 && request.span > 1)
    text += fmt::format(", the keys of {} selected blocks of {}", request.selected, request.span);
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
  EADEM_CHECK(request.selected == 0 || (request.reach() == 0 && request.softcap == 0 && !request.sinks),
              "a selection with a window, chunks, a soft cap or sinks");
  Decision decision{"attention " + context.graph.scope(), {}, {}};
  const AttentionStrategy* strategy = select(strategies(), request, decision);
  if (strategy == nullptr) throw_no_candidate(decision);
  context.decisions.push_back(std::move(decision));
  return strategy->build(context, request, inputs);
}

}  // namespace eadem::modules
