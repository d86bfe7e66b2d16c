// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "eadem/core/error.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/llama.h"
#include "eadem/python/bindings.h"
#include "eadem/python/engine_arguments.h"

namespace eadem::python {

using namespace nb::literals;
using engine::DistConfig;
using engine::PagedKVCacheConfig;
using engine::StaticKVCacheConfig;
using models::LlamaConfig;

namespace {

// Keys of config.json that the constructor of LlamaConfig takes; its signature below lists the same.
constexpr std::array<std::string_view, 26> kConfigKeys = {"model_type",
                                                          "vocab_size",
                                                          "hidden_size",
                                                          "intermediate_size",
                                                          "num_hidden_layers",
                                                          "num_attention_heads",
                                                          "num_key_value_heads",
                                                          "head_dim",
                                                          "rms_norm_eps",
                                                          "hidden_act",
                                                          "rope_theta",
                                                          "max_position_embeddings",
                                                          "rope_scaling",
                                                          "rope_parameters",
                                                          "attention_bias",
                                                          "partial_rotary_factor",
                                                          "mlp_bias",
                                                          "tie_word_embeddings",
                                                          "sliding_window",
                                                          "use_sliding_window",
                                                          "max_window_layers",
                                                          "layer_types",
                                                          "bos_token_id",
                                                          "eos_token_id",
                                                          "attention_dropout",
                                                          "dtype"};

constexpr const char* kConfigSignature =
    "def __init__(self, *, vocab_size: int, hidden_size: int, intermediate_size: int, num_hidden_layers: int, "
    "num_attention_heads: int, max_position_embeddings: int, model_type: str = 'llama', "
    "num_key_value_heads: int | None = None, head_dim: int | None = None, rms_norm_eps: float = 1e-6, "
    "hidden_act: str = 'silu', rope_theta: float = 10000.0, rope_scaling: dict[str, object] | None = None, "
    "rope_parameters: dict[str, object] | None = None, partial_rotary_factor: float = 1.0, "
    "attention_bias: bool | None = None, attention_dropout: float = 0.0, mlp_bias: bool = False, "
    "tie_word_embeddings: bool = False, sliding_window: int | None = None, use_sliding_window: bool | None = None, "
    "max_window_layers: int | None = None, layer_types: collections.abc.Sequence[str] | None = None, "
    "bos_token_id: int | collections.abc.Sequence[int] | None = None, "
    "eos_token_id: int | collections.abc.Sequence[int] | None = None, dtype: str | None = None) -> None";

constexpr const char* kConfigDoc =
    "Configuration of the Llama family (Llama 2 and 3.x, Mistral, Qwen2, Qwen3, SmolLM2) under the names of Hugging "
    "Face's config.json. It is checked when it is made and does not change afterwards; `replace` makes another one. "
    "Raises InvalidArgument naming the field, its value and its range, Unsupported for a value that is not honoured. "
    "None stands for what Hugging Face's class of that model_type defaults to.";

LlamaConfig config_of(nb::handle dict, const std::string& source) {
  // allow_nan=False: JSON has no NaN, and neither has a configuration.
  const std::string json =
      nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(dict, "allow_nan"_a = false));
  try {
    return LlamaConfig::from_json(io::JsonReader::parse(json, source));
  } catch (const DataCorrupted& error) {  // there is no file that could be corrupted
    throw InvalidArgument("{}", error.what());
  }
}

nb::object dict_of(const LlamaConfig& config) {
  if (config.rope_style != kernels::RopeStyle::rotate_half || !config.rope_divisors.empty())
    throw Unsupported(
        "this configuration was read from a GGUF file whose rope (interleaved, or with divisors) "
        "config.json cannot state");
  return nb::module_::import_("json").attr("loads")(io::to_json(config.to_json()));
}

void construct_config(PyLlamaConfig* self, const nb::kwargs& arguments) {
  nb::dict values;
  values["model_type"] = "llama";
  for (const auto& [key, value] : arguments) {
    const auto name = nb::cast<std::string>(key);
    if (std::find(kConfigKeys.begin(), kConfigKeys.end(), name) == kConfigKeys.end())
      throw nb::type_error(("LlamaConfig() got an unexpected keyword argument '" + name + "'").c_str());
    if (!value.is_none()) values[key] = value;
  }
  for (const char* required : {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                               "num_attention_heads", "max_position_embeddings"})
    if (!values.contains(required))
      throw nb::type_error((std::string("LlamaConfig() missing required keyword argument '") + required + "'").c_str());
  new (self) PyLlamaConfig{config_of(values, "LlamaConfig")};
}

void bind_llama_config(nb::module_& m) {
  nb::class_<PyLlamaConfig> c(m, "LlamaConfig", kConfigDoc);
  c.def("__init__", construct_config, nb::sig(kConfigSignature));
  c.def_static(
      "from_dict", [](const nb::dict& values) { return PyLlamaConfig{config_of(values, "config")}; }, "values"_a,
      nb::sig("def from_dict(values: dict[str, object]) -> LlamaConfig"),
      "From the content of a config.json. A key that is not honoured is refused (Unsupported).");
  c.def(
      "to_dict", [](const PyLlamaConfig& self) { return dict_of(self.config); },
      nb::sig("def to_dict(self) -> dict[str, object]"), "As the content of a config.json.");
  c.def(
      "replace",
      [](const PyLlamaConfig& self, const nb::kwargs& changes) {
        const nb::object values = dict_of(self.config);
        for (const auto& [key, value] : changes) {
          const auto name = nb::cast<std::string>(key);
          if (std::find(kConfigKeys.begin(), kConfigKeys.end(), name) == kConfigKeys.end())
            throw nb::type_error(("replace() got an unexpected keyword argument '" + name + "'").c_str());
          nb::cast<nb::dict>(values)[key] = value;
        }
        return PyLlamaConfig{config_of(values, "LlamaConfig.replace")};
      },
      nb::sig("def replace(self, **changes: object) -> LlamaConfig"),
      "Another configuration with some keys of config.json changed; checked like a new one.");
  c.def(
      "validate", [](const PyLlamaConfig& self) { self.config.validate("LlamaConfig"); },
      "Checks that the fields fit together; a LlamaConfig was checked when it was made.");
  c.def(
      "kv_dim", [](const PyLlamaConfig& self) { return self.config.kv_dim(); },
      "Elements of one token's keys (or values) in one layer: num_key_value_heads * head_dim.");
  c.def(
      "num_parameters", [](const PyLlamaConfig& self) { return self.config.num_parameters(); },
      "Elements of all parameters; tied embeddings count once.");
  const auto field = [&](const char* name, auto member, const char* doc) {
    c.def_prop_ro(
        name, [member](const PyLlamaConfig& self) { return self.config.*member; }, doc);
  };
  field("model_type", &LlamaConfig::model_type, "llama, mistral, qwen2 or qwen3");
  field("vocab_size", &LlamaConfig::vocab_size, "tokens of the vocabulary");
  field("hidden_size", &LlamaConfig::hidden_size, "elements of a hidden state");
  field("intermediate_size", &LlamaConfig::intermediate_size, "elements between the products of the MLP");
  field("num_hidden_layers", &LlamaConfig::num_hidden_layers, "decoder layers");
  field("num_attention_heads", &LlamaConfig::num_attention_heads, "query heads");
  field("num_key_value_heads", &LlamaConfig::num_key_value_heads, "key and value heads");
  field("head_dim", &LlamaConfig::head_dim, "elements of one head");
  field("max_position_embeddings", &LlamaConfig::max_position_embeddings, "the context, tokens");
  field("rms_norm_eps", &LlamaConfig::rms_norm_eps, "added to the mean square");
  field("rope_theta", &LlamaConfig::rope_theta, "base of the rotary frequencies");
  field("rotary_dim", &LlamaConfig::rotary_dim, "elements of a head that are rotated");
  field("attention_bias", &LlamaConfig::attention_bias, "whether q, k and v have biases");
  field("mlp_bias", &LlamaConfig::mlp_bias, "whether the products of the MLP have biases");
  field("qk_norm", &LlamaConfig::qk_norm, "whether q and k are normalized");
  field("tie_word_embeddings", &LlamaConfig::tie_word_embeddings, "whether the LM head is the embedding");
  field("layer_windows", &LlamaConfig::layer_windows, "attention window of each layer, tokens; 0: unlimited");
  field("bos_token_id", &LlamaConfig::bos_token_id, "ids that begin a text");
  field("eos_token_id", &LlamaConfig::eos_token_id, "ids that end a text");
  c.def_prop_ro(
      "hidden_act", [](const PyLlamaConfig& self) { return std::string(ops::activation_name(self.config.hidden_act)); },
      "silu, gelu, gelu_tanh, relu or relu2");
  c.def(
      "__eq__",
      [](const PyLlamaConfig& a, const PyLlamaConfig& b) { return dict_of(a.config).equal(dict_of(b.config)); },
      nb::sig("def __eq__(self, other: object, /) -> bool"), nb::is_operator());
  c.def("__repr__", [](const PyLlamaConfig& self) {
    const LlamaConfig& config = self.config;
    return fmt::format(
        "LlamaConfig(model_type='{}', vocab_size={}, hidden_size={}, intermediate_size={}, "
        "num_hidden_layers={}, num_attention_heads={}, num_key_value_heads={}, head_dim={})",
        config.model_type, config.vocab_size, config.hidden_size, config.intermediate_size, config.num_hidden_layers,
        config.num_attention_heads, config.num_key_value_heads, config.head_dim);
  });
}

// An exception keeps a class without instances honest: there is nothing to construct.
struct PyAutoConfig {};

void bind_auto_config(nb::module_& m) {
  nb::class_<PyAutoConfig>(m, "AutoConfig", "From a model to its typed configuration.")
      .def_static(
          "from_pretrained",
          [](nb::handle path) {
            const std::string name = resolve_model(path);
            const std::shared_ptr<const models::Model> model =
                name.ends_with(".gguf") ? models::open_checkpoint(name).model : models::model_from_config(name);
            const auto* llama = dynamic_cast<const models::Llama*>(model.get());
            if (llama == nullptr)
              throw Unsupported("{}: models of type '{}' have no typed configuration in Python", name,
                                model->info().architecture);
            return PyLlamaConfig{llama->config()};
          },
          "path"_a.none(), nb::sig("def from_pretrained(path: str | os.PathLike[str] | None) -> LlamaConfig"),
          "Reads a config.json, the directory around one, a .gguf, or a bundled model's (by name; None: the default "
          "one). Raises NotFound, DataCorrupted, or Unsupported naming the architecture or the key.");
}

void bind_cache_configs(nb::module_& m) {
  nb::class_<PyCacheConfig>(m, "CacheConfig", "How an engine keeps keys and values: static or paged.");
  nb::class_<PyStaticKVCacheConfig, PyCacheConfig>(
      m, "StaticKVCacheConfig", "Contiguous memory for `max_batch_size` sequences of up to `max_cache_len` tokens.")
      .def(
          "__init__",
          [](PyStaticKVCacheConfig* self, int64_t max_batch_size, std::optional<int64_t> max_cache_len) {
            if (max_batch_size < 1) throw InvalidArgument("max_batch_size is {}; expected at least 1", max_batch_size);
            if (max_cache_len && *max_cache_len < 1)
              throw InvalidArgument("max_cache_len is {}; expected at least 1", *max_cache_len);
            new (self) PyStaticKVCacheConfig{{StaticKVCacheConfig{max_batch_size, max_cache_len.value_or(0)}}};
          },
          "max_batch_size"_a = 1, "max_cache_len"_a = nb::none(),
          "max_cache_len: tokens of one sequence; None: the model's context.")
      .def_prop_ro(
          "max_batch_size",
          [](const PyStaticKVCacheConfig& self) { return std::get<StaticKVCacheConfig>(self.config).max_batch_size; },
          "sequences of a step")
      .def_prop_ro(
          "max_cache_len",
          [](const PyStaticKVCacheConfig& self) -> std::optional<int64_t> {
            const int64_t length = std::get<StaticKVCacheConfig>(self.config).max_cache_len;
            if (length == 0) return std::nullopt;
            return length;
          },
          "tokens of one sequence; None: the model's context")
      .def("__repr__", [](const PyStaticKVCacheConfig& self) {
        const auto& c = std::get<StaticKVCacheConfig>(self.config);
        return fmt::format("StaticKVCacheConfig(max_batch_size={}, max_cache_len={})", c.max_batch_size,
                           c.max_cache_len == 0 ? "None" : fmt::to_string(c.max_cache_len));
      });
  nb::class_<PyPagedKVCacheConfig, PyCacheConfig>(
      m, "PagedKVCacheConfig", "Blocks of `block_size` tokens out of a memory budget, handed out as sequences grow.")
      .def(
          "__init__",
          [](PyPagedKVCacheConfig* self, int64_t max_kv_memory_bytes, int64_t block_size, int64_t max_batch_size) {
            for (const auto& [name, value] : {std::pair{"max_kv_memory_bytes", max_kv_memory_bytes},
                                              {"block_size", block_size},
                                              {"max_batch_size", max_batch_size}})
              if (value < 1) throw InvalidArgument("{} is {}; expected at least 1", name, value);
            new (self) PyPagedKVCacheConfig{{PagedKVCacheConfig{max_kv_memory_bytes, block_size, max_batch_size}}};
          },
          "max_kv_memory_bytes"_a, "block_size"_a = 16, "max_batch_size"_a = 8,
          "max_kv_memory_bytes: budget of all layers; block_size: tokens; max_batch_size: sequences of a step.")
      .def_prop_ro(
          "max_kv_memory_bytes",
          [](const PyPagedKVCacheConfig& self) {
            return std::get<PagedKVCacheConfig>(self.config).max_kv_memory_bytes;
          },
          "bytes, all layers together")
      .def_prop_ro(
          "block_size",
          [](const PyPagedKVCacheConfig& self) { return std::get<PagedKVCacheConfig>(self.config).block_size; },
          "tokens of a block")
      .def_prop_ro(
          "max_batch_size",
          [](const PyPagedKVCacheConfig& self) { return std::get<PagedKVCacheConfig>(self.config).max_batch_size; },
          "sequences of a step")
      .def("__repr__", [](const PyPagedKVCacheConfig& self) {
        const auto& c = std::get<PagedKVCacheConfig>(self.config);
        return fmt::format("PagedKVCacheConfig(max_kv_memory_bytes={}, block_size={}, max_batch_size={})",
                           c.max_kv_memory_bytes, c.block_size, c.max_batch_size);
      });
}

void bind_dist_config(nb::module_& m) {
  nb::class_<DistConfig>(m, "DistConfig",
                         "Tensor parallelism: the devices of the ranks. An engine refuses more than one rank as yet.")
      .def(
          "__init__",
          [](DistConfig* self, std::optional<int> tp_size, std::optional<std::vector<int>> tp_device_ids) {
            if (tp_size && tp_device_ids) throw InvalidArgument("give tp_size or tp_device_ids, not both");
            DistConfig config;
            if (tp_size) {
              if (*tp_size < 1 || *tp_size > 1024) throw InvalidArgument("tp_size is {}; expected 1 to 1024", *tp_size);
              config.tp_device_ids.clear();
              for (int rank = 0; rank < *tp_size; ++rank) config.tp_device_ids.push_back(rank);
            }
            if (tp_device_ids) {
              if (tp_device_ids->empty()) throw InvalidArgument("tp_device_ids is empty; expected at least one device");
              config.tp_device_ids = std::move(*tp_device_ids);
            }
            new (self) DistConfig(std::move(config));
          },
          "tp_size"_a = nb::none(), nb::kw_only(), "tp_device_ids"_a = nb::none(),
          "One device; or devices 0 ... tp_size - 1; or the devices that are listed.")
      .def_ro("tp_device_ids", &DistConfig::tp_device_ids, "device of each rank")
      .def_prop_ro("tp_size", &DistConfig::tp_size, "number of ranks")
      .def("__repr__", [](const DistConfig& self) {
        std::string ids;
        for (int id : self.tp_device_ids) ids += (ids.empty() ? "" : ", ") + std::to_string(id);
        return fmt::format("DistConfig(tp_device_ids=[{}])", ids);
      });
}

}  // namespace

std::shared_ptr<const models::Model> model_of(const PyLlamaConfig& config) {
  return std::make_shared<models::Llama>(config.config);
}

std::shared_ptr<Device> open_device_of(const std::string& device, int threads, const std::string& isa) {
  if (threads < 0 || threads > 4096) throw InvalidArgument("threads is {}; expected 0 (all) to 4096", threads);
  return open_device(device, {.num_threads = threads, .isa = isa});
}

std::shared_ptr<Device> EngineArguments::open() const { return open_device_of(device, threads, isa); }

engine::EngineOptions EngineArguments::options() const {
  engine::EngineOptions result;
  result.mode = hardware_mode_from_name(mode);
  result.hardware.weights = optional_dtype(weights, "weights");
  result.hardware.activations = optional_dtype(activations, "activations");
  result.hardware.kv_cache = optional_dtype(kv_dtype, "kv_dtype");
  constexpr int64_t kMaxStepTokens = int64_t{1} << 24;
  if (max_step_tokens < 1 || max_step_tokens > kMaxStepTokens)
    throw InvalidArgument("max_step_tokens is {}; expected 1 to {}", max_step_tokens, kMaxStepTokens);
  result.max_step_tokens = max_step_tokens;
  result.disabled_fusions = disabled_fusions;
  result.op_by_op = op_by_op;
  return result;
}

void bind_configs(nb::module_& m) {
  bind_llama_config(m);
  bind_auto_config(m);
  bind_cache_configs(m);
  bind_dist_config(m);
  m.def("devices", &list_devices, "The devices that this build can open here, by name: \"cpu\", \"cuda:0\" ...");
  m.def(
      "bf16_to_float32",
      [](nb::handle bits) {
        const HostArray array(bits, "bits");
        if (array.view().dtype != DType::bf16)
          throw InvalidArgument("bits is {}; expected uint16, the bits of bf16", to_string(array.view()));
        return to_numpy(converted_on_host(array.view(), DType::f32));
      },
      "bits"_a,
      nb::sig("def bf16_to_float32(bits: numpy.typing.ArrayLike) -> "
              "numpy.typing.NDArray[numpy.float32]"),
      "The values of bf16 bits in a uint16 array, exactly, as a new float32 array of the same shape.");
}

}  // namespace eadem::python
