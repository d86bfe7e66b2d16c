// SPDX-License-Identifier: Apache-2.0
//
// The gradient of a weight by products of bf16 (amx.h, bf16_dots.h):
//
//   dweight [outputs, inputs] += dy^T x,   dy [tokens, outputs] and x [tokens, inputs] in f32, rounded to bf16
//
// A sum goes over tiles of 32 tokens in order, each as amx.h lays it down, and is added to dweight once. Values are
// rounded to nearest even, subnormal ones to zero.
#pragma once

#include <cstdint>

#include "eadem/core/device/cpu_device.h"
#include "eadem/kernels/cpu/linear/matmul.h"

namespace eadem::kernels::cpu {

class Bf16WeightGradient {
 public:
  // For an instruction set that has products of bf16.
  explicit Bf16WeightGradient(const CpuDevice& device);

  // Bytes of scratch for at most `tokens` tokens.
  int64_t scratch_bytes(const CpuDevice& device, int64_t tokens, int64_t outputs, int64_t inputs) const;

  struct Operands {
    const float *x, *dy;  // rows are contiguous
    int64_t tokens, outputs, inputs;
  };
  void add(CpuDevice& device, float* dweight, const Operands& operands, void* scratch) const;

 private:
  MatmulPlan product_;
};

}  // namespace eadem::kernels::cpu
