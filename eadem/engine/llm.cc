// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/llm.h"

#include <algorithm>
#include <chrono>
#include <future>
#include <random>
#include <set>
#include <system_error>
#include <utility>

#include "eadem/engine/model_files.h"
#include "eadem/io/gguf.h"

namespace eadem::engine {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

}  // namespace

namespace {

constexpr int64_t kLeastTokens = 256;

// The most tokens, up to `wanted`, that a paged cache holds in `bytes`, and kLeastTokens at least.
int64_t tokens_in(const CachePlanRequest& request, int64_t bytes, int64_t wanted) {
  int64_t fits = std::min(kLeastTokens, wanted);
  for (int64_t too_many = wanted + 1; too_many - fits > 1;) {
    const int64_t middle = fits + (too_many - fits) / 2;
    (paged_cache_bytes(request, middle) <= bytes ? fits : too_many) = middle;
  }
  return fits;
}

}  // namespace

CacheConfig fit_cache(const CachePlanRequest& request, int64_t free_bytes, const Logger& log) {
  CacheConfig wanted = request.config;
  auto* fixed = std::get_if<StaticKVCacheConfig>(&wanted);
  auto* paged = std::get_if<PagedKVCacheConfig>(&wanted);
  if (fixed != nullptr ? fixed->max_cache_len != 0 : paged->max_kv_memory_bytes != 0 || paged->max_cache_len != 0)
    return wanted;
  const int64_t batch = std::max<int64_t>(1, fixed != nullptr ? fixed->max_batch_size : paged->max_batch_size);
  const int64_t context = request.default_context > 0 ? request.default_context : request.context;
  int64_t fits = 0;  // tokens of one sequence
  if (fixed != nullptr) {
    fits = std::max(kLeastTokens, free_bytes / 2 / std::max<int64_t>(1, request.bytes.all_per_token()) / batch);
    fixed->max_cache_len = std::min(context, fits);
  } else {
    fits = tokens_in(request, free_bytes / 2, std::max(context, batch * std::min(context, kSharedContext)));
    paged->max_kv_memory_bytes = paged_cache_bytes(request, fits);
  }
  if (fits < context)
    log.log(LogLevel::warning, "context limited to {} of {} tokens: {} bytes of memory are free", fits, context,
            free_bytes);
  return wanted;
}

io::Tokenizer open_tokenizer(const models::Checkpoint& checkpoint) {
  const auto* gguf = dynamic_cast<const io::GgufFile*>(checkpoint.weights.get());
  io::Tokenizer tokenizer =
      gguf != nullptr ? io::tokenizer_from_gguf(*gguf) : io::Tokenizer::from_file(model_folder(checkpoint));
  if (tokenizer.vocab_size() > checkpoint.model->info().vocab)
    throw DataCorrupted("{}: the tokenizer has {} tokens; the model of {} has {}", tokenizer.source(),
                        tokenizer.vocab_size(), checkpoint.config_path, checkpoint.model->info().vocab);
  return tokenizer;
}

LLM::LLM(const std::string& path, std::shared_ptr<Device> device, const EngineOptions& options, const Logger& log,
         const std::function<void(int64_t, int64_t)>& progress, const SpeculationOptions& speculation)
    : LLM(models::open_checkpoint(path), std::move(device), options, log, progress, speculation) {}

LLM::LLM(models::Checkpoint checkpoint, std::shared_ptr<Device> device, const EngineOptions& options, const Logger& log,
         const std::function<void(int64_t, int64_t)>& progress, const SpeculationOptions& speculation)
    : checkpoint_(std::move(checkpoint)), fresh_seeds_(std::random_device{}()) {
  // Before the weights are read, which may take minutes.
  require_proposer(speculation, checkpoint_, device, options);
  // Reading a large vocabulary takes as long as reading a gigabyte of weights, so both are read at the same time. If
  // the tokenizer fails, loading stops. If no thread can be started, the tokenizer is read after the weights.
  const auto open = [this] { return open_tokenizer(checkpoint_); };
  std::future<io::Tokenizer> tokenizer;
  try {
    tokenizer = std::async(std::launch::async, open);
  } catch (const std::system_error& error) {
    log.log(LogLevel::warning, "no thread for reading the tokenizer beside the weights ({})", error.what());
    tokenizer = std::async(std::launch::deferred, open);
  }
  const auto take_tokenizer = [&] { tokenizer_ = std::make_unique<io::Tokenizer>(tokenizer.get()); };
  EngineOptions fitted = options;
  fitted.draft_tokens = std::max(options.draft_tokens, speculation.room());
  // Ranks share the machine's memory.
  fitted.cache =
      fit_cache(cache_request(checkpoint_, *device, fitted), device->memory().free_bytes / options.num_ranks(), log);
  const auto on_progress = [&](int64_t done, int64_t total) {
    if (tokenizer.valid() && tokenizer.wait_for(std::chrono::seconds(0)) == std::future_status::ready) take_tokenizer();
    if (progress) progress(done, total);
  };
  engine_ = InferEngine::from_checkpoint(checkpoint_, device, fitted, on_progress, log);
  if (tokenizer.valid()) take_tokenizer();
  loop_ = std::make_unique<EngineLoop>(*engine_,
                                       make_speculator(speculation, checkpoint_, *engine_, *tokenizer_, log, progress));

  std::vector<int64_t> eos = checkpoint_.model->info().eos_token_ids;
  if (const auto path = generation_config_path(checkpoint_)) {
    const io::GenerationConfig config = io::read_generation_config(*path);
    default_params_ = SamplingParams::from_generation_config(config, *path, log);
    if (!config.eos_token_ids.empty()) eos = config.eos_token_ids;
  }
  // A file may name an end that the model has no row for, and so never draws.
  for (const int64_t id : eos)
    if (checkpoint_.model->info().has_token(id)) eos_.push_back(static_cast<int32_t>(id));
  if (eos_.empty() && tokenizer_->eos()) eos_.push_back(*tokenizer_->eos());
}

std::vector<Completion> LLM::generate(const std::vector<std::string>& prompts, const SamplingParams& params,
                                      const OnText& on_text, const std::atomic<bool>* cancel, bool parse_special) {
  params.validate();
  const Clock::time_point start = Clock::now();
  std::vector<std::vector<int32_t>> ids(prompts.size());
  std::vector<std::string> errors(prompts.size());
  for (size_t i = 0; i < prompts.size(); ++i) {
    try {
      ids[i] = tokenizer_->encode(prompts[i], {.parse_special = parse_special, .cancel = cancel});
      // An empty prompt becomes the BOS token, the beginning of a text.
      if (ids[i].empty() && tokenizer_->bos()) ids[i].push_back(*tokenizer_->bos());
    } catch (const Cancelled&) {
      set_stats({});
      std::vector<Completion> none(prompts.size() * static_cast<size_t>(params.n));
      for (Completion& completion : none) completion.finish_reason = FinishReason::cancelled;
      return none;
    } catch (const Error& error) {
      errors[i] = error.what();
    }
  }
  std::vector<Completion> completions = run(ids, params, on_text, cancel, false, seconds_since(start));
  const auto n = static_cast<size_t>(params.n);
  for (size_t i = 0; i < completions.size(); ++i)
    if (!errors[i / n].empty()) completions[i].error = errors[i / n];
  return completions;
}

std::vector<Completion> LLM::generate_ids(const std::vector<std::vector<int32_t>>& prompts,
                                          const SamplingParams& params, const OnText& on_text,
                                          const std::atomic<bool>* cancel) {
  return run(prompts, params, on_text, cancel, false);
}

Completion LLM::continue_ids(const std::vector<int32_t>& conversation, const SamplingParams& params,
                             const OnText& on_text, const std::atomic<bool>* cancel) {
  if (params.n != 1) throw InvalidArgument("n is {}; a conversation has one answer", params.n);
  return std::move(run({&conversation, 1}, params, on_text, cancel, true)[0]);
}

GenerationStats LLM::last_stats() const {
  const std::lock_guard lock(stats_mutex_);
  return stats_;
}

void LLM::set_stats(const GenerationStats& stats) {
  const std::lock_guard lock(stats_mutex_);
  stats_ = stats;
}

// All bad words as tokens, each once.
std::vector<std::vector<int32_t>> LLM::bad_words(const SamplingParams& params) const {
  std::set<std::vector<int32_t>> words;
  for (const std::vector<int64_t>& ids : params.bad_words_ids) words.emplace(ids.begin(), ids.end());
  for (const int32_t token : eos_) words.erase(std::vector<int32_t>{token});
  // A word has one spelling at the beginning of a text and another one behind a space.
  for (const std::string& word : params.bad_words)
    for (const char* before : {"", " "}) words.insert(tokenizer_->encode(before + word, {.add_special_tokens = false}));
  words.erase(std::vector<int32_t>());  // of a text that has no token
  return {words.begin(), words.end()};
}

namespace {

void require_in_vocabulary(const char* name, const std::vector<int64_t>& tokens, int64_t vocab) {
  for (const int64_t token : tokens)
    if (token >= vocab) throw InvalidArgument("{} is for token {}; the vocabulary has {}", name, token, vocab);
}

// Throws when no token of params.allowed_token_ids may be the first one of the text.
void require_some_allowed(const SamplingParams& params, std::span<const TokenBias> biases) {
  std::set<int64_t> banned;
  for (const TokenBias& each : biases)
    if (each.bias == kNeverSampled) banned.insert(each.token);
  const std::vector<int64_t>& allowed = *params.allowed_token_ids;
  if (std::all_of(allowed.begin(), allowed.end(), [&](int64_t token) { return banned.contains(token); }))
    throw InvalidArgument(
        "allowed_token_ids has no token that may be drawn: bad words and min_tokens, {}, forbid all of them",
        params.min_tokens);
}

}  // namespace

// A request whose seed is not set yet. `words`: bad_words(params).
GenerationRequest LLM::request_of(const SamplingParams& params, const std::vector<int32_t>& prompt,
                                  const std::vector<std::vector<int32_t>>& words) const {
  GenerationRequest request{.prompt = prompt, .biases = params.biases(eos_, words), .max_tokens = params.max_tokens};
  for (const std::vector<int32_t>& word : words)
    if (word.size() > 1) request.bad_words.push_back(word);
  const int64_t vocab = engine_->model().info().vocab;
  require_in_vocabulary("stop_token_ids", params.stop_token_ids, vocab);
  if (params.allowed_token_ids) {
    require_in_vocabulary("allowed_token_ids", *params.allowed_token_ids, vocab);
    require_some_allowed(params, request.biases);
    request.allowed = only_tokens(*params.allowed_token_ids, vocab);
  }
  request.token_mask = params.token_mask;
  if (!params.logits_processors.empty())
    request.processor = [processors = params.logits_processors](std::span<const int32_t> tokens,
                                                                std::span<float> logits) {
      for (const LogitsProcessor& each : processors) each(tokens, logits);
    };
  return request;
}

std::vector<Completion> LLM::run(std::span<const std::vector<int32_t>> prompts, const SamplingParams& params,
                                 const OnText& on_text, const std::atomic<bool>* cancel, bool keep,
                                 double tokenize_seconds) {
  params.validate();
  set_stats({});
  if (params.num_beams > 1) return run_beams(prompts, params, on_text, cancel, tokenize_seconds);
  std::vector<EngineLoop::Job> jobs;
  std::vector<size_t> places;  // of the jobs' completions
  const auto n = static_cast<size_t>(params.n);
  std::vector<Completion> completions(prompts.size() * n);
  jobs.reserve(completions.size());
  const std::vector<std::vector<int32_t>> words = bad_words(params);
  for (size_t i = 0; i < completions.size(); ++i) {
    Completion& completion = completions[i];
    const std::vector<int32_t>& prompt = prompts[i / n];
    completion.prompt_tokens = std::ssize(prompt);
    completion.seed = params.seed ? static_cast<int64_t>(static_cast<uint64_t>(*params.seed) + i % n)
                                  : static_cast<int64_t>(fresh_seeds_++ & 0x7fffffff);
    try {
      GenerationRequest request = request_of(params, prompt, words);
      request.sampling = params.settings(completion.seed);
      request.keep = keep;
      // The answers to a prompt share what is computed of it.
      if (params.prompt_logprobs && i % n == 0) request.prompt_logprobs = static_cast<int32_t>(*params.prompt_logprobs);
      loop_->check(request);
      jobs.push_back({std::move(request), OutputProcessor(*tokenizer_, params, eos_, prompt, completion.seed)});
      places.push_back(i);
    } catch (const Error& error) {
      completion.finish_reason = FinishReason::error;
      completion.error = error.what();
    }
  }
  EngineLoop::OnText on_job_text;
  if (on_text) on_job_text = [&](size_t job, std::string_view piece) { on_text(places[job], piece); };
  GenerationStats stats = loop_->run(jobs, on_job_text, cancel);
  stats.tokenize_seconds = tokenize_seconds;
  set_stats(stats);
  for (size_t job = 0; job < jobs.size(); ++job) completions[places[job]] = std::move(jobs[job].output.completion());
  for (size_t i = 0; params.prompt_logprobs && i < completions.size(); ++i) {
    const Completion& first = completions[i / n * n];
    if (i % n == 0 || !completions[i].error.empty()) continue;
    completions[i].prompt_logprobs = first.prompt_logprobs;
    completions[i].prompt_top_logprobs = first.prompt_top_logprobs;
  }
  return completions;
}

namespace {

void add(GenerationStats& sum, const GenerationStats& stats) {
  if (sum.first_token_seconds == 0) sum.first_token_seconds = stats.first_token_seconds;
  sum.prompt_seconds += stats.prompt_seconds;
  sum.decode_seconds += stats.decode_seconds;
  sum.prompt_tokens += stats.prompt_tokens;
  sum.reused_tokens += stats.reused_tokens;
  sum.decode_tokens += stats.decode_tokens;
}

// The beams of one prompt.
struct PromptBeams {
  size_t prompt;
  BeamSearch search;
};

}  // namespace

Completion LLM::completion_of(const Beam& beam, const SamplingParams& params, std::span<const int32_t> prompt) const {
  OutputProcessor output(*tokenizer_, params, eos_, prompt, 0);
  for (size_t t = 0; t < beam.tokens.size() && !output.has_ended(); ++t) output.take(beam.tokens[t], beam.logprobs[t]);
  if (!output.has_ended()) output.end(FinishReason::length);
  Completion completion = std::move(output.completion());
  completion.score = beam.score;
  for (size_t t = 0; t < completion.top_logprobs.size(); ++t) {
    const std::vector<TokenLogprob>& next = beam.next[t];
    const auto count = std::min(next.size(), static_cast<size_t>(params.logprobs));
    completion.top_logprobs[t].assign(next.begin(), next.begin() + static_cast<std::ptrdiff_t>(count));
  }
  return completion;
}

// Each step of a search is a request for each running beam, of one token: the prefix cache holds the blocks that beams
// share, and those of the beams that were left.
std::vector<Completion> LLM::run_beams(std::span<const std::vector<int32_t>> prompts, const SamplingParams& params,
                                       const OnText& on_text, const std::atomic<bool>* cancel,
                                       double tokenize_seconds) {
  const auto n = static_cast<size_t>(params.n);
  BeamOptions options{.num_beams = params.num_beams,
                      .length_penalty = params.length_penalty,
                      .early_stopping = params.early_stopping,
                      .min_tokens = params.min_tokens};
  if (!params.ignore_eos) options.ends.insert(eos_.begin(), eos_.end());
  for (const int64_t token : params.stop_token_ids) options.ends.insert(static_cast<int32_t>(token));
  if (const auto candidates = params.num_beams + std::ssize(options.ends); candidates > kernels::kMostTopLogprobs)
    throw Unsupported("num_beams is {} with {} tokens that end a text; {} are most of both together", params.num_beams,
                      options.ends.size(), kernels::kMostTopLogprobs);
  SamplingParams each_step{.temperature = 0, .max_tokens = 1, .ignore_eos = true};
  each_step.logprobs = std::max(params.num_beams + std::ssize(options.ends), params.logprobs);

  std::vector<Completion> completions(prompts.size() * n);
  std::vector<PromptBeams> searches;
  const auto fail = [&](size_t prompt, FinishReason reason, const std::string& error) {
    for (size_t i = prompt * n; i < (prompt + 1) * n; ++i) {
      completions[i].finish_reason = reason;
      completions[i].error = error;
    }
  };
  for (size_t prompt = 0; prompt < prompts.size(); ++prompt) {
    for (size_t i = 0; i < n; ++i) completions[prompt * n + i].prompt_tokens = std::ssize(prompts[prompt]);
    try {
      require_in_vocabulary("stop_token_ids", params.stop_token_ids, engine_->model().info().vocab);
      loop_->check({.prompt = prompts[prompt]});
      const int64_t room = engine_->max_sequence_length() - std::ssize(prompts[prompt]) + 1;
      options.max_tokens = std::min(params.max_tokens, room);
      searches.push_back({prompt, BeamSearch(options)});
    } catch (const Error& error) {
      fail(prompt, FinishReason::error, error.what());
    }
  }

  GenerationStats stats{.tokenize_seconds = tokenize_seconds};
  std::vector<EngineLoop::Job> jobs;
  const auto take_step = [&](PromptBeams& each, size_t first_job) {
    std::vector<std::vector<TokenLogprob>> next;
    for (size_t job = first_job; job < first_job + each.search.running().size(); ++job) {
      Completion& step = jobs[job].output.completion();
      if (step.top_logprobs.empty()) return fail(each.prompt, step.finish_reason, step.error);
      next.push_back(std::move(step.top_logprobs[0]));
      if (each.search.running().size() == 1 && each.search.running()[0].tokens.empty())
        for (size_t i = 0; i < n; ++i) completions[each.prompt * n + i].cached_tokens = step.cached_tokens;
    }
    each.search.advance(next);
    if (!each.search.has_ended()) return;
    if (each.search.finished().size() < n)  // a vocabulary smaller than the number of beams
      return fail(each.prompt, FinishReason::error,
                  fmt::format("n is {}; the search found {} texts", n, each.search.finished().size()));
    for (size_t i = 0; i < n; ++i) {
      Completion& completion = completions[each.prompt * n + i];
      const int64_t cached = completion.cached_tokens;
      completion = completion_of(each.search.finished()[i], params, prompts[each.prompt]);
      completion.cached_tokens = cached;
      if (on_text && !completion.text.empty()) on_text(each.prompt * n + i, completion.text);
    }
  };
  const auto failed = [&](const PromptBeams& each) {
    return completions[each.prompt * n].finish_reason == FinishReason::error ||
           completions[each.prompt * n].finish_reason == FinishReason::cancelled;
  };
  while (!searches.empty()) {
    jobs.clear();
    for (const PromptBeams& each : searches)
      for (const Beam& beam : each.search.running()) {
        GenerationRequest request{.prompt = prompts[each.prompt], .sampling = each_step.settings(0)};
        request.prompt.insert(request.prompt.end(), beam.tokens.begin(), beam.tokens.end());
        jobs.push_back({std::move(request), OutputProcessor(*tokenizer_, each_step, {}, {}, 0)});
      }
    add(stats, loop_->run(jobs, {}, cancel));
    size_t first_job = 0;
    for (PromptBeams& each : searches) {
      const size_t running = each.search.running().size();
      take_step(each, first_job);
      first_job += running;
    }
    std::erase_if(searches, [&](const PromptBeams& each) { return each.search.has_ended() || failed(each); });
  }
  set_stats(stats);
  return completions;
}

}  // namespace eadem::engine
