// SPDX-License-Identifier: Apache-2.0
//
//   eadem_cuda_bench [--device cuda:0] [--filter TEXT] [--json]
//
// Times the kernels of the CUDA backend alone, on the shapes of Llama-3.2-1B and Llama-3.1-8B, beside two ceilings
// measured in the same run: adding two vectors (bytes read and written) and a bf16 product of 8192^3. A row is a CUDA
// graph of many calls over operands that together exceed the L2 cache; the median of its replays is reported. The bits
// of these kernels are tested elsewhere (tests/kernels/cuda_*, tests/ops).
#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "benchmarks/cuda/library_products.h"
#include "eadem/core/encodings/block_encoding.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"
#include "eadem/core/encodings/row_encoding.h"
#include "eadem/core/philox.h"
#include "eadem/kernels/attention/attention.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/linear/fragment_blocks.h"
#include "eadem/kernels/cuda/linear/int8_chunks.h"
#include "eadem/kernels/fusions.h"
#include "eadem/kernels/linear.h"
#include "eadem/kernels/training/cross_entropy.h"

namespace eadem {
namespace {

using kernels::AttrsRef;

constexpr int64_t kColdBytes = 200 << 20;  // more than any L2 cache

struct Row {
  std::string name;
  double microseconds = 0, spread = 0;  // median; (highest - lowest) / median
  double bytes = 0, flops = 0;
};

// The kernel of a list that has this name and computes inference.
const kernels::Kernel& named(const kernels::KernelList& list, std::string_view name) {
  for (const kernels::Kernel* kernel : list)
    if (kernel->name == name && kernel->pass == kernels::Pass::inference) return *kernel;
  EADEM_UNREACHABLE("no kernel {}", name);
}

// The plan of a kernel for ports of the extents of these views; undefined views are absent.
kernels::PlanPtr plan_for(const kernels::Kernel& kernel, std::string_view op, kernels::AttrsRef attrs,
                          std::span<const TensorView> inputs, std::span<const TensorView> outputs, Context& context) {
  const auto types_of = [](std::span<const TensorView> views) {
    std::vector<TensorType> types;
    for (const TensorView& view : views) {
      std::vector<Dim> dims;
      for (int i = 0; i < view.shape.rank(); ++i) dims.emplace_back(view.shape[i]);
      types.push_back(view.defined() ? TensorType(view.dtype, dims, view.encoding) : kernels::unconnected_port());
    }
    return types;
  };
  const std::vector<TensorType> input_types = types_of(inputs), output_types = types_of(outputs);
  return kernel.prepare(
      {.op = op, .device = &context.device, .attrs = attrs, .inputs = input_types, .outputs = output_types}, context);
}

class Bench {
 public:
  Bench(std::shared_ptr<Device> device, std::string filter) : device_(std::move(device)), filter_(std::move(filter)) {}

  CudaDevice& cuda() { return static_cast<CudaDevice&>(*device_); }
  bool wants(const std::string& name) const { return name.find(filter_) != std::string::npos; }

  // Calls `run(i)` for i in [0, calls) as one graph.
  Row time(const std::string& name, int calls, double bytes, double flops, const std::function<void(int)>& run) {
    const cudaStream_t stream = cuda().stream();
    for (int i = 0; i < calls; ++i) run(i);  // algorithms are chosen, modules loaded
    EADEM_CUDA_CALL(cudaStreamSynchronize(stream));
    cudaGraph_t graph = nullptr;
    EADEM_CUDA_CALL(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls; ++i) run(i);
    EADEM_CUDA_CALL(cudaStreamEndCapture(stream, &graph));
    cudaGraphExec_t executable = nullptr;
    EADEM_CUDA_CALL(cudaGraphInstantiate(&executable, graph, 0));
    cudaEvent_t begin = nullptr, end = nullptr;
    EADEM_CUDA_CALL(cudaEventCreate(&begin));
    EADEM_CUDA_CALL(cudaEventCreate(&end));
    std::vector<double> times;
    double total_ms = 0;
    for (int i = 0; i < 3; ++i) EADEM_CUDA_CALL(cudaGraphLaunch(executable, stream));
    while (times.size() < 9 || (total_ms < 60 && times.size() < 200)) {
      EADEM_CUDA_CALL(cudaEventRecord(begin, stream));
      EADEM_CUDA_CALL(cudaGraphLaunch(executable, stream));
      EADEM_CUDA_CALL(cudaEventRecord(end, stream));
      EADEM_CUDA_CALL(cudaEventSynchronize(end));
      float ms = 0;
      EADEM_CUDA_CALL(cudaEventElapsedTime(&ms, begin, end));
      times.push_back(1e3 * ms / calls);
      total_ms += ms;
    }
    EADEM_CUDA_CALL(cudaGraphExecDestroy(executable));
    EADEM_CUDA_CALL(cudaGraphDestroy(graph));
    EADEM_CUDA_CALL(cudaEventDestroy(begin));
    EADEM_CUDA_CALL(cudaEventDestroy(end));
    std::sort(times.begin(), times.end());
    const double median = times[times.size() / 2];
    return {name, median, (times.back() - times.front()) / median, bytes, flops};
  }

  // Random values; every further copy of an operand repeats those of the first.
  Tensor random(DType dtype, const Shape& shape, double scale = 1.0) {
    const int64_t size = shape.num_elements(), period = std::min<int64_t>(size, 1 << 20);
    const Tensor values = Tensor::on_host(DType::f32, {period});
    for (int64_t i = 0; i < period; ++i)
      values.view.as<float>()[i] =
          static_cast<float>(scale * (2.0 * uniform_float(philox4x32(7, static_cast<uint64_t>(i)).words[0]) - 1.0));
    const Tensor part = copy_to_device(device_, converted_on_host(values.view, dtype).view);
    Tensor result = allocate_tensor(*device_, dtype, shape);
    const auto element = static_cast<int64_t>(dtype_size(dtype));
    for (int64_t at = 0; at < size; at += period)
      device_->copy(static_cast<char*>(result.view.data) + at * element, part.view.data,
                    std::min(period, size - at) * element);
    return result;
  }

  Tensor integers(const std::vector<int32_t>& values, const Shape& shape) {
    const Tensor host = Tensor::on_host(DType::i32, shape);
    std::copy(values.begin(), values.end(), host.view.as<int32_t>());
    return copy_to_device(device_, host.view);
  }

  // A weight [out, in], bf16 or encoded: random bytes. Of 8-bit floats, bf16 values and scales give such bytes.
  TensorView weight(int64_t out, int64_t in, const Encoding* encoding, std::vector<Tensor>& memory) {
    if (encoding == nullptr) return memory.emplace_back(random(DType::bf16, {out, in}, 0.05)).view;
    if (Fp8Encoding::of(encoding) != nullptr) return rows_in(*encoding, out, in, memory);
    const Encoding* packing = kernels::cuda::FragmentBlocks::of(encoding);
    const int64_t words = encoded_bytes(*packing, {out, in}) / 2;
    TensorView view(memory.emplace_back(random(DType::bf16, {words}, 0.05)).view.data, DType::f32, {out, in});
    view.encoding = packing;
    return view;
  }

  // Rows of 8-bit codes, each with a scale.
  TensorView rows_in(const Encoding& encoding, int64_t rows, int64_t columns, std::vector<Tensor>& memory) {
    const int64_t words = encoded_bytes(encoding, {rows, columns}) / 2;
    return view_of_planes(memory.emplace_back(random(DType::bf16, {words}, 0.05)).view.data, encoding, DType::bf16,
                          {rows, columns});
  }

  // `encoding`: of the weights, or null: they are bf16. Beside 8-bit floats, x is in such, too; beside codes of 4 and 6
  // bits that are multiplied as they are, in 8-bit codes.
  Row linear(const std::string& name, int64_t in, int64_t out, int64_t tokens, bool gated, DType result,
             const Encoding* encoding = nullptr) {
    const double bytes = (gated ? 2.0 : 1.0) *
                         static_cast<double>(encoding == nullptr ? in * out * 2 : encoded_bytes(*encoding, {out, in}));
    const int copies = std::clamp(static_cast<int>(kColdBytes / bytes) + 1, 2, 32);
    std::vector<Tensor> memory;
    std::vector<TensorView> weights, ups;
    for (int i = 0; i < copies; ++i) weights.push_back(weight(out, in, encoding, memory));
    for (int i = 0; gated && i < copies; ++i) ups.push_back(weight(out, in, encoding, memory));
    const bool fp8 = encoding != nullptr && Fp8Encoding::of(encoding) != nullptr;
    const bool integers = encoding != nullptr && !fp8 &&
                          kernels::cuda::integer_codes_of(kernels::cuda::FragmentBlocks::of(encoding)->layout()) !=
                              kernels::cuda::IntegerCodes::none;
    const TensorView x = fp8        ? rows_in(RowEncoding::fp8_e4m3(), tokens, in, memory)
                         : integers ? rows_in(kernels::cuda::Int8Chunks::instance(), tokens, in, memory)
                                    : memory.emplace_back(random(DType::bf16, {tokens, in})).view;
    const Tensor y = allocate_tensor(*device_, result, {tokens, out});
    const kernels::LinearAttrs attrs{.out_dtype = result};
    const kernels::LinearGatedActivationAttrs gated_attrs{.kind = kernels::ActivationKind::silu, .out_dtype = result};
    const char* kernel = fp8 ? "cuda_fp8" : integers ? "cuda_int8" : "cuda_mma_chain";
    const auto inputs_of = [&](size_t at) { return std::array{x, weights[at], gated ? ups[at] : TensorView{}}; };
    const TensorView outputs[] = {y.view};
    const kernels::PlanPtr plan =
        gated ? plan_for(named(kernels::cuda::linear_gated_activation_kernels(), kernel), "linear_gated_activation",
                         AttrsRef(gated_attrs), inputs_of(0), outputs, context_)
              : plan_for(named(kernels::cuda::linear_kernels(), kernel), "linear", AttrsRef(attrs), inputs_of(0),
                         outputs, context_);
    const Tensor scratch = allocate_tensor(*device_, DType::u8, {plan->scratch_bytes() + 1});
    return time(name, std::max(copies, 16), bytes + 2.0 * static_cast<double>(tokens * (in + out)),
                2.0 * static_cast<double>(tokens * in * out * (gated ? 2 : 1)), [&](int i) {
                  const std::array inputs = inputs_of(static_cast<size_t>(i % copies));
                  plan->run({.inputs = inputs, .outputs = outputs, .scratch = scratch.view, .context = &context_});
                });
  }

  // The fastest of cuBLASLt's algorithms, those that split k among them, for the product of `linear`. The name says
  // whether it does.
  Row library(const std::string& name, int64_t in, int64_t out, int64_t tokens) {
    const double bytes = static_cast<double>(in * out * 2);
    const int copies = std::clamp(static_cast<int>(kColdBytes / bytes) + 1, 2, 32);
    std::vector<Tensor> weights;
    for (int i = 0; i < copies; ++i) weights.push_back(random(DType::bf16, {out, in}, 0.05));
    const Tensor x = random(DType::bf16, {tokens, in}), y = allocate_tensor(*device_, DType::bf16, {tokens, out});
    const LibraryProduct product(cuda(), tokens, in, out, 64 << 20);
    EADEM_CHECK(product.algorithms() > 0, "no algorithm for {}", name);
    Row best{};
    for (size_t algorithm = 0; algorithm < product.algorithms(); ++algorithm) {
      const Row row =
          time(fmt::format("{}{}", name, product.splits_k(algorithm) ? ", splits k" : ""), std::max(copies, 16),
               bytes + 2.0 * static_cast<double>(tokens * (in + out)), 2.0 * static_cast<double>(tokens * in * out),
               [&](int i) {
                 product.run(algorithm, y.view.data, x.view.data, weights[static_cast<size_t>(i % copies)].view.data);
               });
      if (algorithm == 0 || row.microseconds < best.microseconds) best = row;
    }
    return best;
  }

  // The gradients of a linear: two products.
  Row linear_backward(const std::string& name, int64_t in, int64_t out, int64_t tokens) {
    const Tensor x = random(DType::bf16, {tokens, in}), weight = random(DType::bf16, {out, in}, 0.05),
                 dy = random(DType::bf16, {tokens, out}), dx = allocate_tensor(*device_, DType::bf16, {tokens, in}),
                 dweight = random(DType::f32, {out, in});
    return backward(name, "linear", kernels::cuda::linear_kernels(), AttrsRef(kernels::LinearAttrs{}),
                    {x.view, weight.view, dy.view}, {dx.view, dweight.view, {}},
                    4.0 * static_cast<double>(tokens * in * out));
  }

  // The loss of the head, forward and backward: four products.
  Row loss(const std::string& name, int64_t hidden, int64_t vocab, int64_t tokens, bool is_backward) {
    const Tensor x = random(DType::bf16, {tokens, hidden}), weight = random(DType::bf16, {vocab, hidden}, 0.05),
                 dx = allocate_tensor(*device_, DType::bf16, {tokens, hidden}),
                 dweight = random(DType::f32, {vocab, hidden}),
                 labels = integers(std::vector<int32_t>(static_cast<size_t>(tokens), 7), {tokens}),
                 loss = random(DType::f32, {tokens}), lse = random(DType::f32, {tokens});
    const double product = 2.0 * static_cast<double>(tokens * hidden * vocab);
    const kernels::LinearCrossEntropyAttrs attrs;
    const kernels::KernelList list = kernels::cuda::linear_cross_entropy_kernels();
    if (is_backward)
      return backward(name, "linear_cross_entropy", list, AttrsRef(attrs),
                      {x.view, weight.view, labels.view, lse.view, loss.view}, {dx.view, dweight.view}, 3 * product);
    return pass(name, "linear_cross_entropy", list, kernels::Pass::forward, AttrsRef(attrs),
                {x.view, weight.view, labels.view}, {loss.view, lse.view}, product);
  }

  // Causal attention of whole sequences; two and a half times the operations of the forward pass.
  Row attention_backward(const std::string& name, int64_t heads, int64_t kv_heads, int64_t dim, int64_t sequences,
                         int64_t length) {
    const int64_t tokens = sequences * length;
    const Tensor q = random(DType::bf16, {tokens, heads, dim}), k = random(DType::bf16, {tokens, kv_heads, dim}),
                 v = random(DType::bf16, {tokens, kv_heads, dim}), y = random(DType::bf16, {tokens, heads, dim}),
                 dy = random(DType::bf16, {tokens, heads, dim}), lse = random(DType::f32, {tokens, heads}),
                 dq = allocate_tensor(*device_, DType::bf16, q.view.shape),
                 dk = allocate_tensor(*device_, DType::bf16, k.view.shape),
                 dv = allocate_tensor(*device_, DType::bf16, k.view.shape);
    std::vector<int32_t> starts = {0};
    for (int64_t s = 0; s < sequences; ++s) starts.push_back(starts.back() + static_cast<int32_t>(length));
    const Tensor query_start = integers(starts, {sequences + 1}),
                 lengths = integers(std::vector<int32_t>(static_cast<size_t>(sequences), static_cast<int32_t>(length)),
                                    {sequences});
    const kernels::AttentionAttrs attrs{
        .heads = heads, .kv_heads = kv_heads, .head_dim = dim, .scale = 1.0f / std::sqrt(static_cast<float>(dim))};
    const double pairs = static_cast<double>(tokens) * static_cast<double>(length + 1) / 2;
    return backward(name, "attention", kernels::cuda::attention_kernels(), AttrsRef(attrs),
                    {q.view, k.view, v.view, query_start.view, lengths.view, y.view, lse.view, dy.view},
                    {dq.view, dk.view, dv.view}, 10.0 * pairs * static_cast<double>(heads * dim));
  }

  // Rows of keys or values in an encoding of 8 bits: any codes, and small scales.
  Tensor random_rows(const Encoding& encoding, const Shape& shape) {
    const Tensor bytes = random(DType::bf16, {(encoded_bytes(encoding, shape) + 1) / 2}, 0.05);
    return {view_of_planes(bytes.view.data, encoding, DType::f32, shape), bytes.storage};
  }

  // `sequences` with `length` keys each, of which the last `new_tokens` are queries; a cache of bf16, or in `encoding`.
  Row attention(const std::string& name, int64_t heads, int64_t kv_heads, int64_t dim, int64_t sequences,
                int64_t length, int64_t new_tokens, const Encoding* encoding = nullptr, float softcap = 0.0f) {
    const int64_t block = 64, blocks = (length + block - 1) / block;
    const double row_bytes = encoding != nullptr ? static_cast<double>(dim) + 4 : static_cast<double>(dim) * 2;
    const double keys = static_cast<double>(sequences * length * kv_heads) * row_bytes * 2;
    const int copies = std::clamp(static_cast<int>(kColdBytes / keys) + 1, 1, 16);
    const Shape shape{sequences * blocks, kv_heads, block, dim};
    std::vector<Tensor> k, v;
    for (int i = 0; i < copies; ++i)
      for (std::vector<Tensor>* cache : {&k, &v})
        cache->push_back(encoding == nullptr ? random(DType::bf16, shape) : random_rows(*encoding, shape));
    std::vector<int32_t> starts = {0}, lengths, table;
    for (int64_t s = 0; s < sequences; ++s) {
      starts.push_back(starts.back() + static_cast<int32_t>(new_tokens));
      lengths.push_back(static_cast<int32_t>(length));
      for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(b * sequences + s));
    }
    const Tensor q = random(DType::bf16, {sequences * new_tokens, heads, dim});
    const Tensor y = allocate_tensor(*device_, DType::bf16, q.view.shape);
    const Tensor query_start = integers(starts, {sequences + 1}), kv_length = integers(lengths, {sequences}),
                 block_table = integers(table, {sequences, blocks});
    const Tensor scratch =
        allocate_tensor(*device_, DType::u8, {sequences * (blocks * block / 256 + 1) * heads * (dim + 2) * 4});
    const kernels::AttentionAttrs attrs{.heads = heads,
                                        .kv_heads = kv_heads,
                                        .head_dim = dim,
                                        .scale = 1.0f / std::sqrt(static_cast<float>(dim)),
                                        .source = kernels::KvSource::cached,
                                        .softcap = softcap};
    const auto inputs_of = [&](size_t at) {
      return std::array{q.view, k[at].view, v[at].view, query_start.view, kv_length.view, block_table.view};
    };
    const TensorView outputs[] = {y.view};
    const kernels::PlanPtr plan =
        plan_for(*kernels::cuda::attention_kernels()[0], "attention", AttrsRef(attrs), inputs_of(0), outputs, context_);
    // Every query meets the keys up to its own position.
    const double pairs = static_cast<double>(sequences * new_tokens) *
                         (static_cast<double>(length) - static_cast<double>(new_tokens - 1) / 2);
    return time(name, std::max(copies, new_tokens > 1 ? 2 : 16),
                keys + 4.0 * static_cast<double>(sequences * new_tokens * heads * dim),
                4.0 * pairs * static_cast<double>(heads * dim), [&](int i) {
                  const std::array inputs = inputs_of(static_cast<size_t>(i % copies));
                  plan->run({.inputs = inputs, .outputs = outputs, .scratch = scratch.view, .context = &context_});
                });
  }

  // One pass of an op whose operands exceed the L2 cache, by the first kernel that takes it.
  Row pass(const std::string& name, std::string_view op, const kernels::KernelList& list, kernels::Pass pass,
           AttrsRef attrs, const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs,
           double flops) {
    std::vector<TensorType> types[2];
    double bytes = 0;
    for (size_t side : {0, 1})
      for (const TensorView& view : side == 0 ? inputs : outputs) {
        std::vector<Dim> dims;
        for (int i = 0; i < view.shape.rank(); ++i) dims.emplace_back(view.shape[i]);
        types[side].push_back(view.defined() ? TensorType(view.dtype, dims) : kernels::unconnected_port());
        if (view.defined()) bytes += static_cast<double>(view.size_bytes());
      }
    const kernels::KernelRequest request{
        .op = op, .pass = pass, .device = device_.get(), .attrs = attrs, .inputs = types[0], .outputs = types[1]};
    const auto takes = [&](const kernels::Kernel* kernel) {
      return kernel->pass == pass && kernel->can_handle(request).accepted;
    };
    const auto found = std::find_if(list.begin(), list.end(), takes);
    EADEM_CHECK(found != list.end(), "no kernel takes {}", name);
    const kernels::PlanPtr plan = (*found)->prepare(request, context_);
    const Tensor scratch = allocate_tensor(*device_, DType::u8, {plan->scratch_bytes() + 1});
    return time(name, 2, bytes, flops, [&](int) {
      plan->run({.inputs = inputs, .outputs = outputs, .scratch = scratch.view, .context = &context_});
    });
  }
  Row backward(const std::string& name, std::string_view op, const kernels::KernelList& list, AttrsRef attrs,
               const std::vector<TensorView>& inputs, const std::vector<TensorView>& outputs, double flops) {
    return pass(name, op, list, kernels::Pass::backward, attrs, inputs, outputs, flops);
  }

  // y = a + b over 1 GiB each: two reads and a write.
  Row add() {
    const Shape shape{int64_t{512} << 20};
    const Tensor a = random(DType::bf16, shape), b = random(DType::bf16, shape),
                 y = allocate_tensor(*device_, DType::bf16, shape);
    const TensorView inputs[] = {a.view, b.view}, outputs[] = {y.view};
    const kernels::NoAttrs attrs;
    const kernels::PlanPtr plan =
        plan_for(*kernels::cuda::add_kernels()[0], "add", AttrsRef(attrs), inputs, outputs, context_);
    return time("ceiling: add of 1 GiB", 1, 3.0 * static_cast<double>(y.view.size_bytes()), 0,
                [&](int) { plan->run({.inputs = inputs, .outputs = outputs, .context = &context_}); });
  }

 private:
  std::shared_ptr<Device> device_;
  const Mesh alone_;
  Context context_{*device_, alone_};
  std::string filter_;
};

int run(int argc, char** argv) {
  std::string device = "cuda", filter;
  bool json = false;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--json") {
      json = true;
    } else if (i + 1 < argc && (argument == "--device" || argument == "--filter")) {
      (argument == "--device" ? device : filter) = argv[++i];
    } else {
      fmt::print(stderr, "unknown argument '{}'; usage: {} [--device cuda:0] [--filter TEXT] [--json]\n", argument,
                 argv[0]);
      return 2;
    }
  }
  Bench bench(open_device(device), filter);
  if (!bench.cuda().runs_hopper_kernels())
    throw Unsupported("measures the kernels for Hopper: {}", bench.cuda().hopper_refusal());

  const Row add_row = bench.add();
  const Row product = bench.linear("ceiling: product 8192^3", 8192, 8192, 8192, false, DType::bf16);
  const double peak_bytes = add_row.bytes / add_row.microseconds, peak_flops = product.flops / product.microseconds;
  std::vector<Row> rows = {add_row, product};
  const auto report = [&](const Row& row) {
    const double floor_us = std::max(row.bytes / peak_bytes, row.flops / peak_flops);
    if (!json)
      fmt::print("{:<44} {:>9.1f} us +-{:>4.1f} %  {:>6.2f} TB/s {:>7.1f} TFLOP/s  {:>5.1f} % of the floor's rate\n",
                 row.name, row.microseconds, 50 * row.spread, row.bytes / row.microseconds / 1e6,
                 row.flops / row.microseconds / 1e6, 100 * floor_us / row.microseconds);
    std::fflush(stdout);
  };
  for (const Row& row : rows) report(row);
  const auto add = [&](const std::string& name, auto&& make) {
    if (!bench.wants(name)) return;
    rows.push_back(make(name));
    report(rows.back());
  };

  struct Model {
    const char* name;
    int64_t hidden, ffn, heads, kv_heads, dim;
  };
  for (const Model& m : {Model{"1b", 2048, 8192, 32, 8, 64}, Model{"8b", 4096, 14336, 32, 8, 128}}) {
    for (const int64_t tokens : {1, 8, 16, 32, 64, 1024}) {
      const auto linear = [&](const char* part, int64_t in, int64_t out, bool gated, DType result) {
        add(fmt::format("linear {} {} tokens {}", m.name, part, tokens),
            [&](const std::string& name) { return bench.linear(name, in, out, tokens, gated, result); });
      };
      linear("q", m.hidden, m.heads * m.dim, false, DType::bf16);
      linear("k", m.hidden, m.kv_heads * m.dim, false, DType::bf16);
      linear("gate_up", m.hidden, m.ffn, true, DType::bf16);
      linear("down", m.ffn, m.hidden, false, DType::bf16);
      if (tokens <= 64) linear("head", m.hidden, 128256, false, DType::f32);
    }
    // cuBLASLt's fastest algorithm beside ours, whose bits do not depend on the number of rows.
    for (const int64_t tokens : {1, 64})
      for (const auto& [part, in, out] :
           {std::tuple("q", m.hidden, m.heads * m.dim), {"gate", m.hidden, m.ffn}, {"down", m.ffn, m.hidden}}) {
        if (std::string_view(part) == "gate")
          add(fmt::format("linear {} gate tokens {}", m.name, tokens),
              [&](const std::string& name) { return bench.linear(name, in, out, tokens, false, DType::bf16); });
        add(fmt::format("linear {} {} tokens {}, cuBLASLt", m.name, part, tokens),
            [&](const std::string& name) { return bench.library(name, in, out, tokens); });
      }
    const int64_t trained = 16384;  // tokens of a training step
    add(fmt::format("linear {} gate tokens {}", m.name, trained),
        [&](const std::string& name) { return bench.linear(name, m.hidden, m.ffn, trained, false, DType::bf16); });
    const auto gradients = [&](const char* part, int64_t in, int64_t out) {
      add(fmt::format("linear backward {} {} tokens {}", m.name, part, trained),
          [&](const std::string& name) { return bench.linear_backward(name, in, out, trained); });
    };
    gradients("q", m.hidden, m.heads * m.dim);
    gradients("k", m.hidden, m.kv_heads * m.dim);
    gradients("gate", m.hidden, m.ffn);
    gradients("down", m.ffn, m.hidden);
    for (const bool is_backward : {false, true})
      add(fmt::format("loss {} {} tokens 4096", is_backward ? "backward" : "forward", m.name),
          [&](const std::string& name) { return bench.loss(name, m.hidden, 128256, 4096, is_backward); });
    add(fmt::format("attention backward {} sequences 8 tokens 2048", m.name),
        [&](const std::string& name) { return bench.attention_backward(name, m.heads, m.kv_heads, m.dim, 8, 2048); });
    struct Step {
      int64_t sequences, length, tokens;
    };
    for (const Step& s : {Step{1, 512, 1}, {1, 8192, 1}, {32, 512, 1}, {64, 4096, 1}, {1, 1024, 1024}, {1, 8192, 8192}})
      add(fmt::format("attention {} sequences {} keys {} tokens {}", m.name, s.sequences, s.length, s.tokens),
          [&](const std::string& name) {
            return bench.attention(name, m.heads, m.kv_heads, m.dim, s.sequences, s.length, s.tokens);
          });
  }
  const auto encoded = [&](const char* part, const char* type, int64_t in, int64_t out, bool gated) {
    const Encoding* encoding = BlockEncoding::find(type);
    if (encoding == nullptr) encoding = Fp8Encoding::find(type);
    if (encoding == nullptr) encoding = GroupEncoding::find(type);
    for (const int64_t tokens : {1, 8, 32, 64, 1024})
      add(fmt::format("linear 8b {} {} tokens {}", type, part, tokens),
          [&](const std::string& name) { return bench.linear(name, in, out, tokens, gated, DType::bf16, encoding); });
  };
  for (const Encoding* encoding : {&RowEncoding::int8(), &RowEncoding::fp8_e4m3()})
    for (const auto& [name, dim] : {std::pair("1b", 64), {"8b", 128}}) {
      const auto add_attention = [&](int64_t sequences, int64_t length, int64_t tokens) {
        add(fmt::format("attention {} {} sequences {} keys {} tokens {}", name, encoding->name(), sequences, length,
                        tokens),
            [&](const std::string& row) {
              return bench.attention(row, 32, 8, dim, sequences, length, tokens, encoding);
            });
      };
      add_attention(1, 8192, 1);
      add_attention(64, 4096, 1);
      add_attention(1, 8192, 8192);
    }
  for (const int64_t tokens : {int64_t{1}, int64_t{4096}}) {
    const int64_t sequences = tokens == 1 ? 64 : 1;
    add(fmt::format("attention 8b capped sequences {} keys 4096 tokens {}", sequences, tokens),
        [&](const std::string& row) { return bench.attention(row, 32, 8, 128, sequences, 4096, tokens, nullptr, 50); });
  }
  for (const char* type :
       {"fp8_e4m3_channel", "fp8_e4m3_block128", "q4_k", "q6_k", "int4_g128_f16", "q8_0", "q4_0", "iq4_nl"}) {
    encoded("q", type, 4096, 4096, false);
    encoded("gate_up", type, 4096, 14336, true);
    encoded("down", type, 14336, 4096, false);
  }
  add("attention 16 heads of 128 sequences 1 keys 16384 tokens 16384",
      [&](const std::string& name) { return bench.attention(name, 16, 16, 128, 1, 16384, 16384); });
  add("attention backward 16 heads of 128 sequences 1 tokens 16384",
      [&](const std::string& name) { return bench.attention_backward(name, 16, 16, 128, 1, 16384); });

  if (json) {
    fmt::print("{{\"device\": \"{}\", \"bytes_per_second\": {:.0f}, \"bf16_flops_per_second\": {:.0f}, \"rows\": [",
               bench.cuda().description(), 1e6 * peak_bytes, 1e6 * peak_flops);
    for (size_t i = 0; i < rows.size(); ++i) {
      const Row& row = rows[i];
      fmt::print(
          "{}\n{{\"name\": \"{}\", \"microseconds\": {:.3f}, \"spread\": {:.4f}, \"bytes\": {:.0f}, \"flops\": {:.0f}, "
          "\"share_of_floor\": {:.4f}}}",
          i == 0 ? "" : ",", row.name, row.microseconds, row.spread, row.bytes, row.flops,
          std::max(row.bytes / peak_bytes, row.flops / peak_flops) / row.microseconds);
    }
    fmt::print("\n]}}\n");
  }
  return 0;
}

}  // namespace
}  // namespace eadem

int main(int argc, char** argv) {
  try {
    return eadem::run(argc, argv);
  } catch (const std::exception& error) {
    fmt::print(stderr, "eadem_cuda_bench: {}\n", error.what());
    return 1;
  }
}
