// SPDX-License-Identifier: Apache-2.0
//
// Declarations that the binding sources share. Each bind_* adds one subject to the extension module eadem._eadem; the
// package in python/eadem defines the public classes on top of it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/core/error.h"
#include "eadem/core/tensor.h"
#include "eadem/distributed/spawned_ranks.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/models/config/model_config.h"
#include "eadem/python/gil.h"

namespace eadem::python {

namespace nb = nanobind;

void bind_errors(nb::module_& m);
void bind_config(nb::module_& m);
void bind_engine(nb::module_& m);
void bind_ranks(nb::module_& m);
void bind_llm(nb::module_& m);
void bind_chat(nb::module_& m);
void bind_convert(nb::module_& m);
void bind_sequential(nb::module_& m);
void bind_trainer(nb::module_& m);

// A floating-point host array of any framework; uint16 means the bits of bf16. A strided array arrives as a copy.
using HostArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
template <typename T>
using HostList = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Returns a view of the array's bytes, valid as long as the array. Throws InvalidArgument, naming `name`, for a dtype
// that Eadem does not have.
TensorView view_of(const HostArray& array, const std::string& name);
// Returns a NumPy array over the tensor's bytes, which it keeps alive. bf16 becomes ml_dtypes.bfloat16, or uint16 bits
// if that module is not installed.
nb::object to_numpy(const Tensor& tensor);
nb::dict to_numpy_dict(const std::vector<std::pair<std::string, Tensor>>& tensors);

template <typename T>
std::vector<T> to_vector(const HostList<T>& list) {
  return {list.data(), list.data() + list.size()};
}

// The arguments that every class with a device and a model takes.
std::shared_ptr<Device> open(const std::string& device, int64_t threads, const std::string& isa,
                             int64_t prefill_threads = 0, bool pin = true);
std::optional<DType> dtype_argument(const char* name, const std::optional<std::string>& value);

// The ranks along each axis of a mesh; of tensor parallelism their devices.
struct DistConfig {
  std::vector<int> tp_device_ids = {0};
  bool deterministic_across_tp = false;
  int dp_size = 1, pp_size = 1, ep_size = 1;
  int tp_size() const { return static_cast<int>(tp_device_ids.size()); }
  MeshShape shape() const { return {.dp = dp_size, .tp = tp_size(), .pp = pp_size, .ep = ep_size}; }
};
// From the keywords that eadem._arguments.dist() makes.
DistConfig dist_argument(const nb::kwargs& keywords);

struct EngineArguments {
  // The model: a checkpoint, or a configuration.
  std::string path;                           // empty: a configuration
  std::optional<models::ModelConfig> config;  // else of the text
  std::string config_text;                    // of a config.json

  std::string device = "cpu";
  int64_t threads = 0, prefill_threads = 0;
  bool pin = true;
  std::string isa;
  std::optional<engine::CacheConfig> cache;
  DistConfig dist;
  std::string mode;
  std::optional<std::string> weights, activations, matmul_input, kv_dtype;
  int64_t max_num_batched_tokens = 0;
  int64_t max_logit_rows = 0;
  std::vector<std::string> disabled_fusions;
  std::optional<std::string> pack_cache = std::nullopt;
};
// All but `cache` and `config`, from the keywords that eadem._arguments.engine() makes.
EngineArguments engine_arguments(const nb::kwargs& keywords);
engine::EngineOptions engine_options(const EngineArguments& arguments);

// The ranks of an engine, of which this process is rank 0. They must outlive the engine.
class RanksOfRank0 {
 public:
  // Starts the processes of the others, if there are any, which run `program`, and opens this one's device. Throws
  // InvalidArgument or Unsupported for what cannot be divided.
  RanksOfRank0(const EngineArguments& arguments, const models::ModelInfo& info,
               const std::vector<std::string>& program);

  const std::shared_ptr<Device>& device() const { return device_; }
  engine::EngineOptions options(const EngineArguments& arguments) const;
  // The processes of ranks 1, 2, …
  std::vector<pid_t> processes() const {
    return processes_ == nullptr ? std::vector<pid_t>() : processes_->processes();
  }

 private:
  std::unique_ptr<distributed::SpawnedRanks> processes_;  // null: one rank
  std::shared_ptr<Device> device_;
};

struct RankedEngine {
  std::unique_ptr<RanksOfRank0> ranks;
  std::unique_ptr<engine::InferEngine> engine;
};
RankedEngine make_ranked_engine(const EngineArguments& arguments, const std::vector<std::string>& program);

// Throws InvalidArgument or Unsupported for ranks that a device cannot have, or that have fewer threads than one each.
void check_ranks(const DistConfig& dist, const std::string& device, int64_t threads, int64_t prefill_threads = 0);

// The processors that the calling thread may use, as they were.
class KeepsProcessors {
 public:
  KeepsProcessors();
  ~KeepsProcessors();
  KeepsProcessors(const KeepsProcessors&) = delete;
  KeepsProcessors& operator=(const KeepsProcessors&) = delete;

 private:
  std::vector<int> processors_;
};

// Returns a logger whose messages go to Python's logger "eadem".
Logger python_logger();

// Runs long calls without the GIL and one at a time: other threads wait. A call from inside a callback of this object
// would wait for itself, so it throws InvalidArgument.
class Exclusive {
 public:
  template <typename F>
  auto run(F&& call) {
    const GilRelease release;
    const Turn turn(*this);
    return call();
  }

 private:
  class Turn {
   public:
    explicit Turn(Exclusive& object) : object_(object) {
      if (object.owner_.load() == std::this_thread::get_id())
        throw InvalidArgument("an object was called from inside one of its own callbacks");
      object.mutex_.lock();
      object.owner_ = std::this_thread::get_id();
    }
    ~Turn() {
      object_.owner_ = std::thread::id();
      object_.mutex_.unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    Exclusive& object_;
  };

  std::mutex mutex_;
  std::atomic<std::thread::id> owner_{};
};

}  // namespace eadem::python
