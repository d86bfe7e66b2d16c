// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/ops/op_timing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>

#include "eadem/core/device/cpu_probe.h"
#include "eadem/core/encodings/fp8_encoding.h"
#include "eadem/core/encodings/group_encoding.h"

namespace eadem::op_bench {

namespace {

using Clock = std::chrono::steady_clock;
using kernels::Kernel;
using kernels::Pass;
using ops::Port;
using ops::RefTensor;
using ops::Saved;
using ops::Workload;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// A tensor on the device, in the planes of its encoding.
struct Placed {
  std::vector<Buffer> planes;
  TensorView view;
  int64_t size_bytes = 0;
};

Placed allocate(Device& device, const TensorType& type, const SymbolValues& symbols, const Encoding* encoding) {
  Placed placed;
  placed.view = TensorView(nullptr, type.dtype, type.bind(symbols));
  placed.view.encoding = encoding;
  std::vector<int64_t> sizes;
  if (encoding == nullptr)
    sizes.push_back(placed.view.size_bytes());
  else
    for (const PlaneSpec& plane : encoding->planes(placed.view.shape)) sizes.push_back(plane.size_bytes());
  for (size_t i = 0; i < sizes.size(); ++i) {
    placed.planes.push_back(device.allocate(sizes[i]));
    placed.size_bytes += sizes[i];
    (i == 0 ? placed.view.data : placed.view.more_planes[i - 1]) = placed.planes.back().data();
  }
  return placed;
}

// One pass of one kernel with its own copy of everything that it touches, but for parameters that it shares.
class Call {
 public:
  // `inputs`: host tensors of the ports of the pass. `weights_of`: a call of the row whose parameters this one reads,
  // or null; not of a backward pass.
  Call(CpuDevice& device, const Kernel& kernel, const Workload& work, Pass pass, const std::vector<Tensor>& inputs,
       const Call* weights_of = nullptr)
      : context_{device, alone_}, types_(pass_types(work, pass)) {
    const kernels::KernelRequest request = request_of(work, pass, types_, device);
    const std::vector<Port> input_ports = work.op->inputs();
    for (size_t i = 0; i < types_.inputs.size(); ++i) {
      if (weights_of != nullptr && input_ports[i].role == Port::Role::parameter) {
        inputs_.emplace_back();
        input_views_.push_back(weights_of->input_views_[i]);
        continue;
      }
      if (!inputs[i].defined()) {
        inputs_.emplace_back();
        input_views_.emplace_back();
        continue;
      }
      const TensorView& host = inputs[i].view;
      const Encoding* packing = kernel.packing ? kernel.packing(request, static_cast<int>(i)) : nullptr;
      const bool packs = packing != nullptr && packing != host.encoding;
      inputs_.push_back(allocate(device, types_.inputs[i], work.symbols, packs ? packing : host.encoding));
      Placed& placed = inputs_.back();
      if (packs) {
        device.host_parallel_shares(packing->num_pieces(host.shape), [&](int64_t piece) {
          packing->encode_pieces(placed.view, host, piece, piece + 1);
        });
      } else {
        for (size_t p = 0; p < placed.planes.size(); ++p)
          if (const int64_t bytes = plane_bytes(placed, p); bytes > 0)
            std::memcpy(placed.view.plane(static_cast<int>(p)), host.plane(static_cast<int>(p)),
                        static_cast<size_t>(bytes));
      }
      input_views_.push_back(placed.view);
    }
    const std::vector<Port> ports = work.op->outputs();
    for (size_t i = 0; i < types_.outputs.size(); ++i) {
      outputs_.emplace_back();
      const bool state = pass != Pass::backward && i < ports.size() && ports[i].role == Port::Role::state;
      if (kernels::is_unconnected(types_.outputs[i])) {
        output_views_.emplace_back();
      } else if (state) {
        output_views_.push_back(input_views_[static_cast<size_t>(work.op->inference_alias(static_cast<int>(i)))]);
      } else {
        outputs_.back() = allocate(device, types_.outputs[i], work.symbols, nullptr);
        std::memset(outputs_.back().view.data, 0, static_cast<size_t>(outputs_.back().view.size_bytes()));
        output_views_.push_back(outputs_.back().view);
      }
    }
    plan_ = kernel.prepare(request, context_);
    const int64_t scratch_bytes = plan_->scratch_bytes();
    scratch_ = device.allocate(scratch_bytes);
    if (scratch_bytes > 0) scratch_view_ = TensorView(scratch_.data(), DType::u8, Shape{scratch_bytes});
  }

  void run() {
    plan_->run({.inputs = input_views_, .outputs = output_views_, .scratch = scratch_view_, .context = &context_});
  }

  int64_t size_bytes() const {
    int64_t total = 0;
    for (const Placed& placed : inputs_) total += placed.size_bytes;
    for (const Placed& placed : outputs_) total += placed.size_bytes;
    return total;
  }
  const std::vector<TensorView>& outputs() const { return output_views_; }

 private:
  static int64_t plane_bytes(const Placed& placed, size_t plane) {
    return placed.view.encoding == nullptr ? placed.view.size_bytes()
                                           : placed.view.encoding->planes(placed.view.shape)[plane].size_bytes();
  }

  const Mesh alone_;
  Context context_;
  PassTypes types_;
  kernels::PlanPtr plan_;
  std::vector<Placed> inputs_, outputs_;
  std::vector<TensorView> input_views_, output_views_;
  Buffer scratch_;
  TensorView scratch_view_;
};

Tensor host_copy(const TensorView& view) {
  if (!view.defined()) return {};
  Tensor copy = Tensor::on_host(view.dtype, view.shape);
  std::memcpy(copy.view.data, view.data, static_cast<size_t>(view.size_bytes()));
  return copy;
}

const Kernel* kernel_of(const Workload& work, Pass pass, const Device& device) {
  const PassTypes types = pass_types(work, pass);
  for (const Kernel* kernel : work.op->kernels(kernels::backend_of(device)))
    if (kernel->pass == pass && kernel->can_handle(request_of(work, pass, types, device)).accepted) return kernel;
  return nullptr;
}

// The host tensors that a pass reads. What the forward pass saves for the backward pass, the forward kernel computes;
// the gradients that come in are its outputs' values. Empty when this device cannot make them.
std::vector<Tensor> inputs_of_pass(CpuDevice& device, const Workload& work, Pass pass) {
  std::vector<Tensor> inputs = row_inputs(work, 7);
  if (pass != Pass::backward) return inputs;
  const Kernel* forward = kernel_of(work, Pass::forward, device);
  if (forward == nullptr) return {};
  Call call(device, *forward, work, Pass::forward, inputs);
  call.run();
  const std::vector<ops::Port> outputs = work.op->outputs();
  const size_t num_outputs = outputs.size();
  std::vector<Tensor> result;
  for (const Saved& saved : work.op->saved()) {
    const auto index = static_cast<size_t>(saved.index);
    if (saved.kind == Saved::Kind::input)
      result.push_back(inputs[index]);
    else
      result.push_back(host_copy(call.outputs()[saved.kind == Saved::Kind::output ? index : num_outputs + index]));
  }
  for (size_t i = 0; i < num_outputs; ++i)
    if (outputs[i].role != ops::Port::Role::index) result.push_back(host_copy(call.outputs()[i]));
  return result;
}

RefTensor widen(const TensorView& view) {
  RefTensor result{view.shape, {}};
  if (!view.defined()) return {};
  const int64_t n = view.num_elements();
  result.data.resize(static_cast<size_t>(n));
  std::vector<float> row;
  for (int64_t i = 0; view.encoding != nullptr && i < n; i += view.shape.back()) {
    row.resize(static_cast<size_t>(view.shape.back()));
    view.encoding->decode_row(row.data(), view, i / view.shape.back());
    std::copy(row.begin(), row.end(), result.data.begin() + static_cast<std::ptrdiff_t>(i));
  }
  for (int64_t i = 0; view.encoding == nullptr && i < n; ++i) {
    double& value = result.data[static_cast<size_t>(i)];
    switch (view.dtype) {
      case DType::f32: value = static_cast<double>(view.as<float>()[i]); break;
      case DType::bf16: value = static_cast<double>(view.as<bf16_t>()[i].to_float()); break;
      case DType::f16: value = static_cast<double>(view.as<f16_t>()[i].to_float()); break;
      case DType::f64: value = view.as<double>()[i]; break;
      case DType::i32: value = view.as<int32_t>()[i]; break;
      case DType::i64: value = static_cast<double>(view.as<int64_t>()[i]); break;
      case DType::u8: value = view.as<uint8_t>()[i]; break;
    }
  }
  return result;
}

bool is_quantized(const Workload& work) {
  return std::any_of(work.inputs.begin(), work.inputs.end(), [](const TensorType& t) { return t.encoding != nullptr; });
}

// Runs the kernel on the small row. A gross check, so that nothing wrong is timed: the tests prove the bounds. Two
// products of numbers quantized to 8 bits are off by a hundredth at most, everything else by roundings.
double checked_error(CpuDevice& device, const Kernel& kernel, const BenchRow& row, Pass pass) {
  const std::vector<Tensor> inputs = inputs_of_pass(device, row.small, pass);
  Call call(device, kernel, row.small, pass, inputs);
  std::vector<RefTensor> reference_inputs, expected;
  for (const Tensor& input : inputs) reference_inputs.push_back(widen(input.view));
  for (const TensorView& output : call.outputs()) expected.push_back(widen(output));  // what accumulates: zeros; states
  row.small.op->reference(pass, reference_inputs, expected);
  call.run();
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const RefTensor actual = widen(call.outputs()[i]);
    double difference = 0, size = 0;
    for (size_t k = 0; k < actual.data.size(); ++k) {
      const double d = actual.data[k] - expected[i].data[k];
      difference += d * d;
      size += expected[i].data[k] * expected[i].data[k];
    }
    if (difference > 0) worst = std::max(worst, std::sqrt(difference / std::max(size, 1e-30)));
  }
  const double bound = is_quantized(row.work) ? 2e-2 : 5e-3;  // 2^-8 where an output is bf16
  if (!(worst <= bound))
    throw DataCorrupted("{}: kernel {} ({}) is off by {:.2g} of the reference; expected at most {:.2g}", row.name,
                        kernel.name, kernels::pass_name(pass), worst, bound);
  return worst;
}

}  // namespace

Ceilings measured_ceilings(CpuDevice& device, double seconds) {
  Ceilings result;
  result.read_bytes_per_second = measured_read_bandwidth(device.pool(), probe_buffer_bytes(), seconds);
  result.f32_ops_per_second = measured_f32_peak(device.pool(), device.isa(), seconds / 4);
  if (has_arithmetic(Arithmetic::int8, device.isa()))
    result.int8_ops_per_second = measured_peak(device.pool(), Arithmetic::int8, device.isa(), seconds / 4);
  if (const auto bf16 = bf16_arithmetic(device.isa()))
    result.bf16_ops_per_second = measured_peak(device.pool(), *bf16, device.isa(), seconds / 4);
  if (has_arithmetic(Arithmetic::amx_int8, device.isa()))
    result.int8_tile_ops_per_second = measured_peak(device.pool(), Arithmetic::amx_int8, device.isa(), seconds / 4);
  return result;
}

std::vector<Timing> time_row(CpuDevice& device, const BenchRow& row, const std::vector<Pass>& passes,
                             const Ceilings& ceilings, double seconds) {
  constexpr int kMostCopies = 256;
  constexpr int64_t kMostBytes = int64_t{4} << 30;
  std::vector<Timing> result;
  for (Pass pass : passes) {
    if (pass == Pass::backward &&
        (!row.work.op->has_backward() || row.work.op->passes_gradient_through() || is_quantized(row.work)))
      continue;
    const PassTypes types = pass_types(row.work, pass);
    for (const Kernel* kernel : row.work.op->kernels(kernels::backend_of(device))) {
      if (kernel->pass != pass || !kernel->can_handle(request_of(row.work, pass, types, device)).accepted) continue;
      if (pass == Pass::backward && kernel_of(row.work, Pass::forward, device) == nullptr) continue;
      Timing timing;
      timing.row = row.name;
      timing.kernel = kernel->name;
      timing.pass = kernels::pass_name(pass);
      timing.error = checked_error(device, *kernel, row, pass);

      // Copies used in turn, four times the last-level cache in all, so that each call finds its operands in memory.
      // (With twice, a cache of 260 MiB that does not evict in order still had a part: 150 % of the bandwidth.)
      const std::vector<Tensor> inputs = inputs_of_pass(device, row.work, pass);
      std::vector<std::unique_ptr<Call>> calls;
      calls.push_back(std::make_unique<Call>(device, *kernel, row.work, pass, inputs));
      const int64_t bytes = std::max<int64_t>(calls[0]->size_bytes(), 1);
      const int64_t wanted = std::min(4 * last_level_cache_bytes() / bytes + 1, kMostBytes / bytes + 1);
      timing.copies = static_cast<int>(std::clamp<int64_t>(wanted, 1, kMostCopies));
      for (int i = 1; i < timing.copies; ++i)
        calls.push_back(std::make_unique<Call>(device, *kernel, row.work, pass, inputs));

      // Where a call reads a part of the weights only, each copy is read in so many turns, in each by another choice.
      ops::Cost cost =
          row.work.op->cost(pass, row.work.inputs, row.work.op->infer_types(row.work.inputs), row.work.symbols);
      const bool chooses = pass != Pass::backward && chooses_weights(row.work);
      const auto turns = chooses ? static_cast<size_t>(static_cast<double>(bytes) / cost.bytes) : size_t{1};
      double unread = static_cast<double>(timing.copies) * unread_bytes(row.work, pass, inputs);
      for (size_t i = calls.size(); i < turns * static_cast<size_t>(timing.copies); ++i) {
        const std::vector<Tensor> others = row_inputs(row.work, 7 + i, /*with_weight=*/false);
        unread += unread_bytes(row.work, pass, others);
        calls.push_back(std::make_unique<Call>(device, *kernel, row.work, pass, others,
                                               calls[i % static_cast<size_t>(timing.copies)].get()));
      }
      cost.bytes -= unread / static_cast<double>(calls.size());
      // A call may read less than its copy, as an embedding does.
      double touched = static_cast<double>(calls.size()) * cost.bytes;
      if (!chooses_weights(row.work)) touched = std::min(touched, static_cast<double>(timing.copies * bytes));
      timing.cold = touched > 2 * static_cast<double>(last_level_cache_bytes());

      for (const auto& call : calls) call->run();  // warms up pages, threads and code
      std::vector<double> times;
      const Clock::time_point start = Clock::now();
      for (size_t i = 0; times.size() < 5 || seconds_since(start) < seconds; ++i) {
        const Clock::time_point call_start = Clock::now();
        calls[i % calls.size()]->run();
        times.push_back(seconds_since(call_start));
        if (times.size() >= 5 && seconds_since(start) > 20 * seconds) break;
      }
      std::sort(times.begin(), times.end());
      const auto at = [&](double part) {
        return times[static_cast<size_t>(part * static_cast<double>(times.size() - 1))];
      };
      timing.median_seconds = at(0.5);
      timing.low_seconds = at(0.1);
      timing.high_seconds = at(0.9);
      timing.samples = static_cast<int64_t>(times.size());

      timing.bytes = cost.bytes;
      timing.flops = cost.flops;
      const std::string_view name = row.work.op->name();
      const bool product = name == "linear" || name == "grouped_linear" || name == "head_linear";
      // 8-bit floats are widened and multiplied as f32.
      const bool int8 = product && is_quantized(row.work) && Fp8Encoding::of(row.work.inputs[1].encoding) == nullptr &&
                        ceilings.int8_ops_per_second > 0;
      // The gradients of linear are products of bf16 where its forward pass is; those of the other products are of f32.
      const bool bf16 = product && (pass != Pass::backward || name == "linear") && !is_quantized(row.work) &&
                        row.work.inputs[1].dtype == DType::bf16 && ceilings.bf16_ops_per_second > 0;
      const double memory_seconds = cost.bytes / ceilings.read_bytes_per_second;
      const GroupEncoding* groups = product ? GroupEncoding::of(row.work.inputs[1].encoding) : nullptr;
      const bool on_tiles =
          groups != nullptr && groups->format().group_size == 0 && ceilings.int8_tile_ops_per_second > 0;
      const double compute_seconds = cost.flops / (on_tiles ? ceilings.int8_tile_ops_per_second
                                                   : int8   ? ceilings.int8_ops_per_second
                                                   : bf16   ? ceilings.bf16_ops_per_second
                                                            : ceilings.f32_ops_per_second);
      timing.share = std::max(memory_seconds, compute_seconds) / timing.median_seconds;
      timing.limit = memory_seconds >= compute_seconds ? "memory" : int8 ? "int8" : bf16 ? "bf16" : "f32";
      result.push_back(std::move(timing));
    }
  }
  return result;
}

}  // namespace eadem::op_bench
