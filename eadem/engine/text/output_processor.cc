// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/text/output_processor.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace eadem::engine {

std::string_view finish_reason_name(FinishReason reason) {
  switch (reason) {
    case FinishReason::length: return "length";
    case FinishReason::stop: return "stop";
    case FinishReason::cancelled: return "cancelled";
    case FinishReason::error: return "error";
  }
  return "?";
}

OutputProcessor::OutputProcessor(const io::Tokenizer& tokenizer, const SamplingParams& params,
                                 std::span<const int32_t> eos, std::span<const int32_t> prompt, int64_t seed)
    : tokenizer_(tokenizer), params_(params), eos_(eos), decoder_(tokenizer), stops_(params.stop) {
  completion_.prompt_tokens = std::ssize(prompt);
  completion_.seed = seed;
  if (params.prompt_logprobs) take_prompt(std::numeric_limits<float>::quiet_NaN());
  for (int32_t token : prompt)
    if (tokenizer.is_token(token)) decoder_.next(token);
}

namespace {

// The first `count`.
std::vector<TokenLogprob> first_of(const TopOfRow& top, int64_t count) {
  std::vector<TokenLogprob> result;
  for (size_t i = 0; i < top.tokens.size() && std::ssize(result) < count && top.tokens[i] >= 0; ++i)
    result.push_back({top.tokens[i], top.logprobs[i]});
  return result;
}

}  // namespace

bool OutputProcessor::is_end(int32_t token) const {
  if (!params_.ignore_eos && std::find(eos_.begin(), eos_.end(), token) != eos_.end()) return true;
  return std::find(params_.stop_token_ids.begin(), params_.stop_token_ids.end(), token) != params_.stop_token_ids.end();
}

void OutputProcessor::take_prompt(float logprob, const TopOfRow& top) {
  completion_.prompt_logprobs.push_back(logprob);
  if (*params_.prompt_logprobs > 0) completion_.prompt_top_logprobs.push_back(first_of(top, *params_.prompt_logprobs));
}

std::string OutputProcessor::fail(std::string why) {
  completion_.error = std::move(why);
  return end(FinishReason::error);
}

std::string OutputProcessor::take(int32_t token, float logprob, const TopOfRow& top) {
  if (token < 0) return fail("the model's logits are not finite (NaN or infinity): its weights or the input overflow");
  if (is_end(token)) return end(FinishReason::stop);
  completion_.token_ids.push_back(token);
  completion_.logprobs.push_back(logprob);
  if (params_.logprobs > 0) completion_.top_logprobs.push_back(first_of(top, params_.logprobs));
  // Vocabularies are padded: an id without a token can be sampled, and has no text.
  if (!tokenizer_.is_token(token)) return {};
  std::string piece = decoder_.next(token);
  if (std::ssize(completion_.token_ids) > params_.min_tokens) piece = stops_.feed(piece);
  completion_.text += piece;
  if (stops_.stopped()) return piece + end(FinishReason::stop);
  return piece;
}

std::string OutputProcessor::end(FinishReason reason) {
  ended_ = true;
  completion_.finish_reason = reason;
  if (stops_.stopped()) return {};
  std::string piece = stops_.feed(decoder_.finish());
  if (!stops_.stopped()) piece += stops_.finish();
  completion_.text += piece;
  return piece;
}

}  // namespace eadem::engine
