// SPDX-License-Identifier: Apache-2.0
//
// The devices that the tests of this folder run on: every instruction set of the CPU, or the device named by
// `--device` on the command line of a test program that uses this: its main is in device_groups.cc.
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

}  // namespace eadem::test
