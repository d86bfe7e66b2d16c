// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/microbenchmarks/ceilings.h"
#include "eadem/core/device/cpu_probe.h"

namespace eadem::ceilings {

std::vector<Row> vector_rows(ThreadPool& pool, double seconds) {
  std::vector<Row> rows;
  for (Arithmetic arithmetic : {Arithmetic::f32, Arithmetic::int8, Arithmetic::bf16})
    for (Isa isa : available_isas())
      if (has_arithmetic(arithmetic, isa))
        rows.push_back({std::string(arithmetic_name(arithmetic)), std::string(isa_name(isa)), pool.num_threads(), 0,
                        measured_peak(pool, arithmetic, isa, seconds), "op/s"});
  return rows;
}

}  // namespace eadem::ceilings
