// SPDX-License-Identifier: Apache-2.0
//
// The machine's limits, and what a model asks of it per token: the two sides of every "fraction of the limit".
#pragma once

#include <cstdint>
#include <string>

#include "eadem/core/device/device.h"
#include "eadem/engine/infer_engine.h"
#include "eadem/io/json.h"

namespace eadem::cli {

struct MachineRates {
  double read_bytes_per_second = 0;
  double f32_flops_per_second = 0;  // 0 when it was not requested, as are the next
  double int8_ops_per_second = 0;   // 0 if 8-bit dot products have no probe
  // The rate of products of bf16, by tiles or vectors, and that of tiles for int8 weights with one scale per output. 0
  // where the processor has none.
  double bf16_flops_per_second = 0, int8_tile_ops_per_second = 0;
  bool measured = false;  // otherwise nominal, as the device states them
};

// Measures a CPU (about 0.2 s for each rate) with the device's own threads: reading with the threads of decode,
// arithmetic with those of prefill. Other devices give nominal rates.
MachineRates machine_rates(Device& device, bool with_flops);

// Bytes of weights that a step of `tokens` tokens reads: every parameter once, in the layout that its kernels read,
// except for tables that are looked up by row; of experts as many as the tokens can choose, at most all.
double weight_bytes_per_step(const engine::InferEngine& engine, int64_t tokens);
// Bytes of keys, values and other states that a step reads of a sequence with so many cached tokens.
double kv_bytes_of_sequence(const engine::InferEngine& engine, double tokens);

// The process's peak memory so far, and the bytes that the engine needs: parameters in every layout that its kernels
// read, the KV cache, and the activations of its programs. Only on the CPU do both mean one memory.
struct MemoryUse {
  int64_t peak = 0;
  int64_t weights = 0, cache = 0, arena = 0;
  bool on_host = false;
  int ranks = 1;  // of several, the numbers are those of rank 0

  double ratio() const { return static_cast<double>(peak) / static_cast<double>(weights + cache + arena); }
};
MemoryUse memory_use(const engine::InferEngine& engine);
// "831 MB at most, 1.03 x (weights 766 MB + KV cache 33 MB + activations 8 MB)"
std::string memory_text(const MemoryUse& memory);
void set_memory(io::JsonValue& json, const MemoryUse& memory);

// Whether the bytes of a step fit well into the last-level cache, so that memory is no limit and need not be measured.
bool lies_in_cache(double bytes_per_step, const Device& device);
// "62 % of 23.1 GB/s measured".
std::string limit_text(double bytes_per_step, double steps_per_second, const MachineRates& rates);

}  // namespace eadem::cli
