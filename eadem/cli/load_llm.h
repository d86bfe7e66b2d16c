// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <memory>

#include "eadem/cli/options/model_options.h"
#include "eadem/engine/llm.h"

namespace eadem::cli {

// The cache length of a session, whose texts are of unknown length; --context asks for a longer one.
inline constexpr int64_t kUsualContext = 4096;

// Adds --context.
void add_context(Arguments& arguments, std::optional<int64_t>& context, const std::string& usual);
// Throws UsageError for a --context below 1.
void check_context(const std::optional<int64_t>& context);
// Throws InvalidArgument for a --context beyond the model's.
void check_context(const std::optional<int64_t>& context, int64_t model_context);

// Loads a model for one sequence of `context` tokens (0: the model's context), with a progress bar. Throws Cancelled
// when the user asks to stop.
std::unique_ptr<engine::LLM> load_llm(models::Checkpoint checkpoint, const ModelOptions& options, int64_t context);

}  // namespace eadem::cli
