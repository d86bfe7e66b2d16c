// SPDX-License-Identifier: Apache-2.0
//
// Counts look-ups: scans for an encoding, dispatch on an instruction set, a dtype or an activation, and searches for a
// library's algorithm. All of them belong to the compilation of a program; a test shows that steps make none.
#pragma once

#include <cstdint>

namespace eadem {

// Called where something is looked up, from any thread.
void count_lookup();
// The look-ups of this process so far; 0 in builds without tests, which count nothing.
int64_t num_lookups();

}  // namespace eadem
