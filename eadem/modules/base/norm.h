// SPDX-License-Identifier: Apache-2.0
//
// Norm: the norms of a decoder as a layer's spec states them.
#pragma once

#include <string>

#include "eadem/modules/build_context.h"

namespace eadem::modules {

struct NormSpec {
  enum class Kind : uint8_t { rms, layer };
  std::string name;  // its scope: "input_layernorm"
  double eps = 1e-5;
  Kind kind = Kind::rms;
  bool bias = false;  // of a layer norm
};

class Norm {
 public:
  // Over rows of `size` values. Parameters: NAME.weight, and NAME.bias where there is one.
  Norm(const NormSpec& spec, int64_t size) : spec_(spec), size_(size) {}

  ValueId build(BuildContext& context, ValueId x, int layer = -1) const;

 private:
  const NormSpec& spec_;
  int64_t size_;
};

}  // namespace eadem::modules
