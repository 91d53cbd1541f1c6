// Rates of a net plugin, driven as NCCL's proxies drive it: one thread a side, messages of one
// size, as many under way as NCCL has steps. `conformance_rates [version]`.

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

#include "test/conformance/rates/nccl_sockets.h"
#include "test/conformance/session.h"

namespace conformance {
namespace {

constexpr int kSteps = 8;  // NCCL_STEPS
constexpr int kRounds = 5;
constexpr std::size_t kPings = 20'000;

struct Pattern {
  std::size_t bytes;
  std::size_t messages;  ///< of a round
  int underWay;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// Seconds of a round, in which the other side does the same with `start` of its own.
template <typename Start>
double round(Net& net, const Pattern& pattern, Start start) {
  std::deque<void*> open;
  std::size_t started = 0, done = 0;
  const double begin = now();
  while (done < pattern.messages) {
    if (started < pattern.messages && open.size() < static_cast<std::size_t>(pattern.underWay)) {
      if (void* request = start(started)) {
        open.push_back(request);
        ++started;
      }
    }
    int finished = 0;
    if (!open.empty()) REQUIRE_OK(net.test(open.front(), &finished, nullptr));
    if (finished != 0) {
      open.pop_front();
      ++done;
    } else {
      ::sched_yield();  // NCCL's proxies do so, too
    }
  }
  return now() - begin;
}

double oneWay(const Side& side, Session& session, void* comm, const Pattern& pattern) {
  std::vector<std::vector<std::byte>> buffers(kSteps, std::vector<std::byte>(pattern.bytes));
  std::vector<double> seconds;
  for (int i = 0; i < kRounds; ++i) {
    side.meet();
    seconds.push_back(round(session.net(), pattern, [&](std::size_t n) {
      void* data = buffers[n % kSteps].data();
      void* request = nullptr;
      const int tag = 0;
      if (side.rank() == 0) {
        REQUIRE_OK(session.net().send(comm, data, pattern.bytes, tag, &request));
      } else {
        REQUIRE_OK(session.net().receive(comm, 1, &data, &pattern.bytes, &tag, &request));
      }
      return request;
    }));
  }
  return median(seconds);
}

double pingPong(const Side& side, Session& session, void* out, void* in, std::size_t count) {
  std::uint64_t ping = 0, pong = 0;
  Net& net = session.net();
  side.meet();
  const double begin = now();
  for (std::size_t i = 0; i < count; ++i) {
    if (side.rank() == 0) finish(net, startSend(net, out, &ping, sizeof ping, 0));
    finish(net, startReceive(net, in, &pong, sizeof pong, 0));
    if (side.rank() == 1) finish(net, startSend(net, out, &ping, sizeof ping, 0));
  }
  return (now() - begin) / static_cast<double>(count) / 2;
}

/// The plugin's and that of sockets used as NCCL uses its own, by turns.
void latency(const Side& side, Session& session, void* out, void* in) {
  std::vector<double> plugin, sockets;
  for (int i = 0; i < kRounds; ++i) {
    (void)pingPong(side, session, out, in, 1000);
    plugin.push_back(pingPong(side, session, out, in, kPings));
    (void)ncclSocketsPingPong(side, sizeof(std::uint64_t), 1000);
    sockets.push_back(ncclSocketsPingPong(side, sizeof(std::uint64_t), kPings));
  }
  if (side.rank() != 0) return;
  const double ours = median(plugin), nccls = median(sockets);
  std::printf("latency 8: plugin %.2f us, as NCCL's sockets %.2f us, ratio %.3f\n", ours * 1e6,
              nccls * 1e6, ours / nccls);
}

void measure(const Side& side, int version) {
  Session session(version);
  void* out = nullptr;
  void* in = nullptr;
  for (int from : {0, 1}) (side.rank() == from ? out : in) = session.connectPair(side, from);
  void* const comm = side.rank() == 0 ? out : in;
  latency(side, session, out, in);
  for (const std::size_t bytes :
       {8ul, 8ul << 10, 64ul << 10, 128ul << 10, 512ul << 10, 4ul << 20}) {
    const std::size_t most = (512ul << 20) / bytes;
    const Pattern pattern{bytes, std::min<std::size_t>(most, 20'000), kSteps};
    const double seconds = oneWay(side, session, comm, pattern);
    const auto messages = static_cast<double>(pattern.messages);
    if (side.rank() == 1) {
      std::printf("messages %zu x %d: %.2f us, %.3f GB/s\n", bytes, kSteps,
                  seconds / messages * 1e6, static_cast<double>(bytes) * messages / seconds / 1e9);
    }
  }
  side.meet();
  REQUIRE_OK(session.net().closeSend(out));
  REQUIRE_OK(session.net().closeReceive(in));
}

}  // namespace
}  // namespace conformance

int main(int argc, char** argv) {
  using namespace conformance;
  const int version = argc > 1 ? std::atoi(argv[1]) : 11;
  const Outcome outcome = runPair([&](const Side& side) { measure(side, version); }, 120);
  std::fputs(outcome.output.c_str(), stdout);
  return outcome.ok() ? 0 : 1;
}
