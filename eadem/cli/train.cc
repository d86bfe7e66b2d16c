// SPDX-License-Identifier: Apache-2.0
//
// eadem train: trains a model from a recipe.
#include "eadem/train/train.h"

#include <cmath>
#include <memory>

#include "eadem/cli/commands.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/stop_and_save.h"
#include "eadem/cli/terminal.h"
#include "eadem/distributed/forked_mesh.h"

namespace eadem::cli {

namespace {

// Without a terminal, a line is printed at most this often.
constexpr std::chrono::seconds kLineInterval(10);

// Starts the processes of --dp, --tp, --pp and --ep after the first, which train as it does; null for one. No device
// may be open yet.
std::unique_ptr<distributed::ForkedMesh> start_ranks(const ModelOptions& options, const train::Recipe& recipe,
                                                     bool resume) {
  if (options.ranks() == 1) return nullptr;
  const MeshShape shape{.dp = static_cast<int>(options.data_ranks),
                        .tp = static_cast<int>(options.tensor_ranks),
                        .pp = static_cast<int>(options.stages),
                        .ep = static_cast<int>(options.expert_ranks)};
  return std::make_unique<distributed::ForkedMesh>(shape, [&options, &recipe, resume](const Mesh& mesh, int rank) {
    train::RunOptions own;
    own.device = options.open(rank);
    own.mesh = mesh;
    own.resume = resume;
    train::run(recipe, own, Logger(LogLevel::off));
  });
}

std::string processes_text(const ModelOptions& options) {
  if (options.ranks() == 1) return "";
  return fmt::format(", the first of {} processes (dp {} x tp {} x pp {}{})", options.ranks(), options.data_ranks,
                     options.tensor_ranks, options.stages,
                     options.expert_ranks == 1 ? "" : fmt::format(" x ep {}", options.expert_ranks));
}

}  // namespace

int train(CommandLine command_line) {
  ModelOptions options;
  std::string path;
  bool resume = false;
  Arguments arguments(
      "train",
      "Trains or fine-tunes a model as a recipe says. Checkpoints, metrics as JSON lines, a plot of the "
      "loss and the finished model go to the recipe's output directory.");
  arguments.operand("RECIPE.toml", path, "what to train, on what, and how");
  arguments.flag("--resume", resume, "go on from the newest checkpoint; the result is the same to the bit");
  options.add_device(arguments);
  options.add_training_ranks(arguments);
  arguments.note(
      "Ctrl-C, SIGTERM or a closed terminal saves a checkpoint after the current step and exits 130. Without --resume, "
      "an output directory that holds checkpoints is refused; with it, the recipe must mean the same: only steps, "
      "intervals, keep_checkpoints and the output directory may change. A run whose steps are done is extended by more "
      "steps and --resume, on any number of processes. When it is done, the directory of the model is printed to "
      "stdout. docs/train.md describes "
      "recipes.");
  arguments.example("eadem train assets/stories/recipe.toml", "the bundled model, from scratch");
  arguments.example("eadem train recipe.toml --resume", "after Ctrl-C or a crash");
  arguments.example("eadem train recipe.toml --dp 2 --resume",
                    "the same on two processes, each with half of the passes of a step");
  if (!arguments.parse(command_line)) return kOk;
  options.check_training_ranks();

  const std::atomic<bool>& stop = listen_for_stop_and_save();
  const train::Recipe recipe = train::load_recipe(path);
  const std::unique_ptr<distributed::ForkedMesh> ranks = start_ranks(options, recipe, resume);

  ProgressBar bar("training");
  std::optional<ProgressBar> preparing;
  auto last_line = std::chrono::steady_clock::now() - kLineInterval;
  train::RunOptions run_options;
  run_options.device = options.open();
  if (ranks != nullptr) run_options.mesh = ranks->mesh();
  run_options.resume = resume;
  run_options.cancel = &stop;
  run_options.on_preparation = [&](const char* what, int64_t done, int64_t total) {
    if (stop) throw Cancelled("interrupted");
    if (!preparing) preparing.emplace(what);
    preparing->update(static_cast<double>(done), static_cast<double>(total));
  };
  run_options.on_note = [&](const std::string& sentence) {
    preparing.reset();
    note("{}", sentence);
  };
  run_options.on_step = [&](const train::Progress& progress) {
    preparing.reset();
    const std::string state =
        fmt::format("step {}/{}  loss {:.4f}  {} tokens/s  {} left", progress.step, progress.steps, progress.loss,
                    count_text(progress.tokens_per_second), seconds_text(progress.seconds_left));
    if (!std::isnan(progress.eval_loss)) {
      bar.clear();
      note("{}  eval loss {:.4f}, perplexity {:.2f}", state, progress.eval_loss, std::exp(progress.eval_loss));
    } else if (const auto now = std::chrono::steady_clock::now();
               !stderr_is_terminal() && now - last_line >= kLineInterval) {
      last_line = now;
      note("{}", state);
    }
    bar.update(static_cast<double>(progress.step), static_cast<double>(progress.steps), state);
  };
  note("training {} on {}{}", recipe.path, run_options.device->description(), processes_text(options));
  const train::RunResult result = train::run(recipe, run_options, cli_logger());
  preparing.reset();
  bar.clear();
  if (result.cancelled) {
    note("stopped after step {} of {}; a checkpoint is saved: `eadem train {} --resume` goes on", result.steps,
         recipe.training.steps, path);
    return kInterrupted;
  }
  note("step {} done{}{}", result.steps, std::isnan(result.loss) ? "" : fmt::format(", loss {:.4f}", result.loss),
       std::isnan(result.eval_loss)
           ? ""
           : fmt::format(", eval loss {:.4f}, perplexity {:.2f}", result.eval_loss, std::exp(result.eval_loss)));
  print(result.model_directory + "\n");
  return kOk;
}

}  // namespace eadem::cli
