// SPDX-License-Identifier: Apache-2.0
//
// The options that every command with a model shares: which model, on what, in which precision.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "eadem/cli/arguments.h"
#include "eadem/core/log.h"
#include "eadem/engine/infer_engine.h"

namespace eadem::cli {

struct ModelOptions {
  std::optional<std::string> model;
  std::string device = "cpu";
  int64_t threads = 0, prefill_threads = 0;
  bool no_pin = false;
  std::string isa;
  std::string mode = "performance";
  std::string dtype, weights, activations, kv_dtype;
  std::vector<std::string> disabled_fusions;
  std::string pack_cache;

  void add_operand(Arguments& arguments);
  void add_device(Arguments& arguments);     // --device --threads … --isa
  void add_kv_dtype(Arguments& arguments);   // --kv-dtype alone
  void add_precision(Arguments& arguments);  // --mode --dtype … --disable-fusion
  void add_loading(Arguments& arguments);    // --pack-cache

  DeviceOptions device_options() const;  // of a CPU
  std::shared_ptr<Device> open() const;
  HardwareMode hardware_mode() const;
  // Mode, precisions, fusions and the pack cache; the rest is left at its defaults.
  engine::EngineOptions engine_options() const;
};

inline constexpr std::string_view kBundledModel = "stories";

// The path of a model: an existing path as it is, the name of a bundled model, or, without one, the bundled model
// (which is said on stderr). Throws NotFound saying what was looked for.
std::string resolve_model(const std::optional<std::string>& model);

// A model that is described, not run: as resolve_model() and models::open_checkpoint() take it, or a config.json alone,
// which leaves `weights` null.
models::Checkpoint open_described(const std::optional<std::string>& model);

// Warnings of the engine on stderr, in our form.
Logger cli_logger();

}  // namespace eadem::cli
