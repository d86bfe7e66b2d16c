// SPDX-License-Identifier: Apache-2.0
#include "tests/ops/kernel_runner.h"

#include <gtest/gtest.h>

#include <cstring>

#include "eadem/core/lookups.h"

namespace eadem::test {

namespace {

constexpr int64_t kGuard = 128;
constexpr unsigned char kGuardByte = 0xa5;

// Device memory for `size_bytes` at a chosen misalignment, guarded on both sides.
class Guarded {
 public:
  Guarded(Device& device, int64_t size_bytes, int64_t offset)
      : device_(&device),
        size_bytes_(size_bytes),
        offset_(kGuard + offset),
        buffer_(device.allocate(size_bytes + 2 * kGuard + offset)),
        image_(static_cast<size_t>(size_bytes + 2 * kGuard + offset), kGuardByte) {
    upload();
  }
  void* data() const { return static_cast<unsigned char*>(buffer_.data()) + offset_; }

  void write(const void* host) {
    if (size_bytes_ > 0) std::memcpy(image_.data() + offset_, host, static_cast<size_t>(size_bytes_));
    upload();
  }

  // Copies the contents to `host` (unless null) and says whether they, and the guards, are as they were written.
  struct State {
    bool guards_intact, contents_intact;
  };
  State read(void* host) const {
    std::vector<unsigned char> now(image_.size());
    device_->copy_to_host(now.data(), buffer_.data(), static_cast<int64_t>(now.size()));
    const auto begin = static_cast<size_t>(offset_), end = begin + static_cast<size_t>(size_bytes_);
    if (host != nullptr && size_bytes_ > 0) std::memcpy(host, now.data() + begin, end - begin);
    const auto same = [&](size_t from, size_t to) {
      return std::equal(now.begin() + static_cast<std::ptrdiff_t>(from), now.begin() + static_cast<std::ptrdiff_t>(to),
                        image_.begin() + static_cast<std::ptrdiff_t>(from));
    };
    return {same(0, begin) && same(end, now.size()), same(begin, end)};
  }

 private:
  void upload() { device_->copy_from_host(buffer_.data(), image_.data(), static_cast<int64_t>(image_.size())); }

  Device* device_;
  int64_t size_bytes_, offset_;
  Buffer buffer_;
  std::vector<unsigned char> image_;
};

struct Placed {
  std::vector<std::unique_ptr<Guarded>> planes;
  TensorView view;
};

Placed place(Device& device, const TensorView& host, const Encoding* packing, Placement placement) {
  Placed placed;
  placed.view = TensorView(nullptr, host.dtype, host.shape);
  if (packing == nullptr && host.encoding == nullptr) {
    const int64_t offset = placement.element_aligned ? static_cast<int64_t>(dtype_size(host.dtype)) : 0;
    placed.planes.push_back(std::make_unique<Guarded>(device, host.size_bytes(), offset));
    placed.planes[0]->write(host.data);
    placed.view.data = placed.planes[0]->data();
    return placed;
  }
  // The tensor is copied plain, or encoded on the host and then copied plane by plane. We allocate planes, always
  // aligned.
  Tensor packed;
  if (packing != nullptr) {
    packed = Tensor::on_host(host.dtype, host.shape, *packing);
    packing->encode(packed.view, host);
  }
  const TensorView& encoded = packing != nullptr ? packed.view : host;
  placed.view.encoding = encoded.encoding;
  const std::vector<PlaneSpec> specs = encoded.encoding->planes(host.shape);
  for (size_t i = 0; i < specs.size(); ++i) {
    placed.planes.push_back(std::make_unique<Guarded>(device, specs[i].size_bytes(), 0));
    placed.planes[i]->write(encoded.plane(static_cast<int>(i)));
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
          .definition = op};
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
  Guarded scratch(device, scratch_bytes, 0);
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
