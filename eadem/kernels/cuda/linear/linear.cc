// SPDX-License-Identifier: Apache-2.0
//
// linear and the fusions linear_gated_activation and linear_qkv, whose results have the bits of the separate ops. A
// row's bits do not depend on the rows beside it:
//   cuda_mma_chain  bf16 x bf16 on Hopper. Up to 64 rows stream the weight (linear_stream.cu); more rows go through
//                   those algorithms of cuBLASLt that gave the same bits in a test when the program compiled, else
//                   through linear_stream again, 64 rows at a time. Encoded weights are rounded to bf16: few rows
//                   stream them as they are (packed_stream.cu), more rows decode them first
//   cublaslt        other shapes and f32, by one algorithm for any number of rows
//   cuda_tiles      any mix of element types, f32 FMA
#include "eadem/kernels/linear.h"

#include <algorithm>
#include <array>
#include <optional>
#include <vector>

#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/launch.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/cuda/support.h"
#include "eadem/kernels/fusions.h"

namespace eadem::kernels::cuda {

namespace {

// The shares of the device's bf16 rate that f32 products reach in cuBLASLt (67 of 989 TFLOP/s on an H100) and in the
// tiles.
constexpr double kF32Share = 0.08;
constexpr double kTilesShare = 0.01;

Requirements common(const KernelRequest& request, std::initializer_list<size_t> encoded_inputs = {}) {
  return Requirements(request, encoded_inputs)
      .dtype("x", request.inputs[0], kActivationDTypes)
      .dtype("weight", request.inputs[1], kStorageDTypes)
      .dtype("bias", request.inputs[2], kStorageDTypes)
      .dtype("y", request.outputs[0], kActivationDTypes)
      .require(request.inputs[1].fixed(1) > 0, "the sum has no terms");
}

// Whether linear_stream or packed_stream accepts the request. cuda_mma_chain and cublaslt use this to divide the
// products between them.
bool takes_stream(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1];
  return request.device->backend() == "cuda" &&
         static_cast<const CudaDevice*>(request.device)->compute_capability() >= 90 && x.dtype == DType::bf16 &&
         (weight.dtype == DType::bf16 || weight.encoding != nullptr) && weight.fixed(1) % kLinearStreamMultiple == 0;
}

std::string stream_requirement(const KernelRequest& request) {
  return fmt::format(
      "x has to be bf16 (is {}), weight bf16 or encoded (is {}), its rows a multiple of {} (are {}), the device Hopper "
      "or newer",
      dtype_name(request.inputs[0].dtype), WeightType(request.inputs[1].dtype, request.inputs[1].encoding).name(),
      kLinearStreamMultiple, request.inputs[1].fixed(1));
}

Verdict can_use_mma_chain(const KernelRequest& request) {
  return common(request, {1})
      .require(takes_stream(request), stream_requirement(request))
      .same_dtype("bias", request.inputs[2], "y", request.outputs[0])
      .verdict({.reason = "tensor cores"});
}

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

// The memory of a weight as its kernel reads it.
const void* weight_data(const TensorView& weight) {
  return weight.encoding == nullptr ? elements(weight) : weight.plane(0);
}

LinearParams linear_params(const KernelCall& call) {
  const TensorView &x = call.inputs[0], &weight = call.inputs[1], &bias = call.inputs[2], &y = call.outputs[0];
  return {.x = elements(x),
          .weight = weight_data(weight),
          .bias = elements(bias),
          .y = elements(y),
          .tokens = x.shape[0],
          .in = x.shape[1],
          .out = weight.shape[0],
          .x_dtype = x.dtype,
          .weight_dtype = weight.dtype,
          .bias_dtype = bias.dtype,
          .y_dtype = y.dtype};
}

// The problem of x and the first weight.
CudaMatmulProblem matmul_problem(const KernelRequest& request) {
  const TensorType &x = request.inputs[0], &weight = request.inputs[1];
  const bool bias = request.op == "linear" && !is_absent(request.inputs[2]);
  return {.in = weight.fixed(1),
          .out = weight.fixed(0),
          .operands = x.dtype,
          .result = request.outputs[0].dtype,
          .bias = bias};
}

CudaMatmulCall matmul_call(const LinearParams& p) {
  return {.x = p.x, .weight = p.weight, .bias = p.bias, .y = p.y, .rows = p.tokens};
}

PlanPtr prepare_cublaslt(const KernelRequest& request, Context& context) {
  CudaDevice& device = static_cast<CudaDevice&>(context.device);
  const CudaMatmul::Plan& product = device.matmul().plan(matmul_problem(request));
  return make_plan([&device, &product](const KernelCall& call) {
    device.matmul().run(product, matmul_call(linear_params(call)), device.stream());
  });
}

void run_tiles(const KernelCall& call) { EADEM_CUDA_CALL(launch_linear_tiles(linear_params(call), stream_of(call))); }

// The layout of a weight, or null for plain ones.
const FragmentLayout* layout_of(const TensorType& weight) {
  return weight.encoding == nullptr ? nullptr : &FragmentBlocks::of(weight.encoding)->layout();
}
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

// Computes the mma.sync chain for up to kLinearStreamMaxTokens rows. All weights are plain, or each has a layout.
void stream(CudaDevice& device, const LinearStreamParams& p,
            const std::array<const FragmentLayout*, kMostLinearStreamParts>& layouts,
            const FragmentLayout* up_layout = nullptr) {
  if (layouts[0] == nullptr) {
    EADEM_CUDA_CALL(launch_linear_stream(p, device.stream()));
    return;
  }
  PackedStreamParams packed{.product = p, .layouts = {}, .up_layout = {}};
  for (size_t i = 0; i < layouts.size(); ++i)
    if (layouts[i] != nullptr) packed.layouts[i] = *layouts[i];
  if (up_layout != nullptr) packed.up_layout = *up_layout;
  EADEM_CUDA_CALL(launch_packed_stream(packed, device.stream()));
}

// Computes the mma.sync chain for any number of rows, 64 at a time. `layout`: of the weight, or null.
void stream_rows(CudaDevice& device, const LinearParams& p, const FragmentLayout* layout) {
  const auto row_of = [](auto* matrix, int64_t row, int64_t width, DType dtype) -> decltype(matrix) {
    if (matrix == nullptr) return nullptr;
    using Byte = std::conditional_t<std::is_const_v<std::remove_pointer_t<decltype(matrix)>>, const char, char>;
    return static_cast<Byte*>(matrix) + row * width * static_cast<int64_t>(dtype_size(dtype));
  };
  for (int64_t row = 0; row < p.tokens; row += kLinearStreamMaxTokens)
    stream(device,
           {.x = row_of(p.x, row, p.in, p.x_dtype),
            .up = nullptr,
            .parts = {{p.weight, p.bias, row_of(p.y, row, p.out, p.y_dtype), p.out}},
            .tokens = std::min(kLinearStreamMaxTokens, p.tokens - row),
            .in = p.in,
            .multiprocessors = device.multiprocessors(),
            .y_dtype = p.y_dtype,
            .activation = {}},
           {layout});
}

// Random operands of a problem, and the bits that linear_stream gives for them. There are `rows` rows, or as many as
// fit kTestBytes.
class ProductTest {
 public:
  ProductTest(CudaDevice& device, const CudaMatmulProblem& problem, int64_t rows)
      : device_(device), stream_(device.stream()) {
    constexpr int64_t kTestBytes = int64_t{512} << 20;
    const auto x_size = static_cast<int64_t>(dtype_size(problem.operands));
    const auto y_size = static_cast<int64_t>(dtype_size(problem.result));
    rows = std::clamp<int64_t>(kTestBytes / (problem.in * x_size + 2 * problem.out * y_size), kLinearStreamMaxTokens,
                               rows);
    y_bytes_ = rows * problem.out * y_size;
    x_ = filled(problem.operands, rows * problem.in, 1);
    weight_ = filled(problem.operands, problem.out * problem.in, 2);
    if (problem.bias) bias_ = filled(problem.result, problem.out, 3);
    expected_ = device.allocate(y_bytes_), y_ = device.allocate(y_bytes_);
    count_ = device.allocate(sizeof(uint32_t));
    LinearParams p{.x = x_.data(),
                   .weight = weight_.data(),
                   .bias = bias_.data(),
                   .y = expected_.data(),
                   .tokens = rows,
                   .in = problem.in,
                   .out = problem.out,
                   .x_dtype = problem.operands,
                   .weight_dtype = problem.operands,
                   .bias_dtype = problem.result,
                   .y_dtype = problem.result};
    stream_rows(device, p, nullptr);
    p.y = y_.data();
    call_ = matmul_call(p);
  }

  // Returns the time of `product` in microseconds if it gives the bits of linear_stream, or nothing if any bit differs.
  std::optional<double> time(CudaMatmul::Product product) {
    device_.fill_zero(count_.data(), sizeof(uint32_t));
    device_.fill_zero(y_.data(), y_bytes_);
    product(call_);
    EADEM_CUDA_CALL(
        launch_count_unequal(expected_.data(), y_.data(), y_bytes_, static_cast<uint32_t*>(count_.data()), stream_));
    uint32_t unequal = 0;
    device_.copy_to_host(&unequal, count_.data(), sizeof(unequal));
    if (unequal != 0) return std::nullopt;

    constexpr int kRepeat = 3;
    const auto make_event = [] {
      cudaEvent_t event = nullptr;
      EADEM_CUDA_CALL(cudaEventCreate(&event));
      return CudaHandle<cudaEvent_t, cudaEventDestroy>(event);
    };
    const auto begin = make_event(), end = make_event();
    EADEM_CUDA_CALL(cudaEventRecord(begin.get(), stream_));
    for (int i = 0; i < kRepeat; ++i) product(call_);
    EADEM_CUDA_CALL(cudaEventRecord(end.get(), stream_));
    EADEM_CUDA_CALL(cudaEventSynchronize(end.get()));
    float milliseconds = 0.0f;
    EADEM_CUDA_CALL(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()));
    return 1e3 * static_cast<double>(milliseconds) / kRepeat;
  }

 private:
  Buffer filled(DType dtype, int64_t size, uint64_t seed) {
    Buffer buffer = device_.allocate(size * static_cast<int64_t>(dtype_size(dtype)));
    EADEM_CUDA_CALL(launch_fill_test_values(buffer.data(), dtype, size, seed, stream_));
    return buffer;
  }

  CudaDevice& device_;
  cudaStream_t stream_;
  Buffer x_, weight_, bias_, expected_, y_, count_;
  int64_t y_bytes_ = 0;
  CudaMatmulCall call_;
};

// Products of any number of rows with the bits of linear_stream or packed_stream.
class ExactProduct {
 public:
  ExactProduct(CudaDevice& device, const KernelRequest& request)
      : device_(&device), layout_(layout_of(request.inputs[1])) {
    const CudaMatmulProblem problem = matmul_problem(request);
    const int64_t row_bytes = problem.out * static_cast<int64_t>(dtype_size(problem.result));
    const int64_t most_rows = request.inputs[0].dim(0).bind(request.bounds);
    if (most_rows <= kLinearStreamMaxTokens || row_bytes % CudaMatmul::kAlignment != 0) return;
    if (layout_ != nullptr) {
      const int64_t decoded_bytes = ceil_multiple(problem.out * problem.in * 2, kScratchAlignment);
      if (decoded_bytes > kMostDecodedBytes) return;
      scratch_bytes_ = decoded_bytes;
    }
    std::optional<ProductTest> test;
    int64_t tested_rows = 0;
    plans_ = device.matmul().exact_plans(
        problem, most_rows,
        [&](int64_t rows, CudaMatmul::Product product) {
          if (rows != tested_rows) {
            test.reset();  // frees its memory first
            test.emplace(device, problem, rows);
            tested_rows = rows;
          }
          return test->time(product);
        },
        device.stream());
  }

  // Bytes in which an encoded weight is decoded; aligned to kScratchAlignment.
  static constexpr int64_t kScratchAlignment = 64;
  int64_t scratch_bytes() const { return scratch_bytes_; }
  const FragmentLayout* layout() const { return layout_; }

  void run(LinearParams p, void* scratch) const {
    const CudaMatmul::Plan* plan = p.tokens > kLinearStreamMaxTokens ? plans_[CudaMatmul::range_of(p.tokens)] : nullptr;
    if (plan == nullptr) {
      stream_rows(*device_, p, layout_);
      return;
    }
    if (layout_ != nullptr) {
      EADEM_CUDA_CALL(launch_unpack_blocks(*layout_, p.weight, scratch, p.out, p.in, device_->stream()));
      p.weight = scratch;
    }
    device_->matmul().run(*plan, matmul_call(p), device_->stream());
  }

 private:
  // A decoded weight may take this much, which the head of a large vocabulary exceeds; it has few rows to compute.
  static constexpr int64_t kMostDecodedBytes = int64_t{512} << 20;
  static int64_t ceil_multiple(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

  CudaDevice* device_;
  const FragmentLayout* layout_;  // of the weight; null: it is plain
  int64_t scratch_bytes_ = 0;
  CudaMatmul::ExactPlans plans_{};  // null: the chains of this backend
};

PlanPtr prepare_mma_chain(const KernelRequest& request, Context& context) {
  const ExactProduct product(static_cast<CudaDevice&>(context.device), request);
  return make_plan([product](const KernelCall& call) { product.run(linear_params(call), call.scratch.data); },
                   product.scratch_bytes());
}

// The request of one linear of a fusion, whose ports are those of the fusion's by index.
struct LinearRequest {
  LinearRequest(const KernelRequest& fusion, size_t weight, std::optional<size_t> bias, size_t output)
      : inputs{fusion.inputs[0], fusion.inputs[weight], bias ? fusion.inputs[*bias] : absent_port()},
        outputs{fusion.outputs[output]},
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

// --- linear_gated_activation: few rows take one pass over both weights; more rows take two products and the
// activation.

Verdict can_gate(const KernelRequest& request) {
  const TensorType &gate = request.inputs[1], &up = request.inputs[2];
  return Requirements(request, {1, 2})
      .dtype("y", request.outputs[0], {DType::bf16})
      .same_dtype("up_weight", up, "gate_weight", gate)
      .require((up.encoding == nullptr) == (gate.encoding == nullptr), "one weight is plain and one is encoded")
      .require(takes_stream(request), stream_requirement(request))
      .verdict({.reason = "tensor cores"});
}

// Both products, and the memory of a call: what one decodes, then the results of `up`.
struct GatedProduct {
  GatedProduct(CudaDevice& device, const KernelRequest& request)
      : gate(device, LinearRequest(request, 1, std::nullopt, 0).request),
        up(device, LinearRequest(request, 2, std::nullopt, 0).request),
        kind(request.attrs.get<LinearGatedActivationAttrs>().kind),
        decoded_bytes(std::max(gate.scratch_bytes(), up.scratch_bytes())) {
    const int64_t tokens = request.inputs[0].dim(0).bind(request.bounds);
    if (tokens > kLinearStreamMaxTokens) scratch_bytes = decoded_bytes + tokens * request.inputs[1].fixed(0) * 2;
  }

  ExactProduct gate, up;
  ActivationKind kind;
  int64_t decoded_bytes;
  int64_t scratch_bytes = 0;
};

void run_gated(const GatedProduct& product, const KernelCall& call) {
  const TensorView &x = call.inputs[0], &gate = call.inputs[1], &up = call.inputs[2], &y = call.outputs[0];
  CudaDevice& device = cuda_device(call);
  if (x.shape[0] <= kLinearStreamMaxTokens) {
    stream(device,
           {.x = elements(x),
            .up = weight_data(up),
            .parts = {{weight_data(gate), nullptr, elements(y), gate.shape[0]}},
            .tokens = x.shape[0],
            .in = x.shape[1],
            .multiprocessors = device.multiprocessors(),
            .y_dtype = y.dtype,
            .activation = product.kind},
           {product.gate.layout()}, product.up.layout());
    return;
  }
  LinearParams p{.x = elements(x),
                 .weight = weight_data(gate),
                 .bias = nullptr,
                 .y = elements(y),
                 .tokens = x.shape[0],
                 .in = x.shape[1],
                 .out = gate.shape[0],
                 .x_dtype = x.dtype,
                 .weight_dtype = gate.dtype,
                 .bias_dtype = y.dtype,
                 .y_dtype = y.dtype};
  product.gate.run(p, call.scratch.data);
  p.weight = weight_data(up), p.y = static_cast<char*>(call.scratch.data) + product.decoded_bytes;
  product.up.run(p, call.scratch.data);
  EADEM_CUDA_CALL(launch_gated_activation(
      {.a = elements(y), .b = p.y, .y = elements(y), .size = p.tokens * p.out, .dtype = y.dtype}, product.kind,
      device.stream()));
}

PlanPtr prepare_gated(const KernelRequest& request, Context& context) {
  const GatedProduct product(static_cast<CudaDevice&>(context.device), request);
  return make_plan([product](const KernelCall& call) { run_gated(product, call); }, product.scratch_bytes);
}

// --- linear_qkv: few rows take one launch; more rows take three products.

// The request of the linear of part 0, 1 or 2.
LinearRequest linear_of(const KernelRequest& qkv, size_t part) { return {qkv, 1 + 2 * part, 2 + 2 * part, part}; }

Verdict can_use_qkv(const KernelRequest& request) {
  for (size_t part = 0; part < 3; ++part) {
    if (const Verdict verdict = can_use_mma_chain(linear_of(request, part).request); !verdict.accepted) return verdict;
    if ((request.inputs[1 + 2 * part].encoding == nullptr) != (request.inputs[1].encoding == nullptr))
      return Verdict::no("some weights are plain and some are encoded");
  }
  return accept(request, {.reason = "tensor cores"});
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

void run_qkv(const QkvProduct& product, const KernelCall& call) {
  const TensorView& x = call.inputs[0];
  CudaDevice& device = cuda_device(call);
  if (x.shape[0] > kLinearStreamMaxTokens) {
    for (size_t part = 0; part < 3; ++part) {
      const TensorView inputs[] = {x, call.inputs[1 + 2 * part], call.inputs[2 + 2 * part]};
      product.products[part].run(linear_params({.inputs = inputs, .outputs = call.outputs.subspan(part, 1)}),
                                 call.scratch.data);
    }
    return;
  }
  LinearStreamParams p{.x = elements(x),
                       .up = nullptr,
                       .parts = {},
                       .tokens = x.shape[0],
                       .in = x.shape[1],
                       .multiprocessors = device.multiprocessors(),
                       .y_dtype = call.outputs[0].dtype,
                       .activation = {}};
  for (size_t part = 0; part < 3; ++part) {
    const TensorView &weight = call.inputs[1 + 2 * part], &bias = call.inputs[2 + 2 * part];
    p.parts[part] = {weight_data(weight), elements(bias), elements(call.outputs[part]), weight.shape[0]};
  }
  stream(device, p, product.layouts);
}

PlanPtr prepare_qkv(const KernelRequest& request, Context& context) {
  const QkvProduct product(static_cast<CudaDevice&>(context.device), request);
  return make_plan([product](const KernelCall& call) { run_qkv(product, call); }, product.scratch_bytes);
}

constexpr Kernel kMmaChain{.name = "cuda_mma_chain",
                           .pass = Pass::inference,
                           .can_handle = can_use_mma_chain,
                           .prepare = prepare_mma_chain,
                           .packing = linear_packing,
                           .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kCublasLt{.name = "cublaslt",
                           .pass = Pass::inference,
                           .can_handle = can_use_cublaslt,
                           .prepare = prepare_cublaslt,
                           .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kTiles{"cuda_tiles", Pass::inference, can_use_tiles, prepare_nothing<run_tiles>};
constexpr Kernel kGated{.name = "cuda_mma_chain",
                        .pass = Pass::inference,
                        .can_handle = can_gate,
                        .prepare = prepare_gated,
                        .packing = gated_packing,
                        .alignment_bytes = CudaMatmul::kAlignment};
constexpr Kernel kQkv{.name = "cuda_mma_chain",
                      .pass = Pass::inference,
                      .can_handle = can_use_qkv,
                      .prepare = prepare_qkv,
                      .packing = qkv_packing,
                      .alignment_bytes = CudaMatmul::kAlignment};

}  // namespace

KernelList linear_kernels() { return {&kMmaChain, &kCublasLt, &kTiles}; }
KernelList linear_gated_activation_kernels() { return {&kGated}; }
KernelList linear_qkv_kernels() { return {&kQkv}; }

}  // namespace eadem::kernels::cuda
