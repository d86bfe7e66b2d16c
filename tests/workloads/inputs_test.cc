// SPDX-License-Identifier: Apache-2.0
#include "tests/workloads/inputs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <set>

#include "eadem/kernels/sample.h"
#include "eadem/ops/all_ops.h"

namespace eadem::workloads {
namespace {

std::vector<ops::Workload> small_rows() {
  std::vector<ops::Workload> rows;
  for (ops::Workload& row : ops::all_workloads())
    if (row.name.starts_with("tiny") || row.name.starts_with("stories260k")) rows.push_back(std::move(row));
  return rows;
}

ops::Workload find_row(std::string_view name) {
  for (ops::Workload& row : small_rows())
    if (row.name == name) return row;
  ADD_FAILURE() << "no row named " << name;
  return {};
}

TEST(Inputs, EveryPortOfEveryOpGetsItsDtypeAndShape) {
  std::set<std::string_view> ops_seen;
  const std::vector<ops::Workload> rows = small_rows();
  for (const ops::Workload& row : rows) {
    SCOPED_TRACE(row.name);
    ops_seen.insert(row.op->name());
    const std::vector<Tensor> inputs = make_inputs(*row.op, row.inputs, row.symbols, 1);
    ASSERT_EQ(inputs.size(), row.inputs.size());
    for (size_t i = 0; i < inputs.size(); ++i) {
      ASSERT_EQ(inputs[i].defined(), !kernels::is_unconnected(row.inputs[i]));
      if (!inputs[i].defined()) continue;
      EXPECT_EQ(inputs[i].dtype(), row.inputs[i].dtype);
      EXPECT_EQ(inputs[i].shape(), row.inputs[i].bind(row.symbols));
    }
  }
  for (const ops::Workload& row : ops::all_workloads())
    EXPECT_TRUE(ops_seen.contains(row.op->name())) << row.op->name() << " has no small rows";
}

TEST(Inputs, SameSeedSameBytes) {
  const ops::Workload row = find_row("tiny prefill-512 attention paged");
  const std::vector<Tensor> a = make_inputs(*row.op, row.inputs, row.symbols, 5),
                            b = make_inputs(*row.op, row.inputs, row.symbols, 5),
                            c = make_inputs(*row.op, row.inputs, row.symbols, 6);
  const auto size = static_cast<size_t>(a[0].view.size_bytes());
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_EQ(std::memcmp(a[i].view.data, b[i].view.data, static_cast<size_t>(a[i].view.size_bytes())), 0);
  EXPECT_NE(std::memcmp(a[0].view.data, c[0].view.data, size), 0);
}

TEST(Inputs, SequencesAreConsistent) {
  ops::Workload row = find_row("tiny decode-8 attention paged");
  row.symbols[Symbol::tokens] = 23;
  const std::vector<Tensor> inputs = make_inputs(*row.op, row.inputs, row.symbols, 9);
  const int32_t* start = inputs[3].view.as<int32_t>();
  const int32_t* length = inputs[4].view.as<int32_t>();
  const int64_t sequences = inputs[4].shape()[0], capacity = inputs[5].shape()[1] * inputs[1].shape()[2];
  EXPECT_EQ(start[0], 0);
  EXPECT_EQ(start[sequences], 23);
  for (int64_t s = 0; s < sequences; ++s) {
    EXPECT_GT(start[s + 1], start[s]);
    EXPECT_GE(length[s], start[s + 1] - start[s]);
    EXPECT_LE(length[s], capacity);
  }
  std::set<int32_t> blocks;
  for (int64_t i = 0; i < inputs[5].view.num_elements(); ++i) {
    const int32_t block = inputs[5].view.as<int32_t>()[i];
    EXPECT_TRUE(block >= 0 && block < inputs[1].shape()[0]);
    EXPECT_TRUE(blocks.insert(block).second) << "block " << block << " twice";
  }
}

TEST(Inputs, SlotsAndRowsAreDistinctAndInRange) {
  for (const char* name : {"stories260k prefill-512 kv_append", "stories260k decode-8 select_rows"}) {
    const ops::Workload row = find_row(name);
    const std::vector<Tensor> inputs = make_inputs(*row.op, row.inputs, row.symbols, 3);
    const bool append = row.op->name() == "kv_append";
    const int64_t limit = append ? inputs[3].shape()[0] * inputs[3].shape()[2] : inputs[0].shape()[0];
    std::set<int64_t> seen;
    const Tensor& index = append ? inputs[2] : inputs[1];
    for (int64_t i = 0; i < index.view.num_elements(); ++i) {
      const int64_t value = append ? index.view.as<int64_t>()[i] : index.view.as<int32_t>()[i];
      if (append && value == -1) continue;  // written nowhere
      EXPECT_TRUE(value >= 0 && value < limit);
      EXPECT_TRUE(seen.insert(value).second);
    }
  }
}

std::vector<Tensor> plain_inputs(const ops::Workload& row) {
  return make_inputs(*row.op, row.inputs, row.symbols, 7, StepKind::plain);
}

TEST(PlainSteps, SequencesFillTheirBlocks) {
  const ops::Workload row = find_row("tiny decode-8 attention paged");
  const std::vector<Tensor> inputs = plain_inputs(row);
  for (int64_t s = 0; s < 8; ++s) {
    EXPECT_EQ(inputs[3].view.as<int32_t>()[s + 1], s + 1);
    EXPECT_EQ(inputs[4].view.as<int32_t>()[s], 512);
  }
}

TEST(PlainSteps, TokensAreGeneratedWhereEachSequenceHasOneAndOfPromptsElsewhere) {
  const auto prompt_length = [](std::string_view name, int64_t* kv_length) {
    const std::vector<Tensor> inputs = plain_inputs(find_row(name));
    *kv_length = inputs[5].view.as<int32_t>()[0];
    return int64_t{inputs[7].view.as<int32_t>()[0]};
  };
  int64_t kv_length = 0;
  EXPECT_EQ(prompt_length("tiny decode-1 latent_attention", &kv_length), 511);
  EXPECT_EQ(kv_length, 512);
  EXPECT_EQ(prompt_length("tiny prefill-512 latent_attention", &kv_length), 512);
  EXPECT_EQ(kv_length, 512);
}

TEST(PlainSteps, EveryTokenHasASlot) {
  const Tensor slots = plain_inputs(find_row("stories260k prefill-512 kv_append"))[2];
  for (int64_t i = 0; i < slots.view.num_elements(); ++i) EXPECT_GE(slots.view.as<int64_t>()[i], 0);
}

TEST(PlainSteps, EveryRowHasALabel) {
  const Tensor labels = plain_inputs(find_row("tiny prefill-512 cross_entropy"))[1];
  for (int64_t i = 0; i < labels.view.num_elements(); ++i) EXPECT_GE(labels.view.as<int32_t>()[i], 0);
}

TEST(PlainSteps, ATokenChoosesDistinctExperts) {
  const ops::Workload row = find_row("tiny decode-1 experts up_proj");
  const Tensor offsets = plain_inputs(row)[2];
  const int32_t* begin = offsets.view.as<int32_t>();
  const int64_t experts = offsets.shape()[0] - 1;
  EXPECT_EQ(begin[0], 0);
  EXPECT_EQ(begin[experts], 2);
  for (int64_t e = 0; e < experts; ++e) EXPECT_TRUE(begin[e + 1] - begin[e] == 0 || begin[e + 1] - begin[e] == 1);
}

TEST(Inputs, SamplingParametersAreInRange) {
  ops::Workload row = find_row("tiny decode-8 sample");
  row.symbols[Symbol::logit_rows] = 100;
  const std::vector<Tensor> inputs = make_inputs(*row.op, row.inputs, row.symbols, 3);
  bool greedy = false, filtered = false;
  for (int64_t r = 0; r < 100; ++r) {
    const kernels::SampleSettings& s = static_cast<const kernels::SampleRow*>(inputs[1].view.data)[r].settings;
    EXPECT_GE(s.temperature, 0);
    EXPECT_TRUE(s.top_p > 0 && s.top_p <= 1);
    EXPECT_TRUE(s.min_p >= 0 && s.min_p <= 1);
    EXPECT_GT(s.repetition_penalty, 0);
    greedy |= s.temperature == 0;
    filtered |= s.temperature > 0 && s.top_p < 1 && s.min_p > 0 && s.top_k > 0;
  }
  EXPECT_TRUE(greedy);
  EXPECT_TRUE(filtered);
}

}  // namespace
}  // namespace eadem::workloads
