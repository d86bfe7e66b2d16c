// SPDX-License-Identifier: Apache-2.0
//
// The name and the fields of a family's configuration class. They are made from the registry of families
// (models/family.h), so that a new family has a class without further code.
#pragma once

#include <string>
#include <vector>

#include "eadem/io/json.h"
#include "eadem/models/family.h"

namespace eadem::models {

// A key of the config.json of a family, and the kinds that its values may have.
struct ConfigField {
  std::string name;
  std::vector<io::JsonValue::Kind> kinds;
  bool own = false;  // it states something else than the member of ModelConfig that has its name: head_dim, of latents
};

// "LlamaConfig", "Qwen3MoeConfig": the family's name, spelled as a Python class of its model types spells it if one
// does
// ("GPTNeoXConfig").
std::string config_class_name(const ModelFamily& family);

// The keys that ModelConfig::describe() writes for the family, whatever is switched on.
std::vector<ConfigField> config_fields(const ModelFamily& family);

}  // namespace eadem::models
