#include "bootstrap.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "bootstrap_root.h"

namespace standin {
namespace {

/// Every rank makes the id of NCCL_COMM_ID by itself, so it holds nothing random.
constexpr std::uint64_t kNamedMagic = 0x4e43434c49442121;
constexpr std::chrono::milliseconds kRetryPause{5};

std::uint64_t magicOf(const ncclUniqueId& id) {
  std::uint64_t magic;
  std::memcpy(&magic, id.internal, sizeof magic);
  return magic;
}

Outcome addressOf(const ncclUniqueId& id, sockaddr_in* out) {
  std::memcpy(out, id.internal + sizeof(std::uint64_t), sizeof *out);
  if (out->sin_family == AF_INET) return {};
  return Outcome::error(ncclInvalidArgument, "the unique id is not of this library");
}

void fillId(ncclUniqueId* id, std::uint64_t magic, const sockaddr_in& address) {
  std::memset(id, 0, sizeof *id);
  std::memcpy(id->internal, &magic, sizeof magic);
  std::memcpy(id->internal + sizeof magic, &address, sizeof address);
}

/// NCCL_COMM_ID is "host:port".
Outcome parseNamedId(const std::string& text, sockaddr_in* out) {
  const std::size_t colon = text.rfind(':');
  addrinfo hints{};
  hints.ai_family = AF_INET;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (colon == std::string::npos || colon + 1 == text.size() ||
      getaddrinfo(text.substr(0, colon).c_str(), text.substr(colon + 1).c_str(), &hints, &found) !=
          0) {
    return Outcome::error(ncclInvalidArgument,
                          fmt::format("NCCL_COMM_ID={}: not <IPv4 address or host>:<port>", text));
  }
  std::memcpy(out, found->ai_addr, sizeof *out);
  freeaddrinfo(found);
  return {};
}

/// One attempt to join; `answered` where its outcome is the root's word.
Outcome joinOnce(const sockaddr_in& address, const Join& join, const Bound& bound,
                 std::vector<std::uint32_t>* ports, bool* answered) {
  *answered = false;
  const std::string root = fmt::format("the root of rank {} of {}", join.rank, join.nranks);
  UniqueFd fd;
  if (Outcome done = connectTo(address, bound, &fd); !done) return done;
  if (Outcome done = sendAll(fd.get(), &join, sizeof join, bound, root); !done) return done;
  Answer answer;
  if (Outcome done = receiveAll(fd.get(), &answer, sizeof answer, bound, root); !done) return done;
  *answered = true;
  if (answer.failed) {
    std::string text(std::min<std::uint32_t>(answer.count, 1024), ' ');
    if (Outcome done = receiveAll(fd.get(), text.data(), text.size(), bound, root); !done)
      return done;
    return Outcome::error(ncclRemoteError, "initialisation: " + text);
  }
  if (answer.count != join.nranks) {
    return Outcome::error(ncclInternalError, "the root answered for another communicator");
  }
  ports->resize(answer.count);
  return receiveAll(fd.get(), ports->data(), ports->size() * sizeof ports->front(), bound, root);
}

}  // namespace

Outcome makeUniqueId(ncclUniqueId* id) {
  sockaddr_in address{};
  if (const char* named = std::getenv("NCCL_COMM_ID"); named && named[0]) {
    if (Outcome parsed = parseNamedId(named, &address); !parsed) return parsed;
    fillId(id, kNamedMagic, address);
    return {};
  }
  UniqueFd listener;
  Place place = 0;
  if (Outcome made = listenHere(&listener, &place); !made) return made;
  std::uint64_t magic = 0;
  if (getrandom(&magic, sizeof magic, 0) != sizeof magic) {
    return Outcome::error(ncclSystemError, "getrandom failed");
  }
  fillId(id, magic, addressAt(place));
  return startRoot(std::move(listener), magic);
}

Outcome openNamedId(const ncclUniqueId& id, const Bound& bound) {
  sockaddr_in address{};
  if (magicOf(id) != kNamedMagic) return {};
  if (Outcome known = addressOf(id, &address); !known) return known;
  while (true) {
    UniqueFd listener;
    Outcome made = listenAt(address, &listener);
    if (made) return startRoot(std::move(listener), kNamedMagic);
    // The root of the communicator before this one may still be telling its last rank.
    if (errno != EADDRINUSE) return made;
    if (Outcome over = bound.check("NCCL_COMM_ID's address to be free"); !over) return over;
    std::this_thread::sleep_for(kRetryPause);
  }
}

Outcome releaseUniqueId(const ncclUniqueId& id, const Bound& bound) {
  sockaddr_in address{};
  if (Outcome known = addressOf(id, &address); !known) return known;
  UniqueFd fd;
  if (Outcome done = connectTo(address, bound, &fd); !done) return done;
  const Join join{magicOf(id), 0, 0, 0, 1};
  return sendAll(fd.get(), &join, sizeof join, bound, "the root of an id");
}

Outcome Reception::open() {
  if (Outcome made = listenHere(&listener_, &place_); !made) return made;
  door_ = std::make_unique<Door>(listener_.get(), sizeof(Greeting));
  return {};
}

Outcome Reception::next(std::uint64_t magic, std::uint64_t index, const Bound& bound,
                        const std::string& whom, UniqueFd* out, Greeting* greeting) {
  auto& mine = early_[index];
  while (mine.empty()) {
    UniqueFd fd;
    Greeting theirs;
    if (Outcome done = door_->next(bound, whom, &fd, &theirs); !done) return done;
    if (theirs.magic == magic) early_[theirs.index].emplace_back(std::move(fd), theirs);
  }
  *out = std::move(mine.front().first);
  *greeting = mine.front().second;
  mine.pop_front();
  if (mine.empty()) early_.erase(index);
  return {};
}

Outcome meet(const ncclUniqueId& id, int rank, int nranks, const Reception& reception,
             const Bound& bound, Meeting* out) {
  sockaddr_in address{};
  if (Outcome known = addressOf(id, &address); !known) return known;
  out->magic = magicOf(id);
  out->rank = rank;
  const Join join{out->magic, static_cast<std::uint32_t>(rank), static_cast<std::uint32_t>(nranks),
                  reception.place(), 0};
  while (true) {
    bool answered = false;
    Outcome done = joinOnce(address, join, bound, &out->ports, &answered);
    // At the address of NCCL_COMM_ID rank 0 may not listen yet, or still for the communicator
    // before this one.
    if (done || answered || out->magic != kNamedMagic) return done;
    if (!bound.check("")) return done;
    std::this_thread::sleep_for(kRetryPause);
  }
}

Outcome connectAll(const Meeting& meeting, Reception& reception, const Bound& bound,
                   std::vector<UniqueFd>* peers) {
  // To the lower ranks first, without waiting for their accept (their backlog holds all), then
  // from the higher ones.
  const int nranks = static_cast<int>(meeting.ports.size());
  peers->clear();
  peers->resize(meeting.ports.size());
  const Greeting greeting{.magic = meeting.magic, .rank = meeting.rank};
  for (int peer = 0; peer < meeting.rank; ++peer) {
    if (Outcome done = connectTo(addressAt(meeting.ports[peer]), bound, &(*peers)[peer]); !done) {
      return done;
    }
    if (Outcome done = sendAll((*peers)[peer].get(), &greeting, sizeof greeting, bound,
                               fmt::format("rank {}", peer));
        !done) {
      return done;
    }
  }
  for (int missing = nranks - 1 - meeting.rank; missing > 0;) {
    UniqueFd fd;
    Greeting theirs;
    if (Outcome done = reception.next(meeting.magic, 0, bound,
                                      fmt::format("{} ranks to connect", missing), &fd, &theirs);
        !done) {
      return done;
    }
    if (theirs.rank <= meeting.rank || theirs.rank >= nranks || (*peers)[theirs.rank]) continue;
    (*peers)[theirs.rank] = std::move(fd);
    --missing;
  }
  return {};
}

}  // namespace standin
