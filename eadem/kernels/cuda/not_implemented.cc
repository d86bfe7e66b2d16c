// SPDX-License-Identifier: Apache-2.0
//
// Ops without a CUDA kernel. Compiling a pipeline that needs one fails with an error that names the op.
#include "eadem/kernels/backends.h"

namespace eadem::kernels::cuda {

// These ops are needed only for training.
KernelList cross_entropy_kernels() { return {}; }
KernelList linear_cross_entropy_kernels() { return {}; }
KernelList softmax_state_kernels() { return {}; }
KernelList parallel_cross_entropy_kernels() { return {}; }
KernelList grad_norm_kernels() { return {}; }
KernelList adamw_kernels() { return {}; }

// Ranks of CUDA devices exchange sums only, and divide key-value heads evenly.
KernelList add_bias_kernels() { return {}; }
KernelList select_heads_kernels() { return {}; }
KernelList all_gather_kernels() { return {}; }
KernelList reduce_scatter_kernels() { return {}; }
KernelList all_to_all_kernels() { return {}; }
KernelList broadcast_kernels() { return {}; }
KernelList send_kernels() { return {}; }
KernelList recv_kernels() { return {}; }

// This fusion is not needed: add_rms_norm adds the residual without a pass of its own, after the product was rounded,
// as the separate ops do.
KernelList linear_add_kernels() { return {}; }

}  // namespace eadem::kernels::cuda
