// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstring>
#include <map>
#include <utility>

#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/models/decoders/decoder.h"
#include "eadem/models/huggingface.h"
#include "eadem/models/locator/model_locator.h"
#include "eadem/python/binding.h"

namespace eadem::python {

using namespace nb::literals;

namespace {

void bind_parallelism_and_caches(nb::module_& m) {
  // Returns the path of the model, and what a user should read about where it was found.
  m.def(
      "locate_model",
      [](const std::string& text, const std::string& bundled) {
        const GilRelease release;
        models::ModelFolders folders = models::ModelFolders::from_environment();
        if (!bundled.empty()) folders.bundled = {bundled};
        models::LocatedModel located = models::locate_model(text, folders);
        return std::pair(std::move(located.path), std::move(located.notice));
      },
      "text"_a, "bundled"_a);

  const auto check_devices = [](const std::vector<int>& ids) {
    if (ids.empty() || ids.size() > 1024)
      throw InvalidArgument("tp_device_ids has {} devices; expected 1 to 1024", ids.size());
  };
  const auto make = [](std::vector<int> tp_device_ids, bool deterministic_across_tp, int dp, int pp, int ep) {
    for (const auto& [name, size] : {std::pair{"dp_size", dp}, {"pp_size", pp}, {"ep_size", ep}})
      if (size < 1 || size > 1024) throw InvalidArgument("{} is {}; expected 1 to 1024", name, size);
    return DistConfig{std::move(tp_device_ids), deterministic_across_tp, dp, pp, ep};
  };
  nb::class_<DistConfig>(
      m, "DistConfig",
      "The ranks of a mesh. Engines have ranks of tensor parallelism (tp_size, or the devices of each) or of expert "
      "parallelism (ep_size); a Trainer has these, of data (dp_size) and of pipeline parallelism (pp_size), whose "
      "numbers "
      "multiply. With `deterministic_across_tp` every number of ranks of an engine up to 4 gives the same bits, one "
      "included, whose bits are others than without it.")
      .def(
          "__init__",
          [make](DistConfig* self, int tp_size, bool deterministic_across_tp, int dp_size, int pp_size, int ep_size) {
            if (tp_size < 1 || tp_size > 1024) throw InvalidArgument("tp_size is {}; expected 1 to 1024", tp_size);
            std::vector<int> ids;
            for (int id = 0; id < tp_size; ++id) ids.push_back(id);
            new (self) DistConfig(make(std::move(ids), deterministic_across_tp, dp_size, pp_size, ep_size));
          },
          "tp_size"_a = 1, "deterministic_across_tp"_a = false, nb::kw_only(), "dp_size"_a = 1, "pp_size"_a = 1,
          "ep_size"_a = 1)
      .def(
          "__init__",
          [make, check_devices](DistConfig* self, std::vector<int> ids, bool deterministic_across_tp, int dp_size,
                                int pp_size, int ep_size) {
            check_devices(ids);
            new (self) DistConfig(make(std::move(ids), deterministic_across_tp, dp_size, pp_size, ep_size));
          },
          "tp_device_ids"_a, "deterministic_across_tp"_a = false, nb::kw_only(), "dp_size"_a = 1, "pp_size"_a = 1,
          "ep_size"_a = 1)
      .def_prop_rw(
          "tp_device_ids", [](const DistConfig& self) { return self.tp_device_ids; },
          [check_devices](DistConfig& self, std::vector<int> ids) {
            check_devices(ids);
            self.tp_device_ids = std::move(ids);
          })
      .def_rw("deterministic_across_tp", &DistConfig::deterministic_across_tp)
      .def_ro("dp_size", &DistConfig::dp_size)
      .def_ro("pp_size", &DistConfig::pp_size)
      .def_ro("ep_size", &DistConfig::ep_size)
      .def_prop_ro("tp_size", &DistConfig::tp_size)
      .def_prop_ro(
          "num_ranks", [](const DistConfig& self) { return self.shape().num_ranks(); }, "Of all axes together.");

  nb::class_<engine::StaticKVCacheConfig>(
      m, "StaticKVCacheConfig",
      "Contiguous memory for `max_batch_size` sequences of up to `max_cache_len` tokens (0: the model's context).")
      .def(
          "__init__",
          [](engine::StaticKVCacheConfig* self, int64_t batch, int64_t length) {
            new (self) engine::StaticKVCacheConfig{batch, length};
          },
          "max_batch_size"_a = 1, "max_cache_len"_a = 0)
      .def_ro("max_batch_size", &engine::StaticKVCacheConfig::max_batch_size)
      .def_ro("max_cache_len", &engine::StaticKVCacheConfig::max_cache_len);
  nb::class_<engine::PagedKVCacheConfig>(
      m, "PagedKVCacheConfig",
      "Blocks of `block_size` tokens (0: what the hardware configuration says) out of `max_kv_memory_bytes` (0: enough "
      "for all sequences), for steps of up to `max_batch_size` sequences of up to `max_cache_len` tokens (0: the "
      "model's context, as far as the memory goes). With `prefix_caching` a request begins with the blocks that hold "
      "its first tokens, whichever requests computed them, where the model has no windows. Of a model with states per "
      "sequence it keeps `state_snapshots` copies of these at borders of blocks (0: two for each of max_batch_size "
      "sequences, as far as they take no more memory than the blocks).")
      .def(
          "__init__",
          [](engine::PagedKVCacheConfig* self, int64_t bytes, int64_t block, int64_t batch, int64_t length,
             bool prefix_caching, int64_t state_snapshots) {
            new (self) engine::PagedKVCacheConfig{bytes, block, batch, length, prefix_caching, state_snapshots};
          },
          "max_kv_memory_bytes"_a = 0, "block_size"_a = 0, "max_batch_size"_a = 8, "max_cache_len"_a = 0,
          "prefix_caching"_a = true, "state_snapshots"_a = 0)
      .def_ro("max_kv_memory_bytes", &engine::PagedKVCacheConfig::max_kv_memory_bytes)
      .def_ro("block_size", &engine::PagedKVCacheConfig::block_size)
      .def_ro("max_batch_size", &engine::PagedKVCacheConfig::max_batch_size)
      .def_ro("max_cache_len", &engine::PagedKVCacheConfig::max_cache_len)
      .def_ro("prefix_caching", &engine::PagedKVCacheConfig::prefix_caching)
      .def_ro("state_snapshots", &engine::PagedKVCacheConfig::state_snapshots);
}

// A Python function that may be copied and destroyed on any thread.
using SharedCallable = std::shared_ptr<nb::callable>;

SharedCallable share(nb::callable function) {
  return {new nb::callable(std::move(function)), [](nb::callable* p) {
            const GilAcquire acquire;
            delete p;
          }};
}

// An engine behind its lock.
class Engine {
 public:
  explicit Engine(RankedEngine made) : ranks_(std::move(made.ranks)), engine_(std::move(made.engine)) {}
  ~Engine() {
    if (ranks_->processes().empty()) return;
    const GilRelease release;  // other ranks take a moment to end
    engine_.reset();
    ranks_.reset();
  }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  std::vector<pid_t> rank_processes() const { return ranks_->processes(); }

  template <typename F>
  auto run(F&& call) {
    return exclusive_.run([&] { return call(*engine_); });
  }

  // The functions that the engine's hooks call. The garbage collector needs them, because one may refer to the engine.
  // Access needs the GIL.
  std::map<engine::HookRegistry::HookId, SharedCallable> hook_functions;

  static int traverse(PyObject* object, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(object));
    if (!nb::inst_ready(object)) return 0;
    for (const auto& [id, function] : nb::inst_ptr<Engine>(object)->hook_functions) Py_VISIT(function->ptr());
    return 0;
  }
  // Python calls this when the engine is garbage: nothing uses it any more.
  static int clear(PyObject* object) {
    if (!nb::inst_ready(object)) return 0;
    auto* self = nb::inst_ptr<Engine>(object);
    self->engine_->hooks().clear();
    const auto dropped = std::exchange(self->hook_functions, {});
    return 0;
  }

 private:
  Exclusive exclusive_;
  std::unique_ptr<RanksOfRank0> ranks_;
  std::unique_ptr<engine::InferEngine> engine_;
};

const PyType_Slot kEngineSlots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&Engine::traverse)},
                                    {Py_tp_clear, reinterpret_cast<void*>(&Engine::clear)},
                                    {0, nullptr}};

// Calls a Python function with a copy of the tensor, so that the function may keep it.
engine::HookRegistry::Callback hook_of(SharedCallable shared) {
  return [shared](const std::string& name, const TensorView& tensor, int layer) {
    if (!tensor.is_contiguous() || tensor.encoding != nullptr)
      throw Unsupported("hook on '{}': {} is not a plain contiguous tensor", name, to_string(tensor));
    const Tensor copy = Tensor::on_host(tensor.dtype, tensor.shape);
    std::memcpy(copy.view.data, tensor.data, static_cast<size_t>(tensor.size_bytes()));
    const GilAcquire acquire;
    (*shared)(name, to_numpy(copy), layer);
  };
}

nb::tuple forward(Engine& self, const HostList<int32_t>& input_ids, const HostList<int32_t>& input_lengths,
                  const HostList<int32_t>& cache_lengths, const HostList<int32_t>& position_ids,
                  std::vector<std::vector<int32_t>> block_tables, const HostList<int32_t>& rows,
                  const HostList<int64_t>& slot_mapping, const HostList<uint8_t>& sampling, bool all_logits,
                  bool with_logits, bool with_hidden) {
  const size_t batch = input_lengths.size();
  if (sampling.size() != batch * sizeof(engine::SamplingInput))
    throw InvalidArgument("the sampling parameters have {} bytes; {} sequences need {}", sampling.size(), batch,
                          batch * sizeof(engine::SamplingInput));
  engine::InferEngine::Input input;
  input.input_ids = to_vector(input_ids);
  input.input_lengths = to_vector(input_lengths);
  input.cache_lengths = to_vector(cache_lengths);
  input.position_ids = to_vector(position_ids);
  input.block_tables = std::move(block_tables);
  input.rows = to_vector(rows);
  input.slot_mapping = to_vector(slot_mapping);
  input.sampling.resize(batch);
  std::memcpy(input.sampling.data(), sampling.data(), sampling.size());
  input.all_logits = all_logits;
  Tensor ids, logprobs, top_ids, top_logprobs, logits, hidden;
  self.run([&](engine::InferEngine& engine) {
    const engine::InferEngine::Output& output = engine.forward(input, call_cancel());
    const auto rows = static_cast<int64_t>(output.output_ids.size());
    ids = Tensor::on_host(DType::i32, Shape{rows});
    logprobs = Tensor::on_host(DType::f32, Shape{rows});
    std::copy(output.output_ids.begin(), output.output_ids.end(), ids.view.as<int32_t>());
    std::copy(output.logprobs.begin(), output.logprobs.end(), logprobs.view.as<float>());
    if (!output.top_tokens.empty()) {
      const Shape shape{rows, kernels::kMostTopLogprobs};
      top_ids = Tensor::on_host(DType::i32, shape);
      top_logprobs = Tensor::on_host(DType::f32, shape);
      std::copy(output.top_tokens.begin(), output.top_tokens.end(), top_ids.view.as<int32_t>());
      std::copy(output.top_logprobs.begin(), output.top_logprobs.end(), top_logprobs.view.as<float>());
    }
    if (with_logits) logits = engine.logits();
    if (with_hidden) hidden = engine.hidden_states();
  });
  return nb::make_tuple(to_numpy(ids), to_numpy(logprobs), top_ids.defined() ? to_numpy(top_ids) : nb::none(),
                        top_ids.defined() ? to_numpy(top_logprobs) : nb::none(),
                        with_logits ? to_numpy(logits) : nb::none(), with_hidden ? to_numpy(hidden) : nb::none());
}

// `source` is the path of the checkpoint that the engine was made from, if any.
void save_pretrained(engine::InferEngine& engine, const std::string& path, const std::optional<std::string>& source,
                     const std::optional<std::string>& tokenizer) {
  engine.parameters().require_all_loaded("save_pretrained");
  models::Checkpoint checkpoint;
  if (source) checkpoint = models::open_checkpoint(*source);
  std::vector<io::TokenizerFile> files;
  if (tokenizer)
    files = io::tokenizer_files(*tokenizer);
  else if (source)
    files = models::companions_of(checkpoint);
  models::save_huggingface(engine.model(), engine.whole_state_dict(), path,
                           dynamic_cast<const io::GgufFile*>(checkpoint.weights.get()));
  io::write_tokenizer_files(files, path);
}

}  // namespace

// Name, NumPy type and offset of each field of SamplingInput; eadem.InferEngine.Input has an attribute for each name.
nb::list sampling_fields() {
  using Settings = engine::SamplingInput;
  nb::list fields;
  const auto add = [&](const char* name, const char* type, size_t offset) {
    fields.append(nb::make_tuple(name, type, offset));
  };
  add("temperature", "f4", offsetof(Settings, temperature));
  add("top_k", "i4", offsetof(Settings, top_k));
  add("top_p", "f4", offsetof(Settings, top_p));
  add("min_p", "f4", offsetof(Settings, min_p));
  add("seed", "i8", offsetof(Settings, seed));
  add("repetition_penalty", "f4", offsetof(Settings, repetition_penalty));
  add("presence_penalty", "f4", offsetof(Settings, presence_penalty));
  add("frequency_penalty", "f4", offsetof(Settings, frequency_penalty));
  add("prompt_length", "i4", offsetof(Settings, prompt_length));
  add("typical_p", "f4", offsetof(Settings, typical_p));
  add("top_logprobs", "i4", offsetof(Settings, top_logprobs));
  return fields;
}

void bind_engine(nb::module_& m) {
  bind_parallelism_and_caches(m);
  m.def("sampling_fields", &sampling_fields);
  m.attr("SAMPLING_BYTES") = sizeof(engine::SamplingInput);

  nb::class_<Engine>(m, "Engine", nb::type_slots(kEngineSlots), "What eadem.InferEngine calls.")
      .def(
          "__init__",
          [](Engine* self, const models::ModelConfig* config, std::optional<engine::CacheConfig> cache,
             const std::vector<std::string>& rank_program, const nb::kwargs& keywords) {
            EngineArguments arguments = engine_arguments(keywords);
            arguments.cache = std::move(cache);
            if (config != nullptr) arguments.config = *config;
            const GilRelease release;
            new (self) Engine(make_ranked_engine(arguments, rank_program));
          },
          "model_config"_a.none(), "cache_config"_a.none(), "rank_program"_a, "arguments"_a,
          "The model of a configuration, or, where that is None, of the checkpoint at the keyword `path`.")
      .def("rank_processes", &Engine::rank_processes, "The processes of ranks 1, 2, …")
      .def(
          "load_param",
          [](Engine& self, const std::string& name, const HostArray& array) {
            const TensorView view = view_of(array, name);
            self.run([&](engine::InferEngine& engine) {
              engine.load_param(name, models::from_huggingface_order(engine.model(), name, {view, nullptr}).view);
            });
          },
          "name"_a, "array"_a)
      .def(
          "load_random",
          [](Engine& self, uint64_t seed, double stddev) {
            self.run([&](engine::InferEngine& engine) { engine.load_random(seed, stddev); });
          },
          "seed"_a, "stddev"_a)
      .def("state_dicts",
           [](Engine& self) {
             const auto dicts = self.run([](engine::InferEngine& engine) {
               auto of_ranks = engine.state_dict_by_rank();
               for (auto& state : of_ranks)
                 for (auto& [name, tensor] : state) tensor = models::to_huggingface_order(engine.model(), name, tensor);
               return of_ranks;
             });
             nb::list result;
             for (const auto& state : dicts) result.append(to_numpy_dict(state));
             return result;
           })
      .def(
          "save_pretrained",
          [](Engine& self, const std::string& path, const std::optional<std::string>& source,
             const std::optional<std::string>& tokenizer) {
            self.run([&](engine::InferEngine& engine) { save_pretrained(engine, path, source, tokenizer); });
          },
          "path"_a, "source"_a.none(), "tokenizer"_a.none())
      .def("parameter_names",
           [](Engine& self) { return self.run([](engine::InferEngine& engine) { return engine.parameter_names(); }); })
      .def("forward", &forward, "input_ids"_a, "input_lengths"_a, "cache_lengths"_a, "position_ids"_a, "block_tables"_a,
           "rows"_a, "slot_mapping"_a, "sampling"_a, "all_logits"_a, "with_logits"_a, "with_hidden"_a)
      .def(
          "reset_cache",
          [](Engine& self, std::optional<engine::CacheConfig> config) {
            self.run([&](engine::InferEngine& engine) {
              if (config)
                engine.reset_cache(*config);
              else
                engine.reset_cache();
            });
          },
          "cache_config"_a.none())
      .def(
          "register_hook",
          [](Engine& self, const std::string& name, nb::callable callback, int rank, bool unfuse) {
            const SharedCallable function = share(std::move(callback));
            const auto id = self.run([&](engine::InferEngine& engine) {
              if (unfuse) engine.unfuse(name);
              return engine.hooks().register_hook(name, hook_of(function), rank);
            });
            self.hook_functions.emplace(id, function);
            return id;
          },
          "name"_a, "callback"_a, "rank"_a, "unfuse"_a)
      .def(
          "remove_hook",
          [](Engine& self, engine::HookRegistry::HookId id) {
            self.run([&](engine::InferEngine& engine) { engine.hooks().remove(id); });
            self.hook_functions.erase(id);
          },
          "id"_a)
      .def("value_names",
           [](Engine& self) {
             return self.run([](engine::InferEngine& engine) {
               const auto& names = engine.hooks().names().values;
               return std::vector<std::string>(names.begin(), names.end());
             });
           })
      .def_prop_ro(
          "geometry",
          [](Engine& self) {
            const auto [batch, length, block, blocks, bytes] = self.run([](engine::InferEngine& engine) {
              return std::array{engine.max_batch_size(), engine.max_sequence_length(), engine.cache_spec().block_size,
                                engine.cache_spec().num_blocks, engine.cache_bytes()};
            });
            return nb::make_tuple(batch, length, block, blocks, bytes);
          },
          nb::sig("def geometry(self) -> tuple[int, int, int, int, int]"),
          "max_batch_size, max_sequence_length, block_size, num_blocks, cache_bytes");
}

}  // namespace eadem::python
