// SPDX-License-Identifier: Apache-2.0
//
// eadem perplexity: how well a model predicts a text.
//
// The protocol is that of llama.cpp's perplexity tool with its defaults, so that numbers compare: the text is
// tokenized as one, cut into chunks of `context` tokens without overlap, a rest is dropped; the first token of each
// chunk is replaced by BOS if the tokenizer puts one before texts; the tokens of the second half of each chunk are
// scored: those at positions context/2 + 1 to context - 1.
#include <algorithm>
#include <cmath>

#include "eadem/cli/arguments.h"
#include "eadem/cli/commands.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/engine/llm.h"
#include "eadem/io/json.h"
#include "eadem/io/mapped_file.h"

namespace eadem::cli {

namespace {

using engine::InferEngine;

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
// Logits of a step stay below this, whatever the vocabulary.
constexpr int64_t kLogitBytes = 64 << 20;

// Sums of one model over a text: of the tokens' negative log-likelihoods and their squares.
struct Score {
  double sum = 0, sum_squares = 0;
  int64_t count = 0;

  void add(double value) {
    sum += value;
    sum_squares += value * value;
    ++count;
  }
  double mean() const { return sum / static_cast<double>(count); }
  // Standard error of the mean.
  double error() const {
    if (count < 2) return 0;
    const double n = static_cast<double>(count);
    return std::sqrt(std::max(0.0, (sum_squares / n - mean() * mean()) / (n - 1)));
  }
};

// Natural logarithms of the softmax of one row, in double.
void log_softmax(const float* logits, int64_t count, std::vector<double>& result) {
  const double most = *std::max_element(logits, logits + count);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(logits[i] - most);
  const double log_sum = std::log(sum) + most;
  result.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) result[static_cast<size_t>(i)] = logits[i] - log_sum;
}

double log_probability(const float* logits, int64_t count, int32_t token) {
  const double most = *std::max_element(logits, logits + count);
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(logits[i] - most);
  return logits[token] - most - std::log(sum);
}

std::unique_ptr<InferEngine> open_engine(const models::Checkpoint& checkpoint, const std::shared_ptr<Device>& device,
                                         engine::EngineOptions options, int64_t context) {
  const int64_t rows = std::clamp<int64_t>(kLogitBytes / (4 * checkpoint.model->info().vocab), 1, context);
  options.cache = engine::StaticKVCacheConfig{.max_batch_size = 1, .max_cache_len = context};
  options.max_step_tokens = rows;
  options.max_logit_rows = rows;
  ProgressBar bar("loading");
  const auto progress = [&](int64_t done, int64_t total) {
    stop_if_interrupted();
    bar.update(static_cast<double>(done), static_cast<double>(total));
  };
  return InferEngine::from_checkpoint(checkpoint, device, options, progress, cli_logger());
}

// Steps over `chunk` in pieces; after each calls on_step(first position, logits of its tokens).
template <typename OnStep>
void step_through(InferEngine& engine, std::span<const int32_t> chunk, int64_t begin, int64_t count,
                  const OnStep& on_step) {
  InferEngine::Input input;
  input.input_ids.assign(chunk.begin() + begin, chunk.begin() + begin + count);
  input.input_lengths = {static_cast<int32_t>(count)};
  input.cache_lengths = {static_cast<int32_t>(begin)};
  input.all_logits = true;
  engine.forward(input, &interrupt_flag());
  on_step(engine.logits());
}

}  // namespace

int perplexity(CommandLine command_line) {
  ModelOptions options;
  std::vector<std::string> operands;
  std::optional<std::string> base;
  int64_t context = 512, max_chunks = 0;
  bool json = false;
  Arguments arguments("perplexity",
                      "How well a model predicts a text: the perplexity of the second half of each chunk, with its "
                      "standard error. The protocol is the usual one (chunks of 512 tokens without overlap, BOS first "
                      "in each where the tokenizer has one), so that the number compares with that of other tools.");
  arguments.rest("[MODEL] FILE", operands, "the model (default: the bundled one), and a UTF-8 text");
  arguments.option("--context", "N", context, "tokens of a chunk (default: 512)");
  arguments.option("--chunks", "N", max_chunks, "only the first N chunks (default: all)");
  arguments.option(
      "--kl", "BASE", base,
      "also the mean Kullback-Leibler divergence from this model, which must have the same tokenizer: what "
      "an encoding or a precision costs");
  arguments.flag("--json", json, "one JSON object");
  options.add_device(arguments);
  options.add_precision(arguments);
  options.add_loading(arguments);
  arguments.example("eadem perplexity model.gguf wiki.test.raw", "the number of the usual tables");
  arguments.example("eadem perplexity model-bf16.gguf wiki.test.raw --kl model-f32.gguf --chunks 20",
                    "what rounding the weights costs");
  if (!arguments.parse(command_line)) return kOk;
  if (operands.size() > 2) throw UsageError(fmt::format("unexpected argument '{}'", operands[2]));
  if (operands.size() == 2) options.model = operands[0];
  const std::string& file = operands.back();
  if (context < 4 || context > (1 << 24))
    throw UsageError(fmt::format("--context is {}; expected at least 4", context));
  if (max_chunks < 0) throw UsageError(fmt::format("--chunks is {}; expected at least 1", max_chunks));
  listen_for_interrupt();

  const std::string text = io::read_file(file, kMaxTextBytes);
  if (text.empty()) throw InvalidArgument("{} is empty", file);
  const models::Checkpoint checkpoint = models::open_checkpoint(resolve_model(options.model));
  const int64_t vocab = checkpoint.model->info().vocab;
  if (context > checkpoint.model->info().max_positions)
    throw InvalidArgument("--context is {}; the model's context is {} tokens", context,
                          checkpoint.model->info().max_positions);
  const io::Tokenizer tokenizer = engine::open_tokenizer(checkpoint);
  std::vector<int32_t> ids;
  try {
    ids = tokenizer.encode(text, {.add_special_tokens = true, .parse_special = false, .cancel = &interrupt_flag()});
  } catch (const InvalidArgument& error) {
    throw InvalidArgument("{}: {}", file, error.what());
  }
  int64_t chunks = static_cast<int64_t>(ids.size()) / context;
  if (chunks < 1)
    throw InvalidArgument("{}: {} tokens, less than one chunk of {} (--context)", file, ids.size(), context);
  if (max_chunks > 0) chunks = std::min(chunks, max_chunks);
  const bool adds_bos = !tokenizer.prefix_ids().empty() && tokenizer.prefix_ids()[0] == tokenizer.bos();

  const std::shared_ptr<Device> device = options.open();
  std::optional<models::Checkpoint> base_checkpoint;
  if (base) {
    base_checkpoint = models::open_checkpoint(resolve_model(base));
    const io::Tokenizer other = engine::open_tokenizer(*base_checkpoint);
    if (base_checkpoint->model->info().vocab != vocab || other.encode(text, {.parse_special = false}) != ids)
      throw InvalidArgument("--kl: {} and {} do not have the same tokenizer", *base, checkpoint.path);
    if (context > base_checkpoint->model->info().max_positions)
      throw InvalidArgument("--context is {}; the context of {} is {} tokens", context, *base,
                            base_checkpoint->model->info().max_positions);
  }
  const std::unique_ptr<InferEngine> engine = open_engine(checkpoint, device, options.engine_options(), context);
  // The base runs as its files say: the precision options are for the model that is measured.
  engine::EngineOptions base_options;
  base_options.pack_cache = options.pack_cache;
  const std::unique_ptr<InferEngine> base_engine =
      base_checkpoint ? open_engine(*base_checkpoint, device, base_options, context) : nullptr;
  note("{}: {} tokens, {} chunks of {}, on {}", file, ids.size(), chunks, context, device->description());

  Score score, base_score, divergence;
  std::vector<double> logs, base_logs;
  bool stopped = false;
  int64_t done = 0;
  ProgressBar bar("perplexity");
  auto last_line = std::chrono::steady_clock::now();
  for (; done < chunks && !stopped; ++done) {
    std::vector<int32_t> chunk(ids.begin() + done * context, ids.begin() + (done + 1) * context);
    if (adds_bos) chunk[0] = *tokenizer.bos();
    const int64_t step = engine->options().max_step_tokens;
    const Score before[] = {score, base_score, divergence};
    try {
      for (int64_t begin = 0; begin + 1 < context; begin += step) {
        const int64_t count = std::min(step, context - begin);
        Tensor base_logits;
        if (base_engine)
          step_through(*base_engine, chunk, begin, count, [&](Tensor logits) { base_logits = std::move(logits); });
        step_through(*engine, chunk, begin, count, [&](const Tensor& logits) {
          for (int64_t row = 0; row < count; ++row) {
            const int64_t position = begin + row;  // predicts the token at position + 1
            if (position < context / 2 || position + 1 >= context) continue;
            const int32_t target = chunk[static_cast<size_t>(position + 1)];
            const float* values = logits.view.as<float>() + row * vocab;
            if (!base_engine) {
              score.add(-log_probability(values, vocab, target));
              continue;
            }
            log_softmax(values, vocab, logs);
            log_softmax(base_logits.view.as<float>() + row * vocab, vocab, base_logs);
            score.add(-logs[static_cast<size_t>(target)]);
            base_score.add(-base_logs[static_cast<size_t>(target)]);
            double kl = 0;
            for (size_t i = 0; i < logs.size(); ++i) kl += std::exp(base_logs[i]) * (base_logs[i] - logs[i]);
            divergence.add(kl);
          }
        });
      }
    } catch (const Cancelled&) {  // what was asked for is the mean over whole chunks
      if (done == 0) throw;
      score = before[0], base_score = before[1], divergence = before[2];
      stopped = true;
      break;
    }
    if (!std::isfinite(score.sum))
      throw InvalidArgument("{}: the model's logits are not finite in chunk {}", checkpoint.path, done + 1);
    const std::string state = fmt::format("{}/{} chunks  perplexity {:.4f}", done + 1, chunks, std::exp(score.mean()));
    bar.update(static_cast<double>(done + 1), static_cast<double>(chunks), state);
    if (const auto now = std::chrono::steady_clock::now();
        !stderr_is_terminal() && now - last_line > std::chrono::seconds(10)) {
      last_line = now;
      note("{}", state);
    }
    stopped = interrupted();
  }
  bar.clear();

  // The error of exp(mean), to first order.
  const double value = std::exp(score.mean()), error = value * score.error();
  if (json) {
    io::JsonValue result = io::JsonValue::object();
    result.set("model", checkpoint.path).set("file", file).set("context", context).set("chunks", done);
    result.set("scored_tokens", score.count).set("perplexity", value).set("error", error);
    result.set("mean_negative_log_likelihood", score.mean()).set("stopped", stopped);
    if (base)
      result.set("base", *base)
          .set("base_perplexity", std::exp(base_score.mean()))
          .set("kl_divergence", divergence.mean())
          .set("kl_divergence_error", divergence.error());
    print(io::to_json(result) + "\n");
  } else {
    print(fmt::format("perplexity {:.4f} ± {:.4f} ({} tokens scored, {} chunks of {})\n", value, error, score.count,
                      done, context));
    if (base)
      print(fmt::format("base       {:.4f}; mean KL divergence from it {:.6f} ± {:.6f} nats per token\n",
                        std::exp(base_score.mean()), divergence.mean(), divergence.error()));
  }
  if (stopped) note("stopped after {} of {} chunks", done, chunks);
  return stopped ? kInterrupted : kOk;
}

}  // namespace eadem::cli
