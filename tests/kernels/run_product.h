// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/kernels/cpu/linear/matmul.h"

namespace eadem::kernels::cpu {

// Computes one product of `types`, with scratch of its own.
inline void run_product(CpuDevice& device, const MatmulTypes& types, const Matmul& m) {
  const MatmulPlan plan(device, types);
  const Buffer scratch = device.allocate(plan.scratch_bytes(device, m.rows, m.k_size));
  plan.run(device, m, scratch.data());
}

}  // namespace eadem::kernels::cpu
