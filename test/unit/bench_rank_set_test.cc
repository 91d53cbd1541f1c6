// Rank processes that die, lie or fall silent: each ends the set within its bound and is named.
#include <gtest/gtest.h>
#include <signal.h>

#include "common/base/time.h"
#include "tools/bench/rank_environment.h"
#include "tools/bench/rank_set.h"

namespace hoccl::bench {
namespace {

using Json = nlohmann::json;

/// Ranks that are shell scripts; their channel is descriptor 3.
std::unique_ptr<RankSet> startShells(const std::vector<std::string>& scripts,
                                     std::uint64_t timeoutMs = 500, bool capture = false) {
  RankSetPlan plan;
  plan.name = "test";
  plan.program = "/bin/sh";
  // Each rank finds its own script in its environment.
  plan.arguments = {"-c", "eval \"$SCRIPT\""};
  plan.timeoutMs = timeoutMs;
  plan.captureOutput = capture;
  for (const std::string& script : scripts) {
    RankEnvironment environment;
    environment.extra = {"SCRIPT=" + script};
    plan.environments.push_back(environment.applyTo(ownEnvironment()));
  }
  std::unique_ptr<RankSet> set;
  const Status status = RankSet::start(plan, &set);
  EXPECT_TRUE(status) << status.message();
  return set;
}

const std::string kAnswer = "read line <&3; echo '{\"ok\":true,\"value\":7}' >&3; ";

bool alive(pid_t pid) { return ::kill(pid, 0) == 0; }

void expectNames(const std::string& message, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(message.find(word), std::string::npos) << word << " is not in: " << message;
}

TEST(BenchRankSet, AsksAllAndFinishes) {
  auto set = startShells({kAnswer + kAnswer, kAnswer + kAnswer}, 5000);
  std::vector<Json> answers;
  ASSERT_TRUE(set->askAll("working", {{"do", "work"}}, &answers));
  ASSERT_EQ(answers.size(), 2u);
  EXPECT_EQ(answers[0]["value"], 7);
  EXPECT_EQ(answers[1]["value"], 7);
  const Status status = set->finish();
  EXPECT_TRUE(status) << status.message();
}

TEST(BenchRankSet, AsksOneOnly) {
  auto set = startShells({kAnswer + "exec sleep 60", "exec sleep 60"}, 5000);
  std::vector<Json> answers;
  ASSERT_TRUE(set->ask("working", {Json{{"do", "work"}}, Json()}, &answers));
  EXPECT_EQ(answers[0]["value"], 7);
  EXPECT_TRUE(answers[1].is_null());
}

TEST(BenchRankSet, ADeadRankIsNamedWithItsStage) {
  auto set = startShells(
      {"exec sleep 60", "echo '{\"stage\":\"loading NCCL\"}' >&3; read line <&3; kill -SEGV $$"},
      60000);
  const std::vector<pid_t> pids = set->pids();
  std::vector<Json> answers;
  const std::uint64_t begin = monotonicNs();
  const Status status = set->askAll("opening", {{"do", "open"}}, &answers);
  EXPECT_LT(monotonicNs() - begin, 10000000000u);
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 1", "signal 11", std::to_string(pids[1]), "opening"});
  for (const pid_t pid : pids) EXPECT_FALSE(alive(pid));
}

TEST(BenchRankSet, ARankThatDiesAfterItsAnswerDoesNotLeaveTheOthersWaiting) {
  auto set = startShells({kAnswer + "exit 4", "exec sleep 60"}, 60000);
  std::vector<Json> answers;
  const std::uint64_t begin = monotonicNs();
  const Status status = set->askAll("opening", {{"do", "open"}}, &answers);
  EXPECT_LT(monotonicNs() - begin, 10000000000u);
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 0", "exit status 4", "rank 1", "has been silent for"});
}

TEST(BenchRankSet, AnExitStatusIsNamed) {
  auto set = startShells({"read line <&3; exit 9", kAnswer + "exec sleep 60"}, 60000);
  std::vector<Json> answers;
  const Status status = set->askAll("opening", {{"do", "open"}}, &answers);
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 0", "exit status 9"});
  EXPECT_EQ(status.message().find("rank 1"), std::string::npos) << status.message();
}

TEST(BenchRankSet, ASilentRankIsNamedWithItsLastStage) {
  auto set = startShells(
      {kAnswer + "exec sleep 60",
       "read line <&3; echo '{\"stage\":\"creating the communicator\"}' >&3; exec sleep 60"},
      400);
  const std::vector<pid_t> pids = set->pids();
  std::vector<Json> answers;
  const std::uint64_t begin = monotonicNs();
  const Status status = set->askAll("opening", {{"do", "open"}}, &answers);
  EXPECT_LT(monotonicNs() - begin, 10000000000u);
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 1", "silent for 0.4 s", "creating the communicator"});
  EXPECT_EQ(status.message().find("rank 0"), std::string::npos) << status.message();
  for (const pid_t pid : pids) EXPECT_FALSE(alive(pid));
}

TEST(BenchRankSet, ARanksOwnErrorIsPassedOn) {
  auto set = startShells(
      {"read line <&3; echo '{\"error\":\"no GPU left\"}' >&3; exit 1", kAnswer + "exec sleep 60"});
  std::vector<Json> answers;
  const Status status = set->askAll("opening", {{"do", "open"}}, &answers);
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 0", "no GPU left"});
}

TEST(BenchRankSet, GarbageIsAnErrorNotACrash) {
  auto set = startShells({"read line <&3; echo 'hello {' >&3; exec sleep 60"});
  std::vector<Json> answers;
  const Status status = set->askAll("opening", {{"do", "open"}}, &answers);
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 0", "hello {"});
}

TEST(BenchRankSet, ABadEndIsAnError) {
  auto set = startShells({kAnswer, kAnswer + "exit 3"}, 5000);
  const Status status = set->finish();
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 1", "exit status 3", "finishing"});
}

TEST(BenchRankSet, ARankThatDoesNotEndIsKilled) {
  auto set = startShells({kAnswer + "exec sleep 60"}, 400);
  const pid_t pid = set->pids().front();
  const Status status = set->finish();
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 0", "did not exit within 0.4 s"});
  EXPECT_FALSE(alive(pid));
}

TEST(BenchRankSet, RanksDoNotOutliveTheSet) {
  pid_t pid = 0;
  {
    auto set = startShells({"exec sleep 60"});
    pid = set->pids().front();
    EXPECT_TRUE(alive(pid));
  }
  EXPECT_FALSE(alive(pid));
}

TEST(BenchRankSet, KeepsWhatRanksPrint) {
  auto set = startShells({"echo first; " + kAnswer, "echo second; " + kAnswer}, 5000, true);
  ASSERT_TRUE(set->finish());
  expectNames(set->output(), {"first\n", "second\n"});
}

TEST(BenchRankSet, AMissingProgramIsNamed) {
  RankSetPlan plan;
  plan.program = "/nonexistent/hoccl";
  plan.environments = {{}};
  std::unique_ptr<RankSet> set;
  const Status status = RankSet::start(plan, &set);
  ASSERT_FALSE(status);
  expectNames(status.message(), {"rank 0", "/nonexistent/hoccl"});
}

}  // namespace
}  // namespace hoccl::bench
