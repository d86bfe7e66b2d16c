// SPDX-License-Identifier: Apache-2.0
#include "eadem/kernels/cuda/decoder/shapes.h"

namespace eadem::kernels::cuda {

int64_t decoder_exchange_bytes(const DecoderShape& shape, int64_t splits) {
  return shape == kLlama1b ? decoder::exchange_bytes_1b(splits) : decoder::exchange_bytes_8b(splits);
}

cudaError_t launch_decoder_layers(const DecoderLayersParams& params, cudaStream_t stream) {
  if (params.num_layers == 0) return cudaSuccess;
  if (params.num_layers > kMostDecoderLayers || params.block_size % kDecoderBlockMultiple != 0 ||
      params.scale_type == FragmentLayout::Scale::f32)
    return cudaErrorInvalidValue;
  if (params.shape == kLlama8b) return decoder::launch_8b(params, stream);
  if (params.shape == kLlama1b) return decoder::launch_1b(params, stream);
  return cudaErrorInvalidValue;
}

}  // namespace eadem::kernels::cuda
