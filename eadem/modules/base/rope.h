// SPDX-License-Identifier: Apache-2.0
//
// Rotary position embedding as configs state it: frequencies with their scaling, the table of a step, the rotation.
#pragma once

#include <vector>

#include "eadem/modules/build_context.h"
#include "eadem/ops/attention/rope.h"

namespace eadem::modules {

// The scaling of frequencies beyond the trained context.
struct RopeScaling {
  enum class Kind : uint8_t {
    none,
    linear,    // positions divided by `factor`. Source: Chen et al. 2023
    dynamic,   // theta grows with sequences beyond max_position_embeddings; none here are so long, and nothing is
               // scaled. Source: transformers, modeling_rope_utils.py
    llama3,    // by wavelength: low frequencies divided, high kept, smooth between, if there is a band between; it is
               // empty where both factors are one. Source: Llama 3.1 model code
    yarn,      // by wavelength, and logits scaled. Source: Peng et al. 2023
    longrope,  // each frequency divided by its own `short_factor`, or where sequences may be longer than the original
               // context by its `long_factor`, and logits scaled. Source: Ding et al. 2024
  };
  Kind kind = Kind::none;
  double factor = 1.0;
  double original_max_positions = 0;              // llama3, yarn, longrope
  double low_freq_factor = 1.0;                   // llama3
  double high_freq_factor = 4.0;                  // llama3
  double beta_fast = 32.0;                        // yarn
  double beta_slow = 1.0;                         // yarn
  std::optional<double> attention_factor;         // yarn, longrope: overrides the one derived from factor
  std::optional<double> mscale;                   // yarn, with mscale_all_dim
  std::optional<double> mscale_all_dim;           // yarn
  bool truncate = true;                           // yarn: whole dimension numbers at the ramp's ends
  std::vector<double> short_factor, long_factor;  // longrope: one for each pair

  // longrope: the positions that short_factor is for; else 0.
  int64_t short_positions() const { return kind == Kind::longrope ? static_cast<int64_t>(original_max_positions) : 0; }

  friend bool operator==(const RopeScaling& a, const RopeScaling& b) = default;
};

struct RopeConfig {
  std::string name = "rotary_emb";  // of its table; layers with other frequencies have one of another name
  double theta = 10000.0;
  int64_t rotary_dim = 0;  // <= head_dim, even; 0: nothing is rotated, and there is no table
  kernels::RopeStyle style = kernels::RopeStyle::rotate_half;
  RopeScaling scaling;
  int64_t rotated_pairs = 0;     // pairs behind these have frequency 0; 0: all of them rotate
  std::vector<double> divisors;  // one per frequency, applied besides the scaling; empty: none
  bool last = false;             // the last rotary_dim columns of a head rotate, not the first
  int64_t stride = 1;            // positions count from multiple to multiple of it
  bool inverse = false;          // rotates back
};

// Frequencies [rotary_dim / 2] and the factor on the table, computed in double precision, for sequences of up to
// `longest` tokens.
struct RopeFrequencies {
  std::vector<double> inv_freq;
  double attention_factor = 1.0;
};
RopeFrequencies rope_frequencies(const RopeConfig& config, int64_t longest = 0);

class Rope {
 public:
  explicit Rope(const RopeConfig& config) : config_(config) {}

  // Adds the step's table [tokens, rotary_dim] to context.step.rope_tables, in a scope of its name, unless it is there.
  void build_table(BuildContext& context) const;
  // Rotates x [tokens, heads, head_dim] by the table of this name, which is there.
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  RopeConfig config_;
};

}  // namespace eadem::modules
