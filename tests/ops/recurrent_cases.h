// SPDX-License-Identifier: Apache-2.0
//
// op_cases (op_cases.h) of the ops that carry a state along a sequence.
#pragma once

#include <string_view>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// Nothing for an op that is none of them.
std::vector<ops::Workload> recurrent_cases(std::string_view op);

}  // namespace eadem::test
