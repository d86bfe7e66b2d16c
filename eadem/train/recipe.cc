// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/recipe.h"

#include <fmt/format.h>

#include <toml++/toml.h>
#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <numbers>
#include <set>

#include "eadem/core/error.h"
#include "eadem/io/files/mapped_file.h"
#include "eadem/train/trainer.h"

namespace eadem::train {

namespace {

namespace fs = std::filesystem;

// One table of the recipe, which records the keys that were read.
class Table {
 public:
  Table(const toml::table& root, std::string name, std::string file) : name_(std::move(name)), file_(std::move(file)) {
    const toml::node* node = root.get(name_);
    if (node == nullptr) return;
    table_ = node->as_table();
    if (table_ == nullptr) throw InvalidArgument("{}: '{}' is not a table; expected [{}]", file_, name_, name_);
  }

  void integer(const char* key, int64_t& value, int64_t min, int64_t max) {
    if (const toml::node* node = find(key)) {
      const auto read = node->value_exact<int64_t>();
      if (!read || *read < min || *read > max) fail(key, *node, fmt::format("an integer in [{}, {}]", min, max));
      value = *read;
    }
  }
  void number(const char* key, double& value, double min, double max) {
    if (const toml::node* node = find(key)) {
      const auto read = node->is_number() ? node->value<double>() : std::optional<double>();
      if (!read || !(*read >= min && *read <= max)) fail(key, *node, fmt::format("a number in [{}, {}]", min, max));
      value = *read;
    }
  }
  void string(const char* key, std::string& value) {
    if (const toml::node* node = find(key)) {
      const auto read = node->value_exact<std::string>();
      if (!read || read->empty()) fail(key, *node, "a string that is not empty");
      value = *read;
    }
  }
  void boolean(const char* key, bool& value) {
    if (const toml::node* node = find(key)) {
      const auto read = node->value_exact<bool>();
      if (!read) fail(key, *node, "true or false");
      value = *read;
    }
  }
  void choice(const char* key, std::initializer_list<std::string_view> choices, std::string& value) {
    choice(key, std::vector<std::string>(choices.begin(), choices.end()), value);
  }
  void choice(const char* key, const std::vector<std::string>& choices, std::string& value) {
    string(key, value);
    if (std::find(choices.begin(), choices.end(), value) == choices.end())
      fail(key, *find(key), fmt::format("one of {}", fmt::join(choices, ", ")));
  }
  bool has(const char* key) const { return table_ != nullptr && table_->contains(key); }
  void path(const char* key, std::string& value) {
    string(key, value);
    if (!value.empty() && fs::path(value).is_relative())
      value = (fs::path(file_).parent_path() / value).lexically_normal().string();
  }
  void paths(const char* key, std::vector<std::string>& values) {
    const toml::node* node = find(key);
    if (node == nullptr) return;
    const toml::array* array = node->as_array();
    if (array == nullptr) fail(key, *node, "an array of file names");
    for (const toml::node& element : *array) {
      const auto name = element.value_exact<std::string>();
      if (!name || name->empty()) fail(key, element, "file names");
      const fs::path file(*name);
      values.push_back(file.is_relative() ? (fs::path(file_).parent_path() / file).lexically_normal().string() : *name);
    }
  }
  void strings(const char* key, std::vector<std::string>& values, const char* expected) {
    const toml::node* node = find(key);
    if (node == nullptr) return;
    const toml::array* array = node->as_array();
    if (array == nullptr) fail(key, *node, expected);
    for (const toml::node& element : *array) {
      const auto text = element.value_exact<std::string>();
      if (!text || text->empty()) fail(key, element, expected);
      values.push_back(*text);
    }
  }
  void require(bool ok, const char* what) const {
    if (!ok) throw InvalidArgument("{}: [{}] needs {}", file_, name_, what);
  }
  void refuse_unread() const {
    if (table_ == nullptr) return;
    for (const auto& [key, node] : *table_)
      if (!read_.contains(key.str()))
        throw Unsupported("{}:{}: unknown key '{}' in [{}]", file_, node.source().begin.line, key.str(), name_);
  }

 private:
  const toml::node* find(const char* key) {
    read_.insert(key);
    return table_ == nullptr ? nullptr : table_->get(key);
  }
  [[noreturn]] void fail(const char* key, const toml::node& node, const std::string& expected) const {
    std::ostringstream value;
    node.visit([&](const auto& typed) { value << typed; });
    throw InvalidArgument("{}:{}: '{}.{}' is {}; expected {}", file_, node.source().begin.line, name_, key, value.str(),
                          expected);
  }

  std::string name_;
  std::string file_;
  const toml::table* table_ = nullptr;
  std::set<std::string, std::less<>> read_;
};

constexpr int64_t kMaxRecipeBytes = 1 << 20;

// The tenth as a person would write it, so that stating the default changes nothing: 3e-3 / 10 is not the number 3e-4.
double tenth_of(double value) {
  const std::string text = fmt::format("{:.15g}", value / 10);
  double result = 0;
  std::from_chars(text.data(), text.data() + text.size(), result);
  return result;
}

toml::table parse(const std::string& path) {
  const std::string text = io::read_file(path, kMaxRecipeBytes);
  try {
    return toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    throw DataCorrupted("{}:{}:{}: {}", path, error.source().begin.line, error.source().begin.column,
                        std::string_view(error.description()));
  }
}

}  // namespace

Recipe load_recipe(const std::string& path) {
  const toml::table root = parse(path);
  constexpr int64_t kMany = int64_t{1} << 40;
  Recipe recipe;
  recipe.path = path;

  Table model(root, "model", path);
  model.path("config", recipe.config);
  model.path("init_from", recipe.init_from);
  model.number("init_std", recipe.init_std, 1e-6, 10.0);
  model.require(recipe.config.empty() != recipe.init_from.empty(), "one of 'config' and 'init_from'");

  Table tokenizer(root, "tokenizer", path);
  tokenizer.path("path", recipe.tokenizer);
  tokenizer.require(!recipe.tokenizer.empty() || !recipe.init_from.empty(),
                    "'path', a directory with a tokenizer.json or a .gguf (without it, that of [model] init_from is "
                    "taken)");

  Table data(root, "data", path);
  data.paths("train", recipe.train.files);
  data.require(!recipe.train.files.empty(), "'train', a list of files");
  std::string format = "by name";
  if (data.has("format")) {
    data.choice("format", {"text", "jsonl"}, format);
    recipe.train.format = format == "text" ? TextFormat::text : TextFormat::json_lines;
  }
  data.string("separator", recipe.train.separator);
  data.string("text_key", recipe.train.text_key);
  data.boolean("parse_special", recipe.train.parse_special);
  recipe.eval = recipe.train;
  recipe.eval.files.clear();
  data.paths("eval", recipe.eval.files);

  Table training(root, "training", path);
  Recipe::Training& t = recipe.training;
  training.integer("steps", t.steps, 1, kMany);
  training.require(t.steps > 0, "'steps'");
  training.integer("batch_tokens", t.batch_tokens, 2, 1 << 24);
  training.integer("accumulation", t.accumulation, 1, 1 << 20);
  training.integer("sequence_length", t.sequence_length, 2, 1 << 24);
  std::string weights(dtype_name(t.weights));
  training.choice("weights", {"f32", "bf16"}, weights);
  t.weights = *dtype_from_name(weights);
  std::string products = "plain";
  training.choice("products", product_names(), products);
  t.products = products_from_name(products);
  std::string head_products = "plain";
  training.choice("head_products", head_product_names(), head_products);
  t.head_products = head_products_from_name(head_products);
  training.integer("amax_history", t.amax_history, 1, 1 << 16);
  std::string recompute = "none";
  training.choice("recompute", {"none", "layers"}, recompute);
  t.recompute_layers = recompute == "layers";
  training.number("learning_rate", t.learning_rate, 0, 100);
  t.min_learning_rate = tenth_of(t.learning_rate);
  training.number("min_learning_rate", t.min_learning_rate, 0, 100);
  training.integer("warmup_steps", t.warmup_steps, 0, kMany);
  training.integer("decay_steps", t.decay_steps, 1, kMany);
  training.number("weight_decay", t.weight_decay, 0, 100);
  training.number("beta1", t.beta1, 0, 1 - 1e-9);
  training.number("beta2", t.beta2, 0, 1 - 1e-9);
  training.number("eps", t.eps, 1e-30, 1);
  training.number("max_grad_norm", t.max_grad_norm, 0, 1e9);
  if (training.has("router_aux_loss_coef"))
    training.number("router_aux_loss_coef", t.router_aux_loss_coef.emplace(), 0, 1e6);
  training.strings("freeze", t.freeze, "an array of names of parameters, in which * stands for any characters");
  int64_t seed = static_cast<int64_t>(t.seed);
  training.integer("seed", seed, 0, INT64_MAX);
  t.seed = static_cast<uint64_t>(seed);
  training.integer("eval_interval", t.eval_interval, 1, kMany);
  training.integer("checkpoint_interval", t.checkpoint_interval, 1, kMany);
  training.integer("keep_checkpoints", t.keep_checkpoints, 1, 1000);
  if (t.min_learning_rate > t.learning_rate)
    throw InvalidArgument("{}: min_learning_rate {} is above learning_rate {}", path, t.min_learning_rate,
                          t.learning_rate);

  Table output(root, "output", path);
  output.path("directory", recipe.output);
  output.require(!recipe.output.empty(), "'directory'");

  for (const Table* table : {&model, &tokenizer, &data, &training, &output}) table->refuse_unread();
  for (const auto& [key, node] : root)
    if (key != "model" && key != "tokenizer" && key != "data" && key != "training" && key != "output")
      throw Unsupported("{}:{}: unknown table or key '{}'", path, node.source().begin.line, key.str());
  return recipe;
}

double learning_rate_at(const Recipe::Training& t, int64_t step) {
  EADEM_CHECK(t.decay_steps > 0, "decay_steps {} is not settled", t.decay_steps);
  if (step < t.warmup_steps)
    return t.learning_rate * static_cast<double>(step + 1) / static_cast<double>(t.warmup_steps);
  const double length = static_cast<double>(std::max<int64_t>(1, t.decay_steps - t.warmup_steps));
  const double progress = std::min(1.0, static_cast<double>(step - t.warmup_steps) / length);
  return t.min_learning_rate +
         0.5 * (t.learning_rate - t.min_learning_rate) * (1 + std::cos(std::numbers::pi * progress));
}

}  // namespace eadem::train
