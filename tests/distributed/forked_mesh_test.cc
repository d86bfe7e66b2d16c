// SPDX-License-Identifier: Apache-2.0
//
// A mesh of forked processes: ranks meet along their axes, and all hear of one that fails.
#include "eadem/distributed/forked_mesh.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <array>

#include "eadem/core/device/cpu_device.h"
#include "tests/distributed/mesh_sums.h"
#include "tests/support/refusal.h"

namespace eadem::distributed {
namespace {

using test::sum_over_mesh;

// The numbers of the ranks along an axis.
std::vector<float> along(const Mesh& mesh, MeshAxis axis, int rank) {
  CpuDevice device({.num_threads = 1});
  auto own = static_cast<float>(rank);
  std::vector<float> all(static_cast<size_t>(mesh.size(axis)));
  mesh.along(axis).all_gather(device, TensorView(all.data(), DType::f32, Shape{std::ssize(all)}),
                              TensorView(&own, DType::f32, Shape{1}));
  return all;
}

TEST(ForkedMesh, RanksMeetAlongEachAxis) {
  for (const MeshShape& shape : {MeshShape{},
                                 {.dp = 2},
                                 {.tp = 3},
                                 {.dp = 2, .tp = 2},
                                 {.dp = 2, .tp = 3, .pp = 1},
                                 {.dp = 2, .tp = 1, .pp = 2, .ep = 2}}) {
    SCOPED_TRACE(fmt::format("dp {} tp {} pp {} ep {}", shape.dp, shape.tp, shape.pp, shape.ep));
    const int ranks = shape.num_ranks();
    const auto expected = static_cast<float>(ranks * (ranks - 1) / 2);
    const auto live = [&](const Mesh& mesh, int rank) {
      if (sum_over_mesh(mesh, rank) != expected) throw InvalidArgument("rank {} sums up something else", rank);
      // tp is fastest.
      if (along(mesh, MeshAxis::tp, rank)[0] != static_cast<float>(rank - rank % shape.tp))
        throw InvalidArgument("rank {} has other ranks along tp", rank);
    };
    const ForkedMesh mesh(shape, live);
    EXPECT_EQ(mesh.mesh().num_ranks(), ranks);
    live(mesh.mesh(), 0);
    sum_over_mesh(Mesh(), 0);
  }
}

TEST(ForkedMesh, AnExceptionReachesRanksAlongEveryAxis) {
  const ForkedMesh mesh({.dp = 2, .tp = 2}, [](const Mesh& own, int rank) {
    for (int sums = 0;; ++sums) {
      // No axis of rank 0 has this rank. Rank 0 has its mesh when a sum is made.
      if (rank == 3 && sums > 0) throw OutOfMemory("7 bytes are too many");
      sum_over_mesh(own, rank);
    }
  });
  EXPECT_HAS(test::refusal([&] {
               for (;;) sum_over_mesh(mesh.mesh(), 0);
             }),
             fmt::format("RankFailed: rank 3 (process {}): 7 bytes are too many", mesh.processes()[2]));
}

TEST(ForkedMesh, AKilledRankIsNamedAlongEveryAxis) {
  const ForkedMesh mesh({.dp = 2, .tp = 2}, [](const Mesh& own, int rank) {
    for (;;) sum_over_mesh(own, rank);
  });
  sum_over_mesh(mesh.mesh(), 0);
  kill(mesh.processes()[2], SIGKILL);
  EXPECT_HAS(test::refusal([&] {
               for (;;) sum_over_mesh(mesh.mesh(), 0);
             }),
             fmt::format("RankFailed: rank 3 (process {}) died: signal 9", mesh.processes()[2]));
}

TEST(ForkedMesh, AnEmptyAxisIsRefused) {
  EXPECT_HAS(test::refusal([] { ForkedMesh mesh({.dp = 0, .tp = 2}, [](const Mesh&, int) {}); }),
             "a mesh of dp 0 x tp 2");
}

}  // namespace
}  // namespace eadem::distributed
