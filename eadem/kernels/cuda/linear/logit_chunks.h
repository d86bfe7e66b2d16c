// SPDX-License-Identifier: Apache-2.0
//
// How the loss of the LM head divides its rows, and its memory.
#pragma once

#include <algorithm>
#include <cstdint>

namespace eadem::kernels::cuda {

// Rows whose logits are made at once: 2 GB of them. Each chunk reads and writes the gradient of the weight once. All
// but the last have a multiple of 64.
inline int64_t logit_chunk_rows(int64_t vocab, int64_t tokens) {
  constexpr int64_t kMostLogits = int64_t{1} << 29;
  return std::clamp<int64_t>(kMostLogits / std::max<int64_t>(vocab, 1) / 64 * 64, 64, std::max<int64_t>(tokens, 64));
}

// Rounded up, so that pieces of scratch begin at multiples that every kernel takes.
inline int64_t scratch_multiple(int64_t size_bytes) { return (size_bytes + 255) / 256 * 256; }

}  // namespace eadem::kernels::cuda
