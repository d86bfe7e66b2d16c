// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/base/rope.h"
#include "eadem/modules/build_context.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/attention/scale_by_position.h"

namespace eadem::modules {

// Multi-head causal self-attention with grouped keys and values:
//   q, k, v = projections of x, normalized with `qk_norm_eps`, limited by `clip`, rotated and q times its temperature;
//   y = o_proj(attention(q, k, v)).
// Parameters: q_proj, k_proj, v_proj, g_proj, o_proj (.weight, .bias), q_norm.weight, k_norm.weight, sinks. There is no
// v_proj where keys are values, and nothing of k and v where these are another layer's.
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
    double clip = 0;     // limit of the elements of q, k and v behind whole norms, before other norms; 0: none
    bool sinks = false;  // a number per head joins the scores; see kernels/attention/attention.h
    bool gated = false;  // what o_proj reads is times the sigmoid of g_proj(x)
    RopeConfig rope;
    std::optional<kernels::ScaleByPositionAttrs> temperature;  // of q, by position
    bool value_norm = false;       // each head of v is divided by its root mean square; needs qk_norm_eps
    bool keys_are_values = false;  // v is what k_proj makes, neither normalized as k is nor rotated
    // The earlier layer of the same kv_heads, head_dim and window whose keys and values are read; it keeps no cache of
    // its own. None: its own.
    std::optional<int> kv_layer;
  };

  CausalAttention(const Config& config, int layer) : config_(config), layer_(layer) {}

  static HardwareConfig default_hw_config(const Device& device, HardwareMode mode, const ModelSpec& spec);

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  // A projection to `all_heads` heads of all ranks, flat.
  ValueId build_projection(BuildContext& context, const char* name, int64_t all_heads, Parallel parallel,
                           ValueId x) const;
  // From a projection of q or k to heads that attention takes: split, normalized, rotated.
  struct Names {
    const char *projection, *norm, *rope;
  };
  ValueId build_heads(BuildContext& context, const Names& names, int64_t all_heads, int64_t own_heads,
                      ValueId flat) const;
  ValueId split(BuildContext& context, const char* name, int64_t heads, ValueId flat) const;
  // Limits the elements of q, k or v.
  ValueId clipped(BuildContext& context, const char* name, ValueId flat) const;
  KvValues build_kv(BuildContext& context, ValueId x) const;

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
