#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <string>
#include <unordered_map>
#include <vector>

#include "plugin-net/attendant.h"
#include "plugin-net/endpoint.h"
#include "plugin-net/loopback.h"
#include "plugin-net/staged_receive.h"

namespace hoccl::net_plugin {

class ReceiveEnd final : public ReceiveConnection, private Attended {
 public:
  ReceiveEnd(std::string peer, std::shared_ptr<const VerbsGround> ground);
  ~ReceiveEnd() override;

  Status receive(std::span<const Receive> receives, Request** out) override;
  Status test(Request* request, bool* done, int* sizes) override;
  Status flush(std::span<void* const> data, const int* sizes, std::span<const Memory* const> memory,
               Request** out) override;
  Status prepareDirect() override;

  [[nodiscard]] const std::shared_ptr<const VerbsGround>& ground() const override {
    return ground_;
  }

  // --- Set-up, as SendEnd's.
  Status makeLink(const PathExtent& extent) {
    return end_.makeLink(ground_, ground_->settings, extent, false);
  }
  [[nodiscard]] FrameSink& dataSink() { return dataSink_; }
  void attach(std::unique_ptr<Bundle> bundle) { end_.attach(std::move(bundle)); }
  void startLink() { end_.startLink(); }
  Status advanceSetUp(bool* stands);

 private:
  struct TagState;

  /// A receive that is open. `gate`, `data` and `capacity` let pieces in; the rest of the first
  /// block is the workers', the second block the caller's.
  struct Slot {
    std::byte* data = nullptr;
    std::uint64_t capacity = 0;
    StagedReceive* staged = nullptr;  ///< into device memory: in place of `data` and `received`
    std::shared_ptr<const RailMemory> rails;  ///< it lies in, where pieces may come by queue pairs
    bool direct = false;                      ///< the sender has been told so
    bool onDevice = false;           ///< only the NICs reach it: a small message takes the loopback
    std::vector<std::byte> payload;  ///< onDevice: of a small message that has come
    bool writing = false;            ///< onDevice: it is on its way
    std::uint32_t written = 0;       ///< onDevice: it is there
    std::atomic<std::uint32_t> gate{0};      ///< the turn whose pieces may come; 0: none
    std::atomic<std::uint64_t> total{0};     ///< of the message, from its first piece on
    std::atomic<std::uint64_t> reserved{0};  ///< bytes that have been given a place
    std::atomic<std::uint64_t> received{0};  ///< bytes that are there

    std::uint32_t turn = 0;
    TagState* tag = nullptr;
    std::uint64_t index = 0;
    bool posted = false;  ///< the sender has been told of it
    bool done = false;
    bool small = false;       ///< staged: a small message has come for it
    std::uint64_t asked = 0;  ///< staged: bytes of the message that waits for its place
    std::uint64_t bytes = 0;  ///< once done, or small
    std::unique_ptr<StagedReceive> ownStaged;  ///< made with the first use
  };
  /// A small message that has come before its receive.
  struct Early {
    std::uint64_t index = 0;
    std::vector<std::byte> payload;
    bool complete = false;
    Slot* slot = nullptr;  ///< a receive that was opened while the payload was coming
  };
  struct TagState {
    int tag = 0;
    std::uint64_t next = 0;         ///< index of the next receive
    std::uint64_t nextMessage = 0;  ///< small messages come in order: the lowest index that may
    std::uint64_t unsaid = 0;       ///< small messages received and not given back yet
    bool large = false;             ///< receives are named as they are opened
    unsigned wasted = 0;            ///< small messages in a row into receives that were named
    std::deque<Slot*> open;         ///< by index
    std::list<Early> early;         ///< by index
    struct Asked {
      std::uint64_t index;
      std::uint64_t bytes;
    };
    std::deque<Asked> asked;  ///< announced messages without a receive
  };
  /// An open receive of the tag that may be sent ahead, to be found by its index.
  struct OpenByIndex {
    std::atomic<std::uint64_t> index{kNoIndex};
    std::atomic<std::uint32_t> slot{0};
  };
  static constexpr std::uint64_t kNoIndex = ~std::uint64_t{0};
  struct ReceiveRequest : Request {
    std::uint64_t lateNs = 0;  ///< when it began, if the connection was ending already
    std::array<Slot*, nccl_abi::kMaxGroupedReceives> slots{};
    std::size_t count = 0;
    std::uint32_t flushes = 0, flushed = 0;  ///< of a flush: reads, and those that are over
  };
  class ControlSink final : public FrameSink {
   public:
    explicit ControlSink(ReceiveEnd& end) : end_(end) {}
    std::byte* place(const FrameHeader& header, Status* bad) override;
    void arrived(const FrameHeader& header) override;

   private:
    ReceiveEnd& end_;
  };
  /// On the worker threads.
  class DataSink final : public FrameSink {
   public:
    explicit DataSink(ReceiveEnd& end) : end_(end) {}
    std::byte* place(const FrameHeader& header, Status* bad) override;
    void arrived(const FrameHeader& header) override;

   private:
    std::byte* placeAhead(const FrameHeader& header, Status* bad);
    ReceiveEnd& end_;
  };

  [[nodiscard]] TagState* stateOf(int tag);
  Status progress(bool* gone);
  Status progressLink();
  Status progressLoopback();
  /// Where a small message's payload goes that comes for it.
  std::byte* placeOfSmall(Slot& slot, std::uint64_t bytes);
  // Attended.
  void attend() override;
  [[nodiscard]] bool uneasy() const override;
  [[nodiscard]] int controlFd() override { return end_.bundle() ? end_.bundle()->controlFd() : -1; }
  [[nodiscard]] int workFd() override { return end_.link()->set().workFd(); }
  void work() override { end_.link()->set().work(); }
  void open(Slot& slot, const Receive& receive, TagState& tag);
  /// Its index may be asked for; `takesPieces` unless its message is here already, as a small one.
  void openAhead(Slot& slot, bool takesPieces);
  void namePlace(Slot& slot);
  void sayPosted(Slot& slot, std::uint64_t limit);
  /// Room for a piece in a receive, if pieces of that turn may come.
  static std::byte* reserve(Slot& slot, std::uint32_t turn, std::uint64_t offset,
                            std::uint64_t bytes, std::uint64_t total);
  /// What has not come of it by now does not come.
  [[nodiscard]] bool overdue(const ReceiveRequest& request);
  [[nodiscard]] bool finished(Slot& slot);
  void finish(Slot& slot, std::uint64_t bytes);
  void takeOff(Slot& slot, std::uint64_t bytes);
  /// A small message is there in full: in the receive's memory, or to be copied there.
  void smallCame(Slot& slot, std::uint64_t bytes);
  void deliver(Slot& slot, const std::vector<std::byte>& payload);
  Status progressStaged();
  void gaveBack(TagState& tag);
  /// A small message begins: where its payload goes.
  Status begin(const FrameHeader& header);
  void end();
  Status heardAnnounce(const Control& control);

  const std::shared_ptr<const VerbsGround> ground_;
  ControlSink controlSink_{*this};
  DataSink dataSink_{*this};
  Status heardBad_;  ///< what the peer said makes no sense, or does not fit
  std::unordered_map<int, TagState> tags_;
  int lastTag_ = 0;
  TagState* last_ = nullptr;  ///< of lastTag_
  std::array<Slot, kReceiveSlots> slots_;
  // The tag whose messages may be sent ahead. None with device memory, where a place has to be
  // found for every part of a message.
  const bool mayAhead_;
  TagState* ahead_ = nullptr;
  std::array<OpenByIndex, kReceiveSlots> openAhead_;  ///< by index modulo its size
  std::atomic<std::uint64_t> openedAhead_{0};         ///< receives of it opened so far
  std::vector<std::uint16_t> freeSlots_;
  std::vector<Slot*> staging_;          ///< staged ones that are not done
  std::unique_ptr<Loopback> loopback_;  ///< once device memory that NICs reach has been registered
  std::atomic<bool> prepared_{false};   ///< it is there
  std::vector<Slot*> looping_;          ///< those with a small message on its way into it
  const bool flushOff_;
  std::array<ReceiveRequest, kReceiveSlots> requests_;
  std::vector<std::uint16_t> freeRequests_;
  // The small message that is coming.
  bool coming_ = false;
  TagState* comingTag_ = nullptr;
  Slot* comingSlot_ = nullptr;
  Early* comingEarly_ = nullptr;
  std::uint64_t comingBytes_ = 0;
  std::byte* comingData_ = nullptr;  ///< into a receive that is staged
  Endpoint end_;                     ///< last: destroyed first, and with it whatever uses the above
};

}  // namespace hoccl::net_plugin
