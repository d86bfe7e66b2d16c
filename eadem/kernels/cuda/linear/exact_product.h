// SPDX-License-Identifier: Apache-2.0
//
// Products whose bits do not depend on the number of rows. Of bf16 rows, every output is one chain of mma.sync over
// ascending k (linear_stream.cu, packed_stream.cu); of rows and weights in 8-bit floats it is a sum of chains
// (fp8_stream.cu), of rows of 8-bit codes one of chunks (integer_products.cuh, which no library has). Up
// to kLinearStreamMaxTokens rows are streamed; more go through those algorithms of cuBLASLt that gave the same bits in
// a test, and more than kLinearStreamLeast, of plain weights, where such an algorithm was faster. Else bf16 rows are
// streamed in turns, and those of 8-bit floats computed in tiles (fp8_tiles.cu).
#pragma once

#include <array>
#include <string>

#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/kernel.h"

namespace eadem::kernels::cuda {

// Whether linear_stream or packed_stream accepts x and weight, the first inputs of the request. Like all that is here,
// false where the kernels for Hopper do not run.
bool takes_stream(const KernelRequest& request);
std::string stream_requirement(const KernelRequest& request);
// Whether fp8_stream accepts them: x as it will be once it is rounded, weight in e4m3.
bool takes_fp8_stream(const KernelRequest& request);

// The codes of the weight if integer_stream and integer_tiles accept them, x as it will be once it is rounded.
IntegerCodes integer_codes(const KernelRequest& request);
inline bool takes_integers(const KernelRequest& request) { return integer_codes(request) != IntegerCodes::none; }

// linear's kernel cuda_fp8, for a request that takes_fp8_stream; rows that arrive plain are rounded (linear.cc).
PlanPtr prepare_linear_fp8(const KernelRequest& request, Context& context);

// The problem of x and the first weight.
CudaMatmulProblem matmul_problem(const KernelRequest& request);
CudaMatmulCall matmul_call(const LinearParams& params);

// The layout in which the mma.sync chain reads a weight; null for plain ones.
const FragmentLayout* layout_of(const TensorType& weight);

// Computes up to kLinearStreamMaxTokens rows (of 8-bit codes up to kIntegerStreamMaxTokens); any number where x is in
// 8-bit floats, and of one part without `up` where it is in 8-bit codes. All weights are plain, or each has a layout,
// or each has scales.
void stream_products(CudaDevice& device, const LinearStreamParams& params,
                     const std::array<const FragmentLayout*, kMostLinearStreamParts>& layouts,
                     const FragmentLayout* up_layout = nullptr);

class ExactProduct {
 public:
  // `request` is that of a linear which takes_stream, or whose x is rounded and which takes_fp8_stream; its bounds say
  // how many rows there may be. Tests the library's algorithms on the device when no earlier product has. Throws
  // DeviceError.
  ExactProduct(CudaDevice& device, const KernelRequest& request);

  // Bytes in which an encoded weight is decoded; aligned to kScratchAlignment.
  static constexpr int64_t kScratchAlignment = 64;
  int64_t scratch_bytes() const { return scratch_bytes_; }
  const FragmentLayout* layout() const { return layout_; }
  // The most rows of more than one part.
  int64_t most_streamed() const { return integers_ ? kIntegerStreamMaxTokens : kLinearStreamMaxTokens; }
  WeightScaling scaling() const { return scaling_; }
  // By how many microseconds the library is faster than streams, at kLinearStreamMaxTokens rows; 0: it is not.
  double saved_microseconds() const { return saved_microseconds_; }

  // Sets params.weight_scaling itself.
  void run(LinearParams params, void* scratch) const;

 private:
  CudaDevice* device_;
  bool integers_;                 // x are rows of Int8Chunks
  const FragmentLayout* layout_;  // of the weight; null: it is plain
  WeightScaling scaling_;         // of the weight; `rows` if it has no scales
  int64_t scratch_bytes_ = 0;
  double saved_microseconds_ = 0;
  CudaMatmul::ExactPlans plans_{};  // null: the chains of this backend
};

}  // namespace eadem::kernels::cuda
