// SPDX-License-Identifier: Apache-2.0
//
// Property ring of training: a run that was killed and resumed continues with the same bits; nothing is lost when a
// checkpoint cannot be written.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <fstream>

#include "eadem/train/checkpoint.h"
#include "eadem/train/identity.h"
#include "eadem/train/metrics.h"
#include "tests/train/run_fixture.h"

namespace eadem::train {
namespace {

TEST_F(TrainingRun, LearnsAndWritesEverything) {
  const Recipe r = recipe("out", "f32");
  std::vector<Progress> seen;
  RunOptions o = options();
  o.on_step = [&](const Progress& p) { seen.push_back(p); };
  const RunResult result = run(r, o);
  ASSERT_EQ(seen.size(), 12u);
  EXPECT_LT(seen.back().loss, seen.front().loss);
  EXPECT_FALSE(std::isnan(seen[3].eval_loss));
  EXPECT_TRUE(std::isnan(seen[4].eval_loss));
  const fs::path output(r.output);
  for (const char* file : {"final/config.json", "final/model.safetensors", "final/tokenizer.json",
                           "final/generation_config.json", "metrics.jsonl", "loss.svg"})
    EXPECT_TRUE(fs::exists(output / file)) << file;
  EXPECT_FALSE(fs::exists(output / "checkpoints/step_00000003")) << "only the newest are kept";
  EXPECT_TRUE(fs::exists(output / "checkpoints/step_00000012/optimizer.safetensors"));
  // The final model is the last checkpoint's.
  EXPECT_EQ(model_hash(r), io::sha256_hex_of_file((output / "checkpoints/step_00000012/model.safetensors").string()));
  EXPECT_NO_THROW(models::open_checkpoint(result.model_directory));
}

// Pieces of a document are as long as a pass allows, and none is left out between them.
TEST_F(TrainingRun, EvaluatesEveryTokenOfADocument) {
  const auto first_eval = [&](const std::string& name, int64_t batch_tokens, int64_t sequence_length) {
    Recipe r = recipe(name, "f32", "learning_rate = 1e-9\nmin_learning_rate = 0", 4);
    r.training.batch_tokens = batch_tokens, r.training.sequence_length = sequence_length;
    double loss = 0;
    RunOptions o = options();
    o.on_step = [&](const Progress& p) { loss = p.eval_loss; };
    run(r, o);
    return loss;
  };
  // The weights are the same but for four steps of at most 1e-9 each.
  EXPECT_NEAR(first_eval("short", 8, 8), first_eval("long", 8, 24), 1e-6);
}

TEST_F(TrainingRun, ThreadsDoNotChangeBits) {
  const Recipe one = recipe("one", "f32"), three = recipe("three", "f32");
  run(one, options(1));
  run(three, options(3));
  EXPECT_EQ(model_hash(one), model_hash(three));
}

// kill -9 at different steps, in the middle of whatever it was doing; then resume.
TEST_F(TrainingRun, ResumesBitForBitAfterKill) {
  for (const char* weights : {"f32", "bf16"}) {
    const Recipe whole = recipe(std::string("whole_") + weights, weights);
    run(whole, options());
    for (int64_t kill_at : {1, 5, 10}) {
      const Recipe cut = recipe(fmt::format("cut_{}_{}", weights, kill_at), weights);
      const pid_t child = fork();
      if (child == 0) {
        RunOptions o = options();
        o.on_step = [&](const Progress& p) {
          if (p.step == kill_at) kill(getpid(), SIGKILL);
        };
        run(cut, o);
        _exit(0);
      }
      int status = 0;
      waitpid(child, &status, 0);
      ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      int64_t first = 0;
      RunOptions o = options();
      o.on_step = [&](const Progress& p) { first = first == 0 ? p.step : first; };
      run(cut, o);
      EXPECT_EQ(first, kill_at / 3 * 3 + 1) << "resumed from the newest checkpoint";
      EXPECT_EQ(model_hash(whole), model_hash(cut)) << weights << " killed at step " << kill_at;
      // The history reads as if nothing had happened.
      int lines = 0;
      std::ifstream metrics(fs::path(cut.output) / "metrics.jsonl");
      for (std::string line; std::getline(metrics, line);) ++lines;
      EXPECT_EQ(lines, 12 + 3);
    }
  }
}

TEST_F(TrainingRun, AnUnfinishedCheckpointIsNeverRead) {
  const Recipe r = recipe("out", "f32");
  run_until(r, 6);
  const fs::path unfinished = fs::path(r.output) / "checkpoints/.unfinished_step_00000008";
  fs::create_directories(unfinished);
  EXPECT_EQ(first_step_of_rest(r), 7);
  EXPECT_FALSE(fs::exists(unfinished)) << "what a killed run left is removed";
}

// A file system that refuses to write (here: a file that may not grow) leaves the earlier checkpoint whole.
TEST_F(TrainingRun, AFullDiskLeavesTheOldCheckpoint) {
  const Recipe r = recipe("out", "f32");
  std::atomic<bool> cancel{false};
  RunOptions o = options();
  o.cancel = &cancel;
  o.on_step = [&](const Progress& p) { cancel = p.step == 3; };
  run(r, o);
  const pid_t child = fork();
  if (child == 0) {
    // Files may not pass 8 KB: writes fail with EFBIG where a full disk gives ENOSPC.
    signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{8192, 8192};
    setrlimit(RLIMIT_FSIZE, &limit);
    try {
      run(r, options());
    } catch (const IoError& error) {
      const std::string message = error.what();
      _exit(message.find("checkpoints") != std::string::npos && message.find("File too large") != std::string::npos
                ? 42
                : 43);
    } catch (...) {
      _exit(44);
    }
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 42);
  const fs::path checkpoints = fs::path(r.output) / "checkpoints";
  EXPECT_EQ(newest_checkpoint(checkpoints.string(), Logger())->directory, (checkpoints / "step_00000003").string());
  EXPECT_NO_THROW(run(r, options())) << "continues from it";
}

TEST_F(TrainingRun, RecipesAreChecked) {
  const auto refused = [&](const std::string& extra, const std::string& part) {
    try {
      recipe("out", "f32", extra);
      ADD_FAILURE() << "accepted: " << extra;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  };
  refused("learning_rat = 1", "learning_rat");
  refused("learning_rate = -1.0", "learning_rate");
  refused("seed = \"x\"", "seed");
  refused("router_aux_loss_coef = -0.1", "router_aux_loss_coef");
  refused("products = \"fp8\"", "products");
  refused("head_products = \"fp8_block128\"", "head_products");
  refused("min_learning_rate = 1.0", "min_learning_rate");
  refused("[surprise]\nx = 1", "surprise");
  refused("steps = 5", "toml");  // twice: a syntax error with the line
  EXPECT_THROW(load_recipe((root_ / "absent.toml").string()), NotFound);
}

// The config's and the recipe's are the same for resuming, and 0 is what there is without either.
TEST_F(TrainingRun, TheLoadBalancingLossIsOfARunsIdentityAndMetrics) {
  const Recipe plain = recipe("out", "f32"), off = recipe("out", "f32", "router_aux_loss_coef = 0"),
               stated = recipe("out", "f32", "router_aux_loss_coef = 0.5");
  EXPECT_FALSE(plain.training.router_aux_loss_coef);
  const io::JsonValue silent = io::JsonValue::object();
  io::JsonValue asks = io::JsonValue::object();
  asks.set("output_router_logits", true).set("router_aux_loss_coef", 0.5);
  EXPECT_EQ(identity_of(plain, asks, {}), identity_of(stated, silent, {}));
  EXPECT_EQ(identity_of(off, asks, {}), identity_of(plain, silent, {}));
  EXPECT_NE(identity_of(plain, asks, {}), identity_of(plain, silent, {}));

  const std::string path = (root_ / "balanced.jsonl").string();
  Metrics(path, 0).add(StepMetrics{1, 3.0, 1e-3, 1.0, 64, 10.0, 2.5});
  Metrics(path, 1).add(StepMetrics{2, 3.0, 1e-3, 1.0, 128, 10.0});
  const Metrics read(path, 2);
  ASSERT_EQ(read.steps().size(), 2u);
  EXPECT_EQ(read.steps()[0].load_balancing_loss, 2.5);
  EXPECT_FALSE(read.steps()[1].load_balancing_loss);
}

}  // namespace
}  // namespace eadem::train
