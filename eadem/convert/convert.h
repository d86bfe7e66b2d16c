// SPDX-License-Identifier: Apache-2.0
//
// Writes a model in the other file format, or with its weights stored in other types: what `eadem convert` and
// eadem.convert do. convert/types.h and convert/layers.h have the types, convert/weights.h does the work.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "eadem/convert/weights.h"
#include "eadem/core/device/device.h"

namespace eadem::convert {

inline constexpr std::string_view kAsIs = "as-is";  // every tensor keeps its type
inline constexpr int64_t kCalibrationTokens = int64_t{1} << 15;

struct ConvertOptions {
  std::string type = std::string(kAsIs);        // or one of all_type_names(), of matrices
  std::optional<std::string> calibration_file;  // UTF-8 text; an error costs what the inputs of its column are worth
  int64_t calibration_tokens = kCalibrationTokens;  // at most so many tokens of it
  std::shared_ptr<Device> device;                   // runs the model over the text; null without one
  int threads = 0;                                  // that convert; 0: one for each core
  bool pin = false;                                 // them to cores
  bool tokenizer = true;                            // goes along
  bool force = false;                               // the output is overwritten
};

// What a caller hears while the conversion runs. Each may be empty. They are called on the calling thread.
struct ConvertEvents {
  std::function<void(const std::string& text)> note;  // one line for people: what is left out, warnings
  // `stage` is that of engine::Calibration, or empty while tensors are written, of which `name` is one. May throw to
  // stop.
  std::function<void(std::string_view stage, int64_t done, int64_t total, const std::string& name)> progress;
  const std::atomic<bool>* cancel = nullptr;  // once it is set, calibrating throws Cancelled
};

// Whether a conversion to `out` writes a GGUF file; else it writes a directory in Hugging Face layout.
bool is_gguf_name(std::string_view out);

// Throws InvalidArgument for a name whose ending belongs to a format that is not written.
void check_output_name(const std::string& out);

// Converts the model at `path` (as models::open_checkpoint takes it) to `out`, which appears whole or not at all, and
// returns what was written. Throws InvalidArgument for options that do not fit together, for an output that exists
// unless `force` is set, and for values that a type cannot hold; Unsupported, naming it, for what the other format
// cannot say; and what reading and writing files throw.
std::vector<ConvertedTensor> convert_model(const std::string& path, const std::string& out,
                                           const ConvertOptions& options, const ConvertEvents& events);

}  // namespace eadem::convert
