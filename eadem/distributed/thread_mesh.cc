// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <mutex>
#include <thread>

#include "eadem/distributed/thread_communicator.h"

namespace eadem::distributed {

namespace {

// The place of rank `index` on the mesh; tp is fastest.
MeshShape place_of(const MeshShape& shape, int index) {
  MeshShape place;
  place.tp = index % shape.tp;
  index /= shape.tp;
  place.ep = index % shape.ep;
  index /= shape.ep;
  place.pp = index % shape.pp;
  place.dp = index / shape.pp;
  return place;
}

int index_of(const MeshShape& shape, const MeshShape& place) {
  return ((place.dp * shape.pp + place.pp) * shape.ep + place.ep) * shape.tp + place.tp;
}

// The smallest index among the ranks that differ from `place` along `axis` alone: the name of their group.
int group_of(const MeshShape& shape, MeshShape place, MeshAxis axis) {
  int* const coordinates[] = {&place.dp, &place.tp, &place.pp, &place.ep};
  *coordinates[static_cast<size_t>(axis)] = 0;
  return index_of(shape, place);
}

}  // namespace

void run_mesh(const MeshShape& shape, const std::function<void(const Mesh&)>& body) {
  if (shape.dp < 1 || shape.tp < 1 || shape.pp < 1 || shape.ep < 1)
    throw InvalidArgument("a mesh of dp {} x tp {} x pp {} x ep {}; expected at least one each", shape.dp, shape.tp,
                          shape.pp, shape.ep);
  // groups[axis][rank]: set for the first rank of each group.
  std::array<std::vector<std::unique_ptr<ThreadGroup>>, kNumMeshAxes> groups;
  std::vector<Mesh> meshes;
  for (int index = 0; index < shape.num_ranks(); ++index) {
    const MeshShape place = place_of(shape, index);
    std::array<std::shared_ptr<Communicator>, kNumMeshAxes> communicators;
    for (size_t a = 0; a < kNumMeshAxes; ++a) {
      const auto axis = static_cast<MeshAxis>(a);
      if (shape[axis] == 1) continue;
      groups[a].resize(static_cast<size_t>(shape.num_ranks()));
      std::unique_ptr<ThreadGroup>& group = groups[a][static_cast<size_t>(group_of(shape, place, axis))];
      if (group == nullptr) group = std::make_unique<ThreadGroup>(shape[axis]);
      communicators[a] = group->communicator(place[axis]);
    }
    meshes.emplace_back(std::move(communicators));
  }

  std::mutex mutex;
  std::exception_ptr first, consequence;  // guarded by mutex
  const auto fail_all = [&](const std::string& reason) {
    for (auto& axis : groups)
      for (auto& group : axis)
        if (group != nullptr) group->fail(reason);
  };
  const auto run = [&](int index) {
    try {
      body(meshes[static_cast<size_t>(index)]);
    } catch (const RankFailed&) {
      const std::scoped_lock lock(mutex);
      if (consequence == nullptr) consequence = std::current_exception();
    } catch (const std::exception& error) {
      {
        const std::scoped_lock lock(mutex);
        if (first == nullptr) first = std::current_exception();
      }
      fail_all(fmt::format("rank {} failed: {}", index, error.what()));
    }
  };
  std::vector<std::thread> threads;
  for (int index = 0; index < shape.num_ranks(); ++index) threads.emplace_back(run, index);
  for (std::thread& thread : threads) thread.join();
  if (first != nullptr) std::rethrow_exception(first);
  if (consequence != nullptr) std::rethrow_exception(consequence);
}

}  // namespace eadem::distributed
