// SPDX-License-Identifier: Apache-2.0
//
// InferEngine: a model on a device, with its KV cache. One call of `forward` is one step over the packed new tokens of
// some sequences. Scheduling, text and stop conditions are above it (engine/llm.h).
//
// One thread at a time may use an engine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "eadem/core/log.h"
#include "eadem/engine/cache_config.h"
#include "eadem/engine/cache_contents.h"
#include "eadem/engine/hook_registry.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/graphs.h"
#include "eadem/ops/sample.h"

namespace eadem::engine {

// Tensor parallelism: the devices of the ranks, one process each.
struct DistConfig {
  std::vector<int> tp_device_ids = {0};
  int tp_size() const { return static_cast<int>(tp_device_ids.size()); }
};

struct EngineOptions {
  CacheConfig cache = StaticKVCacheConfig{};
  DistConfig dist;
  HardwareMode mode = HardwareMode::performance;
  HardwareOverrides hardware;     // explicit arguments
  int64_t max_step_tokens = 512;  // new tokens of one step; longer prompts take several
  int64_t max_logit_rows = 0;     // rows of logits one step can give; 0: one per sequence
  std::vector<std::string> disabled_fusions;
  std::string pack_cache;  // a folder for pack files (models/pack_cache.h) of from_checkpoint; empty: none
  bool op_by_op = false;   // debug: no fusion, every value keeps its bytes; the same bits
};

// How one sequence's token is drawn in one step; greedy unless set. Penalties look at the sequence's tokens as the
// engine wrote them to the cache, and at those of the step.
using SamplingInput = kernels::SampleSettings;

// Bytes that a token's keys and values take in the caches of all layers.
int64_t kv_bytes_per_token(const models::ModelInfo& info, const modules::AutoHardwareConfig& hardware);
// Before there is an engine.
int64_t kv_bytes_per_token(const models::Checkpoint& checkpoint, const Device& device, const EngineOptions& options);

class InferEngine {
 public:
  // One step. Sequences are packed: the tokens of sequence i follow those of sequence i - 1.
  struct Input {
    std::vector<int32_t> input_ids;      // [tokens]
    std::vector<int32_t> input_lengths;  // [batch] new tokens of each sequence, >= 1
    std::vector<int32_t> cache_lengths;  // [batch] tokens already in the cache
    std::vector<int32_t> position_ids;   // [tokens]; empty: cache_length, cache_length + 1, …
    // [batch][blocks]: where each sequence's tokens are. Static cache: one row number each, or empty for 0, 1, …
    // Paged cache: blocks of positions [0, block_size), [block_size, …), each used once in a step; sequences may share
    // those that both have cached. Entries behind the last new token are not looked at.
    std::vector<std::vector<int32_t>> block_tables;
    std::vector<int64_t> slot_mapping;    // [tokens] block * block_size + offset; empty: from block_tables
    std::vector<SamplingInput> sampling;  // [batch]; empty: greedy
    // Logits of every token instead of each sequence's last. Penalties apply to the last one alone.
    bool all_logits = false;
    // [batch]; empty: zeros. 1: the sequence's prompt goes on in another step, so that it has no row of logits and
    // nothing is drawn. Not with all_logits.
    std::vector<uint8_t> unfinished;
  };
  struct Output {
    std::vector<int32_t> output_ids;  // per logit row, in the order of sequences; -1: the row's logits are not finite
    std::vector<float> logprobs;      // of output_ids
  };

  // Without weights: load_param each of state_dict's names, or use from_checkpoint.
  InferEngine(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device, const EngineOptions& options,
              const modules::ModelSpec& spec);
  // Opens, compiles, loads. `progress` as in models::load_weights; `log` takes the warnings of a pack cache. Parameters
  // may lie in the checkpoint's mapped files from then on.
  static std::unique_ptr<InferEngine> from_checkpoint(const models::Checkpoint& checkpoint,
                                                      std::shared_ptr<Device> device, const EngineOptions& options,
                                                      const std::function<void(int64_t, int64_t)>& progress = {},
                                                      const Logger& log = Logger());

  // Throws NotFound or InvalidArgument naming both shapes. Each rank keeps its part.
  void load_param(const std::string& name, const TensorView& whole);
  // As models::load_random.
  void load_random(uint64_t seed, double stddev = 0.02, const std::function<void(int64_t, int64_t)>& progress = {}) {
    models::load_random(*parameters_, seed, stddev, progress);
  }
  // This rank's parameters, on the host.
  std::vector<std::pair<std::string, Tensor>> state_dict() const;
  std::vector<std::string> parameter_names() const { return parameters_->names(); }

  // Throws InvalidArgument, naming the sequence and both values, for an input that contradicts itself, the model or the
  // cache (tokens that nobody wrote, a block that two sequences use); nothing has changed then. Returns a reference
  // that the next call overwrites. Allocates nothing once the vectors of `input` have reached their size. Throws
  // Cancelled once `cancel` is set (with one rank; from any thread), between two kernels: the cache then holds the
  // cached tokens of each sequence and none behind them; the step may be run again.
  const Output& forward(const Input& input, const std::atomic<bool>* cancel = nullptr);
  // What the last step made: [logit_rows, vocab] f32 and [tokens, hidden], copied to the host.
  Tensor logits() const;
  Tensor hidden_states() const;

  // Empties the cache, or makes another one. Parameters stay. A configuration that contradicts the model is refused and
  // changes nothing; when there is no memory for it the engine is left without a cache and refuses steps until another
  // call succeeds.
  void reset_cache();
  void reset_cache(const CacheConfig& config);

  HookRegistry& hooks() { return hooks_; }

  const models::Model& model() const { return *model_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  const EngineOptions& options() const { return options_; }
  const modules::AutoHardwareConfig& hardware() const { return hardware_; }
  const pipeline::ParameterStore& parameters() const { return *parameters_; }
  // Cache geometry. Static: num_blocks is the batch size and block_size the length.
  const modules::CacheSpec& cache_spec() const { return cache_; }
  int64_t max_batch_size() const { return max_batch_; }
  int64_t max_sequence_length() const { return max_length_; }
  int64_t cache_bytes() const;
  // The compiled programs, for `explain`: steps of few tokens, and steps of up to max_step_tokens.
  const pipeline::Program& decode_program() const { return *decode_->program; }
  const pipeline::Program& prefill_program() const { return *prefill_->program; }
  const std::vector<Decision>& factory_decisions() const { return factory_decisions_; }

  // Compiles the program that the engine would run, for the same bounds, without running it, so that a device that
  // lacks kernels can be explained. Throws nothing for missing kernels.
  static std::unique_ptr<pipeline::Program> compile_for_explain(const models::Model& model,
                                                                std::shared_ptr<Device> device,
                                                                const EngineOptions& options,
                                                                const modules::ModelSpec& spec, bool decode);

 private:
  // A program and the handles of its inputs and outputs.
  struct Compiled {
    std::unique_ptr<pipeline::Program> program;
    pipeline::ValueId token_ids, positions, query_start, kv_length, block_table, slots, logit_rows;
    pipeline::ValueId sample_rows, penalties;
    pipeline::ValueId hidden, logits, token, logprob;
  };

  void plan_cache();
  void compile();
  std::unique_ptr<Compiled> compile_bucket(const SymbolValues& bounds);
  void bind_caches(pipeline::Program& program);
  void require_cache() const;
  void check(const Input& input);
  void check_sizes(const Input& input) const;
  void check_sequence(const Input& input, size_t sequence, int64_t first) const;
  void check_sampling(const Input& input) const;
  void stage(const Input& input);
  void stage_penalties(std::span<const int32_t> blocks, int64_t cached, std::span<const int32_t> tokens,
                       kernels::SampleRow& row);
  // The blocks of a checked input's sequence that hold its tokens.
  std::span<const int32_t> blocks_of(const Input& input, size_t sequence) const;
  void name_values();

  std::shared_ptr<const models::Model> model_;
  std::shared_ptr<Device> device_;
  EngineOptions options_;
  modules::AutoHardwareConfig hardware_;
  std::shared_ptr<pipeline::ParameterStore> parameters_;
  modules::CacheSpec cache_;
  int64_t max_batch_ = 0;
  int64_t max_length_ = 0;
  std::map<std::string, Tensor> caches_;
  CacheContents contents_;
  std::vector<int32_t> identity_;  // 0, 1, …: the rows of a static cache
  std::unique_ptr<Compiled> prefill_, decode_;
  const Compiled* last_ = nullptr;
  bool all_loaded_ = false;  // every parameter was: asked at the first step
  std::vector<Decision> factory_decisions_;
  HookRegistry hooks_;

  // Host copies of a step's inputs; sized at the bounds.
  struct Staging {
    std::vector<int32_t> positions, query_start, kv_length, block_table, logit_rows;
    std::vector<int64_t> slots;
    std::vector<kernels::SampleRow> sample_rows;
    std::vector<int32_t> penalties;      // pairs
    std::vector<int32_t> pair_of_token;  // [vocab] where the row's pair of a token is, or -1
  };
  Staging staging_;
  SymbolValues symbols_;
  Output output_;
};

}  // namespace eadem::engine
