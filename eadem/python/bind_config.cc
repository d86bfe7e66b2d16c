// SPDX-License-Identifier: Apache-2.0
//
// Configurations: ModelConfig, and a class of each family below it, which is made from the registry when the module is
// loaded. A key that all families have is an attribute of ModelConfig; what else the config.json of a family states is
// read and set through the text of one, so that it passes the checks of a file.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "eadem/io/gguf.h"
#include "eadem/io/json.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/config/config_fields.h"
#include "eadem/models/family.h"
#include "eadem/python/binding.h"

namespace eadem::python {

using namespace nb::literals;

namespace {

using io::JsonValue;
using models::ConfigField;
using models::ModelConfig;
using models::ModelFamily;

// Makes a configuration from the keys of a config.json, through the parser of those files.
ModelConfig config_from_dict(const nb::dict& members, const std::string& name) {
  const auto text = nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(members));
  try {
    return ModelConfig::from_json(io::JsonReader::parse(text, name));
  } catch (const DataCorrupted& error) {
    throw InvalidArgument("{}", error.what());  // the value came from the caller, not from a file
  }
}

nb::object from_json_text(const std::string& text) { return nb::module_::import_("json").attr("loads")(text); }

// Sets a key of the config.json that `config` would write.
void set_key(ModelConfig& config, const char* name, nb::object value) {
  const auto members = nb::cast<nb::dict>(from_json_text(io::to_json(config.to_json())));
  members[name] = std::move(value);
  config = config_from_dict(members, "the configuration");
}

// Reads a configuration without weights: a config.json, or the directory around it. A .gguf holds both together.
ModelConfig read_config(const std::string& path) {
  const GilRelease release;
  const auto model = io::is_gguf_file(path) ? models::open_checkpoint(path).model : models::model_from_config(path);
  if (model->config() == nullptr)
    throw Unsupported("{}: a model of type '{}' has no typed configuration", path, model->info().architecture);
  return *model->config();
}

std::string repr_of(nb::handle_t<ModelConfig> self) {
  const auto& config = nb::cast<const ModelConfig&>(self);
  return fmt::format("{}({}{}{})", nb::cast<std::string>(self.type().attr("__name__")),
                     io::to_compact_json(config.describe()),
                     config.rope_style == kernels::RopeStyle::interleaved ? ", interleaved rope" : "",
                     config.rope_divisors.empty() ? "" : ", rope divisors");
}

// The type of a field's values, for the stub. A number without fraction may stand for one with.
std::string type_name(const ConfigField& field) {
  using enum JsonValue::Kind;
  const auto has = [&](JsonValue::Kind kind) {
    return std::find(field.kinds.begin(), field.kinds.end(), kind) != field.kinds.end();
  };
  const std::string type = has(object)    ? "dict"
                           : has(array)   ? "list"
                           : has(string)  ? "str"
                           : has(number)  ? "float"
                           : has(integer) ? "int"
                                          : "bool";
  if (field.own) return type;
  return has(array) && has(integer) ? "object" : type + " | None";
}

// An attribute for a key that ModelConfig has none for.
nb::object field_property(const ConfigField& field) {
  const std::string name = field.name;
  const nb::object get = nb::cpp_function(
      [name](const ModelConfig& config) -> nb::object {
        const JsonValue described = config.describe();
        const JsonValue* value = described.find(name);
        return value == nullptr ? nb::none() : from_json_text(io::to_compact_json(*value));
      },
      nb::name(name.c_str()), nb::is_method(),
      nb::sig(fmt::format("def {}(self) -> {}", name, type_name(field)).c_str()));
  const nb::object set = nb::cpp_function(
      [name](ModelConfig& config, nb::object value) { set_key(config, name.c_str(), std::move(value)); },
      nb::name(name.c_str()), nb::is_method(),
      nb::sig(fmt::format("def {}(self, value: {}, /) -> None", name, type_name(field)).c_str()));
  return nb::module_::import_("builtins").attr("property")(get, set);
}

// Puts `config` into `self`, whose memory has no value yet unless __init__ is called again.
void set_value(nb::handle self, ModelConfig config) {
  if (nb::inst_ready(self)) nb::inst_destruct(self);
  new (nb::inst_ptr<ModelConfig>(self)) ModelConfig(std::move(config));
  nb::inst_mark_ready(self);
}

std::string type_names(const ModelFamily& family) {
  std::string names;
  std::string_view last;  // a model type may have several rows
  for (const models::ModelType& type : family.types)
    if (type.name != std::exchange(last, type.name)) names += fmt::format("{}{}", names.empty() ? "" : ", ", type.name);
  return names;
}

nb::object family_class(const nb::module_& m, const ModelFamily& family) {
  const std::string name = models::config_class_name(family), types = type_names(family);
  nb::dict body;
  body["__module__"] = m.attr("__name__");
  body["__slots__"] = nb::make_tuple();  // no other attributes
  body["__doc__"] = fmt::format(
      "Configuration of the family {} (model type{} {}).\n\nTakes the keys of a Hugging Face config.json as keywords; "
      "model_type is \"{}\" unless it is given. A key that is not honoured raises Unsupported, a value that does not "
      "fit "
      "InvalidArgument. An attribute is None where the config.json would not state it.",
      family.name, types.find(' ') == std::string::npos ? "" : "s", types, family.types[0].name);
  body["__init__"] = nb::cpp_function(
      [&family, name, types](nb::handle self, const nb::kwargs& keywords) {
        nb::dict members;
        members["model_type"] = nb::cast(std::string(family.types[0].name));
        members.update(keywords);
        ModelConfig config = config_from_dict(members, name);
        if (&config.family() != &family)
          throw InvalidArgument("model type '{}' is not of the family {}, whose {} is for {}; ModelConfig takes any",
                                config.model_type, family.name, name, types);
        set_value(self, std::move(config));
      },
      nb::name("__init__"), nb::is_method(), nb::sig("def __init__(self, **keys: object) -> None"));
  const nb::object base = m.attr("ModelConfig");
  for (const ConfigField& field : models::config_fields(family))
    if ((field.own || !nb::hasattr(base, field.name.c_str())) && field.name != "architectures" &&
        field.name != "torch_dtype")
      body[field.name.c_str()] = field_property(field);
  return base.type()(name, nb::make_tuple(base), body);
}

// Returns the configuration as an object of its family's class.
nb::object typed(nb::handle m, ModelConfig config) {
  nb::object self = nb::inst_alloc(nb::object(m.attr(models::config_class_name(config.family()).c_str())));
  set_value(self, std::move(config));
  return self;
}

}  // namespace

void bind_config(nb::module_& m) {
  nb::class_<ModelConfig>(m, "ModelConfig",
                          "Configuration of a model of any family.\n\n"
                          "Takes the keys of a Hugging Face config.json as keywords. A key that is not honoured raises "
                          "Unsupported, a value that does not fit InvalidArgument.")
      .def(
          "__init__",
          [](ModelConfig* self, const nb::kwargs& keywords) {
            new (self) ModelConfig(config_from_dict(nb::dict(keywords), "ModelConfig"));
          },
          nb::sig("def __init__(self, *, model_type: str, vocab_size: int, hidden_size: int, intermediate_size: int, "
                  "num_hidden_layers: int, num_attention_heads: int, **keys: object) -> None"))
      .def_rw("model_type", &ModelConfig::model_type)
      .def_rw("vocab_size", &ModelConfig::vocab_size)
      .def_rw("hidden_size", &ModelConfig::hidden_size)
      .def_rw("intermediate_size", &ModelConfig::intermediate_size)
      .def_prop_rw(
          "num_hidden_layers", [](const ModelConfig& c) { return c.num_hidden_layers; },
          [](ModelConfig& c, int64_t layers) {
            if (layers < 1 || layers > 4096)
              throw InvalidArgument("num_hidden_layers is {}; expected 1 to 4096", layers);
            c.layer_windows.resize(static_cast<size_t>(layers), c.layer_windows.empty() ? 0 : c.layer_windows.back());
            if (!c.layer_chunks.empty()) c.layer_chunks.resize(static_cast<size_t>(layers), c.layer_chunks.back());
            c.num_hidden_layers = layers;
          },
          "Decoder layers. New ones get the attention window, or the chunks, of the last one.")
      .def_rw("num_attention_heads", &ModelConfig::num_attention_heads)
      .def_rw("num_key_value_heads", &ModelConfig::num_key_value_heads)
      .def_prop_rw(
          "head_dim", [](const ModelConfig& c) { return c.head_dim; },
          [](ModelConfig& c, int64_t head_dim) {
            if (c.rotary_dim == c.head_dim) c.rotary_dim = head_dim;
            c.head_dim = head_dim;
          },
          "Elements per head.")
      .def_rw("max_position_embeddings", &ModelConfig::max_position_embeddings, "Context length in tokens.")
      .def_rw("rms_norm_eps", &ModelConfig::rms_norm_eps)
      .def_rw("rope_theta", &ModelConfig::rope_theta)
      .def_prop_rw(
          "hidden_act", [](const ModelConfig& c) { return c.describe().find("hidden_act")->as_string(); },
          [](ModelConfig& c, const std::string& name) { set_key(c, "hidden_act", nb::cast(name)); })
      .def_prop_rw(
          "attention_bias", [](const ModelConfig& c) { return c.attention_bias; },
          [](ModelConfig& c, bool bias) {
            c.attention_bias = bias;
            c.attention_out_bias = bias && c.family().find_type(c.model_type)->out_bias;
          },
          "Whether the projections of attention have a bias: q, k and v, and in most model types o as well.")
      .def_rw("mlp_bias", &ModelConfig::mlp_bias)
      .def_rw("tie_word_embeddings", &ModelConfig::tie_word_embeddings)
      .def_prop_rw(
          "use_cache", [](const ModelConfig&) { return true; },
          [](ModelConfig&, bool use_cache) {
            if (!use_cache)
              throw Unsupported("use_cache is False; an engine keeps the keys and values of earlier tokens");
          },
          "True: an engine keeps the keys and values of earlier tokens.")
      .def_rw("bos_token_id", &ModelConfig::bos_token_id)
      .def_rw("eos_token_id", &ModelConfig::eos_token_id)
      .def("kv_dim", &ModelConfig::kv_dim, "Elements of one token's keys (or values) in one layer.")
      .def("num_parameters", &ModelConfig::num_parameters, "Number of parameters of a model of this configuration.")
      .def(
          "validate", [](const ModelConfig& c) { c.validate("the configuration"); },
          "Checks that the fields fit together; raises InvalidArgument naming the field and its value.")
      .def(
          "to_json", [](const ModelConfig& c) { return io::to_json(c.to_json()); },
          "The text of a config.json of this configuration.")
      .def(
          "__eq__", [](const ModelConfig& a, const ModelConfig& b) { return a == b; }, nb::is_operator(),
          nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", &repr_of);

  // `from eadem._eadem import *` gives these classes, so that the package need not list them.
  nb::list names;
  for (const ModelFamily* family : models::families()) {
    const std::string name = models::config_class_name(*family);
    m.attr(name.c_str()) = family_class(m, *family);
    names.append(name);
  }
  m.attr("__all__") = names;
  m.def(
      "config_from_pretrained", [m = nb::handle(m)](const std::string& path) { return typed(m, read_config(path)); },
      "path"_a, nb::sig("def config_from_pretrained(path: str) -> ModelConfig"));
}

}  // namespace eadem::python
