// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/device_groups.h"

#include <gtest/gtest.h>

#include <cstring>

#include "eadem/kernels/backend.h"
#include "tests/support/thread_counts.h"

namespace eadem::test {

namespace {
std::string g_device_name = "cpu";  // set once by main
}

const std::string& device_name() { return g_device_name; }

const std::vector<DeviceGroup>& device_groups() {
  static const std::vector<DeviceGroup> groups = [] {
    std::vector<DeviceGroup> result;
    if (device_name() != "cpu") {
      result.push_back({device_name(), {open_device(device_name())}});
      return result;
    }
    for (Isa isa : available_isas()) {
      DeviceGroup group{std::string(isa_name(isa)), {}};
      for (int threads : thread_counts({1, 2, 3}))
        group.devices.push_back(open_device("cpu", {.num_threads = threads, .isa = isa_name(isa)}));
      result.push_back(std::move(group));
    }
    return result;
  }();
  return groups;
}

}  // namespace eadem::test

// Parses `--device NAME` and GoogleTest's options, then runs the tests. Returns 2 for anything else.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--device") == 0 && i + 1 < argc) {
      eadem::test::g_device_name = argv[++i];
    } else {
      fmt::print(stderr, "unknown argument '{}'; usage: {} [--device NAME] [GoogleTest options]\n", argv[i], argv[0]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
