// SPDX-License-Identifier: Apache-2.0
//
// Everything that other layers use of `modules`, and the pipeline types that appear in it.
#pragma once

#include "eadem/modules/auto_hardware_config.h"
#include "eadem/modules/base.h"
#include "eadem/modules/factory.h"
#include "eadem/modules/hybrid.h"
#include "eadem/pipeline/parameter_store.h"
