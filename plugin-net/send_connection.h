#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "plugin-net/attendant.h"
#include "plugin-net/endpoint.h"
#include "plugin-net/staged_send.h"

namespace hoccl::net_plugin {

/// Messages under way on one connection: as many as there may be receives.
inline constexpr std::size_t kSendRequests = kReceiveSlots;
static_assert(kSendRequests == VerbsLink::kSends);

class SendEnd final : public SendConnection, private Attended {
 public:
  /// Large messages up to `inlineBytes` go over the control socket. `ground`: its NICs may be used;
  /// null: none.
  SendEnd(std::string peer, std::uint64_t inlineBytes, std::shared_ptr<const VerbsGround> ground);
  ~SendEnd() override;

  Status send(const void* data, std::size_t bytes, int tag, const Memory* memory,
              Request** out) override;
  Status test(Request* request, bool* done, int* sizes) override;
  [[nodiscard]] const std::shared_ptr<const VerbsGround>& ground() const override {
    return ground_;
  }

  // --- Set-up.
  Status makeLink(const VerbsSettings& settings, const PathExtent& extent) {
    return end_.makeLink(ground_, settings, extent, true);
  }
  [[nodiscard]] FrameSink& dataSink() { return refuseData_; }
  void attach(std::unique_ptr<Bundle> bundle) { end_.attach(std::move(bundle)); }
  void startLink() { end_.startLink(); }
  /// With the sockets: `stands` becomes true once messages may go.
  Status advanceSetUp(bool* stands);

 private:
  /// A receive that the peer has named before its message was sent.
  struct PostedReceive {
    std::uint64_t index = ~std::uint64_t{0};
    std::uint64_t bytes = 0;
    std::uint64_t limit = 0;  ///< 0: it takes all at once
    Place place;
    bool isDirect = false;
    DirectPlace direct;
  };
  struct TagState {
    unsigned waiting = 0;      ///< large messages that are not with the data sockets yet
    std::uint64_t next = 0;    ///< index of the next message
    std::uint64_t unread = 0;  ///< small messages that the receiver has not given back
    /// By index modulo its size. Receives that are open number at most kReceiveSlots, and all with
    /// an index of `next` or more are open, so none overwrites one that still counts.
    std::array<PostedReceive, kReceiveSlots> posted;
  };
  enum class Stage {
    Free,
    Small,     ///< said; done once the kernel has it
    Asking,    ///< waits for the receive
    Queueing,  ///< waits for room in the data sockets' queue, or for the receiver to say More; of
               ///< this and the above: TagState::waiting
    Saying,    ///< goes over the control socket, part by part
    Moving,    ///< with the data sockets
    Writing,   ///< with the queue pairs
    Staged,    ///< from device memory
  };
  struct SendRequest : Request {
    Stage stage = Stage::Free;
    const std::byte* data = nullptr;
    std::uint64_t bytes = 0;
    int tag = 0;
    TagState* state = nullptr;  ///< of that tag
    std::uint64_t index = 0;
    std::uint64_t position = 0;  ///< Small: of the control stream
    PostedReceive receive;       ///< from Queueing on; Staged: once `named`
    bool named = false;
    bool ahead = false;                       ///< Queueing, Moving: without `receive`
    std::uint64_t said = 0;                   ///< Saying: bytes of it
    std::uint64_t posted = 0;                 ///< Queueing: bytes of it
    std::unique_ptr<StagedSend> staged;       ///< made with the first use
    std::shared_ptr<const RailMemory> rails;  ///< it lies in
    std::atomic<std::uint64_t> moved{0};
  };
  class ControlSink final : public FrameSink {
   public:
    explicit ControlSink(SendEnd& end) : end_(end) {}
    std::byte* place(const FrameHeader& header, Status* bad) override;
    void arrived(const FrameHeader& header) override;

   private:
    SendEnd& end_;
    DirectPlace direct_;  ///< of a Posted that is coming
  };
  class RefuseData final : public FrameSink {
   public:
    std::byte* place(const FrameHeader& header, Status* bad) override;
    void arrived(const FrameHeader& header) override;
  };

  [[nodiscard]] TagState* stateOf(int tag);
  [[nodiscard]] TagState* knownState(int tag);
  [[nodiscard]] SendRequest* takeRequest();
  [[nodiscard]] std::uint32_t numberOf(const SendRequest& request) const {
    return static_cast<std::uint32_t>(&request - requests_.data());
  }
  Status progress(bool* gone);
  Status progressLink();
  // Attended.
  void attend() override;
  [[nodiscard]] bool uneasy() const override;
  [[nodiscard]] int controlFd() override { return end_.bundle() ? end_.bundle()->controlFd() : -1; }
  [[nodiscard]] int workFd() override { return end_.link()->set().workFd(); }
  void work() override { end_.link()->set().work(); }
  Status sendSmall(TagState& tag, SendRequest& request, bool* said);
  Status sendLarge(TagState& tag, SendRequest& request);
  Status takePosted(SendRequest& request, const PostedReceive& receive);
  void tryMove(SendRequest& request);
  Status progressStaged();
  void sayParts(SendRequest& request);
  [[nodiscard]] bool finished(const SendRequest& request) const;
  void heardPosted(const Control& control, const DirectPlace* direct);
  void heardMore(const Control& control);
  void heardCredit(const Control& control);

  ControlSink controlSink_{*this};
  RefuseData refuseData_;
  const std::shared_ptr<const VerbsGround> ground_;
  const bool mayAhead_;  ///< not with device memory, see ReceiveEnd
  const std::uint64_t inlineBytes_;
  Status heardBad_;  ///< what the peer said makes no sense, or cannot be done
  std::unordered_map<int, TagState> tags_;
  int lastTag_ = 0;
  TagState* last_ = nullptr;     ///< of lastTag_
  TagState* ahead_ = nullptr;    ///< the tag that may be sent ahead
  std::uint64_t aheadUpTo_ = 0;  ///< behind the last message sent ahead
  std::uint64_t namedUpTo_ = 0;  ///< behind the last receive of that tag that is known to be open
  std::array<SendRequest, kSendRequests> requests_;
  std::vector<std::uint16_t> free_;
  std::vector<SendRequest*> staging_;  ///< Staged ones
  unsigned unheard_ = 0;               ///< tests since the control socket was last looked at
  Endpoint end_;  ///< last: destroyed first, and with it whatever uses the above
};

}  // namespace hoccl::net_plugin
