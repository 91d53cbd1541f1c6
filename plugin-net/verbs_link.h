#pragma once

// The queue pairs of a connection, and the messages they carry from one user's memory straight into
// the other's (RDMA write). The receiver names the place of a receive, with its address and keys
// (DirectPlace, in Posted); the sender cuts the message in pieces over all queue pairs. Each piece
// comes with an immediate that names the receive, and counts once (slot_pieces.h), so that one that
// goes again after a failure is harmless. Behind the first piece comes a record of the message's
// size, in memory of the link's own.
//
// A send is named by its sender, not by the receive it goes into: the receiver has all of a
// message, and may name its place again for the next one, before the sender has its
// acknowledgements.
//
// A message of more than a window (64 pieces) goes window by window: the next begins when the
// receiver has said More.

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "common/net/verbs/path_set.h"
#include "common/net/verbs/slot_pieces.h"
#include "plugin-net/rail_memory.h"
#include "plugin-net/wire.h"

namespace hoccl::net_plugin {

/// The way to the peer that the link's own messages take.
class LinkChannel {
 public:
  virtual ~LinkChannel() = default;
  [[nodiscard]] virtual bool tell(std::uint16_t kind, const void* payload, std::size_t bytes) = 0;
  [[nodiscard]] virtual bool ending() const = 0;
};

class VerbsLink final : private PathUser {
 public:
  static constexpr std::uint64_t kMostPieceBytes = 4 << 20;

  /// `settings`: those of the ground, but for what is this connection's.
  VerbsLink(LinkChannel& channel, std::shared_ptr<const VerbsGround> ground,
            const VerbsSettings& settings, bool connecting,
            std::uint64_t mostPieceBytes = kMostPieceBytes);
  ~VerbsLink() override;
  /// Queue pairs on the first NICs.
  Status make(const PathExtent& extent);
  /// Tells the peer of them, over the channel, which stands.
  void start() { set_.offer(); }

  // --- What comes over the channel.
  static constexpr bool owns(std::uint16_t kind) { return PathSet::owns(kind) || kind == kBye; }
  std::byte* place(const FrameHeader& header, Status* bad);
  void arrived(const FrameHeader& header);

  // --- Both ends.
  /// Takes completions, posts what there is room for, tends failures. No system call.
  void progress();
  [[nodiscard]] bool stands() const { return set_.stands(); }
  /// An error once nothing goes any more; its text names devices, addresses and queue pairs.
  [[nodiscard]] Status failure() const;
  /// The NICs read and write nobody's memory any more for this connection.
  void stop() { set_.stop(); }
  [[nodiscard]] PathSet& set() { return set_; }
  [[nodiscard]] const PathSet& set() const { return set_; }
  /// Whether the memory can be sent from or received into.
  [[nodiscard]] bool reaches(const RailMemory* memory, const void* data,
                             std::uint64_t bytes) const {
    return memory != nullptr && memory->holds(data, bytes) && memory->covers(set_.rails());
  }

  // --- Sending end.
  static constexpr std::uint32_t kSends = kReceiveSlots;
  /// Send number `send`, which is not under way, into the peer's receive `slot`.
  void write(std::uint32_t send, std::uint32_t slot, const DirectPlace& place,
             const std::byte* data, std::uint64_t bytes, std::shared_ptr<const RailMemory> memory);
  /// All of it is the peer's, and no NIC reads it.
  [[nodiscard]] bool written(std::uint32_t send) const { return out_[send].done; }
  /// The receiver has everything before `upTo`.
  void more(std::uint32_t send, std::uint64_t upTo);

  // --- Receiving end.
  /// A receive of [data, data + bytes) is open; `place` is for the peer.
  void open(std::uint32_t slot, void* data, std::uint64_t bytes, const RailMemory& memory,
            DirectPlace* place);
  struct Coming {
    bool whole = false;
    std::uint64_t total = 0;
  };
  [[nodiscard]] const Coming& coming(std::uint32_t slot) const { return in_[slot].coming; }
  /// A receive whose sender is to be told that it may go on (More); false: none.
  [[nodiscard]] bool takeMore(std::uint32_t* slot, std::uint64_t* upTo);
  /// Nothing more may come for it.
  void close(std::uint32_t slot);
  /// The end: what has arrived, for a sender that has not heard so yet.
  void sayBye();

  /// Behind the first piece of a window.
  struct Record {
    std::uint64_t turn = 0;
    std::uint64_t total = 0;    ///< of the message
    std::uint64_t through = 0;  ///< its bytes up to the end of this window
  };

 private:
  static constexpr std::uint16_t kBye = 0x301;
  using Bye = std::array<SlotReport, kReceiveSlots>;
  static_assert(kReceiveSlots <= Immediate::kMostSlots && kSends <= WorkId::kMostSlots);

  struct Out {
    std::uint32_t slot = 0;  ///< of the peer's
    OutPieces pieces;        ///< of the window
    const std::byte* data = nullptr;
    std::uint64_t total = 0, base = 0, through = 0;  ///< the window is [base, through)
    std::uint64_t confirmed = 0;                     ///< by More
    std::shared_ptr<const RailMemory> memory;
    DirectPlace place;
    bool active = false, done = false;
  };
  struct In {
    InPieces pieces;
    std::uint64_t capacity = 0, through = 0;
    Coming coming;
    bool open = false;
  };
  [[nodiscard]] Record& outRecord(std::uint32_t send) { return records_[send]; }
  [[nodiscard]] Record& inRecord(std::uint32_t slot) { return records_[kSends + slot]; }
  void beginWindow(std::uint32_t send);
  void settle(std::uint32_t send);
  void pump();
  bool pumpSend(std::uint32_t send);

  // PathUser.
  [[nodiscard]] bool tell(std::uint16_t kind, const void* payload, std::size_t bytes) override {
    return channel_.tell(kind, payload, bytes);
  }
  [[nodiscard]] bool ending() const override { return channel_.ending(); }
  [[nodiscard]] bool heard(std::uint32_t immediate) override;
  void landed(const WorkId& id) override;
  void fillReport(verbs_wire::Report* report) override;
  void failedOver(const Path& path, const verbs_wire::Report& report) override;

  LinkChannel& channel_;
  std::shared_ptr<const VerbsGround> ground_;
  const std::uint64_t mostPieceBytes_;
  std::vector<Record> records_;  ///< registered: those of the sends, then those of the receives
  std::vector<Out> out_;
  std::vector<In> in_;
  /// By receive: the pieces of the last message into it that is over for this end. The number of
  /// its send may be another's by now.
  std::vector<OutPieces> over_;
  std::vector<std::uint32_t> queue_;  ///< sends with pieces to post, oldest first
  std::vector<std::uint32_t> mores_;  ///< receives of which More is to be said
  Bye bye_{};
  PathSet set_;  ///< last: destroyed first, and with it what uses the above
};

}  // namespace hoccl::net_plugin
