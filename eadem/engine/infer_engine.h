// SPDX-License-Identifier: Apache-2.0
//
// InferEngine: a model on a device, with its KV cache. One call of `forward` is one step over the packed new tokens of
// some sequences. Scheduling, text and stop conditions belong to the layers above (engine/llm.h).
//
// Several ranks (EngineOptions::ranks) have an engine each, with its part of the parameters and, over tp, of the cache.
// That of rank 0 is used as one of one rank; it tells the others, which run follow(), what to do. Every rank samples
// from whole logits and knows every token. When a rank fails, calls throw RankFailed, and the engines are of no use any
// more.
//
// One thread at a time may use an engine.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "eadem/core/log.h"
#include "eadem/engine/cache/cache_config.h"
#include "eadem/engine/cache/cache_contents.h"
#include "eadem/engine/cache/cache_plan.h"
#include "eadem/engine/cache/sequence_states.h"
#include "eadem/engine/cache/window_contents.h"
#include "eadem/engine/cache/window_rings.h"
#include "eadem/engine/hook_registry.h"
#include "eadem/engine/program_set.h"
#include "eadem/engine/rank_channel.h"
#include "eadem/engine/scheduler.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/graphs.h"

namespace eadem::engine {

struct EngineOptions {
  CacheConfig cache = StaticKVCacheConfig{};
  // The ranks that divide the model, as this one sees them; null: one rank. They compute on the CPU, and their other
  // options are the same.
  std::shared_ptr<Communicator> ranks;
  // What they divide: tp, large matrices and caches, or ep, the experts alone. Over ep the bits are those of one rank.
  MeshAxis divide = MeshAxis::tp;
  // Whether every number of tensor-parallel ranks that models::same_bits_on() lists, one included, gives the same bits.
  // They differ from the bits of one rank without the option. CPU only.
  bool deterministic_across_tp = false;
  HardwareMode mode = HardwareMode::performance;
  HardwareOverrides hardware;  // explicit arguments
  int64_t max_num_batched_tokens =
      0;                       // most new tokens of one step; longer prompts take several; 0: default_step_tokens
  int64_t max_logit_rows = 0;  // most rows of logits of one step; 0: one per sequence
  // Most proposed tokens of a sequence in a step (speculation); 0: none. Else states per sequence have a second copy,
  // so that steps may begin again where an earlier one did (StepSequence::may_return).
  int64_t draft_tokens = 0;
  std::vector<std::string> disabled_fusions;
  std::string pack_cache;  // a folder for pack files (models/pack_cache.h) of from_checkpoint; empty: none
  // from_checkpoint: the first step, if it is short, multiplies by weights as their file stores them, and the next one
  // packs them. For those who wait for the first token; it comes sooner, and the second one later. The same bits.
  // Without effect with a pack cache and on several ranks.
  bool pack_after_first_step = false;
  bool op_by_op = false;  // debug: no fusion, every value keeps its bytes; the same bits

  int num_ranks() const { return ranks == nullptr ? 1 : ranks->size(); }
  int rank() const { return ranks == nullptr ? 0 : ranks->rank(); }
  Mesh mesh() const { return num_ranks() == 1 ? Mesh() : Mesh(divide, ranks); }
};

// As many new tokens of a step as a device computes at its best speed: 512 on a CPU, 2048 on others.
int64_t default_step_tokens(const Device& device);

// Bytes of what the layers of a model keep of a sequence on tensor-parallel rank `rank` of `num_ranks`.
StateBytes state_bytes(const models::Model& model, const Device& device, const modules::AutoHardwareConfig& hardware,
                       int num_ranks = 1, int rank = 0);
// The request that plans the cache of an engine which does not exist yet.
CachePlanRequest cache_request(const models::Checkpoint& checkpoint, const Device& device,
                               const EngineOptions& options);
// Bytes that one token takes in all layers, as long as no window has passed it.
int64_t kv_bytes_per_token(const models::Checkpoint& checkpoint, const Device& device, const EngineOptions& options);

class InferEngine {
 public:
  // One step. Sequences are packed: the tokens of sequence i follow those of sequence i - 1.
  struct Input {
    std::vector<int32_t> input_ids;      // [tokens]
    std::vector<int32_t> input_lengths;  // [batch] number of new tokens of each sequence, >= 1
    std::vector<int32_t> cache_lengths;  // [batch] number of tokens already in the cache
    // [tokens] what the model takes for each token's position, within its context; empty: cache_length, cache_length +
    // 1, … Which tokens it attends to follows from its place in the sequence alone.
    std::vector<int32_t> position_ids;
    // [batch][blocks]: where each sequence's tokens are stored. Static cache: one row number each, or empty for 0, 1, …
    // Paged cache: the blocks of positions [0, block_size), [block_size, …). A step uses a block only once, except that
    // sequences may share blocks that they all have cached. Entries after the last new token are ignored.
    std::vector<std::vector<int32_t>> block_tables;
    // [batch]; a paged cache of a model with windows or states per sequence: which of max_batch_size rows keeps those
    // of each sequence, from its first step to its last; empty: 0, 1, … A row's windows are a ring of blocks with room
    // for its share of max_num_batched_tokens.
    std::vector<int32_t> rows;
    // [tokens] where each token is stored: block * block_size + offset; empty: from block_tables. Its blocks follow
    // those that block_tables name, which may end with the cached tokens, or be empty where there are none. In a static
    // cache, row * max_cache_len + place.
    std::vector<int64_t> slot_mapping;
    std::vector<SamplingInput> sampling;  // [batch]; empty: greedy
    // Compute the logits of every token instead of each sequence's last one. Penalties apply only to the last one.
    bool all_logits = false;
    // [batch]; empty: zeros. 1: the sequence's prompt continues in another step, so it gets no row of logits and no
    // token is sampled. Not allowed with all_logits.
    std::vector<uint8_t> unfinished;
  };
  struct Output {
    std::vector<int32_t> output_ids;  // per logit row, in the order of sequences; -1: the row's logits are not finite
    std::vector<float> logprobs;      // of output_ids
    // [rows, kernels::kMostTopLogprobs]; empty unless some row has top_logprobs. As the outputs of ops::Sample.
    std::vector<int32_t> top_tokens;
    std::vector<float> top_logprobs;
  };

  // Makes an engine without weights: call load_param for each name of state_dict, or use from_checkpoint.
  // With several ranks, all of them make one, and each throws what went wrong on any. Throws OutOfMemory, before
  // anything is allocated, with a plan of the memory that it needs where that is more than is free.
  InferEngine(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device, const EngineOptions& options,
              const modules::ModelSpec& spec);
  ~InferEngine();  // of rank 0: ends follow() of the others
  // Opens the checkpoint, compiles the model and loads the weights. `progress` is as in models::load_weights; `log`
  // receives the warnings of a pack cache. Parameters may stay in the checkpoint's mapped files.
  static std::unique_ptr<InferEngine> from_checkpoint(const models::Checkpoint& checkpoint,
                                                      std::shared_ptr<Device> device, const EngineOptions& options,
                                                      const std::function<void(int64_t, int64_t)>& progress = {},
                                                      const Logger& log = Logger());

  // Runs what the engine of rank 0 runs, until that one is destroyed. For ranks 1, 2, …; see also follow_engines().
  void follow();

  // Sets a parameter from the whole tensor; each rank keeps its part. Later requests and conversations reuse nothing
  // that earlier ones left in the cache. Throws NotFound, or InvalidArgument naming both shapes.
  void load_param(const std::string& name, const TensorView& whole);
  // Sets random parameters as models::load_random does; what load_param says of the cache holds here too.
  void load_random(uint64_t seed, double stddev = 0.02, const std::function<void(int64_t, int64_t)>& progress = {});
  // Copies this rank's parameters to the host.
  using StateDict = std::vector<std::pair<std::string, Tensor>>;
  StateDict state_dict() const;
  // Rank 0: those of every rank, in the order of ranks; and whole parameters.
  std::vector<StateDict> state_dict_by_rank();
  StateDict whole_state_dict();
  std::vector<std::string> parameter_names() const { return parameters_->names(); }

  // Runs one step. Throws InvalidArgument, naming the sequence and both values, for an input that contradicts itself,
  // the model or the cache (tokens that nobody wrote, a block that two sequences use); the engine is unchanged then.
  // Returns a reference that the next call overwrites. Allocates nothing once the vectors of `input` have reached their
  // size. Throws Cancelled between two kernels once `cancel` is set (from any thread). The cache then holds only the
  // cached tokens of each sequence, and the step may be run again; states per sequence are lost. Several ranks do not
  // end a step that has begun: they look at `cancel` before it.
  const Output& forward(const Input& input, const std::atomic<bool>* cancel = nullptr);
  // Runs a step that a scheduler planned for this engine; the rest as above.
  const Output& forward(std::span<const StepSequence> plan, const std::atomic<bool>* cancel = nullptr);
  // The halves of a step: `submit` checks it and gives it to the device, `collect` returns the result of the oldest
  // step that was not collected. A step may be submitted before the step before it was collected; its sequences may
  // then name rows of that step for their tokens (StepSequence::row), whose tokens the host has not seen. Throw as
  // forward() does; submit throws InvalidArgument when kMostSubmitted steps wait already, and forward() when any does.
  static constexpr int kMostSubmitted = 8;
  void submit(std::span<const StepSequence> plan, const std::atomic<bool>* cancel = nullptr);
  const Output& collect();
  // Waits for the steps that were submitted and forgets their results.
  void discard_submitted();
  int num_waiting() const { return static_cast<int>(num_submitted_ - num_collected_); }
  // The engine's limits, which a scheduler needs, and the tokens that its cache holds.
  SchedulerLimits limits() const;
  const CacheContents& cache_contents() const { return contents_; }
  // Results of the last step, copied to the host: logits [logit_rows, vocab] f32 and hidden states [tokens, hidden].
  Tensor logits() const;
  Tensor hidden_states() const;
  // What the input previous_hidden of models::MtpModel reads of each token: hidden states, or, with hyper-connections,
  // [tokens, streams, hidden].
  Tensor mtp_hidden() const;

  // Empties the cache, or replaces it by another one. Parameters stay. A configuration that contradicts the model is
  // refused and changes nothing. When memory does not suffice for the new cache, the engine is left without one and
  // refuses steps until another call succeeds.
  void reset_cache();
  void reset_cache(const CacheConfig& config);

  HookRegistry& hooks() { return hooks_; }
  // Switches off the fusions that keep the values inside their kernels that match `pattern`, where no value that is
  // written does, so that a hook can see them. The programs are compiled again, with the same bits, and the cache is
  // emptied. Throws Unsupported where the parameters are not there in the layout that an op of its own reads; nothing
  // has changed then.
  void unfuse(const std::string& pattern);

  const models::Model& model() const { return *model_; }
  const std::shared_ptr<Device>& device() const { return device_; }
  const EngineOptions& options() const { return options_; }
  const modules::AutoHardwareConfig& hardware() const { return hardware_; }
  const pipeline::ParameterStore& parameters() const { return *parameters_; }
  // The cache's geometry. In a static cache, num_blocks is the batch size and block_size the length.
  const modules::CacheSpec& cache_spec() const { return plan_.spec; }
  int64_t max_batch_size() const { return plan_.max_batch; }
  int64_t max_sequence_length() const { return plan_.max_length; }
  int64_t cache_bytes() const;
  // Whether requests begin with blocks that others have computed; why_no_prefix_caching() says when they do not.
  bool reuses_prefixes() const;
  // Why no step leads back to where it began, as proposed tokens want it, for people; empty: it does.
  std::string why_no_return() const;
  // The states per sequence, to be copied and restored between steps. Throws Unsupported where they are divided over
  // several ranks.
  SequenceStates& sequence_states();
  // How often inputs were sent to the device so far: once a step.
  int64_t num_uploads() const { return descriptor_->num_uploads(); }
  // The compiled programs.
  const ProgramSet& programs() const { return *programs_; }
  const pipeline::Program& decode_program() const { return *programs_->decode().program; }
  const pipeline::Program& prefill_program() const { return *programs_->prefill().program; }
  const std::vector<Decision>& factory_decisions() const { return factory_decisions_; }

  // Compiles the programs that the engine would run, without running them, so that `explain` can describe a device that
  // lacks kernels. Missing kernels are no error here.
  static ProgramSet compile_for_explain(const models::Model& model, const std::shared_ptr<Device>& device,
                                        const EngineOptions& options, const modules::ModelSpec& spec);

 private:
  using Plan = std::span<const StepSequence>;
  using Tables = std::vector<std::vector<int32_t>>;
  // A step that was given to the device and not collected.
  struct InFlight {
    std::unique_ptr<Event> done;
    Buffer host;  // see HostResults
    int64_t rows = 0;
    bool has_top = false;
    std::vector<std::pair<int64_t, int64_t>> unseen;  // (slot, row): tokens that the cache got from the step before
  };

  // Results of a step on the host, with room for the most rows of logits.
  struct HostResults {
    int32_t* tokens;
    float* logprobs;
    int32_t* top_tokens;  // [rows, kMostTopLogprobs], like the next
    float* top_logprobs;
    static constexpr int64_t kBytesPerRow = 8 + 8 * kernels::kMostTopLogprobs;
  };

  InferEngine(std::shared_ptr<const models::Model> model, std::shared_ptr<Device> device, const EngineOptions& options,
              const modules::ModelSpec& spec, bool maps_files);
  bool leads() const { return channel_ != nullptr && channel_->rank() == 0; }
  void together(const char* what, const std::function<void()>& task);
  void load_weights(const models::Checkpoint& checkpoint, const std::function<void(int64_t, int64_t)>& progress,
                    const Logger& log);
  void tell_step(Plan plan, const StepProgram& program);
  void tell_param(const std::string& name, const TensorView& whole);
  void tell_hooks();
  void follow_step();
  void follow_param();
  void show_parameters();
  void disable_fusions(const std::vector<std::string>& names);
  void compile();
  void require_memory_for(std::span<pipeline::Program* const> programs, std::span<const modules::StateSpec> states,
                          int64_t free_bytes) const;
  void bind_caches(pipeline::Program& program);
  void collect_sequence_states(std::span<const modules::StateSpec> states);
  void require_cache() const;
  void require_collected() const;
  void check_sizes(const Input& input) const;
  void make_sequences(const Input& input);
  void follow_slots(const Input& input, size_t index, std::span<const int64_t> slots);
  int32_t row_of(const Input& input, const Tables& tables, size_t index) const;
  std::span<const std::vector<int32_t>> window_tables(const Input& input, const Tables& tables, size_t index);
  void check(Plan plan, bool all_logits);
  void check_sequence(size_t index, const StepSequence& sequence) const;
  void check_sampling(Plan plan) const;
  void check_scored(size_t index, const StepSequence& sequence) const;
  void check_drafts(size_t index, const StepSequence& sequence) const;
  void check_follows(size_t index, const StepSequence& sequence) const;
  const StepProgram& program_for(Plan plan, bool all_logits, int64_t tokens, int64_t logit_rows);
  void submit_step(Plan plan, bool all_logits, const std::atomic<bool>* cancel);
  HostResults host_results(InFlight& step) const;
  void collect_processed(Plan plan);
  void process(const StepProgram& program, const pipeline::Node& node, std::span<const TensorView> outputs);
  void run_program(const StepProgram& program, const std::atomic<bool>* cancel);
  void before_writing(Plan plan);
  void after_writing(Plan plan, InFlight& step);
  void fill_in_tokens(const InFlight& step);
  InFlight& in_flight(int64_t number) { return steps_[static_cast<size_t>(number % kMostSubmitted)]; }
  int64_t max_penalized_tokens() const;
  SequenceStates::Preparation state_preparation(const StepSequence& sequence) const;
  void name_values();

  std::shared_ptr<const models::Model> model_;
  std::shared_ptr<Device> device_;
  EngineOptions options_;
  bool maps_files_ = false;               // parameters may stay in the files of a checkpoint
  std::unique_ptr<RankChannel> channel_;  // null: one rank
  modules::AutoHardwareConfig hardware_;
  std::shared_ptr<pipeline::ParameterStore> parameters_;
  CachePlan plan_;
  std::map<std::string, Tensor> caches_;
  CacheContents contents_;
  std::vector<WindowContents> window_contents_;  // of groups 1, 2, …
  WindowRings rings_;
  SequenceStates sequence_states_;
  std::vector<int32_t> identity_;  // 0, 1, …: the rows of a static cache
  std::unique_ptr<ProgramSet> programs_;
  const StepProgram* last_ = nullptr;  // the program of the last step
  int64_t last_tokens_ = 0, last_rows_ = 0;
  bool all_loaded_ = false;  // every parameter is loaded; checked at the first step
  std::vector<Decision> factory_decisions_;
  HookRegistry hooks_;

  std::unique_ptr<StepDescriptor> descriptor_;
  Buffer sampled_;                                 // the tokens of the last step, on the device
  std::array<InFlight, kMostSubmitted> steps_;     // used in turn
  bool stepped_ = false;                           // some step has been submitted since the engine was made
  int64_t num_submitted_ = 0, num_collected_ = 0;  // the steps between them are in flight
  std::vector<StepSequence> sequences_;            // of an Input
  Tables tables_;                                  // their blocks, where an Input has a slot_mapping
  // Rows of logits of the step that have a processor.
  std::vector<std::pair<int64_t, const StepSequence*>> processed_;
  Output output_;
};

// The whole life of a rank other than 0: makes an engine with the cache and the draft_tokens that rank 0 states
// whenever that makes one, and follows it. Ends with RankFailed when rank 0 has left. `make` gives the engine these
// `ranks`.
void follow_engines(
    const std::shared_ptr<Communicator>& ranks, const std::shared_ptr<Device>& device,
    const std::function<std::unique_ptr<InferEngine>(const CacheConfig& cache, int64_t draft_tokens)>& make);

}  // namespace eadem::engine
