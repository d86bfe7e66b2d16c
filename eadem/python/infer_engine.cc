// SPDX-License-Identifier: Apache-2.0
#include "eadem/engine/infer_engine.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "eadem/core/error.h"
#include "eadem/python/bindings.h"
#include "eadem/python/engine_arguments.h"

namespace eadem::python {

using namespace nb::literals;
using engine::InferEngine;
using engine::SamplingInput;

namespace {

// What Python calls InferEngine.
struct PyEngine {
  Exclusive exclusive;
  std::unique_ptr<InferEngine> engine;
  std::vector<nb::object> callbacks;  // of the hooks; the engine knows them by index
  std::exception_ptr hook_failure;    // the first of a step: raised when the step is over
  bool loaded = false;                // every parameter was
  bool has_cache = true;              // false after a new one could not be made
  InferEngine::Input input;           // reused between steps
};

struct PyHooks {
  PyEngine* engine;
};

// The fields as they were given; read when a step runs.
struct PyInput {
  nb::object input_ids, input_lengths, position_ids, cache_lengths, block_tables, slot_mapping;
  nb::object temperature, top_k, top_p, min_p, seed;
  bool return_logits = false, all_logits = false, return_hidden_states = false;
};

struct PyOutput {
  nb::object output_ids, logprobs, logits, hidden_states;
};

// One value per sequence: an array, or a number for all.
std::vector<double> numbers_of(nb::handle value, std::string_view name, size_t batch) {
  if (PyFloat_Check(value.ptr()) || PyLong_Check(value.ptr()))
    return std::vector<double>(batch, nb::cast<double>(value));
  const Tensor wide = [&] {
    const HostArray array(value, name);
    if (!is_floating(array.view().dtype)) {
      const Integers integers = integers_of(value, name, INT32_MIN, INT32_MAX);
      Tensor result = Tensor::on_host(DType::f64, Shape{static_cast<int64_t>(integers.values.size())});
      std::copy(integers.values.begin(), integers.values.end(), result.view.as<double>());
      return result;
    }
    return converted_on_host(array.view(), DType::f64);
  }();
  const auto count = static_cast<size_t>(wide.view.num_elements());
  if (count != batch) throw InvalidArgument("{} has {} entries; there are {} sequences", name, count, batch);
  const double* data = wide.view.as<double>();
  return {data, data + count};
}

std::vector<int64_t> integers_per_sequence(nb::handle value, std::string_view name, size_t batch, int64_t min,
                                           int64_t max) {
  Integers integers = integers_of(value, name, min, max);
  if (integers.shape.empty()) integers.values.assign(batch, integers.values.at(0));
  if (integers.values.size() != batch)
    throw InvalidArgument("{} has {} entries; there are {} sequences", name, integers.values.size(), batch);
  return std::move(integers.values);
}

// The rows of a [batch, width] array without their padding, or a packed [tokens] array as it is.
std::vector<int64_t> packed(const Integers& array, std::string_view name, const std::vector<int32_t>& lengths,
                            int64_t tokens) {
  if (array.shape.size() == 1) {
    if (array.shape[0] != tokens)
      throw InvalidArgument("{} has {} entries; there are {} tokens", name, array.shape[0], tokens);
    return array.values;
  }
  if (array.shape.size() != 2 || array.shape[0] != static_cast<int64_t>(lengths.size()))
    throw InvalidArgument("{} has {} axes; expected [tokens] or [{}, width]", name, array.shape.size(), lengths.size());
  std::vector<int64_t> result;
  for (size_t s = 0; s < lengths.size(); ++s) {
    if (lengths[s] > array.shape[1])
      throw InvalidArgument("{} has rows of {}; sequence {} has {} tokens", name, array.shape[1], s, lengths[s]);
    const auto row = array.values.begin() + static_cast<std::ptrdiff_t>(s) * array.shape[1];
    result.insert(result.end(), row, row + lengths[s]);
  }
  return result;
}

void read_input(const PyInput& from, InferEngine::Input& to) {
  if (from.input_ids.is_none()) throw InvalidArgument("input_ids is None; a step needs tokens");
  const Integers ids = integers_of(from.input_ids, "input_ids", INT32_MIN, INT32_MAX);
  if (ids.shape.empty() || ids.shape.size() > 2)
    throw InvalidArgument("input_ids has {} axes; expected [batch, tokens] or, packed, [tokens]", ids.shape.size());
  const bool padded = ids.shape.size() == 2;

  if (!from.input_lengths.is_none())
    to.input_lengths = narrowed(integers_of(from.input_lengths, "input_lengths", 1, INT32_MAX).values);
  else if (padded)
    to.input_lengths.assign(static_cast<size_t>(ids.shape[0]), static_cast<int32_t>(ids.shape[1]));
  else
    to.input_lengths = {static_cast<int32_t>(ids.values.size())};
  const size_t batch = to.input_lengths.size();
  if (padded && static_cast<int64_t>(batch) != ids.shape[0])
    throw InvalidArgument("input_lengths has {} entries; input_ids has {} rows", batch, ids.shape[0]);
  int64_t tokens = 0;
  for (int32_t length : to.input_lengths) tokens += length;
  to.input_ids = narrowed(packed(ids, "input_ids", to.input_lengths, tokens));

  to.cache_lengths.assign(batch, 0);
  if (!from.cache_lengths.is_none())
    to.cache_lengths = narrowed(integers_of(from.cache_lengths, "cache_lengths", 0, INT32_MAX).values);
  to.position_ids.clear();
  if (!from.position_ids.is_none())
    to.position_ids = narrowed(
        packed(integers_of(from.position_ids, "position_ids", 0, INT32_MAX), "position_ids", to.input_lengths, tokens));
  to.slot_mapping.clear();
  if (!from.slot_mapping.is_none())
    to.slot_mapping =
        packed(integers_of(from.slot_mapping, "slot_mapping", 0, INT64_MAX), "slot_mapping", to.input_lengths, tokens);
  to.block_tables.clear();
  if (!from.block_tables.is_none()) {
    const Integers tables = integers_of(from.block_tables, "block_tables", -1, INT32_MAX);
    if (tables.shape.size() != 2)
      throw InvalidArgument("block_tables has {} axes; expected [batch, blocks], padded with -1", tables.shape.size());
    for (int64_t s = 0; s < tables.shape[0]; ++s) {
      auto first = tables.values.begin() + s * tables.shape[1], last = first + tables.shape[1];
      while (last != first && *(last - 1) < 0) --last;
      to.block_tables.emplace_back(first, last);
    }
  }

  const std::vector<double> temperature = numbers_of(from.temperature, "temperature", batch),
                            top_p = numbers_of(from.top_p, "top_p", batch),
                            min_p = numbers_of(from.min_p, "min_p", batch);
  const std::vector<int64_t> top_k = integers_per_sequence(from.top_k, "top_k", batch, 0, INT32_MAX),
                             seed = integers_per_sequence(from.seed, "seed", batch, INT64_MIN, INT64_MAX);
  to.sampling.clear();
  for (size_t s = 0; s < batch; ++s)
    to.sampling.push_back(SamplingInput{.temperature = static_cast<float>(temperature[s]),
                                        .top_k = static_cast<int32_t>(top_k[s]),
                                        .top_p = static_cast<float>(top_p[s]),
                                        .min_p = static_cast<float>(min_p[s]),
                                        .seed = seed[s]});
  to.all_logits = from.all_logits;
}

void require_cache(const PyEngine& self) {
  if (!self.has_cache)
    throw InvalidArgument("the engine has no KV cache since reset_cache failed; call it with a smaller cache_config");
}

PyOutput forward(PyEngine& self, const PyInput& input) {
  const Exclusive::Use use(self.exclusive, "forward");
  require_cache(self);
  read_input(input, self.input);
  if (!self.loaded) {
    self.engine->parameters().require_all_loaded("load_param");
    self.loaded = true;
  }
  self.hook_failure = nullptr;
  const InferEngine::Output* output = nullptr;
  Tensor logits, hidden;
  {
    const nb::gil_scoped_release released;
    output = &self.engine->forward(self.input);
    if (input.return_logits || input.all_logits) logits = self.engine->logits();
    if (input.return_hidden_states) hidden = self.engine->hidden_states();
  }
  if (self.hook_failure) std::rethrow_exception(std::exchange(self.hook_failure, nullptr));
  PyOutput result{nb::none(), nb::none(), nb::none(), nb::none()};
  result.output_ids = to_numpy(output->output_ids, {output->output_ids.size(), 1});
  result.logprobs = to_numpy(output->logprobs, {output->logprobs.size()});
  if (logits.defined()) result.logits = to_numpy(std::move(logits));
  if (hidden.defined()) result.hidden_states = to_numpy(std::move(hidden));
  return result;
}

void register_hook(const PyHooks& hooks, std::string name, nb::callable callback) {
  PyEngine& self = *hooks.engine;
  const Exclusive::Use use(self.exclusive, "register_hook");
  const size_t index = self.callbacks.size();
  self.callbacks.push_back(std::move(callback));
  // Neither copies nor owns anything of Python: the engine copies and drops it without the GIL.
  self.engine->hooks().register_hook(std::move(name),
                                     [&self, index](const std::string& value, const TensorView& tensor, int layer) {
                                       if (self.hook_failure) return;
                                       const nb::gil_scoped_acquire acquired;
                                       try {
                                         self.callbacks[index](value, copy_to_numpy(tensor), layer);
                                       } catch (...) {
                                         self.hook_failure = std::current_exception();
                                       }
                                     });
}

void clear_hooks(PyEngine& self) {
  self.engine->hooks().clear();
  self.callbacks.clear();
}

// A hook may refer to its engine: the collector has to see through it.
int traverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  if (!nb::inst_ready(object)) return 0;
  for (const nb::object& callback : nb::inst_ptr<PyEngine>(object)->callbacks) Py_VISIT(callback.ptr());
  return 0;
}

int clear(PyObject* object) {
  if (nb::inst_ready(object)) {
    auto* self = nb::inst_ptr<PyEngine>(object);
    self->engine->hooks().clear();
    const std::vector<nb::object> dropped = std::exchange(self->callbacks, {});
  }
  return 0;
}

PyType_Slot kEngineSlots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)}, {0, nullptr}};

engine::EngineOptions options_of(const EngineArguments& arguments, const engine::DistConfig& dist,
                                 const PyCacheConfig* cache, int64_t max_logit_rows) {
  engine::EngineOptions options = arguments.options();
  options.dist = dist;
  if (cache != nullptr) options.cache = cache->config;
  constexpr int64_t kMaxLogitRows = int64_t{1} << 24;
  if (max_logit_rows < 0 || max_logit_rows > kMaxLogitRows)
    throw InvalidArgument("max_logit_rows is {}; expected 0 (one per sequence) to {}", max_logit_rows, kMaxLogitRows);
  options.max_logit_rows = max_logit_rows;
  return options;
}

void bind_input(nb::class_<PyEngine>& scope) {
  nb::class_<PyInput> c(
      scope, "Input",
      "One step over the new tokens of some sequences. Every array may be a list, a NumPy array of any integer dtype, "
      "or anything that speaks DLPack, on the host.\n\n"
      "input_ids      [batch, tokens], or packed [tokens]: the tokens of sequence i follow those of sequence i - 1\n"
      "input_lengths  [batch] new tokens of each sequence; None: whole rows, or one sequence when packed. Shorter than "
      "a row: the rest of it is padding and is not read\n"
      "position_ids   shaped as input_ids; None: cache_length, cache_length + 1 ...\n"
      "cache_lengths  [batch] tokens already in the cache; None: none\n"
      "block_tables   [batch, blocks] where the sequences are in the cache, rows padded with -1. Static cache: one row "
      "number each; None: 0, 1 ... Paged cache: required\n"
      "slot_mapping   shaped as input_ids: block * block_size + offset; None: from block_tables\n"
      "temperature, top_k, top_p, min_p, seed   a number, or one per sequence; temperature 0 is greedy, top_k 0, top_p "
      "1 and min_p 0 are off. The same seed at the same position draws the same token\n"
      "return_logits  logits of each sequence's last token; all_logits: of every token (see max_logit_rows)\n"
      "return_hidden_states  the final hidden states of every token");
  c.def(
      "__init__",
      [](PyInput* self, nb::object input_ids, nb::object position_ids, nb::object cache_lengths,
         nb::object input_lengths, nb::object block_tables, nb::object slot_mapping, nb::object temperature,
         nb::object top_k, nb::object top_p, nb::object min_p, nb::object seed, bool return_logits, bool all_logits,
         bool return_hidden_states) {
        new (self) PyInput{std::move(input_ids),
                           std::move(input_lengths),
                           std::move(position_ids),
                           std::move(cache_lengths),
                           std::move(block_tables),
                           std::move(slot_mapping),
                           std::move(temperature),
                           std::move(top_k),
                           std::move(top_p),
                           std::move(min_p),
                           std::move(seed),
                           return_logits,
                           all_logits,
                           return_hidden_states};
      },
      "input_ids"_a.none(), nb::kw_only(), "position_ids"_a = nb::none(), "cache_lengths"_a = nb::none(),
      "input_lengths"_a = nb::none(), "block_tables"_a = nb::none(), "slot_mapping"_a = nb::none(),
      "temperature"_a = 1.0, "top_k"_a = 0, "top_p"_a = 1.0, "min_p"_a = 0.0, "seed"_a = 0, "return_logits"_a = false,
      "all_logits"_a = false, "return_hidden_states"_a = false,
      nb::sig(
          "def __init__(self, input_ids: numpy.typing.ArrayLike, *, "
          "position_ids: numpy.typing.ArrayLike | None = None, cache_lengths: numpy.typing.ArrayLike | None = None, "
          "input_lengths: numpy.typing.ArrayLike | None = None, block_tables: numpy.typing.ArrayLike | None = None, "
          "slot_mapping: numpy.typing.ArrayLike | None = None, temperature: numpy.typing.ArrayLike = 1.0, "
          "top_k: numpy.typing.ArrayLike = 0, top_p: numpy.typing.ArrayLike = 1.0, "
          "min_p: numpy.typing.ArrayLike = 0.0, seed: numpy.typing.ArrayLike = 0, return_logits: bool = False, "
          "all_logits: bool = False, return_hidden_states: bool = False) -> None"));
  const auto field = [&](const char* name, auto member) {
    c.def_rw(name, member, nb::for_setter(nb::arg("value").none()));
  };
  field("input_ids", &PyInput::input_ids);
  field("input_lengths", &PyInput::input_lengths);
  field("position_ids", &PyInput::position_ids);
  field("cache_lengths", &PyInput::cache_lengths);
  field("block_tables", &PyInput::block_tables);
  field("slot_mapping", &PyInput::slot_mapping);
  field("temperature", &PyInput::temperature);
  field("top_k", &PyInput::top_k);
  field("top_p", &PyInput::top_p);
  field("min_p", &PyInput::min_p);
  field("seed", &PyInput::seed);
  c.def_rw("return_logits", &PyInput::return_logits).def_rw("all_logits", &PyInput::all_logits);
  c.def_rw("return_hidden_states", &PyInput::return_hidden_states);
}

void bind_output(nb::class_<PyEngine>& scope) {
  nb::class_<PyOutput>(scope, "Output",
                       "What a step computed. rows: one per sequence, or with all_logits one per token. The arrays own "
                       "their bytes: the next step does not touch them.")
      .def_prop_ro(
          "output_ids", [](const PyOutput& self) { return self.output_ids; },
          nb::sig("def output_ids(self) -> numpy.typing.NDArray[numpy.int32]"),
          "[rows, 1] int32: drawn tokens; -1 where the logits are not finite. Fits as the next step's input_ids.")
      .def_prop_ro(
          "logprobs", [](const PyOutput& self) { return self.logprobs; },
          nb::sig("def logprobs(self) -> numpy.typing.NDArray[numpy.float32]"),
          "[rows] float32: natural logarithms of the drawn tokens' probabilities")
      .def_prop_ro(
          "logits", [](const PyOutput& self) { return self.logits; },
          nb::sig("def logits(self) -> numpy.typing.NDArray[numpy.float32] | None"),
          "[rows, vocab] float32, when asked for")
      .def_prop_ro(
          "hidden_states", [](const PyOutput& self) { return self.hidden_states; },
          nb::sig("def hidden_states(self) -> numpy.typing.NDArray[typing.Any] | None"),
          "[tokens, hidden] in the dtype of the activations (bf16 as uint16), when asked for");
}

}  // namespace

void bind_infer_engine(nb::module_& m) {
  nb::class_<PyHooks>(m, "HookRegistry",
                      "Callbacks on the values that a step makes. With none registered a step does nothing for them; "
                      "with any, every kernel is waited for.")
      .def(
          "register_hook", register_hook, "name"_a, "callback"_a,
          nb::sig("def register_hook(self, name: str, callback: collections.abc.Callable[[str, "
                  "numpy.typing.NDArray[typing.Any], int], object]) -> None"),
          "callback(name, array, layer) after the kernel that made the value, in the order of computation. `name` is "
          "a value's name (\"model.layers.0.mlp.gated_activation.y\"), or a prefix of names followed by '*'. The array "
          "is a copy (bf16 as uint16), layer is -1 outside the layers. The first exception of a callback is raised "
          "when the step is over; the other callbacks of that step are not called.")
      .def(
          "clear",
          [](const PyHooks& hooks) {
            const Exclusive::Use use(hooks.engine->exclusive, "clear");
            clear_hooks(*hooks.engine);
          },
          "Removes every hook.")
      .def(
          "has_hooks", [](const PyHooks& hooks) { return !hooks.engine->callbacks.empty(); },
          "Whether any hook is registered.");

  nb::class_<PyEngine> c(
      m, "InferEngine", nb::type_slots(kEngineSlots),
      "A model on a device with its KV cache. One call of `forward` is one step over the new tokens of some sequences; "
      "scheduling, text and stop conditions are above it (LLM).\n\n"
      "Calls from several threads take turns. The GIL is released while the engine computes.");
  bind_input(c);
  bind_output(c);
  c.def(
      "__init__",
      [](PyEngine* self, const PyLlamaConfig& config, const engine::DistConfig& dist, std::string device,
         const PyCacheConfig* cache, int threads, std::string isa, std::string mode, std::optional<std::string> weights,
         std::optional<std::string> activations, std::optional<std::string> kv_dtype, int64_t max_step_tokens,
         int64_t max_logit_rows, std::vector<std::string> disabled_fusions, bool op_by_op) {
        const EngineArguments arguments{
            device, threads, isa, mode, weights, activations, kv_dtype, max_step_tokens, disabled_fusions, op_by_op};
        const engine::EngineOptions options = options_of(arguments, dist, cache, max_logit_rows);
        std::unique_ptr<InferEngine> made;
        {
          const nb::gil_scoped_release released;
          const std::shared_ptr<const models::Model> model = model_of(config);
          made = std::make_unique<InferEngine>(model, arguments.open(), options, model->spec());
        }
        new (self) PyEngine();
        self->engine = std::move(made);
      },
      "config"_a, "dist_config"_a = engine::DistConfig{}, "device"_a = "cpu", "cache_config"_a = nb::none(),
      nb::kw_only(), "threads"_a = 0, "isa"_a = "", "mode"_a = "performance", "weights"_a = nb::none(),
      "activations"_a = nb::none(), "kv_dtype"_a = nb::none(), "max_step_tokens"_a = 512, "max_logit_rows"_a = 0,
      "disabled_fusions"_a = std::vector<std::string>(), "op_by_op"_a = false,
      "A compiled engine without weights: give it each of `parameter_names` by load_param before the first step.\n\n"
      "device            \"cpu\", \"cuda\", \"cuda:1\"\n"
      "cache_config      None: StaticKVCacheConfig()\n"
      "threads, isa      CPU only: 0 is one thread per processor; \"avx512\", \"avx2\", \"sse4\", \"scalar\", "
      "\"neon\", "
      "empty for the best\n"
      "mode              \"performance\" or \"accuracy\": what defaults are tuned for\n"
      "weights, activations, kv_dtype   \"f32\", \"bf16\" or \"f16\"; None: by mode and checkpoint\n"
      "max_step_tokens   new tokens of one step\n"
      "max_logit_rows    rows of logits that one step can give; 0: one per sequence\n"
      "disabled_fusions  names, or \"all\"; op_by_op: no fusion, every value keeps its bytes, the same bits");
  c.def_static(
      "from_pretrained",
      [](nb::handle path, const engine::DistConfig& dist, std::string device, const PyCacheConfig* cache, int threads,
         std::string isa, std::string mode, std::optional<std::string> weights, std::optional<std::string> activations,
         std::optional<std::string> kv_dtype, int64_t max_step_tokens, int64_t max_logit_rows,
         std::vector<std::string> disabled_fusions, bool op_by_op, std::optional<nb::object> progress) {
        const EngineArguments arguments{
            device, threads, isa, mode, weights, activations, kv_dtype, max_step_tokens, disabled_fusions, op_by_op};
        const engine::EngineOptions options = options_of(arguments, dist, cache, max_logit_rows);
        const std::string name = resolve_model(path);
        const std::function<void(int64_t, int64_t)> on_progress = load_progress(progress);
        auto result = std::make_unique<PyEngine>();
        {
          const nb::gil_scoped_release released;
          result->engine =
              InferEngine::from_checkpoint(models::open_checkpoint(name), arguments.open(), options, on_progress);
        }
        result->loaded = true;
        return result;
      },
      "path"_a.none(), "dist_config"_a = engine::DistConfig{}, "device"_a = "cpu", "cache_config"_a = nb::none(),
      nb::kw_only(), "threads"_a = 0, "isa"_a = "", "mode"_a = "performance", "weights"_a = nb::none(),
      "activations"_a = nb::none(), "kv_dtype"_a = nb::none(), "max_step_tokens"_a = 512, "max_logit_rows"_a = 0,
      "disabled_fusions"_a = std::vector<std::string>(), "op_by_op"_a = false, "progress"_a = nb::none(),
      nb::sig("def from_pretrained(path: str | os.PathLike[str] | None, dist_config: DistConfig = ..., device: str = "
              "'cpu', cache_config: CacheConfig | None = None, *, threads: int = 0, isa: str = '', mode: str = "
              "'performance', weights: str | None = None, activations: str | None = None, kv_dtype: str | None = None, "
              "max_step_tokens: int = 512, max_logit_rows: int = 0, disabled_fusions: collections.abc.Sequence[str] = "
              "[], op_by_op: bool = False, progress: collections.abc.Callable[[int, int], object] | None = None) -> "
              "InferEngine"),
      "An engine with the weights of a directory in Hugging Face layout, a .safetensors with its config.json beside "
      "it, "
      "a .gguf, or a bundled model (by name; None: the default one). progress(done, total) in bytes. Raises NotFound, "
      "DataCorrupted, Unsupported or OutOfMemory, naming the file and both values. The rest as in the constructor.");
  c.def(
      "load_param",
      [](PyEngine& self, const std::string& name, nb::handle param) {
        const Exclusive::Use use(self.exclusive, "load_param");
        const HostArray array(param, name);
        const nb::gil_scoped_release released;
        self.engine->load_param(name, array.view());
      },
      "name"_a, "param"_a, nb::sig("def load_param(self, name: str, param: numpy.typing.ArrayLike) -> None"),
      "Takes the whole parameter, of any floating dtype (uint16: the bits of bf16), rounded to the engine's; each rank "
      "keeps its part. Raises NotFound, or InvalidArgument naming both shapes, or the place of a value that is not "
      "finite.");
  c.def(
      "load_random",
      [](PyEngine& self, uint64_t seed, double stddev) {
        const Exclusive::Use use(self.exclusive, "load_random");
        if (!(stddev >= 0 && stddev < 1e6)) throw InvalidArgument("stddev is {}; expected 0 to 1e6", stddev);
        const nb::gil_scoped_release released;
        self.engine->load_random(seed, stddev);
      },
      "seed"_a, "stddev"_a = 0.02, "Fills every parameter: matrices normal, norms one, biases zero.");
  c.def(
      "state_dict",
      [](PyEngine& self) {
        const Exclusive::Use use(self.exclusive, "state_dict");
        if (!self.loaded) self.engine->parameters().require_all_loaded("state_dict");
        std::vector<std::pair<std::string, Tensor>> parameters;
        {
          const nb::gil_scoped_release released;
          parameters = self.engine->state_dict();
        }
        nb::list ranks;
        ranks.append(to_dict(std::move(parameters)));
        return ranks;
      },
      nb::sig("def state_dict(self) -> list[dict[str, numpy.typing.NDArray[typing.Any]]]"),
      "The parameters by rank, as new arrays: float32, float16, or uint16 holding the bits of bf16 (bf16_to_float32 "
      "widens them; with ml_dtypes, `array.view(ml_dtypes.bfloat16)`).");
  c.def("forward", forward, "input"_a,
        "One step. Raises InvalidArgument, naming the sequence and both values, for an input that contradicts itself, "
        "the model or the cache, and NotFound while parameters are missing; nothing has changed then.");
  c.def(
      "reset_cache",
      [](PyEngine& self, const PyCacheConfig* cache) {
        const Exclusive::Use use(self.exclusive, "reset_cache");
        if (cache == nullptr) require_cache(self);
        const nb::gil_scoped_release released;
        if (cache == nullptr) {
          self.engine->reset_cache();
          return;
        }
        try {
          self.engine->reset_cache(cache->config);
          self.has_cache = true;
        } catch (const InvalidArgument&) {  // refused before the old cache was given up
          throw;
        } catch (...) {
          self.has_cache = false;
          throw;
        }
      },
      "cache_config"_a = nb::none(), "Empties the cache, or makes another one. Parameters stay.");
  c.def_prop_ro(
      "hooks", [](PyEngine& self) { return PyHooks{&self}; }, nb::keep_alive<0, 1>(),
      "Callbacks on the values of a step.");
  c.def_prop_ro(
      "parameter_names", [](PyEngine& self) { return self.engine->parameter_names(); }, "names of all parameters");
  c.def_prop_ro(
      "device", [](PyEngine& self) { return self.engine->device()->description(); }, "the device, for people");
  c.def_prop_ro(
      "max_batch_size", [](PyEngine& self) { return self.engine->max_batch_size(); }, "sequences of a step");
  c.def_prop_ro(
      "max_sequence_length", [](PyEngine& self) { return self.engine->max_sequence_length(); },
      "tokens that one sequence may have in the cache");
  c.def_prop_ro(
      "num_cache_blocks", [](PyEngine& self) { return self.engine->cache_spec().num_blocks; },
      "paged: blocks of the cache; static: its rows");
  c.def_prop_ro(
      "cache_bytes", [](PyEngine& self) { return self.engine->cache_bytes(); }, "bytes of the KV cache");
}

}  // namespace eadem::python
