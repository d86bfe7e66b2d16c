// SPDX-License-Identifier: Apache-2.0
//
// Batches of trainers on a mesh.
#pragma once

#include <cstring>

#include "eadem/train/trainer.h"
#include "tests/distributed/rank_run.h"

namespace eadem::test {

// `pieces` sequences of 5 tokens, ids that depend on `seed`.
inline train::Batch make_batch(int64_t vocab, int pieces, int seed) {
  train::Batch batch;
  batch.query_start = {0};
  for (int piece = 0; piece < pieces; ++piece) {
    for (int i = 0; i < 5; ++i) {
      batch.token_ids.push_back(static_cast<int32_t>((seed * 31 + piece * 11 + i * i * 5 + i) % vocab));
      batch.positions.push_back(i);
      batch.labels.push_back(i == 4 ? -1 : static_cast<int32_t>((seed * 17 + piece * 7 + i * 3) % vocab));
      batch.num_labels += i != 4;
    }
    batch.lengths.push_back(5);
    batch.query_start.push_back(static_cast<int32_t>(batch.token_ids.size()));
  }
  return batch;
}

inline train::Batch joined(const train::Batch& a, const train::Batch& b) {
  train::Batch batch = a;
  const auto append = [](std::vector<int32_t>& to, const std::vector<int32_t>& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(batch.token_ids, b.token_ids);
  append(batch.positions, b.positions);
  append(batch.labels, b.labels);
  append(batch.lengths, b.lengths);
  for (size_t i = 1; i < b.query_start.size(); ++i)
    batch.query_start.push_back(b.query_start[i] + a.query_start.back());
  batch.num_labels += b.num_labels;
  return batch;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace eadem::test
