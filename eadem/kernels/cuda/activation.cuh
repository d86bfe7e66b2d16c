// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "eadem/kernels/elementwise.h"

namespace eadem::kernels::cuda {

__device__ inline float activate(ActivationKind kind, float x) {
  switch (kind) {
    case ActivationKind::silu: return x / (1.0f + expf(-x));
    // normcdf and the logistic form keep a small relative error in the lower tail, where 1 + erf and 1 + tanh cancel.
    case ActivationKind::gelu: return x * normcdff(x);
    case ActivationKind::gelu_tanh:
      return x / (1.0f + expf(-1.5957691216057308f * (x + 0.044715f * x * x * x)));  // 2 sqrt(2 / pi)
    case ActivationKind::relu: return x > 0.0f || isnan(x) ? x : 0.0f;
    case ActivationKind::relu2: return x > 0.0f || isnan(x) ? x * x : 0.0f;
  }
  return x;
}

}  // namespace eadem::kernels::cuda
