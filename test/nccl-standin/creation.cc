#include "creation.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "call_log.h"
#include "driver.h"
#include "group.h"

namespace standin {
namespace {

constexpr unsigned kConfigMagic = 0xcafebeef;

/// What children are told apart by; all ranks compute the same.
std::uint64_t childMagic(const ncclComm& parent, int color) {
  std::uint64_t hash = parent.magic;
  for (const std::uint64_t part : {parent.children, static_cast<std::uint64_t>(color)}) {
    hash = (hash ^ part) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 29;
  }
  return hash;
}

/// What every one of `members` says about the child to be made, by rank. They meet at the lowest of
/// them; the connections of operations, which may be under way or broken, are not used.
Outcome gatherOffers(ncclComm* parent, const std::vector<int>& members, const Greeting& mine,
                     const Bound& bound, std::vector<Greeting>* all) {
  const Greeting none{.color = NCCL_SPLIT_NOCOLOR};
  all->assign(parent->nranks, none);
  (*all)[parent->rank] = mine;
  const int hub = members.front();
  const std::size_t bytes = all->size() * sizeof none;
  if (parent->rank != hub) {
    const std::string whom = fmt::format("rank {}, where a new communicator is made", hub);
    UniqueFd fd;
    if (Outcome done = connectTo(addressAt(parent->ports[hub]), bound, &fd); !done) return done;
    if (Outcome done = sendAll(fd.get(), &mine, sizeof mine, bound, whom); !done) return done;
    return receiveAll(fd.get(), all->data(), bytes, bound, whom);
  }
  std::vector<UniqueFd> fds(parent->nranks);
  for (std::size_t missing = members.size() - 1; missing > 0;) {
    UniqueFd fd;
    Greeting theirs;
    if (Outcome done = parent->reception.next(
            parent->magic, mine.index, bound,
            fmt::format("{} ranks that make the new communicator", missing), &fd, &theirs);
        !done) {
      return done;
    }
    if (std::find(members.begin(), members.end(), theirs.rank) == members.end() ||
        fds[theirs.rank]) {
      return Outcome::error(ncclInvalidUsage,
                            fmt::format("rank {} makes another communicator than rank {}",
                                        theirs.rank, parent->rank));
    }
    (*all)[theirs.rank] = theirs;
    fds[theirs.rank] = std::move(fd);
    --missing;
  }
  for (const UniqueFd& fd : fds) {
    // A member that has gone is missed by those it is to connect to.
    if (fd) (void)sendAll(fd.get(), all->data(), bytes, bound, "a rank").code;
  }
  return {};
}

/// Common to all children: this rank's reception, and everybody's offer.
Outcome offer(ncclComm* parent, ncclComm* child, const std::vector<int>& members, Greeting mine,
              std::vector<Greeting>* all) {
  mine.magic = parent->magic;
  mine.index = ++parent->children;
  mine.rank = parent->rank;
  if (child) {
    if (Outcome opened = child->reception.open(); !opened) return opened;
    mine.port = child->reception.place();
  }
  const Bound bound(&parent->aborted, timeout(), child ? &child->aborted : nullptr);
  return gatherOffers(parent, members, mine, bound, all);
}

/// The first id is where the ranks meet. The others only make real NCCL faster.
Outcome initialise(ncclComm* comm, const std::vector<ncclUniqueId>& ids) {
  const Bound bound(&comm->aborted);
  const ncclUniqueId& id = ids.front();
  // A grown communicator has one already.
  if (!comm->reception.place()) {
    if (Outcome opened = comm->reception.open(); !opened) return opened;
  }
  if (comm->rank == 0) {
    if (Outcome opened = openNamedId(id, bound); !opened) return opened;
  }
  Meeting meeting;
  if (Outcome done = meet(id, comm->rank, comm->nranks, comm->reception, bound, &meeting); !done) {
    return done;
  }
  comm->magic = meeting.magic;
  comm->ports = meeting.ports;
  if (Outcome done = connectAll(meeting, comm->reception, bound, &comm->peers); !done) return done;
  if (comm->rank != 0) return {};
  for (std::size_t i = 1; i < ids.size(); ++i) {
    if (Outcome done = releaseUniqueId(ids[i], bound); !done) return done;
  }
  return {};
}

}  // namespace

ncclResult_t invalid(const std::string& text) {
  return failInGroup(report(Outcome::error(ncclInvalidArgument, text)));
}

ncclResult_t checkConfig(const char* function, const ncclConfig_t* config) {
  if (!config) return ncclSuccess;
  if (config->magic != kConfigMagic) {
    return invalid(
        fmt::format("{}: the config does not come from NCCL_CONFIG_INITIALIZER", function));
  }
  if (config->blocking != NCCL_CONFIG_UNDEF_INT && config->blocking != 0 && config->blocking != 1) {
    return invalid(fmt::format("{}: config.blocking = {}", function, config->blocking));
  }
  return ncclSuccess;
}

bool wantsBlocking(const ncclConfig_t* config, bool otherwise) {
  if (!config || config->blocking == NCCL_CONFIG_UNDEF_INT) return otherwise;
  return config->blocking != 0;
}

ncclResult_t initRank(const char* function, ncclComm_t* newcomm, int nranks,
                      const std::vector<ncclUniqueId>& ids, int rank, const ncclConfig_t* config,
                      const int* device) {
  if (!newcomm || nranks < 1 || rank < 0 || rank >= nranks || ids.empty() ||
      ids.size() > static_cast<std::size_t>(nranks)) {
    return invalid(fmt::format("{}: rank {} of {}, {} ids", function, rank, nranks, ids.size()));
  }
  if (const ncclResult_t bad = checkConfig(function, config); bad != ncclSuccess) return bad;
  ncclComm* comm = newComm(rank, nranks);
  if (device) {
    comm->device = *device;
    comm->context = Driver::get().primaryContext(*device);
  }
  comm->blocking = wantsBlocking(config, true);
  record(function, {.comm = comm});
  *newcomm = comm;
  return submit(Job{comm, comm, newcomm, [comm, ids] { return initialise(comm, ids); }});
}

ncclComm* newChild(const ncclComm& parent, const ncclConfig_t* config) {
  ncclComm* child = newComm(0, 0);
  child->device = parent.device;
  child->context = parent.context;
  child->blocking = wantsBlocking(config, parent.blocking);
  return child;
}

Outcome makeChild(ncclComm* parent, ncclComm* child, const std::vector<int>& members, int color,
                  int key) {
  std::vector<Greeting> offers;
  Greeting mine{.color = color, .key = key};
  if (Outcome done = offer(parent, child, members, mine, &offers); !done) return done;
  if (!child) return {};
  std::vector<int> same;
  for (const int rank : members) {
    if (offers[rank].color == color) same.push_back(rank);
  }
  std::sort(same.begin(), same.end(), [&](int a, int b) {
    return std::pair(offers[a].key, a) < std::pair(offers[b].key, b);
  });
  Meeting meeting;
  for (const int rank : same) {
    if (rank == parent->rank) meeting.rank = static_cast<int>(meeting.ports.size());
    meeting.ports.push_back(offers[rank].port);
  }
  meeting.magic = child->magic = childMagic(*parent, color);
  child->rank = meeting.rank;
  child->nranks = static_cast<int>(same.size());
  child->ports = meeting.ports;
  return connectAll(meeting, child->reception, Bound(&child->aborted), &child->peers);
}

Outcome growParent(ncclComm* parent, ncclComm* child, const std::optional<ncclUniqueId>& id) {
  std::vector<int> members(parent->nranks);
  for (int rank = 0; rank < parent->nranks; ++rank) members[rank] = rank;
  Greeting mine;
  mine.hasId = id.has_value();
  if (id) mine.id = *id;
  std::vector<Greeting> offers;
  if (Outcome done = offer(parent, child, members, mine, &offers); !done) return done;
  const auto root = std::find_if(offers.begin(), offers.end(),
                                 [](const Greeting& theirs) { return theirs.hasId != 0; });
  if (root == offers.end()) {
    return Outcome::error(ncclInvalidUsage, "ncclCommGrow: no rank of the parent gives an id");
  }
  return initialise(child, {root->id});
}

}  // namespace standin
