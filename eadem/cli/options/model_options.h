// SPDX-License-Identifier: Apache-2.0
//
// The options that every command with a model shares: the model, the device and the precision.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eadem/cli/options/arguments.h"
#include "eadem/core/log.h"
#include "eadem/distributed/launched_ranks.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/engine/speculation/speculation_options.h"

namespace eadem::cli {

struct ModelOptions {
  std::optional<std::string> model;
  std::string device = "cpu";
  int64_t threads = 0, prefill_threads = 0;
  int64_t tensor_ranks = 1, expert_ranks = 1;  // of serving one is 1
  int64_t data_ranks = 1, stages = 1;          // of training
  std::optional<distributed::Launch> launch;   // by mpirun; then it says which tensor ranks there are
  bool deterministic_across_tp = false;
  bool no_pin = false;
  std::string isa;
  std::string mode = "performance";
  std::string dtype, weights, activations, matmul_input, kv_dtype, latent_form;
  std::vector<std::string> disabled_fusions;
  std::string pack_cache;
  std::string speculate = "none";
  std::optional<int64_t> draft_tokens;

  void add_operand(Arguments& arguments);
  void add_device(Arguments& arguments);          // --device --threads … --isa
  void add_ranks(Arguments& arguments);           // --tp, --ep and --deterministic-across-tp, after add_device
  void add_training_ranks(Arguments& arguments);  // --dp, --tp, --pp and --ep, after add_device
  void add_kv_dtype(Arguments& arguments);        // --kv-dtype alone
  void add_precision(Arguments& arguments);       // --mode --dtype … --disable-fusion
  void add_loading(Arguments& arguments);         // --pack-cache
  void add_speculation(Arguments& arguments);     // --speculate --draft-tokens

  // Throws UsageError for a --tp or --ep that contradicts the other, the device or the threads. From here on a process
  // that follows rank 0 reads and writes nothing: rank 0 says what went wrong on any.
  void check_ranks() const;
  // Likewise for --dp, --tp and --pp, which multiply.
  void check_training_ranks() const;
  int64_t ranks() const { return data_ranks * tensor_ranks * stages * expert_ranks; }
  bool follows() const { return launch && launch->rank > 0; }
  // Throws UsageError for options of speculation that contradict themselves or several ranks.
  void check_speculation() const;
  // What --speculate says, with the path of its model. Throws as resolve_model does.
  engine::SpeculationOptions speculation() const;
  DeviceOptions device_options() const;  // the CPU's options
  // Opens the device of a rank, and binds this process to that rank's processors. Once in a
  // process.
  std::shared_ptr<Device> open(int rank = 0) const;
  HardwareMode hardware_mode() const;
  // Mode, precisions, fusions and the pack cache; the rest is left at its defaults.
  engine::EngineOptions engine_options() const;

 private:
  void require_threads_for_ranks(const std::string& own) const;
};

inline constexpr std::string_view kBundledModel = "stories", kBundledChatModel = "chat";

// Returns the path of a model that models::locate_model finds, or, without a name, of the model `bundled`. What was
// taken is said on stderr, unless it is an existing path or a bundled model by its name. Throws as locate_model
// does.
std::string resolve_model(const std::optional<std::string>& model, std::string_view bundled = kBundledModel);

// Opens a model that is described, not run. `model` is as for resolve_model() and models::open_checkpoint(), or a
// config.json alone, which leaves `weights` null.
models::Checkpoint open_described(const std::optional<std::string>& model);

// Prints warnings of the engine on stderr in the program's format.
Logger cli_logger();

}  // namespace eadem::cli
