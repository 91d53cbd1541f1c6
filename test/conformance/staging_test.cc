// Device memory through staging (HOCCL_NET_STAGING=1), on the emulated driver: bytes,
// registrations, ends. Device pointers cannot be touched by the CPU there, so whoever takes one for
// host memory crashes.

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <thread>

#include "test/conformance/emulated_gpu.h"
#include "test/conformance/session.h"

namespace conformance {
namespace {

constexpr int kDevicePointer = hoccl::nccl_abi::kDevicePointer;

class Staging : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Versions, Staging, testing::ValuesIn(kVersions),
                         [](const auto& info) { return "v" + std::to_string(info.param); });

std::string sessionName() { return "staging-" + std::to_string(::getpid()); }

/// Registered device memory in places of their own, of which messages are cut. Host memory where a
/// rank is not staged.
class Arena {
 public:
  static constexpr std::size_t kPlace = (1 << 20) + 300000;  // seams of 2 MiB lie anywhere in it

  enum class Kind { Allocation, Segments, Host };
  Arena(EmulatedGpu& gpu, Net& net, void* comm, Kind kind, std::size_t places)
      : gpu_(gpu), net_(net), comm_(comm), kind_(kind) {
    bytes_ = (places * kPlace + (2 << 20) - 1) / (2 << 20) * (2 << 20);
    if (kind == Kind::Host) {
      host_.resize(bytes_);
      base_ = host_.data();
    } else {
      base_ =
          static_cast<unsigned char*>(kind == Kind::Segments ? gpu.map(bytes_) : gpu.alloc(bytes_));
      REQUIRE_OK(net.registerMemory(comm, base_, bytes_, kDevicePointer, &handle_));
      REQUIRE(handle_ != nullptr);
    }
    for (std::size_t i = places; i-- > 0;) free_.push_back(i);
  }
  void end() {
    if (kind_ == Kind::Host) return;
    REQUIRE_OK(net_.deregisterMemory(comm_, handle_));
    if (kind_ == Kind::Segments) gpu_.unmap(base_, bytes_);
    if (kind_ == Kind::Allocation) gpu_.free(base_);
  }
  [[nodiscard]] bool full() const { return free_.empty(); }
  [[nodiscard]] std::size_t room() const { return free_.size(); }
  unsigned char* take() {
    const std::size_t place = free_.back();
    free_.pop_back();
    return base_ + place * kPlace;
  }
  void giveBack(unsigned char* place) {
    free_.push_back(static_cast<std::size_t>(place - base_) / kPlace);
    std::swap(free_.front(), free_.back());
  }
  void write(unsigned char* to, const std::vector<unsigned char>& bytes) const {
    if (kind_ != Kind::Host) return gpu_.write(to, bytes.data(), bytes.size());
    std::copy(bytes.begin(), bytes.end(), to);
  }
  [[nodiscard]] std::vector<unsigned char> read(const unsigned char* from,
                                                std::size_t bytes) const {
    if (kind_ != Kind::Host) return gpu_.read(from, bytes);
    return {from, from + bytes};
  }
  [[nodiscard]] void* handle() const { return handle_; }

 private:
  EmulatedGpu& gpu_;
  Net& net_;
  void* comm_;
  Kind kind_;
  std::size_t bytes_;
  unsigned char* base_ = nullptr;
  std::vector<unsigned char> host_;
  void* handle_ = nullptr;
  std::vector<std::size_t> free_;
};

struct Message {
  int tag;
  std::size_t bytes, room, offset;
  std::uint64_t seed;
};

std::vector<Message> makePlan(std::uint64_t seed, std::size_t count) {
  std::mt19937_64 random(seed);
  std::vector<Message> plan;
  for (std::size_t i = 0; i < count; ++i) {
    Message message{};
    message.tag = static_cast<int>(random() % 3);
    switch (random() % 8) {
      case 0:
        message.bytes = random() % 3;
        break;
      case 1:
        message.bytes = random() % 20000;
        break;
      case 2:  // around a part
        message.bytes = (256 << 10) - 1 + random() % 3;
        break;
      case 3:
        message.bytes = 128 << 10;
        break;
      default:
        message.bytes = random() % 1000000;
    }
    message.offset = random() % 3000;
    message.room = message.bytes + (random() % 3 == 0 ? random() % 100000 : 0);
    message.seed = seed * 1000003 + i;
    plan.push_back(message);
  }
  return plan;
}

struct Open {
  void* request = nullptr;
  std::vector<std::size_t> messages;
  std::vector<unsigned char*> places;
};

void runSender(Net& net, void* comm, Arena& arena, std::uint64_t seed, std::size_t count) {
  const std::vector<Message> plan = makePlan(seed, count);
  std::mt19937_64 random(seed ^ 0x5e4d);
  std::vector<Open> open;
  std::size_t next = 0;
  const double start = now();
  while (next < plan.size() || !open.empty()) {
    REQUIRE_SAYING(now() - start < 40, "sender stuck at " + std::to_string(next));
    if (random() % 16 == 0) ::usleep(static_cast<useconds_t>(random() % 300));
    if (next < plan.size() && !arena.full() && random() % 4 != 0) {
      const Message& message = plan[next];
      Open send;
      send.messages = {next};
      send.places = {arena.take()};
      std::vector<unsigned char> bytes(message.bytes);
      fill(bytes.data(), bytes.size(), message.seed);
      arena.write(send.places[0] + message.offset, bytes);
      do {
        REQUIRE_OK(net.send(comm, send.places[0] + message.offset, message.bytes, message.tag,
                            &send.request, arena.handle()));
        for (Open& other : open) {  // "later" needs the others to be asked for
          if (send.request != nullptr || other.request == nullptr) continue;
          int done = 0, size = -1;
          REQUIRE_OK(net.test(other.request, &done, &size));
          if (done != 0) other.request = nullptr;
        }
      } while (send.request == nullptr);
      ++next;
      open.push_back(std::move(send));
    }
    if (open.empty()) continue;
    const std::size_t which = random() % open.size();
    const Message& message = plan[open[which].messages[0]];
    int done = 1, size = static_cast<int>(message.bytes);
    if (open[which].request != nullptr) REQUIRE_OK(net.test(open[which].request, &done, &size));
    if (done == 0) {
      ::sched_yield();
      continue;
    }
    REQUIRE(size == static_cast<int>(message.bytes));
    // Done means the memory is the caller's again.
    arena.write(open[which].places[0] + message.offset,
                std::vector<unsigned char>(message.bytes, 0x77));
    arena.giveBack(open[which].places[0]);
    open.erase(open.begin() + static_cast<long>(which));
  }
}

void runReceiver(Net& net, void* comm, Arena& arena, std::uint64_t seed, std::size_t count) {
  constexpr std::size_t kFence = 64;
  const std::vector<Message> plan = makePlan(seed, count);
  std::mt19937_64 random(seed ^ 0x4ec);
  std::vector<Open> open;
  std::size_t next = 0;
  const double start = now();
  while (next < plan.size() || !open.empty()) {
    REQUIRE_SAYING(now() - start < 40, "receiver stuck at " + std::to_string(next));
    if (random() % 16 == 0) ::usleep(static_cast<useconds_t>(random() % 300));
    const std::size_t group =
        std::min({std::size_t{1} + random() % 4, plan.size() - next, arena.room()});
    if (group > 0 && random() % 4 != 0) {
      Open receive;
      std::vector<void*> at, handles;
      std::vector<std::size_t> rooms;
      std::vector<int> tags;
      for (std::size_t i = 0; i < group; ++i) {
        const Message& message = plan[next + i];
        receive.messages.push_back(next + i);
        receive.places.push_back(arena.take());
        arena.write(receive.places.back(),
                    std::vector<unsigned char>(message.offset + message.room + kFence, 0xcd));
        at.push_back(receive.places.back() + message.offset);
        handles.push_back(arena.handle());
        rooms.push_back(message.room);
        tags.push_back(message.tag);
      }
      REQUIRE_OK(net.receive(comm, static_cast<int>(group), at.data(), rooms.data(), tags.data(),
                             &receive.request, handles.data()));
      if (receive.request != nullptr) {
        next += group;
        open.push_back(std::move(receive));
      } else {
        for (unsigned char* place : receive.places) arena.giveBack(place);
      }
    }
    if (open.empty()) continue;
    Open& tested = open[random() % open.size()];
    int done = 0;
    int sizes[8] = {-1, -1, -1, -1, -1, -1, -1, -1};
    REQUIRE_OK(net.test(tested.request, &done, sizes));
    if (done == 0) {
      ::sched_yield();
      continue;
    }
    for (std::size_t i = 0; i < tested.messages.size(); ++i) {
      const Message& message = plan[tested.messages[i]];
      REQUIRE(sizes[i] == static_cast<int>(message.bytes));
      const std::vector<unsigned char> all =
          arena.read(tested.places[i], message.offset + message.room + kFence);
      REQUIRE(allBytes(all.data(), message.offset, 0xcd));
      REQUIRE(matches(all.data() + message.offset, message.bytes, message.seed));
      REQUIRE(allBytes(all.data() + message.offset + message.bytes,
                       all.size() - message.offset - message.bytes, 0xcd));
      arena.giveBack(tested.places[i]);
    }
    open.erase(open.begin() + (&tested - open.data()));
  }
}

bool logHas(const std::vector<LogLine>& lines, const std::string& text) {
  return std::any_of(lines.begin(), lines.end(), [&](const LogLine& line) {
    return line.text.find(text) != std::string::npos;
  });
}

std::string textOf(const std::vector<LogLine>& lines) {
  std::string text;
  for (const LogLine& line : lines) text += line.text + "\n";
  return text;
}

void trafficBetween(const Side& side, int version, Arena::Kind sending, Arena::Kind receiving,
                    const std::string& name) {
  // A free gives up behind that time, which passes while a virtual machine stands still, too.
  ::setenv("HOCCL_TIMEOUT_MS", "40000", 1);
  EmulatedGpu gpu(name.c_str());
  Session session(version);
  Net& net = session.net();
  Properties properties;
  REQUIRE_OK(net.properties(0, &properties));
  REQUIRE(properties.pointerSupport == (hoccl::nccl_abi::kHostPointer | kDevicePointer));
  void* const out = session.connectPair(side, 0);
  void* const back = session.connectPair(side, 1);
  void* const sends = side.rank() == 0 ? out : back;
  void* const receives = side.rank() == 0 ? back : out;
  Arena from(gpu, net, sends, sending, 8), to(gpu, net, receives, receiving, 16);
  const auto seed = static_cast<std::uint64_t>(version) * 10;
  const auto rank = static_cast<std::uint64_t>(side.rank());
  std::thread sender([&] { runSender(net, sends, from, seed + rank, 120); });
  runReceiver(net, receives, to, seed + 1 - rank, 120);
  sender.join();
  side.meet();
  // Frees find nothing mapped: that is what deregMr is for.
  from.end();
  to.end();
  REQUIRE(gpu.counters().freedWhileMapped == 0);
  REQUIRE_OK(net.closeSend(sends));
  REQUIRE_OK(net.closeReceive(receives));
  session.end();
  REQUIRE(gpu.sessionCounters().smOps == 0);
  const std::vector<LogLine> log = takeLog();
  REQUIRE_SAYING(logHas(log, "slots of 256 KiB by the mover"), textOf(log));
  REQUIRE_SAYING(logHas(log, "staging: "), textOf(log));
}

TEST_P(Staging, RandomBothWays) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        trafficBetween(side, GetParam(), Arena::Kind::Allocation, Arena::Kind::Segments, name);
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST(StagingOfOneEnd, ToHostMemory) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        trafficBetween(side, 11, Arena::Kind::Segments, Arena::Kind::Host, name);
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST(StagingOfOneEnd, FromHostMemory) {
  const std::string name = sessionName();
  const Outcome outcome = runPair(
      [&](const Side& side) {
        ::setenv("HOCCL_NET_INLINE_BYTES", side.rank() == 0 ? "512KiB" : "0", 1);
        trafficBetween(side, 12, Arena::Kind::Host, Arena::Kind::Allocation, name);
      },
      50);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
