// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "eadem/kernels/kernel.h"

namespace example {

// The kernels of SoftCap on the CPU.
eadem::kernels::KernelList soft_cap_kernels();

}  // namespace example
