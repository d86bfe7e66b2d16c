// SPDX-License-Identifier: Apache-2.0
//
// Every collective of the thread communicator against a loop over the buffers of all ranks in double; that ranks agree
// to the bit, that a run can be repeated, and that a failed or confused rank stops the others.
#include <gtest/gtest.h>

#include <atomic>
#include <bit>
#include <chrono>
#include <random>
#include <thread>

#include "eadem/core/device/cpu_device.h"
#include "eadem/distributed/thread_communicator.h"

namespace eadem::distributed {
namespace {

std::shared_ptr<Device> cpu() { return std::make_shared<CpuDevice>(DeviceOptions{.num_threads = 1}); }

struct Case {
  int ranks;
  int64_t count;
  DType dtype;
};

// Values of ranks and sizes that differ: the buffer of `rank` is the same whoever asks for it.
std::vector<double> values_of(const Case& c, int rank, int64_t count) {
  std::mt19937_64 random(static_cast<uint64_t>(rank * 1000003 + count));
  std::uniform_real_distribution<float> uniform(-4, 4);
  std::vector<double> values(static_cast<size_t>(count));
  for (double& value : values) {
    const float x = uniform(random);
    value = c.dtype == DType::f32 ? x : bf16_t::from_float(x).to_float();
  }
  return values;
}

Tensor tensor_of(const Case& c, const std::vector<double>& values) {
  Tensor result = Tensor::on_host(c.dtype, Shape{static_cast<int64_t>(values.size())});
  for (size_t i = 0; i < values.size(); ++i)
    if (c.dtype == DType::f32)
      result.view.as<float>()[i] = static_cast<float>(values[i]);
    else
      result.view.as<bf16_t>()[i] = bf16_t::from_float(static_cast<float>(values[i]));
  return result;
}

std::vector<double> doubles_of(const TensorView& view) {
  std::vector<double> result;
  for (int64_t i = 0; i < view.num_elements(); ++i)
    result.push_back(view.dtype == DType::f32 ? view.as<float>()[i] : view.as<bf16_t>()[i].to_float());
  return result;
}

// Sums in f32 of n terms: n - 1 roundings of partial sums, each at most the sum of magnitudes; then one to the dtype.
void expect_sum(const Case& c, const std::vector<std::vector<double>>& parts, const std::vector<double>& actual) {
  for (size_t i = 0; i < actual.size(); ++i) {
    double sum = 0, magnitude = 0;
    for (const std::vector<double>& part : parts) {
      sum += part[i];
      magnitude += std::abs(part[i]);
    }
    const double last = c.dtype == DType::f32 ? 0 : 0x1p-8 * (std::abs(sum) + 0x1p-20);
    EXPECT_NEAR(actual[i], sum, (c.ranks - 1) * 0x1p-24 * magnitude + last) << i;
  }
}

class Collectives : public testing::TestWithParam<std::tuple<int, int64_t, DType>> {
 protected:
  Case case_{std::get<0>(GetParam()), std::get<1>(GetParam()), std::get<2>(GetParam())};

  // Runs `body` on every rank and returns what each returned.
  std::vector<std::vector<double>> on_ranks(
      const std::function<std::vector<double>(Device&, Communicator&)>& body) const {
    std::vector<std::vector<double>> results(static_cast<size_t>(case_.ranks));
    run_mesh({.tp = case_.ranks}, [&](const Mesh& mesh) {
      const auto device = cpu();
      results[static_cast<size_t>(mesh.rank(MeshAxis::tp))] = body(*device, mesh.along(MeshAxis::tp));
    });
    return results;
  }
  std::vector<std::vector<double>> inputs(int64_t count) const {
    std::vector<std::vector<double>> result;
    for (int rank = 0; rank < case_.ranks; ++rank) result.push_back(values_of(case_, rank, count));
    return result;
  }
};

TEST_P(Collectives, AllReduceIsTheSumAndTheSameBitsOnEveryRank) {
  const auto run = [&] {
    return on_ranks([&](Device& device, Communicator& ranks) {
      const Tensor data = tensor_of(case_, values_of(case_, ranks.rank(), case_.count));
      ranks.all_reduce_sum(device, data.view);
      return doubles_of(data.view);
    });
  };
  const auto results = run();
  expect_sum(case_, inputs(case_.count), results[0]);
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
  EXPECT_EQ(run(), results);
}

TEST_P(Collectives, AllReduceAddsInRankOrder) {
  const auto results = on_ranks([&](Device& device, Communicator& ranks) {
    const Tensor data = tensor_of(case_, values_of(case_, ranks.rank(), case_.count));
    ranks.all_reduce_sum(device, data.view);
    return doubles_of(data.view);
  });
  const auto parts = inputs(case_.count);
  for (size_t i = 0; i < results[0].size(); ++i) {
    auto sum = static_cast<float>(parts[0][i]);
    for (size_t rank = 1; rank < parts.size(); ++rank) sum += static_cast<float>(parts[rank][i]);
    EXPECT_EQ(results[0][i], case_.dtype == DType::f32 ? sum : bf16_t::from_float(sum).to_float()) << i;
  }
}

TEST_P(Collectives, AllGatherJoinsTheParts) {
  const auto results = on_ranks([&](Device& device, Communicator& ranks) {
    const Tensor part = tensor_of(case_, values_of(case_, ranks.rank(), case_.count));
    const Tensor all = Tensor::on_host(case_.dtype, Shape{case_.ranks, case_.count});
    ranks.all_gather(device, all.view, part.view);
    return doubles_of(all.view);
  });
  std::vector<double> expected;
  for (const auto& part : inputs(case_.count)) expected.insert(expected.end(), part.begin(), part.end());
  for (const auto& result : results) EXPECT_EQ(result, expected);
}

TEST_P(Collectives, ReduceScatterIsAPartOfTheSum) {
  const int64_t count = case_.count, all = count * case_.ranks;
  const auto results = on_ranks([&](Device& device, Communicator& ranks) {
    const Tensor data = tensor_of(case_, values_of(case_, ranks.rank(), all));
    const Tensor part = Tensor::on_host(case_.dtype, Shape{count});
    ranks.reduce_scatter_sum(device, part.view, data.view);
    return doubles_of(part.view);
  });
  for (int rank = 0; rank < case_.ranks; ++rank) {
    std::vector<std::vector<double>> parts;
    for (const auto& whole : inputs(all))
      parts.emplace_back(whole.begin() + rank * count, whole.begin() + (rank + 1) * count);
    expect_sum(case_, parts, results[static_cast<size_t>(rank)]);
  }
}

TEST_P(Collectives, AllToAllTransposesRanksAndParts) {
  const int64_t count = case_.count, all = count * case_.ranks;
  const auto results = on_ranks([&](Device& device, Communicator& ranks) {
    const Tensor sent = tensor_of(case_, values_of(case_, ranks.rank(), all));
    const Tensor received = Tensor::on_host(case_.dtype, Shape{case_.ranks, count});
    ranks.all_to_all(device, received.view, sent.view);
    return doubles_of(received.view);
  });
  const auto sent = inputs(all);
  for (int to = 0; to < case_.ranks; ++to)
    for (int from = 0; from < case_.ranks; ++from)
      for (int64_t i = 0; i < count; ++i)
        EXPECT_EQ(results[static_cast<size_t>(to)][static_cast<size_t>(from * count + i)],
                  sent[static_cast<size_t>(from)][static_cast<size_t>(to * count + i)]);
}

// Every pair of ranks exchanges another number of elements, also none; parts of what is sent overlap, those of what is
// received lie apart, in the order of the ranks reversed.
TEST_P(Collectives, AllToAllPartsMovesRangesOfAnySize) {
  const int ranks = case_.ranks;
  const auto size = [&](int from, int to) { return case_.count * ((from + 2 * to) % 3) / 2; };
  const auto results = on_ranks([&](Device& device, Communicator& communicator) {
    const int own = communicator.rank();
    std::vector<PartRange> sent_parts, received_parts(static_cast<size_t>(ranks));
    for (int to = 0; to < ranks; ++to) sent_parts.push_back({to, size(own, to)});
    int64_t end = 1;  // and one element between parts
    for (int from = ranks - 1; from >= 0; --from) {
      received_parts[static_cast<size_t>(from)] = {end, size(from, own)};
      end += size(from, own) + 1;
    }
    const Tensor sent = tensor_of(case_, values_of(case_, own, case_.count + ranks));
    const Tensor received = tensor_of(case_, std::vector<double>(static_cast<size_t>(end), -7.0));
    communicator.all_to_all_parts(device, received.view, received_parts, sent.view, sent_parts);
    return doubles_of(received.view);
  });
  for (int to = 0; to < ranks; ++to) {
    std::vector<double> expected = {-7.0};
    for (int from = ranks - 1; from >= 0; --from) {
      const std::vector<double> values = values_of(case_, from, case_.count + ranks);
      expected.insert(expected.end(), values.begin() + to, values.begin() + to + size(from, to));
      expected.push_back(-7.0);
    }
    EXPECT_EQ(results[static_cast<size_t>(to)], expected) << to;
  }
}

TEST_P(Collectives, BroadcastGivesTheRootsValues) {
  for (int root = 0; root < case_.ranks; ++root) {
    const auto results = on_ranks([&](Device& device, Communicator& ranks) {
      const Tensor data = tensor_of(case_, values_of(case_, ranks.rank(), case_.count));
      ranks.broadcast(device, data.view, root);
      return doubles_of(data.view);
    });
    for (const auto& result : results) EXPECT_EQ(result, values_of(case_, root, case_.count));
  }
}

TEST_P(Collectives, SendAndRecvGoRoundARing) {
  if (case_.ranks == 1) GTEST_SKIP() << "nobody to send to";
  const auto results = on_ranks([&](Device& device, Communicator& ranks) {
    const Tensor own = tensor_of(case_, values_of(case_, ranks.rank(), case_.count));
    const Tensor other = Tensor::on_host(case_.dtype, Shape{case_.count});
    const int next = (ranks.rank() + 1) % ranks.size(), previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
    // Calls of a pair meet: somebody has to receive first.
    if (ranks.rank() == 0) {
      ranks.send(device, own.view, next);
      ranks.recv(device, other.view, previous);
    } else {
      ranks.recv(device, other.view, previous);
      ranks.send(device, own.view, next);
    }
    return doubles_of(other.view);
  });
  for (int rank = 0; rank < case_.ranks; ++rank)
    EXPECT_EQ(results[static_cast<size_t>(rank)],
              values_of(case_, (rank + case_.ranks - 1) % case_.ranks, case_.count));
}

INSTANTIATE_TEST_SUITE_P(Sizes, Collectives,
                         testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(0, 1, 3, 511, 512, 1025),
                                          testing::Values(DType::f32, DType::bf16)));

TEST(ThreadCommunicator, ManyCallsOneAfterAnother) {
  run_mesh({.tp = 3}, [](const Mesh& mesh) {
    const auto device = cpu();
    Communicator& ranks = mesh.along(MeshAxis::tp);
    Tensor data = Tensor::on_host(DType::f32, {5});
    for (int step = 0; step < 2000; ++step) {
      for (int i = 0; i < 5; ++i) data.view.as<float>()[i] = static_cast<float>(step + i * ranks.rank());
      ranks.all_reduce_sum(*device, data.view);
      for (int i = 0; i < 5; ++i) ASSERT_EQ(data.view.as<float>()[i], static_cast<float>(3 * step + 3 * i));
    }
  });
}

TEST(ThreadCommunicator, ARankThatThrowsStopsTheOthersAndItsErrorIsThrown) {
  for (int failing = 0; failing < 3; ++failing) {
    std::atomic<int> stopped = 0;
    try {
      run_mesh({.tp = 3}, [&](const Mesh& mesh) {
        if (mesh.rank(MeshAxis::tp) == failing) throw DataCorrupted("weights of rank {} are bad", failing);
        const auto device = cpu();
        const Tensor data = Tensor::on_host(DType::f32, {8});
        try {
          mesh.along(MeshAxis::tp).all_reduce_sum(*device, data.view);
        } catch (const RankFailed& error) {
          EXPECT_NE(std::string(error.what()).find("weights of rank"), std::string::npos) << error.what();
          ++stopped;
          throw;
        }
      });
      FAIL() << "nothing was thrown";
    } catch (const DataCorrupted& error) {
      EXPECT_EQ(error.what(), fmt::format("weights of rank {} are bad", failing));
    }
    EXPECT_EQ(stopped, 2);
  }
}

TEST(ThreadCommunicator, ASendOrRecvThatNobodyMeetsEndsWhenTheOtherFails) {
  for (bool sends : {false, true})
    EXPECT_THROW(run_mesh({.pp = 2},
                          [&](const Mesh& mesh) {
                            if (mesh.rank(MeshAxis::pp) == 0) throw NotFound("no file");
                            const auto device = cpu();
                            const Tensor data = Tensor::on_host(DType::f32, {8});
                            Communicator& ranks = mesh.along(MeshAxis::pp);
                            sends ? ranks.send(*device, data.view, 0) : ranks.recv(*device, data.view, 0);
                          }),
                 NotFound);
}

TEST(ThreadCommunicator, UnlikeCallsAreRefusedOnEveryRank) {
  std::atomic<int> refused = 0;
  const auto refuse = [&](const std::function<void(Device&, Communicator&)>& call) {
    refused = 0;
    EXPECT_THROW(run_mesh({.tp = 2},
                          [&](const Mesh& mesh) {
                            const auto device = cpu();
                            try {
                              call(*device, mesh.along(MeshAxis::tp));
                            } catch (const InvalidArgument&) {
                              ++refused;
                              throw;
                            }
                          }),
                 InvalidArgument);
  };
  refuse([](Device& device, Communicator& ranks) {  // sizes
    const Tensor data = Tensor::on_host(DType::f32, {4 + ranks.rank()});
    ranks.all_reduce_sum(device, data.view);
  });
  EXPECT_EQ(refused, 2);
  refuse([](Device& device, Communicator& ranks) {  // collectives
    const Tensor data = Tensor::on_host(DType::f32, {4});
    ranks.rank() == 0 ? ranks.all_reduce_sum(device, data.view) : ranks.broadcast(device, data.view, 0);
  });
  EXPECT_EQ(refused, 2);
  refuse([](Device& device, Communicator& ranks) {  // a dtype that nobody can add
    const Tensor data = Tensor::on_host(DType::i32, {4});
    ranks.all_reduce_sum(device, data.view);
  });
  EXPECT_EQ(refused, 2);
  refuse([](Device& device, Communicator& ranks) {  // sizes that do not fit on one rank stop both
    const Tensor part = Tensor::on_host(DType::f32, {4}), all = Tensor::on_host(DType::f32, {7 + ranks.rank()});
    ranks.all_gather(device, all.view, part.view);
  });
  EXPECT_GE(refused, 1);
  refuse([](Device& device, Communicator& ranks) {  // parts of two ranks that do not fit
    const Tensor data = Tensor::on_host(DType::f32, {8}), other = Tensor::on_host(DType::f32, {8});
    const PartRange sent[] = {{0, 1}, {1, 2}}, received[] = {{0, 1}, {1, 2 + ranks.rank()}};
    ranks.all_to_all_parts(device, other.view, received, data.view, sent);
  });
  EXPECT_EQ(refused, 2);
  refuse([](Device& device, Communicator& ranks) {  // parts that lie outside of their tensor
    const Tensor data = Tensor::on_host(DType::f32, {8}), other = Tensor::on_host(DType::f32, {8});
    const PartRange sent[] = {{0, 4}, {5, 4}}, received[] = {{0, 4}, {4, 4}};
    ranks.all_to_all_parts(device, other.view, received, data.view, sent);
  });
  EXPECT_GE(refused, 1);
  refuse([](Device& device, Communicator& ranks) {  // what is sent is not what is expected
    const Tensor data = Tensor::on_host(DType::f32, {4 + ranks.rank()});
    ranks.rank() == 0 ? ranks.send(device, data.view, 1) : ranks.recv(device, data.view, 0);
  });
}

TEST(ThreadCommunicator, AMeshHasAGroupPerAxis) {
  const MeshShape shape{.dp = 2, .tp = 2, .pp = 2, .ep = 1};
  std::atomic<int> ranks = 0;
  run_mesh(shape, [&](const Mesh& mesh) {
    ++ranks;
    EXPECT_EQ(mesh.num_ranks(), 8);
    EXPECT_EQ(mesh.size(MeshAxis::ep), 1);
    const auto device = cpu();
    for (MeshAxis axis : {MeshAxis::dp, MeshAxis::tp, MeshAxis::pp, MeshAxis::ep}) {
      // The ranks of a group differ in this axis alone: the others' places are the same for all of them.
      Tensor places = Tensor::on_host(DType::f32, {3});
      const int others[] = {mesh.rank(MeshAxis::dp), mesh.rank(MeshAxis::tp), mesh.rank(MeshAxis::pp)};
      for (int i = 0; i < 3; ++i) places.view.as<float>()[i] = static_cast<float>(others[i]);
      mesh.along(axis).all_reduce_sum(*device, places.view);
      for (int i = 0; i < 3; ++i) {
        const bool own = i == static_cast<int>(axis);
        EXPECT_EQ(places.view.as<float>()[i], static_cast<float>(own ? 1 : others[i] * mesh.size(axis)));
      }
    }
  });
  EXPECT_EQ(ranks, 8);
  EXPECT_THROW(run_mesh({.dp = 0}, [](const Mesh&) {}), InvalidArgument);
}

TEST(PartOf, CoversTheWholeInOrderWithPartsThatDifferByOneAtMost) {
  for (int64_t whole : {0, 1, 2, 3, 131, 512, 32000})
    for (int ranks : {1, 2, 3, 4, 7}) {
      int64_t next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const PartRange part = part_of(whole, ranks, rank);
        EXPECT_EQ(part.begin, next);
        EXPECT_TRUE(part.size == whole / ranks || part.size == whole / ranks + 1);
        next += part.size;
      }
      EXPECT_EQ(next, whole);
    }
}

}  // namespace
}  // namespace eadem::distributed
