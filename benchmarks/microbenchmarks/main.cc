// SPDX-License-Identifier: Apache-2.0
//
// eadem_ceilings: measures what this machine can do and prints it as a table, or as JSON:
//   {"schema": "eadem_ceilings/1", "cpu", "isas", "caches": {"L1", "L2", "L3"},
//    "rows": [{"name", "variant", "threads", "working_set_bytes", "value", "unit"}]}
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <map>
#include <thread>

#include "benchmarks/microbenchmarks/ceilings.h"
#include "eadem/core/device/cpu_probe.h"
#include "eadem/core/error.h"
#include "eadem/io/json.h"

namespace {

using eadem::ThreadPool;
using eadem::ceilings::Row;
using eadem::io::JsonValue;

// "model name" of /proc/cpuinfo.
std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::string value_text(const Row& row) {
  if (row.unit == "B/s") return fmt::format("{:.1f} GB/s", row.value / 1e9);
  if (row.unit == "op/s") return fmt::format("{:.1f} Gop/s", row.value / 1e9);
  return fmt::format("{:.2f} us", row.value * 1e6);
}

JsonValue to_json(const std::vector<Row>& rows) {
  JsonValue list = JsonValue::array();
  for (const Row& row : rows)
    list.push_back(JsonValue::object()
                       .set("name", row.name)
                       .set("variant", row.variant)
                       .set("threads", row.threads)
                       .set("working_set_bytes", row.working_set_bytes)
                       .set("value", row.value)
                       .set("unit", row.unit));
  JsonValue isas = JsonValue::array();
  for (eadem::Isa isa : eadem::available_isas()) isas.push_back(eadem::isa_name(isa));
  JsonValue caches = JsonValue::object();
  for (int level : {1, 2, 3}) caches.set(fmt::format("L{}", level), eadem::cache_bytes(level));
  return JsonValue::object()
      .set("schema", "eadem_ceilings/1")
      .set("cpu", cpu_name())
      .set("isas", std::move(isas))
      .set("caches", std::move(caches))
      .set("rows", std::move(list));
}

using Measure = std::vector<Row> (*)(ThreadPool&, double);
const std::map<std::string, Measure> kGroups = {{"memory", eadem::ceilings::memory_rows},
                                                {"bandwidth", eadem::ceilings::bandwidth_rows},
                                                {"compute", eadem::ceilings::vector_rows},
                                                {"tensor_core", eadem::ceilings::tile_rows},
                                                {"kernel", eadem::ceilings::region_rows}};

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Measures the ceilings of this machine: memory, arithmetic, parallel regions.", "eadem_ceilings");
  std::vector<int> threads = {1};
  if (const int all = static_cast<int>(std::thread::hardware_concurrency()); all > 1) threads.push_back(all);
  std::vector<std::string> groups = {"memory", "compute", "tensor_core", "kernel"};
  double seconds = 0.2;
  bool json = false;
  app.add_option("--threads", threads, "thread counts (default: 1 and all)")
      ->delimiter(',')
      ->check(CLI::Range(1, 1024));
  app.add_option("--groups", groups, "memory, bandwidth (part of memory), compute, tensor_core, kernel (default: all)")
      ->delimiter(',')
      ->check(CLI::IsMember(kGroups));
  app.add_option("--seconds", seconds, "time for each row (default: 0.2)")->check(CLI::Range(0.001, 60.0));
  app.add_flag("--json", json, "one JSON object");
  CLI11_PARSE(app, argc, argv);

  try {
    std::vector<Row> rows;
    for (int count : threads) {
      ThreadPool pool(count);
      for (const std::string& group : groups)
        for (Row& row : kGroups.at(group)(pool, seconds)) {
          if (!json)
            fmt::print("{:<16} {:<34} {:>3} threads {:>16}\n", row.name, row.variant, row.threads, value_text(row));
          rows.push_back(std::move(row));
        }
    }
    if (json) fmt::print("{}\n", eadem::io::to_json(to_json(rows)));
  } catch (const eadem::Error& error) {
    fmt::print(stderr, "eadem_ceilings: {}\n", error.what());
    return 1;
  }
  return 0;
}
