// SPDX-License-Identifier: Apache-2.0
//
// Access to the words of an error, for tests of refusals.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "eadem/core/error.h"

namespace eadem::test {

// The kind of the Error that `action` throws and its text, "InvalidArgument: ..."; "" when nothing is thrown. What
// else is thrown passes.
template <typename Action>
std::string refusal(Action&& action) {
  try {
    action();
  } catch (const Error& error) {
    return fmt::format("{}: {}", error.kind(), error.what());
  }
  return "";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text) << "\nlacks: " << (part)

}  // namespace eadem::test
