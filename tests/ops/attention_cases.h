// SPDX-License-Identifier: Apache-2.0
//
// op_cases (op_cases.h) of attention and of what writes its caches.
#pragma once

#include <string_view>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// Nothing for an op that is none of them.
std::vector<ops::Workload> attention_cases(std::string_view op);

}  // namespace eadem::test
