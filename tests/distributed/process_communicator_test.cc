// SPDX-License-Identifier: Apache-2.0
//
// Processes give what threads give, to the bit, in every collective (communicator_test.cc compares threads with loops
// in double); a rank that is killed, stopped, leaves or never joins makes the others throw.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "eadem/core/device/cpu_device.h"
#include "eadem/distributed/process_communicator.h"
#include "eadem/distributed/thread_communicator.h"

namespace eadem::distributed {
namespace {

using Bytes = std::string;

// Runs `body` in a child for each rank; returns what each returned.
std::vector<Bytes> run_processes(int ranks, const std::function<Bytes(const ProcessGroup&, int)>& body,
                                 const std::function<void(const std::vector<pid_t>&)>& meanwhile = {},
                                 ProcessGroupOptions options = {}) {
  const ProcessGroup group(ranks, options);
  std::vector<int> readers;
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    int ends[2];
    EXPECT_EQ(pipe(ends), 0);
    const pid_t child = fork();
    if (child == 0) {
      Bytes result;
      try {
        result = body(group, rank);
      } catch (const Error& error) {
        result = fmt::format("{}: {}", error.kind(), error.what());
      }
      size_t written = 0;
      while (written < result.size()) {
        const ssize_t count = write(ends[1], result.data() + written, result.size() - written);
        if (count <= 0) break;
        written += static_cast<size_t>(count);
      }
      _exit(0);
    }
    close(ends[1]);
    children.push_back(child);
    readers.push_back(ends[0]);
  }
  if (meanwhile) meanwhile(children);
  std::vector<Bytes> results;
  for (int reader : readers) {
    Bytes result;
    char buffer[4096];
    for (ssize_t count; (count = read(reader, buffer, sizeof buffer)) > 0;)
      result.append(buffer, static_cast<size_t>(count));
    close(reader);
    results.push_back(result);
  }
  for (pid_t child : children) waitpid(child, nullptr, 0);
  return results;
}

// Calls every collective on values that depend on the rank; the bytes of all results.
Bytes all_calls(Communicator& ranks, DType dtype, int64_t count) {
  const auto device = std::make_shared<CpuDevice>(DeviceOptions{.num_threads = 1});
  const int64_t all = count * ranks.size();
  const auto tensor = [&](int64_t n) {
    std::mt19937 random(static_cast<unsigned>(ranks.rank() * 1000 + n));
    Tensor result = Tensor::on_host(dtype, Shape{n});
    for (int64_t i = 0; i < n; ++i) {
      const float value = std::uniform_real_distribution<float>(-4, 4)(random);
      if (dtype == DType::f32)
        result.view.as<float>()[i] = value;
      else
        result.view.as<bf16_t>()[i] = bf16_t::from_float(value);
    }
    return result;
  };
  Bytes bytes;
  const auto keep = [&](const Tensor& x) {
    bytes.append(static_cast<const char*>(x.view.data), static_cast<size_t>(x.view.size_bytes()));
  };
  const Tensor sum = tensor(count), gathered = tensor(all), scattered = tensor(count), exchanged = tensor(all);
  ranks.all_reduce_sum(*device, sum.view);
  ranks.all_gather(*device, gathered.view, tensor(count).view);
  ranks.reduce_scatter_sum(*device, scattered.view, tensor(all).view);
  ranks.all_to_all(*device, exchanged.view, tensor(all).view);
  for (const Tensor* x : {&sum, &gathered, &scattered, &exchanged}) keep(*x);
  // Another number of elements between any two ranks.
  std::vector<PartRange> sent_parts, received_parts;
  int64_t end = 0;
  for (int other = 0; other < ranks.size(); ++other) {
    const auto size = [&](int from, int to) { return count * ((from + 2 * to) % 3) / 2; };
    sent_parts.push_back({other * count / 3, size(ranks.rank(), other)});
    received_parts.push_back({end, size(other, ranks.rank())});
    end += received_parts.back().size;
  }
  const Tensor parts = tensor(end);
  ranks.all_to_all_parts(*device, parts.view, received_parts, tensor(3 * count).view, sent_parts);
  keep(parts);
  for (int root = 0; root < ranks.size(); ++root) {
    const Tensor data = tensor(count);
    ranks.broadcast(*device, data.view, root);
    keep(data);
  }
  if (ranks.size() == 1) return bytes;
  const Tensor own = tensor(count), other = tensor(count);
  const int next = (ranks.rank() + 1) % ranks.size(), previous = (ranks.rank() + ranks.size() - 1) % ranks.size();
  if (ranks.rank() == 0) ranks.send(*device, own.view, next);
  ranks.recv(*device, other.view, previous);
  if (ranks.rank() != 0) ranks.send(*device, own.view, next);
  keep(other);
  return bytes;
}

TEST(ProcessCommunicator, GivesTheBitsOfThreads) {
  for (int size : {1, 2, 3, 4})
    for (DType dtype : {DType::f32, DType::bf16})
      for (int64_t count : {0, 1, 513, 300001}) {  // the last takes several chunks
        std::vector<Bytes> expected(static_cast<size_t>(size));
        run_mesh({.tp = size}, [&](const Mesh& mesh) {
          expected[static_cast<size_t>(mesh.rank(MeshAxis::tp))] = all_calls(mesh.along(MeshAxis::tp), dtype, count);
        });
        const auto actual = run_processes(
            size, [&](const ProcessGroup& group, int rank) { return all_calls(*group.join(rank), dtype, count); });
        EXPECT_TRUE(actual == expected) << size << " ranks, " << count << " elements";
      }
}

Bytes sum_for_ever(const ProcessGroup& group, int rank) {
  const auto ranks = group.join(rank);
  const auto device = std::make_shared<CpuDevice>(DeviceOptions{.num_threads = 1});
  const Tensor data = Tensor::on_host(DType::f32, {8});
  while (true) {
    std::memset(data.view.data, 0, 32);
    ranks->all_reduce_sum(*device, data.view);
  }
}

TEST(ProcessCommunicator, AKilledOrStoppedRankEndsTheOthers) {
  for (int signal_number : {SIGKILL, SIGSTOP}) {
    const auto meanwhile = [&](const std::vector<pid_t>& children) {
      std::this_thread::sleep_for(std::chrono::milliseconds(500));
      kill(children[1], signal_number);
      waitpid(children[0], nullptr, 0);
      waitpid(children[2], nullptr, 0);
      kill(children[1], SIGKILL);
    };
    const auto results = run_processes(3, sum_for_ever, meanwhile);
    for (size_t rank : {0, 2}) {
      EXPECT_EQ(results[rank].find("RankFailed: rank 1 (process "), 0U) << results[rank];
      EXPECT_NE(results[rank].find("died or hangs"), Bytes::npos) << results[rank];
    }
    // The process can make a new group.
    const auto again = run_processes(
        2, [](const ProcessGroup& group, int rank) { return all_calls(*group.join(rank), DType::f32, 3); });
    EXPECT_FALSE(again[0].empty());
    EXPECT_EQ(again[0].find("RankFailed"), Bytes::npos);
  }
}

TEST(ProcessCommunicator, ARankThatLeavesOrDoesNotJoinIsNamed) {
  const auto leaves = run_processes(2, [](const ProcessGroup& group, int rank) {
    if (rank == 0) return sum_for_ever(group, rank);
    group.join(rank);
    return Bytes();
  });
  EXPECT_EQ(leaves[0], "RankFailed: rank 1 has left the group");
  const auto missing = run_processes(
      3, [](const ProcessGroup& group, int rank) { return rank == 1 ? Bytes() : sum_for_ever(group, rank); }, {},
      {.join_limit_s = 0.5});
  for (size_t rank : {0, 2}) EXPECT_EQ(missing[rank], "RankFailed: rank 1 of 3 did not join within 0.5 s");
}

TEST(ProcessCommunicator, UnlikeCallsAreRefusedOnEveryRank) {
  const auto results = run_processes(2, [](const ProcessGroup& group, int rank) {
    const auto ranks = group.join(rank);
    const auto device = std::make_shared<CpuDevice>(DeviceOptions{.num_threads = 1});
    const Tensor data = Tensor::on_host(DType::f32, {4 + rank});
    ranks->all_reduce_sum(*device, data.view);
    return Bytes();
  });
  for (const Bytes& result : results) EXPECT_EQ(result.find("InvalidArgument: rank "), 0U) << result;
}

TEST(ProcessCommunicator, UnlikePartsAreRefusedOnEveryRank) {
  const auto results = run_processes(3, [](const ProcessGroup& group, int rank) {
    const auto ranks = group.join(rank);
    const auto device = std::make_shared<CpuDevice>(DeviceOptions{.num_threads = 1});
    const Tensor data = Tensor::on_host(DType::f32, {6}), other = Tensor::on_host(DType::f32, {6});
    PartRange sent[] = {{0, 1}, {1, 1}, {2, 1}}, received[] = {{0, 1}, {1, 1}, {2, 1}};
    if (rank == 2) received[0].size = 2;
    ranks->all_to_all_parts(*device, other.view, received, data.view, sent);
    return Bytes();
  });
  for (const Bytes& result : results)
    EXPECT_EQ(result, "InvalidArgument: all_to_all_parts: rank 0 sends 1 elements to rank 2, which expects 2");
}

}  // namespace
}  // namespace eadem::distributed
