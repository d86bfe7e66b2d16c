// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/sampling_params.h"

#include <algorithm>

#include "eadem/core/error.h"

namespace eadem::engine {

void SamplingParams::validate() const {
  const auto require = [](bool ok, const char* name, auto value, const char* range) {
    if (!ok) throw InvalidArgument("{} is {}; expected {}", name, value, range);
  };
  require(temperature >= 0 && temperature <= 1e6, "temperature", temperature, "0 (greedy) to 1e6");
  require(top_k >= 0 && top_k < (int64_t{1} << 31), "top_k", top_k, "0 (off) or more, below 2^31");
  require(top_p > 0 && top_p <= 1, "top_p", top_p, "more than 0, at most 1");
  require(min_p >= 0 && min_p <= 1, "min_p", min_p, "0 to 1");
  require(max_tokens >= 1 && max_tokens < (int64_t{1} << 31), "max_tokens", max_tokens, "at least 1, below 2^31");
  for (const std::string& text : stop) require(!text.empty(), "stop", "\"\"", "strings that are not empty");
}

SamplingParams SamplingParams::from_generation_config(const io::GenerationConfig& config, const std::string& source) {
  SamplingParams params;
  if (config.repetition_penalty.value_or(1.0) != 1.0)
    throw Unsupported("{}: repetition_penalty is {}; it is not honoured yet: override the file or remove it", source,
                      *config.repetition_penalty);
  if (config.typical_p.value_or(1.0) != 1.0)
    throw Unsupported("{}: typical_p is {}; it is not honoured yet: override the file or remove it", source,
                      *config.typical_p);
  params.temperature = config.temperature.value_or(1.0);
  if (config.do_sample && !*config.do_sample) params.temperature = 0.0;
  params.top_k = config.top_k.value_or(0);
  params.top_p = config.top_p.value_or(1.0);
  params.min_p = config.min_p.value_or(0.0);
  params.max_tokens = config.max_new_tokens.value_or(params.max_tokens);
  if (config.min_new_tokens.value_or(0) > 0)
    throw Unsupported("{}: min_new_tokens is {}; it is not honoured yet: override the file or remove it", source,
                      *config.min_new_tokens);
  params.validate();
  return params;
}

std::string to_string(const SamplingParams& params) {
  if (params.temperature == 0) return fmt::format("greedy, max_tokens {}", params.max_tokens);
  return fmt::format("temperature {}, top_k {}, top_p {}, min_p {}, max_tokens {}", params.temperature, params.top_k,
                     params.top_p, params.min_p, params.max_tokens);
}

}  // namespace eadem::engine
