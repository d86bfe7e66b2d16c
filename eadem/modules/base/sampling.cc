// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/base/sampling.h"

#include "eadem/ops/sample.h"

namespace eadem::modules {

void Sampling::build(BuildContext& context, ValueId logits) const {
  const auto per_row = [&](const char* name, DType dtype) {
    return context.graph.add_input(name, TensorType(dtype, {Symbol::logit_rows}));
  };
  const std::vector<ValueId> drawn = context.graph.add(
      std::make_shared<ops::Sample>(),
      {logits, per_row("temperature", DType::f32), per_row("top_k", DType::i32), per_row("top_p", DType::f32),
       per_row("min_p", DType::f32), per_row("seed", DType::i64), per_row("draw_position", DType::i64)});
  context.graph.mark_output("token", drawn[0]);
  context.graph.mark_output("logprob", drawn[1]);
}

}  // namespace eadem::modules
