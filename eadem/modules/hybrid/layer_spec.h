// SPDX-License-Identifier: Apache-2.0
//
// LayerSpec: what a decoder layer is made of. A new kind of mixer or MLP is an alternative of its variant and a module;
// a new place of a norm is a field here.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "eadem/modules/base/norm.h"
#include "eadem/modules/hybrid/causal_attention.h"
#include "eadem/modules/hybrid/dense_and_experts.h"
#include "eadem/modules/hybrid/dense_mlp.h"
#include "eadem/modules/hybrid/gated_convolution.h"
#include "eadem/modules/hybrid/gated_delta_net.h"
#include "eadem/modules/hybrid/layer_inputs.h"
#include "eadem/modules/hybrid/mamba2.h"
#include "eadem/modules/hybrid/mla_attention.h"
#include "eadem/modules/hybrid/moe_mlp.h"
#include "eadem/modules/hybrid/parallel_mixers.h"
#include "eadem/modules/hybrid/sparse/pooled_attention.h"
#include "eadem/modules/hybrid/streams/hyper_connections.h"

namespace eadem::modules {

// A parameter by its name in the model, and the shape of all ranks' parts together.
struct ParameterInfo {
  std::string name;
  Shape shape;
  bool trainable = true;
};

// h = x + r * after_mixer(mixer(before_mixer(x)));   y = h + r * after_mlp(mlp(before_mlp(h)))
// In parallel both read x:  y = x + r * after_mixer(mixer(before_mixer(x))) + r * after_mlp(mlp(before_mlp(x))), where
// an MLP without a norm of its own reads the mixer's. A norm that is not there changes nothing, and so does a mixer or
// an MLP (std::monostate). Rope, windows and states belong to the mixer.
//
// A layer of several `parts` is these, one after the other, and has no mixer, no MLP and no norms of its own; the first
// part's parameters stand below "0." in the layer, and so on. Experts beside them, the `shortcut`, read what the MLP of
// the first part reads, and the layer adds what they make behind the last part. No part has streams.
//
// With streams x and y are [tokens, streams, hidden], and the mixer and the MLP read and write them through
// hyper-connections called attn_hc and ffn_hc in the place of these sums; there are both then, and neither has a norm
// behind it or a scale.
struct LayerSpec {
  int64_t hidden = 0;
  std::variant<CausalAttention::Config, MlaAttention::Config, GatedDeltaNet::Config, Mamba2::Config,
               ParallelMixers::Config, GatedConvolution::Config, PooledAttention::Config, std::monostate>
      mixer;
  std::variant<DenseMlp::Config, MoeMlp::Config, DenseAndExperts::Config, std::monostate> mlp;
  std::optional<NormSpec> before_mixer, after_mixer, before_mlp, after_mlp;
  bool parallel = false;
  double residual_scale = 1;  // r
  std::vector<LayerSpec> parts;
  std::optional<MoeMlp::Config> shortcut;
  // Behind these, in this order: what reads the layer's own input, and a factor on everything, the parameter
  // `layer_scalar` [1], which is not trained.
  std::optional<LayerInputReader::Config> reads_input;
  bool scaled = false;
  HyperConnections::Config streams;
};

// Parameters of a layer, each name with `prefix` ("model.layers.3.") before it, in the order of the computation.
void list_parameters(const NormSpec& norm, int64_t size, const std::string& prefix, std::vector<ParameterInfo>& list);
void list_parameters(const LayerSpec& spec, const std::string& prefix, std::vector<ParameterInfo>& list);
void list_parameters(const LayerInputs::Config& config, const std::string& prefix, std::vector<ParameterInfo>& list);
// Of one part of hyper-connections, or of what merges the streams.
void list_parameters(const HyperConnections::Config& config, bool merges, const std::string& prefix,
                     std::vector<ParameterInfo>& list);

}  // namespace eadem::modules
