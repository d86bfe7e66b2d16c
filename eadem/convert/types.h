// SPDX-License-Identifier: Apache-2.0
//
// How `eadem convert --type` stores each matrix of a model.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "eadem/core/encoding.h"
#include "eadem/models/model.h"

namespace eadem::convert {

// Names that --type takes: plain dtypes, block encodings, and mixtures of these, which spend more bits where errors
// cost most. The mixtures store what files of the same name on the web do (q2_k_m is Q2_K there).
std::vector<std::string> convert_type_names();

// Whether `type` is a quantized one: neither a plain dtype nor "as-is".
bool is_quantized_type(std::string_view type_name);

// Returns the type of the matrix `parameter` of `columns` columns under `type_name`, one of convert_type_names(). If
// columns are not divisible into blocks, it is a type of at least as many bits whose blocks fit, or f16 if there is
// none.
WeightType convert_type_of(std::string_view type_name, const models::ModelInfo& model, const std::string& parameter,
                           int64_t columns);

// Whether a parameter is a norm or a bias, also of several experts or groups, one in each row.
bool is_vector(const std::string& parameter);

// Whether a parameter is the weight of a short convolution, which no rows multiply: other programs read it in f32 only.
bool is_convolution(const std::string& parameter);

// Returns the value of GGUF's general.file_type for a file that is mostly `type`.
uint32_t gguf_file_type(std::string_view type_name, const WeightType& most_common);

}  // namespace eadem::convert
