#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "plugin-net/device_memory.h"
#include "plugin-net/wire.h"

namespace hoccl::net_plugin {

/// A receive into device memory: a window of parts, each with a staging slot into which the
/// sockets' threads receive, and from which the mover then copies. Slots move on to later parts,
/// and the sender is told how far it may go.
///
/// A receive holds slots from when its place is named. Unasked, it is named only with slots beyond
/// half of them; when the sender has asked, the message is there and will come, so that its slots
/// become free again whatever other receives wait for.
class StagedReceive {
 public:
  ~StagedReceive() { end(); }
  void begin(std::shared_ptr<const Registration> memory, void* data);

  // --- Caller's thread.
  /// Takes slots for a message of up to `bytes`; `limit` is how far they reach. False: no room.
  bool reserve(std::uint64_t bytes, bool asked, std::uint64_t* limit);
  /// A small message has come instead, and nothing of what was reserved has been used.
  std::byte* small(std::uint64_t bytes);
  void smallIsHere() { smallHere_ = true; }
  /// `total`: of the message, 0 while it is not known. `limit` grows when the sender may go on.
  Status progress(std::uint64_t total, std::uint64_t* limit);
  /// All of it is in device memory.
  [[nodiscard]] bool finished(std::uint64_t total) const;
  /// All of it has come: nothing of the peer's is needed any more.
  [[nodiscard]] bool allCame(std::uint64_t total) const;
  void end();

  // --- The threads that receive. No message of the peer's makes them touch anything but slots of
  // this one.
  /// Null: that piece does not belong there.
  std::byte* place(std::uint64_t offset, std::uint64_t bytes, std::uint64_t total);
  /// A piece whose place was given is there. Behind it the receive may be over, and another one's.
  void arrived(std::uint64_t offset, std::uint64_t bytes, std::uint64_t total);

 private:
  static constexpr std::size_t kParts = 16;
  static constexpr std::uint64_t kNone = ~std::uint64_t{0};
  enum State : std::uint32_t { Free, Filling, Copying, Misplaced };
  struct Part {
    std::atomic<std::uint32_t> state{Free};
    std::atomic<std::uint64_t> number{kNone};
    std::atomic<std::uint64_t> reserved{0}, arrived{0};
    std::uint32_t slot = 0;
  };
  [[nodiscard]] static std::uint64_t lengthOf(std::uint64_t number, std::uint64_t total);
  void assign(std::uint32_t slot);
  [[nodiscard]] bool copyIn(std::uint32_t slot, std::uint64_t offset, std::uint64_t bytes);
  Status progressSmall();

  std::shared_ptr<const Registration> memory_;
  std::byte* data_ = nullptr;
  std::array<Part, kParts> parts_;
  std::vector<std::uint32_t> spare_;  ///< slots between two parts
  std::uint64_t next_ = 0;            ///< number of the next part to be given a slot
  std::uint64_t copied_ = 0;          ///< bytes in device memory
  std::atomic<std::uint64_t> came_{0};

  std::vector<std::byte> small_;
  bool isSmall_ = false, smallHere_ = false;
  std::uint32_t smallSlot_ = 0;
  bool smallCopying_ = false;
};

}  // namespace hoccl::net_plugin
