#pragma once

#include <chrono>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "plugin-tuner/agreement_wire.h"

namespace hoccl {

/// What the agreement root knows of each communicator, and how it decides. No sockets and no clock
/// of its own: the service hands in messages with the time and sends what the ledger returns. Used
/// by one thread.
class AgreementLedger {
 public:
  using Clock = std::chrono::steady_clock;
  using ConnectionId = std::uint64_t;
  /// A complete message, shared by all it goes to.
  using Message = std::shared_ptr<const std::string>;
  struct Delivery {
    ConnectionId to;
    Message message;
  };

  AgreementLedger(std::chrono::milliseconds agreeTimeout, std::size_t maxVerdicts)
      : agreeTimeout_(agreeTimeout), maxVerdicts_(maxVerdicts) {}

  /// A rank's message of the given protocol version. An error means that the sender breaks the
  /// protocol: close its connection.
  Status take(ConnectionId from, std::uint16_t version, wire::Hello hello, Clock::time_point now,
              std::vector<Delivery>* out);
  /// The connection is gone.
  void forget(ConnectionId connection, std::vector<Delivery>* out);
  /// Decides what has waited long enough.
  void expire(Clock::time_point now, std::vector<Delivery>* out);
  /// When expire() has something to do; Clock::time_point::max() for never.
  [[nodiscard]] Clock::time_point nextDeadline() const;
  [[nodiscard]] std::size_t size() const { return groups_.size(); }

 private:
  struct Member {
    ConnectionId connection = 0;  ///< 0: has not come, or has left
    bool came = false;
    bool answered = false;  ///< in the open phase
    std::string host;
    std::string payload;
  };
  struct Group {
    AgreementKey key;
    std::uint32_t phase = 1;  ///< under way, or the next to begin
    bool open = false;        ///< somebody has answered in this phase
    Clock::time_point deadline;
    std::vector<Member> members;
    std::uint32_t answers = 0;
    std::size_t connections = 0;
    std::optional<std::uint32_t> left;  ///< a rank whose connection has closed
    /// The first rank that came; the others are compared with it.
    std::uint32_t reference = 0;
    std::uint16_t version = 0;
    std::uint64_t policyDigest = 0;
    std::string policyText;
    Message refusal;  ///< the verdict is no, for good
  };
  struct Seat {
    Group* group;
    std::uint32_t rank;
  };

  Group& groupFor(const wire::Hello& hello, std::uint16_t version);
  [[nodiscard]] std::string objection(const Group& group, const wire::Hello& hello,
                                      std::uint16_t version, ConnectionId from) const;
  void refuse(Group& group, const std::string& reason, std::vector<Delivery>* out);
  void agree(Group& group, std::vector<Delivery>* out);
  void close(Group& group);
  [[nodiscard]] std::string silentRanks(const Group& group) const;
  void dropOldest();

  std::chrono::milliseconds agreeTimeout_;
  std::size_t maxVerdicts_;
  std::list<Group> groups_;  ///< oldest first; addresses stay
  std::map<AgreementKey, std::list<Group>::iterator> byKey_;
  std::map<ConnectionId, Seat> seats_;
  std::set<std::pair<Clock::time_point, Group*>> deadlines_;  ///< of the open phases
};

}  // namespace hoccl
