// SPDX-License-Identifier: Apache-2.0
#include "benchmarks/cuda/persistent/bench.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace eadem::persistent {
namespace {

void call(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(fmt::format("{}: {}", what, cudaGetErrorString(error)));
}

using Event = std::unique_ptr<CUevent_st, decltype([](cudaEvent_t event) { cudaEventDestroy(event); })>;
Event new_event() {
  cudaEvent_t event = nullptr;
  call(cudaEventCreate(&event), "cudaEventCreate");
  return Event(event);
}

// The name of the first device, which can run the kernel.
std::string check_device() {
  int devices = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&devices); error != cudaSuccess || devices == 0)
    throw std::runtime_error(fmt::format("no CUDA device ({})", cudaGetErrorString(error)));
  cudaDeviceProp device;
  call(cudaGetDeviceProperties(&device, 0), "cudaGetDeviceProperties");
  if (device.major != 9 || device.minor != 0 || device.multiProcessorCount < kSms)
    throw std::runtime_error(fmt::format("needs compute capability 9.0 and {} multiprocessors; {} has {}.{} and {}",
                                         kSms, device.name, device.major, device.minor, device.multiProcessorCount));
  if (device.sharedMemPerBlockOptin < sizeof(Shared))
    throw std::runtime_error(fmt::format("needs {} bytes of shared memory a block; {} has {}", sizeof(Shared),
                                         device.name, device.sharedMemPerBlockOptin));
  return device.name;
}

// Cosines and sines of the last key's position.
std::vector<float2> rope_of_token() {
  std::vector<float2> rope(kHeadDim / 2);
  for (int i = 0; i < kHeadDim / 2; ++i) {
    const double angle = (kKeys - 1) * std::pow(500000.0, -2.0 * i / kHeadDim);
    rope[static_cast<size_t>(i)] = {static_cast<float>(std::cos(angle)), static_cast<float>(std::sin(angle))};
  }
  return rope;
}

float widen(uint16_t bf16) { return std::bit_cast<float>(uint32_t{bf16} << 16); }

}  // namespace

template <typename T>
T* PersistentBench::allocate(int64_t count) {
  void* p = nullptr;
  const size_t bytes = static_cast<size_t>(count) * sizeof(T);
  call(cudaMalloc(&p, bytes), "cudaMalloc");
  memory_.emplace_back(p, [](void* memory) { cudaFree(memory); });
  call(cudaMemset(p, 0, bytes), "cudaMemset");
  return static_cast<T*>(p);
}

PersistentBench::PersistentBench(int layers, int narrow, int wide) : device_name_(check_device()), layers_(layers) {
  cudaStream_t stream = nullptr;
  call(cudaStreamCreate(&stream), "cudaStreamCreate");
  stream_ = {stream, [](cudaStream_t s) { cudaStreamDestroy(s); }};
  // 1. The model, its cache and an input.
  uint8_t* weights = allocate<uint8_t>(layers * kLayerBytes);
  call(fill_weights(weights, layers, stream), "fill_weights");
  const auto filled = [&](int64_t count, float mean, float range, uint64_t seed) {
    __nv_bfloat16* values = allocate<__nv_bfloat16>(count);
    call(fill_values(values, count, mean, range, seed, stream), "fill_values");
    return values;
  };
  params_.weights = weights;
  params_.norms = filled(int64_t{layers} * 2 * kHidden, 1.0f, 0.3f, 7);
  params_.cache = filled(layers * kCacheOfLayer, 0.0f, 1.7f, 8);
  call(describe_cache(params_, layers), "describe_cache");
  params_.x0 = filled(kHidden, 0.0f, 1.7f, 9);
  params_.x_out = allocate<__nv_bfloat16>(kHidden);
  float2* rope = allocate<float2>(kHeadDim / 2);
  call(cudaMemcpy(rope, rope_of_token().data(), kHeadDim / 2 * sizeof(float2), cudaMemcpyHostToDevice), "cudaMemcpy");
  params_.rope = rope;
  params_.narrow = narrow, params_.wide = wide;
  // 2. What blocks of threads exchange.
  uint64_t* words = allocate<uint64_t>(kWords);
  const auto next_words = [&](int64_t count) { return std::exchange(words, words + count); };
  params_.x = next_words(kRowWords), params_.x_middle = next_words(kRowWords);
  params_.qkv = next_words(kQkvWords), params_.parts = next_words(kPartWords);
  params_.maxima = next_words(kMaximaWords), params_.attended = next_words(kRowWords);
  params_.h = next_words(kFfnWords);
  params_.counters = allocate<uint32_t>(int64_t{kCounters} * kCounterStride);
  // 3. The plain kernels' room, and their input.
  for (float** row : {&room_.normed, &room_.qkv, &room_.attended, &room_.middle, &room_.gate, &room_.up, &room_.h})
    *row = allocate<float>(kFfn);
  room_.terms = allocate<float>(int64_t{kFfn} * kChunks);
  room_.scales = allocate<float>(kFfnChunks), room_.codes = allocate<int8_t>(kFfn);
  std::vector<uint16_t> x0(kHidden);
  std::vector<float> x;
  call(cudaStreamSynchronize(stream), "filling");
  call(cudaMemcpy(x0.data(), params_.x0, kHidden * sizeof(uint16_t), cudaMemcpyDeviceToHost), "cudaMemcpy");
  for (const uint16_t value : x0) x.push_back(widen(value));
  plain_x_ = allocate<float>(kHidden);
  call(cudaMemcpy(plain_x_, x.data(), kHidden * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
  call(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

PersistentBench::~PersistentBench() = default;

void PersistentBench::launch(Mode mode, cudaEvent_t before, cudaEvent_t after) {
  const cudaStream_t stream = stream_.get();
  call(clear_counters(params_, stream), "clear_counters");
  params_.epoch = std::exchange(next_epoch_, next_epoch_ + static_cast<uint32_t>(params_.layers) + 1);
  call(cudaEventRecord(before, stream), "cudaEventRecord");
  call(launch_layers(params_, mode, stream), "launch_layers");
  call(cudaEventRecord(after, stream), "cudaEventRecord");
  call(cudaStreamSynchronize(stream), "the persistent kernel");
}

int PersistentBench::wrong_values(int layers) {
  for (; plain_layers_ < layers; ++plain_layers_)
    call(launch_plain_layer(plain_x_, params_, plain_layers_, room_, stream_.get()), "launch_plain_layer");
  call(cudaStreamSynchronize(stream_.get()), "the plain kernels");
  std::vector<float> wanted(kHidden);
  call(cudaMemcpy(wanted.data(), plain_x_, kHidden * sizeof(float), cudaMemcpyDeviceToHost), "cudaMemcpy");

  const Event before = new_event(), after = new_event();
  call(cudaMemset(params_.x_out, 0xff, kHidden * sizeof(uint16_t)), "cudaMemset");  // NaN
  params_.layers = layers;
  launch(Mode::whole, before.get(), after.get());
  std::vector<uint16_t> x(kHidden);
  call(cudaMemcpy(x.data(), params_.x_out, kHidden * sizeof(uint16_t), cudaMemcpyDeviceToHost), "cudaMemcpy");
  int wrong = 0;
  for (size_t i = 0; i < kHidden; ++i)
    wrong += std::bit_cast<uint32_t>(widen(x[i])) != std::bit_cast<uint32_t>(wanted[i]) ? 1 : 0;
  return wrong;
}

std::vector<double> PersistentBench::time(Mode mode, int launches) {
  const Event before = new_event(), after = new_event();
  std::vector<double> times;
  params_.layers = layers_;
  for (int i = -2; i < launches; ++i) {
    launch(mode, before.get(), after.get());
    float ms = 0;
    call(cudaEventElapsedTime(&ms, before.get(), after.get()), "cudaEventElapsedTime");
    if (i >= 0) times.push_back(ms * 1000.0);
  }
  return times;
}

}  // namespace eadem::persistent
