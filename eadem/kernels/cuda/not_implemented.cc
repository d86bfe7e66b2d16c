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

// add_rms_norm adds the residual without a sweep of its own, and after the product was rounded, as the ops apart do.
KernelList linear_add_kernels() { return {}; }

}  // namespace eadem::kernels::cuda
