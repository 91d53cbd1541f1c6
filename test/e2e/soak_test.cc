// Random operations: four ranks on four GPUs of two nodes (or of four), three communicators each.
// HOCCL_SOAK_OPERATIONS says how many in all, HOCCL_SOAK_SEED adds to every seed,
// HOCCL_SOAK_TRACE=1 has each rank tell what it does.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "test/e2e/harness.h"

namespace e2e {
namespace {

constexpr int kRanks = 4;
constexpr std::uint64_t kOperations = 3000;  ///< of all variants together
/// Far below what it reaches on two loaded cores, sanitizers included.
constexpr std::uint64_t kSlowestOperationsPerSecond = 8;

std::uint64_t fromEnvironment(const char* variable, std::uint64_t otherwise) {
  const char* text = std::getenv(variable);
  return text && *text ? std::strtoull(text, nullptr, 10) : otherwise;
}

struct Variant {
  const char* name;
  int nodes;
  /// Some of it goes directly from GPU to GPU; nothing: by luck, when a span lasts long enough.
  std::optional<bool> direct;
  std::vector<std::pair<const char*, const char*>> environment;
};

const Variant kVariants[] = {
    {"Plain", 2, true, {}},
    {"Delays",
     2,
     true,
     {{"EMUCUDA_DELAY_US", "50"}, {"HOCCL_WAIT", "parked"}, {"HOCCL_SLOT_BYTES", "512KiB"}}},
    {"SmallSlots", 2, true, {{"HOCCL_SLOT_BYTES", "128KiB"}, {"HOCCL_SLOTS", "2"}}},
    {"FourNodes", 4, false, {{"HOCCL_SLOT_BYTES", "1MiB"}}},
    {"OneConnection", 2, true, {{"CUDA_DEVICE_MAX_CONNECTIONS", "1"}, {"HOCCL_LANE_DEPTH", "1"}}},
    {"FourNodesDelays",
     4,
     false,
     {{"EMUCUDA_DELAY_US", "30"},
      {"CUDA_DEVICE_MAX_CONNECTIONS", "8"},
      {"HOCCL_SLOTS", "1"},
      {"HOCCL_IMPORT_CACHE", "8"}}},
    {"OneNode", 1, true, {}},
    {"OneNodeDelays",
     1,
     true,
     {{"EMUCUDA_DELAY_US", "50"}, {"HOCCL_SLOTS", "2"}, {"HOCCL_IMPORT_CACHE", "4"}}},
    {"OneNodeSegments",
     1,
     true,
     {{"E2E_MEMORY", "mapped"}, {"EMUCUDA_DELAY_US", "30"}, {"HOCCL_IMPORT_CACHE", "8"}}},
    {"OneNodeOverPcie",
     1,
     true,
     {{"EMUCUDA_NVLINK", "0"}, {"EMUCUDA_DELAY_US", "30"}, {"HOCCL_IMPORT_CACHE", "8"}}},
    {"OneNodeOverPcieSegments",
     1,
     true,
     {{"E2E_MEMORY", "mapped"}, {"EMUCUDA_NVLINK", "0"}, {"HOCCL_SLOTS", "2"}}},
    {"OverPcieOneOfAll",
     2,
     true,
     {{"EMUCUDA_NVLINK", "0"},
      {"EMUCUDA_DELAY_US", "30"},
      {"HOCCL_SLOTS", "1"},
      {"HOCCL_LANE_DEPTH", "1"},
      {"HOCCL_IMPORT_CACHE", "1"}}},
    // Beside each other what is pulled, and pairs that are staged because one GPU refuses.
    {"OneNodePulledWithRefusals",
     1,
     true,
     {{"HOCCL_P2P", "3"},
      {"EMUCUDA_P2P_REFUSE", "0-1,2-3"},
      {"HOCCL_SLOTS", "1"},
      {"HOCCL_IMPORT_CACHE", "1"},
      {"HOCCL_IMPORT_IDLE_MS", "1"}}},
    {"OwnBlocksByKernel", 1, true, {{"HOCCL_OWN_BLOCK", "kernel"}, {"EMUCUDA_DELAY_US", "30"}}},
    {"OneNodeWithoutP2P", 1, false, {{"EMUCUDA_P2P", "0"}}},
    {"Segments",
     2,
     std::nullopt,
     {{"E2E_MEMORY", "mapped"}, {"EMUCUDA_DELAY_US", "30"}, {"HOCCL_IMPORT_CACHE", "8"}}},
    {"FourNodesTcp",
     4,
     false,
     {{"HOCCL_TRANSPORT", "tcp"},
      {"NCCL_SOCKET_IFNAME", "lo"},
      {"HOCCL_SOCKET_NTHREADS", "3"},
      {"HOCCL_NSOCKS_PERTHREAD", "2"},
      {"HOCCL_SLOT_BYTES", "512KiB"}}},
    {"IdleOften",
     2,
     true,
     {{"HOCCL_IMPORT_IDLE_MS", "1"}, {"HOCCL_SPIN_US", "0"}, {"HOCCL_FLAG_POOL", "16"}}},
    {"SegmentsIdleOften",
     2,
     std::nullopt,
     {{"E2E_MEMORY", "mapped"}, {"HOCCL_IMPORT_IDLE_MS", "1"}, {"HOCCL_IMPORT_CACHE", "1"}}},
    {"AppCopies", 2, false, {{"HOCCL_APP_COPIES", "always"}, {"HOCCL_APP_COPY_BYTES", "1MiB"}}},
};

std::uint64_t seedOf(std::size_t variant) {
  return fromEnvironment("HOCCL_SOAK_SEED", 0) + variant + 1;
}

Job& configure(Job& job, const Variant& variant, std::uint64_t seed, std::uint64_t operations) {
  job.argument("seed", std::to_string(seed))
      .argument("operations", std::to_string(operations))
      .argument("nodes", std::to_string(variant.nodes));
  job.env("EMUCUDA_DEVICES", std::to_string(kRanks)).env("EMUCUDA_SEED", std::to_string(seed));
  job.env("EMUCUDA_DILATION", "2");
  if (fromEnvironment("HOCCL_SOAK_TRACE", 0)) job.argument("trace", "1");
  // Two cores have to do with nine processes' threads, maybe under a sanitizer.
  job.env("HOCCL_TIMEOUT_MS", "60000").env("NCCLSTANDIN_TIMEOUT_MS", "60000");
  job.env("HOCCL_AGREE_TIMEOUT_MS", "60000");
  for (int rank = 0; rank < kRanks; ++rank) {
    job.env(rank, "NCCL_HOSTID", fmt::format("soak-node-{}", rank * variant.nodes / kRanks));
    job.env(rank, "CUDA_VISIBLE_DEVICES", std::to_string(rank));
  }
  for (const auto& [name, value] : variant.environment) job.env(name, value);
  return job;
}

std::set<std::string> sharedMemory() {
  std::set<std::string> names;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", ignored)) {
    names.insert(entry.path().filename());
  }
  return names;
}

class Soak : public ::testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(Variants, Soak, ::testing::Range<std::size_t>(0, std::size(kVariants)),
                         [](const auto& info) { return kVariants[info.param].name; });

TEST_P(Soak, EveryByteOfRandomOperations) {
  const Variant& variant = kVariants[GetParam()];
  const std::uint64_t seed = seedOf(GetParam());
  const std::uint64_t all = fromEnvironment("HOCCL_SOAK_OPERATIONS", kOperations);
  const std::uint64_t operations = (all + std::size(kVariants) - 1) / std::size(kVariants);
  const int bound = 150 + static_cast<int>(operations / kSlowestOperationsPerSecond);
  const std::set<std::string> before = sharedMemory();
  std::printf("seed %lu, %lu operations\n", seed, operations);
  Job job("soak", kRanks);
  configure(job, variant, seed, operations).start();
  constexpr int kBetweenReports = 10;
  for (int waited = 0; waited < bound && !job.awaitEnd(0, kBetweenReports);
       waited += kBetweenReports) {
    std::printf("seed %lu: %s\n", seed, job.said(0, "progress").c_str());
    std::fflush(stdout);
  }
  job.finish(30);
  std::printf("seed %lu: %s\n", seed, job.said(0, "done").c_str());
  if (HasFailure()) {
    ADD_FAILURE() << fmt::format(
        "to repeat: HOCCL_SOAK_OPERATIONS={} HOCCL_SOAK_SEED={} e2e_test "
        "--gtest_filter=Variants/Soak.EveryByteOfRandomOperations/{}",
        all, seed - GetParam() - 1, variant.name);
    return;
  }
  std::uint64_t staged = 0, direct = 0, calls = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::uint64_t its = 0;
    for (const auto& comm : job.communicators(rank)) {
      EXPECT_TRUE(comm["steered"]) << comm;
      const auto ops = [&](const char* path) {
        return comm["paths"][path]["ops"].template get<std::uint64_t>();
      };
      its += ops("staged") + ops("direct") + ops("app-copies") + ops("own-block");
      direct += ops("direct");
    }
    EXPECT_EQ(std::to_string(its), job.said(rank, "expectedSteered")) << "rank " << rank;
    EXPECT_EQ(job.said(rank, "freedWhileMapped"), "0") << "rank " << rank;
    // The emulator's notes about long waits are no errors.
    EXPECT_EQ(job.errors(rank).find("hoccl ["), std::string::npos) << job.errors(rank);
    staged += its;
    calls += std::stoull(job.said(rank, "calls"));
  }
  std::printf("seed %lu: %lu of %lu calls steered, %lu of them direct\n", seed, staged, calls,
              direct);
  EXPECT_GT(2 * staged, calls);
  if (variant.direct) {
    EXPECT_EQ(direct > 0, *variant.direct);
  }
  for (const std::string& name : sharedMemory()) {
    EXPECT_TRUE(before.count(name)) << "left in /dev/shm: " << name;
  }
}

/// A wrong byte in a buffer and one behind it: the soak says seed and operation.
TEST(SoakSees, APlantedWrongByte) {
  for (const char* where : {"payload", "guard"}) {
    SCOPED_TRACE(where);
    Job job("soak", kRanks);
    configure(job, kVariants[0], 1, 300);
    job.argument("plant", "50").argument("plantIn", where).argument("patienceMs", "5000");
    for (int rank = 0; rank < kRanks; ++rank) job.expectDeath(rank);
    job.finish(60);
    bool seen = false;
    const std::string what =
        std::string(where) == "guard" ? "the byte 0 behind the buffer was written" : "1 of ";
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::string error = job.errors(rank), planted = job.said(rank, "planted");
      seen = seen || (!planted.empty() && error.find("seed 1, ") != std::string::npos &&
                      error.find("operation " + planted + ":") != std::string::npos &&
                      error.find(what) != std::string::npos);
    }
    EXPECT_TRUE(seen) << job.transcript();
  }
}

}  // namespace
}  // namespace e2e
