// SPDX-License-Identifier: Apache-2.0
//
// The cases on which every op is tested: sizes 0 and 1, one below and above each vector, panel and tile width, every
// combination of dtypes that its type rule takes, several sequences, optional ports absent.
#pragma once

#include <string>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::test {

// The cases of the op named `op`. A fatal error for a name without any.
std::vector<ops::Workload> op_cases(std::string_view op);

// A case under a name that tells its attributes and sizes.
ops::Workload named_case(ops::OpPtr op, std::vector<TensorType> types, const SymbolValues& symbols);

// Every op that has cases.
std::vector<std::string_view> op_names();

}  // namespace eadem::test
