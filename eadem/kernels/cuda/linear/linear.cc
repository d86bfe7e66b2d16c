// SPDX-License-Identifier: Apache-2.0
//
// linear and the fusions linear_gated_activation(_quantize) and linear_qkv, whose results have the bits of the separate
// ops. A row's bits do not depend on the rows beside it:
//   cuda_mma_chain  bf16 x bf16 on Hopper. Up to 64 rows stream the weight (linear_stream.cu); more rows go through
//                   those algorithms of cuBLASLt that gave the same bits in a test when the program compiled, else
//                   through linear_stream again, 64 rows at a time. Encoded weights are rounded to bf16: few rows
//                   stream them as they are (packed_stream.cu), more rows decode them first
//   cuda_fp8        weights in e4m3, with scales for rows, blocks or the whole, and x rounded to rows of e4m3
//                   (fp8_stream.cu, cuBLASLt, fp8_tiles.cu)
//   cuda_int8       weights in q4_k, q6_k or 4 bits in groups of 128, and x rounded to 8-bit codes with a scale for
//                   each 256 (integer_stream.cu, integer_tiles.cu, integer_group_tiles.cu, integer_turns.cu)
//   cuda_decoded    encoded weights on other devices (decoded_product.cc)
//   cublaslt        other shapes, f32, and bf16 on other devices, by one algorithm for any number of rows
//   cuda_tiles      any mix of element types, f32 FMA
#include "eadem/kernels/linear.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/exact_product.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/cuda/linear/int8_chunks.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/fusions.h"

namespace eadem::kernels::cuda {

namespace {

// The shares of the device's bf16 rate that f32 products reach in cuBLASLt (67 of 989 TFLOP/s on an H100) and in the
// tiles.
constexpr double kF32Share = 0.08;
constexpr double kTilesShare = 0.01;
// Products of 8-bit floats against the bf16 rate, by their nominal rates.
constexpr double kFp8Share = 2.0;
// Products with K-quants that are not decoded against the bf16 rate: so they are modelled as the faster kernel.
constexpr double kIntegerShare = 1.25;

Requirements common(const KernelRequest& request, std::initializer_list<size_t> encoded_inputs = {}) {
  return Requirements(request, encoded_inputs)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("weight", request.inputs[1], kStorageDTypes)
      .dtype("bias", request.inputs[2], kStorageDTypes)
      .dtype("y", request.outputs[0], kActivationDTypes)
      .require(request.inputs[1].fixed(1) > 0, "the sum has no terms");
}

// The bytes that a weight in 8-bit floats grows by when it is rounded to bf16.
double bf16_bytes(const TensorType& weight) {
  return Fp8Encoding::of(weight.encoding) == nullptr ? 0.0 : static_cast<double>(weight.num_elements({}));
}

// A weight that cuda_int8 takes goes there for any number of rows, so that all have the same bits.
constexpr const char* kLeftToIntegers = "cuda_int8 multiplies its codes as they are; matmul_input is int8";
bool left_to_integers(const KernelRequest& request, MatmulInput input) {
  return input == MatmulInput::int8 && takes_integers(request);
}

Verdict can_use_mma_chain(const KernelRequest& request) {
  return common(request, {1})
      .hopper()
      .require(takes_stream(request), stream_requirement(request))
      .require(!left_to_integers(request, request.attrs.get<LinearAttrs>().matmul_input), kLeftToIntegers)
      .same_dtype("bias", request.inputs[2], "y", request.outputs[0])
      .verdict({.extra_bytes = bf16_bytes(request.inputs[1]), .reason = "tensor cores"});
}

// Whether products of this request may round x to 8 bits, and fp8_stream takes the weights `inputs`.
Requirements fp8_requirements(const KernelRequest& request, MatmulInput input,
                              std::initializer_list<size_t> encoded_inputs,
                              std::initializer_list<size_t> encoded_outputs = {}) {
  return Requirements(request, encoded_inputs, encoded_outputs)
      .hopper()
      .require(takes_fp8_stream(request),
               fmt::format("x has to be bf16 (is {}), weight fp8_e4m3 (is {}), its rows a multiple of {} (are {})",
                           WeightType(request.inputs[0].dtype, request.inputs[0].encoding).name(),
                           WeightType(request.inputs[1].dtype, request.inputs[1].encoding).name(), kFp8Multiple,
                           request.inputs[1].fixed(1)))
      .require(input == MatmulInput::int8,
               fmt::format("rounds x to fp8_e4m3; matmul_input is {}", matmul_input_name(input)));
}
constexpr const char* kFp8Reason = "tensor cores, 8-bit floats";

Verdict can_use_fp8(const KernelRequest& request) {
  return fp8_requirements(request, request.attrs.get<LinearAttrs>().matmul_input, {0, 1})
      .dtype("y", request.outputs[0], kActivationDTypes)
      .same_dtype("bias", request.inputs[2], "y", request.outputs[0])
      .verdict({.flops_share = kFp8Share, .reason = kFp8Reason});
}

const Encoding* fp8_rows(const KernelRequest&, int input) { return input == 0 ? &RowEncoding::fp8_e4m3() : nullptr; }

// Whether products of this request may round x to 8-bit codes, and integer_stream takes the weights `inputs`.
Requirements integer_requirements(const KernelRequest& request, MatmulInput input,
                                  std::initializer_list<size_t> encoded_inputs,
                                  std::initializer_list<size_t> encoded_outputs = {}) {
  return Requirements(request, encoded_inputs, encoded_outputs)
      .hopper()
      .require(takes_integers(request),
               fmt::format("x has to be bf16 (is {}), weight q4_k, q6_k or 4 bits in groups of {} or more (is {}), its "
                           "rows a multiple of {} (are {})",
                           WeightType(request.inputs[0].dtype, request.inputs[0].encoding).name(), kIntegerGroup,
                           WeightType(request.inputs[1].dtype, request.inputs[1].encoding).name(), kIntegerChunk,
                           request.inputs[1].fixed(1)))
      .require(input == MatmulInput::int8,
               fmt::format("rounds x to int8; matmul_input is {}", matmul_input_name(input)));
}
constexpr const char* kIntegerReason = "tensor cores, 8-bit codes";

// Whether weights that share a launch with one of `first` may have `other`: groups have kernels of their own.
bool share_launch(IntegerCodes first, IntegerCodes other) {
  return other != IntegerCodes::none && (first == IntegerCodes::groups) == (other == IntegerCodes::groups);
}
constexpr const char* kShareNoLaunch = "the weights are not all of 4 bits in groups, or all q4_k or q6_k";

Verdict can_use_integers(const KernelRequest& request) {
  return integer_requirements(request, request.attrs.get<LinearAttrs>().matmul_input, {0, 1})
      .dtype("y", request.outputs[0], kActivationDTypes)
      .same_dtype("bias", request.inputs[2], "y", request.outputs[0])
      .verdict({.flops_share = kIntegerShare, .reason = kIntegerReason});
}

const Encoding* integer_rows(const KernelRequest&, int input) { return input == 0 ? &Int8Chunks::instance() : nullptr; }

Verdict can_use_cublaslt(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1], &y = request.outputs[0];
  const double share = x.dtype == DType::f32 ? kF32Share : 1.0;
  const int64_t row_bytes = weight.fixed(1) * static_cast<int64_t>(dtype_size(weight.dtype));
  return common(request)
      .same_dtype("weight", weight, "x", x)
      .same_dtype("bias", request.inputs[2], "y", y)  // the epilogue adds bias before the only rounding
      .require(x.dtype != DType::f32 || y.dtype == DType::f32, "x is f32 and y is bf16; cuBLASLt gives f32 from f32")
      .require(row_bytes % CudaMatmul::kAlignment == 0,
               fmt::format("a row of weight is {} bytes, not a multiple of {}", row_bytes, CudaMatmul::kAlignment))
      .require(!takes_stream(request), "cuda_mma_chain uses it where it has the same bits")
      .verdict({.flops_share = share, .reason = x.dtype == DType::f32 ? "f32 units" : "tensor cores"});
}

// Every kRowsOfTile rows read the weights once more.
Verdict can_use_tiles(const KernelRequest& request) {
  constexpr int64_t kRowsOfTile = 64;
  const int64_t rows = request.inputs[0].dim(0).bind(request.bounds);
  const auto times = static_cast<double>(std::max<int64_t>(rows - 1, 0) / kRowsOfTile);
  return common(request).verdict({.flops_share = kTilesShare,
                                  .extra_bytes = times * static_cast<double>(request.inputs[1].size_bytes({})),
                                  .reason = "f32 FMA, weights read for every 64 rows"});
}

// The memory of an operand as its kernel reads it.
const void* operand_data(const TensorView& operand) {
  return operand.encoding == nullptr ? elements(operand) : operand.plane(0);
}
// The scales of 8-bit floats and codes; null for other operands.
const float* scales_of(const TensorView& operand) { return static_cast<const float*>(operand.more_planes[0]); }
// Planes of Int8Chunks; none for other operands.
Int8ChunkPlanes chunks_of(const TensorView& x) {
  return x.encoding == &Int8Chunks::instance() ? int8_chunk_planes(x) : Int8ChunkPlanes{};
}

LinearParams linear_params(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &weight = call.inputs[1], &bias = call.inputs[2], &y = call.outputs[0];
  return {.x = operand_data(x),
          .weight = operand_data(weight),
          .bias = elements(bias),
          .y = elements(y),
          .tokens = x.shape[0],
          .in = x.shape[1],
          .out = weight.shape[0],
          .x_dtype = x.dtype,
          .weight_dtype = weight.dtype,
          .bias_dtype = bias.dtype,
          .y_dtype = y.dtype,
          .x_scales = scales_of(x),
          .weight_scales = scales_of(weight),
          .x_chunks = chunks_of(x)};
}

PlanPtr prepare_cublaslt(const KernelRequest& request, Context& context) {
  CudaDevice& device = static_cast<CudaDevice&>(context.device);
  const CudaMatmul::Plan& product = device.matmul().plan(matmul_problem(request));
  return make_plan([&device, &product](const KernelCall& call) {
    device.matmul().run(product, matmul_call(linear_params(call)), device.stream());
  });
}

void run_tiles(const KernelCall& call) { EADEM_CUDA_CALL(launch_linear_tiles(linear_params(call), stream_of(call))); }

const Encoding* encoding_of(const KernelRequest& request, int input) {
  return FragmentBlocks::of(request.inputs[static_cast<size_t>(input)].encoding);
}
const Encoding* linear_packing(const KernelRequest& request, int input) {
  return input == 1 ? encoding_of(request, input) : nullptr;
}
const Encoding* gated_packing(const KernelRequest& request, int input) {
  return input == 1 || input == 2 ? encoding_of(request, input) : nullptr;
}
const Encoding* qkv_packing(const KernelRequest& request, int input) {
  return input == 1 || input == 3 || input == 5 ? encoding_of(request, input) : nullptr;
}

PlanPtr prepare_exact(const KernelRequest& request, Context& context) {
  const ExactProduct product(static_cast<CudaDevice&>(context.device), request);
  return make_plan([product](const KernelCall& call) { product.run(linear_params(call), call.scratch.data); },
                   product.scratch_bytes());
}

// The request of one linear of a fusion, whose ports are those of the fusion's by index.
struct LinearRequest {
  LinearRequest(const KernelRequest& fusion, size_t weight, std::optional<size_t> bias, size_t output)
      : inputs{fusion.inputs[0], fusion.inputs[weight], bias ? fusion.inputs[*bias] : unconnected_port()},
        outputs{TensorType(fusion.outputs[output].dtype, fusion.outputs[output].dims())},  // the product's, not rounded
        request(fusion) {
    request.op = "linear";
    request.inputs = inputs;
    request.outputs = outputs;
  }
  LinearRequest(const LinearRequest&) = delete;
  LinearRequest& operator=(const LinearRequest&) = delete;

  std::array<TensorType, 3> inputs;
  std::array<TensorType, 1> outputs;
  KernelRequest request;
};

// Rounds rows to the encoding of `to`, as quantize does. `largest`: as of QuantizeRowsParams.
void round_rows(const TensorView& to, const TensorView& values, cudaStream_t stream, unsigned* largest = nullptr) {
  if (to.encoding == &Int8Chunks::instance()) {
    EADEM_CUDA_CALL(
        launch_quantize_chunks({.x = elements(values), .to = int8_chunk_planes(to), .dtype = values.dtype}, stream));
    return;
  }
  EADEM_CUDA_CALL(launch_quantize_rows({.x = elements(values),
                                        .codes = static_cast<uint8_t*>(to.plane(0)),
                                        .scales = static_cast<float*>(to.plane(1)),
                                        .rows = values.shape[0],
                                        .columns = values.shape[1],
                                        .dtype = values.dtype,
                                        .largest = largest},
                                       stream));
}

// --- linear_gated_activation: few rows, and many of 8-bit floats, take one launch; other rows two products and the
// activation.

Verdict can_gate(const KernelRequest& request) {
  const TensorType &gate = request.inputs[1], &up = request.inputs[2];
  return Requirements(request, {1, 2})
      .hopper()
      .dtype("y", request.outputs[0], {DType::bf16})
      .same_dtype("up_weight", up, "gate_weight", gate)
      .require((up.encoding == nullptr) == (gate.encoding == nullptr), "one weight is plain and one is encoded")
      .require(takes_stream(request), stream_requirement(request))
      .require(!left_to_integers(request, request.attrs.get<LinearGatedActivationAttrs>().matmul_input) &&
                   !left_to_integers(LinearRequest(request, 2, std::nullopt, 0).request,
                                     request.attrs.get<LinearGatedActivationAttrs>().matmul_input),
               kLeftToIntegers)
      .verdict({.extra_bytes = bf16_bytes(gate) + bf16_bytes(up), .reason = "tensor cores"});
}

Verdict can_gate_fp8(const KernelRequest& request) {
  const TensorType &gate = request.inputs[1], &up = request.inputs[2];
  return fp8_requirements(request, request.attrs.get<LinearGatedActivationAttrs>().matmul_input, {0, 1, 2})
      .dtype("y", request.outputs[0], {DType::bf16})
      .require(up.encoding == gate.encoding, "the weights have different encodings")
      .verdict({.flops_share = kFp8Share, .reason = kFp8Reason});
}

Verdict can_gate_integers(const KernelRequest& request) {
  const LinearRequest up(request, 2, std::nullopt, 0);
  return integer_requirements(request, request.attrs.get<LinearGatedActivationAttrs>().matmul_input, {0, 1, 2})
      .dtype("y", request.outputs[0], {DType::bf16})
      .require(share_launch(integer_codes(request), integer_codes(up.request)), kShareNoLaunch)
      .verdict({.flops_share = kIntegerShare, .reason = kIntegerReason});
}

Verdict can_gate_integers_and_quantize(const KernelRequest& request) {
  const Encoding* to = request.attrs.get<LinearGatedActivationAttrs>().round_to;
  const LinearRequest up(request, 2, std::nullopt, 0);
  return integer_requirements(request, request.attrs.get<LinearGatedActivationAttrs>().matmul_input, {0, 1, 2}, {0})
      .dtype("y", request.outputs[0], {DType::bf16})
      .require(to == &Int8Chunks::instance(), fmt::format("rounds to int8_chunks; {} is wanted", to->name()))
      .require(share_launch(integer_codes(request), integer_codes(up.request)), kShareNoLaunch)
      .verdict({.flops_share = kIntegerShare, .reason = kIntegerReason});
}

Verdict can_gate_and_quantize(const KernelRequest& request) {
  const Encoding* to = request.attrs.get<LinearGatedActivationAttrs>().round_to;
  return fp8_requirements(request, request.attrs.get<LinearGatedActivationAttrs>().matmul_input, {0, 1, 2}, {0})
      .dtype("y", request.outputs[0], {DType::bf16})
      .require(to == &RowEncoding::fp8_e4m3(), fmt::format("rounds to fp8_e4m3; {} is wanted", to->name()))
      .require(request.inputs[1].fixed(0) % 8 == 0, "rows have to be a multiple of 8")
      .require(request.inputs[2].encoding == request.inputs[1].encoding, "the weights have different encodings")
      .verdict({.flops_share = kFp8Share, .reason = kFp8Reason});
}

// Whether one launch of tiles computes gate, up and activation of so many tokens of 8-bit floats faster than the
// library's products and a kernel: tiles come in pairs of 2 x 128 tokens, and the last pair has to be nearly full. On
// an H100, 8B shape: 66 and 83 us for 192 tokens, 62 and 74 for 256, 72 and 58 for 128.
bool are_worth_tiles(int64_t tokens) {
  constexpr int64_t kTokens = 256;
  const int64_t missing = (kTokens - tokens % kTokens) % kTokens;
  return missing <= 64 + tokens / 32;
}

// The tiles of a product that integer_turns.cu computes.
int64_t turn_tiles(int64_t tokens, int64_t out) {
  const auto tiles_of = [](int64_t size) { return (size + kIntegerTurnTile - 1) / kIntegerTurnTile; };
  return tiles_of(tokens) * tiles_of(out);
}

// Both products, and the memory of a call: what one decodes, then results that are not outputs.
struct GatedProduct {
  GatedProduct(CudaDevice& device, const KernelRequest& request)
      : gate(device, LinearRequest(request, 1, std::nullopt, 0).request),
        up(device, LinearRequest(request, 2, std::nullopt, 0).request),
        kind(request.attrs.get<LinearGatedActivationAttrs>().kind),
        rounds(request.outputs[0].encoding != nullptr),
        tiles(request.inputs[0].encoding == &RowEncoding::fp8_e4m3()) {
    const int64_t tokens = request.inputs[0].dim(0).bind(request.bounds);
    const int64_t results_bytes = tokens * request.inputs[1].fixed(0) * 2;
    gate_at = std::max(gate.scratch_bytes(), up.scratch_bytes());
    up_at = gate_at + (rounds ? results_bytes : 0);
    // The activation is a launch of its own then. It takes about so long for 64 rows of 14,336 columns on an H100: an
    // estimate from 9 MB of traffic and a launch, not measured.
    constexpr double kActivationMicroseconds = 5;
    if (gate.saved_microseconds() + up.saved_microseconds() > kActivationMicroseconds)
      most_streamed = kLinearStreamLeast;
    scratch_bytes = tokens > most_streamed ? up_at + results_bytes : rounds ? up_at : 0;
    if (tiles && rounds) largest = device.counters(tokens);
  }

  ExactProduct gate, up;
  int64_t most_streamed = gate.most_streamed();  // rows whose products and activation are one launch
  ActivationKind kind;
  bool rounds;             // y is encoded
  bool tiles;              // whether numbers of rows that are worth it are one launch, too
  int64_t gate_at, up_at;  // in the memory of a call: of `gate`, with `rounds`, and of `up`
  int64_t scratch_bytes;
  unsigned* largest = nullptr;  // counters for rows of y
};

void run_gated(const GatedProduct& product, const KernelCall& call) {
  const TensorView &x = call.inputs[0], &gate = call.inputs[1], &up = call.inputs[2], &y = call.outputs[0];
  CudaDevice& device = cuda_device(call);
  char* scratch = static_cast<char*>(call.scratch.data);
  void* results = product.rounds ? scratch + product.gate_at : elements(y);
  const bool in_tiles = product.tiles && are_worth_tiles(x.shape[0]);
  unsigned* largest = in_tiles && product.rounds ? product.largest : nullptr;
  if (x.shape[0] <= product.most_streamed || in_tiles) {
    stream_products(device,
                    {.x = operand_data(x),
                     .up = operand_data(up),
                     .parts = {{operand_data(gate), nullptr, results, gate.shape[0], scales_of(gate)}},
                     .tokens = x.shape[0],
                     .in = x.shape[1],
                     .multiprocessors = device.multiprocessors(),
                     .y_dtype = y.dtype,
                     .activation = product.kind,
                     .x_scales = scales_of(x),
                     .up_scales = scales_of(up),
                     .scaling = product.gate.scaling(),
                     .y_largest = largest,
                     .x_chunks = chunks_of(x)},
                    {product.gate.layout()}, product.up.layout());
    if (product.rounds) round_rows(y, TensorView(results, y.dtype, y.shape), device.stream(), largest);
    return;
  }
  LinearParams p{.x = operand_data(x),
                 .weight = operand_data(gate),
                 .bias = nullptr,
                 .y = results,
                 .tokens = x.shape[0],
                 .in = x.shape[1],
                 .out = gate.shape[0],
                 .x_dtype = x.dtype,
                 .weight_dtype = gate.dtype,
                 .bias_dtype = y.dtype,
                 .y_dtype = y.dtype,
                 .x_scales = scales_of(x),
                 .weight_scales = scales_of(gate),
                 .x_chunks = chunks_of(x)};
  LinearParams of_up = p;
  of_up.weight = operand_data(up), of_up.weight_scales = scales_of(up);
  of_up.y = scratch + product.up_at;
  // Products of K-quants share a launch up to 128 tokens of the 8B, for which that was faster on an H200; more were not
  // measured.
  constexpr int64_t kMostTilesOfBoth = 8;  // of a multiprocessor
  if (p.x_chunks.sums != nullptr && integer_codes_of(*product.gate.layout()) != IntegerCodes::groups &&
      2 * turn_tiles(p.tokens, p.out) <= kMostTilesOfBoth * device.multiprocessors()) {
    stream_products(device,
                    {.x = p.x,
                     .up = nullptr,
                     .parts = {{p.weight, nullptr, p.y, p.out}, {of_up.weight, nullptr, of_up.y, p.out}},
                     .tokens = p.tokens,
                     .in = p.in,
                     .multiprocessors = device.multiprocessors(),
                     .y_dtype = p.y_dtype,
                     .activation = {},
                     .x_scales = p.x_scales,
                     .x_chunks = p.x_chunks},
                    {product.gate.layout(), product.up.layout()});
  } else {
    product.gate.run(p, scratch);
    product.up.run(of_up, scratch);
  }
  if (product.rounds && y.encoding == &Int8Chunks::instance()) {
    EADEM_CUDA_CALL(launch_quantize_chunks(
        {.x = results, .to = int8_chunk_planes(y), .dtype = y.dtype, .factor = of_up.y, .activation = product.kind},
        device.stream()));
    return;
  }
  EADEM_CUDA_CALL(
      launch_gated_activation({.a = results, .b = of_up.y, .y = results, .size = p.tokens * p.out, .dtype = y.dtype},
                              product.kind, device.stream()));
  // Two launches are the faster ones: a block that has a row does nothing else while its loads are on their way.
  if (product.rounds) round_rows(y, TensorView(results, y.dtype, y.shape), device.stream());
}

PlanPtr prepare_gated(const KernelRequest& request, Context& context) {
  const GatedProduct product(static_cast<CudaDevice&>(context.device), request);
  return make_plan([product](const KernelCall& call) { run_gated(product, call); }, product.scratch_bytes);
}

// --- 8-bit floats and codes: rows of x that arrive as they are, are rounded first.

template <const Encoding* (*kRows)(const KernelRequest& request, int input),
          PlanPtr (*kPrepare)(const KernelRequest& request, Context& context)>
PlanPtr prepare_rounded(const KernelRequest& request, Context& context) {
  const TensorType& x = request.inputs[0];
  if (x.encoding != nullptr) return kPrepare(request, context);
  constexpr size_t kMostInputs = 7;
  const Encoding& encoding = *kRows(request, 0);
  EADEM_CHECK(request.inputs.size() <= kMostInputs, "{} inputs", request.inputs.size());
  std::vector<TensorType> types(request.inputs.begin(), request.inputs.end());
  types[0] = TensorType(x.dtype, x.dims(), &encoding);
  KernelRequest rounded = request;
  rounded.inputs = types;
  std::shared_ptr<const Plan> plan = kPrepare(rounded, context);
  constexpr int64_t kAlignment = ExactProduct::kScratchAlignment;
  const int64_t rounded_at = (plan->scratch_bytes() + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t rounded_bytes = encoded_bytes(encoding, {x.dim(0).bind(request.bounds), x.fixed(1)});
  return make_plan(
      [plan = std::move(plan), rounded_at, &encoding](const KernelCall& call) {
        const TensorView& values = call.inputs[0];
        std::array<TensorView, kMostInputs> inputs;
        std::copy(call.inputs.begin(), call.inputs.end(), inputs.begin());
        inputs[0] =
            view_of_planes(static_cast<char*>(call.scratch.data) + rounded_at, encoding, values.dtype, values.shape);
        round_rows(inputs[0], values, stream_of(call));
        plan->run({.inputs = std::span<const TensorView>(inputs.data(), call.inputs.size()),
                   .outputs = call.outputs,
                   .scratch = call.scratch,
                   .context = call.context});
      },
      rounded_at + rounded_bytes);
}

// --- linear_qkv: few rows take one launch; more rows take three products, or one launch of tiles.

// The request of the linear of part 0, 1 or 2.
LinearRequest linear_of(const KernelRequest& qkv, size_t part) { return {qkv, 1 + 2 * part, 2 + 2 * part, part}; }

// Whether each product can be computed, and they can share a launch.
template <Verdict (*kCanMultiply)(const KernelRequest& linear)>
Verdict can_use_qkv(const KernelRequest& request) {
  for (size_t part = 0; part < 3; ++part) {
    if (const Verdict verdict = kCanMultiply(linear_of(request, part).request); !verdict.accepted) return verdict;
    if ((request.inputs[1 + 2 * part].encoding == nullptr) != (request.inputs[1].encoding == nullptr))
      return Verdict::no("some weights are plain and some are encoded");
  }
  for (size_t part = 1; part < 3 && kCanMultiply == can_use_integers; ++part)
    if (!share_launch(integer_codes(linear_of(request, 0).request), integer_codes(linear_of(request, part).request)))
      return Verdict::no(kShareNoLaunch);
  if (kCanMultiply == can_use_integers)
    return accept(request, {.flops_share = kIntegerShare, .reason = kIntegerReason});
  for (size_t part = 1; part < 3 && kCanMultiply == can_use_fp8; ++part)
    if (request.inputs[1 + 2 * part].encoding != request.inputs[1].encoding)
      return Verdict::no("the weights have different encodings");
  if (kCanMultiply == can_use_fp8) return accept(request, {.flops_share = kFp8Share, .reason = kFp8Reason});
  double extra_bytes = 0;
  for (size_t part = 0; part < 3; ++part) extra_bytes += bf16_bytes(request.inputs[1 + 2 * part]);
  return accept(request, {.extra_bytes = extra_bytes, .reason = "tensor cores"});
}

// The three products, and the layouts of their weights for the launch that few rows share.
struct QkvProduct {
  QkvProduct(CudaDevice& device, const KernelRequest& request) {
    for (size_t part = 0; part < 3; ++part) {
      products.emplace_back(device, linear_of(request, part).request);
      layouts[part] = products[part].layout();
      scratch_bytes = std::max(scratch_bytes, products[part].scratch_bytes());
    }
  }

  std::vector<ExactProduct> products;
  std::array<const FragmentLayout*, kMostLinearStreamParts> layouts{};
  int64_t scratch_bytes = 0;
};

// Whether three products of 8-bit codes or floats share a launch: where one alone would leave half of the device idle,
// and of codes where a multiprocessor has up to three tiles. (The 8B's has up to two for 128 tokens, as was measured.
// Three are an estimate from what single products take.)
bool share_tiles(const KernelCall& call, int64_t multiprocessors) {
  const TensorView& x = call.inputs[0];
  if (scales_of(x) == nullptr) return false;
  const int64_t outputs[] = {call.inputs[1].shape[0], call.inputs[3].shape[0], call.inputs[5].shape[0]};
  if (chunks_of(x).sums == nullptr) {
    constexpr int64_t kTile = 128;  // tokens, and rows of a weight
    const auto tiles_of = [](int64_t size) { return (size + kTile - 1) / kTile; };
    return 2 * tiles_of(x.shape[0]) * tiles_of(*std::ranges::min_element(outputs)) <= multiprocessors;
  }
  int64_t tiles = 0;
  for (const int64_t out : outputs) tiles += turn_tiles(x.shape[0], out);
  return tiles <= 3 * multiprocessors;
}

void run_qkv(const QkvProduct& product, const KernelCall& call) {
  const TensorView& x = call.inputs[0];
  CudaDevice& device = cuda_device(call);
  if (x.shape[0] > product.products[0].most_streamed() && !share_tiles(call, device.multiprocessors())) {
    for (size_t part = 0; part < 3; ++part) {
      const TensorView inputs[] = {x, call.inputs[1 + 2 * part], call.inputs[2 + 2 * part]};
      product.products[part].run(linear_params({.inputs = inputs, .outputs = call.outputs.subspan(part, 1)}),
                                 call.scratch.data);
    }
    return;
  }
  LinearStreamParams p{.x = operand_data(x),
                       .up = nullptr,
                       .parts = {},
                       .tokens = x.shape[0],
                       .in = x.shape[1],
                       .multiprocessors = device.multiprocessors(),
                       .y_dtype = call.outputs[0].dtype,
                       .activation = {},
                       .x_scales = scales_of(x),
                       .scaling = product.products[0].scaling(),
                       .x_chunks = chunks_of(x)};
  for (size_t part = 0; part < 3; ++part) {
    const TensorView &weight = call.inputs[1 + 2 * part], &bias = call.inputs[2 + 2 * part];
    p.parts[part] = {operand_data(weight), elements(bias), elements(call.outputs[part]), weight.shape[0],
                     scales_of(weight)};
  }
  stream_products(device, p, product.layouts);
}

PlanPtr prepare_qkv(const KernelRequest& request, Context& context) {
  const QkvProduct product(static_cast<CudaDevice&>(context.device), request);
  return make_plan([product](const KernelCall& call) { run_qkv(product, call); }, product.scratch_bytes);
}

constexpr Kernel kMmaChain{.name = "cuda_mma_chain",
                           .pass = Pass::inference,
                           .can_handle = can_use_mma_chain,
                           .prepare = prepare_exact,
                           .packing = linear_packing,
                           .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kFp8{.name = "cuda_fp8",
                      .pass = Pass::inference,
                      .can_handle = can_use_fp8,
                      .prepare = prepare_rounded<fp8_rows, prepare_exact>,
                      .alignment_bytes = CudaMatmul::kAlignment,
                      .wanted_encoding = fp8_rows};
constexpr Kernel kIntegers{.name = "cuda_int8",
                           .pass = Pass::inference,
                           .can_handle = can_use_integers,
                           .prepare = prepare_rounded<integer_rows, prepare_exact>,
                           .packing = linear_packing,
                           .alignment_bytes = CudaMatmul::kAlignment,
                           .wanted_encoding = integer_rows};
constexpr Kernel kCublasLt{.name = "cublaslt",
                           .pass = Pass::inference,
                           .can_handle = can_use_cublaslt,
                           .prepare = prepare_cublaslt,
                           .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kTiles{"cuda_tiles", Pass::inference, can_use_tiles, prepare_nothing<run_tiles>};
constexpr Kernel kMmaChainForward = in_forward(kMmaChain), kCublasLtForward = in_forward(kCublasLt),
                 kTilesForward = in_forward(kTiles), kFp8Forward = in_forward(kFp8);
constexpr Kernel kGated{.name = "cuda_mma_chain",
                        .pass = Pass::inference,
                        .can_handle = can_gate,
                        .prepare = prepare_gated,
                        .packing = gated_packing,
                        .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kGatedFp8{.name = "cuda_fp8",
                           .pass = Pass::inference,
                           .can_handle = can_gate_fp8,
                           .prepare = prepare_rounded<fp8_rows, prepare_gated>,
                           .alignment_bytes = CudaMatmul::kAlignment,
                           .wanted_encoding = fp8_rows};
constexpr Kernel kGatedQuantize{.name = "cuda_fp8",
                                .pass = Pass::inference,
                                .can_handle = can_gate_and_quantize,
                                .prepare = prepare_rounded<fp8_rows, prepare_gated>,
                                .alignment_bytes = CudaMatmul::kAlignment,
                                .wanted_encoding = fp8_rows};
constexpr Kernel kGatedIntegers{.name = "cuda_int8",
                                .pass = Pass::inference,
                                .can_handle = can_gate_integers,
                                .prepare = prepare_rounded<integer_rows, prepare_gated>,
                                .packing = gated_packing,
                                .alignment_bytes = CudaMatmul::kAlignment,
                                .wanted_encoding = integer_rows};
constexpr Kernel kGatedIntegersQuantize{.name = "cuda_int8",
                                        .pass = Pass::inference,
                                        .can_handle = can_gate_integers_and_quantize,
                                        .prepare = prepare_rounded<integer_rows, prepare_gated>,
                                        .packing = gated_packing,
                                        .alignment_bytes = CudaMatmul::kAlignment,
                                        .wanted_encoding = integer_rows};
constexpr Kernel kQkvFp8{.name = "cuda_fp8",
                         .pass = Pass::inference,
                         .can_handle = can_use_qkv<can_use_fp8>,
                         .prepare = prepare_rounded<fp8_rows, prepare_qkv>,
                         .alignment_bytes = CudaMatmul::kAlignment,
                         .wanted_encoding = fp8_rows};
constexpr Kernel kQkvIntegers{.name = "cuda_int8",
                              .pass = Pass::inference,
                              .can_handle = can_use_qkv<can_use_integers>,
                              .prepare = prepare_rounded<integer_rows, prepare_qkv>,
                              .packing = qkv_packing,
                              .alignment_bytes = CudaMatmul::kAlignment,
                              .wanted_encoding = integer_rows};
constexpr Kernel kQkv{.name = "cuda_mma_chain",
                      .pass = Pass::inference,
                      .can_handle = can_use_qkv<can_use_mma_chain>,
                      .prepare = prepare_qkv,
                      .packing = qkv_packing,
                      .alignment_bytes = CudaMatmul::kAlignment};

}  // namespace

PlanPtr prepare_linear_fp8(const KernelRequest& request, Context& context) {
  return prepare_rounded<fp8_rows, prepare_exact>(request, context);
}

KernelList linear_kernels() {
  KernelList kernels = linear_backward_kernels();
  for (const KernelList& more : {linear_fp8_backward_kernels(), linear_fp8_tensor_kernels(), linear_decoded_kernels()})
    kernels.insert(kernels.end(), more.begin(), more.end());
  kernels.insert(kernels.begin(), {&kMmaChain, &kMmaChainForward, &kCublasLt, &kCublasLtForward, &kTiles,
                                   &kTilesForward, &kFp8, &kFp8Forward, &kIntegers});
  return kernels;
}
KernelList linear_gated_activation_kernels() { return {&kGated, &kGatedFp8, &kGatedIntegers}; }
KernelList linear_gated_activation_quantize_kernels() { return {&kGatedQuantize, &kGatedIntegersQuantize}; }
KernelList linear_qkv_kernels() { return {&kQkv, &kQkvFp8, &kQkvIntegers}; }

}  // namespace eadem::kernels::cuda
