#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "common/runtime/import_cache.h"
#include "common/runtime/segment.h"

namespace hoccl {

/// The loop's imports over their whole life: which are mapped, which have to go, and who in the
/// application waits until they have gone (rule 8). Unmapping itself is the control thread's, in
/// the order in which `nextUnmap` gives it out.
///
/// An import is taken out only in `nextUnmap`, between two rounds of the loop: pointers to it that
/// an operation or a function of the loop holds stay good until then.
class ImportKeeper {
 public:
  /// `idleNs`: imports not used for so long (up to twice that) go; 0: they stay.
  ImportKeeper(Segment segment, std::size_t capacity, std::uint64_t idleNs);

  /// As ImportCache.
  Import* acquire(const BufferRef& buffer, bool* fresh);
  void release(Import* import);
  [[nodiscard]] Import* find(std::uint64_t allocation) { return cache_.find(allocation); }
  /// The control thread has mapped a span.
  void addSpan(const BufferRef& buffer, CUdeviceptr address);
  /// An operation on a span has come, which acquires it, or never will: its pin is over.
  void notePin(std::uint64_t span);
  /// An import has become Ready or Failed.
  void settled() { work_ = true; }

  /// Takes a Drop, DropIdle or DropSpans.
  void drop(const OpDescriptor& descriptor);
  /// An import that a drop has been waiting for long enough for somebody to ask why; null: none.
  [[nodiscard]] const Import* waitedFor(std::uint64_t nowNs) const;
  /// As `describe`, of drops that wait only for peers.
  void describeHeld(std::uint64_t nowNs);
  /// Why it is still there, for those who stop waiting. Once for each drop.
  void describe(const Import* import, const std::string& text);

  /// Something may have to be unmapped.
  [[nodiscard]] bool work() const { return work_; }
  /// The next address to unmap, and what is there; false when there is none, and then drops that
  /// waited for an import have gone on.
  bool nextUnmap(CUdeviceptr* address, BufferRef* which);
  /// A peer maps the allocation that nextUnmap has just given out, too: drops of it wait until
  /// `unhold` of that ticket.
  std::uint64_t hold() {
    holds_.insert(++lastHold_);
    return lastHold_;
  }
  void unhold(std::uint64_t ticket) {
    holds_.erase(ticket);
    endSpans();
    work_ = work_ || !drops_.empty();
  }
  /// Takes back the last ticket, which nobody needed.
  void unholdLast() { holds_.erase(lastHold_--); }
  /// The oldest of those given out, which was that allocation, is unmapped.
  void unmapped(std::uint64_t allocation);
  /// Something waits for pins, of whose end nothing tells: to be looked at again from time to time.
  [[nodiscard]] bool waitsForPins() const { return waitsForPins_; }

  /// Marks what has been idle for too long, once its time has come.
  void sweep(std::uint64_t nowNs);
  /// When `sweep` has to be called next; 0: not before there are imports again.
  [[nodiscard]] std::uint64_t sweepAtNs() const { return sweepAtNs_; }

 private:
  static constexpr std::uint64_t kNotYet = ~0ull;
  struct PendingDrop {
    std::uint32_t slot;
    std::uint64_t sequence;
    std::uint64_t allocation;    ///< that has to be out of the cache first; 0: none
    std::uint64_t base, bytes;   ///< of the spans that have to be out; 0 bytes: none
    std::uint64_t askedBefore;   ///< unmaps given out when it came
    std::uint64_t describeAtNs;  ///< 0 once that is done
    /// Once everything of it is out of the cache: the unmap that has to be done, the last one given
    /// out.
    std::uint64_t until = kNotYet;
    std::uint64_t heldUntil = 0;  ///< and of the peers' holds the last one given out
  };
  void answerDrops();
  void endSpans();
  void describe(PendingDrop& drop, const std::string& text);
  [[nodiscard]] bool held(const PendingDrop& drop) const {
    return drop.until != kNotYet && !holds_.empty() && *holds_.begin() <= drop.heldUntil;
  }
  /// What has to be out of the cache first and is not; null: nothing.
  [[nodiscard]] const Import* left(const PendingDrop& drop) const;

  Segment segment_;
  ImportCache cache_;
  std::vector<PendingDrop> drops_;
  bool work_ = false;
  bool waitsForPins_ = false;
  std::uint64_t unmapsAsked_ = 0, unmapsDone_ = 0;
  std::set<std::uint64_t> holds_;
  std::uint64_t lastHold_ = 0;
  struct EndingSpan {
    std::uint64_t id, heldUntil;
  };
  std::vector<EndingSpan> ending_;  ///< unmapped here, but perhaps not by all peers
  std::uint64_t idleNs_;
  std::uint64_t sweepAtNs_ = 0;
  std::uint64_t sweptAt_ = 0;  ///< the cache's clock at the last sweep
};

}  // namespace hoccl
