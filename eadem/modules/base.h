// SPDX-License-Identifier: Apache-2.0
//
// The base tier: modules that depend on no other module.
#pragma once

#include "eadem/modules/base/embedding.h"
#include "eadem/modules/base/kv_cache_store.h"
#include "eadem/modules/base/layer_norm.h"
#include "eadem/modules/base/lm_head.h"
#include "eadem/modules/base/loss.h"
#include "eadem/modules/base/norm.h"
#include "eadem/modules/base/rms_norm.h"
#include "eadem/modules/base/rope.h"
#include "eadem/modules/base/sampling.h"
#include "eadem/modules/base/select_rows.h"
#include "eadem/modules/base/select_topk.h"
#include "eadem/modules/base/short_convolution.h"
