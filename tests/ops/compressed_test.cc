// SPDX-License-Identifier: Apache-2.0
//
// Native sparse attention bit for bit, for every instruction set: compressed rows, attention over them and the choice
// of blocks of a sequence are the same whether it is whole in its step, or cut into steps anywhere over a contiguous or
// a paged cache, beside another sequence.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>

#include "eadem/ops/all_ops.h"
#include "tests/ops/device_groups.h"
#include "tests/ops/pass_calls.h"
#include "tests/workloads/inputs.h"

namespace eadem::test {
namespace compressed_test {

using kernels::KvSource;
using kernels::Pass;

constexpr int64_t kHeads = 4, kKvHeads = 2, kDim = 24, kSpan = 8, kTopN = 4;
constexpr kernels::RowGrid kGrid{8, 4};

// Keys are rotated already; compressed ones serve as values, too.
struct Source {
  Tensor q, k, weight, position;
  int64_t length() const { return q.shape()[0]; }
};

Source random_source(int64_t length) {
  const auto seed = static_cast<uint64_t>(length);
  return {workloads::random_tensor(DType::f32, Shape{length, kHeads, kDim}, seed),
          workloads::random_tensor(DType::f32, Shape{length, kKvHeads, kDim}, seed + 1),
          workloads::random_tensor(DType::f32, Shape{kKvHeads, kGrid.length}, 3),
          workloads::random_tensor(DType::f32, Shape{kKvHeads, kGrid.length, kDim}, 4)};
}

Tensor integers(DType dtype, const std::vector<int64_t>& values, Shape shape) {
  Tensor result = Tensor::on_host(dtype, shape);
  for (size_t i = 0; i < values.size(); ++i)
    if (dtype == DType::i64)
      result.view.as<int64_t>()[i] = values[i];
    else
      result.view.as<int32_t>()[i] = static_cast<int32_t>(values[i]);
  return result;
}

// Runs the kernel of the device's own choice: these ops have one.
Tensor run(Device& device, const ops::Op& op, std::vector<Tensor> inputs, const std::vector<TensorType>& types,
           const SymbolValues& symbols) {
  const ops::Workload row{std::string(op.name()), ops::OpPtr(&op, [](const ops::Op*) {}), types, symbols};
  const ExpectedCall call = *expected_call(row, Pass::inference, std::move(inputs), 1);
  for (const kernels::Kernel* kernel : op.kernels(kernels::backend_of(device)))
    if (kernel->pass == Pass::inference && kernel->can_handle(call.call.request(device)).accepted)
      return run_kernel(device, *kernel, call.call, {}, row.name)[0];
  ADD_FAILURE() << "no kernel of " << op.name() << " on " << device.description();
  return {};
}

struct Results {
  Tensor y, selection;  // of the step's tokens
};

// A sequence in a cache of `block_size`, or direct with 0. Another one decodes before it in the same step.
class Served {
 public:
  Served(Device& device, const Source& source, int64_t block_size)
      : device_(device), source_(source), block_size_(block_size) {
    if (!cached()) return;
    blocks_ = (source.length() + block_size - 1) / block_size;
    block_rows_ = (block_size + kGrid.stride - 1) / kGrid.stride;
    keys_ = Tensor::on_host(DType::f32, Shape{2 * blocks_, kKvHeads, block_size, kDim});
    rows_ = Tensor::on_host(DType::f32, Shape{2 * blocks_, kKvHeads, block_rows_, kDim});
    for (const Tensor* tensor : {&keys_, &rows_})  // what was not written is NaN
      std::memset(tensor->view.data, 0xff, static_cast<size_t>(tensor->view.size_bytes()));
  }

  // The tokens [begin, end), after those before it.
  Results step(int64_t begin, int64_t end) {
    const int64_t tokens = cached() ? 1 + end - begin : end - begin, sequences = cached() ? 2 : 1;
    SymbolValues symbols;
    symbols[Symbol::tokens] = tokens;
    symbols[Symbol::sequences] = sequences;
    symbols[Symbol::max_blocks] = blocks_;
    const TensorType starts_type(DType::i32, {Dim(Symbol::sequences, 1)}),
        lengths_type(DType::i32, {Symbol::sequences}), rows_of_step(DType::f32, {Symbol::tokens, kKvHeads, kDim}),
        q_type(DType::f32, {Symbol::tokens, kHeads, kDim}), weight(DType::f32, {kKvHeads, kGrid.length}),
        position(DType::f32, {kKvHeads, kGrid.length, kDim});
    const KvSource source = cached() ? KvSource::cached : KvSource::direct;
    const ops::CompressKeys compress({kKvHeads, kDim, kGrid, source});
    const ops::CompressedAttention attend({kHeads, kKvHeads, kDim, kDim, 0.3f, kGrid, source});
    const ops::SelectBlocks select({kHeads, kKvHeads, kDim, 0.3f, kGrid, kSpan, kTopN, 1, 1, source});
    if (!cached()) {
      const Tensor starts = integers(DType::i32, {0, tokens}, Shape{2}),
                   lengths = integers(DType::i32, {tokens}, Shape{1});
      const TensorType none = kernels::unconnected_port();
      const Tensor z = run(device_, compress, {source_.k, source_.weight, source_.position, starts, lengths, {}},
                           {rows_of_step, weight, position, starts_type, lengths_type, none}, symbols);
      return {run(device_, attend, {source_.q, z, z, starts, lengths, {}},
                  {q_type, rows_of_step, rows_of_step, starts_type, lengths_type, none}, symbols),
              run(device_, select, {source_.q, z, starts, lengths, {}},
                  {q_type, rows_of_step, starts_type, lengths_type, none}, symbols)};
    }
    // The other sequence has the blocks with even numbers, and is at the position before `end`.
    std::vector<int64_t> slots = {(end - 1) / block_size_ * 2 * block_size_ + (end - 1) % block_size_}, table;
    write_key(slots[0], 0);
    for (int64_t p = begin; p < end; ++p) {
      slots.push_back((2 * (p / block_size_) + 1) * block_size_ + p % block_size_);
      write_key(slots.back(), p);
    }
    for (const int64_t odd : {0, 1})
      for (int64_t i = 0; i < blocks_; ++i) table.push_back(2 * i + odd);
    const Tensor starts = integers(DType::i32, {0, 1, tokens}, Shape{3}),
                 lengths = integers(DType::i32, {end, end}, Shape{2}),
                 tables = integers(DType::i32, table, Shape{2, blocks_});
    const TensorType tables_type(DType::i32, {Symbol::sequences, Symbol::max_blocks}),
        keys_type(DType::f32, {2 * blocks_, kKvHeads, block_size_, kDim}),
        rows_type(DType::f32, {2 * blocks_, kKvHeads, block_rows_, kDim});
    rows_ = run(device_, compress,
                {keys_, source_.weight, source_.position, starts, lengths, tables,
                 integers(DType::i64, slots, Shape{tokens}), rows_},
                {keys_type, weight, position, starts_type, lengths_type, tables_type,
                 TensorType(DType::i64, {Symbol::tokens}), rows_type},
                symbols);
    Tensor q = Tensor::on_host(DType::f32, Shape{tokens, kHeads, kDim});
    const int64_t token_bytes = kHeads * kDim * static_cast<int64_t>(sizeof(float));
    std::memcpy(q.view.data, source_.q.view.data, static_cast<size_t>(token_bytes));
    const TensorView own = source_.q.view.rows(begin, end - begin);
    std::memcpy(q.view.rows(1, end - begin).data, own.data, static_cast<size_t>(own.size_bytes()));
    Results results = {run(device_, attend, {q, rows_, rows_, starts, lengths, tables},
                           {q_type, rows_type, rows_type, starts_type, lengths_type, tables_type}, symbols),
                       run(device_, select, {q, rows_, starts, lengths, tables},
                           {q_type, rows_type, starts_type, lengths_type, tables_type}, symbols)};
    for (Tensor* tensor : {&results.y, &results.selection}) tensor->view = tensor->view.rows(1, end - begin);
    return results;
  }

 private:
  bool cached() const { return block_size_ > 0; }
  void write_key(int64_t slot, int64_t from) {
    for (int64_t g = 0; g < kKvHeads; ++g)
      std::memcpy(
          keys_.view.as<float>() + ((slot / block_size_ * kKvHeads + g) * block_size_ + slot % block_size_) * kDim,
          source_.k.view.as<float>() + (from * kKvHeads + g) * kDim, kDim * sizeof(float));
  }

  Device& device_;
  const Source& source_;
  int64_t block_size_, blocks_ = 0, block_rows_ = 0;
  Tensor keys_, rows_;
};

TEST(CompressedAttention, ASequenceHasTheSameBitsHoweverItIsServed) {
  const Source source = random_source(101);
  for (const DeviceGroup& group : device_groups()) {
    Device& device = *group.devices.back();
    Served direct(device, source, 0);
    const Results whole = direct.step(0, source.length());
    for (const int64_t block_size : {103, 16, 8, 4})
      for (const int64_t chunk : {101, 1, 3, 8, 37}) {
        Served served(device, source, block_size);
        for (int64_t begin = 0; begin < source.length(); begin += chunk) {
          const int64_t count = std::min(chunk, source.length() - begin);
          const Results part = served.step(begin, begin + count);
          const std::string label = fmt::format("{}: tokens {}+{}, blocks of {}", group.name, begin, count, block_size);
          ASSERT_TRUE(same_bits(whole.y.view.rows(begin, count), part.y.view)) << label;
          ASSERT_TRUE(same_bits(whole.selection.view.rows(begin, count), part.selection.view)) << label;
        }
      }
  }
}

}  // namespace compressed_test
}  // namespace eadem::test
