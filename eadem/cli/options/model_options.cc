// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/options/model_options.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "eadem/cli/terminal.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/core/machine/rank_processors.h"
#include "eadem/models/locator/model_locator.h"

namespace eadem::cli {

namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kActivationDtypes = {"f32", "bf16"};
const std::vector<std::string> kDtypes = {"f32", "bf16", "f16"};
const std::vector<std::string> kKvTypes = {"f32", "bf16", "f16", "int8", "fp8_e4m3"};

// The folders where bundled models may be: beside the build of a source tree, in an installation, or in that tree.
std::vector<std::string> asset_folders() {
  std::vector<fs::path> folders;
  std::error_code error;
  const fs::path program = fs::read_symlink("/proc/self/exe", error);
  if (!error) {
    folders.push_back(program.parent_path() / "../../../assets");
    folders.push_back(program.parent_path() / "../share/eadem/assets");
  }
  folders.emplace_back(EADEM_ASSETS_DIR);
  std::vector<std::string> distinct;
  for (const fs::path& folder : folders)
    if (const std::string normal = folder.lexically_normal().string();
        std::find(distinct.begin(), distinct.end(), normal) == distinct.end())
      distinct.push_back(normal);
  return distinct;
}

void leave_terminal() {
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  if (nothing < 0) throw IoError("/dev/null: {}", std::strerror(errno));
  for (const int standard : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) dup2(nothing, standard);
  close(nothing);
}

constexpr int64_t kMostRanks = 64;

void require_rank_count(const char* name, int64_t count) {
  if (count < 1 || count > kMostRanks)
    throw UsageError(fmt::format("{} is {}; expected 1 to {}", name, count, kMostRanks));
}

// The dtype of option `flag`, else that of --dtype, which sets every precision at once.
Override<DType> dtype_of_option(const char* flag, const std::string& value, const std::string& common) {
  return value.empty() ? Override<DType>(dtype_from_name(common), "--dtype")
                       : Override<DType>(dtype_from_name(value), flag);
}

}  // namespace

void ModelOptions::add_operand(Arguments& arguments) {
  arguments.operand("MODEL", model,
                    "a directory in Hugging Face layout, a .safetensors with its config.json beside it, a .gguf, a "
                    "bundled name, or the name of a model in a cache of this machine: ORG/NAME[:TAG][@REVISION] of "
                    "Hugging Face or llama.cpp, NAME[:TAG] of Ollama; without one, the bundled model",
                    "-m,--model");
}

void ModelOptions::add_device(Arguments& arguments) {
  arguments.section("Device");
  arguments.option("--device", "D", device, "cpu, cuda, cuda:1 or reference (default: cpu)");
  arguments.option("-t,--threads", "N", threads,
                   "CPU threads; 0 is one per core, within the quota of a container (default: 0)");
  arguments.option("--prefill-threads", "N", prefill_threads,
                   "CPU threads of steps of many tokens; 0 is as many as --threads (default: 0)");
  arguments.flag("--no-pin", no_pin, "leave CPU threads to the scheduler, and memory where it falls");
  arguments.choice("--isa",
                   {"amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "sse4", "scalar", "neon_dotprod", "neon"},
                   isa, "CPU instruction set of the kernels (default: the best there is)");
}

void ModelOptions::add_ranks(Arguments& arguments) {
  launch = distributed::launch_of_this_process();
  if (launch) tensor_ranks = launch->size;
  arguments.option("--tp", "N", tensor_ranks,
                   "divide the model over N processes of this machine (tensor parallelism), on the CPU; the threads of "
                   "--threads and --prefill-threads are divided among them, as evenly as goes (default: 1, or the "
                   "processes that mpirun has started)");
  arguments.option("--ep", "N", expert_ranks,
                   "divide the experts of a model over N processes of this machine (expert parallelism), with the rest "
                   "in each of them; threads as with --tp. The bits are those of one process (default: 1)");
  arguments.flag(
      "--deterministic-across-tp", deterministic_across_tp,
      "give the same bits for every number of --tp up to 4, one included, whose bits are others than without "
      "this; on the CPU. Products take a little longer, and ranks exchange up to three times as much");
}

void ModelOptions::add_training_ranks(Arguments& arguments) {
  arguments.option(
      "--dp", "N", data_ranks,
      "divide the passes of each step over N processes of this machine (data parallelism), on the CPU; the "
      "recipe's accumulation must be a multiple of N. The steps stay what they are, and the optimizer's "
      "states are divided; the threads of --threads are divided among the processes (default: 1)");
  arguments.option("--tp", "N", tensor_ranks,
                   "divide the matrices of the model over N processes (tensor parallelism), with --dp over N for each "
                   "of its ranks (default: 1)");
  arguments.option(
      "--pp", "N", stages,
      "divide the layers of the model over N processes (pipeline parallelism), with --dp and --tp likewise; "
      "each process works on N passes of a step at a time, so that accumulation should be a multiple of N "
      "times that of --dp (default: 1)");
  arguments.option(
      "--ep", "N", expert_ranks,
      "divide the experts of the model over N processes (expert parallelism), with --dp, --tp and --pp likewise; they "
      "divide the passes of a step as those of --dp do, and accumulation must be a multiple of both (default: 1)");
}

void ModelOptions::check_training_ranks() const {
  require_rank_count("--dp", data_ranks);
  require_rank_count("--tp", tensor_ranks);
  require_rank_count("--pp", stages);
  require_rank_count("--ep", expert_ranks);
  std::string own;
  for (const auto& [name, count] :
       {std::pair{"--dp", data_ranks}, {"--tp", tensor_ranks}, {"--pp", stages}, {"--ep", expert_ranks}})
    if (count > 1) own += fmt::format("{}{} {}", own.empty() ? "" : " ", name, count);
  if (ranks() > kMostRanks)
    throw UsageError(fmt::format("{} make {} processes; expected at most {}", own, ranks(), kMostRanks));
  if (ranks() > 1) require_threads_for_ranks(own);
}

void ModelOptions::check_ranks() const {
  require_rank_count("--tp", tensor_ranks);
  require_rank_count("--ep", expert_ranks);
  if (launch && launch->size > 1 && expert_ranks > 1)
    throw UsageError(fmt::format("--ep is {}; the {} processes that mpirun has started divide tensors (--tp)",
                                 expert_ranks, launch->size));
  if (tensor_ranks > 1 && expert_ranks > 1)
    throw UsageError(fmt::format("--tp is {} and --ep is {}; the processes divide either", tensor_ranks, expert_ranks));
  if (launch && launch->size != ranks())
    throw UsageError(fmt::format("{} is {}; mpirun has started {} processes", expert_ranks > 1 ? "--ep" : "--tp",
                                 ranks(), launch->size));
  if (deterministic_across_tp && device != "cpu")
    throw UsageError(fmt::format("--deterministic-across-tp is for the CPU; --device is {}", device));
  if (ranks() == 1) return;
  require_threads_for_ranks(fmt::format("{} {}", tensor_ranks > 1 ? "--tp" : "--ep", ranks()));
  if (follows()) leave_terminal();
}

// `own`: the options that ask for several ranks.
void ModelOptions::require_threads_for_ranks(const std::string& own) const {
  if (device != "cpu") throw UsageError(fmt::format("{} is for the CPU; --device is {}", own, device));
  const auto enough = [&](const char* name, int64_t count) {
    if (count != 0 && count < ranks())
      throw UsageError(fmt::format("{} is {}; {} needs at least one for each rank", name, count, own));
  };
  enough("--threads", threads);
  enough("--prefill-threads", prefill_threads);
}

void ModelOptions::add_kv_dtype(Arguments& arguments) {
  arguments.choice("--kv-dtype", kKvTypes, kv_dtype, "of the KV cache");
}

void ModelOptions::add_precision(Arguments& arguments) {
  arguments.section("Precision and speed");
  arguments.choice("--mode", {"performance", "accuracy"}, mode, "what defaults are tuned for (default: performance)");
  arguments.choice("--dtype", kActivationDtypes, dtype, "of weights, activations and KV cache at once");
  arguments.choice("--weights", kDtypes, weights, "of weights (default: as the checkpoint stores them)");
  arguments.choice("--activations", kActivationDtypes, activations, "of activations");
  arguments.choice("--matmul-input", {"f32", "bf16", "int8"}, matmul_input,
                   "the narrowest type to which products may round activations (default: int8; accuracy: f32)");
  add_kv_dtype(arguments);
  arguments.choice("--latent-form", {"absorbed", "decompressed"}, latent_form,
                   "how latent attention computes the tokens of prompts; decompressed is faster for long ones, and its "
                   "bits are not those of training (default: absorbed)");
  arguments.list("--disable-fusion", "NAME", disabled_fusions,
                 "switch a fusion off by the name that `eadem explain` shows, or `all`; may be repeated");
}

void ModelOptions::add_loading(Arguments& arguments) {
  arguments.section("Loading");
  arguments.option("--pack-cache", "DIR", pack_cache,
                   "keep the weights as the CPU's kernels want them in a file in DIR, which later loads map instead of "
                   "packing: for a short wait before the first token. Takes about as much disk as the model, for each "
                   "set of precisions; the first load waits until it is written; decoding is a tenth slower or more, "
                   "because a file's pages are small");
}

void ModelOptions::add_speculation(Arguments& arguments) {
  arguments.section("Speculation");
  arguments.option(
      "--speculate", "WHAT", speculate,
      "let steps compute proposed tokens beside their own: an answer takes fewer steps, and stays the same. "
      "lookup proposes what followed the last tokens where they stood before; a MODEL with the same "
      "tokenizer, what it samples; mtp, what the model's own head for multi-token prediction samples, where the "
      "files have one; none nothing (default: none)");
  arguments.option(
      "--draft-tokens", "N", draft_tokens,
      "tokens to propose at most in a step, 1 to 15; of them as many as pay, which is measured (default: 8)");
}

void ModelOptions::check_speculation() const {
  if (draft_tokens && speculate == "none") throw UsageError("--draft-tokens is for --speculate, which is none");
  try {
    static_cast<void>(engine::SpeculationOptions::of(speculate, draft_tokens.value_or(8)));
  } catch (const Error& error) {
    throw UsageError(fmt::format("--speculate {}: {}", speculate, error.what()));
  }
}

engine::SpeculationOptions ModelOptions::speculation() const {
  engine::SpeculationOptions options = engine::SpeculationOptions::of(speculate, draft_tokens.value_or(8));
  if (!options.model.empty()) options.model = resolve_model(options.model);
  return options;
}

DeviceOptions ModelOptions::device_options() const {
  const auto in_range = [](const char* name, int64_t value) {
    if (value < 0 || value > 4096) throw UsageError(fmt::format("{} is {}; expected 0 to 4096", name, value));
    return static_cast<int>(value);
  };
  return {.num_threads = in_range("--threads", threads),
          .prefill_threads = in_range("--prefill-threads", prefill_threads),
          .pin = !no_pin,
          .isa = isa};
}

std::shared_ptr<Device> ModelOptions::open(int rank) const {
  DeviceOptions options = device_options();
  if (ranks() > 1) {
    const RankThreads own = rank_threads(Topology::of_this_process(), options.num_threads, options.prefill_threads,
                                         static_cast<int>(ranks()), rank);
    options.num_threads = own.decode;
    options.prefill_threads = own.prefill;
    if (options.pin) bind_to_processors(own.processors);
  }
  if (device != "cpu" && (threads != 0 || prefill_threads != 0 || no_pin || !isa.empty()))
    throw UsageError(
        fmt::format("--threads, --prefill-threads, --no-pin and --isa are for the CPU; --device is {}", device));
  if (device != "cpu" && !pack_cache.empty())
    throw UsageError(fmt::format("--pack-cache is for the CPU; --device is {}", device));
  return open_device(device, options);
}

HardwareMode ModelOptions::hardware_mode() const { return hardware_mode_from_name(mode); }

engine::EngineOptions ModelOptions::engine_options() const {
  engine::EngineOptions options;
  options.mode = hardware_mode();
  options.hardware.weights = dtype_of_option("--weights", weights, dtype);
  options.hardware.activations = dtype_of_option("--activations", activations, dtype);
  if (!matmul_input.empty()) options.hardware.matmul_input = {matmul_input_from_name(matmul_input), "--matmul-input"};
  options.hardware.kv_cache = kv_dtype.empty() ? Override<WeightType>(kv_cache_type(dtype), "--dtype")
                                               : Override<WeightType>(kv_cache_type(kv_dtype), "--kv-dtype");
  if (!latent_form.empty()) options.hardware.latent_form = {latent_form_from_name(latent_form), "--latent-form"};
  options.disabled_fusions = disabled_fusions;
  options.pack_cache = pack_cache;
  options.divide = expert_ranks > 1 ? MeshAxis::ep : MeshAxis::tp;
  options.deterministic_across_tp = deterministic_across_tp;
  return options;
}

std::string resolve_model(const std::optional<std::string>& model, std::string_view bundled) {
  models::ModelFolders folders = models::ModelFolders::from_environment();
  folders.bundled = asset_folders();
  if (!model) {
    const std::optional<std::string> path = models::find_bundled(std::string(bundled), folders);
    if (!path)
      throw NotFound("no MODEL given, and the bundled model '{}' is not installed (looked in {})", bundled,
                     fmt::join(folders.bundled, ", "));
    note("no MODEL given: using the bundled model '{}' ({})", bundled, *path);
    return *path;
  }
  if (model->empty()) throw UsageError("MODEL is empty");
  const models::LocatedModel located = models::locate_model(*model, folders);
  if (!located.notice.empty()) note("{}", located.notice);
  return located.path;
}

models::Checkpoint open_described(const std::optional<std::string>& model) {
  const std::string path = resolve_model(model);
  const bool config_alone = fs::path(path).extension() == ".json" && !path.ends_with(".index.json");
  return config_alone ? models::open_config(path) : models::open_checkpoint(path);
}

Logger cli_logger() {
  return Logger(LogLevel::warning, [](LogLevel level, std::string_view message) {
    note("{}{}", level >= LogLevel::warning ? "warning: " : "", message);
  });
}

}  // namespace eadem::cli
