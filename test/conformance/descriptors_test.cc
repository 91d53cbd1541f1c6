// Out of descriptors: an error and a line that says so, never a hang or a crash, and all is well
// again when there are some.

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "test/conformance/session.h"

namespace conformance {
namespace {

void allowDescriptors(rlim_t most) {
  rlimit limit{};
  REQUIRE(::getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = most;
  REQUIRE(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
}

/// The lowest one that is free.
int nextDescriptor() {
  const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  REQUIRE(fd >= 0);
  ::close(fd);
  return fd;
}

/// A connection of the process with itself; what it came to.
ncclResult_t connectToSelf(Session& session, void** listener, void** sender, void** receiver) {
  Net& net = session.net();
  Handle handle{};
  ncclResult_t result = net.listen(session.context(), 0, handle.data(), listener);
  const double start = now();
  while (result == ncclSuccess && (*sender == nullptr || *receiver == nullptr)) {
    if (*sender == nullptr) {
      result = net.connect(session.context(), 0, handle.data(), sender);
    }
    if (result == ncclSuccess && *receiver == nullptr) result = net.accept(*listener, receiver);
    if (now() - start > 7) return ncclInProgress;
    ::usleep(200);
  }
  return result;
}

bool saysWhy(const std::vector<LogLine>& log) {
  return std::any_of(log.begin(), log.end(), [](const LogLine& line) {
    return line.text.find("Too many open files") != std::string::npos ||
           line.text.find("out of descriptors") != std::string::npos;
  });
}

TEST(Descriptors, RunningOutIsAnErrorInTime) {
  const Outcome outcome = runAlone(
      [] {
        const std::size_t before = descriptorCount();
        bool failed = false, worked = false;
        for (int left = 0; !worked; ++left) {
          const std::string with = " with " + std::to_string(left) + " descriptors";
          REQUIRE_SAYING(left < 200, "no connection" + with);
          Session session(11);
          Net& net = session.net();
          allowDescriptors(static_cast<rlim_t>(nextDescriptor() + left));
          takeLog();
          void *listener = nullptr, *sender = nullptr, *receiver = nullptr;
          const double start = now();
          const ncclResult_t result = connectToSelf(session, &listener, &sender, &receiver);
          const double took = now() - start;
          allowDescriptors(1024);
          const std::vector<LogLine> log = takeLog();
          REQUIRE_SAYING(took < 6, std::to_string(took) + " s" + with);
          if (result == ncclSuccess) {
            worked = true;
            std::uint64_t out = 42, in = 0;
            void* const receive = startReceive(net, receiver, &in, sizeof in, 0);
            finish(net, startSend(net, sender, &out, sizeof out, 0));
            finish(net, receive);
            REQUIRE(in == out);
          } else {
            failed = true;
            std::string all;
            for (const LogLine& line : log) all += line.text + "\n";
            REQUIRE_SAYING(saysWhy(log), all + with);
            // What was turned away, and what became of it; not once for every look.
            REQUIRE_SAYING(log.size() <= 2, all + with);
          }
          REQUIRE_OK(net.closeSend(sender));
          REQUIRE_OK(net.closeReceive(receiver));
          REQUIRE_OK(net.closeListen(listener));
        }
        REQUIRE(failed);
        REQUIRE_SAYING(descriptorCount() <= before,
                       std::to_string(before) + " then " + std::to_string(descriptorCount()));
      },
      100);
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
