// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/hybrid/layer_spec.h"

namespace eadem::modules {

// One layer of a decoder as its LayerSpec says.
class DecoderLayer {
 public:
  DecoderLayer(const LayerSpec& spec, int layer) : spec_(spec), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden], or with streams [tokens, streams, hidden]. The current scope names the
  // layer ("model.layers.3").
  ValueId build(BuildContext& context, ValueId x) const { return build_with_input(context, x).out; }

 private:
  // What comes out, and what the MLP, or that of the first part, has read (none with streams).
  struct Built {
    ValueId out, mlp_in;
  };
  Built build_with_input(BuildContext& context, ValueId x) const;
  // The mixer and the MLP with their norms.
  Built build_mixed(BuildContext& context, ValueId x) const;
  Built build_parts(BuildContext& context, ValueId x) const;
  // The mixer and the MLP over streams.
  ValueId build_streams(BuildContext& context, ValueId x) const;
  // The one of these that the layer is.
  Built build_kind(BuildContext& context, ValueId x) const;

  const LayerSpec& spec_;
  int layer_;
};

}  // namespace eadem::modules
