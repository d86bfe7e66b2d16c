// SPDX-License-Identifier: Apache-2.0
//
// eadem_op_bench: times every op's workload rows with every kernel of the CPU.
//
//   eadem_op_bench --filter llama-3.2-1b decode-1 linear        rows whose name has all of these words
//   eadem_op_bench --out new.json --compare old.json            exits 1 when something got slower beyond noise
//   eadem_op_bench --compare old.json new.json                  the same for two records
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>

#include "benchmarks/ops/record.h"
#include "eadem/core/error.h"

namespace {

using namespace eadem;
using namespace eadem::op_bench;

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("model name")) return line.substr(line.find(':') + 2);
  return "unknown";
}

std::string line_of(const Timing& t) {
  const double spread =
      std::max(t.high_seconds - t.median_seconds, t.median_seconds - t.low_seconds) / t.median_seconds;
  const std::string rate = t.limit == "memory" ? fmt::format("{:.1f} GB/s", t.bytes / t.median_seconds / 1e9)
                                               : fmt::format("{:.1f} Gop/s", t.flops / t.median_seconds / 1e9);
  const std::string share = t.cold ? fmt::format("{:.0f}% of {}", 100 * t.share, t.limit) : "in cache";
  return fmt::format("{:<58} {:<9} {:<22} {:>10.1f} us ±{:<3.0f}% {:>14} {}", t.row, t.pass, t.kernel,
                     t.median_seconds * 1e6, 100 * spread, rate, share);
}

int compare(const Record& before, const Record& after) {
  const std::vector<Slower> slower = slower_rows(before, after);
  for (const Slower& row : slower)
    fmt::print("slower: {} {} ({}): {:.1f} us -> {:.1f} us, {:.2f}x (noise allows {:.2f}x)\n", row.row, row.kernel,
               row.pass, row.before_seconds * 1e6, row.after_seconds * 1e6, row.after_seconds / row.before_seconds,
               row.allowed_ratio);
  if (slower.empty()) fmt::print("nothing got slower\n");
  return slower.empty() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times every op with every kernel of the CPU on the shapes of real models.", "eadem_op_bench");
  std::vector<std::string> filter, records, pass_names = {"inference", "forward", "backward"};
  std::string out, isa;
  int threads = 0;
  double seconds = 0.3;
  bool list = false, json = false;
  app.add_option("--filter", filter, "words that a row's name must have");
  app.add_option("--passes", pass_names, "inference, forward, backward (default: all)")
      ->delimiter(',')
      ->check(CLI::IsMember({"inference", "forward", "backward"}));
  app.add_option("--threads", threads, "CPU threads (default: one per core)")->check(CLI::Range(1, 4096));
  app.add_option("--isa", isa, "CPU instruction set (default: the best there is)");
  app.add_option("--seconds", seconds, "time for each kernel of a row (default: 0.3)")->check(CLI::Range(0.0, 60.0));
  app.add_option("--compare", records, "an old record, and a new one unless rows are to be timed")->expected(1, 2);
  app.add_option("--out", out, "writes the record there");
  app.add_flag("--json", json, "prints the record instead of lines");
  app.add_flag("--list", list, "prints the names of the rows and times nothing");
  CLI11_PARSE(app, argc, argv);

  try {
    if (records.size() == 2) return compare(read_record(records[0]), read_record(records[1]));
    CpuDevice device({.num_threads = threads, .isa = isa});
    std::vector<kernels::Pass> passes;
    for (kernels::Pass pass : {kernels::Pass::inference, kernels::Pass::forward, kernels::Pass::backward})
      if (std::find(pass_names.begin(), pass_names.end(), kernels::pass_name(pass)) != pass_names.end())
        passes.push_back(pass);
    const std::vector<BenchRow> rows = bench_rows(device, filter);
    if (rows.empty()) {
      fmt::print(stderr, "eadem_op_bench: no row has all the words of --filter\n");
      return 2;
    }
    Record record{cpu_name(), device.description(), device.pool().num_threads(), {}};
    using Clock = std::chrono::steady_clock;
    constexpr auto kCeilingsAge = std::chrono::seconds(3);  // neighbours come and go
    Ceilings ceilings;
    Clock::time_point measured_at = Clock::now() - kCeilingsAge;
    for (const BenchRow& row : rows) {
      if (list) {
        fmt::print("{}\n", row.name);
        continue;
      }
      if (Clock::now() - measured_at >= kCeilingsAge) {
        ceilings = measured_ceilings(device, 0.1);
        measured_at = Clock::now();
      }
      for (Timing& timing : time_row(device, row, passes, ceilings, seconds)) {
        if (!json) {
          fmt::print("{}\n", line_of(timing));
          std::fflush(stdout);
        }
        record.rows.push_back(std::move(timing));
      }
    }
    if (list) {
      for (const std::string& op : ops_without_rows(device))
        fmt::print(stderr, "eadem_op_bench: no kernel takes a row of {}\n", op);
      return 0;
    }
    if (json) fmt::print("{}\n", to_json(record));
    if (!out.empty()) std::ofstream(out) << to_json(record) << '\n';
    return records.empty() ? 0 : compare(read_record(records[0]), record);
  } catch (const Error& error) {
    fmt::print(stderr, "eadem_op_bench: {}\n", error.what());
    return 2;
  }
}
