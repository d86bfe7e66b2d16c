// SPDX-License-Identifier: Apache-2.0
//
// The device `reference`: host memory and one thread, for kernels that compute by the definitions of the ops.
#pragma once

#include "eadem/core/device/device.h"

namespace eadem::kernels::reference {

class ReferenceDevice final : public Device {
 public:
  std::string_view backend() const override { return "reference"; }
  std::string description() const override { return "reference (double precision, one thread)"; }
  MemoryInfo memory() const override;
  DeviceRates rates() const override;
  bool host_accessible() const override { return true; }
  Buffer allocate(int64_t size_bytes) override;
  void copy_from_host(void* dst, const void* host, int64_t size_bytes) override { copy(dst, host, size_bytes); }
  void copy_to_host(void* host, const void* src, int64_t size_bytes) override { copy(host, src, size_bytes); }
  void copy(void* dst, const void* src, int64_t size_bytes) override;
  void fill_zero(void* dst, int64_t size_bytes) override;
  void synchronize() override {}
};

}  // namespace eadem::kernels::reference
