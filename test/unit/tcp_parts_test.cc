// The parts of the TCP transport that need no peer: addresses, interfaces, and frames, which are
// fed whatever may come over a socket.

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "common/net/tcp/bundle.h"
#include "common/net/tcp/frames.h"
#include "common/net/tcp/interfaces.h"
#include "common/net/tcp/socket_address.h"
#include "common/net/tcp/tcp_transport.h"
#include "test/unit/fakes.h"

namespace hoccl {
namespace {

using test::chance;
using test::pick;
using test::Rng;
using test::testSeed;

SocketAddress parsed(const std::string& text) {
  SocketAddress address;
  const Status status = SocketAddress::parse(text, &address);
  EXPECT_TRUE(status) << status.message();
  return address;
}

TEST(SocketAddress, TextAndBack) {
  for (const char* text :
       {"10.0.0.1:4242", "127.0.0.1:0", "[::1]:65535", "[2001:db8::7]:1", "[fe80::1%1]:80"}) {
    EXPECT_EQ(parsed(text).text(), text);
  }
  EXPECT_EQ(parsed("10.0.0.1").text(), "10.0.0.1:0");
  EXPECT_EQ(parsed("fe80::1%lo").text(), "[fe80::1%1]:0");
  EXPECT_TRUE(parsed("::1").loopback());
  EXPECT_TRUE(parsed("127.9.9.9").loopback());
  EXPECT_FALSE(parsed("10.0.0.1").loopback());
  for (const char* text : {"", "10.0.0", "10.0.0.1:", "10.0.0.1:70000", "[::1", "[::1]80",
                           "::1::", "host", "fe80::1%there-is-none", "10.0.0.1%lo"}) {
    SocketAddress address;
    EXPECT_FALSE(SocketAddress::parse(text, &address)) << text;
    EXPECT_FALSE(address.valid());
  }
}

TEST(SocketAddress, PackedAndBack) {
  for (const char* text : {"10.0.0.1:4242", "[2001:db8::7]:1", "[fe80::1%3]:80"}) {
    const SocketAddress address = parsed(text);
    SocketAddress back;
    ASSERT_TRUE(SocketAddress::unpack(address.pack(), &back));
    EXPECT_EQ(back, address);
    sockaddr_storage raw;
    const socklen_t length = address.toSockaddr(&raw);
    ASSERT_TRUE(SocketAddress::fromSockaddr(reinterpret_cast<sockaddr*>(&raw), length, &back));
    EXPECT_EQ(back, address);
  }
  SocketAddress::Packed nothing{};
  SocketAddress out;
  EXPECT_FALSE(SocketAddress::unpack(nothing, &out));
  EXPECT_FALSE(SocketAddress::unpack(std::span(nothing).first(5), &out));
  EXPECT_FALSE(out.valid());
  EXPECT_EQ(parsed("fe80::1%3").withScopeOf(parsed("fe80::2%7")).text(), "[fe80::1%7]:0");
  EXPECT_EQ(parsed("10.0.0.1").withScopeOf(parsed("fe80::2%7")).text(), "10.0.0.1:0");
}

TEST(SocketAddress, TransportAddressIsTextWithoutZeroBytes) {
  Rng rng(testSeed());
  for (int i = 0; i < 200; ++i) {
    SocketAddress address = parsed(i % 2 ? "10.0.0.0" : "fe80::1%1");
    address.setPort(static_cast<std::uint16_t>(pick(rng, 0, 65535)));
    BundleNonce nonce;
    for (auto& byte : nonce) byte = chance(rng, 0.3) ? 0 : static_cast<std::uint8_t>(rng());
    const std::string text = encodeTcpAddress(address, nonce);
    EXPECT_LE(text.size(), 64u);
    EXPECT_EQ(text.find('\0'), std::string::npos);
    SocketAddress address2;
    BundleNonce nonce2;
    ASSERT_TRUE(decodeTcpAddress(text, &address2, &nonce2));
    EXPECT_EQ(address2, address);
    EXPECT_EQ(nonce2, nonce);
    // Whatever else: an address or an error, nothing worse.
    std::string damaged = text;
    damaged[pick(rng, 0, damaged.size() - 1)] = static_cast<char>(rng());
    (void)decodeTcpAddress(damaged, &address2, &nonce2);
    EXPECT_FALSE(decodeTcpAddress(text.substr(1), &address2, &nonce2));
    EXPECT_FALSE(decodeTcpAddress(text + "A", &address2, &nonce2));
  }
}

std::vector<Interface> someInterfaces() {
  std::vector<Interface> all;
  for (const char* name : {"lo", "docker0", "eth0", "eth1", "ib0", "ib1", "virbr0"}) {
    Interface each;
    each.name = name;
    each.loopback = each.name == "lo";
    all.push_back(each);
  }
  return all;
}

std::string chosen(const std::string& list, std::vector<Interface> all) {
  std::vector<Interface> out;
  InterfaceChoice choice;
  choice.list = list;
  const Status status = selectInterfaces(choice, all, &out);
  if (!status) return status.message();
  std::string names;
  for (const Interface& each : out) names += (names.empty() ? "" : ",") + each.name;
  return names;
}

TEST(Interfaces, ListsByNcclsRules) {
  const auto all = someInterfaces();
  EXPECT_EQ(chosen("eth", all), "eth0,eth1");
  EXPECT_EQ(chosen("=eth0", all), "eth0");
  EXPECT_EQ(chosen("eth1,ib", all), "eth1,ib0,ib1");
  EXPECT_EQ(chosen("=eth1,lo", all), "lo,eth1");
  EXPECT_EQ(chosen("^lo,docker,virbr,eth", all), "ib0,ib1");
  EXPECT_EQ(chosen("^=eth0", all), "lo,docker0,eth1,ib0,ib1,virbr0");
  EXPECT_EQ(chosen("eth0:1", all), "eth0");
  const std::string none = chosen("=eth", all);
  for (const char* part : {"NCCL_SOCKET_IFNAME", "=eth", "eth0", "virbr0"}) {
    EXPECT_NE(none.find(part), std::string::npos) << none;
  }
  EXPECT_EQ(none.find('\n'), std::string::npos);
}

TEST(Interfaces, WithoutAListTheLikeliestKind) {
  auto all = someInterfaces();
  auto without = [&](const std::string& prefix) {
    std::erase_if(all, [&](const Interface& i) { return i.name.rfind(prefix, 0) == 0; });
    return chosen("", all);
  };
  EXPECT_EQ(chosen("", all), "ib0,ib1");
  EXPECT_EQ(without("ib"), "eth0,eth1");
  EXPECT_EQ(without("eth"), "docker0");
  EXPECT_EQ(without("docker"), "virbr0");
  EXPECT_EQ(without("virbr"), "lo");
  EXPECT_NE(without("lo").find("no network interface"), std::string::npos);
}

TEST(Interfaces, TheHostsOwn) {
  std::vector<Interface> all;
  ASSERT_TRUE(allInterfaces(AF_INET, &all));
  const auto lo = std::find_if(all.begin(), all.end(), [](const auto& i) { return i.loopback; });
  ASSERT_NE(lo, all.end());
  EXPECT_EQ(lo->address.text(), "127.0.0.1:0");
  EXPECT_EQ(lo->pciPath, "");
  ::setenv("NCCL_SOCKET_IFNAME", "there-is-none", 1);
  Config config = Config::defaults();
  InterfaceChoice choice;
  ASSERT_TRUE(InterfaceChoice::fromEnvironment(config, &choice));
  Status status = chooseInterfaces(choice, &all);
  EXPECT_NE(status.message().find("NCCL_SOCKET_IFNAME='there-is-none'"), std::string::npos)
      << status.message();
  ASSERT_TRUE(config.set("HOCCL_SOCKET_IFNAME", "=lo"));
  ASSERT_TRUE(InterfaceChoice::fromEnvironment(config, &choice));
  ASSERT_TRUE(chooseInterfaces(choice, &all));
  EXPECT_EQ(all.front().name, "lo");
  ::setenv("NCCL_SOCKET_FAMILY", "AF_UNIX", 1);
  status = InterfaceChoice::fromEnvironment(config, &choice);
  EXPECT_NE(status.message().find("NCCL_SOCKET_FAMILY='AF_UNIX'"), std::string::npos);
  ::unsetenv("NCCL_SOCKET_FAMILY");
  ::unsetenv("NCCL_SOCKET_IFNAME");
}

TEST(BundleOptions, OursThenNcclsThenTheDefault) {
  Config config = Config::defaults();
  BundleOptions options;
  ASSERT_TRUE(BundleOptions::fromEnvironment(config, &options));
  EXPECT_EQ(options.threads, BundleOptions{}.threads);
  ::setenv("NCCL_SOCKET_NTHREADS", "3", 1);
  ::setenv("NCCL_NSOCKS_PERTHREAD", "many", 1);
  ASSERT_TRUE(BundleOptions::fromEnvironment(config, &options));
  EXPECT_EQ(options.threads, 3u);
  EXPECT_EQ(options.socketsPerThread, BundleOptions{}.socketsPerThread) << "a bad one is left out";
  ASSERT_TRUE(config.set("HOCCL_SOCKET_NTHREADS", "5"));
  ASSERT_TRUE(BundleOptions::fromEnvironment(config, &options));
  EXPECT_EQ(options.threads, 5u);
  ASSERT_TRUE(config.set("HOCCL_NSOCKS_PERTHREAD", "16"));
  EXPECT_NE(BundleOptions::fromEnvironment(config, &options).message().find("64"),
            std::string::npos);
  ::unsetenv("NCCL_SOCKET_NTHREADS");
  ::unsetenv("NCCL_NSOCKS_PERTHREAD");
}

// --- Frames --------------------------------------------------------------------------------------

constexpr std::uint64_t kMaxPayload = 10'000;

/// Takes payloads into memory of the largest size; says "not now" now and then.
struct Taker final : FrameSink {
  explicit Taker(Rng* rng, double later = 0) : rng(rng), later(later), memory(kMaxPayload) {}
  std::byte* place(const FrameHeader& header, Status* bad) override {
    EXPECT_LE(header.bytes, kMaxPayload);
    EXPECT_GT(header.bytes, 0u);
    if (header.kind == 666) *bad = Status::error(Code::Remote, "kind 666");
    if (header.kind == 666 || chance(*rng, later)) return nullptr;
    return memory.data();
  }
  void arrived(const FrameHeader& header) override {
    frames.emplace_back(header.kind,
                        std::string(reinterpret_cast<char*>(memory.data()), header.bytes));
  }
  Rng* rng;
  double later;
  std::vector<std::byte> memory;
  std::deque<std::pair<std::uint16_t, std::string>> frames;
};

struct Wire {
  Wire() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
    here.reset(ends[0]);
    there.reset(ends[1]);
  }
  UniqueFd here, there;
};

TEST(Frames, AnySizesThroughAnyReadAheadAndAnyPauses) {
  Rng rng(testSeed());
  for (const std::size_t readAhead : {std::size_t{64}, std::size_t{100}, std::size_t{16'384}}) {
    Wire wire;
    FramedSocket sender(std::move(wire.here), {.maxPayload = kMaxPayload, .queue = 7});
    FramedSocket receiver(std::move(wire.there),
                          {.maxPayload = kMaxPayload, .readAhead = readAhead});
    Taker sink(&rng, 0.2);
    std::deque<std::string> payloads;  // those under way stay where they are
    std::atomic<std::uint64_t> done{0};
    std::uint64_t total = 0, checked = 0;
    constexpr std::uint64_t kFrames = 3000;
    for (std::uint64_t i = 0; checked < kFrames; ++i) {
      ASSERT_LT(i, 1'000'000u);
      if (payloads.size() < kFrames && chance(rng, 0.7)) {
        OutFrame frame;
        const std::uint64_t bytes = chance(rng, 0.3) ? 0 : pick(rng, 1, kMaxPayload);
        frame.header.kind = static_cast<std::uint16_t>(payloads.size() % 600);
        frame.header.bytes = bytes;
        payloads.emplace_back(bytes, static_cast<char>(payloads.size()));
        frame.payload = reinterpret_cast<const std::byte*>(payloads.back().data());
        frame.done = &done;
        if (sender.push(frame)) {
          total += bytes;
        } else {
          EXPECT_TRUE(sender.queueFull());
          payloads.pop_back();
        }
      }
      ASSERT_NE(sender.send(), FramedSocket::Io::Failed);
      if (chance(rng, 0.5)) {
        ASSERT_NE(receiver.receive(sink, pick(rng, 1, 20'000)), FramedSocket::Io::Failed)
            << receiver.status().message();
      }
      for (; !sink.frames.empty(); sink.frames.pop_front(), ++checked) {
        ASSERT_EQ(sink.frames.front().first, checked % 600);
        ASSERT_EQ(sink.frames.front().second, payloads[checked]);
      }
    }
    EXPECT_EQ(done.load(), total);
  }
}

/// What a receiver makes of these bytes, given to it in random pieces.
FramedSocket::Io fed(const std::string& bytes, Rng& rng, Taker* sink, std::string* why) {
  Wire wire;
  FramedSocket receiver(std::move(wire.there),
                        {.maxPayload = kMaxPayload, .readAhead = pick(rng, 64, 300)});
  FramedSocket::Io last = FramedSocket::Io::Blocked;
  std::size_t given = 0;
  for (int round = 0; round < 10'000; ++round) {
    if (given < bytes.size()) {
      const std::size_t now = std::min<std::size_t>(pick(rng, 1, 500), bytes.size() - given);
      const ssize_t sent = ::send(wire.here.get(), bytes.data() + given, now, MSG_NOSIGNAL);
      if (sent > 0) given += static_cast<std::size_t>(sent);
    }
    if (given == bytes.size()) wire.here.reset();
    last = receiver.receive(*sink, 5000);
    if (last == FramedSocket::Io::Failed || last == FramedSocket::Io::Ended) break;
  }
  *why = receiver.status().message();
  return last;
}

std::string frameText(std::uint16_t kind, std::uint64_t bytes, const std::string& payload) {
  FrameHeader header;
  header.kind = kind;
  header.bytes = bytes;
  return std::string(reinterpret_cast<char*>(&header), sizeof header) + payload;
}

TEST(Frames, Rule10WhatMakesNoSenseFailsTheSocketWithOneLine) {
  Rng rng(testSeed());
  const std::string good = frameText(1, 5, "hello");
  std::string magic = good, version = good;
  magic[0] ^= 1;
  version[4] ^= 1;
  const std::vector<std::pair<std::string, std::string>> cases = {
      {magic, "not HOCCL"},
      {version, "two builds"},
      {frameText(1, kMaxPayload + 1, ""), "at most 10000"},
      {frameText(1, ~0ull, ""), "at most 10000"},
      {frameText(666, 1, "x"), "kind 666"},
      {good.substr(0, 63), "in the middle"},
      {good.substr(0, 66), "in the middle"},
      {std::string("GET / HTTP/1.1\r\nHost: here\r\n\r\n") + std::string(100, ' '), "not HOCCL"}};
  for (const auto& [bytes, part] : cases) {
    for (const std::string& before : {std::string(), good, good + good}) {
      Taker sink(&rng);
      std::string why;
      EXPECT_EQ(fed(before + bytes, rng, &sink, &why), FramedSocket::Io::Failed);
      EXPECT_NE(why.find(part), std::string::npos) << why;
      EXPECT_EQ(why.find('\n'), std::string::npos);
      EXPECT_EQ(sink.frames.size(), before.size() / good.size());
    }
  }
  Taker sink(&rng);
  std::string why;
  EXPECT_EQ(fed(good + good, rng, &sink, &why), FramedSocket::Io::Ended);
  EXPECT_EQ(sink.frames.size(), 2u);
}

TEST(Frames, Rule10Fuzz) {
  Rng rng(testSeed());
  int failed = 0, ended = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string bytes;
    for (std::uint64_t i = pick(rng, 0, 6); i > 0; --i) {
      const std::uint64_t length = chance(rng, 0.3) ? 0 : pick(rng, 1, 3000);
      bytes += frameText(static_cast<std::uint16_t>(rng() % 700), length,
                         std::string(length, static_cast<char>(rng())));
    }
    if (chance(rng, 0.7) && !bytes.empty()) {
      for (std::uint64_t i = pick(rng, 1, 4); i > 0; --i) {
        bytes[pick(rng, 0, bytes.size() - 1)] = static_cast<char>(rng());
      }
    }
    if (chance(rng, 0.3)) bytes.resize(pick(rng, 0, bytes.size()));
    if (chance(rng, 0.2)) {
      for (std::uint64_t i = pick(rng, 1, 200); i > 0; --i) bytes += static_cast<char>(rng());
    }
    Taker sink(&rng, chance(rng, 0.3) ? 0.3 : 0);
    std::string why;
    const FramedSocket::Io end = fed(bytes, rng, &sink, &why);
    ASSERT_TRUE(end == FramedSocket::Io::Failed || end == FramedSocket::Io::Ended) << round;
    ASSERT_EQ(end == FramedSocket::Io::Failed, !why.empty());
    ++(end == FramedSocket::Io::Failed ? failed : ended);
  }
  EXPECT_GT(failed, 100);
  EXPECT_GT(ended, 100);
}

}  // namespace
}  // namespace hoccl
