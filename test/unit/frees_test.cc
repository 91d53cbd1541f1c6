// Frees of device memory on their way through the preloaded library, what the process keeps of
// exported allocations, and whether its frees can be seen.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "common/gpu/exported_allocations.h"
#include "common/gpu/frees_seen.h"
#include "common/runtime/live_movers.h"

namespace hoccl {
namespace {

const std::string kShim = HOCCL_TEST_BUILD_DIR "/plugin-tuner/libnccl-tuner-hoccl.so";
const std::string kFixtures = HOCCL_TEST_FIXTURE_DIR "/frees/";

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// What a command writes to standard output; its exit status has to be 0.
std::string outputOf(const std::string& command) {
  FILE* pipe = ::popen(command.c_str(), "r");
  if (!pipe) return "popen failed";
  std::string text;
  char part[4096];
  while (const std::size_t got = std::fread(part, 1, sizeof part, pipe)) text.append(part, got);
  const int status = ::pclose(pipe);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << command << ": " << status << "\n"
                                                             << text;
  return text;
}

std::string preloaded(const std::string& command) {
  return "env LD_PRELOAD=" + kShim + " HOCCL_CORE_LIB=" + kFixtures + "frees_core.so " + command;
}

// --- The shim ------------------------------------------------------------------------------------

constexpr const char* kPlain =
    "cudaFree 0x1000\n"
    "cudaFree (nil)\n"
    "cudaFreeAsync 0x1500 0x99\n"
    "cuMemUnmap 0x200000 4096\n"
    "cuMemFree 0x2000\n"
    "cuMemRelease 0x5\n"
    "cudaMalloc 42\n"
    "cudaMalloc gave 2\n"
    "cudaFree 0x7000\n";

TEST(Rule8, TheCoreHearsOfEveryFreeBeforeItHappens) {
  constexpr const char* kTold =
      "freeing 0x1000 0\n"
      "cudaFree 0x1000\n"
      "cudaFree (nil)\n"
      "freeing 0x1500 0\n"
      "cudaFreeAsync 0x1500 0x99\n"
      "freeing 0x200000 4096\n"
      "cuMemUnmap 0x200000 4096\n"
      "freeing 0x2000 0\n"
      "cuMemFree 0x2000\n"
      "cuMemRelease 0x5\n"
      "cudaMalloc 42\n"
      "allocationFailed\n"
      "cudaMalloc 42\n"
      "cudaGetLastError\n"
      "cudaMalloc gave 0\n"
      "freeing 0x7000 0\n"
      "cudaFree 0x7001\n"
      "cudaFree 0x7000\n";
  EXPECT_EQ(outputOf(preloaded(kFixtures + "frees_linked core")), kTold);
  // As under Python: the run time and its users are in a scope of their own.
  EXPECT_EQ(outputOf(preloaded(kFixtures + "frees_loading core")), kTold);
}

TEST(Frees, AProcessWithoutACommunicatorIsAsIfThereWereNoShim) {
  for (const char* program : {"frees_linked", "frees_loading"}) {
    EXPECT_EQ(outputOf(kFixtures + program), kPlain);
    EXPECT_EQ(outputOf(preloaded(kFixtures + program)), kPlain);
  }
  EXPECT_EQ(outputOf(preloaded("sh -c 'echo here'")), "here\n");
}

// --- What is known of exported allocations -------------------------------------------------------

using Ids = std::vector<std::uint64_t>;

TEST(ExportedAllocations, AFreeTakesTheOneThatBeginsThere) {
  ExportedAllocations all;
  all.add(0x1000, 0x1000, 1);
  all.add(0x2000, 0x1000, 2);
  EXPECT_EQ(all.take(0x1800, 0), Ids{});
  EXPECT_EQ(all.take(0x0fff, 0), Ids{});
  EXPECT_EQ(all.take(0x1000, 0), Ids{1});
  EXPECT_EQ(all.take(0x1000, 0), Ids{});
  EXPECT_EQ(all.size(), 1u);
}

TEST(ExportedAllocations, AnUnmapTakesAllThatBeginInItsRange) {
  ExportedAllocations all;
  for (std::uint64_t i = 1; i <= 4; ++i) all.add(i * 0x1000, 0x1000, i);
  EXPECT_EQ(all.take(0x2000, 0x2000), (Ids{2, 3}));
  EXPECT_EQ(all.size(), 2u);
}

TEST(ExportedAllocations, AnotherOneInItsPlaceTakesItsPlace) {
  ExportedAllocations all;
  all.add(0x1000, 0x1000, 1);
  all.add(0x2000, 0x1000, 2);
  all.add(0x3000, 0x1000, 3);
  all.add(0x1800, 0x1000, 4);  // on the first two
  EXPECT_EQ(all.size(), 2u);
  EXPECT_EQ(all.take(0x1000, 0x10000), (Ids{4, 3}));
  all.add(0x1000, 0x1000, 5);
  all.add(0x1000, 0x1000, 5);  // known already
  EXPECT_EQ(all.size(), 1u);
}

TEST(LiveMovers, AClientThatGoesWaitsForWhoLooksAtIt) {
  LiveMovers movers;
  auto* client = reinterpret_cast<MoverClient*>(0x10);  // never looked into
  movers.add(client);
  std::atomic<bool> looking{false}, leave{false}, removed{false};
  std::thread visitor([&] {
    movers.visit([&](const std::vector<MoverClient*>& clients) {
      EXPECT_EQ(clients, std::vector<MoverClient*>{client});
      looking = true;
      while (!leave) ::usleep(100);
    });
  });
  while (!looking) ::usleep(100);
  std::thread remover([&] {
    movers.remove(client);
    removed = true;
  });
  ::usleep(50'000);
  EXPECT_FALSE(removed);
  // Newcomers do not see it, and wait for nobody.
  movers.visit([&](const std::vector<MoverClient*>& clients) { EXPECT_TRUE(clients.empty()); });
  leave = true;
  visitor.join();
  remover.join();
  EXPECT_FALSE(movers.inherited());
}

// --- Whether frees can be seen -------------------------------------------------------------------

/// In another process, with what the command sets up: "1 why" or "0 why".
std::string lookIn(const std::string& environment, const std::string& program = "/proc/self/exe") {
  std::string path = program;
  if (path == "/proc/self/exe") path = std::filesystem::read_symlink(path).string();
  const std::string text = outputOf(
      "env FREES_LOOK=1 ASAN_OPTIONS=verify_asan_link_order=0 " + environment + " " + path +
      " --gtest_also_run_disabled_tests --gtest_filter=FreesSeen.DISABLED_LooksInThisProcess");
  const std::size_t at = text.find("LOOK ");
  return at == std::string::npos ? text : text.substr(at + 5, text.find('\n', at) - at - 5);
}

/// Stands in for the run time's text in the copy of this program that plays one with a run time of
/// its own.
[[gnu::used]] const char kPlace[] = "CUDA driver version is INSUFFICIENT for CUDA runtime version";

/// A part of the other tests, which run it in processes of their own.
TEST(FreesSeen, DISABLED_LooksInThisProcess) {
  const FreesSeen found = lookForFrees();
  std::printf("LOOK %d %s\n", found.seen ? 1 : 0, found.why.c_str());
}

TEST(FreesSeen, OnlyThroughThePreloadedLibrary) {
  const std::string found = lookIn("LD_PRELOAD=");
  EXPECT_TRUE(contains(found, "0 libnccl-tuner-hoccl.so is not preloaded")) << found;
}

TEST(FreesSeen, WithASharedRunTime) {
  const std::string found = lookIn("LD_PRELOAD=" + kShim + ":" + kFixtures + "libcudart.so.13");
  EXPECT_TRUE(contains(found, "1 the program uses ") && contains(found, "libcudart.so.13"))
      << found;
}

TEST(FreesSeen, NotWhenAnotherLibraryComesFirst) {
  const std::string found = lookIn("LD_PRELOAD=" + kFixtures + "libcudart.so.13:" + kShim);
  EXPECT_TRUE(contains(found, "0 cudaFree comes from ") && contains(found, "libcudart.so.13"))
      << found;
}

TEST(FreesSeen, NotWhenNothingIsThereThatCouldBeSeen) {
  const std::string found = lookIn("LD_PRELOAD=" + kShim);
  EXPECT_TRUE(contains(found, "0 no shared CUDA run time is loaded")) << found;
}

TEST(FreesSeen, NotInAProgramWithARunTimeOfItsOwn) {
  std::ifstream self("/proc/self/exe", std::ios::binary);
  std::string image{std::istreambuf_iterator<char>(self), {}};
  const std::string place = "INSUFFICIENT for CUDA";
  const std::size_t at = image.find("version is " + place);
  ASSERT_NE(at, std::string::npos);
  image.replace(at + 11, 12, "insufficient");
  const std::string copy =
      std::filesystem::temp_directory_path() / ("frees-test-" + std::to_string(::getpid()));
  std::ofstream(copy, std::ios::binary) << image;
  std::filesystem::permissions(copy, std::filesystem::perms::owner_all);
  // Even where a shared one is loaded as well.
  const std::string found =
      lookIn("LD_PRELOAD=" + kShim + ":" + kFixtures + "libcudart.so.13", copy);
  std::filesystem::remove(copy);
  EXPECT_TRUE(contains(found, "0 the CUDA run time is linked statically into ")) << found;
}

}  // namespace
}  // namespace hoccl
