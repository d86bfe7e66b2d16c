// SPDX-License-Identifier: Apache-2.0
//
// Hyper-connections: n streams of hidden states in the place of one residual. A layer's part reads a weighted sum of a
// token's streams, and what it makes is added to each of them, after the streams were mixed:
//   x = sum over i of pre[i] * s[i],   s'[i] = post[i] * part(x) + sum over j of comb[j, i] * s[j].
// The weights of a token are made of n (n + 2) numbers, its logits. A row of weights is pre [n], post [n], comb [n, n].
//
// stream_weights: pre = sigmoid(scale[0] * logits + base) + eps
//                 post = 2 * sigmoid(scale[1] * logits + base)
//                 comb: softmax over each row of scale[2] * logits + base, plus eps; then its columns, and iterations -
//                 1 times its rows and its columns, are divided by (their sum + eps): nearly a doubly stochastic matrix
//   inputs   logits [tokens, n (n + 2)] f32, or with `merges` [tokens, n], pre alone: what ends the streams
//            base f32 as a row of logits, scale [3] f32, or with `merges` [1] (parameters)
//   outputs  weights f32, as logits
//   backward inputs: logits, base, scale, dweights.  outputs: dlogits =, dbase +=, dscale +=; the sums over tokens in
//            f64 and in their order.
//
// collapse_streams: y[t, :] = sum over i of pre[t, i] * x[t, i, :], in the order of i
//   inputs   x [tokens, n, hidden] f32 or bf16; weights [tokens, >= n] f32, a row of which begins with pre
//   outputs  y [tokens, hidden] dtype of x
//   backward inputs: x, weights, dy.  outputs: dx =, dweights =, 0 behind pre.
//
// expand_streams: z[t, i, :] = post[t, i] * y[t, :] + sum over j of comb[t, j, i] * x[t, j, :], in the order of j
//   inputs   x [tokens, n, hidden], y [tokens, hidden] f32 or bf16; weights [tokens, n (n + 2)] f32
//   outputs  z like x
//   backward inputs: x, y, weights, dz.  outputs: dx =, dy =, dweights =, 0 for pre.
//
// Everything is computed in f32, token by token: a token's bits depend on no other.
// Source: Xie et al. 2025 (arXiv 2512.24880); transformers, models/deepseek_v4.
#pragma once

#include <cstdint>

namespace eadem::kernels {

struct StreamWeightsAttrs {
  int64_t streams = 0;
  int64_t iterations = 1;  // of the division of rows and columns
  float eps = 0.0f;
  bool merges = false;

  int64_t width() const { return merges ? streams : streams * (streams + 2); }
  int64_t scales() const { return merges ? 1 : 3; }
  // Divisions of all rows, or of all columns.
  int64_t divisions() const { return 2 * iterations - 1; }
};

}  // namespace eadem::kernels
