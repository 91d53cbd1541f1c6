// One wrong thing at a time from a peer that knows the nonce and is right in all else: the plugin
// names it in one line, and nothing outside of what was posted is written.

#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <functional>
#include <ostream>

#include "test/conformance/hostile_peer.h"
#include "test/conformance/session.h"

namespace conformance {
namespace {

using namespace hoccl;
using namespace hoccl::net_plugin;

constexpr std::size_t kRoom = 60000, kFence = 4096;

/// The right beginning: asks for tag 0's message `index`, of kRoom bytes, and waits for its place.
Place askFor(HostilePeer& peer, std::uint64_t index) {
  Control ask;
  ask.index = index;
  ask.bytes = kRoom;
  peer.say(Kind::Announce, ask);
  return peer.awaitPosted(index).place;
}

PieceBody pieceFor(const Place& place) {
  PieceBody body;
  body.place = place;
  body.total = kRoom;
  return body;
}

struct WrongSender {
  const char* name;
  /// What the line has to say.
  const char* says;
  std::function<void(HostilePeer&)> talk;
};

const WrongSender kSenders[] = {
    {"MoreThanTheReceiveTakes", "does not take that",
     [](HostilePeer& peer) {
       PieceBody body = pieceFor(askFor(peer, 0));
       body.total = kRoom + kFence;
       peer.send(body, kRoom + kFence);
     }},
    {"APieceBehindTheEndOfItsMessage", "does not take that",
     [](HostilePeer& peer) {
       PieceBody body = pieceFor(askFor(peer, 0));
       body.base = kRoom - 10;
       peer.send(body, 100);
     }},
    {"APieceThatBeginsBehindTheEnd", "does not take that",
     [](HostilePeer& peer) {
       PieceBody body = pieceFor(askFor(peer, 0));
       body.base = kRoom + 1;
       peer.send(body, 100);
     }},
    {"MoreBytesThanTheMessageHas", "does not take that",
     [](HostilePeer& peer) {
       const PieceBody body = pieceFor(askFor(peer, 0));
       peer.send(body, kRoom / 2);
       peer.send(body, kRoom / 2 + 1);  // each fits by itself
     }},
    {"TwoLengthsOfOneMessage", "does not take that",
     [](HostilePeer& peer) {
       PieceBody body = pieceFor(askFor(peer, 0));
       peer.send(body, 100);
       body.total = kRoom - 1;
       body.base = 100;
       peer.send(body, 100);
     }},
    {"APlaceThatWasNeverNamed", "does not take that",
     [](HostilePeer& peer) {
       Place place = askFor(peer, 0);
       ++place.turn;
       peer.send(pieceFor(place), 100);
     }},
    {"AReceiveThatHasNotBeenNamed", "does not take that",
     [](HostilePeer& peer) {
       Place place = askFor(peer, 0);
       place.slot = (place.slot + kReceiveSlots - 7) % kReceiveSlots;
       peer.send(pieceFor(place), 100);
     }},
    {"ASlotThatIsNone", "does not take that",
     [](HostilePeer& peer) {
       Place place = askFor(peer, 0);
       place.slot = kReceiveSlots;
       peer.send(pieceFor(place), 100);
     }},
    {"APieceOfAMessageThatIsThere", "does not take that",
     [](HostilePeer& peer) {
       const PieceBody body = pieceFor(askFor(peer, 0));
       peer.send(body, kRoom);
       HostilePeer::letItTake();
       peer.send(body, 100);
     }},
    {"AheadOfAnotherTag", "ahead, which the receive does not take",
     [](HostilePeer& peer) {
       AheadBody body;
       body.tag = 5;
       body.total = kRoom;
       peer.sendAhead(body, 100);
     }},
    {"AheadMoreThanTheReceiveTakes", "ahead, which the receive does not take",
     [](HostilePeer& peer) {
       AheadBody body;
       body.total = kRoom + kFence;
       peer.sendAhead(body, kRoom + kFence);
     }},
    {"AheadIntoAReceiveThatIsOver", "ahead, which the receive does not take",
     [](HostilePeer& peer) {
       AheadBody body;
       body.total = kRoom;
       peer.sendAhead(body, kRoom);
       HostilePeer::letItTake();
       peer.sendAhead(body, 100);
     }},
    {"AnnouncedWithoutBytes", "a message of 0 bytes announced",
     [](HostilePeer& peer) { peer.say(Kind::Announce, {}); }},
    {"AnnouncedTooLarge", "bytes announced",
     [](HostilePeer& peer) {
       Control ask;
       ask.bytes = nccl_abi::kMaxMessageBytes + 1;
       peer.say(Kind::Announce, ask);
     }},
    {"AnnouncedTwice", "announced out of order",
     [](HostilePeer& peer) {
       Control ask;
       ask.index = 100;
       ask.bytes = kRoom;
       peer.say(Kind::Announce, ask);
       peer.say(Kind::Announce, ask);
     }},
    {"AnnouncedWithoutEnd", "announced out of order",
     [](HostilePeer& peer) {
       Control ask;
       ask.bytes = kRoom;
       for (ask.index = 100; ask.index < 101 + kReceiveSlots; ++ask.index) {
         peer.say(Kind::Announce, ask);
       }
     }},
    {"OneSmallMessageTwice", "out of order",
     [](HostilePeer& peer) {
       Control small;
       small.bytes = 10;
       peer.say(Kind::Message, small, 10);
       peer.say(Kind::Message, small, 10);
     }},
    {"ASmallMessageOfAnotherLength", "for 11",
     [](HostilePeer& peer) {
       Control small;
       small.bytes = 11;
       peer.say(Kind::Message, small, 10);
     }},
    {"ASmallMessageThatIsLarge", "a message of kind",
     [](HostilePeer& peer) {
       Control small;
       small.bytes = kEagerBytes + 1;
       peer.say(Kind::Message, small, kEagerBytes + 1);
     }},
    {"SmallMessagesWithoutEnd", "without a receive",
     [](HostilePeer& peer) {
       Control small;
       small.tag = 9;
       small.bytes = 10;
       for (; small.index <= kEagerWindow; ++small.index) peer.say(Kind::Message, small, 10);
     }},
    {"TagsWithoutEnd", "out of order",
     [](HostilePeer& peer) {
       Control small;
       small.bytes = 1;
       for (small.tag = 1; small.tag <= static_cast<int>(kMaxTags); ++small.tag) {
         peer.say(Kind::Message, small, 1);
       }
     }},
    {"WhatAReceivingEndSays", "a sending end sent a message of kind",
     [](HostilePeer& peer) { peer.say(Kind::Credit, {}); }},
};

std::ostream& operator<<(std::ostream& out, const WrongSender& wrong) { return out << wrong.name; }

class WrongSenders : public testing::TestWithParam<WrongSender> {};
INSTANTIATE_TEST_SUITE_P(Cases, WrongSenders, testing::ValuesIn(kSenders),
                         [](const auto& info) { return info.param.name; });

TEST_P(WrongSenders, IsNamed) {
  const Outcome outcome = runPair([](const Side& side) {
    if (side.rank() == 0) {
      HostilePeer peer = HostilePeer::sender(side);
      GetParam().talk(peer);
      peer.stayUntilClosed();
      return;
    }
    Session session(11);
    Net& net = session.net();
    void* const comm = HostilePeer::acceptFor(side, session);
    takeLog();
    constexpr std::size_t kReceives = 8, kStep = kRoom + kFence;
    std::vector<unsigned char> memory(kFence + kReceives * kStep, 0xcd);
    std::vector<void*> requests;
    for (std::size_t i = 0; i < kReceives; ++i) {
      requests.push_back(startReceive(net, comm, memory.data() + kFence + i * kStep, kRoom, 0));
    }
    // The receives are tested in turn, as NCCL does, until one fails.
    ncclResult_t result = ncclSuccess;
    const double start = now();
    while (result == ncclSuccess) {
      REQUIRE_SAYING(now() - start < 5, "no error in time");
      for (void*& request : requests) {
        if (request == nullptr) continue;
        int done = 0;
        result = net.test(request, &done, nullptr);
        if (done != 0) request = nullptr;
        if (result != ncclSuccess) break;
      }
      ::usleep(100);
    }
    REQUIRE(result == ncclRemoteError || result == ncclInvalidArgument);
    const std::string line = onlyWarning();
    REQUIRE_SAYING(line.find(GetParam().says) != std::string::npos, line);
    REQUIRE_OK(net.closeReceive(comm));
    REQUIRE(allBytes(memory.data(), kFence, 0xcd));
    for (std::size_t i = 0; i < kReceives; ++i) {
      REQUIRE(allBytes(memory.data() + kFence + i * kStep + kRoom, kFence, 0xcd));
    }
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

struct WrongReceiver {
  const char* name;
  const char* says;
  std::function<void(HostilePeer&)> talk;
};

/// What a receiving end says of a receive of tag 0 that is open.
Control posted(std::uint64_t index, std::uint64_t bytes = kRoom) {
  Control control;
  control.index = index;
  control.bytes = bytes;
  control.place = {static_cast<std::uint32_t>(index % kReceiveSlots), 1};
  return control;
}

const WrongReceiver kReceivers[] = {
    {"AReceiveThatIsTooSmall", "bytes",
     [](HostilePeer& peer) { peer.say(Kind::Posted, posted(0, 100)); }},
    {"AReceiveThatCannotBeOpen", "cannot be open",
     [](HostilePeer& peer) { peer.say(Kind::Posted, posted(kReceiveSlots + 1)); }},
    {"OfATagThatIsUnknown", "cannot be open",
     [](HostilePeer& peer) {
       Control control = posted(0);
       control.tag = 77;
       peer.say(Kind::Posted, control);
     }},
    {"GivesBackMoreThanCame", "more than it has",
     [](HostilePeer& peer) {
       Control control;
       control.index = 1;
       peer.say(Kind::Credit, control);
     }},
    {"TwoTagsAhead", "ahead",
     [](HostilePeer& peer) {
       Control control = posted(0);
       control.ahead = 1;
       peer.say(Kind::Posted, control);
       control = posted(1);
       control.tag = 1;
       control.ahead = 1;
       peer.say(Kind::Posted, control);
     }},
    {"SendsData", "a receiving end sent data",
     [](HostilePeer& peer) {
       peer.send(pieceFor({0, 1}), 100);
     }},
    {"WhatASendingEndSays", "a receiving end sent a message of kind",
     [](HostilePeer& peer) { peer.say(Kind::Announce, posted(0)); }},
};

std::ostream& operator<<(std::ostream& out, const WrongReceiver& wrong) {
  return out << wrong.name;
}

class WrongReceivers : public testing::TestWithParam<WrongReceiver> {};
INSTANTIATE_TEST_SUITE_P(Cases, WrongReceivers, testing::ValuesIn(kReceivers),
                         [](const auto& info) { return info.param.name; });

TEST_P(WrongReceivers, IsNamed) {
  const Outcome outcome = runPair([](const Side& side) {
    if (side.rank() == 0) {
      HostilePeer peer = HostilePeer::receiver(side);
      peer.awaitAnnounce(2);  // of both tags
      GetParam().talk(peer);
      peer.stayUntilClosed();
      return;
    }
    Session session(11);
    Net& net = session.net();
    void* const comm = HostilePeer::connectFor(side, session);
    takeLog();
    std::vector<unsigned char> memory(kRoom);
    (void)startSend(net, comm, memory.data(), kRoom, 0);
    // The first may be done before its receiver says what is wrong.
    void* const second = startSend(net, comm, memory.data(), kRoom, 1);
    const ncclResult_t result = failureOf(net, second);
    REQUIRE(result == ncclRemoteError || result == ncclInvalidArgument);
    const std::string line = onlyWarning();
    REQUIRE_SAYING(line.find(GetParam().says) != std::string::npos, line);
    REQUIRE_OK(net.closeSend(comm));
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
