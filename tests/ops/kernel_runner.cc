// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/kernel_runner.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "eadem/core/lookups.h"

namespace eadem::test {

namespace {

constexpr int64_t kGuard = 128;
constexpr unsigned char kGuardByte = 0xa5;

// Memory of CPU devices that earlier calls have used: a new mapping for every operand would take most of the time of a
// sanitized test. One of these belongs to a thread.
class FreeMemory {
 public:
  // A buffer of at least `size_bytes`.
  Buffer take(Device& device, int64_t size_bytes) {
    if (!device.host_accessible()) return device.allocate(size_bytes);
    const auto found = buffers_.lower_bound(size_bytes);
    if (found == buffers_.end() || found->first > 2 * size_bytes + kSmall) return device.allocate(size_bytes);
    Buffer buffer = std::move(found->second);
    buffers_.erase(found);
    return buffer;
  }
  void give_back(const Device& device, Buffer buffer) {
    if (device.host_accessible() && buffers_.size() < kMost) buffers_.emplace(buffer.size_bytes(), std::move(buffer));
  }

 private:
  static constexpr int64_t kSmall = 1 << 16;
  static constexpr size_t kMost = 64;
  std::multimap<int64_t, Buffer> buffers_;
};

FreeMemory& free_memory() {
  thread_local FreeMemory memory;
  return memory;
}

// Device memory at a chosen misalignment, guarded on both sides.
class Guarded {
 public:
  // `contents`, `size_bytes` bytes on the host, outlives this object; null: memory that nobody has written.
  Guarded(Device& device, const void* contents, int64_t size_bytes, int64_t offset)
      : device_(&device),
        contents_(contents),
        size_(static_cast<size_t>(size_bytes)),
        begin_(static_cast<size_t>(kGuard + offset)),
        buffer_(free_memory().take(device, whole_size())) {
    if (device.host_accessible()) {
      write_to(static_cast<unsigned char*>(buffer_.data()));
    } else {
      std::vector<unsigned char> image(static_cast<size_t>(whole_size()));
      write_to(image.data());
      device.copy_from_host(buffer_.data(), image.data(), whole_size());
    }
  }
  ~Guarded() { free_memory().give_back(*device_, std::move(buffer_)); }
  Guarded(const Guarded&) = delete;
  Guarded& operator=(const Guarded&) = delete;
  void* data() const { return static_cast<unsigned char*>(buffer_.data()) + begin_; }

  // Copies the contents to `host` (unless null) and says whether they, and the guards, are as they were written.
  struct State {
    bool guards_intact, contents_intact;
  };
  State read(void* host) const {
    std::vector<unsigned char> copy;
    const auto* now = static_cast<const unsigned char*>(buffer_.data());
    if (!device_->host_accessible()) {
      copy.resize(static_cast<size_t>(whole_size()));
      device_->copy_to_host(copy.data(), buffer_.data(), whole_size());
      now = copy.data();
    }
    if (host != nullptr && size_ > 0) std::memcpy(host, now + begin_, size_);
    const auto is_guard = [](unsigned char byte) { return byte == kGuardByte; };
    const unsigned char* end = now + begin_ + size_;
    return {std::all_of(now, now + begin_, is_guard) && std::all_of(end, end + kGuard, is_guard),
            contents_ == nullptr || size_ == 0 || std::memcmp(now + begin_, contents_, size_) == 0};
  }

 private:
  int64_t whole_size() const { return static_cast<int64_t>(begin_ + size_) + kGuard; }
  void write_to(unsigned char* memory) const {
    std::memset(memory, kGuardByte, begin_);
    if (contents_ == nullptr)
      std::memset(memory + begin_, kGuardByte, size_);
    else if (size_ > 0)
      std::memcpy(memory + begin_, contents_, size_);
    std::memset(memory + begin_ + size_, kGuardByte, static_cast<size_t>(kGuard));
  }

  Device* device_;
  const void* contents_;
  size_t size_, begin_;
  Buffer buffer_;
};

struct Placed {
  Tensor packed;  // on the host
  std::vector<std::unique_ptr<Guarded>> planes;
  TensorView view;
};

Placed place(Device& device, const TensorView& host, const Encoding* packing, Placement placement) {
  Placed placed;
  placed.view = TensorView(nullptr, host.dtype, host.shape);
  if (packing == nullptr && host.encoding == nullptr) {
    const int64_t offset = placement.element_aligned ? static_cast<int64_t>(dtype_size(host.dtype)) : 0;
    placed.planes.push_back(std::make_unique<Guarded>(device, host.data, host.size_bytes(), offset));
    placed.view.data = placed.planes[0]->data();
    return placed;
  }
  // The tensor is copied plain, or encoded on the host and then copied plane by plane. We allocate planes, always
  // aligned.
  if (packing != nullptr) {
    placed.packed = Tensor::on_host(host.dtype, host.shape, *packing);
    packing->encode(placed.packed.view, host);
  }
  const TensorView& encoded = packing != nullptr ? placed.packed.view : host;
  placed.view.encoding = encoded.encoding;
  const std::vector<PlaneSpec> specs = encoded.encoding->planes(host.shape);
  for (size_t i = 0; i < specs.size(); ++i) {
    placed.planes.push_back(
        std::make_unique<Guarded>(device, encoded.plane(static_cast<int>(i)), specs[i].size_bytes(), 0));
    (i == 0 ? placed.view.data : placed.view.more_planes[i - 1]) = placed.planes[i]->data();
  }
  return placed;
}

}  // namespace

kernels::KernelRequest PassCall::request(const Device& device) const {
  return {.op = op->name(),
          .pass = pass,
          .device = &device,
          .attrs = op->attrs(),
          .inputs = input_types,
          .outputs = output_types,
          .bounds = symbols,
          .definition = op.get()};
}

std::vector<Tensor> run_kernel(Device& device, const kernels::Kernel& kernel, const PassCall& call, Placement placement,
                               const std::string& label) {
  const kernels::KernelRequest request = call.request(device);
  std::vector<Placed> inputs, outputs;
  std::vector<TensorView> input_views, output_views;
  std::vector<bool> is_output(call.inputs.size(), false);
  for (size_t i = 0; i < call.inputs.size(); ++i) {
    if (!call.inputs[i].defined()) {
      inputs.emplace_back();
      input_views.emplace_back();
      continue;
    }
    const Encoding* packing = kernel.packing ? kernel.packing(request, static_cast<int>(i)) : nullptr;
    inputs.push_back(place(device, call.inputs[i].view, packing, placement));
    input_views.push_back(inputs.back().view);
  }
  for (size_t i = 0; i < call.outputs.size(); ++i) {
    const int alias = call.output_alias.empty() ? -1 : call.output_alias[i];
    if (!call.outputs[i].defined()) {
      outputs.emplace_back();
      output_views.emplace_back();
    } else if (alias >= 0) {
      outputs.emplace_back();
      is_output[static_cast<size_t>(alias)] = true;
      output_views.push_back(input_views[static_cast<size_t>(alias)]);
    } else {
      outputs.push_back(place(device, call.outputs[i].view, nullptr, placement));
      output_views.push_back(outputs.back().view);
    }
  }

  const Mesh alone;
  Context context{device, alone};
  const kernels::PlanPtr plan = kernel.prepare(request, context);
  const int64_t scratch_bytes = plan->scratch_bytes();
  Guarded scratch(device, nullptr, scratch_bytes, 0);
  const int64_t lookups = num_lookups();
  plan->run({.inputs = input_views,
             .outputs = output_views,
             .scratch = scratch_bytes > 0 ? TensorView(scratch.data(), DType::u8, Shape{scratch_bytes}) : TensorView(),
             .context = &context});
  EXPECT_EQ(num_lookups() - lookups, 0) << label << ": looked something up that belongs into its plan";
  device.synchronize();

  EXPECT_TRUE(scratch.read(nullptr).guards_intact) << label << ": wrote beyond its scratch";
  for (size_t i = 0; i < inputs.size(); ++i)
    for (const auto& plane : inputs[i].planes) {
      const Guarded::State state = plane->read(nullptr);
      EXPECT_TRUE(state.guards_intact) << label << ": wrote beyond input " << i;
      EXPECT_TRUE(is_output[i] || state.contents_intact) << label << ": changed input " << i;
    }
  std::vector<Tensor> results;
  for (size_t i = 0; i < outputs.size(); ++i) {
    results.emplace_back();
    if (!call.outputs[i].defined()) continue;
    const TensorView& like = call.outputs[i].view;
    results[i] = like.encoding == nullptr ? Tensor::on_host(like.dtype, like.shape)
                                          : Tensor::on_host(like.dtype, like.shape, *like.encoding);
    const int alias = call.output_alias.empty() ? -1 : call.output_alias[i];
    const Placed& placed = alias >= 0 ? inputs[static_cast<size_t>(alias)] : outputs[i];
    for (size_t p = 0; p < placed.planes.size(); ++p)
      EXPECT_TRUE(placed.planes[p]->read(results[i].view.plane(static_cast<int>(p))).guards_intact)
          << label << ": wrote beyond output " << i;
  }
  return results;
}

}  // namespace eadem::test
