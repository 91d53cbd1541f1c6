// A sender that closes, or ends, while what it sent is still on its way: it arrives.

#include <gtest/gtest.h>
#include <unistd.h>

#include <vector>

#include "test/conformance/session.h"

namespace conformance {
namespace {

struct Traffic {
  const char* name;
  std::size_t bytes;
  int count, tags;
  bool exits;  ///< in place of a close
};

class SenderCloses : public testing::TestWithParam<Traffic> {};
INSTANTIATE_TEST_SUITE_P(Of, SenderCloses,
                         testing::Values(Traffic{"Small", 16384, 24, 1, false},
                                         Traffic{"ManySmall", 16384, 384, 16, false},
                                         Traffic{"Large", 300000, 12, 1, false},
                                         Traffic{"LargeExit", 300000, 12, 1, true}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(SenderCloses, WhatItHadSentArrives) {
  const Traffic& t = GetParam();
  const Outcome outcome = runPair([&t](const Side& side) {
    Session session(11);
    Net& net = session.net();
    void* const comm = session.connectPair(side, 0);
    const auto count = static_cast<std::size_t>(t.count);
    std::vector<std::byte> memory(count * t.bytes);
    // The receiver has named places and given messages back before.
    std::vector<std::byte> first(t.bytes);
    for (int i = 0; i < 20 * t.tags; ++i) {
      if (side.rank() == 0) {
        finish(net, startSend(net, comm, first.data(), first.size(), i % t.tags));
      } else {
        finish(net, startReceive(net, comm, first.data(), first.size(), i % t.tags));
      }
    }
    side.meet();
    if (side.rank() == 0) {
      // One after the other, as far as that goes without the receiver.
      std::size_t sent = 0;
      for (bool room = true; room && sent < count;) {
        std::byte* const data = memory.data() + sent * t.bytes;
        fill(data, t.bytes, 1000 + sent);
        void* request = nullptr;
        const double until = now() + 0.2;
        while (request == nullptr && now() < until) {
          REQUIRE_OK(net.send(comm, data, t.bytes, static_cast<int>(sent) % t.tags, &request));
        }
        if (request == nullptr) break;
        int over = 0;
        while (over == 0 && now() < until) {
          int sizes[8] = {};
          REQUIRE_OK(net.test(request, &over, sizes));
          if (over == 0) ::usleep(500);
        }
        room = over != 0;
        ++sent;
        if (room) continue;
        // The last one needs the receiver, which takes a message or two.
        side.give(&sent, sizeof sent);
        finish(net, request);
        sent = 0;
      }
      if (sent > 0) side.give(&sent, sizeof sent);
      if (t.exits) ::_exit(0);
      REQUIRE_OK(net.closeSend(comm));
      return;
    }
    std::size_t sent = 0;
    side.take(&sent, sizeof sent);
    REQUIRE(sent > 0);
    for (std::size_t i = 0; i < sent; ++i) {
      // Late: the sender has closed meanwhile.
      if (i == (sent < count ? 4 : 0)) ::usleep(600'000);
      finish(net, startReceive(net, comm, memory.data() + i * t.bytes, t.bytes,
                               static_cast<int>(i) % t.tags));
      REQUIRE_SAYING(matches(memory.data() + i * t.bytes, t.bytes, 1000 + i),
                     "message " + std::to_string(i) + " of " + std::to_string(sent));
    }
    REQUIRE_OK(net.closeReceive(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
