// SPDX-License-Identifier: Apache-2.0
//
// Texts that describe completions: why one ended, and how fast several were.
#pragma once

#include <cstdint>
#include <string>

#include "eadem/engine/llm.h"

namespace eadem::cli {

// 0 when no time has passed.
double per_second(int64_t count, double seconds);

// Why a text ended: "end of text", "stopped by you", "--max-tokens 5" ...
std::string finish_text(engine::LLM& llm, const engine::Completion& completion, const engine::SamplingParams& params);

// "speculation  12 proposed tokens, 9 accepted, 1.8 tokens a step\n"; "" where nothing was proposed.
std::string speculation_text(const engine::GenerationStats& stats);

// The sums of a session.
struct SessionStats {
  int64_t texts = 0;
  engine::GenerationStats sum;

  void add(const engine::GenerationStats& stats);
  // Lines of numbers, for the end of the session.
  std::string report(engine::LLM& llm) const;
};

}  // namespace eadem::cli
