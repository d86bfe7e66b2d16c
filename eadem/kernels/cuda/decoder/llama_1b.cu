// SPDX-License-Identifier: Apache-2.0
//
// The persistent kernel for layers of the shape of Llama 3.2 1B.
#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda::decoder {
namespace {
constexpr DecoderShape kShape = kLlama1b;
}  // namespace
}  // namespace eadem::kernels::cuda::decoder

#include "eadem/kernels/cuda/decoder/decoder_layers.cuh"
#include "eadem/kernels/cuda/decoder/shapes.h"

namespace eadem::kernels::cuda::decoder {

int64_t exchange_bytes_1b(int64_t splits) { return exchange_bytes(splits); }
cudaError_t launch_1b(const DecoderLayersParams& params, cudaStream_t stream) { return launch_layers(params, stream); }

}  // namespace eadem::kernels::cuda::decoder
