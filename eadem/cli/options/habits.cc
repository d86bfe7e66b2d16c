// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/options/habits.h"

namespace eadem::cli {

namespace {

constexpr OtherName kOtherNames[] = {
    // Options that say how many tokens to generate.
    {"--n-predict", "--max-tokens"},
    {"--predict", "--max-tokens"},
    {"--num-predict", "--max-tokens"},
    {"--max-new-tokens", "--max-tokens"},
    {"-c", "--context"},
    {"--ctx-size", "--context"},
    {"--num-ctx", "--context"},
    {"--max-model-len", "--context"},
    // Options that say which tokens to sample.
    {"--temp", "--temperature"},
    {"-s", "--seed"},
    {"--repeat-penalty", "--repetition-penalty"},
    {"--typical", "--typical-p"},
    {"-r", "--stop"},
    {"--reverse-prompt", "--stop"},
    // Options that say how a conversation is written.
    {"-sys", "--system"},
    {"--system-prompt", "--system"},
    {"-cnv", "--chat"},
    {"--conversation", "--chat"},
    {"--chat-template-file", "--chat-template"},
    {"--chat-template-kwargs", "--template-arg"},
    // Options that say on which device to run.
    {"-dev", "--device"},
    {"-tb", "--prefill-threads"},
    {"--threads-batch", "--prefill-threads"},
    {"-ctk", "--kv-dtype"},
    {"--cache-type-k", "--kv-dtype"},
    {"--cache-type-v", "--kv-dtype"},
    {"--kv-cache-dtype", "--kv-dtype"},
    {"-md", "--speculate"},
    {"--model-draft", "--speculate"},
    {"--speculative-model", "--speculate"},
    {"--draft", "--draft-tokens"},
    {"--draft-n", "--draft-tokens"},
    {"--draft-max", "--draft-tokens"},
    {"--num-speculative-tokens", "--draft-tokens"},
    {"--outtype", "--type"},
    {"--imatrix", "--calibrate"},
    {"-tp", "--tp"},
    {"--tensor-parallel-size", "--tp"},
    {"-ep", "--ep"},
    {"--expert-parallel-size", "--ep"},
};

constexpr std::string_view kOneDevice = "one device runs every layer: --device cuda, or --device cpu";
constexpr std::string_view kAttention = "attention never stores its score matrix; leave the option out";
constexpr std::string_view kBatches = "the engine sizes its own steps; leave the option out";
constexpr std::string_view kPaths = "nothing is downloaded; MODEL is a path";
constexpr std::string_view kMapped = "weights are mapped from their file where that is faster; leave the option out";
constexpr std::string_view kPromptShown = "`--json | jq -r .text` gives the answer without the prompt";

constexpr std::string_view kReasoning =
    "the model's template decides, often by a variable: --template-arg enable_thinking=false";

constexpr std::string_view kScores = "`eadem run` lists log-probabilities in its JSON";

constexpr Advice kAdvice[] = {
    {"--n", "`eadem run` gives several answers to a text"},
    {"--logprobs", kScores},
    {"--prompt-logprobs", kScores},
    {"--think", kReasoning},
    {"--hidethinking", "reasoning goes to stderr, so 2> takes it away"},
    {"--reasoning-budget", kReasoning},
    {"--reasoning-format", "reasoning is always kept apart from the answer; leave the option out"},
    {"--jinja", "chat templates are always Jinja; leave the option out"},
    {"-st", "`eadem run --chat -p TEXT` asks one question"},
    {"--single-turn", "`eadem run --chat -p TEXT` asks one question"},
    {"-ngl", kOneDevice},
    {"--n-gpu-layers", kOneDevice},
    {"--gpu-layers", kOneDevice},
    {"--num-gpu", kOneDevice},
    {"-sm", kOneDevice},
    {"--split-mode", kOneDevice},
    {"-fa", kAttention},
    {"--flash-attn", kAttention},
    {"-b", kBatches},
    {"--batch-size", kBatches},
    {"-ub", kBatches},
    {"--ubatch-size", kBatches},
    {"-hf", kPaths},
    {"--hf-repo", kPaths},
    {"--mlock", kMapped},
    {"--no-mmap", kMapped},
    {"--no-display-prompt", kPromptShown},
    {"-e", "the shell writes escapes: -p $'first line\\nsecond line'"},
    {"--escape", "the shell writes escapes: -p $'first line\\nsecond line'"},
    {"--speculative-config", "--speculate lookup, mtp, or MODEL; --draft-tokens N"},
    {"--gpu-memory-utilization", "--context says how many tokens the KV cache holds"},
};

constexpr OtherName kTypeNames[] = {
    {"bfloat16", "bf16"}, {"float16", "f16"}, {"fp16", "f16"},  {"half", "f16"},
    {"float32", "f32"},   {"fp32", "f32"},    {"float", "f32"}, {"fp8", "fp8_e4m3"},
};

}  // namespace

std::span<const OtherName> other_names() { return kOtherNames; }

std::span<const Advice> advice() { return kAdvice; }

std::string_view our_type_name(std::string_view name) {
  for (const OtherName& other : kTypeNames)
    if (name == other.name) return other.ours;
  return name;
}

}  // namespace eadem::cli
