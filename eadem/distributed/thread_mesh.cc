// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <mutex>
#include <thread>

#include "eadem/distributed/mesh_places.h"
#include "eadem/distributed/thread_communicator.h"

namespace eadem::distributed {

void run_mesh(const MeshShape& shape, const std::function<void(const Mesh&)>& body) {
  check_mesh(shape);
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
