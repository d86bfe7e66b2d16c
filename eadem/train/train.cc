// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/train.h"

#include <fmt/ranges.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <filesystem>
#include <limits>
#include <optional>

#include "eadem/io/files/atomic_file.h"
#include "eadem/io/files/content_hash.h"
#include "eadem/io/gguf.h"
#include "eadem/io/tokenizer/files/tokenizer_files.h"
#include "eadem/models/huggingface.h"
#include "eadem/train/checkpoint.h"
#include "eadem/train/identity.h"
#include "eadem/train/metrics.h"
#include "eadem/train/output_lock.h"
#include "eadem/train/rank_values.h"
#include "eadem/train/trainer.h"

namespace eadem::train {

namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr double kNoEval = std::numeric_limits<double>::quiet_NaN();

TrainerOptions trainer_options(const Recipe::Training& t) {
  return {.weights = t.weights,
          .products = t.products,
          .head_products = t.head_products,
          .amax_history = t.amax_history,
          .batch_tokens = t.batch_tokens,
          .recompute_layers = t.recompute_layers,
          .beta1 = t.beta1,
          .beta2 = t.beta2,
          .eps = t.eps,
          .weight_decay = t.weight_decay,
          .max_grad_norm = t.max_grad_norm,
          .frozen = t.freeze,
          .router_aux_loss_coef = t.router_aux_loss_coef};
}

// Returns the XXH3 hash of names and contents.
std::string hash_of(const std::vector<io::TokenizerFile>& files) {
  std::string all;
  for (const io::TokenizerFile& file : files)
    all += fmt::format("{} {} {}", file.name, file.content.size(), file.content);
  return io::content_hash(std::as_bytes(std::span(all))).hex();
}

std::string hash_of(const io::WeightSource& weights) {
  std::string all;
  for (const auto& file : weights.files()) all += io::content_hash(file->bytes()).hex();
  return io::content_hash(std::as_bytes(std::span(all))).hex();
}

// Returns the directory or GGUF file that holds the tokenizer of a model.
std::string tokenizer_beside(const models::Checkpoint& checkpoint) {
  if (io::is_gguf_file(checkpoint.config_path)) return checkpoint.config_path;
  return fs::path(checkpoint.config_path).parent_path().string();
}

// One run of a recipe; its members are the state that steps share.
class Run {
 public:
  Run(const Recipe& recipe, const RunOptions& options, const Logger& log)
      : recipe_(recipe), training_(recipe.training), options_(options), first_(is_first_rank(options.mesh)) {
    check_mesh();
    std::optional<FoundCheckpoint> found;
    if (first_) found = open_output(log);
    // The others begin when the first rank has made the files, and has found that the recipe fits.
    if (!first_) found = told_checkpoint();
    if (training_.decay_steps == 0) training_.decay_steps = found ? found->state.decay_steps : training_.steps;
    const models::Checkpoint start = open_model();
    open_tokenizer(start);
    prepare_data(start);
    state_.decay_steps = training_.decay_steps;
    if (first_) {
      state_.identity = identity_of(recipe, start.model->config_json(),
                                    {.initial_weights = start.weights == nullptr ? "" : hash_of(*start.weights),
                                     .tokenizer = hash_of(tokenizer_files_),
                                     .train = data_->text_hashes(),
                                     .eval = eval_data_ ? eval_data_->text_hashes() : std::vector<std::string>()});
      if (found) require_same_run(*found, state_.identity);
      tell_checkpoint(found);
    }
    trainer_ = std::make_unique<Trainer>(start.model, options.device, trainer_options(training_), options.mesh);
    if (found)
      restore(*found);
    else if (start.weights != nullptr)
      trainer_->load(start);
    else
      trainer_->load_random(training_.seed, recipe.init_std);
    if (first_) metrics_ = std::make_unique<Metrics>(folder("metrics.jsonl"), state_.step);
  }

  RunResult train() {
    const Recipe::Training& t = training_;
    RunResult result;
    result.loss = result.eval_loss = kNoEval;
    const PartRange own = part_of(t.accumulation, pass_ranks(), pass_rank());
    std::vector<Batch> batches(static_cast<size_t>(own.size));
    Batch other;
    while (state_.step < t.steps) {
      const Clock::time_point start = Clock::now();
      for (int64_t pass = 0; pass < t.accumulation; ++pass)
        loader_->next(
            pass < own.begin || pass >= own.begin + own.size ? other : batches[static_cast<size_t>(pass - own.begin)]);
      const double rate = learning_rate_at(t, state_.step);
      const StepResult step = trainer_->step(batches, rate);
      result.loss = step.loss;
      ++state_.step;
      state_.tokens += t.batch_tokens * t.accumulation;
      state_.cursor = loader_->cursor();
      const bool last = state_.step == t.steps;

      Progress progress{.step = state_.step,
                        .steps = t.steps,
                        .loss = step.loss,
                        .learning_rate = rate,
                        .grad_norm = step.grad_norm,
                        .tokens = state_.tokens,
                        .tokens_per_second = speed(start),
                        .seconds_left = 0,
                        .eval_loss = kNoEval,
                        .load_balancing_loss = step.load_balancing_loss};
      progress.seconds_left =
          static_cast<double>((t.steps - state_.step) * t.batch_tokens * t.accumulation) / progress.tokens_per_second;
      if (first_)
        metrics_->add(StepMetrics{state_.step, step.loss, rate, step.grad_norm, state_.tokens,
                                  progress.tokens_per_second, step.load_balancing_loss});
      if (eval_data_ && (last || state_.step % t.eval_interval == 0)) {
        progress.eval_loss = result.eval_loss = evaluate();
        if (first_) metrics_->add(EvalMetrics{state_.step, progress.eval_loss});
      }
      if (first_ && options_.on_step) options_.on_step(progress);
      const bool cancelled = value_of_first(options_.cancel != nullptr && options_.cancel->load() ? 1 : 0) == 1;
      if (last || cancelled || state_.step % t.checkpoint_interval == 0) {
        save_checkpoint(*trainer_, state_, companions_, folder("checkpoints"), t.keep_checkpoints);
        write_plot();
      }
      if (cancelled && !last) {
        result.cancelled = true;
        break;
      }
    }
    result.steps = state_.step;
    if (!result.cancelled) {
      result.model_directory = folder("final");
      replace_model(*trainer_, companions_, result.model_directory);
      if (first_ && std::isnan(result.eval_loss) && !metrics_->evals().empty())
        result.eval_loss = metrics_->evals().back().loss;
      write_plot();
    }
    return result;
  }

 private:
  std::string folder(const char* name) const { return (fs::path(recipe_.output) / name).string(); }

  // The ranks of dp and ep, which have passes of their own, those of ep beside each other; and this one of them.
  int pass_ranks() const { return options_.mesh.size(MeshAxis::dp) * options_.mesh.size(MeshAxis::ep); }
  int pass_rank() const {
    return options_.mesh.rank(MeshAxis::dp) * options_.mesh.size(MeshAxis::ep) + options_.mesh.rank(MeshAxis::ep);
  }

  void check_mesh() const {
    const int data = options_.mesh.size(MeshAxis::dp), experts = options_.mesh.size(MeshAxis::ep);
    if (training_.accumulation % pass_ranks() == 0) return;
    const std::string ranks = experts == 1 ? fmt::format("{} ranks of dp", data)
                              : data == 1  ? fmt::format("{} ranks of ep", experts)
                                           : fmt::format("{} ranks of dp x {} of ep", data, experts);
    throw InvalidArgument(
        "{}: training.accumulation is {}; {}, which divide the passes of a step, need a multiple of {}", recipe_.path,
        training_.accumulation, ranks, pass_ranks());
  }

  // Makes the output directory ready and returns the checkpoint to go on from.
  std::optional<FoundCheckpoint> open_output(const Logger& log) {
    make_directory(recipe_.output);
    lock_.emplace(recipe_.output, log);
    remove_unfinished(recipe_.output);
    remove_unfinished(folder("checkpoints"));
    if (!options_.resume && !list_checkpoints(folder("checkpoints")).empty())
      throw InvalidArgument(
          "'{}' holds a run already; --resume goes on from its newest checkpoint, or choose another output directory",
          recipe_.output);
    return newest_checkpoint(folder("checkpoints"), log);
  }

  int64_t value_of_first(int64_t value) const { return value_of_first_rank(*options_.device, options_.mesh, value); }

  // The first rank tells the others where it goes on; they get there what it has verified.
  void tell_checkpoint(const std::optional<FoundCheckpoint>& found) const {
    value_of_first(found ? found->state.step : -1);
  }
  std::optional<FoundCheckpoint> told_checkpoint() const {
    const int64_t step = value_of_first(0);
    if (step < 0) return std::nullopt;
    const std::string directory = checkpoint_directory(folder("checkpoints"), step);
    return FoundCheckpoint{directory, verify_checkpoint(directory)};
  }

  void tell(const std::string& sentence) const {
    if (first_ && options_.on_note) options_.on_note(sentence);
  }

  // Opens the model with the weights that training begins with, or without weights.
  models::Checkpoint open_model() const {
    models::Checkpoint start =
        recipe_.init_from.empty()
            ? models::Checkpoint{recipe_.config, models::model_from_config(recipe_.config), nullptr, recipe_.config}
            : models::huggingface_form(models::open_checkpoint(recipe_.init_from));
    start.model->config_json();  // throws for what checkpoints cannot state, before any training
    // Longrope's long factors are not trained with.
    if (training_.sequence_length > start.model->info().default_context())
      throw InvalidArgument("{}: sequence_length is {}; {} has a context of {}", recipe_.path,
                            training_.sequence_length, start.config_path, start.model->info().default_context());
    return start;
  }

  void open_tokenizer(const models::Checkpoint& start) {
    const std::string path = recipe_.tokenizer.empty() ? tokenizer_beside(start) : recipe_.tokenizer;
    tokenizer_ = std::make_unique<io::Tokenizer>(io::Tokenizer::from_file(path));
    tokenizer_files_ = io::tokenizer_files(path);
    companions_ = tokenizer_files_;
    if (tokenizer_->vocab_size() > start.model->info().vocab)
      throw InvalidArgument("{}: the tokenizer has {} tokens; {} has a vocabulary of {}", tokenizer_->source(),
                            tokenizer_->vocab_size(), start.config_path, start.model->info().vocab);
    // A model's recommendations for generation remain valid after fine-tuning.
    if (start.weights != nullptr)
      if (auto generation = models::generation_config_of(start)) companions_.push_back(*std::move(generation));
  }

  int32_t eos_of(const models::Checkpoint& start) const {
    if (tokenizer_->eos()) return *tokenizer_->eos();
    if (const auto& ids = start.model->info().eos_token_ids; !ids.empty()) return static_cast<int32_t>(ids.front());
    throw InvalidArgument("{} and {} name no end-of-sequence token to end documents", tokenizer_->source(),
                          start.config_path);
  }

  void prepare_data(const models::Checkpoint& start) {
    if (first_) make_directory(folder("tokens"));
    const auto open = [&](const char* name, const Texts& texts) {
      return std::make_unique<TokenFile>(TokenFile::open_or_make((fs::path(folder("tokens")) / name).string(), texts,
                                                                 *tokenizer_, hash_of(tokenizer_files_), eos_of(start),
                                                                 [&](int64_t done, int64_t total) {
                                                                   if (first_ && options_.on_preparation)
                                                                     options_.on_preparation("tokenizing", done, total);
                                                                 }));
    };
    data_ = open("train.tok", recipe_.train);
    if (!recipe_.eval.files.empty()) eval_data_ = open("eval.tok", recipe_.eval);
    loader_ = std::make_unique<DataLoader>(*data_, training_.batch_tokens, training_.sequence_length, training_.seed);
  }

  void require_same_run(const FoundCheckpoint& found, const Identity& identity) const {
    std::vector<std::string> wrong = differences(found.state.identity, "the checkpoint", identity, recipe_.path);
    if (training_.decay_steps != found.state.decay_steps)
      wrong.push_back(fmt::format("training.decay_steps is {} in the checkpoint and {} in {}", found.state.decay_steps,
                                  training_.decay_steps, recipe_.path));
    if (!wrong.empty())
      throw InvalidArgument("'{}' belongs to another run: {}", found.directory, fmt::join(wrong, "; "));
    if (training_.steps < found.state.step)
      throw InvalidArgument("{}: training.steps is {}; '{}' stands at step {} already", recipe_.path, training_.steps,
                            found.directory, found.state.step);
  }

  void restore(const FoundCheckpoint& found) {
    load_checkpoint(*trainer_, found.directory, found.state);
    state_ = found.state;
    loader_->seek(state_.cursor);
    tell(fmt::format("going on from {}", found.directory));
    if (training_.steps > training_.decay_steps)
      tell(
          fmt::format("the schedule of the learning rate ends at step {}, as when the run began; steps behind it use "
                      "min_learning_rate {}",
                      training_.decay_steps, training_.min_learning_rate));
  }

  // Ranks of dp and ep take passes in turn; their losses are added in the order of the passes.
  double evaluate() {
    const Recipe::Training& t = training_;
    const int64_t ranks = pass_ranks(), rank = pass_rank();
    const int64_t first_of_dp = rank - options_.mesh.rank(MeshAxis::ep);
    std::vector<int64_t> own;  // of this rank's passes, the loss's bits and the number of labels
    int64_t passes = 0;
    Batch batch, kept;  // the latter: this rank's pass of the round that goes on, or the last one of its ranks of ep
    clear(batch), clear(kept);
    const auto end_round = [&] {
      if (kept.token_ids.empty()) return;
      const auto [loss, labels] = trainer_->evaluate(kept);  // all ranks of ep call it together, also for nothing
      own.push_back(std::bit_cast<int64_t>(loss));
      own.push_back(labels);
      clear(kept);
    };
    const auto flush = [&] {
      if (batch.token_ids.empty()) return;
      const int64_t place = passes++ % ranks;
      if (place >= first_of_dp && place <= rank) kept = batch;
      if (place == ranks - 1) end_round();
      clear(batch);
    };
    const int64_t longest = std::min(t.sequence_length, t.batch_tokens);  // piece of a document
    for (int64_t d = 0; d < eval_data_->num_documents(); ++d) {
      const std::span<const uint32_t> document = eval_data_->document(d);
      for (int64_t begin = 0; begin < static_cast<int64_t>(document.size()); begin += longest) {
        const int64_t end = std::min<int64_t>(static_cast<int64_t>(document.size()), begin + longest);
        if (static_cast<int64_t>(batch.token_ids.size()) + end - begin > t.batch_tokens) flush();
        append_piece(batch, document, begin, end);
      }
    }
    flush();
    end_round();
    const int64_t most = (passes + ranks - 1) / ranks;
    own.resize(static_cast<size_t>(2 * most));  // as many on every rank
    std::vector<int64_t> all = own;
    for (const MeshAxis axis : {MeshAxis::ep, MeshAxis::dp})
      all = gather_values(*options_.device, options_.mesh, axis, all);
    double total = 0;
    int64_t count = 0;
    for (int64_t pass = 0; pass < passes; ++pass) {
      const auto place = static_cast<size_t>(2 * (pass % ranks * most + pass / ranks));
      total += std::bit_cast<double>(all[place]) * static_cast<double>(all[place + 1]);
      count += all[place + 1];
    }
    return total / static_cast<double>(std::max<int64_t>(count, 1));
  }

  // Tokens per second over the last steps: an exponential mean in which a pause soon loses its weight.
  double speed(Clock::time_point step_start) {
    const double seconds = std::chrono::duration<double>(Clock::now() - step_start).count();
    const double now = static_cast<double>(training_.batch_tokens * training_.accumulation) / std::max(seconds, 1e-9);
    speed_ = speed_ == 0 ? now : 0.9 * speed_ + 0.1 * now;
    return speed_;
  }

  void write_plot() {
    if (first_)
      io::write_file_atomically(folder("loss.svg"), plot_svg(*metrics_, fs::path(recipe_.output).filename().string()));
  }

  const Recipe& recipe_;
  Recipe::Training training_;  // with decay_steps resolved
  const RunOptions& options_;
  bool first_;  // of the ranks: it has the metrics, and writes files
  std::optional<OutputLock> lock_;
  std::unique_ptr<io::Tokenizer> tokenizer_;
  std::vector<io::TokenizerFile> tokenizer_files_;
  Companions companions_;
  std::unique_ptr<Trainer> trainer_;
  std::unique_ptr<TokenFile> data_, eval_data_;
  std::unique_ptr<DataLoader> loader_;
  std::unique_ptr<Metrics> metrics_;
  RunState state_;
  double speed_ = 0;
};

}  // namespace

RunResult run(const Recipe& recipe, const RunOptions& options, const Logger& log) {
  return Run(recipe, options, log).train();
}

}  // namespace eadem::train
