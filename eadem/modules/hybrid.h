// SPDX-License-Identifier: Apache-2.0
//
// The hybrid tier: compositions of base and factory modules, independent of any architecture.
#pragma once

#include "eadem/modules/hybrid/causal_attention.h"
#include "eadem/modules/hybrid/decoder_layer.h"
#include "eadem/modules/hybrid/dense_and_experts.h"
#include "eadem/modules/hybrid/dense_mlp.h"
#include "eadem/modules/hybrid/gated_convolution.h"
#include "eadem/modules/hybrid/gated_delta_net.h"
#include "eadem/modules/hybrid/layer_inputs.h"
#include "eadem/modules/hybrid/layer_spec.h"
#include "eadem/modules/hybrid/mamba2.h"
#include "eadem/modules/hybrid/mla_attention.h"
#include "eadem/modules/hybrid/moe_mlp.h"
#include "eadem/modules/hybrid/mtp_input.h"
#include "eadem/modules/hybrid/parallel_mixers.h"
#include "eadem/modules/hybrid/sparse/native_sparse_attention.h"
