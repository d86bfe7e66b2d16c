// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <limits>
#include <optional>

#include "eadem/modules/build_context.h"
#include "eadem/ops/recurrent/short_convolution.h"

namespace eadem::modules {

// A Mamba-2 mixer: z, x, b, c and dt are projections of the input, of which short convolutions with SiLU mix x, b and c
// along the tokens;
//   y = out_proj(norm(scan(x, dt, b, c) * silu(z))),   scan: kernels/recurrent/state_space_scan.h
// or with `norm_before_gate` norm(scan) * silu(z), and without `norm_eps` no norm. The norm is that of each group of
// heads by itself, with a weight of its own.
// Parameters: z_proj, x_proj [heads * head_dim, hidden], b_proj, c_proj [groups * state, hidden], dt_proj [heads,
// hidden] and out_proj [hidden, heads * head_dim] (.weight, .bias); x_conv, b_conv and c_conv (.weight [taps,
// channels], .bias); dt_bias, A_log and D [heads], which stay f32; norm.weight [groups, heads * head_dim / groups].
// Tensor-parallel ranks divide the heads where these divide, and the groups with them as key-value heads are divided
// (base/shared_heads.h); a norm of groups that do not divide is made by every rank. Where heads do not divide every
// rank computes all of them. Source: Dao & Gu 2024, section 7.
class Mamba2 {
 public:
  struct Config {
    int64_t hidden = 0;
    int64_t heads = 0;
    int64_t head_dim = 0;
    int64_t groups = 1;  // of heads that share b and c
    int64_t state = 0;
    int64_t taps = 4;  // of the convolutions: 2 to kernels::kMaxTaps
    bool conv_bias = true;
    bool in_bias = false;   // of z_proj, x_proj, b_proj, c_proj and dt_proj
    bool out_bias = false;  // of out_proj
    double dt_min = 0, dt_max = std::numeric_limits<double>::infinity();
    std::optional<double> norm_eps;
    bool norm_before_gate = false;
    std::array<double, 5> scales = {1, 1, 1, 1, 1};  // factors on z, x, b, c and dt as they are projected

    int64_t inner() const { return heads * head_dim; }
    // The parts of the input's projection, in the order of `scales` and of checkpoints.
    struct Part {
      const char* name;
      int64_t size;
    };
    std::array<Part, 5> parts() const {
      const int64_t shared = groups * state;
      return {{{"z", inner()}, {"x", inner()}, {"b", shared}, {"c", shared}, {"dt", heads}}};
    }
  };

  Mamba2(const Config& config, int layer) : config_(config), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden]
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  // How the layer lies on the ranks.
  struct Division {
    bool heads, groups;  // whether they are divided
    int64_t own_heads;   // on this rank
  };
  Division division(const BuildContext& context) const;
  // A part of the input's projection, by its place in Config::parts().
  enum Projection { kZ, kX, kB, kC, kDt };
  ValueId project_part(BuildContext& context, Projection part, bool divided, ValueId x) const;
  ValueId convolve(BuildContext& context, const char* name, int64_t channels, bool divided, ValueId x) const;
  // b or c, [tokens, groups, state]: the groups that this rank's heads read.
  ValueId build_shared(BuildContext& context, const char* name, ValueId x) const;
  // [tokens, heads, head_dim]
  ValueId scan(BuildContext& context, ValueId x, ValueId b, ValueId c, ValueId dt) const;
  ValueId normalize(BuildContext& context, ValueId y) const;  // [tokens, inner], as y

  Config config_;
  int layer_;
};

}  // namespace eadem::modules
