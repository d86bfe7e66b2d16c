// SPDX-License-Identifier: Apache-2.0
//
// The kernels of attention over pooled rows and of hyper-connections by op, each list in the source that has the
// kernels.
#pragma once

#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cpu {

KernelList pool_keys_kernels();
KernelList pooled_attention_kernels();
KernelList stream_weights_kernels();
KernelList collapse_streams_kernels();
KernelList expand_streams_kernels();

}  // namespace eadem::kernels::cpu
