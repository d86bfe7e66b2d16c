// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/sampling_params.h"

#include <algorithm>

#include "eadem/core/error.h"

namespace eadem::engine {

namespace {

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
  // Within this range no finite logit of a model overflows.
  require(p.repetition_penalty >= 0.01f && p.repetition_penalty <= 100, "repetition_penalty", p.repetition_penalty,
          "0.01 to 100; 1 is off");
  require(p.presence_penalty >= -2 && p.presence_penalty <= 2, "presence_penalty", p.presence_penalty,
          "-2 to 2; 0 is off");
  require(p.frequency_penalty >= -2 && p.frequency_penalty <= 2, "frequency_penalty", p.frequency_penalty,
          "-2 to 2; 0 is off");
}

}  // namespace

void check_range(const kernels::SampleSettings& settings) {
  check_ranges(settings);
  require(settings.prompt_length >= 0, "prompt_length", settings.prompt_length, "0 or more");
}

void SamplingParams::validate() const {
  check_ranges(*this);
  require(max_tokens >= 1 && max_tokens < (int64_t{1} << 31), "max_tokens", max_tokens, "at least 1, below 2^31");
  require(logit_bias.size() <= 300, "logit_bias", fmt::format("{} tokens", logit_bias.size()), "at most 300");
  for (const auto& [token, bias] : logit_bias) {
    require(token >= 0 && token < (int64_t{1} << 31), "logit_bias", fmt::format("for token {}", token),
            "tokens of the vocabulary");
    require(bias >= -100 && bias <= 100, "logit_bias", fmt::format("{} for token {}", bias, token), "-100 to 100");
  }
  require(min_tokens >= 0 && min_tokens <= max_tokens, "min_tokens", min_tokens, "0 to max_tokens");
  require(n >= 1 && n <= 1024, "n", n, "1 to 1024");
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
          .frequency_penalty = static_cast<float>(frequency_penalty)};
}

std::vector<TokenBias> SamplingParams::biases(std::span<const int32_t> eos) const {
  std::vector<TokenBias> result;
  std::vector<int64_t> banned;
  if (min_tokens > 0) {
    banned.assign(eos.begin(), eos.end());
    banned.insert(banned.end(), stop_token_ids.begin(), stop_token_ids.end());
    std::sort(banned.begin(), banned.end());
    banned.erase(std::unique(banned.begin(), banned.end()), banned.end());
    for (const int64_t token : banned)
      result.push_back({.token = static_cast<int32_t>(token), .bias = kNeverSampled, .end = min_tokens});
  }
  for (const auto& [token, bias] : logit_bias) {
    const bool is_banned = std::binary_search(banned.begin(), banned.end(), token);
    result.push_back(
        {.token = static_cast<int32_t>(token), .bias = static_cast<float>(bias), .begin = is_banned ? min_tokens : 0});
  }
  return result;
}

SamplingParams SamplingParams::from_generation_config(const io::GenerationConfig& config, const std::string& source,
                                                      const Logger& log) {
  const auto ignored = [&](const char* key, auto value, const char* reason) {
    log.log(LogLevel::warning, "{}: {} {} is ignored: {}", source, key, value, reason);
  };
  SamplingParams params;
  params.temperature = config.temperature.value_or(1.0);
  if (config.do_sample && !*config.do_sample) params.temperature = 0.0;
  params.top_k = config.top_k.value_or(0);
  params.top_p = config.top_p.value_or(1.0);
  params.min_p = config.min_p.value_or(0.0);
  params.repetition_penalty = config.repetition_penalty.value_or(1.0);
  params.max_tokens = config.max_new_tokens.value_or(params.max_tokens);
  try {
    params.validate();
  } catch (const InvalidArgument& error) {
    throw DataCorrupted("{}: {}", source, error.what());
  }

  if (config.typical_p.value_or(1.0) != 1.0) ignored("typical_p", *config.typical_p, "there is no such filter here");
  if (config.min_new_tokens.value_or(0) > 0)
    ignored("min_new_tokens", *config.min_new_tokens, "a text may end as soon as the model ends it");
  if (config.min_length.value_or(0) > 0)
    ignored("min_length", *config.min_length, "a text may end as soon as the model ends it");
  if (config.max_length)
    ignored("max_length", *config.max_length, "max_tokens bounds the new tokens, and the context all of them");
  for (const std::string& key : config.unknown_keys)
    log.log(LogLevel::warning, "{}: '{}' is ignored: no sampling parameter has that name here", source, key);
  return params;
}

std::string to_string(const SamplingParams& params) {
  std::string text = params.temperature == 0
                         ? std::string("greedy")
                         : fmt::format("temperature {}, top_k {}, top_p {}, min_p {}", params.temperature, params.top_k,
                                       params.top_p, params.min_p);
  if (params.repetition_penalty != 1) text += fmt::format(", repetition_penalty {}", params.repetition_penalty);
  if (params.presence_penalty != 0) text += fmt::format(", presence_penalty {}", params.presence_penalty);
  if (!params.logit_bias.empty()) text += fmt::format(", logit_bias for {} tokens", params.logit_bias.size());
  if (params.min_tokens != 0) text += fmt::format(", min_tokens {}", params.min_tokens);
  if (params.frequency_penalty != 0) text += fmt::format(", frequency_penalty {}", params.frequency_penalty);
  return text + fmt::format(", max_tokens {}", params.max_tokens);
}

}  // namespace eadem::engine
