// Spans handed over between two movers of a node, each of which is one thread that waits for
// nobody's attention but its own.

#include "common/runtime/peer_spans.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "common/base/time.h"
#include "common/base/unix_socket.h"
#include "common/net/shm/shm_connection.h"
#include "common/runtime/span_slot.h"

namespace hoccl {
namespace {

constexpr std::uint64_t kPiece = 2 << 20;
constexpr std::uint64_t kTimeoutMs = 4000;
constexpr StagingGeometry kGeometry{2, 4096};

/// A driver that counts mappings.
std::atomic<std::uint64_t> gNext{1ull << 40};
std::atomic<int> gMapped{0};

const Driver* driver() {
  static const Driver table = [] {
    Driver d;
    d.cuGetErrorName = [](CUresult, const char** text) {
      *text = "CUDA_ERROR_FAKE";
      return CUDA_SUCCESS;
    };
    d.cuGetErrorString = d.cuGetErrorName;
    d.cuCtxGetDevice = [](CUdevice* out) {
      *out = 0;
      return CUDA_SUCCESS;
    };
    d.cuMemAddressReserve = [](CUdeviceptr* out, size_t bytes, size_t, CUdeviceptr,
                               unsigned long long) {
      *out = gNext.fetch_add(bytes);
      return CUDA_SUCCESS;
    };
    d.cuMemAddressFree = [](CUdeviceptr, size_t) { return CUDA_SUCCESS; };
    d.cuMemImportFromShareableHandle = [](CUmemGenericAllocationHandle* out, void*,
                                          CUmemAllocationHandleType) {
      *out = 77;
      return CUDA_SUCCESS;
    };
    d.cuMemRelease = [](CUmemGenericAllocationHandle) { return CUDA_SUCCESS; };
    d.cuMemMap = [](CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) {
      ++gMapped;
      return CUDA_SUCCESS;
    };
    d.cuMemUnmap = [](CUdeviceptr, size_t) {
      --gMapped;
      return CUDA_SUCCESS;
    };
    d.cuMemSetAccess = [](CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) {
      return CUDA_SUCCESS;
    };
    return d;
  }();
  return &table;
}

/// A mover's control thread, as far as spans go.
struct Side {
  PeerSpans peers{driver(), kTimeoutMs, [this] { take(); }};
  SpanMapper own{driver(), 1 << 16};
  std::vector<std::unique_ptr<ShmConnection>> connections;

  BufferRef add(std::uint32_t slot, std::size_t segments) {
    BufferRef span{};
    span.kind = BufferKind::Span;
    span.allocationId = spanId(slot, 1);
    span.allocationBase = 0x7f0000000000 + slot * (1ull << 32);
    span.allocationBytes = segments * kPiece;
    AddSpan message{};
    message.magic = kMoverMagic;
    message.id = span.allocationId;
    message.base = span.allocationBase;
    message.bytes = span.allocationBytes;
    for (std::size_t first = 0; first < segments; first += kSpanPieces) {
      std::vector<UniqueFd> fds;
      message.pieces = std::min(kSpanPieces, segments - first);
      for (std::size_t i = 0; i < message.pieces; ++i) {
        message.pieceBytes[i] = kPiece;
        fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      }
      bool whole = false;
      CUdeviceptr address = 0;
      std::uint32_t refused = 0;
      EXPECT_TRUE(own.add(message, fds, &whole, &address, &refused));
      message.done += message.pieces * kPiece;
    }
    return span;
  }
  Status share(std::size_t to, const BufferRef& span) {
    return peers.share(connections[to].get(), own, span, &has);
  }
  void take() {
    for (auto& connection : connections) peers.take(connection.get());
  }
  SpanShare has = SpanShare::Nothing;
};

std::unique_ptr<ShmConnection> end(UniqueFd socket, ShmConnection::Side side, PeerId peer) {
  SharedMemory region;
  EXPECT_TRUE(SharedMemory::create("test", ShmConnection::regionBytes(kGeometry), &region));
  return std::make_unique<ShmConnection>(std::move(region), std::move(socket), kGeometry, side,
                                         peer);
}

/// The peer `to` of `from`, and the other way round: each is the last connection of its side.
void connect(Side* a, PeerId idOfA, Side* b, PeerId idOfB) {
  UniqueFd one, other;
  ASSERT_TRUE(makeSocketPair(&one, &other));
  a->connections.push_back(end(std::move(one), ShmConnection::Side::Connecting, idOfB));
  b->connections.push_back(end(std::move(other), ShmConnection::Side::Accepting, idOfA));
}

constexpr PeerId idOf(std::uint64_t i) { return PeerId{1, i + 1}; }

class PeerSpansTest : public ::testing::Test {
 protected:
  PeerSpansTest() { gMapped = 0; }
};

/// Each of a ring hands the next one more than a socket holds before it looks at what has come: a
/// group of some hundred operations on buffers of their own.
class PeerSpansRing : public PeerSpansTest, public ::testing::WithParamInterface<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Movers, PeerSpansRing, ::testing::Values(2u, 3u));

TEST_P(PeerSpansRing, AllHandOverMoreAtOnceThanTheirSocketsHold) {
  constexpr std::uint32_t kSpans = 700;
  const std::size_t movers = GetParam();
  std::vector<std::unique_ptr<Side>> sides;
  for (std::size_t i = 0; i < movers; ++i) sides.push_back(std::make_unique<Side>());
  // Two movers: one connection, of which each has an end. Three: from each to the next.
  std::vector<std::size_t> next(movers, 0);
  std::vector<std::size_t> at(movers, 0);
  for (std::size_t i = 0; i < (movers == 2 ? 1 : movers); ++i) {
    const std::size_t j = (i + 1) % movers;
    at[i] = sides[i]->connections.size();
    if (movers == 2) at[j] = sides[j]->connections.size();
    connect(sides[i].get(), idOf(i), sides[j].get(), idOf(j));
  }
  std::vector<std::vector<BufferRef>> spans(movers);
  for (std::size_t i = 0; i < movers; ++i) {
    for (std::uint32_t n = 0; n < kSpans; ++n) spans[i].push_back(sides[i]->add(n, 1));
  }
  std::atomic<std::size_t> done{0};
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < movers; ++i) {
    threads.emplace_back([&, i] {
      for (const BufferRef& span : spans[i]) {
        if (!sides[i]->share(at[i], span) && ++failed > 1) break;
      }
      ++done;
      while (done.load() < movers) {
        sides[i]->take();
        std::this_thread::yield();
      }
      sides[i]->take();
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failed.load(), 0);
  for (std::size_t i = 0; i < movers; ++i) {
    const std::size_t j = (i + 1) % movers;
    std::uint32_t found = 0;
    CUdeviceptr address = 0;
    for (const BufferRef& span : spans[i]) {
      if (sides[j]->peers.find(idOf(i), span.allocationId, &address)) ++found;
    }
    EXPECT_EQ(found, kSpans) << "of mover " << i;
  }
}

/// A stopped mover: who waits for it waits once and not with each span, since frees, imports and
/// new communicators wait meanwhile.
TEST_F(PeerSpansTest, APeerThatDoesNotLookIsWaitedForOnce) {
  Side a, b;
  connect(&a, idOf(0), &b, idOf(1));
  const std::uint64_t before = monotonicNs();
  int failed = 0;
  for (std::uint32_t n = 0; n < 2000 && failed < 5; ++n) {
    if (a.share(0, a.add(n, 1))) continue;
    EXPECT_EQ(a.has, SpanShare::Later);
    ++failed;
  }
  EXPECT_EQ(failed, 5);
  EXPECT_LT(monotonicNs() - before, kTimeoutMs * 1'000'000);
  // It goes on.
  b.take();
  EXPECT_TRUE(a.share(0, a.add(2001, 1)));
  b.take();
  CUdeviceptr address = 0;
  EXPECT_TRUE(b.peers.find(idOf(0), spanId(2001, 1), &address));
}

/// What has come of it is known to be there, and gone when the peer is asked to forget it.
TEST_F(PeerSpansTest, OfALongSpanAPeerThatDoesNotLookHasAPart) {
  Side a, b;
  connect(&a, idOf(0), &b, idOf(1));
  const BufferRef span = a.add(1, 300 * kSpanPieces);
  const int own = gMapped;
  EXPECT_FALSE(a.share(0, span));
  EXPECT_EQ(a.has, SpanShare::Part);
  b.take();
  EXPECT_GT(gMapped.load(), own);
  CUdeviceptr address = 0;
  EXPECT_FALSE(b.peers.find(idOf(0), span.allocationId, &address));
  EXPECT_TRUE(b.peers.unmap(idOf(0), span.allocationId));
  EXPECT_EQ(gMapped.load(), own);
  const BufferRef other = a.add(2, 1);
  ASSERT_TRUE(a.share(0, other));
  b.take();
  EXPECT_TRUE(b.peers.find(idOf(0), other.allocationId, &address));
}

/// The peer's descriptors are not used up by what waits for it in its socket.
TEST_F(PeerSpansTest, MessagesAreTakenInOneByOne) {
  Side a, b;
  connect(&a, idOf(0), &b, idOf(1));
  const BufferRef span = a.add(1, 24 * kSpanPieces);
  ASSERT_TRUE(a.share(0, span));
  const int most = 10 * static_cast<int>(kSpanPieces);
  const UniqueFd first(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  rlimit all{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &all), 0);
  const rlimit few{static_cast<rlim_t>(first.get() + most), all.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  b.take();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &all), 0);
  CUdeviceptr address = 0;
  EXPECT_TRUE(b.peers.find(idOf(0), span.allocationId, &address));
}

}  // namespace
}  // namespace hoccl
