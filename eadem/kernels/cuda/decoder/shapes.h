// SPDX-License-Identifier: Apache-2.0
//
// The functions of launch.h for each shape of layers that the persistent kernel is compiled for.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "eadem/kernels/cuda/launch.h"

namespace eadem::kernels::cuda::decoder {

int64_t exchange_bytes_8b(int64_t splits);
cudaError_t launch_8b(const DecoderLayersParams& params, cudaStream_t stream);

int64_t exchange_bytes_1b(int64_t splits);
cudaError_t launch_1b(const DecoderLayersParams& params, cudaStream_t stream);

}  // namespace eadem::kernels::cuda::decoder
