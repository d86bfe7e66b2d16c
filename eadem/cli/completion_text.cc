// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/completion_text.h"

#include <fmt/format.h>

#include "eadem/cli/bench/machine.h"

namespace eadem::cli {

double per_second(int64_t count, double seconds) { return seconds > 0 ? static_cast<double>(count) / seconds : 0.0; }

std::string finish_text(engine::LLM& llm, const engine::Completion& completion, const engine::SamplingParams& params) {
  using engine::FinishReason;
  switch (completion.finish_reason) {
    case FinishReason::stop: return "end of text";
    case FinishReason::cancelled: return "stopped by you";
    case FinishReason::error: return "failed";
    case FinishReason::length: break;
  }
  const int64_t context = llm.engine().max_sequence_length();
  const auto drawn = static_cast<int64_t>(completion.token_ids.size());
  if (drawn >= params.max_tokens) return fmt::format("--max-tokens {}", params.max_tokens);
  return fmt::format("the context of {} tokens is full{}", context,
                     context < llm.checkpoint().model->info().max_positions ? " (--context gives more)" : "");
}

std::string speculation_text(const engine::GenerationStats& stats) {
  if (stats.proposed_tokens == 0) return "";
  return fmt::format("speculation  {} proposed tokens, {} accepted, {:.2f} tokens a step\n", stats.proposed_tokens,
                     stats.accepted_tokens, stats.tokens_per_step());
}

void SessionStats::add(const engine::GenerationStats& stats) {
  ++texts;
  sum.prompt_tokens += stats.prompt_tokens;
  sum.reused_tokens += stats.reused_tokens;
  sum.prompt_seconds += stats.prompt_seconds;
  sum.decode_tokens += stats.decode_tokens;
  sum.decode_seconds += stats.decode_seconds;
  sum.proposed_tokens += stats.proposed_tokens;
  sum.accepted_tokens += stats.accepted_tokens;
}

std::string SessionStats::report(engine::LLM& llm) const {
  const std::string reused = sum.reused_tokens > 0 ? fmt::format(" and {} from the cache", sum.reused_tokens) : "";
  return fmt::format(
      "texts   {}\n"
      "prompt  {} tokens{}, {:.1f} tokens/s\n"
      "decode  {} tokens, {:.1f} tokens/s\n"
      "{}"
      "memory  {}\n",
      texts, sum.prompt_tokens, reused, per_second(sum.prompt_tokens, sum.prompt_seconds), sum.decode_tokens,
      per_second(sum.decode_tokens, sum.decode_seconds), speculation_text(sum), memory_text(memory_use(llm.engine())));
}

}  // namespace eadem::cli
