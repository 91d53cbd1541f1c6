// The tcp transport's bundle, measured.

#include <unistd.h>

#include <atomic>
#include <cstring>

#include "common/base/time.h"
#include "common/net/tcp/bundle_setup.h"
#include "tools/bench/net_link.h"

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer's, without a header of its own.
extern "C" void AnnotateBenignRaceSized(const char* file, int line, const volatile void* memory,
                                        std::size_t bytes, const char* description);
#endif

namespace hoccl::bench {
namespace {

/// Where a listener is, as one process tells the other.
struct Invitation {
  SocketAddress::Packed address;
  BundleNonce nonce;
};

enum Kind : std::uint16_t { kPing = 1, kPayload = 2 };

class TcpLink final : public NetLink {
 public:
  using NetLink::NetLink;

  Status open(std::uint64_t maxBytes) {
    if (Status status = NetBuffer::create(maxBytes, &buffer_); !status) return status;
    landing_.memory = buffer_.data();
    landing_.bytes = maxBytes;
#ifdef __SANITIZE_THREAD__
    AnnotateBenignRaceSized(__FILE__, __LINE__, buffer_.data(), maxBytes,
                            "every payload lands in the same memory, as in ib_write_bw, and nobody "
                            "reads it");
#endif
    std::unique_ptr<BundleListener> listener;
    std::unique_ptr<BundleSetup> setup;
    Invitation invitation;
    NetWait wait(pair_, "the set-up of the tcp transport");
    if (pair_.side == 0) {
      if (Status s = BundleListener::open(pair_.local, pair_.options, &listener); !s) return s;
      invitation = {listener->address().pack(), listener->nonce()};
      if (Status s = tell(pair_, &invitation, sizeof invitation); !s) return s;
      while (!(setup = listener->accept())) {
        if (Status status = wait.again(); !status) return status;
      }
      setup->accept({});
    } else {
      if (Status s = hear(pair_, &invitation, sizeof invitation); !s) return s;
      SocketAddress address;
      if (Status s = SocketAddress::unpack(invitation.address, &address); !s) return s;
      if (Status s =
              connectBundle(address, invitation.nonce, pair_.local, {}, pair_.options, &setup);
          !s) {
        return s;
      }
    }
    while (setup->advance() == BundleSetup::State::Pending) {
      if (Status status = wait.again(); !status) return status;
    }
    if (setup->advance() == BundleSetup::State::Failed) return setup->status();
    return setup->take(&landing_, &bundle_);
  }

  Status stream(std::uint64_t bytes, int iterations, double* seconds) override {
    const std::uint64_t begin = monotonicNs();
    const std::uint64_t total = bytes * static_cast<std::uint64_t>(iterations);
    if (pair_.side == 1) {
      arrivedBefore_ += total;
      NetWait wait(pair_, "a payload over tcp");
      while (landing_.arrivedBytes.load(std::memory_order_acquire) < arrivedBefore_) {
        if (bundle_->gone()) return bundle_->status();
        ::usleep(20);  // the threads of the bundle have the CPUs
        if (Status status = wait.again(); !status) return status;
      }
      return say();
    }
    for (int i = 0; i < iterations; ++i) {
      NetWait wait(pair_, "room for a payload over tcp");
      while (!bundle_->post({.kind = kPayload, .data = buffer_.data(), .bytes = bytes})) {
        if (bundle_->gone()) return bundle_->status();
        ::usleep(20);
        if (Status status = wait.again(); !status) return status;
      }
    }
    if (Status status = listen(1, 20); !status) return status;
    *seconds = static_cast<double>(monotonicNs() - begin) * 1e-9;
    return {};
  }

  Status burst(int messages, double* seconds) override {
    const std::uint64_t begin = monotonicNs();
    if (pair_.side == 0) {
      for (int i = 0; i < messages; ++i) {
        if (Status status = say(); !status) return status;
      }
      if (Status status = listen(1); !status) return status;
    } else {
      if (Status status = listen(messages); !status) return status;
      if (Status status = say(); !status) return status;
    }
    *seconds = static_cast<double>(monotonicNs() - begin) * 1e-9;
    return {};
  }

 private:
  struct Landing final : FrameSink {
    std::byte* place(const FrameHeader& header, Status* bad) override {
      PieceHeader piece;
      std::memcpy(&piece, header.user.data(), sizeof piece);
      if (piece.offset <= bytes && header.bytes <= bytes - piece.offset) {
        return memory + piece.offset;
      }
      *bad = Status::error(Code::Remote, "a piece beyond the buffer");
      return nullptr;
    }
    void arrived(const FrameHeader& header) override {
      arrivedBytes.fetch_add(header.bytes, std::memory_order_release);
    }
    std::byte* memory = nullptr;
    std::uint64_t bytes = 0;
    std::atomic<std::uint64_t> arrivedBytes{0};
  };
  struct Pings final : FrameSink {
    std::byte* place(const FrameHeader& header, Status* bad) override {
      if (header.bytes == sizeof word) return reinterpret_cast<std::byte*>(&word);
      *bad = Status::error(Code::Remote, "a ping of another size");
      return nullptr;
    }
    void arrived(const FrameHeader&) override { ++count; }
    std::uint64_t word = 0;
    int count = 0;
  };

  Status say() override {
    const std::uint64_t word = 42;
    NetWait wait(pair_, "room for a message over tcp");
    while (!bundle_->sendControl(kPing, {}, &word, sizeof word)) {
      if (bundle_->gone()) return bundle_->status();
      if (Status status = wait.again(); !status) return status;
    }
    return {};
  }
  /// Until so many messages have come; with pauses where nothing is lost by them.
  Status listen() override { return listen(1); }
  Status listen(int messages, unsigned pauseUs = 0) {
    NetWait wait(pair_, "a message over tcp");
    while (pings_.count < messages) {
      if (bundle_->receiveControl(pings_)) continue;
      if (bundle_->gone()) return bundle_->status();
      if (pauseUs > 0) ::usleep(pauseUs);
      if (Status status = wait.again(); !status) return status;
    }
    pings_.count -= messages;
    return {};
  }

  NetBuffer buffer_;
  Landing landing_;
  Pings pings_;
  std::uint64_t arrivedBefore_ = 0;
  std::unique_ptr<Bundle> bundle_;
};

}  // namespace

Status makeTcpLink(const NetPair& pair, std::uint64_t maxBytes, std::unique_ptr<NetLink>* out) {
  auto link = std::make_unique<TcpLink>(pair);
  if (Status status = link->open(maxBytes); !status) return status.inContext("tcp");
  *out = std::move(link);
  return {};
}

}  // namespace hoccl::bench
