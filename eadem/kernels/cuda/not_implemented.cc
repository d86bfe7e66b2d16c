// SPDX-License-Identifier: Apache-2.0
//
// Ops without a CUDA kernel. A pipeline that needs one is refused when it compiles, by name.
#include "eadem/kernels/backends.h"

namespace eadem::kernels::cuda {

// Training on this device.
KernelList cross_entropy_kernels() { return {}; }
KernelList linear_cross_entropy_kernels() { return {}; }
KernelList grad_norm_kernels() { return {}; }
KernelList adamw_kernels() { return {}; }

// A fusion that gains nothing here: both products are cuBLASLt's, so that the two activations cross memory either way.
KernelList linear_gated_activation_kernels() { return {}; }

}  // namespace eadem::kernels::cuda
