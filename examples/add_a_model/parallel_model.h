// SPDX-License-Identifier: Apache-2.0
//
// A decoder whose attention and MLP read the same normalized input and are added to the residual together, as GPT-J
// does:
//   y = x + attention(norm(x)) + mlp(norm(x))
#pragma once

#include "eadem/models/model.h"

namespace example {

struct ParallelConfig {
  int64_t vocab = 100;
  int64_t hidden = 32;
  int64_t ffn = 64;
  int64_t layers = 2;
  int64_t heads = 4;
  int64_t kv_heads = 2;
  int64_t max_positions = 128;
  double norm_eps = 1e-5;
};

class ParallelModel final : public eadem::models::Model {
 public:
  explicit ParallelModel(const ParallelConfig& config);

  const eadem::models::ModelInfo& info() const override { return info_; }
  eadem::modules::ModelSpec spec() const override;
  eadem::models::ValueId embed(eadem::models::BuildContext& context) const override;
  eadem::models::ValueId layer(eadem::models::BuildContext& context, int index,
                               eadem::models::ValueId x) const override;
  eadem::models::ValueId finish(eadem::models::BuildContext& context, eadem::models::ValueId x) const override;
  eadem::models::ValueId head(eadem::models::BuildContext& context, eadem::models::ValueId hidden) const override;
  bool may_ignore(const std::string&) const override { return false; }
  eadem::io::JsonValue config_json() const override;

 private:
  ParallelConfig config_;
  eadem::models::ModelInfo info_;
};

}  // namespace example
