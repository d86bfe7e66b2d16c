// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/options/sampling_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <random>

#include "eadem/core/error.h"
#include "eadem/io/text.h"

namespace eadem::cli {

namespace {

// Replaces the name of a parameter at the start of a message by its option: "max_tokens is 0" becomes "--max-tokens is
// 0".
std::string with_option_names(std::string message) {
  const size_t end = std::min(message.find(' '), message.size());
  std::replace(message.begin(), message.begin() + static_cast<ptrdiff_t>(end), '_', '-');
  return "--" + message;
}

// Adds the bias that "15043=-2.5", "15043-2.5" or "15043+1" states. A later one of a token replaces an earlier one.
void add_bias(std::map<int64_t, double>& biases, const std::string& text) {
  const char *const begin = text.data(), *const end = begin + text.size();
  int64_t token = 0;
  double bias = 0;
  const auto [sign, bad_token] = std::from_chars(begin, end, token);
  bool good = bad_token == std::errc() && sign != end && (*sign == '=' || *sign == '+' || *sign == '-');
  if (good) {
    const char* const number = *sign == '-' ? sign : sign + 1;  // from_chars takes no plus
    const auto [rest, bad_bias] = std::from_chars(number, end, bias);
    good = bad_bias == std::errc() && rest == end;
  }
  if (!good)
    throw UsageError(fmt::format(
        "--logit-bias is {}; expected a token's id and a number: 15043=-2.5, 15043-2.5 or 15043+1", io::quote(text)));
  biases[token] = bias;
}

// Adds the ids that "15043,15044" states.
void add_ids(std::vector<int64_t>& ids, const char* option, const std::string& text) {
  const char *begin = text.data(), *const end = begin + text.size();
  for (;;) {
    int64_t id = 0;
    const auto [rest, bad] = std::from_chars(begin, end, id);
    if (bad != std::errc() || (rest != end && *rest != ','))
      throw UsageError(fmt::format("{} is {}; expected ids of tokens: 15043,15044", option, io::quote(text)));
    ids.push_back(id);
    if (rest == end) return;
    begin = rest + 1;
  }
}

}  // namespace

void SamplingOptions::add(Arguments& arguments, const std::string& usual_max_tokens) {
  arguments.option("-n,--max-tokens", "N", max_tokens,
                   "tokens to draw at most (default: " + usual_max_tokens + "); -1: until the text ends");
  arguments.option("--temperature", "X", temperature, "0 is greedy (default: 1)");
  arguments.option("--top-k", "N", top_k, "draw from the N likeliest tokens; 0 is off");
  arguments.option("--top-p", "X", top_p, "draw from the likeliest tokens of this total probability; 1 is off");
  arguments.option("--min-p", "X", min_p, "drop tokens below this share of the likeliest one's; 0 is off");
  arguments.option("--typical-p", "X", typical_p,
                   "draw from the tokens of the most typical surprise, of this total probability; 1 is off");
  arguments.option("--repetition-penalty", "X", repetition_penalty,
                   "divide the logits of tokens that prompt or text have by this; 1 is off");
  arguments.option("--presence-penalty", "X", presence_penalty,
                   "subtract this from the logits of tokens that the text has; 0 is off");
  arguments.option("--frequency-penalty", "X", frequency_penalty,
                   "likewise, times how often the text has the token; 0 is off");
  arguments.list("--logit-bias", "ID=X", logit_bias,
                 "add X to the logit of the token with this id; may be repeated. ID+X and ID-X, too");
  arguments.list("--bad-words", "TEXT", bad_words, "never draw this text; may be repeated");
  arguments.list("--allowed-token-ids", "ID,ID", allowed_token_ids,
                 "draw only the tokens with these ids; may be repeated");
  arguments.option("--num-beams", "N", num_beams,
                   "beam search for the likeliest text of N beams; needs --temperature 0");
  arguments.option("--length-penalty", "X", length_penalty,
                   "a beam's score is its log-probability / tokens^X (default: 1)");
  arguments.option("--min-tokens", "N", min_tokens, "tokens to draw before the text may end");
  arguments.option("--seed", "N", seed, "the same seed gives the same text (default: a fresh one, printed)");
  arguments.list("--stop", "TEXT", stop, "end before this text; may be repeated");
  arguments.list("--stop-token-ids", "ID,ID", stop_token_ids, "end at these tokens; may be repeated");
  arguments.flag("--ignore-eos", ignore_eos, "go on after the end-of-text token");
}

engine::SamplingParams SamplingOptions::over(engine::SamplingParams params, int64_t context) const {
  if (temperature) params.temperature = *temperature;
  if (top_k) params.top_k = *top_k;
  if (top_p) params.top_p = *top_p;
  if (min_p) params.min_p = *min_p;
  // Beams that the model's authors recommend are for greedy texts.
  if (params.temperature != 0) params.num_beams = 1;
  if (num_beams) params.num_beams = *num_beams;
  if (length_penalty && params.num_beams == 1)
    throw UsageError("--length-penalty is for beam search: give --num-beams of 2 or more, too");
  if (length_penalty) params.length_penalty = *length_penalty;
  if (typical_p) params.typical_p = *typical_p;
  if (repetition_penalty) params.repetition_penalty = *repetition_penalty;
  if (presence_penalty) params.presence_penalty = *presence_penalty;
  if (frequency_penalty) params.frequency_penalty = *frequency_penalty;
  if (max_tokens) params.max_tokens = *max_tokens == -1 ? context : *max_tokens;
  if (min_tokens) params.min_tokens = *min_tokens;
  for (const std::string& text : logit_bias) add_bias(params.logit_bias, text);
  params.bad_words.insert(params.bad_words.end(), bad_words.begin(), bad_words.end());
  if (!allowed_token_ids.empty()) params.allowed_token_ids.emplace();
  for (const std::string& text : allowed_token_ids) add_ids(*params.allowed_token_ids, "--allowed-token-ids", text);
  if (seed) params.seed = seed;
  params.stop.insert(params.stop.end(), stop.begin(), stop.end());
  for (const std::string& text : stop_token_ids) add_ids(params.stop_token_ids, "--stop-token-ids", text);
  params.ignore_eos = ignore_eos;
  if (n) params.n = *n;
  if (logprobs) params.logprobs = *logprobs;
  if (prompt_logprobs) params.prompt_logprobs = prompt_logprobs;
  params.validate();
  return params;
}

void SamplingOptions::check() const {
  try {
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    over({.max_tokens = kMost}, kMost);
  } catch (const InvalidArgument& error) {
    throw UsageError(with_option_names(error.what()));
  }
}

int64_t fresh_seed() { return static_cast<int64_t>(std::random_device{}() & 0x7fffffff); }

}  // namespace eadem::cli
