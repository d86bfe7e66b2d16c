// SPDX-License-Identifier: Apache-2.0
//
// The steady state is still: after warm-up, a decode step allocates nothing, neither from the heap nor by mapping
// memory, as devices do.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>

#include "eadem/core/encodings/fp8_tensor_encoding.h"
#include "eadem/distributed/thread_communicator.h"
#include "eadem/engine/llm.h"
#include "eadem/kernels/backend.h"
#include "eadem/ops/parallel/expert_exchange.h"
#include "eadem/ops/quantize.h"
#include "tests/engine/step_loop.h"

namespace {
std::atomic<int64_t> num_allocations{0};
}  // namespace

// The C library's allocator under its own names, and the program's in front of it: every way to get memory is counted,
// operator new included, which calls malloc.
extern "C" {
void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);

void* malloc(size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_calloc(count, size);
}
void* realloc(void* memory, size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_realloc(memory, size);
}
void* memalign(size_t alignment, size_t size) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return __libc_memalign(alignment, size);
}
void* aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }
int posix_memalign(void** memory, size_t alignment, size_t size) {
  *memory = memalign(alignment, size);
  return *memory == nullptr ? ENOMEM : 0;
}
void* mmap(void* address, size_t length, int protection, int flags, int file, off_t offset) {
  num_allocations.fetch_add(1, std::memory_order_relaxed);
  return reinterpret_cast<void*>(syscall(SYS_mmap, address, length, protection, flags, file, offset));
}
}

namespace eadem::engine {
namespace {

template <typename Allocate>
int64_t allocations_of(Allocate allocate) {
  const int64_t before = num_allocations;
  allocate();
  return num_allocations - before;
}

TEST(Allocation, TheCounterCounts) {
  const auto keep = [](void* memory) { asm volatile("" : : "r"(memory) : "memory"); };  // no pair is optimized away
  EXPECT_EQ(allocations_of([&] {
              int* number = new int(1);
              keep(number);
              delete number;
            }),
            1);
  EXPECT_EQ(allocations_of([&] {
              void* memory = std::malloc(10);
              keep(memory);
              std::free(memory);
            }),
            1);
  EXPECT_EQ(allocations_of([&] {
              void* memory = std::aligned_alloc(64, 128);
              keep(memory);
              std::free(memory);
            }),
            1);
  EXPECT_GE(allocations_of([&] { keep(open_device("cpu", {.num_threads = 1})->allocate(100).data()); }), 1);
  const auto device = open_device("cpu", {.num_threads = 1});
  EXPECT_EQ(allocations_of([&] { keep(device->allocate(100).data()); }), 1) << "which maps memory";
}

TEST(Allocation, DecodeStepsAllocateNothing) {
  const models::Checkpoint checkpoint = models::open_checkpoint(EADEM_SOURCE_DIR "/tests/data/golden/qwen3");
  EngineOptions options;
  options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 3};
  const auto engine = InferEngine::from_checkpoint(checkpoint, open_device("cpu", {.num_threads = 2}), options);
  StepLoop scheduler(*engine);
  for (int i = 0; i < 3; ++i) {
    StepLoop::Request request;
    request.prompt = {5, 6, 7 + i};
    request.sampling.temperature = i == 0 ? 0.0f : 0.8f;
    request.sampling.top_k = i == 1 ? 10 : 0;
    request.sampling.top_p = 0.9f;
    if (i == 2) request.sampling.repetition_penalty = 1.2f;  // which looks at all tokens
    request.max_tokens = 40;
    scheduler.add(request);
  }
  int64_t drawn = 0;
  const StepLoop::OnToken on_token = [&](const StepLoop::Drawn&) {
    ++drawn;
    return true;
  };
  for (int warm_up = 0; warm_up < 4; ++warm_up) scheduler.step(on_token);
  const int64_t before = num_allocations;
  const int64_t drawn_before = drawn;
  for (int step = 0; step < 20; ++step) scheduler.step(on_token);
  EXPECT_EQ(num_allocations - before, 0);
  EXPECT_EQ(drawn - drawn_before, 60);
}

// Two ranks that divide experts, as threads: both are counted.
TEST(Allocation, StepsOfDividedExpertsAllocateNothing) {
  const models::Checkpoint checkpoint = models::open_checkpoint(EADEM_SOURCE_DIR "/tests/data/golden/qwen3_moe");
  distributed::ThreadGroup group(2);
  const auto make = [&](int rank, const std::shared_ptr<Device>& device) {
    EngineOptions options;
    options.cache = PagedKVCacheConfig{.max_kv_memory_bytes = 1 << 20, .block_size = 4, .max_batch_size = 3};
    options.ranks = group.communicator(rank);
    options.divide = MeshAxis::ep;
    return InferEngine::from_checkpoint(checkpoint, device, options);
  };
  std::thread other([&] {
    const auto device = open_device("cpu", {.num_threads = 1});
    try {
      follow_engines(group.communicator(1), device, [&](const CacheConfig&, int64_t) { return make(1, device); });
    } catch (const RankFailed& error) {
      EXPECT_STREQ(error.what(), "the end");
    }
  });
  {
    const auto engine = make(0, open_device("cpu", {.num_threads = 1}));
    StepLoop scheduler(*engine);
    for (int i = 0; i < 3; ++i)
      scheduler.add({.prompt = {5, 6, 7 + i}, .sampling = {}, .biases = {}, .max_tokens = 40});
    const StepLoop::OnToken on_token = [](const StepLoop::Drawn&) { return true; };
    for (int warm_up = 0; warm_up < 4; ++warm_up) scheduler.step(on_token);
    const int64_t before = num_allocations;
    for (int step = 0; step < 20; ++step) scheduler.step(on_token);
    EXPECT_EQ(num_allocations - before, 0);
  }
  group.fail("the end");  // follow_engines waits for another engine
  other.join();
}

// Rows of each rank's own tokens, by an all_to_all.
TEST(Allocation, ExchangesOfRowsAllocateNothing) {
  constexpr int64_t kTokens = 6, kExperts = 5, kTopK = 2, kHidden = 8;
  const distributed::ThreadGroup group(2);
  std::atomic<int> ready{0}, done{0};
  std::atomic<int64_t> before{0}, after{0};
  const auto run = [&](int rank) {
    const auto device = open_device("cpu", {.num_threads = 1});
    const kernels::ExpertExchangeAttrs attrs{.ranks = 2, .rank = rank, .experts = kExperts, .top_k = kTopK};
    pipeline::Graph graph;
    const auto x = graph.add_input("x", TensorType(DType::f32, {kTopK * Dim(Symbol::tokens), kHidden})),
               offsets = graph.add_input("offsets", TensorType(DType::i32, {kExperts + 1}));
    const auto sent = graph.add(std::make_shared<ops::ExpertDispatch>(attrs), {x, offsets});
    graph.mark_output("y", graph.add1(std::make_shared<ops::ExpertCombine>(attrs), {sent[0], offsets, sent[2]}));
    pipeline::Environment environment{.device = device, .mesh = Mesh(MeshAxis::ep, group.communicator(rank))};
    environment.bounds[Symbol::tokens] = environment.bounds[kernels::rank_tokens()] = kTokens;
    pipeline::Program program(std::move(graph), environment, std::make_shared<pipeline::ParameterStore>(device));
    const std::vector<float> rows(static_cast<size_t>(kTopK * kTokens * kHidden), 1.0f);
    program.set_input(program.input("x"), rows.data(), static_cast<int64_t>(rows.size() * sizeof(float)));
    // Another number of rows for each rank.
    const std::vector<std::vector<int32_t>> steps = {
        {0, 3, 6, 9, 12, 12}, {0, 0, 0, 0, 6, 12}, {0, 12, 12, 12, 12, 12}};
    const auto step = [&](size_t i) {
      program.set_input(program.input("offsets"), steps[i % 3].data(), (kExperts + 1) * 4);
      program.run(environment.bounds);
    };
    for (size_t i = 0; i < 3; ++i) step(i);
    const auto meet = [](std::atomic<int>& counter) {
      ++counter;
      while (counter < 2) std::this_thread::yield();
    };
    meet(ready);
    if (rank == 0) before = num_allocations.load();
    for (size_t i = 0; i < 20; ++i) step(i + static_cast<size_t>(rank));
    if (rank == 0) after = num_allocations.load();
    meet(done);
  };
  std::thread other([&] { run(1); });
  run(0);
  other.join();
  EXPECT_EQ(after - before, 0);
}

// The rounding of training and of models in 8-bit floats, which looks at all rows first.
TEST(Allocation, RoundingToOneScaleAllocatesNothing) {
  constexpr int64_t kRows = 200, kColumns = 300;
  const auto device = open_device("cpu", {.num_threads = 2});
  const Mesh alone;
  Context context{*device, alone};
  for (const bool delayed : {false, true})
    for (const DType dtype : {DType::f32, DType::bf16}) {
      const Fp8TensorEncoding& to = Fp8TensorEncoding::of(Fp8Format::Kind::e4m3, delayed);
      const ops::Quantize op({&to});
      std::vector<TensorType> in = {TensorType(dtype, {Symbol::tokens, kColumns})};
      if (delayed) in.emplace_back(DType::f32, std::vector<Dim>{2});
      const std::vector<TensorType> out = op.infer_types(in);
      SymbolValues bounds;
      bounds[Symbol::tokens] = kRows;
      const kernels::KernelRequest request{.op = op.name(),
                                           .pass = kernels::Pass::forward,
                                           .device = device.get(),
                                           .attrs = op.attrs(),
                                           .inputs = in,
                                           .outputs = out,
                                           .bounds = bounds,
                                           .cost = {},
                                           .definition = &op};
      kernels::PlanPtr plan;
      for (const kernels::Kernel* kernel : op.kernels(kernels::backend_of(*device)))
        if (kernel->pass == request.pass && kernel->can_handle(request).accepted)
          plan = kernel->prepare(request, context);
      ASSERT_NE(plan, nullptr);
      const Tensor x = Tensor::on_host(dtype, {kRows, kColumns}), scaling = Tensor::on_host(DType::f32, {2}),
                   y = Tensor::on_host(dtype, {kRows, kColumns}, to),
                   scratch = Tensor::on_host(DType::u8, {plan->scratch_bytes()});
      std::memset(x.view.data, 0, static_cast<size_t>(x.view.size_bytes()));
      std::memset(scaling.view.data, 0, static_cast<size_t>(scaling.view.size_bytes()));
      const TensorView inputs[] = {x.view, scaling.view}, outputs[] = {y.view, scaling.view};
      const size_t ports = in.size();
      const auto run = [&] {
        plan->run({.inputs = std::span(inputs).first(ports),
                   .outputs = std::span(outputs).first(ports),
                   .scratch = scratch.view,
                   .context = &context});
      };
      run();
      EXPECT_EQ(allocations_of(run), 0) << to.name() << " of " << dtype_name(dtype);
    }
}

// The lists of tokens and of log-probabilities and the text itself grow by doubling: the number of allocations rises
// with the logarithm of the length, and not with the length.
TEST(Allocation, LongerTextsTakeHardlyMoreAllocations) {
  LLM llm(EADEM_SOURCE_DIR "/assets/stories", open_device("cpu", {.num_threads = 1}),
          {.cache = StaticKVCacheConfig{.max_batch_size = 1, .max_cache_len = 256}});
  SamplingParams params;
  params.temperature = 0.8;
  params.seed = 1;
  params.repetition_penalty = 1.1;
  params.ignore_eos = true;
  params.stop = {"no text has this"};
  const auto allocations = [&](int64_t tokens) {
    params.max_tokens = tokens;
    const std::vector<std::string> prompts = {"Once upon a time"};
    return allocations_of(
        [&] { EXPECT_EQ(llm.generate(prompts, params)[0].token_ids.size(), static_cast<size_t>(tokens)); });
  };
  allocations(240);  // warm-up
  const int64_t half = allocations(120), whole = allocations(240);
  EXPECT_LE(whole - half, 20) << "in 120 more tokens";
}

}  // namespace
}  // namespace eadem::engine
