// SPDX-License-Identifier: Apache-2.0
//
// Options that users of llama.cpp, Ollama, vLLM and transformers are used to, in one table for every command.
#pragma once

#include <span>
#include <string_view>

namespace eadem::cli {

// An option that other programs call `name` and we call `ours`. Every command that has `ours` also takes `name`, unless
// `name` is an option of its own.
struct OtherName {
  std::string_view name;
  std::string_view ours;
};
std::span<const OtherName> other_names();

// An option of other programs that no command has, and the advice that is given instead.
struct Advice {
  std::string_view name;
  std::string_view instead;
};
std::span<const Advice> advice();

// Our name for a data type that others call `name`, such as "bf16" for "bfloat16"; else `name` itself.
std::string_view our_type_name(std::string_view name);

}  // namespace eadem::cli
