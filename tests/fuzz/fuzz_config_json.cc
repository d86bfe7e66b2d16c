// SPDX-License-Identifier: Apache-2.0
//
// Any text either is refused by an eadem::Error, or is a document whose written form parses back to the same value. As
// a config.json it either is refused, or describes a model, whose own config.json describes the same model.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string_view>

#include "eadem/core/error.h"
#include "eadem/io/generation_config.h"
#include "eadem/io/json.h"
#include "eadem/models/auto_model.h"
#include "eadem/models/config/model_config.h"

namespace {

using namespace eadem::io;
using eadem::models::Model;

template <typename Action>
void attempt(Action&& action) {
  try {
    action();
  } catch (const eadem::Error&) {
  }
}

void require(bool condition) {
  if (!condition) std::abort();
}

const eadem::models::ModelConfig& config_of(const Model& model) { return *model.config(); }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  attempt([&] { parse_generation_config(text, "generation_config.json"); });
  attempt([&] {
    const JsonValue value = parse_json(text, "config.json");
    require(parse_json(to_json(value), "written") == value);
    require(parse_json(to_compact_json(value), "written") == value);
  });
  std::shared_ptr<const Model> model;
  attempt([&] { model = eadem::models::model_from_config(JsonReader::parse(text, "config.json")); });
  if (model == nullptr) return 0;
  // An accepted config can be written, and the written one can be read: an error here is a finding.
  const std::string written = to_json(model->config_json());
  const auto again = eadem::models::model_from_config(JsonReader::parse(written, "written"));
  require(to_json(again->config_json()) == written);
  require(config_of(*again) == config_of(*model));
  require(model->spec().num_parameters > 0);
  return 0;
}
