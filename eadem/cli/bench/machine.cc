// SPDX-License-Identifier: Apache-2.0
#include "eadem/cli/bench/machine.h"

#include <sys/resource.h>

#include <algorithm>
#include <map>

#include "eadem/cli/bench/products.h"
#include "eadem/cli/terminal.h"
#include "eadem/core/device/cpu_device.h"
#include "eadem/core/device/cpu_probe.h"

namespace eadem::cli {

MachineRates machine_rates(Device& device, bool with_flops) {
  MachineRates rates;
  if (auto* cpu = dynamic_cast<CpuDevice*>(&device)) {
    rates.measured = true;
    cpu->set_step_kind(StepKind::decode);
    rates.read_bytes_per_second = measured_read_bandwidth(cpu->pool(), probe_buffer_bytes());
    cpu->set_step_kind(StepKind::prefill);
    if (with_flops) {
      rates.f32_flops_per_second = measured_f32_peak(cpu->pool(), cpu->isa());
      if (has_arithmetic(Arithmetic::int8, cpu->isa()))
        rates.int8_ops_per_second = measured_peak(cpu->pool(), Arithmetic::int8, cpu->isa());
      if (const auto bf16 = bf16_arithmetic(cpu->isa()))
        rates.bf16_flops_per_second = measured_peak(cpu->pool(), *bf16, cpu->isa());
      if (has_arithmetic(Arithmetic::amx_int8, cpu->isa()))
        rates.int8_tile_ops_per_second = measured_peak(cpu->pool(), Arithmetic::amx_int8, cpu->isa());
    }
  } else {
    rates.read_bytes_per_second = device.rates().bytes_per_second;
    rates.f32_flops_per_second = device.rates().flops_per_second;
  }
  return rates;
}

double weight_bytes_per_step(const engine::InferEngine& engine, int64_t tokens) {
  const pipeline::Graph& graph = engine.decode_program().graph();
  std::map<pipeline::ValueId, double> shares;  // what is read of each parameter
  for (const pipeline::Node& node : graph.nodes()) {
    if (node.op->name() == "embedding") continue;
    for (pipeline::ValueId id : node.inputs) {
      if (id == pipeline::kNoValue || graph.value(id).kind != pipeline::Value::Kind::parameter) continue;
      const TensorType& type = graph.value(id).type;
      const double rows = rows_per_token(graph, node) * static_cast<double>(tokens);
      // A row meets one matrix of a stack.
      shares[id] = type.rank() == 3 ? std::min(1.0, rows / static_cast<double>(type.fixed(0))) : 1.0;
    }
  }
  double bytes = 0;
  for (const auto& [id, share] : shares) bytes += share * static_cast<double>(graph.value(id).type.size_bytes({}));
  return bytes;
}

double kv_bytes_of_sequence(const engine::InferEngine& engine, double tokens) {
  const auto bytes =
      engine::state_bytes(engine.model(), *engine.device(), engine.hardware(),
                          engine.options().mesh().size(MeshAxis::tp), engine.options().mesh().rank(MeshAxis::tp));
  return static_cast<double>(bytes.of_sequence(static_cast<int64_t>(tokens)));
}

MemoryUse memory_use(const engine::InferEngine& engine) {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return {.peak = static_cast<int64_t>(usage.ru_maxrss) * 1024,
          .weights = engine.parameters().size_bytes(),
          .cache = engine.cache_bytes(),
          .arena = std::max(engine.decode_program().memory_plan().arena_bytes,
                            engine.prefill_program().memory_plan().arena_bytes),
          .on_host = engine.device()->backend() == "cpu",
          .ranks = engine.options().num_ranks()};
}

std::string memory_text(const MemoryUse& memory) {
  const auto text = [](int64_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  if (!memory.on_host) return text(memory.peak) + " of the host's at most";
  return fmt::format("{} at most, {:.2f} x (weights {} + KV cache {} + activations {}){}", text(memory.peak),
                     memory.ratio(), text(memory.weights), text(memory.cache), text(memory.arena),
                     memory.ranks == 1 ? "" : fmt::format(" in rank 0 of {}", memory.ranks));
}

void set_memory(io::JsonValue& json, const MemoryUse& memory) {
  json.set("peak_memory_bytes", memory.peak).set("weight_bytes", memory.weights).set("kv_cache_bytes", memory.cache);
  json.set("activation_bytes", memory.arena);
  if (memory.ranks > 1) json.set("ranks", memory.ranks);  // all bytes are those of rank 0
  if (memory.on_host) json.set("peak_memory_ratio", memory.ratio());
}

bool lies_in_cache(double bytes_per_step, const Device& device) {
  return device.backend() == "cpu" && bytes_per_step < 0.5 * static_cast<double>(last_level_cache_bytes());
}

std::string limit_text(double bytes_per_step, double steps_per_second, const MachineRates& rates) {
  const double fraction = bytes_per_step * steps_per_second / rates.read_bytes_per_second;
  return fmt::format("{:.0f} % of {}/s {}", 100 * fraction, bytes_text(rates.read_bytes_per_second),
                     rates.measured ? "measured" : "nominal");
}

}  // namespace eadem::cli
