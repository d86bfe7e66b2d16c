// SPDX-License-Identifier: Apache-2.0
//
// The kernels for Hopper in a program that was not compiled for 9.0a: none. No request reaches these functions, because
// CudaDevice::hopper_refusal says that the kernels are not there.
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/fp8_tensor.h"

namespace eadem::kernels::cuda {

namespace {
constexpr cudaError_t kLeftOut = cudaErrorNoKernelImageForDevice;
}

bool has_hopper_kernels() { return false; }

cudaError_t launch_attention_prompt(const AttentionParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_attention_decode(const AttentionParams&, cudaStream_t) { return kLeftOut; }
bool takes_new_rows(const AttentionParams&) { return false; }
cudaError_t launch_attention_backward_wgmma(const AttentionBackwardParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_linear_stream(const LinearStreamParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_fp8_stream(const LinearStreamParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_fp8_tiles(const LinearStreamParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_quantize_tensor(const QuantizeTensorParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_gated_codes(const GatedCodesParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_transpose_codes(const TransposeCodesParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_e5m2_scale(const ScaleParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_cross_entropy_codes(const CrossEntropyCodesParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_packed_stream(const PackedStreamParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_integer_turns(const PackedStreamParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_integer_stream(const PackedStreamParams&, cudaStream_t) { return kLeftOut; }
int64_t decoder_exchange_bytes(const DecoderShape&, int64_t) { return 0; }
cudaError_t launch_decoder_layers(const DecoderLayersParams&, cudaStream_t) { return kLeftOut; }
cudaError_t launch_integer_tiles(const PackedStreamParams&, cudaStream_t) { return kLeftOut; }

}  // namespace eadem::kernels::cuda
