// SPDX-License-Identifier: Apache-2.0
#include "eadem/modules/hybrid/mtp_input.h"

#include "eadem/modules/factory/linear_factory.h"
#include "eadem/ops/elementwise/columns.h"

namespace eadem::modules {

MtpInput::MtpInput(const NormSpec& norm, int64_t hidden, int layer)
    : token_norm_(norm), previous_norm_(norm), hidden_(hidden), layer_(layer) {
  token_norm_.name = "enorm";
  previous_norm_.name = "hnorm";
}

ValueId MtpInput::build(BuildContext& context, ValueId tokens, ValueId previous) const {
  const ValueId both = context.graph.add1(std::make_shared<ops::ConcatColumns>(kernels::ColumnsAttrs{hidden_}),
                                          {Norm(token_norm_, hidden_).build(context, tokens, layer_),
                                           Norm(previous_norm_, hidden_).build(context, previous, layer_)});
  return LinearFactory::build(
      context,
      {.name = "eh_proj", .in = 2 * hidden_, .out = hidden_, .hardware = &context.hardware.of(Role::mlp, layer_)},
      both);
}

}  // namespace eadem::modules
