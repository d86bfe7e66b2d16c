// SPDX-License-Identifier: Apache-2.0
#include "eadem/train/identity.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "eadem/ops/quantize.h"

namespace eadem::train {

Identity identity_of(const Recipe& recipe, const io::JsonValue& config, const InputHashes& hashes) {
  Identity result;
  const auto add = [&](std::string key, auto&& value) {
    result.emplace_back(std::move(key), fmt::format("{}", std::forward<decltype(value)>(value)));
  };
  double balancing = recipe.training.router_aux_loss_coef.value_or(0);
  for (const io::JsonMember& member : config.as_object()) {
    if (member.key == "router_aux_loss_coef" && !recipe.training.router_aux_loss_coef)
      balancing = member.value.as_number();
    // torch_dtype is left out: it is the dtype of the file that fine-tuning began with. What the recipe may override
    // stands below.
    if (member.key != "torch_dtype" && member.key != "router_aux_loss_coef" && member.key != "output_router_logits")
      add("model." + member.key, io::to_compact_json(member.value));
  }
  if (hashes.initial_weights.empty())
    add("model.init_std", recipe.init_std);
  else
    add("model.init_from (hash of its weights)", hashes.initial_weights);
  add("tokenizer (hash)", hashes.tokenizer);
  add("data.train (hashes of its files)", fmt::join(hashes.train, ", "));
  add("data.eval (hashes of its files)", fmt::join(hashes.eval, ", "));
  bool text = false, lines = false;
  for (const std::string& file : recipe.train.files) (is_json_lines(recipe.train, file) ? lines : text) = true;
  for (const std::string& file : recipe.eval.files) (is_json_lines(recipe.eval, file) ? lines : text) = true;
  if (text) add("data.separator", io::to_compact_json(recipe.train.separator));
  if (lines) add("data.text_key", io::to_compact_json(recipe.train.text_key));
  add("data.parse_special", recipe.train.parse_special);
  const Recipe::Training& t = recipe.training;
  add("training.batch_tokens", t.batch_tokens);
  add("training.accumulation", t.accumulation);
  add("training.sequence_length", t.sequence_length);
  add("training.weights", dtype_name(t.weights));
  if (t.products != nullptr) add("training.products", t.products->name());
  if (t.head_products != nullptr) add("training.head_products", t.head_products->name());
  if (ops::Quantize::has_scaling(t.products) || ops::Quantize::has_scaling(t.head_products))
    add("training.amax_history", t.amax_history);
  add("training.learning_rate", t.learning_rate);
  add("training.min_learning_rate", t.min_learning_rate);
  add("training.warmup_steps", t.warmup_steps);
  add("training.weight_decay", t.weight_decay);
  add("training.beta1", t.beta1);
  add("training.beta2", t.beta2);
  add("training.eps", t.eps);
  add("training.max_grad_norm", t.max_grad_norm);
  if (balancing > 0) add("training.router_aux_loss_coef", balancing);
  if (!t.freeze.empty()) add("training.freeze", fmt::join(t.freeze, ", "));
  add("training.seed", t.seed);
  return result;
}

std::vector<std::string> differences(const Identity& a, const std::string& name_a, const Identity& b,
                                     const std::string& name_b) {
  const auto value = [](const Identity& identity, const std::string& key) -> std::string {
    for (const auto& [name, text] : identity)
      if (name == key) return text.empty() ? "nothing" : text;
    return "nothing";
  };
  std::vector<std::string> result;
  const auto compare = [&](const std::string& key) {
    const std::string in_a = value(a, key), in_b = value(b, key);
    if (in_a != in_b) result.push_back(fmt::format("{} is {} in {} and {} in {}", key, in_a, name_a, in_b, name_b));
  };
  for (const auto& [key, text] : a) compare(key);
  for (const auto& only : b)
    if (std::none_of(a.begin(), a.end(), [&](const auto& entry) { return entry.first == only.first; }))
      compare(only.first);
  return result;
}

}  // namespace eadem::train
