#include "test/e2e/rank/rank.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

namespace e2e {
namespace {

constexpr useconds_t kPauseUs = 500;

}  // namespace

void failAt(const char* file, int line, const std::string& what) {
  const char* name = std::strrchr(file, '/');
  std::fprintf(stderr, "FAILED %s:%d: %s\n", name ? name + 1 : file, line, what.c_str());
  std::fflush(nullptr);
  ::_exit(1);
}

void say(const std::string& key, const std::string& value) {
  std::printf("%s %s\n", key.c_str(), value.c_str());
  std::fflush(stdout);
}

void sayStats(const std::string& key) {
  if (!nccl().hocclStatsJson) return say(key, "{}");
  std::string text(nccl().hocclStatsJson(nullptr, 0) + 1, '\0');
  nccl().hocclStatsJson(text.data(), text.size());
  text.pop_back();
  say(key, text);
}

std::string Rank::argument(const std::string& name, const std::string& otherwise) const {
  const auto found = arguments.find(name);
  return found == arguments.end() ? otherwise : found->second;
}

void Rank::post(const std::string& event, const std::string& text) const {
  // Renamed into place, so that nobody sees half of it.
  const std::string path = folder + "/" + event;
  const std::string draft = path + ".draft" + std::to_string(::getpid());
  std::ofstream(draft) << text;
  REQUIRE(std::rename(draft.c_str(), path.c_str()) == 0, "{}: {}", path, std::strerror(errno));
}

std::string Rank::await(const std::string& event, int timeoutMs) const {
  Patience patience{std::chrono::milliseconds(timeoutMs)};
  const std::string path = folder + "/" + event;
  while (::access(path.c_str(), F_OK) != 0) {
    REQUIRE(!patience.over(), "'{}' did not come within {} ms", event, timeoutMs);
    ::usleep(kPauseUs);
  }
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void Rank::barrier(const std::string& name) const {
  postMine("at-" + name);
  for (int other = 0; other < ranks; ++other) awaitOf("at-" + name, other);
}

ncclUniqueId Rank::uniqueId(const std::string& name) const {
  ncclUniqueId id{};
  if (rank == 0) {
    REQUIRE_NCCL(nccl().ncclGetUniqueId(&id));
    post("id-" + name, std::string(id.internal, sizeof id.internal));
    return id;
  }
  const std::string text = await("id-" + name);
  REQUIRE(text.size() == sizeof id.internal, "an id of {} bytes", text.size());
  std::memcpy(id.internal, text.data(), text.size());
  return id;
}

ncclComm_t Rank::communicator(const std::string& name) const {
  cuda();
  ncclComm_t comm = nullptr;
  const ncclUniqueId id = uniqueId(name);
  REQUIRE_NCCL(nccl().ncclCommInitRank(&comm, ranks, id, rank));
  markSmOps();
  return comm;
}

ncclResult_t awaitReady(ncclComm_t comm, int timeoutMs) {
  Patience patience{std::chrono::milliseconds(timeoutMs)};
  for (;;) {
    ncclResult_t state = ncclSuccess;
    REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &state));
    if (state != ncclInProgress || patience.over()) return state;
    ::usleep(kPauseUs);
  }
}

ncclResult_t awaitError(ncclComm_t comm, int timeoutMs) {
  Patience patience{std::chrono::milliseconds(timeoutMs)};
  for (;;) {
    ncclResult_t state = ncclSuccess;
    REQUIRE_NCCL(nccl().ncclCommGetAsyncError(comm, &state));
    if (state != ncclSuccess || patience.over()) return state;
    ::usleep(kPauseUs);
  }
}

}  // namespace e2e
