// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/collectives.h"
#include "eadem/kernels/backends.h"
#include "eadem/kernels/cuda/support.h"

namespace eadem::kernels::cuda {

namespace {

Verdict can_all_reduce(const KernelRequest& request) {
  return Requirements(request)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .same_dtype("y", request.outputs[0], "x", request.inputs[0])
      .at_cost(0);
}

void run_all_reduce(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &y = call.outputs[0];
  Context& context = *call.context;
  context.device.copy(elements(y), elements(x), y.size_bytes());  // copies nothing if y is x
  context.mesh.along(call.attrs.get<CollectiveAttrs>().over).all_reduce_sum(context.device, y);
}

constexpr Kernel kAllReduce{"cuda_communicator", Pass::inference, can_all_reduce, run_all_reduce};

}  // namespace

KernelList all_reduce_kernels() { return {&kAllReduce}; }

}  // namespace eadem::kernels::cuda
