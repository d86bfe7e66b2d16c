// SPDX-License-Identifier: Apache-2.0
//
// Which kernels of a program a CUDA card runs. Needs no GPU and no CUDA toolkit.
#include "eadem/kernels/cuda/capability.h"

#include <gtest/gtest.h>

namespace eadem::kernels::cuda {
namespace {

struct Case {
  const char* what;
  Capability capability;
  bool runs, runs_hopper_kernels;
  const char* reason;  // a part of why not
};

TEST(Capability, SaysWhatRunsWhereAndWhyNot) {
  const Case cases[] = {
      {"V100", {.card = 70, .code = 0, .has_hopper_kernels = true}, false, false, "7.0; 8.0 (Ampere)"},
      {"Turing with code of its own", {.card = 75, .code = 75, .has_hopper_kernels = true}, false, false, "7.5; 8.0"},
      {"A100", {.card = 80, .code = 80, .has_hopper_kernels = true}, true, false, "is 8.0, not 9.0"},
      {"4090 by code of 8.0", {.card = 89, .code = 80, .has_hopper_kernels = true}, true, false, "is 8.9, not 9.0"},
      {"H100", {.card = 90, .code = 90, .has_hopper_kernels = true}, true, true, ""},
      {"H100, PTX of 8.0 alone", {.card = 90, .code = 80, .has_hopper_kernels = false}, true, false, "is of compute"},
      {"H100, 9.0 without 9.0a", {.card = 90, .code = 90, .has_hopper_kernels = false}, true, false, "for 9.0a"},
      {"A100, a program for Hopper", {.card = 80, .code = 0, .has_hopper_kernels = true}, false, false, "=80-real"},
      {"Blackwell, machine code of 9.0a", {.card = 100, .code = 0, .has_hopper_kernels = true}, false, false, "10.0"},
      // 9.0a runs on 9.0 alone: PTX of 9.0 beside it makes no kernel for Hopper run.
      {"Blackwell, PTX of 9.0", {.card = 100, .code = 90, .has_hopper_kernels = true}, true, false, "is 10.0, not 9.0"},
  };
  for (const Case& c : cases) {
    const std::string refused = refusal(c.capability), hopper_refused = hopper_refusal(c.capability);
    EXPECT_EQ(refused.empty(), c.runs) << c.what << ": " << refused;
    // A device that is refused is asked no more.
    if (c.runs) {
      EXPECT_EQ(hopper_refused.empty(), c.runs_hopper_kernels) << c.what << ": " << hopper_refused;
    }
    const std::string& said = c.runs ? hopper_refused : refused;
    EXPECT_NE(said.find(c.reason), std::string::npos) << c.what << ": " << said;
  }
}

}  // namespace
}  // namespace eadem::kernels::cuda
