// Random correct programs on both sides of HOCCL_MIN_BYTES: several ranks, threads with a
// communicator each, and everything that could make two ranks count differently. None of it is ever
// failed; a planted mismatch fails the two ranks it concerns, and nobody else's communicator.

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "test/e2e/rank/rank.h"

namespace e2e {
namespace {

constexpr std::size_t kLargest = 200'000, kThreshold = 65536;
constexpr unsigned char kUntouched = 0xa5;
constexpr std::size_t kBuffers = 6;
void* const kNowhere = reinterpret_cast<void*>(std::uintptr_t{4096});

/// One transfer, as all ranks know it.
struct Transfer {
  int from, to, stream;
  std::size_t bytes;
  std::uint64_t seed;
};

/// What one thread does with its communicator.
class Storm {
 public:
  Storm(const Rank& rank, unsigned thread)
      : rank_(rank),
        thread_(thread),
        common_(seed(0)),
        own_(seed(static_cast<unsigned>(rank.rank) + 1)) {
    for (CUstream& stream : streams_) stream = newStream();
    // Freed when all threads are through: a free waits for the context.
    for (std::size_t i = 0; i < kBuffers; ++i) {
      outs_.push_back(std::make_unique<Buffer>(kLargest, 1));
      ins_.push_back(std::make_unique<Buffer>(kLargest, 3));
    }
  }

  void run(ncclComm_t comm, int rounds) {
    for (int round = 0; round < rounds; ++round) {
      if (bothSides_) disturb(comm);
      exchange(comm);
      if (common_() % 16 == 0) child(comm);
    }
    ncclResult_t state = ncclSuccess;
    REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &state));
    REQUIRE(state == ncclSuccess, "a correct program was failed with {}: {}",
            static_cast<int>(state), nccl().ncclGetLastError(comm));
  }

  /// A send and its receive on different sides of the threshold.
  void mismatch(ncclComm_t comm) {
    const int from = pick(common_, rank_.ranks);
    const int to = (from + 1 + pick(common_, rank_.ranks - 1)) % rank_.ranks;
    const bool sendIsLarge = common_() % 2 == 0, grouped = common_() % 2 == 0;
    if (rank_.rank == from || rank_.rank == to) {
      const bool send = rank_.rank == from;
      const std::size_t bytes =
          send == sendIsLarge ? kThreshold + common_() % 1000 : 1 + common_() % 60000;
      nap(own_() % 300'000);
      if (grouped) REQUIRE_NCCL(nccl().ncclGroupStart());
      ncclResult_t result =
          call(send, send ? *outs_[0] : *ins_[0], bytes, send ? to : from, comm, 0);
      if (grouped) {
        const ncclResult_t ended = nccl().ncclGroupEnd();
        if (result == ncclSuccess) result = ended;
      }
      if (result == ncclSuccess || result == ncclInProgress) result = awaitError(comm, 8000);
      say("planted", std::to_string(static_cast<int>(result)));
      say("error", nccl().ncclGetLastError(comm));
    }
    rank_.barrier("planted");
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    for (CUstream stream : streams_) awaitStream(stream, "after the abort");
  }

 private:
  using Random = std::mt19937;

  [[nodiscard]] std::uint32_t seed(unsigned whose) const {
    return static_cast<std::uint32_t>(std::stoul(rank_.argument("seed", "1"))) * 7919 +
           thread_ * 104'729 + whose * 31;
  }
  static int pick(Random& random, int of) {
    return static_cast<int>(random() % static_cast<unsigned>(of));
  }
  static void nap(std::uint32_t us) { ::usleep(us); }

  static std::size_t bytes(Random& random) {
    switch (random() % 10) {
      case 0:
        return 0;
      case 1:
        return kThreshold - random() % 2;  // the last small and the first steered one
      case 2:
      case 3:
      case 4:
        return kThreshold + random() % (kLargest - kThreshold);
      default:
        return 1 + random() % (kThreshold - 1);
    }
  }

  ncclResult_t call(bool send, const Buffer& buffer, std::size_t size, int peer, ncclComm_t comm,
                    int stream) const {
    return send ? nccl().ncclSend(buffer.data(), size, ncclUint8, peer, comm, streams_[stream])
                : nccl().ncclRecv(buffer.data(), size, ncclUint8, peer, comm, streams_[stream]);
  }

  /// Calls of this rank alone that do not happen.
  void disturb(ncclComm_t comm) {
    const int peer = pick(own_, rank_.ranks);
    const bool send = own_() % 2 == 0;
    switch (own_() % 12) {
      case 0:
        return nap(own_() % 200'000);
      case 1: {  // a group that fails, by NCCL's hand or by HOCCL's
        REQUIRE_NCCL(nccl().ncclGroupStart());
        REQUIRE_NCCL(call(send, *outs_[0], 1 + own_() % 999, peer, comm, 0));
        const bool ours = own_() % 2 == 0;
        const ncclResult_t bad = nccl().ncclSend(kNowhere, ours ? kThreshold : 1,
                                                 ours ? ncclUint8 : static_cast<ncclDataType_t>(99),
                                                 (rank_.rank + 1) % rank_.ranks, comm, streams_[0]);
        REQUIRE(bad != ncclSuccess, "a bad call passed");
        REQUIRE_NCCL(call(!send, *outs_[0], 1 + own_() % 999, peer, comm, 0));
        REQUIRE(nccl().ncclGroupEnd() != ncclSuccess, "a bad group passed");
        return;
      }
      case 2: {
        auto* const end = reinterpret_cast<decltype(&ncclGroupSimulateEnd)>(
            ::dlsym(RTLD_DEFAULT, "ncclGroupSimulateEnd"));
        ncclSimInfo_t info = NCCL_SIM_INFO_INITIALIZER;
        REQUIRE_NCCL(nccl().ncclGroupStart());
        for (int i = 0; i < 3; ++i) {
          REQUIRE_NCCL(call(own_() % 2, *outs_[0], 1 + own_() % (2 * kThreshold), peer, comm, i));
        }
        nap(own_() % 100'000);
        REQUIRE_NCCL(end(&info));
        return;
      }
      case 3: {
        const ncclResult_t bad = nccl().ncclSend(
            outs_[0]->data(), 1, static_cast<ncclDataType_t>(99), peer, comm, streams_[0]);
        REQUIRE(bad != ncclSuccess, "a bad call passed");
        return;
      }
      default:
        return;
    }
  }

  void exchange(ncclComm_t comm) {
    const bool grouped = common_() % 2 == 0;
    std::vector<Transfer> transfers;
    for (std::uint32_t n = grouped ? 1 + common_() % kBuffers : 1; n > 0; --n) {
      Transfer t{};
      t.from = pick(common_, rank_.ranks);
      t.to = pick(common_, rank_.ranks);
      t.stream = pick(common_, 3);
      t.bytes = bytes(common_);
      t.seed = seedOf(t.from, ++number_, thread_ + 1);
      transfers.push_back(t);
    }
    const auto mine = [&](const Transfer& t) { return t.from == rank_.rank || t.to == rank_.rank; };
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      if (transfers[i].from == rank_.rank) outs_[i]->fill(transfers[i].seed, streams_[0]);
      if (transfers[i].to == rank_.rank) ins_[i]->poison(streams_[0]);
    }
    awaitStream(streams_[0], "prepared");
    const bool held = own_() % 10 == 0;
    if (held) gates_.emplace_back(std::make_unique<Gate>())->hold(streams_[own_() % 3]);
    // To oneself only within a group.
    if (grouped) REQUIRE_NCCL(nccl().ncclGroupStart());
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      const Transfer& t = transfers[i];
      if (!mine(t)) continue;
      if (own_() % 30 == 0) nap(own_() % 150'000);
      const bool self = t.from == t.to;
      if (self) REQUIRE_NCCL(nccl().ncclGroupStart());
      if (t.from == rank_.rank) REQUIRE_NCCL(call(true, *outs_[i], t.bytes, t.to, comm, t.stream));
      if (t.to == rank_.rank) REQUIRE_NCCL(call(false, *ins_[i], t.bytes, t.from, comm, t.stream));
      if (self) REQUIRE_NCCL(nccl().ncclGroupEnd());
    }
    if (grouped) REQUIRE_NCCL(nccl().ncclGroupEnd());
    if (held) nap(own_() % 150'000);
    if (held) gates_.back()->open();
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      if (transfers[i].to == rank_.rank) ins_[i]->fetch(streams_[transfers[i].stream]);
    }
    // Not always: the next calls come while these are under way. Those use the same buffers on
    // other streams, so their preparation has to wait.
    for (CUstream stream : streams_) awaitStream(stream, "a correct program", 40000);
    for (std::size_t i = 0; i < transfers.size(); ++i) {
      if (transfers[i].to == rank_.rank) check(*ins_[i], transfers[i]);
    }
  }

  void check(const Buffer& in, const Transfer& t) {
    std::vector<unsigned char> image(kLargest, kUntouched);
    makePattern(t.seed, image.data(), t.bytes);
    REQUIRE(std::memcmp(image.data(), in.fetched(), kLargest) == 0,
            "thread {}: transfer {} of {} bytes from {} to {}: wrong bytes", thread_, t.seed,
            t.bytes, t.from, t.to);
  }

  /// A communicator that comes out of this one, and ends in one of the ways there are.
  void child(ncclComm_t parent) {
    ncclComm_t comm = nullptr;
    const std::uint32_t kind = common_() % 3;
    REQUIRE_NCCL(nccl().ncclCommSplit(parent, 1, rank_.rank, &comm, nullptr));
    for (int i = 0; i < 3; ++i) exchange(comm);
    if (kind == 0) {
      REQUIRE_NCCL(nccl().ncclCommDestroy(comm));
      return;
    }
    // An abort may end what a peer has not received yet.
    rank_.barrier("child" + std::to_string(thread_) + "-" + std::to_string(number_));
    // Receives that nobody serves, long enough for them to be told.
    if (own_() % 2 == 0) {
      // Refused where a peer has ended the communicator already.
      (void)call(false, *ins_[0], kThreshold, (rank_.rank + 1) % rank_.ranks, comm, 0);
      nap(own_() % 200'000);
    }
    if (kind == 2) REQUIRE_NCCL(nccl().ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    REQUIRE_NCCL(nccl().ncclCommAbort(comm));
    for (CUstream stream : streams_) awaitStream(stream, "after the child's abort");
  }

  const Rank& rank_;
  unsigned thread_;
  /// Else what would not happen is steered, or what HOCCL refuses is not.
  bool bothSides_ = rank_.argument("bothSides", "1") == "1";
  Random common_, own_;
  CUstream streams_[3];
  std::vector<std::unique_ptr<Buffer>> outs_, ins_;
  std::vector<std::unique_ptr<Gate>> gates_;
  std::uint64_t number_ = 0;
};

void thresholdStorm(const Rank& rank) {
  const int rounds = std::stoi(rank.argument("rounds", "60"));
  const auto count = static_cast<unsigned>(std::stoul(rank.argument("threads", "2")));
  const bool planted = rank.argument("planted", "0") == "1";
  std::vector<ncclComm_t> comms;
  std::vector<std::unique_ptr<Storm>> storms;
  for (unsigned t = 0; t < count; ++t) {
    comms.push_back(rank.communicator("t" + std::to_string(t)));
    storms.push_back(std::make_unique<Storm>(rank, t));
  }
  rank.barrier("made");
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < count; ++t) {
    threads.emplace_back([&, t] {
      useDevice();
      storms[t]->run(comms[t], rounds);
      if (planted && t == 0) storms[t]->mismatch(comms[t]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  sayStats();
  rank.barrier("done");
  for (unsigned t = planted ? 1 : 0; t < count; ++t) REQUIRE_NCCL(nccl().ncclCommDestroy(comms[t]));
}

}  // namespace

const std::vector<Scenario> kThresholdStormScenarios = {{"thresholdStorm", thresholdStorm}};

}  // namespace e2e
