#include "common/net/tcp/tcp_connection.h"

#include <unistd.h>

#include <cstring>
#include <utility>

#include "common/base/log.h"
#include "common/base/time.h"

namespace hoccl {
namespace {

constexpr std::size_t kPage = 4096;
/// The loop comes by many times in a microsecond; the socket is not asked so often, since each
/// question is a system call.
constexpr std::uint64_t kAskAgainNs = 2000;

constexpr std::size_t roundUp(std::size_t value, std::size_t to) {
  return (value + to - 1) / to * to;
}

enum Kind : std::uint16_t { kMessage = 1, kCredit = 2, kWrite = 3 };

/// PieceHeader::user of a slot's pieces.
struct WriteHeader {
  std::uint32_t slot, padding;
  std::uint64_t turn;
  std::uint64_t bytes;  ///< of all pieces
};

struct SlotFlags {
  Flag ready, credit, mirrored;
};

struct Piece {
  std::uint64_t offset;
  WriteHeader write;
};
Piece pieceOf(const FrameHeader& header) {
  PieceHeader piece;
  std::memcpy(&piece, header.user.data(), sizeof piece);
  Piece result{piece.offset, {}};
  std::memcpy(&result.write, piece.user.data(), sizeof result.write);
  return result;
}

}  // namespace

Status TcpConnection::create(const PeerId& peer, const StagingGeometry& geometry,
                             std::unique_ptr<TcpConnection>* out) {
  SharedMemory memory;
  const std::size_t bytes = roundUp(2 * geometry.slots * sizeof(SlotFlags), kPage) +
                            2 * geometry.slots * roundUp(geometry.slotBytes, kPage);
  if (Status status = SharedMemory::create("hoccl-tcp", bytes, &memory); !status) return status;
  memory.closeFd();
  out->reset(new TcpConnection(peer, geometry, std::move(memory)));
  return {};
}

TcpConnection::TcpConnection(const PeerId& peer, const StagingGeometry& geometry,
                             SharedMemory memory)
    : peer_(peer),
      memory_(std::move(memory)),
      arrivedBytes_(geometry.slots),
      returned_(geometry.slots),
      written_(geometry.slots) {
  auto* base = static_cast<std::byte*>(memory_.data());
  auto* flags = reinterpret_cast<SlotFlags*>(base);
  std::byte* slots = base + roundUp(2 * geometry.slots * sizeof(SlotFlags), kPage);
  staging_.base = base;
  staging_.bytes = memory_.size();
  staging_.slotBytes = geometry.slotBytes;
  for (std::uint32_t i = 0; i < 2 * geometry.slots; ++i) {
    const Slot slot{.data = slots + i * roundUp(geometry.slotBytes, kPage),
                    .ready = &flags[i].ready,
                    .credit = &flags[i].credit,
                    .mirrored = &flags[i].mirrored};
    (i < geometry.slots ? staging_.out : staging_.in).push_back(slot);
  }
}

TcpConnection::~TcpConnection() = default;

Status TcpConnection::open(BundleSetup& setup) { return setup.take(&slotSink_, &bundle_); }

bool TcpConnection::peerGone() const {
  return broken_.load(std::memory_order_acquire) || bundle_->gone();
}

std::string TcpConnection::goneReason() const {
  if (broken_.load(std::memory_order_acquire))
    return "its mover sent something that makes no sense";
  return fmt::format("its mover has ended or cannot be reached: {}", bundle_->status().message());
}

void TcpConnection::watch() {
  std::uint64_t rings = 0;
  [[maybe_unused]] ssize_t got = ::read(bundle_->watchFd(), &rings, sizeof rings);
  if (bundle_->gone()) logDebug("{}", bundle_->status().message());
}

void TcpConnection::nonsense(const char* what) {
  if (broken_.exchange(true, std::memory_order_release)) return;
  logError("{}: its mover sent {} that makes no sense", bundle_->peerText(), what);
}

// --- Messages and credits ------------------------------------------------------------------------

bool TcpConnection::trySend(const Message& message) {
  return bundle_->sendControl(kMessage, {}, &message, sizeof message);
}

bool TcpConnection::tryReceive(Message* message) {
  if (inboxCount_ == 0) {
    returnCredits();
    const std::uint64_t now = monotonicNs();
    if (now - quietSinceNs_ < kAskAgainNs) return false;
    if (!bundle_->receiveControl(messageSink_)) quietSinceNs_ = now;
    if (inboxCount_ == 0) return false;
  }
  *message = inbox_[inboxHead_];
  inboxHead_ = (inboxHead_ + 1) % kInbox;
  --inboxCount_;
  return true;
}

std::byte* TcpConnection::MessageSink::place(const FrameHeader& header, Status* bad) {
  if (header.kind == kMessage && header.bytes == sizeof(Message)) {
    if (owner->inboxCount_ == kInbox) return nullptr;
    return reinterpret_cast<std::byte*>(
        &owner->inbox_[(owner->inboxHead_ + owner->inboxCount_) % kInbox]);
  }
  if (header.kind == kCredit && header.bytes == sizeof(Credit)) {
    return reinterpret_cast<std::byte*>(&owner->credit_);
  }
  *bad = Status::error(Code::Remote, fmt::format("a message of kind {} and {} bytes that makes no "
                                                 "sense to a mover",
                                                 header.kind, header.bytes));
  return nullptr;
}

void TcpConnection::MessageSink::arrived(const FrameHeader& header) {
  if (header.kind == kMessage && header.bytes > 0) {
    ++owner->inboxCount_;
    return;
  }
  const Credit& credit = owner->credit_;
  const bool fits = header.kind == kCredit && header.bytes > 0 &&
                    credit.slot < owner->staging_.out.size() &&
                    credit.turn <= owner->written_[credit.slot];
  if (!fits) {
    owner->nonsense("a credit");
    return;
  }
  Flag& flag = *owner->staging_.out[credit.slot].credit;
  if (!flag.reached(credit.turn)) flag.set(credit.turn);
}

/// Tells the peer of in-slots that a copy lane, or the mover, has given back.
void TcpConnection::returnCredits() {
  for (std::uint32_t i = 0; i < returned_.size(); ++i) {
    const std::uint64_t turn = staging_.in[i].credit->value.load(std::memory_order_acquire);
    if (turn <= returned_[i]) continue;
    const Credit credit{i, 0, turn};
    if (!bundle_->sendControl(kCredit, {}, &credit, sizeof credit)) return;
    returned_[i] = turn;
  }
}

// --- Slots ---------------------------------------------------------------------------------------

bool TcpConnection::tryWrite(std::uint32_t slot, std::uint64_t bytes, std::uint64_t turn) {
  Transfer transfer;
  transfer.kind = kWrite;
  const WriteHeader header{slot, 0, turn, bytes};
  std::memcpy(transfer.user.data(), &header, sizeof header);
  transfer.data = staging_.out[slot].data;
  transfer.bytes = bytes;
  // The peer may answer before this returns, but the answer is read by this thread.
  if (!bundle_->post(transfer)) return false;
  written_[slot] = turn;
  return true;
}

std::byte* TcpConnection::SlotSink::place(const FrameHeader& header, Status* bad) {
  const auto [offset, write] = pieceOf(header);
  const Staging& staging = owner->staging_;
  const bool fits = header.kind == kWrite && write.slot < staging.in.size() &&
                    write.bytes <= staging.slotBytes && offset <= write.bytes &&
                    header.bytes <= write.bytes - offset &&
                    !staging.in[write.slot].ready->reached(write.turn);
  if (fits) return staging.in[write.slot].data + offset;
  *bad = Status::error(Code::Remote,
                       fmt::format("{} bytes for slot {} at {} (turn {}) that make no sense here",
                                   header.bytes, write.slot, offset, write.turn));
  return nullptr;
}

void TcpConnection::SlotSink::arrived(const FrameHeader& header) {
  if (header.bytes == 0) {
    owner->nonsense("an empty piece of a slot");
    return;
  }
  const WriteHeader write = pieceOf(header).write;
  std::atomic<std::uint64_t>& arrived = owner->arrivedBytes_[write.slot];
  const std::uint64_t before = arrived.fetch_add(header.bytes, std::memory_order_acq_rel);
  if (before + header.bytes < write.bytes) return;
  // The last piece, after those of the other sockets.
  arrived.store(0, std::memory_order_relaxed);
  owner->staging_.in[write.slot].ready->set(write.turn);
}

}  // namespace hoccl
