// SPDX-License-Identifier: Apache-2.0
//
// linear with a weight that was rounded to 8-bit floats in this step, as training does (modules/factory): the weight is
// no parameter, so nothing has packed it.
#pragma once

#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cpu {

KernelList fp8_rounded_kernels();

}  // namespace eadem::kernels::cpu
