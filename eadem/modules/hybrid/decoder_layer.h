// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/modules/hybrid/layer_spec.h"

namespace eadem::modules {

// One layer of a decoder as its LayerSpec says.
class DecoderLayer {
 public:
  DecoderLayer(const LayerSpec& spec, int layer) : spec_(spec), layer_(layer) {}

  // x [tokens, hidden] -> [tokens, hidden], or with streams [tokens, streams, hidden]. The current scope names the
  // layer
  // ("model.layers.3").
  ValueId build(BuildContext& context, ValueId x) const;

 private:
  // The mixer and the MLP with their norms.
  ValueId build_mixed(BuildContext& context, ValueId x) const;
  // These over streams.
  ValueId build_streams(BuildContext& context, ValueId x) const;

  const LayerSpec& spec_;
  int layer_;
};

}  // namespace eadem::modules
