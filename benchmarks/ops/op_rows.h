// SPDX-License-Identifier: Apache-2.0
//
// The timed workloads: the workload rows of every op, in the types that a pipeline gives them on the device.
#pragma once

#include <string>
#include <vector>

#include "eadem/core/device/device.h"
#include "eadem/ops/op.h"

namespace eadem::op_bench {

struct BenchRow {
  std::string name;  // "linear/llama-3.2-1b decode-1 q_proj/q4_k"
  ops::Workload work;
  // The op of a row at a size that the reference finishes at once: few tokens, few outputs. Its kernels do not differ.
  ops::Workload small;
};

// Rows whose name holds every word of `filter`. The rows of tiny models are left out unless a word names one. A linear
// row stands once for every form of its weight: the model's dtype, f32, f16 and each BlockEncoding that fits. One of
// experts stands for two: the model's dtype and 4 bits.
std::vector<BenchRow> bench_rows(const Device& device, const std::vector<std::string>& filter);

// The ops that have rows of real models, of which no kernel takes any.
std::vector<std::string> ops_without_rows(const Device& device);

// Whether the weights that the row reads are chosen by its index inputs.
bool chooses_weights(const ops::Workload& work);
// The bytes of chosen weights, and their gradients, that the row's cost counts and a pass of these inputs leaves alone:
// tokens choose some experts twice.
double unread_bytes(const ops::Workload& work, kernels::Pass pass, const std::vector<Tensor>& inputs);

// Host tensors for a row, of the step that its name says (StepKind::plain): random, never zero, encoded weights
// encoded. Large weights repeat a stretch of rows. Without `with_weight` those are undefined.
std::vector<Tensor> row_inputs(const ops::Workload& work, uint64_t seed, bool with_weight = true);

// The request of one pass; the types must outlive it.
struct PassTypes {
  std::vector<TensorType> inputs, outputs;
};
PassTypes pass_types(const ops::Workload& work, kernels::Pass pass);
kernels::KernelRequest request_of(const ops::Workload& work, kernels::Pass pass, const PassTypes& types,
                                  const Device& device);

}  // namespace eadem::op_bench
