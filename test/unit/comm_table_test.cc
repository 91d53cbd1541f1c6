#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plugin-tuner/comm_setup.h"
#include "plugin-tuner/steered_comm.h"

namespace hoccl {
namespace {

ncclComm_t handle(std::uintptr_t number) { return reinterpret_cast<ncclComm_t>(number * 4096); }

std::set<ncclComm_t> visited(CommTable& table) {
  std::set<ncclComm_t> found;
  table.forEach([&](SteeredComm& comm) { found.insert(comm.comm); });
  return found;
}

TEST(CommTable, FindsTheLiveOnesAlone) {
  auto table = std::make_unique<CommTable>();
  SteeredComm* one = table->add(handle(1));
  SteeredComm* two = table->add(handle(2));
  EXPECT_EQ(table->find(handle(1)), one);
  EXPECT_EQ(table->find(handle(2)), two);
  EXPECT_EQ(table->find(handle(3)), nullptr);
  table->remove(handle(1));
  EXPECT_EQ(table->find(handle(1)), nullptr);
  EXPECT_EQ(table->find(handle(2)), two);
  SteeredComm* again = table->add(handle(1));
  EXPECT_EQ(table->find(handle(1)), again);
}

/// Whoever asked for the last error reads it without a lock.
TEST(SteeredComm, TheTextOfAnErrorStaysWhileFurtherOnesCome) {
  SteeredComm comm;
  std::vector<std::pair<const char*, std::string>> read;
  for (std::size_t i = 0; i < SteeredComm::kLastErrors; ++i) {
    const std::string text = "error " + std::string(i, 'x') + std::to_string(i);
    for (int twice = 0; twice < 2; ++twice) {
      comm.noteLastError(text);
      read.emplace_back(comm.lastErrors.front().c_str(), text);
    }
  }
  EXPECT_EQ(comm.lastErrors.size(), SteeredComm::kLastErrors);
  for (const auto& [pointer, text] : read) EXPECT_STREQ(pointer, text.c_str());
  comm.noteLastError("one more");
  EXPECT_EQ(comm.lastErrors.size(), SteeredComm::kLastErrors);
  EXPECT_EQ(comm.lastErrors.front(), "one more");
}

/// A job's first communicator goes last. What has just been removed is still looked at.
TEST(CommTable, TheOneRemovedFirstIsForgottenNotTheOneCreatedFirst) {
  auto table = std::make_unique<CommTable>();
  table->add(handle(1));
  for (std::uintptr_t i = 2; i < 2 + CommTable::kKept; ++i) {
    table->add(handle(i));
    table->remove(handle(i));
  }
  EXPECT_EQ(table->forgotten().communicators, 0u);
  table->remove(handle(1));
  EXPECT_EQ(table->forgotten().communicators, 1u);
  const std::set<ncclComm_t> kept = visited(*table);
  EXPECT_EQ(kept.size(), CommTable::kKept);
  EXPECT_TRUE(kept.count(handle(1)));
  EXPECT_FALSE(kept.count(handle(2)));
}

}  // namespace
}  // namespace hoccl
