// SPDX-License-Identifier: Apache-2.0
//
//   eadem_cuda_persistent_bench [--layers 32] [--launches 15] [--mode whole] [--narrow 3] [--wide 5]
//
// Measures decode of one sequence by one persistent kernel: up to 32 layers of the shape of Llama-3.1-8B in one launch,
// weights of 4 bits in groups of 128, 512 keys, on an H100 or H200. There is neither head nor sampling. The result is
// compared bit for bit with plain kernels after one layer, two, and all; where it differs, nothing is timed and the
// program fails. Each layer has weights of its own, 112.5 MB, more than the L2 cache holds.
//
// Two other modes compute nothing of use, and are not checked: weights copied and nothing else, and everything but
// copies of weights, keys and values. What the whole takes beyond the larger of the two, they do not hide from each
// other.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "benchmarks/cuda/persistent/bench.h"

namespace {

using eadem::persistent::Mode;
using eadem::persistent::PersistentBench;

// The rate of large copies on an H100 SXM.
constexpr double kBytesPerMicrosecond = 3.02e6;

// Returns whether all values are right.
bool check(PersistentBench& bench, int layers) {
  for (const int checked : std::set{1, std::min(2, layers), layers}) {
    const int wrong = bench.wrong_values(checked);
    fmt::print("checked after layer {}: {} of {} values differ from those of plain kernels\n", checked, wrong,
               eadem::persistent::kHidden);
    if (wrong != 0) return false;
  }
  return true;
}

void print_times(std::vector<double> times, int layers) {
  for (double& time : times) time /= layers;
  std::sort(times.begin(), times.end());
  const double median = times[times.size() / 2];
  const double of_bytes = static_cast<double>(eadem::persistent::kLayerBytes) / kBytesPerMicrosecond;
  fmt::print("a layer: {:.2f} us, {:.2f} to {:.2f} of {} launches of {} layers\n", median, times.front(), times.back(),
             times.size(), layers);
  fmt::print("bytes of weights: {:.1f} MB a layer, {:.2f} us at {:.2f} TB/s, {:.1f}% of the time\n",
             static_cast<double>(eadem::persistent::kLayerBytes) * 1e-6, of_bytes, kBytesPerMicrosecond * 1e-6,
             100 * of_bytes / median);
}

}  // namespace

int main(int argc, char** argv) {
  constexpr int kMostParts = eadem::persistent::kSlots * eadem::persistent::kSlotParts;
  const std::map<std::string, Mode> modes = {
      {"whole", Mode::whole}, {"weights_alone", Mode::weights_alone}, {"chain_alone", Mode::chain_alone}};
  int layers = eadem::persistent::kMostLayers, launches = 15, narrow = 3, wide = 5;
  std::string mode = "whole";
  CLI::App app("Times all layers of decode as one persistent kernel");
  app.add_option("--layers", layers, "layers of a launch")->check(CLI::Range(1, eadem::persistent::kMostLayers));
  app.add_option("--launches", launches, "launches that are timed")->check(CLI::Range(1, 100000));
  app.add_option("--mode", mode, "whole, weights_alone or chain_alone")->check(CLI::IsMember(modes));
  const std::string copies = fmt::format("copies of {} bytes that may be on their way to a multiprocessor: while ",
                                         eadem::persistent::kPartBytes);
  app.add_option("--narrow", narrow, copies + "small loads are waited for")->check(CLI::Range(1, kMostParts));
  app.add_option("--wide", wide, copies + "weights are waited for")->check(CLI::Range(1, kMostParts));
  CLI11_PARSE(app, argc, argv);
  try {
    PersistentBench bench(layers, narrow, wide);
    fmt::print("{}, {}\n", bench.device_name(), mode);
    if (modes.at(mode) == Mode::whole && !check(bench, layers)) return 1;
    print_times(bench.time(modes.at(mode), launches), layers);
  } catch (const std::exception& error) {
    fmt::print(stderr, "eadem_cuda_persistent_bench: {}\n", error.what());
    return 1;
  }
}
