// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/sampling.h"

#include "eadem/ops/sampling/feed_tokens.h"
#include "eadem/ops/sampling/sample.h"

namespace eadem::modules {

void Sampling::feed(BuildContext& context) const {
  const ValueId sampled = context.graph.add_input("sampled", TensorType(DType::i32, {Symbol::logit_rows}));
  context.step.token_ids = context.graph.add1(std::make_shared<ops::FeedTokens>(), {context.step.token_ids, sampled});
}

void Sampling::build(BuildContext& context, ValueId logits) const {
  const ValueId rows =
      context.graph.add_input("sample_rows", TensorType(DType::i32, {Symbol::logit_rows, kernels::kSampleRowWords}));
  const ValueId penalties = context.graph.add_input("penalties", TensorType(DType::i32, {Symbol::penalties, 2}));
  const std::vector<ValueId> drawn = context.graph.add(std::make_shared<ops::Sample>(), {logits, rows, penalties});
  context.graph.mark_output("token", drawn[0]);
  context.graph.mark_output("logprob", drawn[1]);
  context.graph.mark_output("top_token", drawn[2]);
  context.graph.mark_output("top_logprob", drawn[3]);
}

}  // namespace eadem::modules
