#include "bootstrap.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>

namespace standin {
namespace {

/// An id that nobody uses keeps its thread for so long.
constexpr std::chrono::minutes kUnusedId{10};

struct Join {
  std::uint64_t magic;
  std::uint32_t rank, nranks, port, reserved;
};
/// Followed by `count` ports, or, where `failed` is set, by `count` bytes of text.
struct Answer {
  std::uint32_t failed, count;
};

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

Outcome makeUniqueId(ncclUniqueId* id) {
  UniqueFd listener;
  std::uint16_t port = 0;
  if (Outcome made = listenLoopback(&listener, &port); !made) return made;
  std::uint64_t magic = 0;
  if (getrandom(&magic, sizeof magic, 0) != sizeof magic) {
    return Outcome::error(ncclSystemError, "getrandom failed");
  }
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &magic, sizeof magic);
  std::memcpy(id->internal + sizeof magic, &address, sizeof address);

  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Outcome outcome;
  try {
    std::thread([gathering = Gathering(std::move(listener), magic)]() mutable {
      gathering.run();
    }).detach();
  } catch (const std::system_error& error) {
    outcome = Outcome::error(ncclSystemError, fmt::format("no thread: {}", error.what()));
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return outcome;
}

Outcome meet(const ncclUniqueId& id, int rank, int nranks, const Bound& bound, Meeting* out) {
  sockaddr_in address{};
  std::memcpy(&out->magic, id.internal, sizeof out->magic);
  std::memcpy(&address, id.internal + sizeof out->magic, sizeof address);
  if (address.sin_family != AF_INET) {
    return Outcome::error(ncclInvalidArgument, "the unique id is not of this library");
  }
  out->rank = rank;
  std::uint16_t port = 0;
  if (Outcome made = listenLoopback(&out->listener, &port); !made) return made;
  const std::string root = fmt::format("the root of rank {} of {}", rank, nranks);
  UniqueFd fd;
  if (Outcome done = connectLoopback(ntohs(address.sin_port), bound, &fd); !done) return done;
  const Join join{out->magic, static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(nranks),
                  port, 0};
  if (Outcome done = sendAll(fd.get(), &join, sizeof join, bound, root); !done) return done;
  Answer answer;
  if (Outcome done = receiveAll(fd.get(), &answer, sizeof answer, bound, root); !done) return done;
  if (answer.failed) {
    std::string text(std::min<std::uint32_t>(answer.count, 1024), ' ');
    if (Outcome done = receiveAll(fd.get(), text.data(), text.size(), bound, root); !done)
      return done;
    return Outcome::error(ncclRemoteError, "initialisation: " + text);
  }
  if (answer.count != static_cast<std::uint32_t>(nranks)) {
    return Outcome::error(ncclInternalError, "the root answered for another communicator");
  }
  out->ports.resize(answer.count);
  return receiveAll(fd.get(), out->ports.data(), out->ports.size() * sizeof out->ports[0], bound,
                    root);
}

Outcome connectAll(const Meeting& meeting, const Bound& bound, std::vector<UniqueFd>* peers) {
  // To the lower ranks first, without waiting for their accept (their backlog holds all), then
  // from the higher ones.
  const int nranks = static_cast<int>(meeting.ports.size());
  peers->clear();
  peers->resize(meeting.ports.size());
  struct Greeting {
    std::uint64_t magic;
    std::uint64_t rank;
  } greeting{meeting.magic, static_cast<std::uint64_t>(meeting.rank)};
  for (int peer = 0; peer < meeting.rank; ++peer) {
    const auto port = static_cast<std::uint16_t>(meeting.ports[peer]);
    if (Outcome done = connectLoopback(port, bound, &(*peers)[peer]); !done) return done;
    if (Outcome done = sendAll((*peers)[peer].get(), &greeting, sizeof greeting, bound,
                               fmt::format("rank {}", peer));
        !done) {
      return done;
    }
  }
  Door door(meeting.listener.get(), sizeof(Greeting));
  for (int missing = nranks - 1 - meeting.rank; missing > 0;) {
    UniqueFd fd;
    Greeting theirs;
    if (Outcome done = door.next(bound, fmt::format("{} ranks to connect", missing), &fd, &theirs);
        !done) {
      return done;
    }
    const bool ours = theirs.magic == meeting.magic && theirs.rank < meeting.ports.size() &&
                      static_cast<int>(theirs.rank) > meeting.rank && !(*peers)[theirs.rank];
    if (!ours) continue;
    (*peers)[theirs.rank] = std::move(fd);
    --missing;
  }
  return {};
}

}  // namespace standin
