// SPDX-License-Identifier: Apache-2.0
#include "eadem/distributed/process_communicator.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <ctime>
#include <new>
#include <thread>
#include <vector>

#include "eadem/core/machine/topology.h"
#include "eadem/distributed/checked_communicator.h"
#include "eadem/distributed/rank_sum.h"

namespace eadem::distributed {

namespace {

constexpr int64_t kSlotBytes = 1 << 20;  // what a rank shows at a time; two of them take turns
constexpr int64_t kMailBytes = 1 << 16;
constexpr int kMaxRanks = 64;
constexpr double kSignsPerSecond = 10;
// Longer than ranks of one step wait for each other, shorter than anything a person notices.
constexpr auto kSpinTime = std::chrono::microseconds(200);
constexpr int kSpinsPerLook = 64;  // at the clock
// Ranks of a step of decode that other programs disturb wait longer than that. Until then a rank that waits offers its
// processor, and goes on at once when it is its turn; one that sleeps goes on when the system has woken it, which takes
// longer than most exchanges.
constexpr auto kYieldTime = std::chrono::milliseconds(5);

using Word = std::atomic<uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4);

enum class Call : uint32_t { all_reduce, all_gather, reduce_scatter, all_to_all, all_to_all_parts, broadcast, send };
constexpr std::string_view kCallNames[] = {
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_parts", "broadcast", "send"};

// A number that ranks wait for.
struct Signal {
  Word value{0}, sleepers{0};
  uint32_t load() const { return value.load(); }
};

// The collective that a rank is calling. The other ranks compare it with theirs.
struct CallOffer {
  Call call = Call::all_reduce;
  DType dtype = DType::f32;
  int64_t count = 0;
  int root = 0;
  bool operator==(const CallOffer&) const = default;
  std::string text() const {
    return fmt::format("{} of {} {}, root {}", kCallNames[static_cast<size_t>(call)], count, dtype_name(dtype), root);
  }
};

enum Presence : uint32_t { absent, present, left };

struct alignas(64) RankState {
  Word presence{absent};
  Word signs{0};    // of life
  Signal meetings;  // at which the rank has arrived
  int32_t pid = 0;
  CallOffer offers[2];
};

struct alignas(64) Mailbox {
  Signal sent, received;  // chunks
  CallOffer offer;
};

constexpr uint64_t kMagic = 0x7175'6f72'676d'6465;

struct Header {
  uint64_t magic = kMagic;
  int32_t size = 0;  // ranks
  ProcessGroupOptions options;
  Word failed{0};  // 0: no, 1: the reason is being written, 2: it stands there
  char reason[1000] = {};
};

void relax_processor() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Until the signal has another value than this, or for so long.
void sleep_on(Signal& signal, uint32_t value, double seconds) {
  timespec limit{};
  limit.tv_nsec = static_cast<long>(seconds * 1e9);
  signal.sleepers.fetch_add(1);
  syscall(SYS_futex, &signal.value, FUTEX_WAIT, value, &limit, nullptr, 0);
  signal.sleepers.fetch_sub(1);
}
// A rank counts itself before the system compares the value: either it is counted here, or it sees the new value.
void set_and_wake(Signal& signal, uint32_t value) {
  signal.value.store(value, std::memory_order_seq_cst);
  if (signal.sleepers.load(std::memory_order_seq_cst) > 0)
    syscall(SYS_futex, &signal.value, FUTEX_WAKE, kMaxRanks, nullptr, nullptr, 0);
}

}  // namespace

struct ProcessGroup::Shared {
  // Makes the memory of a new group.
  Shared(int num_ranks, const ProcessGroupOptions& limits) : Shared(num_ranks) {
    descriptor = memfd_create("eadem ranks", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    // Pages that nobody touches take no memory.
    if (descriptor < 0 || ftruncate(descriptor, bytes) != 0) refuse_memory();
    // A mapping of a file that is cut would end its process.
    fcntl(descriptor, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    map();
    new (header) Header;
    header->size = size;
    header->options = limits;
    for (int i = 0; i < size; ++i) new (ranks + i) RankState;
    for (int i = 0; i < size * size; ++i) new (mailboxes + i) Mailbox;
  }
  // Opens that of another process.
  Shared(int num_ranks, int inherited) : Shared(num_ranks) {
    descriptor = inherited;
    map();
  }
  ~Shared() {
    if (base != nullptr) munmap(base, static_cast<size_t>(bytes));
    if (descriptor >= 0) close(descriptor);
  }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

 private:
  explicit Shared(int num_ranks) : size(num_ranks), spins(Topology::of_this_process().default_threads() >= num_ranks) {
    const auto after = [](int64_t end, int64_t alignment) { return (end + alignment - 1) / alignment * alignment; };
    const int64_t n = size, state = sizeof(RankState), mail = sizeof(Mailbox);
    states_begin = after(sizeof(Header), 64);
    mail_begin = after(states_begin + n * state, 64);
    data_begin = after(mail_begin + n * n * mail, 4096);
    bytes = data_begin + n * 2 * kSlotBytes + n * n * kMailBytes;
  }
  void map() {
    void* memory =
        mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (memory == MAP_FAILED) refuse_memory();
    base = static_cast<std::byte*>(memory);
    header = reinterpret_cast<Header*>(base);
    ranks = reinterpret_cast<RankState*>(base + states_begin);
    mailboxes = reinterpret_cast<Mailbox*>(base + mail_begin);
    slots = base + data_begin;
  }
  [[noreturn]] void refuse_memory() const {
    throw OutOfMemory("{} bytes to share between {} ranks: {}", bytes, size, std::strerror(errno));
  }

 public:
  std::byte* slot(int rank, uint32_t turn) const { return slots + (int64_t{rank} * 2 + turn % 2) * kSlotBytes; }
  std::byte* mail(int from, int to) const {
    return slots + int64_t{size} * 2 * kSlotBytes + (int64_t{from} * size + to) * kMailBytes;
  }
  Mailbox& mailbox(int from, int to) const { return mailboxes[from * size + to]; }

  void fail(const std::string& reason) const {
    uint32_t none = 0;
    if (!header->failed.compare_exchange_strong(none, 1)) return;
    const size_t length = std::min(reason.size(), sizeof(header->reason) - 1);
    std::memcpy(header->reason, reason.data(), length);
    header->failed.store(2);
  }
  void throw_if_failed() const {
    if (header->failed.load() == 0) return;
    // The rank that failed writes its reason at once, unless it is killed while it does.
    constexpr int kMostMs = 1000;
    for (int ms = 0; ms < kMostMs && header->failed.load() == 1; ++ms)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    throw RankFailed("{}", header->failed.load() == 2 ? header->reason : "another rank failed");
  }

  int size;
  bool spins;  // ranks that share a processor must not hold it while they wait
  int64_t states_begin = 0, mail_begin = 0, data_begin = 0, bytes = 0;
  int descriptor = -1;
  std::byte* base = nullptr;
  Header* header = nullptr;
  RankState* ranks = nullptr;
  Mailbox* mailboxes = nullptr;
  std::byte* slots = nullptr;
};

class ProcessCommunicator final : public CheckedCommunicator {
 public:
  ProcessCommunicator(std::shared_ptr<ProcessGroup::Shared> shared, int rank)
      : shared_(std::move(shared)), rank_(rank), process_(getpid()), seen_(static_cast<size_t>(shared_->size)) {
    uint32_t free = absent;
    if (!own().presence.compare_exchange_strong(free, present))
      throw InvalidArgument("rank {} of {} has joined already", rank, size());
    own().pid = process_;
    signs_ = std::thread([this] {
      while (!ends_.load()) {
        own().signs.fetch_add(1);
        sleep_on(ends_, 0, 1 / kSignsPerSecond);
      }
    });
  }
  ~ProcessCommunicator() override {
    if (getpid() != process_) {  // it was forked, and has no such thread
      signs_.detach();
      return;
    }
    set_and_wake(ends_, 1);
    signs_.join();
    own().presence.store(left);
  }

  void wait_for_all() {
    const auto limit =
        std::chrono::steady_clock::now() + std::chrono::duration<double>(shared_->header->options.join_limit_s);
    for (int rank = 0; rank < size(); ++rank)
      while (state(rank).presence.load() == absent) {
        shared_->throw_if_failed();
        if (std::chrono::steady_clock::now() > limit) {
          shared_->fail(fmt::format("rank {} of {} did not join within {} s", rank, size(),
                                    shared_->header->options.join_limit_s));
          shared_->throw_if_failed();
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    meet();
  }

  int rank() const override { return rank_; }
  int size() const override { return shared_->size; }

  void all_reduce_sum(Device&, const TensorView& data) override {
    expect_summed(data.dtype);
    in_chunks({Call::all_reduce, data.dtype, data.num_elements()}, kSlotBytes, data, [&](int64_t first, int64_t n) {
      show(0, data, first, n);
      return [&, first, n](uint32_t turn) { sum(turn, 0, data, first, n); };
    });
  }
  void all_gather(Device&, const TensorView& gathered, const TensorView& part) override {
    expect_times_size("all_gather", gathered, part);
    in_chunks({Call::all_gather, part.dtype, part.num_elements()}, kSlotBytes, part, [&](int64_t first, int64_t n) {
      show(0, part, first, n);
      return [&, first, n](uint32_t turn) {
        for (int rank = 0; rank < size(); ++rank) take(rank, turn, 0, gathered, rank * part.num_elements() + first, n);
      };
    });
  }
  void reduce_scatter_sum(Device&, const TensorView& part, const TensorView& data) override {
    expect_times_size("reduce_scatter", data, part);
    expect_summed(data.dtype);
    parts({Call::reduce_scatter, part.dtype, part.num_elements()}, data,
          [&](uint32_t turn, int64_t first, int64_t n) { sum(turn, rank_ * n, part, first, n); });
  }
  void all_to_all(Device&, const TensorView& received, const TensorView& sent) override {
    if (sent.num_elements() % size() != 0 || received.num_elements() != sent.num_elements())
      refuse(fmt::format("all_to_all of {} into {} on {} ranks", to_string(sent), to_string(received), size()));
    const int64_t count = sent.num_elements() / size();
    parts({Call::all_to_all, sent.dtype, count}, sent, [&](uint32_t turn, int64_t first, int64_t n) {
      for (int rank = 0; rank < size(); ++rank) take(rank, turn, rank_ * n, received, rank * count + first, n);
    });
  }
  // A slot begins with the sizes of the parts that its rank sends and expects, from which every rank sees how many
  // chunks there are and whether all parts fit.
  void all_to_all_parts(Device&, const TensorView& received, std::span<const PartRange> received_parts,
                        const TensorView& sent, std::span<const PartRange> sent_parts) override {
    expect_parts(received, received_parts);
    expect_parts(sent, sent_parts);
    expect_same_dtype(received, sent);
    const int64_t bytes = static_cast<int64_t>(dtype_size(sent.dtype)), head = 2 * size() * int64_t{sizeof(int64_t)};
    const int64_t chunk = (kSlotBytes - head) / size() / bytes;
    // What `from` shows to rank `to`, which has elements from `first` on of a part.
    const auto place = [&](int from, uint32_t turn, int to) {
      return shared_->slot(from, turn) + head + to * chunk * bytes;
    };
    const auto elements = [&](const PartRange& part, int64_t first) { return std::min(chunk, part.size - first); };
    int64_t most = 1;  // elements of the largest part; known after the first chunk
    for (int64_t first = 0; first < most; first += chunk) {
      const uint32_t number = turn();
      auto* sizes = reinterpret_cast<int64_t*>(shared_->slot(rank_, number));
      for (int rank = 0; rank < size(); ++rank) {
        const PartRange& part = sent_parts[static_cast<size_t>(rank)];
        sizes[rank] = part.size;
        sizes[size() + rank] = received_parts[static_cast<size_t>(rank)].size;
        if (const int64_t n = elements(part, first); n > 0)
          copy(place(rank_, number, rank), at(sent, part.begin + first), n * bytes);
      }
      meet_over({Call::all_to_all_parts, sent.dtype}, number);
      if (first == 0) most = largest_part(number);
      for (int rank = 0; rank < size(); ++rank) {
        const PartRange& part = received_parts[static_cast<size_t>(rank)];
        if (const int64_t n = elements(part, first); n > 0)
          copy(at(received, part.begin + first), place(rank, number, rank_), n * bytes);
      }
    }
  }
  void broadcast(Device&, const TensorView& data, int root) override {
    expect_rank(root);
    in_chunks({Call::broadcast, data.dtype, data.num_elements(), root}, kSlotBytes, data,
              [&](int64_t first, int64_t n) {
                if (rank_ == root) show(0, data, first, n);
                return [&, first, n](uint32_t turn) {
                  if (rank_ != root) take(root, turn, 0, data, first, n);
                };
              });
  }
  void send(Device&, const TensorView& data, int to) override {
    expect_other_rank(to);
    Mailbox& mailbox = shared_->mailbox(rank_, to);
    each_mail(data, [&](std::byte* bytes, int64_t count) {
      mailbox.offer = {Call::send, data.dtype, data.num_elements()};
      copy(shared_->mail(rank_, to), bytes, count);
      const uint32_t number = mailbox.sent.load() + 1;
      set_and_wake(mailbox.sent, number);
      wait(mailbox.received, number, to);
    });
  }
  void recv(Device&, const TensorView& data, int from) override {
    expect_other_rank(from);
    Mailbox& mailbox = shared_->mailbox(from, rank_);
    each_mail(data, [&](std::byte* bytes, int64_t count) {
      const uint32_t number = mailbox.received.load() + 1;
      wait(mailbox.sent, number, from);
      const CallOffer expected{Call::send, data.dtype, data.num_elements()};
      if (mailbox.offer != expected)
        refuse(fmt::format("rank {} makes a {}; rank {} expects a {}", from, mailbox.offer.text(), rank_,
                           expected.text()));
      copy(bytes, shared_->mail(from, rank_), count);
      set_and_wake(mailbox.received, number);
    });
  }

 private:
  struct Seen {
    uint32_t signs = 0;
    int unchanged = 0;  // looks without a new sign
  };

  RankState& state(int rank) const { return shared_->ranks[rank]; }
  RankState& own() const { return state(rank_); }
  uint32_t turn() const { return own().meetings.load() + 1; }

  static void copy(void* to, const void* from, int64_t size_bytes) {
    if (size_bytes > 0) std::memcpy(to, from, static_cast<size_t>(size_bytes));
  }
  static std::byte* at(const TensorView& view, int64_t element) {
    return static_cast<std::byte*>(view.data) + element * element_bytes(view);
  }
  static int64_t element_bytes(const TensorView& view) {
    return view.num_elements() == 0 ? 1 : view.size_bytes() / view.num_elements();
  }

  // Elements [first, first + n) of `view` into this rank's slot at element `place`, and from another rank's.
  void show(int64_t place, const TensorView& view, int64_t first, int64_t n) const {
    const int64_t bytes = element_bytes(view);
    copy(shared_->slot(rank_, turn()) + place * bytes, at(view, first), n * bytes);
  }
  void take(int rank, uint32_t turn, int64_t place, const TensorView& view, int64_t first, int64_t n) const {
    const int64_t bytes = element_bytes(view);
    copy(at(view, first), shared_->slot(rank, turn) + place * bytes, n * bytes);
  }
  void sum(uint32_t turn, int64_t place, const TensorView& result, int64_t first, int64_t n) const {
    const auto add = [&]<typename T>(T) {
      const auto part = [&](int rank) { return reinterpret_cast<const T*>(shared_->slot(rank, turn)) + place; };
      sum_parts<T>(0, n, size(), part, [&](int64_t begin, const T* values, int64_t count) {
        std::copy_n(values, count, static_cast<T*>(result.data) + first + begin);
      });
    };
    with_summed_dtype(result.dtype, add);
  }

  // Calls prepare(first, n) for each chunk of `view`, meets, and calls what it returned. A slot is written again two
  // meetings later, when all ranks have read it: they have arrived at the meeting between.
  template <typename Prepare>
  void in_chunks(const CallOffer& offer, int64_t chunk_bytes, const TensorView& view, const Prepare& prepare) {
    const int64_t chunk = chunk_bytes / element_bytes(view);
    for (int64_t first = 0; first == 0 || first < offer.count; first += chunk) {
      const uint32_t number = turn();
      const auto finish = prepare(first, std::min(chunk, offer.count - first));
      meet_over(offer, number);
      finish(number);
    }
  }
  // Meets, and throws InvalidArgument unless all ranks call the same.
  void meet_over(const CallOffer& offer, uint32_t number) {
    own().offers[number % 2] = offer;
    meet();
    for (int rank = 0; rank < size(); ++rank)
      if (const CallOffer& other = state(rank).offers[number % 2]; !(other == offer))
        throw InvalidArgument("rank {} calls {}; rank {} calls {}", rank_, offer.text(), rank, other.text());
  }
  // Of all that the ranks exchange, from the sizes at the beginning of their slots. Every rank throws InvalidArgument
  // when any two disagree.
  int64_t largest_part(uint32_t turn) const {
    const auto sizes = [&](int rank) { return reinterpret_cast<const int64_t*>(shared_->slot(rank, turn)); };
    int64_t most = 0;
    for (int from = 0; from < size(); ++from)
      for (int to = 0; to < size(); ++to) {
        const int64_t sent = sizes(from)[to], received = sizes(to)[size() + from];
        if (sent != received) throw InvalidArgument("{}", unlike_parts(from, sent, to, received));
        most = std::max(most, sent);
      }
    return most;
  }
  // Shows a chunk of every rank's part of `from`.
  template <typename Finish>
  void parts(const CallOffer& offer, const TensorView& from, const Finish& finish) {
    in_chunks(offer, kSlotBytes / size(), from, [&](int64_t first, int64_t n) {
      for (int rank = 0; rank < size(); ++rank) show(rank * n, from, rank * offer.count + first, n);
      return [&, first, n](uint32_t turn) { finish(turn, first, n); };
    });
  }
  template <typename Task>
  void each_mail(const TensorView& data, const Task& task) const {
    require_own_process();
    for (int64_t first = 0; first == 0 || first < data.size_bytes(); first += kMailBytes)
      task(static_cast<std::byte*>(data.data) + first, std::min(kMailBytes, data.size_bytes() - first));
  }

  void require_own_process() const {
    if (getpid() != process_)
      throw RankFailed("rank {} is process {}; process {} was forked from it and is no rank", rank_, process_,
                       getpid());
  }

  void meet() {
    require_own_process();
    shared_->throw_if_failed();
    const uint32_t number = turn();
    set_and_wake(own().meetings, number);
    for (int rank = 0; rank < size(); ++rank) wait(state(rank).meetings, number, rank);
  }

  // Waits until `signal`, which `rank` sets, has reached `value`.
  void wait(Signal& signal, uint32_t value, int rank) {
    const auto reached = [&](uint32_t now) { return static_cast<int32_t>(now - value) >= 0; };
    const auto start = std::chrono::steady_clock::now();
    do {
      for (int spin = 0; spin < kSpinsPerLook; ++spin) {
        if (reached(signal.load())) return;
        relax_processor();
      }
    } while (shared_->spins && std::chrono::steady_clock::now() - start < kSpinTime);
    while (shared_->spins && std::chrono::steady_clock::now() - start < kYieldTime) {
      if (reached(signal.load())) return;
      std::this_thread::yield();
    }
    for (Seen& seen : seen_) seen.unchanged = 0;
    auto look = std::chrono::steady_clock::now();
    for (uint32_t now = signal.load(); !reached(now); now = signal.load()) {
      shared_->throw_if_failed();
      const bool has_left = state(rank).presence.load() == left;
      if (has_left && !reached(signal.load())) shared_->fail(fmt::format("rank {} has left the group", rank));
      if (has_left) continue;
      sleep_on(signal, now, 0.1);
      // Looks are counted, not seconds: a group that was stopped as a whole and goes on has missed none.
      if (std::chrono::steady_clock::now() - look < std::chrono::milliseconds(100)) continue;
      look = std::chrono::steady_clock::now();
      watch();
    }
  }

  void watch() {
    for (int rank = 0; rank < size(); ++rank) {
      Seen& seen = seen_[static_cast<size_t>(rank)];
      const uint32_t signs = state(rank).signs.load();
      if (rank == rank_ || state(rank).presence.load() != present || signs != seen.signs) {
        seen = {signs, 0};
      } else if (++seen.unchanged >= shared_->header->options.silence_limit_s * kSignsPerSecond) {
        shared_->fail(fmt::format("rank {} (process {}) died or hangs: no sign of life for {} s", rank, state(rank).pid,
                                  shared_->header->options.silence_limit_s));
      }
    }
  }

  [[noreturn]] void refuse(const std::string& reason) const override {
    shared_->fail(reason);
    throw InvalidArgument("{}", reason);
  }

  std::shared_ptr<ProcessGroup::Shared> shared_;
  int rank_;
  pid_t process_;
  std::vector<Seen> seen_;
  Signal ends_;
  std::thread signs_;
};

ProcessGroup::ProcessGroup(int size, ProcessGroupOptions options) {
  if (size < 1 || size > kMaxRanks) throw InvalidArgument("a group of {} processes; expected 1 to {}", size, kMaxRanks);
  shared_ = std::make_shared<Shared>(size, options);
}

ProcessGroup::ProcessGroup(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}

ProcessGroup ProcessGroup::open(int descriptor) {
  alignas(Header) std::byte bytes[sizeof(Header)];
  struct stat status {};
  const bool read = fstat(descriptor, &status) == 0 && pread(descriptor, bytes, sizeof bytes, 0) == std::ssize(bytes);
  const auto* const header = reinterpret_cast<const Header*>(bytes);
  if (read && header->magic == kMagic && header->size >= 1 && header->size <= kMaxRanks) {
    auto shared = std::make_shared<Shared>(header->size, descriptor);
    if (shared->bytes == status.st_size) return ProcessGroup(std::move(shared));
    shared->descriptor = -1;  // not ours
  }
  throw InvalidArgument("descriptor {} is no group of ranks", descriptor);
}

ProcessGroup::~ProcessGroup() = default;

int ProcessGroup::descriptor() const { return shared_->descriptor; }

std::shared_ptr<Communicator> ProcessGroup::join(int rank) const {
  if (rank < 0 || rank >= shared_->size) throw InvalidArgument("there is no rank {} of {}", rank, shared_->size);
  auto result = std::make_shared<ProcessCommunicator>(shared_, rank);
  result->wait_for_all();
  return result;
}

void ProcessGroup::fail(const std::string& reason) { shared_->fail(reason); }

}  // namespace eadem::distributed
