// SPDX-License-Identifier: Apache-2.0
//
// Topologies from directories like the kernel's, and the seats they give.
#include "eadem/core/machine/topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "eadem/core/error.h"
#include "eadem/core/machine/rank_processors.h"
#include "tests/core/fake_system.h"

namespace eadem {
namespace {

std::vector<int> nodes_of(const std::vector<Seat>& seats) {
  std::vector<int> nodes;
  for (const Seat& seat : seats) nodes.push_back(seat.node);
  return nodes;
}

std::vector<int> processors_of(const std::vector<Seat>& seats) {
  std::vector<int> ids;
  for (const Seat& seat : seats) ids.push_back(seat.processor);
  return ids;
}

TEST(Topology, ReadsTwoNodes) {
  const FakeSystem system;
  system.two_nodes();
  const Topology topology = system.read(up_to(8));
  EXPECT_EQ(topology.num_nodes(), 2);
  EXPECT_EQ(topology.num_cores(), 8);
  EXPECT_TRUE(topology.notes().empty());
  ASSERT_EQ(topology.processors().size(), 8u);
  EXPECT_EQ(topology.processors()[5], (Processor{5, 1, 5, 0}));
}

TEST(Topology, SpreadsThreadsOverTheNodes) {
  const FakeSystem system;
  system.two_nodes();
  const Topology topology = system.read(up_to(8));
  EXPECT_EQ(processors_of(topology.seats(1, 1)), std::vector<int>({0}));
  EXPECT_EQ(processors_of(topology.seats(2, 2)), std::vector<int>({0, 4}));
  EXPECT_EQ(processors_of(topology.seats(8, 8)), up_to(8));
  // Half of a machine decodes, all of it prefills: both are spread.
  EXPECT_EQ(processors_of(topology.seats(4, 8)), std::vector<int>({0, 1, 4, 5, 2, 3, 6, 7}));
  EXPECT_EQ(nodes_of(topology.seats(4, 8)), std::vector<int>({0, 0, 1, 1, 0, 0, 1, 1}));
  // An odd thread goes to the first node.
  EXPECT_EQ(nodes_of(topology.seats(3, 3)), std::vector<int>({0, 0, 1}));
}

TEST(Topology, MoreThreadsThanProcessorsHaveNoPlace) {
  const FakeSystem system;
  system.two_nodes();
  const std::vector<Seat> seats = system.read(up_to(8)).seats(4, 9);
  EXPECT_EQ(seats, std::vector<Seat>(9, Seat{-1, 0}));
}

TEST(Topology, KeepsToTheProcessorsAllowed) {
  const FakeSystem system;
  system.two_nodes();
  const Topology topology = system.read({6, 1, 7, 6});
  ASSERT_EQ(topology.processors().size(), 3u);
  EXPECT_EQ(topology.num_nodes(), 2);
  // Node 1 has two of the three.
  EXPECT_EQ(processors_of(topology.seats(3, 3)), std::vector<int>({1, 6, 7}));
  // All of one node: there is one, whatever its number.
  EXPECT_EQ(system.read({4, 5}).num_nodes(), 1);
  EXPECT_EQ(system.read({4, 5}).processors()[0].node, 0);
}

TEST(Topology, ThreadsOfACoreComeLast) {
  // The usual numbering: processor n + 4 shares the core of n. Nodes alternate.
  const FakeSystem system;
  system.node(0, "0,2,4,6");
  system.node(1, "1,3,5,7");
  for (int id = 0; id < 8; ++id) system.siblings(id, fmt::format("{},{}", id % 4, id % 4 + 4));
  const Topology topology = system.read(up_to(8));
  EXPECT_EQ(topology.num_cores(), 4);
  EXPECT_EQ(topology.processors()[6], (Processor{6, 0, 2, 1}));
  EXPECT_EQ(processors_of(topology.seats(4, 4)), std::vector<int>({0, 2, 1, 3}));
  EXPECT_EQ(processors_of(topology.seats(4, 8)), std::vector<int>({0, 2, 1, 3, 4, 6, 5, 7}));
  EXPECT_EQ(processors_of(topology.seats(5, 5)), std::vector<int>({0, 2, 4, 1, 3}));
  // The second processor of a core whose first one is not ours counts as a core.
  EXPECT_EQ(system.read({4, 5}).num_cores(), 2);
}

TEST(Topology, LeavesOutOfflineProcessorsAndNodesWithoutAny) {
  const FakeSystem system;
  system.node(0, "0-1");
  system.node(1, "");  // memory alone
  system.node(3, "2-3");
  system.write("cpu/online", "0,2-3\n");
  for (int id : {0, 2, 3}) system.siblings(id, std::to_string(id));
  system.write("node/possible", "0-3\n");  // no node
  system.write("node/node", "");           // nor this
  system.write("node/node1x", "");
  const Topology topology = system.read(up_to(4));
  EXPECT_TRUE(topology.notes().empty());
  EXPECT_EQ(topology.num_nodes(), 2);
  ASSERT_EQ(topology.processors().size(), 3u);
  EXPECT_EQ(topology.processors()[1], (Processor{2, 1, 2, 0}));
}

TEST(Topology, UnevenNodesGetThreadsByTheirCores) {
  const FakeSystem system;
  system.node(0, "0-5");
  system.node(1, "6-7");
  for (int id = 0; id < 8; ++id) system.siblings(id, std::to_string(id));
  EXPECT_EQ(nodes_of(system.read(up_to(8)).seats(4, 4)), std::vector<int>({0, 0, 0, 1}));
}

// If files are missing or make no sense, there is one node, a core to each processor, and a note that names the file.
TEST(Topology, AssumesOneNodeWhereThereAreNone) {
  const FakeSystem system;
  const Topology topology = system.read({3, 5});
  EXPECT_EQ(topology.num_nodes(), 1);
  EXPECT_EQ(topology.num_cores(), 2);
  ASSERT_EQ(topology.notes().size(), 2u);
  EXPECT_NE(topology.notes()[0].find(system.root() + "/node"), std::string::npos) << topology.notes()[0];
  EXPECT_NE(topology.notes()[1].find("cpu3/topology"), std::string::npos) << topology.notes()[1];
  EXPECT_EQ(processors_of(topology.seats(2, 2)), std::vector<int>({3, 5}));
}

TEST(Topology, HostileListsAreRefused) {
  for (const std::string list : {"0-", "-3", "0-3,", ",0", "3-0", "0-99999999", "99999999999999999999", "0;1", "zero",
                                 "0x3", "0-3 4", "0--3", "4294967296", "65536"}) {
    const FakeSystem system;
    system.two_nodes();
    system.node(1, list);
    const Topology topology = system.read(up_to(8));
    EXPECT_EQ(topology.num_nodes(), 1) << list;
    EXPECT_EQ(topology.processors().size(), 8u) << list;
    ASSERT_EQ(topology.notes().size(), 1u) << list;
    EXPECT_NE(topology.notes()[0].find("node1/cpulist: '" + list), std::string::npos) << topology.notes()[0];

    // Lists of siblings are read, too.
    system.two_nodes();
    system.siblings(2, list);
    EXPECT_EQ(system.read(up_to(8)).num_nodes(), 2) << list;
    EXPECT_EQ(system.read(up_to(8)).num_cores(), 8) << list;
    EXPECT_EQ(system.read(up_to(8)).notes().size(), 1u) << list;
  }
}

TEST(Topology, ContradictionsAreRefused) {
  const FakeSystem twice, nowhere, alone, offline;
  for (const FakeSystem* system : {&twice, &nowhere, &alone, &offline}) system->two_nodes();
  twice.node(1, "3-7");
  EXPECT_EQ(twice.read(up_to(8)).num_nodes(), 1);
  EXPECT_NE(twice.read(up_to(8)).notes().at(0).find("processor 3 is in node 0 as well"), std::string::npos);
  nowhere.node(1, "4-6");
  EXPECT_EQ(nowhere.read(up_to(8)).num_nodes(), 1);
  EXPECT_NE(nowhere.read(up_to(8)).notes().at(0).find("processor 7 is in no node"), std::string::npos);
  alone.siblings(5, "0-1");  // without itself
  EXPECT_EQ(alone.read(up_to(8)).num_cores(), 8);
  EXPECT_NE(alone.read(up_to(8)).notes().at(0).find("cpu5"), std::string::npos);
  offline.write("cpu/online", "100-103\n");
  EXPECT_EQ(offline.read(up_to(8)).processors().size(), 8u);
  EXPECT_NE(offline.read(up_to(8)).notes().at(0).find("cpu/online"), std::string::npos);
}

TEST(Topology, LongFilesAreReadInPart) {
  const FakeSystem system;
  system.two_nodes();
  std::string list = "4";
  for (int i = 0; i < 200000; ++i) list += ",4";
  system.node(1, list);
  EXPECT_EQ(system.read(up_to(8)).num_nodes(), 1);
  EXPECT_EQ(system.read(up_to(8)).notes().size(), 1u);
}

TEST(Topology, ReadsThisMachine) {
  const Topology topology = Topology::of_this_process();
  std::set<int> ids;
  for (const Processor& processor : topology.processors()) {
    ids.insert(processor.id);
    EXPECT_GE(processor.node, 0);
    EXPECT_LT(processor.node, topology.num_nodes());
  }
  const std::vector<int> allowed = allowed_processors();
  EXPECT_TRUE(std::includes(allowed.begin(), allowed.end(), ids.begin(), ids.end()));
  EXPECT_GE(topology.num_cores(), 1);
  const int all = static_cast<int>(ids.size());
  std::set<int> taken;
  for (const Seat& seat : topology.seats(1, all)) taken.insert(seat.processor);
  EXPECT_EQ(taken, ids) << "as many threads as processors: one each";
}

// Ranks divide the seats: each processor is one rank's, and a rank of a node's size lies in one node.
TEST(Topology, RanksDivideThreadsAndProcessors) {
  const FakeSystem system;
  system.two_nodes();
  const Topology topology = system.read(up_to(8));
  const auto processors = [&](int threads, int prefill, int ranks, int rank) {
    return rank_threads(topology, threads, prefill, ranks, rank).processors;
  };
  EXPECT_EQ(processors(0, 0, 2, 0), std::vector<int>({0, 1, 2, 3}));
  EXPECT_EQ(processors(0, 0, 2, 1), std::vector<int>({4, 5, 6, 7}));
  for (const auto& [threads, prefill, ranks] :
       {std::tuple{0, 0, 1}, {0, 0, 3}, {5, 0, 2}, {2, 7, 2}, {3, 8, 3}, {6, 4, 4}, {1, 0, 4}}) {
    SCOPED_TRACE(fmt::format("{} threads, {} of prefill, {} ranks", threads, prefill, ranks));
    int decode = 0, of_prefill = 0;
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) {
      const RankThreads own = rank_threads(topology, threads, prefill, ranks, rank);
      EXPECT_EQ(std::ssize(own.processors), std::max(own.decode, own.prefill));
      decode += own.decode;
      of_prefill += own.prefill;
      all.insert(all.end(), own.processors.begin(), own.processors.end());
    }
    const int wanted = threads > 0 ? threads : 8;
    EXPECT_EQ(decode, std::max(ranks, wanted));
    EXPECT_EQ(of_prefill, std::max(ranks, prefill > 0 ? prefill : wanted));
    EXPECT_EQ(std::set<int>(all.begin(), all.end()).size(), all.size()) << "no processor is two ranks'";
  }
  const RankThreads many = rank_threads(topology, 10, 0, 2, 1);
  EXPECT_EQ(many.decode, 5);
  EXPECT_TRUE(many.processors.empty()) << "more threads than processors";
}

}  // namespace
}  // namespace eadem
