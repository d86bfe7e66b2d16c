// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/sampling_params.h"

#include <algorithm>
#include <set>

#include "eadem/core/error.h"

namespace eadem::engine {

namespace {

constexpr int64_t kMostBeams = 16;  // and tokens that end a text are among kMostTopLogprobs, too

template <typename T>
void require(bool ok, const char* name, const T& value, const char* range) {
  if (!ok) throw InvalidArgument("{} is {}; expected {}", name, value, range);
}

// `p` is SamplingParams or SampleSettings.
template <typename Params>
void check_ranges(const Params& p) {
  require(p.temperature >= 0 && p.temperature <= 1e6f, "temperature", p.temperature, "0 (greedy) to 1e6");
  require(p.top_k >= 0 && p.top_k < (int64_t{1} << 31), "top_k", p.top_k, "0 (off) or more, below 2^31");
  require(p.top_p > 0 && p.top_p <= 1, "top_p", p.top_p, "more than 0, at most 1");
  require(p.min_p >= 0 && p.min_p <= 1, "min_p", p.min_p, "0 to 1");
  require(p.typical_p > 0 && p.typical_p <= 1, "typical_p", p.typical_p, "more than 0, at most 1");
  // Within this range no finite logit of a model overflows.
  require(p.repetition_penalty >= 0.01f && p.repetition_penalty <= 100, "repetition_penalty", p.repetition_penalty,
          "0.01 to 100; 1 is off");
  require(p.presence_penalty >= -2 && p.presence_penalty <= 2, "presence_penalty", p.presence_penalty,
          "-2 to 2; 0 is off");
  require(p.frequency_penalty >= -2 && p.frequency_penalty <= 2, "frequency_penalty", p.frequency_penalty,
          "-2 to 2; 0 is off");
}

void require_listed(const char* name, int64_t count) {
  require(count >= 0 && count <= kernels::kMostTopLogprobs, name, count, "0 to 20");
  static_assert(kernels::kMostTopLogprobs == 20);
}

void require_token(const char* name, int64_t token) {
  require(token >= 0 && token < (int64_t{1} << 31), name, fmt::format("for token {}", token),
          "tokens of the vocabulary");
}

}  // namespace

void require_top_logprobs(int64_t count) { require_listed("top_logprobs", count); }

void check_range(const kernels::SampleSettings& settings) {
  check_ranges(settings);
  require_top_logprobs(settings.top_logprobs);
  require(settings.prompt_length >= 0, "prompt_length", settings.prompt_length, "0 or more");
}

void SamplingParams::validate() const {
  check_ranges(*this);
  require(max_tokens >= 1 && max_tokens < (int64_t{1} << 31), "max_tokens", max_tokens, "at least 1, below 2^31");
  require(logit_bias.size() <= 300, "logit_bias", fmt::format("{} tokens", logit_bias.size()), "at most 300");
  for (const auto& [token, bias] : logit_bias) {
    require_token("logit_bias", token);
    require(bias >= -100 && bias <= 100, "logit_bias", fmt::format("{} for token {}", bias, token), "-100 to 100");
  }
  require(min_tokens >= 0 && min_tokens <= max_tokens, "min_tokens", min_tokens,
          fmt::format("0 to max_tokens, {}", max_tokens).c_str());
  require(n >= 1 && n <= 1024, "n", n, "1 to 1024");
  for (const std::string& text : bad_words) require(!text.empty(), "bad_words", "\"\"", "strings that are not empty");
  for (const std::vector<int64_t>& word : bad_words_ids) {
    require(!word.empty(), "bad_words_ids", "[]", "words of at least one token");
    for (const int64_t token : word) require_token("bad_words_ids", token);
  }
  if (allowed_token_ids) {
    require(!allowed_token_ids->empty(), "allowed_token_ids", "[]", "at least one token");
    for (const int64_t token : *allowed_token_ids) require_token("allowed_token_ids", token);
  }
  for (const int64_t token : stop_token_ids) require_token("stop_token_ids", token);
  require_listed("logprobs", logprobs);
  if (prompt_logprobs) require_listed("prompt_logprobs", *prompt_logprobs);
  validate_beams();
  for (const std::string& text : stop) require(!text.empty(), "stop", "\"\"", "strings that are not empty");
}

kernels::SampleSettings SamplingParams::settings(int64_t request_seed) const {
  return {.temperature = static_cast<float>(temperature),
          .top_k = static_cast<int32_t>(top_k),
          .top_p = static_cast<float>(top_p),
          .min_p = static_cast<float>(min_p),
          .seed = request_seed,
          .repetition_penalty = static_cast<float>(repetition_penalty),
          .presence_penalty = static_cast<float>(presence_penalty),
          .frequency_penalty = static_cast<float>(frequency_penalty),
          .typical_p = static_cast<float>(typical_p),
          .top_logprobs = static_cast<int32_t>(logprobs)};
}

// Throws InvalidArgument for parameters that beam search cannot have beside it.
void SamplingParams::validate_beams() const {
  require(num_beams >= 1 && num_beams <= kMostBeams, "num_beams", num_beams, "1 to 16");
  require(length_penalty >= -10 && length_penalty <= 10, "length_penalty", length_penalty, "-10 to 10");
  if (num_beams == 1) return;
  require(temperature == 0, "temperature", temperature,
          fmt::format("0 with num_beams {}: beam search draws nothing", num_beams).c_str());
  require(n <= num_beams, "n", n, fmt::format("at most num_beams, {}", num_beams).c_str());
  if (const std::string name = not_with_beams(); !name.empty())
    throw Unsupported("num_beams is {} and {} is given; beam search does not go with it", num_beams, name);
}

// The name of a parameter that is given and does not go with beam search, or nothing.
std::string SamplingParams::not_with_beams() const {
  const std::pair<bool, const char*> given[] = {{repetition_penalty != 1, "repetition_penalty"},
                                                {presence_penalty != 0, "presence_penalty"},
                                                {frequency_penalty != 0, "frequency_penalty"},
                                                {!logit_bias.empty(), "logit_bias"},
                                                {!bad_words.empty(), "bad_words"},
                                                {!bad_words_ids.empty(), "bad_words_ids"},
                                                {allowed_token_ids.has_value(), "allowed_token_ids"},
                                                {token_mask != nullptr, "token_mask"},
                                                {!logits_processors.empty(), "logits_processors"},
                                                {!stop.empty(), "stop"},
                                                {prompt_logprobs.has_value(), "prompt_logprobs"}};
  for (const auto& [is_given, name] : given)
    if (is_given) return name;
  return {};
}

std::vector<TokenBias> SamplingParams::biases(std::span<const int32_t> eos,
                                              std::span<const std::vector<int32_t>> words) const {
  std::vector<TokenBias> result;
  std::set<int64_t> never;
  for (const std::vector<int32_t>& word : words)
    if (word.size() == 1) never.insert(word[0]);
  for (const int64_t token : never) result.push_back({.token = static_cast<int32_t>(token), .bias = kNeverSampled});
  std::vector<int64_t> banned;
  if (min_tokens > 0) {
    banned.assign(eos.begin(), eos.end());
    banned.insert(banned.end(), stop_token_ids.begin(), stop_token_ids.end());
    std::sort(banned.begin(), banned.end());
    banned.erase(std::unique(banned.begin(), banned.end()), banned.end());
    std::erase_if(banned, [&](int64_t token) { return never.contains(token); });
    for (const int64_t token : banned)
      result.push_back({.token = static_cast<int32_t>(token), .bias = kNeverSampled, .end = min_tokens});
  }
  for (const auto& [token, bias] : logit_bias) {
    if (never.contains(token)) continue;
    const bool is_banned = std::binary_search(banned.begin(), banned.end(), token);
    result.push_back(
        {.token = static_cast<int32_t>(token), .bias = static_cast<float>(bias), .begin = is_banned ? min_tokens : 0});
  }
  return result;
}

SamplingParams SamplingParams::from_generation_config(const io::GenerationConfig& config, const std::string& source,
                                                      const Logger& log) {
  const auto ignored = [&](const char* key, auto value, const std::string& reason) {
    log.log(LogLevel::warning, "{}: {} {} is ignored: {}", source, key, value, reason);
  };
  SamplingParams params;
  params.temperature = config.temperature.value_or(1.0);
  if (config.do_sample && !*config.do_sample) params.temperature = 0.0;
  params.top_k = config.top_k.value_or(0);
  params.top_p = config.top_p.value_or(1.0);
  params.min_p = config.min_p.value_or(0.0);
  params.repetition_penalty = config.repetition_penalty.value_or(1.0);
  params.typical_p = config.typical_p.value_or(1.0);
  params.min_tokens = config.min_new_tokens.value_or(0);
  params.max_tokens = std::max(config.max_new_tokens.value_or(params.max_tokens), params.min_tokens);
  params.bad_words_ids = config.bad_words_ids;
  for (const int64_t token : config.suppress_tokens) params.bad_words_ids.push_back({token});
  params.stop = config.stop_strings;
  params.n = config.num_return_sequences.value_or(1);
  params.num_beams = config.num_beams.value_or(1);
  params.length_penalty = config.length_penalty.value_or(1.0);
  params.early_stopping = config.early_stopping == "never"  ? EarlyStopping::never
                          : config.early_stopping == "true" ? EarlyStopping::yes
                                                            : EarlyStopping::no;
  const std::string excluded = params.not_with_beams();
  if (params.num_beams > 1 && (params.temperature != 0 || !excluded.empty() || params.num_beams > kMostBeams)) {
    ignored("num_beams", params.num_beams,
            params.temperature != 0 ? "beam search draws nothing, and do_sample is not false"
            : !excluded.empty()     ? fmt::format("beam search does not go with {}", excluded)
                                    : fmt::format("there are at most {} beams", kMostBeams));
    params.num_beams = 1;
  }
  try {
    params.validate();
  } catch (const InvalidArgument& error) {
    throw DataCorrupted("{}: {}", source, error.what());
  }

  if (config.min_length.value_or(0) > config.min_new_tokens.value_or(0))
    ignored("min_length", *config.min_length, "it counts the prompt; min_new_tokens bounds the new tokens");
  if (config.max_length)
    ignored("max_length", *config.max_length, "max_tokens bounds the new tokens, and the context all of them");
  for (const std::string& key : config.unknown_keys)
    log.log(LogLevel::warning, "{}: '{}' is ignored: no sampling parameter has that name here", source, key);
  return params;
}

std::string to_string(const SamplingParams& params) {
  std::string text = params.temperature == 0
                         ? params.num_beams > 1 ? fmt::format("{} beams", params.num_beams) : std::string("greedy")
                         : fmt::format("temperature {}, top_k {}, top_p {}, min_p {}", params.temperature, params.top_k,
                                       params.top_p, params.min_p);
  if (params.temperature != 0 && params.typical_p != 1) text += fmt::format(", typical_p {}", params.typical_p);
  if (params.repetition_penalty != 1) text += fmt::format(", repetition_penalty {}", params.repetition_penalty);
  if (params.presence_penalty != 0) text += fmt::format(", presence_penalty {}", params.presence_penalty);
  if (!params.logit_bias.empty()) text += fmt::format(", logit_bias for {} tokens", params.logit_bias.size());
  if (const size_t words = params.bad_words.size() + params.bad_words_ids.size(); words > 0)
    text += fmt::format(", {} bad words", words);
  if (params.allowed_token_ids) text += fmt::format(", {} allowed tokens", params.allowed_token_ids->size());
  if (params.min_tokens != 0) text += fmt::format(", min_tokens {}", params.min_tokens);
  if (params.frequency_penalty != 0) text += fmt::format(", frequency_penalty {}", params.frequency_penalty);
  if (params.n > 1) text += fmt::format(", {} answers", params.n);
  return text + fmt::format(", max_tokens {}", params.max_tokens);
}

}  // namespace eadem::engine
