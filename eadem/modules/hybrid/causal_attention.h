// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/base/rope.h"
#include "eadem/modules/build_context.h"
#include "eadem/ops/attention/scale_by_position.h"

namespace eadem::modules {

// Multi-head causal self-attention with grouped keys and values:
//   q, k, v = projections of x, normalized with `qk_norm_eps`, rotated and q times its temperature;
//   y = o_proj(attention(q, k, v)).
// Parameters: q_proj, k_proj, v_proj, g_proj, o_proj (.weight, .bias), q_norm.weight, k_norm.weight, sinks.
class CausalAttention {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t heads = 0;
    int64_t kv_heads = 0;
    int64_t head_dim = 0;
    double scale = 0;  // factor on q . k
    bool qkv_bias = false;
    bool out_bias = false;
    // The RMS norms of q and k: of each head, or of all heads of a token together, before the rotation or after it;
    // weightless ones have no parameters.
    enum class QkNorm : uint8_t { per_head, whole, per_head_after_rope, weightless_after_rope };
    std::optional<double> qk_norm_eps;  // none: no QK-norm
    QkNorm qk_norm = QkNorm::per_head;
    int64_t window = 0;  // 0: unlimited
    int64_t chunk = 0;   // tokens see those of their own chunk of so many positions; 0: no chunks. Not beside a window
    double softcap = 0;  // of scores; 0: none
    bool sinks = false;  // a number per head joins the scores; see kernels/attention.h
    bool gated = false;  // what o_proj reads is times the sigmoid of g_proj(x)
    RopeConfig rope;
    std::optional<kernels::ScaleByPositionAttrs> temperature;  // of q, by position
  };

  CausalAttention(const Config& config, int layer) : config_(config), layer_(layer) {}

  static HardwareConfig default_hw_config(const Device& device, HardwareMode mode, const ModelSpec& spec);

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  Config config_;
  int layer_;
};

}  // namespace eadem::modules
