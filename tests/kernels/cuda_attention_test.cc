// SPDX-License-Identifier: Apache-2.0
//
// A query of attention on a CUDA device has the same bits however its prompt is cut into steps, whatever sequences are
// beside it, and wherever its keys are kept; caches of 8-bit codes are written as their encoding says. Values against
// the reference: tests/ops/reference_test.cc; those of gradients over many tiles also here.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "eadem/core/encodings/row_encoding.h"
#include "eadem/kernels/attention/append_attention.h"
#include "eadem/kernels/attention/attention.h"
#include "eadem/kernels/attention/kv_append.h"
#include "eadem/kernels/backend.h"
#include "eadem/kernels/cuda/cuda_device.h"
#include "eadem/kernels/cuda/kernels.h"
#include "eadem/kernels/cuda/linear/int8_chunks.h"
#include "eadem/kernels/quantize.h"
#include "tests/kernels/cuda_operands.h"

namespace eadem::kernels {
namespace {

using test::bytes_of;
using test::integers_on;
using test::random_on;

struct Geometry {
  int64_t heads, kv_heads, head_dim, window;
  float softcap = 0.0f;
  bool sinks = false;
  const Encoding* encoding = nullptr;  // of the cache; null: bf16
};

// One sequence of `length` tokens with all its keys and values, token by token, and steps over parts of it.
class CudaAttention : public ::testing::TestWithParam<Geometry> {
 protected:
  void SetUp() override {
    if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
    if (GetParam().encoding != nullptr) EADEM_SKIP_WITHOUT_HOPPER();  // other devices refuse caches of codes
    device_ = open_device("cuda");
    const Geometry& g = GetParam();
    attrs_ = {.heads = g.heads,
              .kv_heads = g.kv_heads,
              .head_dim = g.head_dim,
              .scale = 0.3f,
              .window = g.window,
              .source = KvSource::cached,
              .softcap = g.softcap,
              .sinks = g.sinks};
    if (g.sinks) sinks_ = copy_to_device(device_, test::random_tensor(DType::f32, {g.heads}, 4).view);
    q_ = test::random_tensor(DType::bf16, {kLength, g.heads, g.head_dim}, 1);
    const Shape rows{kLength, g.kv_heads, g.head_dim};
    k_ = stored(test::random_tensor(DType::bf16, rows, 2));
    v_ = stored(test::random_tensor(DType::bf16, rows, 3));
  }

  // Keys or values as the cache stores them.
  static Tensor stored(const Tensor& rows) {
    if (GetParam().encoding == nullptr) return rows;
    Tensor result = Tensor::on_host(DType::f32, rows.shape(), *GetParam().encoding);
    GetParam().encoding->encode(result.view, rows.view);
    return result;
  }

  // A cache [num_blocks, kv_heads, block_size, head_dim] in which position p of the sequence is in block
  // table[p / block_size]; everything else is NaN. The view lives as long as `memory`.
  TensorView cache_of(const Tensor& rows, const std::vector<int32_t>& table, int64_t num_blocks, int64_t block_size,
                      Tensor& memory) const {
    const int64_t kv_heads = attrs_.kv_heads;
    const Shape shape{num_blocks, kv_heads, block_size, attrs_.head_dim};
    // `row` values of type T for each position and head.
    const auto scatter = [&]<typename T>(T* to, const T* from, int64_t row, T nan) {
      std::fill_n(to, num_blocks * kv_heads * block_size * row, nan);
      for (int64_t p = 0; p < kLength; ++p)
        for (int64_t h = 0; h < kv_heads; ++h)
          std::copy_n(
              from + (p * kv_heads + h) * row, row,
              to + ((table[static_cast<size_t>(p / block_size)] * kv_heads + h) * block_size + p % block_size) * row);
    };
    const Encoding* encoding = GetParam().encoding;
    if (encoding == nullptr) {
      const Tensor cache = Tensor::on_host(DType::bf16, shape);
      scatter(static_cast<uint16_t*>(cache.view.data), static_cast<const uint16_t*>(rows.view.data), attrs_.head_dim,
              uint16_t{0x7fc0});
      memory = copy_to_device(device_, cache.view);
      return memory.view;
    }
    const Tensor cache = Tensor::in_one_piece(DType::f32, shape, *encoding);
    scatter(static_cast<uint8_t*>(cache.view.data), static_cast<const uint8_t*>(rows.view.data), attrs_.head_dim,
            uint8_t{0x7f});
    scatter(static_cast<float*>(cache.view.plane(1)), static_cast<const float*>(rows.view.plane(1)), 1, NAN);
    const int64_t bytes = encoded_bytes(*encoding, shape);
    memory = copy_to_device(device_, TensorView(cache.view.data, DType::u8, {bytes}));
    return view_of_planes(memory.view.data, *encoding, DType::f32, shape);
  }

  // A part of the step: tokens [begin, end) of the sequence, whose keys are those before `end`.
  struct Part {
    int64_t begin, end;
  };
  // One step over `parts`, all of the same sequence, in a cache of such blocks. Returns y of each part.
  std::vector<std::vector<char>> run(const std::vector<Part>& parts, int64_t block_size, bool with_states = true) {
    const int64_t blocks = (kLength + block_size - 1) / block_size;
    std::vector<int32_t> table;
    for (int64_t b = 0; b < blocks; ++b) table.push_back(static_cast<int32_t>(7 * (blocks - 1 - b) + b % 7));
    const int64_t num_blocks = 7 * blocks;
    Tensor memory[2];
    const TensorView k = cache_of(k_, table, num_blocks, block_size, memory[0]),
                     v = cache_of(v_, table, num_blocks, block_size, memory[1]);

    std::vector<int32_t> starts = {0}, lengths, tables;
    for (const Part& part : parts) {
      starts.push_back(starts.back() + static_cast<int32_t>(part.end - part.begin));
      lengths.push_back(static_cast<int32_t>(part.end));
      tables.insert(tables.end(), table.begin(), table.end());
    }
    const auto sequences = static_cast<int64_t>(parts.size());
    const Tensor q = allocate_tensor(*device_, DType::bf16, {starts.back(), attrs_.heads, attrs_.head_dim});
    for (size_t i = 0; i < parts.size(); ++i)
      device_->copy_from_host(q.view.rows(starts[i], parts[i].end - parts[i].begin).data,
                              q_.view.rows(parts[i].begin, parts[i].end - parts[i].begin).data,
                              q_.view.rows(parts[i].begin, parts[i].end - parts[i].begin).size_bytes());
    const Tensor query_start = integers_on(device_, starts), kv_length = integers_on(device_, lengths),
                 block_table = integers_on(device_, tables, {sequences, blocks});
    const Tensor y = allocate_tensor(*device_, DType::bf16, q.view.shape);
    const Mesh alone;
    Context context{*device_, alone};
    std::vector<TensorView> inputs = {q.view, k, v, query_start.view, kv_length.view, block_table.view};
    if (attrs_.sinks) inputs.push_back(sinks_.view);
    const TensorView outputs[] = {y.view};
    const char* kernel = test::hopper_refusal().empty() ? "cuda_mma" : "cuda_online_softmax";
    const PlanPtr plan = test::plan_for(test::named(cuda::attention_kernels(), kernel), "attention", AttrsRef(attrs_),
                                        inputs, outputs, context);
    const Tensor scratch = allocate_tensor(*device_, DType::u8, {plan->scratch_bytes()});
    KernelCall call{.inputs = inputs, .outputs = outputs, .context = &context};
    if (with_states) call.scratch = scratch.view;
    plan->run(call);
    std::vector<std::vector<char>> result;
    for (size_t i = 0; i < parts.size(); ++i)
      result.push_back(bytes_of(*device_, y.view.rows(starts[i], parts[i].end - parts[i].begin)));
    return result;
  }

  static constexpr int64_t kLength = 700;  // three spans and chunks that are not full
  std::shared_ptr<Device> device_;
  AttentionAttrs attrs_;
  Tensor q_, k_, v_, sinks_;
};

TEST_P(CudaAttention, BitsDoNotDependOnHowAPromptIsCut) {
  const std::vector<char> whole = run({{0, kLength}}, kLength)[0];
  const size_t row = whole.size() / kLength;
  for (const std::vector<int64_t>& cuts : {std::vector<int64_t>{0, 1, 2, 70, 300, 301, 640, kLength},
                                           std::vector<int64_t>{0, 255, 256, 257, 512, 699, kLength}}) {
    for (const int64_t block_size : {int64_t{16}, int64_t{64}, kLength}) {
      std::vector<char> parts;
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const std::vector<char> part = run({{cuts[i], cuts[i + 1]}}, block_size)[0];
        parts.insert(parts.end(), part.begin(), part.end());
      }
      ASSERT_EQ(parts.size(), whole.size());
      for (int64_t t = 0; t < kLength; ++t)
        ASSERT_EQ(
            std::memcmp(parts.data() + static_cast<size_t>(t) * row, whole.data() + static_cast<size_t>(t) * row, row),
            0)
            << "token " << t << ", blocks of " << block_size;
    }
  }
}

TEST_P(CudaAttention, DecodeHasTheBitsOfThePromptWhoeverIsBeside) {
  const std::vector<char> whole = run({{0, kLength}}, kLength)[0];
  const size_t row = whole.size() / kLength;
  const auto expect_row = [&](const std::vector<char>& y, int64_t token, const std::string& label) {
    ASSERT_EQ(y.size(), row);
    EXPECT_EQ(std::memcmp(y.data(), whole.data() + static_cast<size_t>(token) * row, row), 0) << label;
  };
  const std::vector<int64_t> tokens = {0, 1, 63, 64, 65, 255, 256, 257, 511, 512, 600, 699};
  std::vector<Part> together;
  for (const int64_t t : tokens) {
    together.push_back({t, t + 1});
    expect_row(run({{t, t + 1}}, 16)[0], t, fmt::format("token {} alone", t));
    expect_row(run({{t, t + 1}}, 16, false)[0], t, fmt::format("token {} without states", t));
  }
  // A few sequences, many, and so many that a warp computes several splits; blocks of every kind that a copy may have.
  for (const auto& [times, block_size] : std::vector<std::pair<size_t, int64_t>>{
           {1, 32}, {1, 48}, {6, 1}, {6, 16}, {6, 32}, {6, 48}, {6, 64}, {6, 128}, {6, kLength}, {60, 64}}) {
    std::vector<Part> parts;
    for (size_t i = 0; i < times; ++i) parts.insert(parts.end(), together.begin(), together.end());
    const std::vector<std::vector<char>> batch = run(parts, block_size);
    for (size_t i = 0; i < parts.size(); ++i)
      expect_row(batch[i], parts[i].begin,
                 fmt::format("token {} in a batch of {}, blocks of {}", parts[i].begin, parts.size(), block_size));
  }
  // Beside a prompt.
  const std::vector<std::vector<char>> mixed = run({{300, 301}, {0, 90}, {699, 700}}, 16);
  expect_row(mixed[0], 300, "before a prompt");
  expect_row(mixed[2], 699, "after a prompt");
  EXPECT_EQ(std::memcmp(mixed[1].data(), whole.data(), mixed[1].size()), 0);
}

// --- One launch that rotates, appends and attends has the bits of two.

struct Step {
  int64_t heads, kv_heads, head_dim, rotary_dim, window;
  std::vector<int64_t> positions;  // of a token of each sequence
  int64_t block_size;
  RopeStyle style = RopeStyle::rotate_half;
  const Encoding* encoding = nullptr;  // of the cache; null: bf16
};

class CudaAppendAndAttend : public ::testing::TestWithParam<Step> {};

TEST_P(CudaAppendAndAttend, HasTheBitsOfItsParts) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  if (!test::hopper_refusal().empty()) GTEST_SKIP() << test::hopper_refusal();
  const std::shared_ptr<Device> device = open_device("cuda");
  const Mesh alone;
  Context context{*device, alone};
  const Step& s = GetParam();
  const auto sequences = static_cast<int64_t>(s.positions.size());
  const int64_t most = *std::max_element(s.positions.begin(), s.positions.end()) + 1,
                max_blocks = (most + s.block_size - 1) / s.block_size, num_blocks = sequences * max_blocks;
  const RopeAppendAttentionAttrs attrs{.rope = {.style = s.style, .rotary_dim = s.rotary_dim},
                                       .attention = {.heads = s.heads,
                                                     .kv_heads = s.kv_heads,
                                                     .head_dim = s.head_dim,
                                                     .scale = 0.3f,
                                                     .window = s.window,
                                                     .source = KvSource::cached}};

  // 1. Blocks in disorder. Every fifth token is appended nowhere.
  std::vector<int32_t> starts, lengths, table;
  const Tensor slots = Tensor::on_host(DType::i64, {sequences});
  for (int64_t i = 0; i < sequences; ++i) {
    starts.push_back(static_cast<int32_t>(i));
    lengths.push_back(static_cast<int32_t>(s.positions[static_cast<size_t>(i)] + 1));
    for (int64_t b = 0; b < max_blocks; ++b)
      table.push_back(static_cast<int32_t>((max_blocks - 1 - b) * sequences + sequences - 1 - i));
    const int64_t position = s.positions[static_cast<size_t>(i)];
    slots.view.as<int64_t>()[i] =
        i % 5 == 4 ? -1
                   : table[static_cast<size_t>(i * max_blocks + position / s.block_size)] * s.block_size +
                         position % s.block_size;
  }
  starts.push_back(static_cast<int32_t>(sequences));
  const Tensor q = random_on(device, DType::bf16, {sequences, s.heads, s.head_dim}, 1),
               k = random_on(device, DType::bf16, {sequences, s.kv_heads, s.head_dim}, 2),
               v = random_on(device, DType::bf16, {sequences, s.kv_heads, s.head_dim}, 3),
               angles = random_on(device, DType::f32, {sequences, s.rotary_dim}, 4),
               query_start = integers_on(device, starts), kv_length = integers_on(device, lengths),
               block_table = integers_on(device, table, {sequences, max_blocks}),
               slots_on_device = copy_to_device(device, slots.view);

  // 2. Two caches of the same contents, each for keys and values.
  const Shape shape{num_blocks, s.kv_heads, s.block_size, s.head_dim};
  const auto make_cache = [&](uint64_t seed, Tensor& memory) {
    const Tensor plain = test::random_tensor(DType::bf16, shape, seed);
    if (s.encoding == nullptr) {
      memory = copy_to_device(device, plain.view);
      return memory.view;
    }
    const Tensor encoded = Tensor::in_one_piece(DType::f32, shape, *s.encoding);
    s.encoding->encode(encoded.view, plain.view);
    memory = copy_to_device(device, TensorView(encoded.view.data, DType::u8, {encoded_bytes(*s.encoding, shape)}));
    return view_of_planes(memory.view.data, *s.encoding, DType::f32, shape);
  };
  Tensor memory[2][2];
  TensorView caches[2][2];
  for (int n = 0; n < 2; ++n)
    for (int of_values = 0; of_values < 2; ++of_values)
      caches[n][of_values] = make_cache(static_cast<uint64_t>(5 + of_values), memory[n][of_values]);

  // 3. The two launches, then the one.
  const Tensor rotated = allocate_tensor(*device, DType::bf16, q.view.shape),
               expected = allocate_tensor(*device, DType::bf16, q.view.shape),
               y = allocate_tensor(*device, DType::bf16, q.view.shape);
  const Tensor scratch = allocate_tensor(*device, DType::u8, {int64_t{64} << 20});
  {
    const RopeKvAppendAttrs rope{attrs.rope};
    const TensorView in[] = {q.view, angles.view, k.view, v.view, slots_on_device.view, caches[0][0], caches[0][1]},
                     out[] = {rotated.view, caches[0][0], caches[0][1]};
    test::plan_for(*cuda::rope_qk_append_kernels()[0], "rope_qk_append", AttrsRef(rope), in, out, context)
        ->run({.inputs = in, .outputs = out, .context = &context});
    const TensorView to_attend[] = {rotated.view,     caches[0][0],   caches[0][1],
                                    query_start.view, kv_length.view, block_table.view},
                     attended[] = {expected.view};
    test::plan_for(test::named(cuda::attention_kernels(), "cuda_mma"), "attention", AttrsRef(attrs.attention),
                   to_attend, attended, context)
        ->run({.inputs = to_attend, .outputs = attended, .scratch = scratch.view, .context = &context});
  }
  const TensorView in[] = {q.view,       angles.view,  k.view,           v.view,         slots_on_device.view,
                           caches[1][0], caches[1][1], query_start.view, kv_length.view, block_table.view},
                   out[] = {y.view, caches[1][0], caches[1][1]};
  test::plan_for(*cuda::rope_append_attention_kernels()[0], "rope_append_attention", AttrsRef(attrs), in, out, context)
      ->run({.inputs = in, .outputs = out, .scratch = scratch.view, .context = &context});
  EXPECT_EQ(bytes_of(*device, y.view), bytes_of(*device, expected.view));
  const auto expect_same_caches = [&] {
    for (int of_values = 0; of_values < 2; ++of_values)
      EXPECT_EQ(bytes_of(*device, memory[1][of_values].view), bytes_of(*device, memory[0][of_values].view));
  };
  expect_same_caches();

  // 4. Rounded, too. The cache has the new rows by now, which are written once more.
  const Shape flat{sequences, s.heads * s.head_dim};
  if (flat[1] % 256 != 0) return;
  const Encoding& chunks = cuda::Int8Chunks::instance();
  Tensor rounded[2];
  TensorView codes[2];
  for (int n = 0; n < 2; ++n) {
    rounded[n] = allocate_tensor(*device, DType::u8, {encoded_bytes(chunks, flat)});
    fill_zero(*device, rounded[n].view);  // what rows have no place for is zero
    codes[n] = view_of_planes(rounded[n].view.data, chunks, DType::bf16, flat);
  }
  const TensorView x[] = {TensorView(expected.view.data, DType::bf16, flat)}, to[] = {codes[0]};
  test::plan_for(test::named(cuda::quantize_kernels(), "cuda_chunks"), "quantize", AttrsRef(QuantizeAttrs{&chunks}), x,
                 to, context)
      ->run({.inputs = x, .outputs = to, .context = &context});
  RopeAppendAttentionAttrs rounding = attrs;
  rounding.round_to = &chunks;
  const TensorView in_codes[] = {codes[1], caches[1][0], caches[1][1]};
  test::plan_for(*cuda::rope_append_attention_quantize_kernels()[0], "rope_append_attention_quantize",
                 AttrsRef(rounding), in, in_codes, context)
      ->run({.inputs = in, .outputs = in_codes, .scratch = scratch.view, .context = &context});
  EXPECT_EQ(bytes_of(*device, rounded[1].view), bytes_of(*device, rounded[0].view));
  expect_same_caches();
}

INSTANTIATE_TEST_SUITE_P(
    Steps, CudaAppendAndAttend,
    ::testing::Values(Step{32, 8, 128, 128, 0, {0}, 16}, Step{32, 8, 128, 128, 0, {255}, 64},
                      Step{32, 8, 128, 128, 0, {700, 256, 31, 512, 33, 5}, 16},
                      Step{32, 8, 64, 64, 0, {1000, 64, 300}, 32}, Step{40, 2, 64, 64, 0, {513, 8, 9, 10, 257}, 7},
                      Step{16, 4, 128, 128, 100, {700, 256, 31}, 64},
                      Step{8, 2, 64, 64, 0, std::vector<int64_t>(90, 70), 16},       // many
                      Step{8, 2, 64, 32, 0, {70, 3}, 16},                            // a part of a head rotates
                      Step{8, 2, 128, 128, 0, {70, 3}, 16, RopeStyle::interleaved},  // pairs of neighbours
                      Step{32, 8, 128, 128, 0, {300, 3}, 16, RopeStyle::rotate_half, &RowEncoding::int8()},
                      Step{8, 2, 256, 256, 0, {300, 3}, 16}, Step{8, 2, 256, 256, 0, {700}, 16},
                      Step{16, 8, 64, 64, 0, {300, 3}, 16},      // a key head has half a chunk
                      Step{40, 2, 128, 128, 0, {700, 9}, 16},    // 20 queries of a key head
                      Step{4, 1, 64, 64, 0, {5, 300, 256}, 16},  // one chunk
                      // Columns that are zeros beside those of heads.
                      Step{8, 8, 96, 96, 0, {300, 3}, 16}, Step{32, 8, 80, 20, 0, {700, 9, 256}, 16},
                      Step{16, 4, 96, 96, 100, std::vector<int64_t>(90, 300), 32},
                      Step{8, 2, 160, 160, 0, {300, 3}, 16},
                      Step{16, 4, 112, 112, 0, {300, 3}, 16, RopeStyle::rotate_half, &RowEncoding::int8()}));

// --- Caches of 8-bit codes have the bits of RowEncoding::encode, whichever kernel writes them.

struct Append {
  const Encoding* encoding;
  DType dtype;
  int64_t head_dim, rotary_dim;  // 0: nothing rotates
  RopeStyle style = RopeStyle::rotate_half;
};

class CudaAppend : public ::testing::TestWithParam<Append> {};

TEST_P(CudaAppend, HasTheBitsOfTheEncoding) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  const std::shared_ptr<Device> device = open_device("cuda");
  const Append& a = GetParam();
  constexpr int64_t kTokens = 37, kHeads = 3, kKvHeads = 2, kBlockSize = 7, kBlocks = 9;
  const Shape rows{kTokens, kKvHeads, a.head_dim}, cache_shape{kBlocks, kKvHeads, kBlockSize, a.head_dim};
  const Mesh alone;
  Context context{*device, alone};
  const auto on_device = [&](const Tensor& host) { return copy_to_device(device, host.view); };

  // 1. Keys and values of all sizes; a row of zeros, and one with an infinity.
  const auto random_rows = [&](uint64_t seed) {
    const Tensor values = test::random_tensor(DType::f32, rows, seed);
    float* x = values.view.as<float>();
    for (int64_t i = 0; i < values.view.num_elements(); ++i) {
      const int64_t row = i / a.head_dim;
      x[i] = std::ldexp(x[i], static_cast<int>(row % 5 * 9 - 18) - static_cast<int>(i % 11));
      if (row == 3) x[i] = 0.0f;
      if (row == 8 && i % a.head_dim == a.head_dim - 1) x[i] = INFINITY;
    }
    return converted_on_host(values.view, a.dtype);
  };
  const Tensor k = on_device(random_rows(1)), v = on_device(random_rows(2)),
               q = test::random_on(device, a.dtype, {kTokens, kHeads, a.head_dim}, 3);
  Tensor slots = Tensor::on_host(DType::i64, {kTokens});
  for (int64_t t = 0; t < kTokens; ++t)
    slots.view.as<int64_t>()[t] = t % 6 == 4 ? -1 : (t * 11 + 5) % (kBlocks * kBlockSize);
  const Tensor slots_on_device = on_device(slots);

  // 2. The codes, written beside an image of what was there.
  const int64_t bytes = encoded_bytes(*a.encoding, cache_shape);
  const Tensor image = Tensor::on_host(DType::u8, {bytes});
  std::memset(image.view.data, 0x5a, static_cast<size_t>(bytes));
  const Tensor memory[] = {on_device(image), on_device(image)};
  const TensorView cache_k = view_of_planes(memory[0].view.data, *a.encoding, DType::f32, cache_shape),
                   cache_v = view_of_planes(memory[1].view.data, *a.encoding, DType::f32, cache_shape);
  Tensor rotated_k = k, y;
  if (a.rotary_dim == 0) {
    const NoAttrs none;
    const TensorView inputs[] = {k.view, v.view, slots_on_device.view, cache_k, cache_v},
                     outputs[] = {cache_k, cache_v};
    test::plan_for(*cuda::kv_append_kernels()[0], "kv_append", AttrsRef(none), inputs, outputs, context)
        ->run({.inputs = inputs, .outputs = outputs, .context = &context});
  } else {
    const RopeKvAppendAttrs attrs{.rope = {.style = a.style, .rotary_dim = a.rotary_dim}};
    const Tensor table = test::random_on(device, DType::f32, {kTokens, a.rotary_dim}, 5);
    y = allocate_tensor(*device, a.dtype, q.view.shape);
    const TensorView inputs[] = {q.view, table.view, k.view, v.view, slots_on_device.view, cache_k, cache_v},
                     outputs[] = {y.view, cache_k, cache_v};
    test::plan_for(*cuda::rope_qk_append_kernels()[0], "rope_qk_append", AttrsRef(attrs), inputs, outputs, context)
        ->run({.inputs = inputs, .outputs = outputs, .context = &context});
    // Rotated queries and keys; one key has a NaN or an infinity.
    const auto rotate = [&](const Tensor& x) {
      const Tensor result = allocate_tensor(*device, a.dtype, x.view.shape);
      const TensorView from[] = {x.view, table.view}, to[] = {result.view};
      test::plan_for(*cuda::rope_kernels()[0], "rope", AttrsRef(attrs.rope), from, to, context)
          ->run({.inputs = from, .outputs = to, .context = &context});
      return result;
    };
    rotated_k = rotate(k);
    EXPECT_EQ(bytes_of(*device, y.view), bytes_of(*device, rotate(q).view));
  }

  // 3. Against the encoding of the same rows on the host.
  for (size_t n = 0; n < 2; ++n) {
    const Tensor expected = Tensor::on_host(DType::f32, rows, *a.encoding);
    a.encoding->encode(expected.view, copy_to_host(*device, n == 0 ? rotated_k.view : v.view).view);
    std::vector<char> whole(static_cast<const char*>(image.view.data),
                            static_cast<const char*>(image.view.data) + bytes);
    for (int64_t t = 0; t < kTokens; ++t)
      for (int64_t h = 0; h < kKvHeads && slots.view.as<int64_t>()[t] >= 0; ++h) {
        const int64_t slot = slots.view.as<int64_t>()[t], from = t * kKvHeads + h,
                      to = (slot / kBlockSize * kKvHeads + h) * kBlockSize + slot % kBlockSize;
        std::memcpy(&whole[static_cast<size_t>(to * a.head_dim)],
                    static_cast<const char*>(expected.view.plane(0)) + from * a.head_dim,
                    static_cast<size_t>(a.head_dim));
        std::memcpy(&whole[static_cast<size_t>(cache_shape.num_elements() + to * 4)],
                    static_cast<const char*>(expected.view.plane(1)) + from * 4, 4);
      }
    EXPECT_EQ(bytes_of(*device, memory[n].view), whole) << (n == 0 ? "keys" : "values");
  }
}

INSTANTIATE_TEST_SUITE_P(
    Rows, CudaAppend,
    ::testing::Values(
        Append{&RowEncoding::int8(), DType::bf16, 128, 128}, Append{&RowEncoding::fp8_e4m3(), DType::bf16, 64, 64},
        Append{&RowEncoding::int8(), DType::bf16, 128, 0}, Append{&RowEncoding::fp8_e4m3(), DType::f32, 64, 0},
        Append{&RowEncoding::int8(), DType::bf16, 128, 64},
        Append{&RowEncoding::fp8_e4m3(), DType::bf16, 128, 128, RopeStyle::interleaved},
        Append{&RowEncoding::int8(), DType::f32, 80, 80}, Append{&RowEncoding::fp8_e4m3(), DType::bf16, 36, 0},
        Append{&RowEncoding::int8(), DType::bf16, 512, 512}, Append{&RowEncoding::int8(), DType::f32, 4, 2}),
    [](const auto& info) {
      const Append& a = info.param;
      return fmt::format("{}_{}_{}of{}{}", a.encoding->name(), dtype_name(a.dtype), a.rotary_dim, a.head_dim,
                         a.style == RopeStyle::interleaved ? "_interleaved" : "");
    });

// --- Gradients, of sequences with more rows than a block has and fewer than a chunk.

// A rounding to bf16 changes a number by at most this share of it, and f32 sums of these lengths lose less than the
// second.
constexpr double kBf16 = 1.0 / 256, kF32 = 1.0 / (1 << 18);

// The gradient of one tensor, and how far a kernel that rounds p, ds and its results to bf16 may be from it.
struct Gradient {
  std::vector<double> value, bound;

  explicit Gradient(size_t size) : value(size), bound(size) {}
  void add(size_t i, double term, double error) {
    value[i] += term;
    bound[i] += std::abs(term) * kBf16 + error;
  }
};

std::vector<double> doubles_of(const Tensor& tensor) {
  const Tensor wide = converted_on_host(tensor.view, DType::f32);
  const float* from = wide.view.as<float>();
  return std::vector<double>(from, from + wide.view.num_elements());
}

// dq, dk and dv, by tensor cores if the device has the kernel.
std::vector<Tensor> gradients_of(const std::shared_ptr<Device>& device, const AttentionAttrs& attrs,
                                 std::span<const TensorView> inputs) {
  const KernelList kernels = cuda::attention_backward_kernels();
  const char* name = test::hopper_refusal().empty() ? "cuda_wgmma" : "cuda_rows";
  const auto kernel = std::ranges::find_if(kernels, [&](const Kernel* each) { return each->name == name; });
  EADEM_CHECK(kernel != kernels.end(), "there is no kernel {}", name);
  std::vector<Tensor> gradients;
  for (size_t n = 0; n < 3; ++n) gradients.push_back(random_on(device, DType::bf16, inputs[n].shape, 6 + n));
  const TensorView outputs[] = {gradients[0].view, gradients[1].view, gradients[2].view};
  const Mesh alone;
  Context context{*device, alone};
  const PlanPtr plan = test::plan_for(**kernel, "attention", AttrsRef(attrs), inputs, outputs, context);
  const Tensor scratch = allocate_tensor(*device, DType::u8, {plan->scratch_bytes()});
  KernelCall call{.inputs = inputs, .outputs = outputs, .context = &context};
  call.scratch = scratch.view;
  plan->run(call);
  return gradients;
}

class CudaAttentionGradient : public ::testing::TestWithParam<Geometry> {};

TEST_P(CudaAttentionGradient, IsThatOfTheDefinition) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  const std::shared_ptr<Device> device = open_device("cuda");
  const Geometry& g = GetParam();
  const AttentionAttrs attrs{
      .heads = g.heads, .kv_heads = g.kv_heads, .head_dim = g.head_dim, .scale = 0.2f, .window = g.window};
  const std::vector<int32_t> lengths = {1, 400, 65}, starts = {0, 1, 401, 466};
  const int64_t tokens = starts.back(), group = g.heads / g.kv_heads;
  const Shape queries{tokens, g.heads, g.head_dim}, keys{tokens, g.kv_heads, g.head_dim};
  const Tensor q = test::random_tensor(DType::bf16, queries, 1), k = test::random_tensor(DType::bf16, keys, 2),
               v = test::random_tensor(DType::bf16, keys, 3), y = test::random_tensor(DType::bf16, queries, 4),
               dy = test::random_tensor(DType::bf16, queries, 5), lse = Tensor::on_host(DType::f32, {tokens, g.heads});

  // 1. In double precision. y is any tensor here: its product with dy is all that a gradient takes from it.
  const std::vector<double> qs = doubles_of(q), ks = doubles_of(k), vs = doubles_of(v), ys = doubles_of(y),
                            dys = doubles_of(dy);
  Gradient dq(qs.size()), dk(ks.size()), dv(ks.size());
  const auto dim = static_cast<size_t>(g.head_dim);
  std::vector<double> scores;
  for (size_t s = 0; s < lengths.size(); ++s)
    for (int64_t i = 0; i < lengths[s]; ++i)
      for (int64_t head = 0; head < g.heads; ++head) {
        const auto query = static_cast<size_t>((starts[s] + i) * g.heads + head);
        const int64_t begin = g.window > 0 ? std::max<int64_t>(i - g.window + 1, 0) : 0;
        const auto key_at = [&](int64_t j) { return static_cast<size_t>((starts[s] + j) * g.kv_heads + head / group); };
        scores.clear();
        double sum = 0;
        for (int64_t j = begin; j <= i; ++j) {
          double score = 0;
          for (size_t d = 0; d < dim; ++d) score += qs[query * dim + d] * ks[key_at(j) * dim + d];
          scores.push_back(static_cast<double>(attrs.scale) * score);
          sum += std::exp(scores.back());
        }
        lse.view.as<float>()[query] = static_cast<float>(std::log(sum));
        double delta = 0, delta_size = 0;
        for (size_t d = 0; d < dim; ++d) {
          delta += dys[query * dim + d] * ys[query * dim + d];
          delta_size += std::abs(dys[query * dim + d] * ys[query * dim + d]);
        }
        for (int64_t j = begin; j <= i; ++j) {
          const size_t key = key_at(j);
          const double p = std::exp(scores[static_cast<size_t>(j - begin)]) / sum;
          double dp = 0, size = delta_size;
          for (size_t d = 0; d < dim; ++d) {
            dp += dys[query * dim + d] * vs[key * dim + d];
            size += std::abs(dys[query * dim + d] * vs[key * dim + d]);
          }
          const double ds = static_cast<double>(attrs.scale) * p * (dp - delta);
          const double error = static_cast<double>(attrs.scale) * p * size * kF32;
          for (size_t d = 0; d < dim; ++d) {
            dq.add(query * dim + d, ds * ks[key * dim + d], error * std::abs(ks[key * dim + d]));
            dk.add(key * dim + d, ds * qs[query * dim + d], error * std::abs(qs[query * dim + d]));
            dv.add(key * dim + d, p * dys[query * dim + d], 0);
          }
        }
      }

  // 2. On the device, twice: the kernel repeats itself to the bit.
  const auto on_device = [&](const Tensor& host) { return copy_to_device(device, host.view); };
  const Tensor operands[] = {
      on_device(q), on_device(k),   on_device(v), integers_on(device, starts), integers_on(device, lengths),
      on_device(y), on_device(lse), on_device(dy)};
  std::vector<TensorView> inputs;
  for (const Tensor& operand : operands) inputs.push_back(operand.view);
  const std::vector<Tensor> gradients = gradients_of(device, attrs, inputs),
                            again = gradients_of(device, attrs, inputs);
  const Gradient* expected[] = {&dq, &dk, &dv};
  for (size_t n = 0; n < 3; ++n) {
    const std::string what = fmt::format("d{}", "qkv"[n]);
    EXPECT_EQ(bytes_of(*device, gradients[n].view), bytes_of(*device, again[n].view)) << what;
    const std::vector<double> actual = doubles_of(copy_to_host(*device, gradients[n].view));
    const size_t row = static_cast<size_t>(n == 0 ? g.heads : g.kv_heads) * dim;
    for (size_t e = 0; e < actual.size(); ++e) {
      const double value = expected[n]->value[e];
      ASSERT_NEAR(actual[e], value, expected[n]->bound[e] + std::abs(value) * kBf16 + 1e-6)
          << what << ", token " << e / row << ", element " << e % row;
    }
  }
}

// Sums of a sequence have an order of their own, whatever runs beside it.
TEST_P(CudaAttentionGradient, IsThatOfTheSequenceAlone) {
  if (num_cuda_devices() == 0) GTEST_SKIP() << "no CUDA device";
  const std::shared_ptr<Device> device = open_device("cuda");
  const Geometry& g = GetParam();
  const AttentionAttrs attrs{
      .heads = g.heads, .kv_heads = g.kv_heads, .head_dim = g.head_dim, .scale = 0.2f, .window = g.window};
  // More sequences than a block looks at together; the last has more keys than others.
  std::vector<int32_t> lengths(40, 3), starts = {0};
  lengths[0] = 700, lengths[20] = 64, lengths[39] = 900;
  for (const int32_t length : lengths) starts.push_back(starts.back() + length);
  const int64_t tokens = starts.back();
  const Shape queries{tokens, g.heads, g.head_dim}, keys{tokens, g.kv_heads, g.head_dim};
  const Tensor operands[] = {random_on(device, DType::bf16, queries, 1),
                             random_on(device, DType::bf16, keys, 2),
                             random_on(device, DType::bf16, keys, 3),
                             integers_on(device, starts),
                             integers_on(device, lengths),
                             random_on(device, DType::bf16, queries, 4),
                             random_on(device, DType::f32, {tokens, g.heads}, 5),
                             random_on(device, DType::bf16, queries, 6)};
  std::vector<TensorView> inputs;
  for (const Tensor& operand : operands) inputs.push_back(operand.view);
  const std::vector<Tensor> together = gradients_of(device, attrs, inputs);
  for (const size_t s : {0, 20, 39}) {
    std::vector<TensorView> own;
    for (const TensorView& input : inputs)
      own.push_back(input.dtype == DType::i32 ? input : input.rows(starts[s], lengths[s]));
    const Tensor start = integers_on(device, {0, lengths[s]}), length = integers_on(device, {lengths[s]});
    own[3] = start.view, own[4] = length.view;
    const std::vector<Tensor> alone = gradients_of(device, attrs, own);
    for (size_t n = 0; n < 3; ++n)
      EXPECT_EQ(bytes_of(*device, alone[n].view), bytes_of(*device, together[n].view.rows(starts[s], lengths[s])))
          << "d"
          << "qkv"[n] << " of sequence " << s;
  }
}

constexpr auto name_of = [](const ::testing::TestParamInfo<Geometry>& geometry) {
  const Geometry& g = geometry.param;
  return fmt::format("{}heads_{}kv_{}dim_window{}{}{}{}{}", g.heads, g.kv_heads, g.head_dim, g.window,
                     g.softcap > 0 ? "_capped" : "", g.sinks ? "_sinks" : "", g.encoding != nullptr ? "_" : "",
                     g.encoding != nullptr ? g.encoding->name() : "");
};

INSTANTIATE_TEST_SUITE_P(Geometries, CudaAttentionGradient,
                         ::testing::Values(Geometry{4, 2, 64, 0}, Geometry{2, 2, 128, 0}, Geometry{3, 1, 64, 70},
                                           Geometry{4, 1, 128, 130},
                                           Geometry{130, 130, 64, 0},  // more heads than blocks take at once
                                           // Columns that are zeros beside those of heads.
                                           Geometry{4, 2, 96, 0}, Geometry{3, 1, 80, 70}, Geometry{2, 2, 24, 0},
                                           Geometry{4, 1, 120, 130}),
                         name_of);

INSTANTIATE_TEST_SUITE_P(Geometries, CudaAttention,
                         ::testing::Values(Geometry{32, 8, 64, 0}, Geometry{8, 8, 128, 0}, Geometry{14, 2, 64, 0},
                                           Geometry{16, 4, 128, 100}, Geometry{20, 1, 64, 300},
                                           Geometry{16, 8, 128, 0, 2.0f}, Geometry{20, 1, 64, 90, 0.7f},
                                           Geometry{8, 4, 256, 0}, Geometry{20, 2, 256, 90, 0.9f, true},
                                           Geometry{64, 8, 64, 128, 0.0f, true}, Geometry{8, 2, 128, 0, 1.5f, true},
                                           Geometry{32, 8, 64, 0, 0.0f, false, &RowEncoding::int8()},
                                           Geometry{8, 8, 128, 0, 0.0f, false, &RowEncoding::fp8_e4m3()},
                                           Geometry{16, 4, 128, 100, 0.0f, false, &RowEncoding::int8()},
                                           Geometry{20, 1, 64, 300, 0.0f, true, &RowEncoding::fp8_e4m3()},
                                           Geometry{20, 2, 128, 0, 0.8f, true, &RowEncoding::int8()},
                                           Geometry{14, 2, 64, 90, 0.8f, false, &RowEncoding::fp8_e4m3()},
                                           // Columns that are zeros beside those of heads.
                                           Geometry{8, 8, 96, 0}, Geometry{20, 1, 80, 90, 0.7f, true},
                                           Geometry{16, 4, 120, 100}, Geometry{6, 2, 40, 0}, Geometry{4, 2, 160, 0},
                                           Geometry{20, 2, 232, 90, 0.9f, true},
                                           Geometry{8, 8, 96, 0, 0.0f, false, &RowEncoding::int8()},
                                           Geometry{20, 1, 80, 300, 0.8f, true, &RowEncoding::fp8_e4m3()},
                                           Geometry{14, 2, 48, 90, 0.0f, false, &RowEncoding::int8()},
                                           Geometry{4, 4, 16, 0, 0.0f, false, &RowEncoding::fp8_e4m3()}),
                         name_of);

}  // namespace
}  // namespace eadem::kernels
