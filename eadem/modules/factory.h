// SPDX-License-Identifier: Apache-2.0
//
// The factory tier: modules that hide a choice. They may use the base tier.
#pragma once

#include "eadem/modules/factory/attention_factory.h"
#include "eadem/modules/factory/fused_moe_factory.h"
#include "eadem/modules/factory/linear_factory.h"
