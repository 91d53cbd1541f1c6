#include "test/conformance/hostile_peer.h"

#include <unistd.h>

#include "plugin-net/handle.h"

namespace conformance {
namespace {

using namespace hoccl;
using namespace hoccl::net_plugin;

constexpr double kLimit = 5;
constexpr useconds_t kPause = 200, kTakeUs = 200'000;

}  // namespace

std::unique_ptr<Bundle> finishSetup(BundleSetup& setup, FrameSink& sink) {
  const double start = now();
  while (setup.advance() == BundleSetup::State::Pending) {
    REQUIRE(now() - start < kLimit);
    ::usleep(kPause);
  }
  std::unique_ptr<Bundle> bundle;
  REQUIRE(setup.take(&sink, &bundle).ok());
  return bundle;
}

HostilePeer HostilePeer::sender(const Side& side) {
  Handle handle;
  side.take(handle.data(), handle.size());
  ListenerAddress to;
  REQUIRE(unpackHandle(handle.data(), &to).ok());
  std::unique_ptr<BundleSetup> setup;
  REQUIRE(connectBundle(to.address, to.nonce, to.address, makeHello(), {}, &setup).ok());
  HostilePeer peer;
  peer.bundle_ = finishSetup(*setup, *peer.data_);
  return peer;
}

HostilePeer HostilePeer::receiver(const Side& side) {
  HostilePeer peer;
  SocketAddress local;
  REQUIRE(SocketAddress::parse("127.0.0.1", &local).ok());
  REQUIRE(BundleListener::open(local, {}, &peer.listener_).ok());
  Handle handle;
  packHandle({peer.listener_->address(), peer.listener_->nonce()}, handle.data());
  side.give(handle.data(), handle.size());
  std::unique_ptr<BundleSetup> setup;
  const double start = now();
  while (!(setup = peer.listener_->accept())) {
    REQUIRE(now() - start < kLimit);
    ::usleep(kPause);
  }
  setup->accept(makeHello());
  peer.bundle_ = finishSetup(*setup, *peer.data_);
  return peer;
}

void* HostilePeer::acceptFor(const Side& side, Session& session) {
  Handle handle;
  void* const listener = session.listen(&handle);
  side.give(handle.data(), handle.size());
  void* const comm = session.accept(listener);
  REQUIRE_OK(session.net().closeListen(listener));
  return comm;
}

void* HostilePeer::connectFor(const Side& side, Session& session) {
  Handle handle;
  side.take(handle.data(), handle.size());
  return session.connect(handle);
}

void HostilePeer::say(Kind kind, const Control& control, std::size_t payload) {
  const double start = now();
  while (!bundle_->sendControl(static_cast<std::uint16_t>(kind), pack(control), payload_.data(),
                               payload)) {
    if (bundle_->gone()) return;
    REQUIRE(now() - start < kLimit);
    ::usleep(kPause);
  }
}

void HostilePeer::send(const PieceBody& body, std::size_t bytes) {
  post({.kind = static_cast<std::uint16_t>(Kind::Data),
        .user = std::bit_cast<std::array<std::byte, sizeof body>>(body),
        .bytes = bytes});
}

void HostilePeer::sendAhead(const AheadBody& body, std::size_t bytes) {
  post({.kind = static_cast<std::uint16_t>(Kind::Ahead),
        .user = std::bit_cast<std::array<std::byte, sizeof body>>(body),
        .bytes = bytes});
}

void HostilePeer::post(Transfer transfer) {
  transfer.data = payload_.data();
  transfer.done = moved_.get();
  const std::uint64_t whole = moved_->load() + transfer.bytes;
  REQUIRE(bundle_->post(transfer));
  const double start = now();
  while (moved_->load() < whole && !bundle_->gone()) {
    REQUIRE(now() - start < kLimit);
    ::usleep(kPause);
  }
}

bool HostilePeer::heard(Kind kind, std::size_t count, std::uint64_t index, Control* out) {
  (void)bundle_->receiveControl(*control_);
  std::size_t found = 0;
  for (const FrameHeader& header : control_->heard) {
    if (header.kind != static_cast<std::uint16_t>(kind)) continue;
    const Control control = controlOf(header);
    if (out != nullptr && (control.tag != 0 || control.index != index)) continue;
    if (out != nullptr) *out = control;
    ++found;
  }
  return found >= count;
}

Control HostilePeer::awaitPosted(std::uint64_t index) {
  Control control;
  const double start = now();
  while (!heard(Kind::Posted, 1, index, &control)) {
    REQUIRE(now() - start < kLimit);
    ::usleep(kPause);
  }
  return control;
}

void HostilePeer::awaitAnnounce(std::size_t count) {
  const double start = now();
  while (!heard(Kind::Announce, count, 0, nullptr)) {
    REQUIRE(now() - start < kLimit);
    ::usleep(kPause);
  }
}

void HostilePeer::letItTake() { ::usleep(kTakeUs); }

void HostilePeer::stayUntilClosed() {
  const double start = now();
  while (!bundle_->gone()) {
    (void)bundle_->receiveControl(*control_);
    REQUIRE(now() - start < kLimit);
    ::usleep(kPause);
  }
}

std::byte* HostilePeer::Sink::place(const FrameHeader& header, Status*) {
  memory.resize(header.bytes);
  return memory.data();
}

void HostilePeer::Sink::arrived(const FrameHeader& header) { heard.push_back(header); }

}  // namespace conformance
