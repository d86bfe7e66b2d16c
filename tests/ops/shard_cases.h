// SPDX-License-Identifier: Apache-2.0
//
// op_cases (op_cases.h) of the ops around products of virtual shards.
#pragma once

#include <string_view>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// None for another op.
std::vector<ops::Workload> shard_cases(std::string_view op);

}  // namespace eadem::test
