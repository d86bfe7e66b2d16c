// SPDX-License-Identifier: Apache-2.0
//
// The devices that the tests of this folder run on: every instruction set of the CPU, or the device named by
// `--device`. A test program that uses this defines main by EADEM_DEVICE_TEST_MAIN.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "eadem/core/device/device.h"

namespace eadem::test {

// Devices whose results must have the same bits: one instruction set with 1, 2 and 3 threads.
struct DeviceGroup {
  std::string name;
  std::vector<std::shared_ptr<Device>> devices;
};

// "cpu" unless the command line says otherwise.
const std::string& device_name();
const std::vector<DeviceGroup>& device_groups();

// Parses `--device NAME` and GoogleTest's options, then runs the tests. Returns 2 for anything else.
int device_test_main(int argc, char** argv);

}  // namespace eadem::test

#define EADEM_DEVICE_TEST_MAIN \
  int main(int argc, char** argv) { return ::eadem::test::device_test_main(argc, argv); }
