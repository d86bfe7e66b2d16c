// SPDX-License-Identifier: Apache-2.0
//
// eadem inspect: prints the contents of a model's files.
#include <algorithm>
#include <map>
#include <utility>

#include "eadem/cli/commands.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/printable.h"
#include "eadem/engine/llm.h"
#include "eadem/engine/text/chat_prompt.h"
#include "eadem/io/json.h"
#include "eadem/models/config/model_config.h"
#include "eadem/models/mtp_model.h"

namespace eadem::cli {

namespace {

using io::JsonValue;

struct TypeTotal {
  int64_t tensors = 0;
  int64_t bytes = 0;
};

JsonValue shape_json(const Shape& shape) {
  JsonValue dims = JsonValue::array();
  for (int64_t dim : shape.dims()) dims.push_back(dim);
  return dims;
}

// The context lengths in the table: powers of four from 512, and the model's own.
std::vector<int64_t> context_lengths(int64_t longest) {
  std::vector<int64_t> lengths;
  for (int64_t length = 512; length < longest; length *= 4) lengths.push_back(length);
  lengths.push_back(longest);
  return lengths;
}

JsonValue token_json(const io::Tokenizer& tokenizer, int32_t id) {
  JsonValue json = JsonValue::object().set("id", id);
  return json.set("text", tokenizer.is_token(id) ? json_text(tokenizer.token_text(id)) : JsonValue(nullptr));
}

// A short conversation as the model's template writes it.
JsonValue sample_json(const engine::ChatPrompt& chat) {
  const auto message = [](const char* role, const char* content) {
    return JsonValue::object().set("role", role).set("content", content);
  };
  JsonValue messages = JsonValue::array();
  messages.push_back(message("user", "Hello!")).push_back(message("assistant", "Hi there."));
  messages.push_back(message("user", "How are you?"));
  return JsonValue::object()
      .set("text", json_text(io::join_segments(chat.render(messages))))
      .set("tokens", static_cast<int64_t>(chat.encode(messages).size()));
}

JsonValue stop_tokens_json(const models::Checkpoint& checkpoint, const io::Tokenizer& tokenizer,
                           const engine::ChatPrompt& chat) {
  JsonValue stops = JsonValue::array();
  for (const engine::StopToken& stop : engine::chat_stop_tokens(checkpoint, tokenizer, chat)) {
    JsonValue reasons = JsonValue::array();
    for (const std::string& reason : stop.reasons) reasons.push_back(reason);
    stops.push_back(token_json(tokenizer, stop.id).set("reasons", std::move(reasons)));
  }
  return stops;
}

// Adds the names of the chat templates, a sample of the default one (or why there is none; null without a template),
// and the tokens that end an answer.
void add_chat(JsonValue& json, const models::Checkpoint& checkpoint, const io::Tokenizer& tokenizer) {
  JsonValue names = JsonValue::array();
  for (const io::NamedTemplate& named : tokenizer.chat_templates()) names.push_back(json_text(named.name));
  const bool has_template = !names.as_array().empty();
  json.set("chat_templates", std::move(names));
  json.set("chat_template_bytes", static_cast<int64_t>(tokenizer.chat_template().size()));
  json.set("chat_sample", nullptr).set("stop_tokens", JsonValue::array());
  try {
    const engine::ChatPrompt chat(tokenizer);
    json.set("stop_tokens", stop_tokens_json(checkpoint, tokenizer, chat));
    if (has_template) json.set("chat_sample", sample_json(chat));
  } catch (const Error& error) {
    json.set("chat_sample", JsonValue::object().set("error", json_text(error.what())));
  }
}

JsonValue tokenizer_json(const models::Checkpoint& checkpoint) {
  JsonValue json = JsonValue::object();
  if (checkpoint.weights == nullptr) return json.set("error", "a config.json alone has none");
  try {
    const io::Tokenizer tokenizer = engine::open_tokenizer(checkpoint);
    const auto id = [&](std::optional<int32_t> value) {
      return value ? token_json(tokenizer, *value) : JsonValue(nullptr);
    };
    json.set("source", json_text(tokenizer.source())).set("vocab_size", tokenizer.vocab_size());
    json.set("bos", id(tokenizer.bos())).set("eos", id(tokenizer.eos())).set("unk", id(tokenizer.unk()));
    json.set("pad", id(tokenizer.pad()));
    JsonValue prefix = JsonValue::array();
    for (int32_t value : tokenizer.prefix_ids()) prefix.push_back(value);
    json.set("prefix_ids", std::move(prefix));
    JsonValue notes = JsonValue::array();
    for (const std::string& note : tokenizer.notes()) notes.push_back(json_text(note));
    json.set("notes", std::move(notes));
    add_chat(json, checkpoint, tokenizer);
  } catch (const Error& error) {
    json.set("error", json_text(error.what()));
  }
  return json;
}

JsonValue describe(const models::Checkpoint& checkpoint, const Device& device,
                   const modules::AutoHardwareConfig& hardware) {
  const models::ModelInfo& info = checkpoint.model->info();
  const modules::ModelSpec spec = checkpoint.model->spec();
  JsonValue json = JsonValue::object();
  json.set("path", json_text(checkpoint.path))
      .set("architecture", info.architecture)
      .set("parameters", spec.num_parameters);
  if (!checkpoint.notice.empty()) json.set("notice", checkpoint.notice);
  json.set("vocab", info.vocab).set("hidden", info.hidden).set("ffn", spec.ffn).set("layers", info.layers);
  json.set("heads", info.heads).set("kv_heads", info.kv_heads).set("head_dim", info.head_dim);
  json.set("context", info.max_positions);
  if (const models::ModelConfig* config = checkpoint.model->config(); config != nullptr && config->num_experts > 0)
    json.set("experts", JsonValue::object()
                            .set("count", config->num_experts)
                            .set("identities", config->identity_experts)
                            .set("per_token", config->num_experts_per_tok)
                            .set("ffn", config->moe_intermediate_size));

  const std::string mtp = models::mtp_place(checkpoint);
  json.set("mtp", !mtp.empty());
  if (!mtp.empty()) json.set("mtp_head", mtp);

  int64_t file_bytes = 0;
  if (checkpoint.weights != nullptr) {
    std::map<std::string, TypeTotal> types;
    JsonValue tensors = JsonValue::array();
    for (const io::WeightInfo& tensor : checkpoint.weights->tensors()) {
      ++types[tensor.type_name].tensors;
      types[tensor.type_name].bytes += tensor.size_bytes;
      file_bytes += tensor.size_bytes;
      tensors.push_back(JsonValue::object()
                            .set("name", json_text(tensor.name))
                            .set("type", tensor.type_name)
                            .set("shape", shape_json(tensor.shape))
                            .set("bytes", tensor.size_bytes));
    }
    JsonValue totals = JsonValue::object();
    for (const auto& [name, total] : types)
      totals.set(name, JsonValue::object().set("tensors", total.tensors).set("bytes", total.bytes));
    json.set("weight_bytes", file_bytes).set("types", std::move(totals)).set("tensors", std::move(tensors));
  }
  json.set("tokenizer", tokenizer_json(checkpoint));
  JsonValue ignored = JsonValue::array();
  for (const models::IgnoredKey& key : checkpoint.ignored_keys)
    ignored.push_back(JsonValue::object().set("key", key.path).set("reason", key.reason));
  json.set("ignored_keys", std::move(ignored));

  const engine::StateBytes state_bytes = engine::state_bytes(*checkpoint.model, device, hardware);
  JsonValue memory = JsonValue::array();
  for (int64_t length : context_lengths(info.max_positions))
    memory.push_back(JsonValue::object()
                         .set("context", length)
                         .set("kv_cache_bytes", state_bytes.of_sequence(length))
                         .set("total_bytes", state_bytes.of_sequence(length) + file_bytes));
  json.set("kv_cache_dtype", std::string(hardware.of(modules::Role::attention, 0).precision.kv_cache.value.name()));
  json.set("memory", std::move(memory));
  try {
    json.set("config", checkpoint.model->config_json());
  } catch (const Unsupported&) {  // A GGUF file may state what no config.json can state.
  }
  return json;
}

std::string token_text_of(const JsonValue& token) {
  return token.is_null() ? "none"
                         : fmt::format("{} ({})", token.find("text")->as_string(), token.find("id")->as_integer());
}

// "<|im_end|> (151645): the chat template's end of turn, generation_config.json"
std::string stop_text(const JsonValue& stop) {
  std::string reasons;
  for (const JsonValue& reason : stop.find("reasons")->as_array())
    reasons += (reasons.empty() ? "" : ", ") + reason.as_string();
  const JsonValue& text = *stop.find("text");
  const int64_t id = stop.find("id")->as_integer();
  return text.is_null() ? fmt::format("{} (no token of the tokenizer): {}", id, reasons)
                        : fmt::format("{} ({}): {}", text.as_string(), id, reasons);
}

void print_text(const JsonValue& json, bool with_tensors) {
  const auto integer = [&](const char* key) { return json.find(key)->as_integer(); };
  print(fmt::format("{}\n", bold(json.find("path")->as_string())));
  const auto row = [](std::string_view name, const std::string& text) {
    print(fmt::format("  {:<14} {}\n", name, text));
  };
  row("architecture", json.find("architecture")->as_string());
  if (const JsonValue* notice = json.find("notice")) row("", notice->as_string());
  row("parameters",
      fmt::format("{} ({})", count_text(static_cast<double>(integer("parameters"))), integer("parameters")));
  row("shape", fmt::format("{} layers, hidden {}, ffn {}, {} heads of {} ({} for keys and values), vocabulary {}",
                           integer("layers"), integer("hidden"), integer("ffn"), integer("heads"), integer("head_dim"),
                           integer("kv_heads"), integer("vocab")));
  if (const JsonValue* experts = json.find("experts")) {
    const auto of = [&](const char* key) { return experts->find(key)->as_integer(); };
    const int64_t identities = of("identities");
    row("experts",
        fmt::format("{} in a layer{}, {} for each token, ffn {}", of("count"),
                    identities > 0 ? fmt::format(" and {} identities", identities) : "", of("per_token"), of("ffn")));
  }
  row("context", fmt::format("{} tokens", integer("context")));
  if (const JsonValue* head = json.find("mtp_head"))
    row("MTP", fmt::format("a head for multi-token prediction, {}: --speculate mtp", head->as_string()));
  if (const JsonValue* types = json.find("types")) {
    std::string text;
    for (const io::JsonMember& type : types->as_object())
      text += fmt::format("{}{} x {} ({})", text.empty() ? "" : ", ", type.value.find("tensors")->as_integer(),
                          type.key, bytes_text(static_cast<double>(type.value.find("bytes")->as_integer())));
    row("tensors", text);
  }
  const JsonValue& tokenizer = *json.find("tokenizer");
  if (const JsonValue* error = tokenizer.find("error")) {
    row("tokenizer", "none: " + error->as_string());
  } else {
    row("tokenizer", fmt::format("{} tokens, BOS {}, EOS {}", tokenizer.find("vocab_size")->as_integer(),
                                 token_text_of(*tokenizer.find("bos")), token_text_of(*tokenizer.find("eos"))));
    for (const JsonValue& note : tokenizer.find("notes")->as_array()) row("", note.as_string());
    for (std::string_view heading = "stop tokens"; const JsonValue& stop : tokenizer.find("stop_tokens")->as_array())
      row(std::exchange(heading, ""), stop_text(stop));
    const int64_t bytes = tokenizer.find("chat_template_bytes")->as_integer();
    if (const auto& names = tokenizer.find("chat_templates")->as_array(); names.size() > 1) {
      std::string text;
      for (const JsonValue& name : names) text += (text.empty() ? "" : ", ") + name.as_string();
      row("chat templates", text);
    }
    const JsonValue& sample = *tokenizer.find("chat_sample");
    if (sample.is_null()) {
      row("chat template", "none");
    } else if (const JsonValue* refusal = sample.find("error")) {
      row("chat template", fmt::format("{} bytes; cannot be rendered: {}", bytes, refusal->as_string()));
    } else {
      row("chat template", fmt::format("{} bytes; a sample of {} tokens:", bytes, sample.find("tokens")->as_integer()));
      const std::string& text = sample.find("text")->as_string();
      for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find('\n', begin), text.size());
        row("", printable(text.substr(begin, end - begin)));
        begin = end + 1;
      }
    }
  }
  std::string_view heading = "ignored keys";
  for (const JsonValue& key : json.find("ignored_keys")->as_array())
    row(std::exchange(heading, ""),
        fmt::format("{}: {}", key.find("key")->as_string(), key.find("reason")->as_string()));
  print(fmt::format(
      "\n  memory: weights {}, and keys and values in {}\n",
      json.find("weight_bytes") != nullptr ? bytes_text(static_cast<double>(integer("weight_bytes"))) : "not read",
      json.find("kv_cache_dtype")->as_string()));
  print(fmt::format("  {:>10}  {:>10}  {:>10}\n", "context", "KV cache", "together"));
  for (const JsonValue& line : json.find("memory")->as_array())
    print(fmt::format("  {:>10}  {:>10}  {:>10}\n", line.find("context")->as_integer(),
                      bytes_text(static_cast<double>(line.find("kv_cache_bytes")->as_integer())),
                      bytes_text(static_cast<double>(line.find("total_bytes")->as_integer()))));
  if (!with_tensors || json.find("tensors") == nullptr) return;
  print("\n");
  size_t width = 5;
  for (const JsonValue& tensor : json.find("tensors")->as_array())
    width = std::max(width, tensor.find("type")->as_string().size());
  for (const JsonValue& tensor : json.find("tensors")->as_array())
    print(fmt::format(
        "  {:<{}} {:<18} {:>9}  {}\n", tensor.find("type")->as_string(), width, to_compact_json(*tensor.find("shape")),
        bytes_text(static_cast<double>(tensor.find("bytes")->as_integer())), tensor.find("name")->as_string()));
}

}  // namespace

int inspect(CommandLine command_line) {
  ModelOptions options;
  bool json = false, tensors = false;
  Arguments arguments(
      "inspect",
      "Shows what a model's files hold: architecture, parameters, tensors and their encodings, "
      "tokenizer, keys of the configuration that are ignored and why, and the memory it needs by context "
      "length. Runs nothing and reads no weights.");
  options.add_operand(arguments);
  options.add_kv_dtype(arguments);
  arguments.flag("--tensors", tensors, "list every tensor (--json always does)");
  arguments.flag("--json", json, "one JSON object, with the configuration as it is understood");
  arguments.note("MODEL may also be a config.json without weights.");
  arguments.example("eadem inspect model.gguf --tensors", "every tensor with its type, shape and size");
  arguments.example("eadem inspect path/to/model --json | jq .config", "the configuration as Eadem understands it");
  if (!arguments.parse(command_line)) return kOk;

  const models::Checkpoint checkpoint = open_described(options.model);
  const std::shared_ptr<Device> device = open_device("cpu", {.num_threads = 1});
  const auto hardware = modules::AutoHardwareConfig::from_model_spec(
      models::spec_of(checkpoint), *device, HardwareMode::performance, options.engine_options().hardware);
  const JsonValue description = describe(checkpoint, *device, hardware);
  if (json)
    print(to_json(description) + "\n");
  else
    print_text(description, tensors);
  return kOk;
}

}  // namespace eadem::cli
