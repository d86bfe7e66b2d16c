// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/microbenchmarks/ceilings.h"
#include "eadem/core/device/cpu_probe.h"

namespace eadem::ceilings {

std::vector<Row> tile_rows(ThreadPool& pool, double seconds) {
  std::vector<Row> rows;
  const Isa isa = available_isas().front();
  for (Arithmetic arithmetic : {Arithmetic::amx_int8, Arithmetic::amx_bf16})
    if (has_arithmetic(arithmetic, isa))
      rows.push_back({std::string(arithmetic_name(arithmetic)), "tiles", pool.num_threads(), 0,
                      measured_peak(pool, arithmetic, isa, seconds), "op/s"});
  return rows;
}

}  // namespace eadem::ceilings
