// SPDX-License-Identifier: Apache-2.0
//
// add: y = a + b.   mul: y = a * b.   scale: y = factor * x, or c * tanh(factor * x / c) with a soft cap c, or with a
// limit l of |factor * x| min(max(factor * x, -l), l).
// activation: y = f(x).   gated_activation: y = f(gate) * up.   cast: y = x.
//
//   All operands have one shape [...]; add, mul and activations one dtype (f32 or bf16), computed in f32 and rounded
//   once. Inference may alias the first input. cast converts between f32, bf16 and f16, to nearest even.
//   backward of mul:              inputs: a, b, dy.      outputs: da = dy * b, db = dy * a.
//   backward of scale:            inputs: x, dy.         outputs: dx = dy * factor * (1 - (y / c)^2), 0 for y / c
//   without c; 0 beyond a limit. backward of activation:       inputs: x, dy.         outputs: dx = dy * f'(x).
//   backward of gated_activation: inputs: gate, up, dy.  outputs: dgate = dy * up * f'(gate), dup = dy * f(gate).
//   backward of cast: inputs: dy.            outputs: dx in the dtype of x. add passes its gradient through and has no
//   backward kernel.
#pragma once

#include <cstdint>

#include "eadem/core/dtype.h"

namespace eadem::kernels {

enum class ActivationKind : uint8_t {
  silu,       // x / (1 + exp(-x))
  gelu,       // x * Phi(x), exact: Phi by erf. Source: Hendrycks & Gimpel 2016
  gelu_tanh,  // 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))
  relu,       // max(x, 0)
  relu2,      // max(x, 0)^2. Source: So et al. 2021
  sigmoid,    // 1 / (1 + exp(-x)), of gates
};

struct ActivationAttrs {  // of activation and gated_activation
  ActivationKind kind = ActivationKind::silu;
};

struct ScaleAttrs {
  float factor = 1.0f;
  float softcap = 0.0f;  // 0: none
  float limit = 0.0f;    // 0: none. Not beside a soft cap
};

struct CastAttrs {
  DType to = DType::f32;
};

}  // namespace eadem::kernels
