// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/decoder_layer.h"

#include "eadem/modules/base/rms_norm.h"
#include "eadem/ops/elementwise.h"

namespace eadem::modules {

ValueId DecoderLayer::build(BuildContext& context, ValueId x) const {
  Graph& graph = context.graph;
  const RmsNorm norm(config_.attention.hidden, config_.norm_eps);
  const auto scoped = [&](const char* name, auto&& build) {
    const Graph::Scope scope(graph, name);
    return build();
  };
  const ValueId attention_in = scoped("input_layernorm", [&] { return norm.build(context, x, layer_); });
  const ValueId attended =
      scoped("self_attn", [&] { return CausalAttention(config_.attention, layer_).build(context, attention_in); });
  const ValueId hidden = graph.add1(std::make_shared<ops::Add>(), {x, attended});
  const ValueId mlp_in = scoped("post_attention_layernorm", [&] { return norm.build(context, hidden, layer_); });
  const ValueId transformed = scoped("mlp", [&] { return DenseMlp(config_.mlp, layer_).build(context, mlp_in); });
  return graph.add1(std::make_shared<ops::Add>(), {hidden, transformed});
}

}  // namespace eadem::modules
