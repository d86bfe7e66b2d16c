// SPDX-License-Identifier: Apache-2.0
//
// eadem doctor: measures what this machine and this build can do, and says what is missing.
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <utility>

#include "eadem/cli/commands.h"
#include "eadem/cli/interrupt.h"
#include "eadem/cli/options/arguments.h"
#include "eadem/cli/options/model_options.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/device/cpu_device.h"
#include "eadem/core/device/cpu_probe.h"
#include "eadem/io/json.h"

namespace eadem::cli {

namespace {

using io::JsonValue;

// The value of the first line of /proc/cpuinfo with that key.
std::string cpuinfo(std::string_view key) {
  std::ifstream file("/proc/cpuinfo");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with(key))
      if (const size_t colon = line.find(": "); colon != std::string::npos) return line.substr(colon + 2);
  return {};
}

// The processor's features that kernels use or could use.
std::vector<std::string> cpu_features() {
  constexpr std::string_view kInteresting[] = {"ssse3",    "sse4_1",   "avx",         "fma",         "f16c",
                                               "avx2",     "bmi2",     "avx_vnni",    "avx512f",     "avx512bw",
                                               "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
                                               "amx_tile", "amx_bf16", "amx_int8",    "asimd",       "asimddp",
                                               "asimdhp",  "bf16",     "i8mm",        "sve",         "sve2"};
  std::string flags = cpuinfo("flags");
  if (flags.empty()) flags = cpuinfo("Features");
  flags = " " + flags + " ";
  std::vector<std::string> found;
  for (std::string_view feature : kInteresting)
    if (flags.find(fmt::format(" {} ", feature)) != std::string::npos) found.emplace_back(feature);
  return found;
}

}  // namespace

int doctor(CommandLine command_line) {
  ModelOptions options;
  bool json = false;
  Arguments arguments("doctor",
                      "Shows what this machine and this build can do: processor features and the kernels that they "
                      "select, memory bandwidth and arithmetic peak as measured, devices, and what is missing.");
  arguments.flag("--json", json, "one JSON object");
  options.add_device(arguments);
  arguments.example("eadem doctor", "about a second of measuring");
  arguments.example("eadem doctor --threads 1", "the limits of one thread");
  if (!arguments.parse(command_line)) return kOk;

  listen_for_interrupt();

  const std::vector<std::string> backends = backend_names();
  const bool cuda_build = std::find(backends.begin(), backends.end(), "cuda") != backends.end();

  const std::shared_ptr<Device> device = open_device("cpu", options.device_options());
  auto& cpu = dynamic_cast<CpuDevice&>(*device);
  const MemoryInfo memory = device->memory();
  const Topology topology = Topology::of_this_process();
  JsonValue topology_notes = JsonValue::array();
  for (const std::string& note : topology.notes()) topology_notes.push_back(note);
  cpu.set_step_kind(StepKind::decode);
  const double bandwidth = measured_read_bandwidth(cpu.pool(), probe_buffer_bytes());
  cpu.set_step_kind(StepKind::prefill);
  JsonValue peaks = JsonValue::object(), bf16_peaks = JsonValue::object();
  for (Isa isa : available_isas()) {
    stop_if_interrupted();  // each measurement takes a fraction of a second
    peaks.set(std::string(isa_name(isa)), measured_f32_peak(cpu.pool(), isa, 0.05));
    if (const auto bf16 = bf16_arithmetic(isa))
      bf16_peaks.set(std::string(isa_name(isa)), measured_peak(cpu.pool(), *bf16, isa, 0.05));
  }
  const std::vector<std::string> features = cpu_features();
  JsonValue feature_list = JsonValue::array(), devices = JsonValue::array(), missing = JsonValue::array();
  for (const std::string& feature : features) feature_list.push_back(feature);
  for (const std::string& name : list_devices()) {
    try {
      const std::shared_ptr<Device> listed = name == "cpu" ? device : open_device(name);
      devices.push_back(JsonValue::object().set("name", name).set("description", listed->description()));
    } catch (const Error& error) {  // a card that runs none of this program's kernels; no cuBLASLt
      missing.push_back(error.what());
    }
  }
  if (!cuda_build)
    missing.push_back(
        "CUDA: this build has none; `cmake --preset cuda` makes one where a CUDA toolkit (12 or newer) is");
  else if (list_devices().size() == 1)
    missing.push_back("a GPU: this build has CUDA, but no device or driver was found (`nvidia-smi` says more)");
  if (available_isas().front() == Isa::sse4 || available_isas().front() == Isa::scalar)
    missing.push_back("AVX2 with FMA: this processor lacks it, and runs at a fraction of the speed");

  stop_if_interrupted();
  if (json) {
    JsonValue result = JsonValue::object();
    result.set("version", EADEM_VERSION).set("compiler", __VERSION__).set("processor", cpuinfo("model name"));
    result.set("features", std::move(feature_list)).set("isa", std::string(isa_name(cpu.isa())));
    result.set("threads", cpu.decode_threads()).set("prefill_threads", cpu.prefill_threads());
    result.set("processors", static_cast<int64_t>(topology.processors().size())).set("cores", topology.num_cores());
    if (topology.quota()) result.set("cpu_quota", *topology.quota());
    result.set("memory_nodes", topology.num_nodes()).set("topology_notes", std::move(topology_notes));
    result.set("last_level_cache_bytes", last_level_cache_bytes());
    result.set("memory_bytes", memory.total_bytes).set("memory_free_bytes", memory.free_bytes);
    result.set("read_bytes_per_second", bandwidth).set("f32_flops_per_second", std::move(peaks));
    result.set("bf16_flops_per_second", std::move(bf16_peaks));
    result.set("cuda_build", cuda_build).set("devices", std::move(devices)).set("missing", std::move(missing));
    print(io::to_json(result) + "\n");
    return kOk;
  }
  const auto row = [](std::string_view name, const std::string& text) {
    print(fmt::format("{:<12} {}\n", name, text));
  };
  row("eadem", fmt::format("{} (compiler {})", EADEM_VERSION, __VERSION__));
  row("processor", cpuinfo("model name"));
  row("features", fmt::format("{}", fmt::join(features, " ")));
  std::string isas;
  for (Isa isa : available_isas()) isas += fmt::format("{}{}", isas.empty() ? "" : ", ", isa_name(isa));
  row("kernels", fmt::format("{} (available: {}; --isa chooses)", isa_name(cpu.isa()), isas));
  row("threads", fmt::format("{}, {} for prefill", cpu.decode_threads(), cpu.prefill_threads()));
  row("topology", fmt::format("processors that this process may use: {}, cores: {}, memory nodes: {}",
                              topology.processors().size(), topology.num_cores(), topology.num_nodes()));
  if (topology.quota()) row("quota", fmt::format("{:.2f} processors' time, by control groups", *topology.quota()));
  for (const std::string& note : topology.notes()) row("", note);
  row("memory", fmt::format("{}, {} free, last-level cache {}", bytes_text(static_cast<double>(memory.total_bytes)),
                            bytes_text(static_cast<double>(memory.free_bytes)),
                            bytes_text(static_cast<double>(last_level_cache_bytes()))));
  row("reads", fmt::format("{}/s measured over {} with {} threads", bytes_text(bandwidth),
                           bytes_text(static_cast<double>(probe_buffer_bytes())), cpu.decode_threads()));
  for (const auto& [name, rates] : {std::pair("f32 peak", &peaks), std::pair("bf16 peak", &bf16_peaks)})
    for (const io::JsonMember& peak : rates->as_object())
      row(name, fmt::format("{:.1f} GFLOP/s measured with {}", peak.value.as_number() / 1e9, peak.key));
  for (const JsonValue& entry : devices.as_array())
    row("device", fmt::format("{}: {}", entry.find("name")->as_string(), entry.find("description")->as_string()));
  for (const JsonValue& entry : missing.as_array()) row("missing", entry.as_string());
  if (missing.as_array().empty()) row("missing", "nothing");
  return kOk;
}

}  // namespace eadem::cli
