// SPDX-License-Identifier: Apache-2.0
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "eadem/convert/convert.h"
#include "eadem/python/binding.h"

namespace eadem::python {

using namespace nb::literals;

namespace {

// A dict for each tensor that was written, with the keys of `eadem convert --json`.
nb::list tensor_list(const std::vector<convert::ConvertedTensor>& tensors, bool calibrated) {
  nb::list list;
  for (const convert::ConvertedTensor& tensor : tensors) {
    nb::dict entry;
    entry["name"] = tensor.to;
    entry["from"] = tensor.from;
    entry["type"] = std::string(tensor.type.name());
    entry["bytes"] = convert::stored_bytes(tensor.type, tensor.shape);
    entry["largest_error"] = tensor.rounding.largest;
    entry["relative_error"] = tensor.rounding.relative;
    if (calibrated && (tensor.rounding.relative == 0 || tensor.rounding.relative_output > 0))
      entry["relative_output_error"] = tensor.rounding.relative_output;
    list.append(entry);
  }
  return list;
}

// Ctrl-C and the end of the interpreter stop a conversion between two bands of rows.
void stop_if_signalled() {
  stop_if_abandoned();
  const GilAcquire acquire;
  if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

nb::list convert_files(const std::string& path, const std::string& out, convert::ConvertOptions options,
                       const std::string& device, int64_t threads, const std::string& isa,
                       const nb::object& on_progress) {
  std::vector<convert::ConvertedTensor> tensors;
  {
    const GilRelease release;
    options.threads = static_cast<int>(threads);
    if (options.calibration_file) options.device = open(device, threads, isa);
    const Logger log = python_logger();
    const convert::ConvertEvents events{
        .note = [&](const std::string& text) { log.log(LogLevel::warning, "{}", text); },
        .progress =
            [&](std::string_view stage, int64_t done, int64_t total, const std::string& name) {
              stop_if_signalled();
              if (on_progress.is_none()) return;
              const GilAcquire acquire;
              on_progress(stage.empty() ? "converting" : stage, done, total, name);
            },
        .cancel = call_cancel()};
    tensors = convert::convert_model(path, out, options, events);
  }
  return tensor_list(tensors, options.calibration_file.has_value());
}

}  // namespace

void bind_convert(nb::module_& m) {
  m.def(
      "convert",
      [](const std::string& path, const std::string& out, const std::string& type,
         const std::optional<std::string>& calibrate, int64_t calibrate_tokens, bool tokenizer, bool force,
         const std::string& device, int64_t threads, const std::string& isa, const nb::object& on_progress) {
        return convert_files(path, out,
                             {.type = type,
                              .calibration_file = calibrate,
                              .calibration_tokens = calibrate_tokens,
                              .tokenizer = tokenizer,
                              .force = force},
                             device, threads, isa, on_progress);
      },
      "path"_a, "out"_a, nb::kw_only(), "type"_a, "calibrate"_a.none(), "calibrate_tokens"_a, "tokenizer"_a, "force"_a,
      "device"_a, "threads"_a, "isa"_a, "on_progress"_a.none(), "What eadem.convert calls.");
}

}  // namespace eadem::python
