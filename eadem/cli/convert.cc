// SPDX-License-Identifier: Apache-2.0
//
// eadem convert: writes a model in the other file format, or with its weights stored in other types.
#include <algorithm>

#include "eadem/cli/commands.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/convert/convert.h"
#include "eadem/convert/layers.h"
#include "eadem/convert/types.h"
#include "eadem/io/json.h"

namespace eadem::cli {

namespace {

using convert::ConvertedTensor;
using convert::Rounding;

struct ConvertCommand {
  std::string in, out, type = std::string(convert::kAsIs);
  std::optional<std::string> calibration_file;
  std::optional<int64_t> calibration_tokens;
  ModelOptions device;  // the device that computes
  bool force = false, no_tokenizer = false, json = false, quiet = false;
};

// Returns nothing when help was asked for.
std::optional<ConvertCommand> parse_convert(CommandLine command_line) {
  ConvertCommand options;
  Arguments arguments("convert",
                      "Writes a model in the other format, or with its weights stored in another way: a .gguf file "
                      "when OUT ends in .gguf, else a directory in Hugging Face layout. Shows each tensor's size and "
                      "error. Tensors are read, converted and written a part at a time; the output appears whole or "
                      "not at all.");
  arguments.operand("IN", options.in, "a model, as other commands take it");
  arguments.operand("OUT", options.out, "a .gguf file or a directory");
  std::vector<std::string> types = convert::all_type_names();
  types.insert(types.begin(), std::string(convert::kAsIs));
  arguments.choice(
      "--type", types, options.type,
      "of matrices (default: as-is); norms and biases are never rounded. int8, int4 in groups and fp8 are "
      "for directories, and for the linear layers of the decoder; the other quantized types are for .gguf "
      "files; _s, _m and _l are mixtures that spend more bits on values, down projections and the LM head. "
      "iq1 to iq3 and tq types are only read: nothing here quantizes to them; as-is keeps them");
  arguments.option("--calibrate", "FILE", options.calibration_file,
                   "run the model over this UTF-8 text first, and let an error cost what the inputs of its column are "
                   "worth (an importance matrix)");
  arguments.option("--calibrate-tokens", "N", options.calibration_tokens,
                   "at most so many tokens of the text (default: 32k)");
  arguments.flag("--no-tokenizer", options.no_tokenizer, "leave the tokenizer out");
  arguments.flag("--force", options.force, "overwrite OUT");
  arguments.flag("--json", options.json, "the list of tensors as JSON");
  arguments.flag("-q,--quiet", options.quiet, "no list of tensors, only the sum");
  options.device.add_device(arguments);
  arguments.note(
      "Between the formats, rows of q and k are reordered where GGUF files have another order, and config.json and "
      "tokenizer.json become metadata or the other way round; what one cannot say of the other is refused "
      "by name. GGUF has no place for generation_config.json.");
  arguments.example("eadem convert path/to/model model.gguf", "a directory to GGUF");
  arguments.example("eadem convert path/to/model model.gguf --type q4_k_m", "quantized, to a third of 16 bits");
  arguments.example("eadem convert path/to/model model.gguf --type q3_k_m --calibrate text.txt",
                    "quantized so that a text like this one suffers least");
  arguments.example("eadem convert model.gguf path/to/model --type bf16", "GGUF to a directory, in 16 bits");
  arguments.example("eadem convert path/to/model path/to/small --type int4_g128",
                    "4 bits in groups of 128, as compressed-tensors lays them out");
  if (!arguments.parse(command_line)) return std::nullopt;
  while (options.out.size() > 1 && options.out.ends_with('/')) options.out.pop_back();
  if (options.json && options.quiet) throw UsageError("--json and --quiet: give one");
  if (options.calibration_tokens && !options.calibration_file)
    throw UsageError("--calibrate-tokens is for --calibrate");
  if (options.calibration_tokens && *options.calibration_tokens < 1)
    throw UsageError(fmt::format("--calibrate-tokens is {}; expected at least 1", *options.calibration_tokens));
  if (options.calibration_file && !convert::is_quantized_type(options.type) && !convert::is_layer_type(options.type))
    throw UsageError(fmt::format("--calibrate is for quantized types; --type is {}", options.type));
  if (!options.calibration_file && (options.device.device != "cpu" || !options.device.isa.empty()))
    throw UsageError("--device and --isa say what --calibrate runs on");
  if (convert::is_layer_type(options.type) && convert::is_gguf_name(options.out))
    throw UsageError(fmt::format("--type {} is for directories; {} is a GGUF file", options.type, options.out));
  try {
    convert::check_output_name(options.out);
  } catch (const InvalidArgument& error) {
    throw UsageError(error.what());
  }
  return options;
}

// Prints the list of tensors to stdout, and the sum to stderr.
void print_result(const ConvertCommand& options, const std::vector<ConvertedTensor>& tensors) {
  const bool calibrated = options.calibration_file.has_value();
  int64_t bytes_before = 0, bytes_after = 0;
  double worst = 0;
  io::JsonValue list = io::JsonValue::array();
  std::string text = fmt::format("{:<44} {:<16} {:>10} {:>13} {:>14}{}  {}\n", "tensor", "type", "bytes",
                                 "largest error", "relative error", calibrated ? " error of output" : "", "from");
  for (const ConvertedTensor& tensor : tensors) {
    const Rounding& error = tensor.rounding;
    const int64_t bytes = convert::stored_bytes(tensor.type, tensor.shape);
    bytes_before += convert::stored_bytes(tensor.before, tensor.shape);
    bytes_after += bytes;
    worst = std::max(worst, error.relative);
    const std::string change = tensor.before == tensor.type
                                   ? std::string(tensor.before.name())
                                   : fmt::format("{} > {}", tensor.before.name(), tensor.type.name());
    const auto number = [](double error) { return error == 0 ? std::string("exact") : fmt::format("{:.3g}", error); };
    // A tensor whose inputs the calibration did not see gets a dash.
    const std::string output = error.relative > 0 && error.relative_output == 0 ? "-" : number(error.relative_output);
    text += fmt::format("{:<44} {:<16} {:>10} {:>13} {:>14}{}  {}\n", tensor.to, change, bytes, number(error.largest),
                        number(error.relative), calibrated ? fmt::format(" {:>15}", output) : "", tensor.from);
    io::JsonValue entry = io::JsonValue::object();
    entry.set("name", json_text(tensor.to))
        .set("from", json_text(tensor.from))
        .set("type", std::string(tensor.type.name()))
        .set("bytes", bytes)
        .set("largest_error", error.largest)
        .set("relative_error", error.relative);
    if (calibrated && output != "-") entry.set("relative_output_error", error.relative_output);
    list.push_back(std::move(entry));
  }
  if (options.json)
    print(io::to_json(io::JsonValue::object().set("output", json_text(options.out)).set("tensors", std::move(list))) +
          "\n");
  else if (!options.quiet)
    print(text);
  note("{}: {} tensors, {} before, {} now, {}", options.out, tensors.size(),
       bytes_text(static_cast<double>(bytes_before)), bytes_text(static_cast<double>(bytes_after)),
       worst == 0 ? "exact" : fmt::format("largest relative error {:.3g}", worst));
}

}  // namespace

int convert(CommandLine command_line) {
  const std::optional<ConvertCommand> command = parse_convert(command_line);
  if (!command) return kOk;
  listen_for_interrupt();
  convert::ConvertOptions options{
      .type = command->type,
      .calibration_file = command->calibration_file,
      .calibration_tokens = command->calibration_tokens.value_or(convert::kCalibrationTokens),
      .tokenizer = !command->no_tokenizer,
      .force = command->force};
  if (options.calibration_file) options.device = command->device.open();
  // Every thread computes, so that the pool is as large as prefill's.
  const DeviceOptions device = command->device.device_options();
  options.threads = device.prefill_threads > 0 ? device.prefill_threads : device.num_threads;
  options.pin = device.pin;
  std::optional<ProgressBar> calibrating, converting;
  const convert::ConvertEvents events{
      .note =
          [&](const std::string& text) {
            if (calibrating) calibrating->clear();
            note("{}", text);
          },
      .progress =
          [&](std::string_view stage, int64_t done, int64_t total, const std::string& name) {
            stop_if_interrupted();
            std::optional<ProgressBar>& bar = stage.empty() ? converting : calibrating;
            if (!bar) bar.emplace(stage.empty() ? "converting" : "calibrating");
            bar->update(static_cast<double>(done), static_cast<double>(total), stage.empty() ? name : stage);
          },
      .cancel = &interrupt_flag()};
  const std::vector<ConvertedTensor> tensors =
      convert::convert_model(resolve_model(command->in), command->out, options, events);
  converting.reset();
  print_result(*command, tensors);
  return kOk;
}

}  // namespace eadem::cli
