#include "plugin-net/verbs_link.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace hoccl::net_plugin {
namespace {

/// Below, a second queue pair gains nothing.
constexpr std::uint64_t kSmallestPiece = 64 << 10;
/// As long as 64 of them are enough: so that no queue pair waits for another's last piece.
constexpr std::uint64_t kUsualPiece = 1 << 20;
constexpr std::uint64_t kPieceUnit = 4096;
/// Receives of a queue pair, which hold no memory. A peer that finds none asks again, and again.
constexpr std::uint32_t kReceives = 512;

constexpr std::uint64_t roundUp(std::uint64_t value, std::uint64_t to) {
  return (value + to - 1) / to * to;
}

}  // namespace

VerbsLink::VerbsLink(LinkChannel& channel, std::shared_ptr<const VerbsGround> ground,
                     const VerbsSettings& settings, bool connecting, std::uint64_t mostPieceBytes)
    : channel_(channel),
      ground_(std::move(ground)),
      mostPieceBytes_(mostPieceBytes),
      records_(kSends + kReceiveSlots),
      out_(kSends),
      in_(kReceiveSlots),
      over_(kReceiveSlots),
      set_(*this, settings, connecting) {
  queue_.reserve(kSends);
  mores_.reserve(kReceiveSlots);
}

VerbsLink::~VerbsLink() { set_.stop(); }

Status VerbsLink::make(const PathExtent& extent) {
  return set_.make(ground_->nics, extent, records_.data(), records_.size() * sizeof(Record),
                   kReceives);
}

std::byte* VerbsLink::place(const FrameHeader& header, Status* bad) {
  if (header.kind == kBye && header.bytes == sizeof bye_) {
    return reinterpret_cast<std::byte*>(bye_.data());
  }
  return set_.place(header, bad);
}

void VerbsLink::arrived(const FrameHeader& header) {
  if (header.kind != kBye || header.bytes != sizeof bye_) return set_.arrived(header);
  for (std::uint32_t send = 0; send < out_.size(); ++send) {
    Out& out = out_[send];
    if (!out.active || bye_[out.slot].ready < out.pieces.turn) continue;
    out.pieces.pending = 0;
    out.pieces.landed = maskOf(out.pieces.pieces);
    settle(send);
  }
}

void VerbsLink::progress() {
  set_.poll();
  if (set_.gone()) return;
  if (!queue_.empty()) pump();
  set_.tend();
}

Status VerbsLink::failure() const {
  return set_.gone() ? Status::error(Code::Remote, set_.goneText()) : Status();
}

// --- Sending -------------------------------------------------------------------------------------

void VerbsLink::write(std::uint32_t send, std::uint32_t slot, const DirectPlace& place,
                      const std::byte* data, std::uint64_t bytes,
                      std::shared_ptr<const RailMemory> memory) {
  Out& out = out_[send];
  out.slot = slot;
  out.data = data;
  out.total = bytes;
  out.base = out.through = out.confirmed = 0;
  out.memory = std::move(memory);
  out.place = place;
  out.active = true;
  out.done = false;
  beginWindow(send);
  pump();
}

void VerbsLink::beginWindow(std::uint32_t send) {
  Out& out = out_[send];
  const std::uint64_t turn = out.base == 0 ? out.place.turn : out.pieces.turn + 1;
  const std::uint64_t bytes =
      std::min(out.total - out.base, Immediate::kMostPieces * mostPieceBytes_);
  const std::uint64_t paths = std::max<std::uint64_t>(1, set_.up());
  const std::uint64_t most = std::min(mostPieceBytes_, kUsualPiece);
  // A piece for each path, none too small nor, while 64 are enough, too large.
  std::uint64_t each =
      std::clamp((bytes + paths - 1) / paths, std::min(kSmallestPiece, most), most);
  each = std::max(each, (bytes + Immediate::kMostPieces - 1) / Immediate::kMostPieces);
  out.through = out.base + bytes;
  out.pieces.begin(turn, bytes, std::min(roundUp(each, kPieceUnit), mostPieceBytes_));
  outRecord(send) = {turn, out.total, out.through};
  queue_.push_back(send);
}

void VerbsLink::pump() {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < queue_.size(); ++i) {
    const std::uint32_t send = queue_[i];
    if (!pumpSend(send)) queue_[kept++] = send;
  }
  queue_.resize(kept);
}

/// Posts the send's pieces; false while some are left.
bool VerbsLink::pumpSend(std::uint32_t send) {
  Out& out = out_[send];
  while (out.pieces.pending != 0) {
    const auto piece = static_cast<std::uint32_t>(std::countr_zero(out.pieces.pending));
    Path* const path = set_.pathFor();
    if (path == nullptr) return false;
    const std::uint64_t at = out.base + out.pieces.offsetOf(piece);
    const std::uint64_t bytes = out.pieces.lengthOf(piece);
    const WorkId id{
        .kind = WorkId::Kind::Piece, .slot = send, .piece = piece, .units = WorkId::unitsOf(bytes)};
    PathWrite write{.data = out.data + at,
                    .bytes = bytes,
                    .localKey = out.memory->localKey(path->rail->index),
                    .target = out.place.address + at,
                    .remoteKey = out.place.keys[path->rail->index]};
    if (piece == 0) {
      write.record = &outRecord(send);
      write.recordBytes = sizeof(Record);
      write.recordTarget = set_.peerBase() + (kSends + out.slot) * sizeof(Record);
    }
    const std::uint32_t word =
        Immediate::piece(out.slot, piece, out.pieces.pieces, out.pieces.turn);
    if (!set_.post(*path, id, word, write)) return false;
    out.pieces.posted(piece, path->index);
  }
  return true;
}

void VerbsLink::landed(const WorkId& id) {
  Out& out = out_[id.slot];
  if (!out.active) return;
  out.pieces.completed(id.piece, id.path);
  settle(id.slot);
}

void VerbsLink::settle(std::uint32_t send) {
  Out& out = out_[send];
  if (!out.active || !out.pieces.complete()) return;
  if (out.through == out.total) {
    out.active = false;
    out.done = true;
    out.memory.reset();
    over_[out.slot] = out.pieces;
  } else if (out.confirmed >= out.through) {
    out.base = out.through;
    beginWindow(send);
  }
}

void VerbsLink::more(std::uint32_t send, std::uint64_t upTo) {
  Out& out = out_[send];
  if (!out.active) return;
  out.confirmed = std::max(out.confirmed, upTo);
  settle(send);
}

// --- Receiving -----------------------------------------------------------------------------------

void VerbsLink::open(std::uint32_t slot, void* data, std::uint64_t bytes, const RailMemory& memory,
                     DirectPlace* place) {
  In& in = in_[slot];
  in.open = true;
  in.capacity = bytes;
  in.through = 0;
  in.coming = {};
  place->address = reinterpret_cast<std::uint64_t>(data);
  place->turn = in.pieces.got.ready + 1;
  place->onDevice = memory.onDevice() ? 1 : 0;
  for (std::uint32_t i = 0; i < set_.rails().size(); ++i) place->keys[i] = memory.remoteKey(i);
}

bool VerbsLink::takeMore(std::uint32_t* slot, std::uint64_t* upTo) {
  if (mores_.empty()) return false;
  *slot = mores_.back();
  *upTo = in_[*slot].through;
  mores_.pop_back();
  return true;
}

void VerbsLink::close(std::uint32_t slot) {
  In& in = in_[slot];
  // A turn that was named and not used is over.
  if (in.open && !in.coming.whole) {
    ++in.pieces.got.ready;
    in.pieces.got.mask = 0;
  }
  in.open = false;
}

bool VerbsLink::heard(std::uint32_t immediate) {
  const std::uint32_t slot = Immediate::slot(immediate);
  if (Immediate::kind(immediate) != Immediate::Kind::Piece || slot >= in_.size()) return false;
  In& in = in_[slot];
  const std::int64_t ahead =
      Immediate::distance(Immediate::turn(immediate), in.pieces.got.ready, Immediate::kTurnBits);
  if (ahead <= 0) return true;  // come again
  if (ahead > 1 || !in.open || in.coming.whole) return false;
  switch (in.pieces.arrived(immediate)) {
    case InPieces::Arrival::Whole:
      break;
    case InPieces::Arrival::Piece:
    case InPieces::Arrival::Again:
      return true;
    case InPieces::Arrival::Nonsense:
      return false;
  }
  const Record record = inRecord(slot);
  if (record.turn != in.pieces.got.ready || record.through <= in.through ||
      record.through > record.total || record.total > in.capacity) {
    return false;
  }
  in.through = record.through;
  in.coming.total = record.total;
  in.coming.whole = record.through == record.total;
  if (!in.coming.whole) mores_.push_back(slot);
  return true;
}

void VerbsLink::sayBye() {
  for (std::size_t i = 0; i < in_.size(); ++i) bye_[i] = in_[i].pieces.got;
  (void)channel_.tell(kBye, bye_.data(), sizeof bye_);
}

// --- Failures ------------------------------------------------------------------------------------

void VerbsLink::fillReport(verbs_wire::Report* report) {
  for (std::size_t i = 0; i < in_.size(); ++i) report->slot[i] = in_[i].pieces.got;
}

void VerbsLink::failedOver(const Path& path, const verbs_wire::Report& report) {
  for (std::uint32_t slot = 0; slot < over_.size(); ++slot) {
    if (over_[slot].turn == 0 || !over_[slot].lost(path.index, report.slot[slot])) continue;
    // The memory is the caller's again: it cannot go once more.
    return set_.end(fmt::format(
        "it has not got a message that its NIC has acknowledged, over {}: the NIC or its driver "
        "has lost it",
        path.text()));
  }
  for (std::uint32_t send = 0; send < out_.size(); ++send) {
    Out& out = out_[send];
    if (!out.active) continue;
    if (out.pieces.failedOver(path.index, report.slot[out.slot]) &&
        std::find(queue_.begin(), queue_.end(), send) == queue_.end()) {
      queue_.push_back(send);
    }
    settle(send);
  }
}

}  // namespace hoccl::net_plugin
