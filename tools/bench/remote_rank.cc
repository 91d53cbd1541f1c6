#include "tools/bench/remote_rank.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <fstream>
#include <vector>

#include "common/base/config.h"
#include "common/base/random.h"
#include "common/base/shared_memory.h"
#include "common/net/tcp/interfaces.h"
#include "tools/bench/line_channel.h"
#include "tools/bench/locate.h"
#include "tools/bench/rank_process.h"
#include "tools/bench/start_page.h"

namespace hoccl::bench {
namespace {

using Json = nlohmann::json;

/// Of a connection that says nothing.
constexpr std::uint64_t kGreetingMs = 10000;
constexpr int kBacklog = 16;

Status newKey(std::string* out) {
  std::array<std::uint8_t, 16> bytes{};
  if (Status status = random128(&bytes); !status) return status;
  out->clear();
  for (const unsigned byte : bytes) *out += fmt::format("{:02x}", byte);
  return {};
}

/// Whole or not at all, and for the user alone.
Status writeFile(const std::string& file, const std::string& text) {
  const std::string whole = file + ".new";
  const UniqueFd to(::open(whole.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
  if (!to || ::write(to.get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()) ||
      ::rename(whole.c_str(), file.c_str()) != 0) {
    return Status::fromErrno(fmt::format("cannot write {}", file), errno);
  }
  return {};
}

Status listenOn(SocketAddress* address, UniqueFd* out) {
  sockaddr_storage at{};
  socklen_t length = address->toSockaddr(&at);
  UniqueFd socket(::socket(address->family(), SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket || ::bind(socket.get(), reinterpret_cast<sockaddr*>(&at), length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&at), &(length = sizeof at)) != 0) {
    return Status::fromErrno(fmt::format("cannot listen at {}", address->text()), errno);
  }
  *out = std::move(socket);
  return SocketAddress::fromSockaddr(reinterpret_cast<sockaddr*>(&at), length, address);
}

void noDelay(int socket) {
  const int on = 1;
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

/// A rank process whose channel is that socket. It is alone here, and has a page of its own.
Status spawnRank(const std::string& program, const std::vector<std::string>& environment,
                 int socket) {
  SharedMemory page;
  if (Status s = SharedMemory::create("hoccl-bench", kStartPageBytes, &page); !s) return s;
  // Above the numbers they get in the child.
  const UniqueFd channel(::fcntl(socket, F_DUPFD_CLOEXEC, 10)),
      shared(::fcntl(page.fd(), F_DUPFD_CLOEXEC, 10));
  if (!channel || !shared) return Status::fromErrno("fcntl F_DUPFD_CLOEXEC", errno);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, channel.get(), kRankChannelFd);
  ::posix_spawn_file_actions_adddup2(&actions, shared.get(), kRankPageFd);
  ::posix_spawn_file_actions_adddup2(&actions, STDERR_FILENO, STDOUT_FILENO);
  std::vector<std::string> texts{program, "bench-rank", "--parent", std::to_string(::getpid())};
  std::vector<char*> arguments, variables;
  for (std::string& text : texts) arguments.push_back(text.data());
  for (const std::string& text : environment) variables.push_back(const_cast<char*>(text.c_str()));
  arguments.push_back(nullptr);
  variables.push_back(nullptr);
  pid_t child = -1;
  const int error =
      ::posix_spawn(&child, program.c_str(), &actions, nullptr, arguments.data(), variables.data());
  ::posix_spawn_file_actions_destroy(&actions);
  return error == 0 ? Status() : Status::fromErrno(fmt::format("cannot start {}", program), error);
}

Json toJson(const RankEnvironment& environment) {
  return {{"preload", environment.preload},
          {"hostId", environment.hostId},
          {"libraryPath", environment.libraryPath},
          {"extra", environment.extra}};
}

RankEnvironment environmentOf(const Json& json) {
  RankEnvironment environment;
  environment.preload = json.at("preload");
  environment.hostId = json.at("hostId");
  environment.libraryPath = json.at("libraryPath");
  environment.extra = json.at("extra").get<std::vector<std::string>>();
  return environment;
}

/// One connection: who knows the key gets a rank.
Status serve(UniqueFd socket, const std::string& key, const std::string& program) {
  noDelay(socket.get());
  LineChannel channel(std::move(socket));
  Json asked;
  if (Status status = channel.receive(&asked, kGreetingMs); !status) return status;
  if (!asked.contains("key") || asked["key"] != key) {
    return Status::error(Code::Remote, "a connection that does not know the key");
  }
  Status status;
  try {
    // The answer first: behind it the socket is the rank's.
    const std::vector<std::string> environment =
        environmentOf(asked.at("environment")).applyTo(ownEnvironment());
    if (status = channel.send({{"ok", true}}, kGreetingMs); !status) return status;
    return spawnRank(program, environment, channel.fd());
  } catch (const Json::exception& error) {
    return Status::error(Code::Remote, fmt::format("it asks for no rank: {}", error.what()));
  }
}

int fail(const Status& status) {
  std::fprintf(stderr, "hoccl bench serve: %s\n", status.message().c_str());
  return 1;
}

}  // namespace

Status readRemoteHost(const std::string& file, RemoteHost* out) {
  std::ifstream stream(file);
  const Json json = Json::parse(stream, nullptr, false);
  SocketAddress address;
  if (!json.is_object() || !json.contains("address") || !json["address"].is_string() ||
      !json.contains("key") || !json["key"].is_string() ||
      !SocketAddress::parse(json["address"].get<std::string>(), &address)) {
    return Status::error(Code::InvalidArgument,
                         fmt::format("--remote {}: {}", file,
                                     stream.is_open() ? "not what `hoccl bench serve` writes"
                                                      : "there is no such file; on the other host "
                                                        "`hoccl bench serve --file` writes it"));
  }
  *out = {json["address"], json["key"]};
  return {};
}

Status startRemoteRank(const RemoteHost& host, const RankEnvironment& environment,
                       std::uint64_t timeoutMs, UniqueFd* out) {
  const auto at = [&] { return fmt::format("`hoccl bench serve` at {}", host.address); };
  SocketAddress address;
  if (Status status = SocketAddress::parse(host.address, &address); !status) return status;
  sockaddr_storage to{};
  const socklen_t length = address.toSockaddr(&to);
  UniqueFd socket(::socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return Status::fromErrno("socket", errno);
  int error = 0;
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&to), length) != 0) {
    error = errno;
    pollfd done{socket.get(), POLLOUT, 0};
    socklen_t size = sizeof error;
    if (error == EINPROGRESS) {
      error = ::poll(&done, 1, static_cast<int>(timeoutMs)) == 1 ? 0 : ETIMEDOUT;
      if (error == 0) (void)::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    }
  }
  if (error != 0) return Status::fromErrno(at() + " cannot be reached", error);
  ::fcntl(socket.get(), F_SETFL, 0);
  noDelay(socket.get());
  UniqueFd kept(::fcntl(socket.get(), F_DUPFD_CLOEXEC, 0));
  LineChannel channel(std::move(socket));
  Status status =
      channel.send({{"key", host.key}, {"environment", toJson(environment)}}, timeoutMs);
  Json answer;
  if (status) status = channel.receive(&answer, timeoutMs);
  if (!status) return status.inContext(at());
  *out = std::move(kept);
  return {};
}

int serveRanks(const std::string& file) {
  Config config;
  InterfaceChoice choice;
  std::vector<Interface> interfaces;
  Locations locations("");
  RemoteHost host;
  SocketAddress address;
  UniqueFd listener;
  Status status = Config::fromEnvironment(&config);
  if (status) status = InterfaceChoice::fromEnvironment(config, &choice);
  if (status) status = chooseInterfaces(choice, &interfaces);
  if (status) status = Locations::ofThisProgram(&locations);
  if (status) status = newKey(&host.key);
  if (status) {
    address = interfaces.front().address;
    status = listenOn(&address, &listener);
  }
  if (status) {
    status = writeFile(file, Json({{"address", address.text()}, {"key", host.key}}).dump() + "\n");
  }
  if (!status) return fail(status);
  ::signal(SIGCHLD, SIG_IGN);  // nobody asks how a rank ended: the bench sees its channel
  std::fprintf(stderr, "hoccl bench serve: ranks for `--remote %s` at %s\n", file.c_str(),
               address.text().c_str());
  for (;;) {
    UniqueFd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && errno != EINTR && errno != ECONNABORTED) {
      return fail(Status::fromErrno("accept", errno));
    }
    if (!socket) continue;
    if (status = serve(std::move(socket), host.key, locations.program()); !status) {
      (void)fail(status);
    }
  }
}

}  // namespace hoccl::bench
