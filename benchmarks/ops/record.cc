// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/ops/record.h"

#include <algorithm>
#include <map>

#include "eadem/io/json.h"

namespace eadem::op_bench {

namespace {

using io::JsonReader;
using io::JsonValue;
constexpr const char* kSchema = "eadem_op_bench/1";

double spread_of(const Timing& timing) {
  return std::max(timing.high_seconds - timing.median_seconds, timing.median_seconds - timing.low_seconds) /
         timing.median_seconds;
}

}  // namespace

std::string to_json(const Record& record) {
  JsonValue rows = JsonValue::array();
  for (const Timing& timing : record.rows)
    rows.push_back(JsonValue::object()
                       .set("row", timing.row)
                       .set("kernel", timing.kernel)
                       .set("pass", timing.pass)
                       .set("median_seconds", timing.median_seconds)
                       .set("low_seconds", timing.low_seconds)
                       .set("high_seconds", timing.high_seconds)
                       .set("samples", timing.samples)
                       .set("bytes", timing.bytes)
                       .set("flops", timing.flops)
                       .set("share", timing.share)
                       .set("limit", timing.limit)
                       .set("cold", timing.cold)
                       .set("copies", timing.copies)
                       .set("error", timing.error));
  return io::to_json(JsonValue::object()
                         .set("schema", kSchema)
                         .set("cpu", record.cpu)
                         .set("device", record.device)
                         .set("threads", record.threads)
                         .set("rows", std::move(rows)));
}

Record read_record(const std::string& path) {
  const JsonReader reader = JsonReader::read(path);
  if (reader.string("schema") != kSchema) reader.fail("schema", fmt::format("expected \"{}\"", kSchema));
  Record record{
      reader.string("cpu"), reader.string("device"), static_cast<int>(reader.integer("threads", 1, 4096)), {}};
  for (const JsonReader& row : reader.elements("rows")) {
    Timing timing;
    timing.row = row.string("row");
    timing.kernel = row.string("kernel");
    timing.pass = row.string("pass");
    timing.median_seconds = row.number("median_seconds", 1e-12);
    timing.low_seconds = row.number("low_seconds", 0);
    timing.high_seconds = row.number("high_seconds", 0);
    timing.samples = row.integer("samples", 1);
    timing.bytes = row.number("bytes", 0);
    timing.flops = row.number("flops", 0);
    timing.share = row.number("share", 0);
    timing.limit = row.string("limit");
    timing.cold = row.boolean("cold");
    timing.copies = static_cast<int>(row.integer("copies", 1, 1 << 20));
    timing.error = row.number("error", 0);
    record.rows.push_back(std::move(timing));
  }
  return record;
}

std::vector<Slower> slower_rows(const Record& before, const Record& after) {
  if (before.cpu != after.cpu || before.device != after.device)
    throw InvalidArgument("the records are of different machines: '{}, {}' and '{}, {}'", before.cpu, before.device,
                          after.cpu, after.device);
  const auto key = [](const Timing& timing) { return timing.row + '\n' + timing.kernel + '\n' + timing.pass; };
  std::map<std::string, const Timing*> old_rows;
  for (const Timing& timing : before.rows) old_rows[key(timing)] = &timing;
  std::vector<double> ratios;
  for (const Timing& timing : after.rows)
    if (const auto old = old_rows.find(key(timing)); old != old_rows.end())
      ratios.push_back(timing.median_seconds / old->second->median_seconds);
  if (ratios.empty()) throw InvalidArgument("the records have no row in common");
  // The drift of the machine shows in most rows; of few rows nothing can be said.
  double drift = 1;
  if (ratios.size() >= 8) {
    std::nth_element(ratios.begin(), ratios.begin() + static_cast<std::ptrdiff_t>(ratios.size() / 2), ratios.end());
    drift = std::max(1.0, ratios[ratios.size() / 2]);
  }
  std::vector<Slower> result;
  for (const Timing& timing : after.rows) {
    const auto found = old_rows.find(key(timing));
    if (found == old_rows.end()) continue;
    const Timing& old = *found->second;
    const double allowed = drift * (1.1 + (spread_of(old) + spread_of(timing)) / 2);
    if (timing.median_seconds > old.median_seconds * allowed)
      result.push_back({timing.row, timing.kernel, timing.pass, old.median_seconds, timing.median_seconds, allowed});
  }
  return result;
}

}  // namespace eadem::op_bench
