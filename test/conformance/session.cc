#include "test/conformance/session.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

#include "test/conformance/registering_net.h"

namespace conformance {
namespace {

/// A call that takes longer has waited for somebody (ToALatePeer lets it wait longer). Generous:
/// both cores are busy in these tests.
constexpr double kAtOnce = 1.2;

std::mutex logMutex;
std::vector<LogLine> logLines;

void logger(int level, unsigned long, const char*, int, const char* format, ...) {
  char text[2048];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const std::lock_guard<std::mutex> lock(logMutex);
  logLines.push_back({level, text});
  // Of a test that fails, with CONFORMANCE_LOG set: what the plugin said.
  if (std::getenv("CONFORMANCE_LOG") != nullptr) std::fprintf(stderr, "%s\n", text);
}

// Runs a call that must not block.
template <typename Call>
ncclResult_t atOnce(const char* what, Call&& call) {
  const double start = now();
  const ncclResult_t result = call();
  REQUIRE_SAYING(now() - start < kAtOnce * patience(), what);
  return result;
}

// Eight bytes at a time, so that checking does not cost more than sending.
std::uint64_t wordOf(std::uint64_t seed, std::uint64_t index) {
  std::uint64_t x = (seed + 0x9e3779b97f4a7c15ull) ^ (index * 0xbf58476d1ce4e5b9ull);
  x ^= x >> 31;
  return x * 0x94d049bb133111ebull;
}

}  // namespace

std::vector<LogLine> takeLog() {
  const std::lock_guard<std::mutex> lock(logMutex);
  return std::exchange(logLines, {});
}

hoccl::nccl_abi::Logger sessionLogger() { return logger; }

std::string onlyWarning() {
  std::string warning, all;
  int count = 0;
  for (const LogLine& line : takeLog()) {
    all += line.text + "\n";
    if (line.level != hoccl::nccl_abi::kLogWarn) continue;
    warning = line.text;
    ++count;
  }
  REQUIRE_SAYING(count == 1, "warnings in the log:\n" + all);
  REQUIRE(warning.find('\n') == std::string::npos);
  return warning;
}

Session::Session(int version, bool initialise) {
  library_ = ::dlopen(CONFORMANCE_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  REQUIRE_SAYING(library_ != nullptr, ::dlerror());
  net_ = netOf(library_, version);
  REQUIRE(net_ != nullptr);
  if (std::getenv("CONFORMANCE_REGISTER") != nullptr) net_ = registering(std::move(net_));
  if (initialise) REQUIRE_OK(net_->init(&context_, logger));
}

Session::~Session() { end(); }

void Session::end() {
  if (library_ == nullptr) return;
  if (context_ != nullptr) REQUIRE_OK(net_->finalize(context_));
  context_ = nullptr;
  net_.reset();
  REQUIRE(::dlclose(library_) == 0);
  library_ = nullptr;
}

void* Session::listen(Handle* handle, int device) {
  void* listener = nullptr;
  REQUIRE_OK(
      atOnce("listen", [&] { return net_->listen(context_, device, handle->data(), &listener); }));
  REQUIRE(listener != nullptr);
  return listener;
}

void* Session::connect(const Handle& handle, double seconds, int device) {
  Handle own = handle;
  void* comm = nullptr;
  const double start = now();
  while (comm == nullptr) {
    REQUIRE_OK(
        atOnce("connect", [&] { return net_->connect(context_, device, own.data(), &comm); }));
    REQUIRE(now() - start < seconds * patience());
    ::sched_yield();
  }
  return comm;
}

void* Session::accept(void* listener, double seconds) {
  void* comm = nullptr;
  const double start = now();
  while (comm == nullptr) {
    REQUIRE_OK(atOnce("accept", [&] { return net_->accept(listener, &comm); }));
    REQUIRE(now() - start < seconds * patience());
    ::sched_yield();
  }
  return comm;
}

void* Session::connectPair(const Side& side, int from, int device) {
  Handle handle;
  if (side.rank() == from) {
    side.take(handle.data(), handle.size());
    return connect(handle, 10, device);
  }
  void* const listener = listen(&handle, device);
  side.give(handle.data(), handle.size());
  void* const comm = accept(listener, 10);
  REQUIRE_OK(net_->closeListen(listener));
  return comm;
}

int finish(Net& net, void* request, int* sizes, double seconds) {
  const double start = now();
  for (int done = 0;;) {
    int size = -1;
    REQUIRE_OK(net.test(request, &done, sizes != nullptr ? sizes : &size));
    if (done != 0) return sizes != nullptr ? sizes[0] : size;
    REQUIRE(now() - start < seconds * patience());
    ::sched_yield();
  }
}

ncclResult_t failureOf(Net& net, void* request, double seconds) {
  const double start = now();
  for (;;) {
    int done = 0;
    int sizes[hoccl::nccl_abi::kMaxGroupedReceives] = {};
    const ncclResult_t result = net.test(request, &done, sizes);
    if (result != ncclSuccess) return result;
    REQUIRE_SAYING(done == 0, "it should have failed");
    REQUIRE_SAYING(now() - start < seconds * patience(), "no error in time");
    ::usleep(200);
  }
}

ncclResult_t failureOfSend(Net& net, void* comm, const void* data, std::size_t bytes, int tag) {
  const double start = now();
  for (;;) {
    void* request = nullptr;
    const ncclResult_t result = net.send(comm, data, bytes, tag, &request);
    if (result != ncclSuccess) return result;
    if (request != nullptr) return failureOf(net, request);
    REQUIRE(now() - start < 5 * patience());
  }
}

ncclResult_t failureOfReceive(Net& net, void* comm, void* data, std::size_t bytes, int tag) {
  void* request = nullptr;
  const ncclResult_t result = net.receive(comm, 1, &data, &bytes, &tag, &request);
  if (result != ncclSuccess) return result;
  REQUIRE(request != nullptr);
  return failureOf(net, request);
}

void* startSend(Net& net, void* comm, const void* data, std::size_t bytes, int tag) {
  void* request = nullptr;
  const double start = now();
  while (request == nullptr) {
    REQUIRE_OK(net.send(comm, data, bytes, tag, &request));
    REQUIRE(now() - start < 10 * patience());
    if (request == nullptr) ::sched_yield();
  }
  return request;
}

void* startReceive(Net& net, void* comm, void* data, std::size_t bytes, int tag) {
  void* request = nullptr;
  const double start = now();
  while (request == nullptr) {
    REQUIRE_OK(net.receive(comm, 1, &data, &bytes, &tag, &request));
    REQUIRE(now() - start < 10 * patience());
    if (request == nullptr) ::sched_yield();
  }
  return request;
}

void fill(void* data, std::size_t bytes, std::uint64_t seed) {
  auto* at = static_cast<unsigned char*>(data);
  std::uint64_t index = 0;
  for (; bytes >= 8; bytes -= 8, at += 8, ++index) {
    const std::uint64_t word = wordOf(seed, index);
    std::memcpy(at, &word, 8);
  }
  const std::uint64_t word = wordOf(seed, index);
  std::memcpy(at, &word, bytes);
}

bool matches(const void* data, std::size_t bytes, std::uint64_t seed) {
  const auto* at = static_cast<const unsigned char*>(data);
  std::uint64_t index = 0;
  for (; bytes >= 8; bytes -= 8, at += 8, ++index) {
    const std::uint64_t word = wordOf(seed, index);
    if (std::memcmp(at, &word, 8) != 0) return false;
  }
  const std::uint64_t word = wordOf(seed, index);
  return std::memcmp(at, &word, bytes) == 0;
}

bool allBytes(const void* data, std::size_t bytes, unsigned char value) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; ++i) {
    if (at[i] != value) return false;
  }
  return true;
}

}  // namespace conformance
