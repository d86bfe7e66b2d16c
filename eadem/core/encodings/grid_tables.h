// SPDX-License-Identifier: Apache-2.0
//
// The lattices of GGUF's IQ types: which runs of neighbouring levels a type knows. A word is one run, the first level
// in its lowest bits: 8 levels of 2 bits (IQ1 and IQ2) or 4 of 4 bits (IQ3), as numbers of levels in ascending order.
#pragma once

#include <cstdint>

namespace eadem::block_types {

extern const uint16_t kIq1Grid[2048];  // of iq1_s and iq1_m
extern const uint16_t kIq2XxsGrid[256];
extern const uint16_t kIq2XsGrid[512];
extern const uint16_t kIq2SGrid[1024];
extern const uint16_t kIq3XxsGrid[256];
extern const uint16_t kIq3SGrid[512];

}  // namespace eadem::block_types
