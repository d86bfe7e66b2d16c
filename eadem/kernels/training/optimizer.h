// SPDX-License-Identifier: Apache-2.0
//
// grad_norm: norm[0] = sqrt(sum of squares of all inputs)
//   inputs   any number of f32 tensors.   outputs: norm [1] f32.
//   Blocks of kGradNormBlock elements are summed in f64 and the block sums added in order: independent of threads.
//
// adamw: one step of AdamW with decoupled weight decay, in f32, on one parameter. Source: Loshchilov & Hutter 2019.
//   inputs   grad [...] f32; norm [1] f32; hyper [8] f32 (kHyper…); master [...] f32, m [...] f32, v [...] f32 (state);
//            weight [...] bf16 or f16 (optional state: the rounded copy that the passes read; absent: they read master)
//   outputs  master, m, v, weight (the state ports are aliases)
//   g = grad * min(1, max_norm / (norm + 1e-6)) when max_norm > 0;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
//   master -= lr * (m / bias_correction1 / (sqrt(v / bias_correction2) + eps) + decay * weight_decay * master)
#pragma once

#include <cstdint>

namespace eadem::kernels {

inline constexpr int64_t kGradNormBlock = 4096;

// Indices into `hyper`.
inline constexpr int kHyperLearningRate = 0, kHyperBeta1 = 1, kHyperBeta2 = 2, kHyperEps = 3, kHyperWeightDecay = 4,
                     kHyperBiasCorrection1 = 5, kHyperBiasCorrection2 = 6, kHyperMaxNorm = 7;

struct AdamWAttrs {
  bool decay = true;  // whether weight decay applies to this parameter
};

}  // namespace eadem::kernels
