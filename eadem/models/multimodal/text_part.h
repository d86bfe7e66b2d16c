// SPDX-License-Identifier: Apache-2.0
//
// Multimodal checkpoints in Hugging Face layout: the language model inside is read as the text model that it is, and
// encoders of images and sounds are left out.
#pragma once

#include <memory>
#include <string>

#include "eadem/io/json.h"
#include "eadem/io/weights.h"

namespace eadem::models {

// Whether `config` describes a multimodal model: its `model_type` is in the list of text_part.cc.
bool is_multimodal(const io::JsonReader& config);

// The config.json of the text model inside the multimodal model that `config` describes. It has the keys of
// `text_config`, and those of the whole model that concern text. The other keys of `config` are ignored with a reason.
// `weights`, which may be null, tell whether there is a head where the config does not say that it is tied. Throws
// DataCorrupted for a malformed config, and for one without `text_config` unless its type was published so.
io::JsonReader text_config_of(const io::JsonReader& config, const io::WeightSource* weights);

// The tensors of the text model, under the names that they have in a checkpoint of text alone. The result keeps
// `weights` alive.
std::shared_ptr<const io::WeightSource> text_weights_of(std::shared_ptr<const io::WeightSource> weights);

// One line for people that says which part is read, and which modules of `weights` (null: unknown) are left out.
std::string text_part_notice(const io::JsonReader& config, const io::WeightSource* weights);

}  // namespace eadem::models
