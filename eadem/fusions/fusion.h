// SPDX-License-Identifier: Apache-2.0
//
// Fusion: a pattern of ops that one kernel serves in one sweep, declared apart from the ops. Ops know nothing of each
// other or of fusions; the pipeline replaces a matched pattern by the fusion's op, which has its own contract,
// reference and kernels like any other. What the fused op computes equals what the pattern computes, within one
// rounding per removed intermediate (none for f32).
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "eadem/ops/op.h"

namespace eadem::fusions {

// Values of a pattern are numbered; -1 stands for a port that must not be connected.
struct PatternNode {
  std::string_view op;
  std::vector<int> inputs;   // port order
  std::vector<int> outputs;  // port order
  bool commutative = false;  // the first two inputs may be exchanged
  bool backward = false;     // a node of the backward pass, with the ports of that; else of another one
};

struct Fusion {
  std::string_view name;  // also the name of the fused op's kernel contract
  // In program order. Each node but the last makes a value that a later one reads, or reads a value that a later one
  // reads. The fused op takes the last node's place, or that of the first reader of its outputs.
  std::vector<PatternNode> nodes;
  // Pattern values that become the fused op's ports, in its port order. Values made inside the pattern that are not
  // among `outputs` must have no other use.
  std::vector<int> inputs;
  std::vector<int> outputs;
  // Pattern values among `inputs` that may be unconnected (an optional bias).
  std::vector<int> optional_inputs;
  bool in_training = false;
  bool in_inference = true;
  // The pattern has quantize ops, which there are only once all other fusions were tried (pipeline/passes/precision.h).
  bool after_rounding = false;
  // Likewise in training, where nodes of both passes are there then: the fused op has no backward pass.
  bool after_autograd = false;
  // Makes the fused op from the matched ops (in the order of `nodes`), or null when their attributes do not fit.
  ops::OpPtr (*make)(std::span<const ops::Op* const> matched);
};

// Every fusion, in the order in which the pipeline tries them: larger patterns first.
std::span<const Fusion* const> all_fusions();

}  // namespace eadem::fusions
