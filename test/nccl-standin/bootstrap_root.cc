#include "bootstrap_root.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "worker.h"

namespace standin {
namespace {

/// An id that nobody uses keeps its thread for so long.
constexpr std::chrono::minutes kUnusedId{10};

/// Waits for all ranks of one id and tells each where the others listen.
class Gathering {
 public:
  Gathering(UniqueFd listener, std::uint64_t magic)
      : listener_(std::move(listener)), magic_(magic) {}
  void run();

 private:
  std::string take(UniqueFd fd, const Join& join);
  void answerAll(const std::string& failure);

  UniqueFd listener_;
  std::uint64_t magic_;
  std::vector<UniqueFd> members_;
  std::vector<std::uint32_t> ports_;
  std::size_t joined_ = 0;
};

void Gathering::run() {
  Bound bound(nullptr, kUnusedId);
  Door door(listener_.get(), sizeof(Join));
  while (true) {
    UniqueFd fd;
    Join join;
    if (!door.next(bound, "ranks of the id", &fd, &join)) break;
    if (join.release && join.magic == magic_) return;
    const std::string failure = take(std::move(fd), join);
    if (!failure.empty()) return answerAll(failure);
    if (joined_ > 0 && joined_ == members_.size()) return answerAll("");
    if (joined_ == 1) bound = Bound();
  }
  std::string missing;
  for (std::size_t rank = 0; rank < members_.size(); ++rank) {
    if (!members_[rank]) missing += fmt::format(" {}", rank);
  }
  answerAll(fmt::format("of {} ranks, these did not join:{}", members_.size(), missing));
}

std::string Gathering::take(UniqueFd fd, const Join& join) {
  if (join.magic != magic_) return "";
  if (join.nranks == 0 || join.rank >= join.nranks || join.nranks > 65536) {
    return fmt::format("there is no rank {} of {}", join.rank, join.nranks);
  }
  if (members_.empty()) {
    members_.resize(join.nranks);
    ports_.resize(join.nranks);
  }
  if (join.nranks != members_.size()) {
    return fmt::format("rank {} says {} ranks, others say {}", join.rank, join.nranks,
                       members_.size());
  }
  if (members_[join.rank]) return fmt::format("rank {} joined twice", join.rank);
  members_[join.rank] = std::move(fd);
  ports_[join.rank] = join.port;
  ++joined_;
  return "";
}

void Gathering::answerAll(const std::string& failure) {
  std::string message;
  const Answer answer{!failure.empty(),
                      static_cast<std::uint32_t>(failure.empty() ? ports_.size() : failure.size())};
  message.append(reinterpret_cast<const char*>(&answer), sizeof answer);
  if (failure.empty()) {
    message.append(reinterpret_cast<const char*>(ports_.data()), ports_.size() * sizeof ports_[0]);
  }
  message += failure;
  // A member that has gone finds out by itself; the others are still served.
  for (const UniqueFd& member : members_) {
    if (member) (void)sendAll(member.get(), message.data(), message.size(), Bound(), "a rank").code;
  }
}

}  // namespace

Outcome startRoot(UniqueFd listener, std::uint64_t magic) {
  // A std::function has to be copyable, a descriptor is not.
  auto gathering = std::make_shared<Gathering>(std::move(listener), magic);
  std::thread thread;
  Outcome started = startThread([gathering] { gathering->run(); }, &thread);
  if (started) thread.detach();
  return started;
}

}  // namespace standin
