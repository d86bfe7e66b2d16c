// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "eadem/modules/base/short_convolution.h"
#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/elementwise/elementwise.h"
#include "eadem/ops/recurrent/gated_delta_rule.h"

namespace eadem::modules {

// Linear attention with the gated delta rule (kernels/recurrent/gated_delta_rule.h):
//   q, k, v = silu(convolutions over the last `taps` tokens of projections of x)
//   y = o_proj(norm(gated_delta_rule(q, k, v, a, b)) * f(z)),   norm over each head
// with a = a_proj(x) and z = z_proj(x) or, with a `gate_rank`, a = f_b_proj(f_a_proj(x)) and z = g_b_proj(g_a_proj(x)).
// Parameters: {q,k,v}_proj, {q,k,v}_conv1d [taps, channels], a_proj or f_a_proj and f_b_proj, b_proj, z_proj or
// g_a_proj and g_b_proj, norm, o_proj (.weight); A_log, dt_bias. With a cache, the states `state` and those of the
// convolutions are kept for each sequence. Source: Yang et al. 2024 (gated delta networks); Kimi Team 2025 (Kimi
// Linear).
class GatedDeltaNet {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t key_heads = 0;
    int64_t value_heads = 0;
    int64_t key_dim = 0;
    int64_t value_dim = 0;
    int64_t taps = 4;
    bool channel_decay = false;
    bool tiled = false;                                            // see kernels/recurrent/gated_delta_rule.h
    int64_t gate_rank = 0;                                         // 0: gates are made from x at once
    kernels::ActivationKind gate = kernels::ActivationKind::silu;  // f
    double norm_eps = 1e-6;

    int64_t decays() const { return value_heads * (channel_decay ? key_dim : 1); }
    // Names below the module's scope, and shapes, in the order of the computation.
    std::vector<std::pair<std::string, Shape>> parameters() const;
  };

  GatedDeltaNet(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]. Tensor-parallel ranks divide the heads, of keys and of values. Throws
  // Unsupported when value heads are tiled and there are several ranks.
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  ValueId project(BuildContext& context, const char* name, int64_t in, int64_t out, Parallel parallel, ValueId x) const;
  // A projection and its convolution, [tokens, heads of this rank, dim].
  ValueId build_stream(BuildContext& context, const std::string& name, int64_t heads, int64_t dim, ValueId x) const;
  ValueId build_gate(BuildContext& context, const char* plain, const char* low, const char* high, int64_t out,
                     ValueId x) const;
  ValueId build_rule(BuildContext& context, ValueId x) const;

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
