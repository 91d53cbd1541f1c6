// The program itself, on the emulated driver and the stand-in NCCL of this build tree.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>

#include "common/base/time.h"
#include "tools/bench/rank_environment.h"

namespace hoccl::bench {
namespace {

namespace fs = std::filesystem;

std::string contents(const fs::path& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

/// Processes that have `parent` as theirs.
std::vector<pid_t> childrenOf(pid_t parent) {
  std::vector<pid_t> children;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    const std::string stat = contents(entry.path() / "stat");
    const std::size_t end = stat.rfind(')');
    char state = 0;
    int ppid = 0;
    if (end != std::string::npos &&
        std::sscanf(stat.c_str() + end + 1, " %c %d", &state, &ppid) == 2 && ppid == parent &&
        state != 'Z')
      children.push_back(std::stoi(name));
  }
  return children;
}

template <typename Condition>
bool within(int seconds, Condition condition) {
  const Deadline deadline = Deadline::afterMs(static_cast<std::uint64_t>(seconds) * 1000);
  while (!condition()) {
    if (deadline.passed()) return false;
    ::usleep(5000);
  }
  return true;
}

bool running(pid_t pid) {
  const std::string stat = contents("/proc/" + std::to_string(pid) + "/stat");
  return !stat.empty() && stat[stat.rfind(')') + 2] != 'Z';
}

class BenchRun : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(fs::exists(kProgram)) << kProgram << " is not built";
    folder_ = fs::temp_directory_path() / ("hoccl_bench_run_" + std::to_string(::getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
    fs::remove_all(folder_);
  }

  void start(std::vector<std::string> arguments, const std::vector<std::string>& variables = {}) {
    arguments.insert(arguments.begin(), {kProgram, "bench", "sendrecv"});
    launch(arguments, variables, "out", "err", &pid_);
  }
  void launch(const std::vector<std::string>& arguments, const std::vector<std::string>& variables,
              const char* out, const char* err, pid_t* pid) {
    RankEnvironment environment;
    environment.extra = {"HOCCL_EMULATE=always", "TMPDIR=" + folder_.string()};
    environment.extra.insert(environment.extra.end(), variables.begin(), variables.end());
    const auto entries = environment.applyTo(ownEnvironment());
    std::vector<char*> argv, envp;
    for (const auto& text : arguments) argv.push_back(const_cast<char*>(text.c_str()));
    for (const auto& text : entries) envp.push_back(const_cast<char*>(text.c_str()));
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    for (const auto& [fd, name] : {std::pair{1, out}, std::pair{2, err}})
      ::posix_spawn_file_actions_addopen(&actions, fd, (folder_ / name).c_str(),
                                         O_CREAT | O_TRUNC | O_WRONLY, 0600);
    ASSERT_EQ(::posix_spawn(pid, kProgram, &actions, nullptr, argv.data(), envp.data()), 0);
    ::posix_spawn_file_actions_destroy(&actions);
  }
  /// The exit status, or -1 when it was killed or did not end in time.
  int wait(int seconds = 50) {
    int state = 0;
    if (!within(seconds, [&] { return ::waitpid(pid_, &state, WNOHANG) == pid_; })) return -1;
    pid_ = -1;
    return WIFEXITED(state) ? WEXITSTATUS(state) : -1;
  }
  /// Waits until the ranks measure; their process ids.
  std::vector<pid_t> measuringRanks() {
    EXPECT_TRUE(within(30, [&] { return out().find("# impl") != std::string::npos; })) << err();
    return childrenOf(pid_);
  }
  std::string out() const { return contents(folder_ / "out"); }
  std::string err() const { return contents(folder_ / "err"); }
  nlohmann::json rows() const {
    return nlohmann::json::parse(contents(folder_ / "rows.json"))["rows"];
  }
  std::string jsonFile() const { return (folder_ / "rows.json").string(); }

  static constexpr const char* kProgram = HOCCL_TEST_BUILD_DIR "/tools/hoccl";
  // Enough work that a test can interfere with it.
  const std::vector<std::string> kLong{"-b", "64K",  "-e",        "64K",
                                       "-n", "1000", "--batches", "10000"};
  fs::path folder_;
  pid_t pid_ = -1;
};

TEST_F(BenchRun, SteersAndChecksEveryByte) {
  start({"-b", "64K", "-e", "1M", "-n", "3", "--batches", "2", "--offset", "1", "--json",
         jsonFile()});
  ASSERT_EQ(wait(), 0) << out() << err();
  EXPECT_EQ(out().rfind("# emulated driver: model time, not a measurement of hardware", 0), 0u);
  EXPECT_NE(out().find("# errors: 0  # steered: all\n"), std::string::npos) << out() << err();
  ASSERT_EQ(rows().size(), 3u);
  for (const auto& row : rows()) {
    EXPECT_EQ(row["impl"], "hoccl");
    EXPECT_EQ(row["path"], "staged");
    EXPECT_EQ(row["errors"], 0);
    EXPECT_EQ(row["kernels"], 0);
    EXPECT_EQ(row["emulated"], true);
    EXPECT_GT(row["time_us"], 0);
    EXPECT_GT(row["launch_us"], 0);
  }
  // Nothing stays behind: only what this test made.
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), {}), 3) << "out, err, rows.json";
}

TEST_F(BenchRun, ComparesWithNcclAndBareCopies) {
  start({"-b", "128K", "-e", "128K", "-n", "2", "--batches", "2", "-g", "2", "--pattern", "bidir",
         "--compare", "nccl,bare", "--json", jsonFile()});
  ASSERT_EQ(wait(), 0) << out() << err();
  std::vector<std::string> measured;
  for (const auto& row : rows())
    measured.push_back(row["impl"].get<std::string>() + " " + row["path"].get<std::string>());
  EXPECT_EQ(measured,
            (std::vector<std::string>{"hoccl staged", "nccl nccl", "bare steady", "bare single"}));
  for (const char* line :
       {"# hoccl against nccl", "# hoccl against bare (steady)", "# hoccl against bare (single)"})
    EXPECT_NE(out().find(line), std::string::npos) << line << " is not in: " << out();
}

// All four of NCCL's collectives that copy engines carry out, where some ranks send or receive
// nothing, too; and where NCCL stays with its kernels without a word, the rows say so.
TEST_F(BenchRun, NcclsCopyEnginesAndWhereItDoesNotTakeThem) {
  for (const std::string operation : {"allgather", "alltoall", "gather", "scatter"}) {
    for (const bool taken : {true, false}) {
      launch({kProgram, "bench", operation, "-g", "3", "-b", "100K", "-e", "100K", "-n", "2",
              "--batches", "2", "--same-node", "--compare", "nccl-ce", "--json", jsonFile()},
             {taken ? "NCCL_WIN_ENABLE=1" : "NCCL_WIN_ENABLE=0"}, "out", "err", &pid_);
      ASSERT_EQ(wait(), 0) << out() << err();
      int seen = 0;
      for (const auto& row : rows()) {
        EXPECT_EQ(row["errors"], 0) << row;
        if (row["impl"] != "nccl-ce") continue;
        ++seen;
        EXPECT_EQ(row["path"], taken ? "copy-engine" : "nccl") << row;
      }
      EXPECT_EQ(seen, operation == "alltoall" ? 1 : 2) << out();
      EXPECT_NE(out().find(taken ? ", by copy engines" : ", by kernels: its log shows none"),
                std::string::npos)
          << out();
      EXPECT_NE(out().find("# hoccl against nccl-ce"), std::string::npos) << out();
    }
  }
}

// `hoccl bench serve` as on another host: its rank has an environment of its own.
TEST_F(BenchRun, ARankOnAnotherHost) {
  const std::string file = folder_ / "host";
  const std::vector<std::string> variables{"HOCCL_TRANSPORT=tcp", "HOCCL_SOCKET_IFNAME==lo"};
  pid_t server = -1;
  launch({kProgram, "bench", "serve", "--file", file}, variables, "out.there", "err.there",
         &server);
  ASSERT_TRUE(within(20, [&] { return fs::exists(file); }));
  EXPECT_EQ(fs::status(file).permissions(), fs::perms::owner_read | fs::perms::owner_write);
  start({"--remote", file, "-b", "64K", "-e", "64K", "-n", "3", "--batches", "2", "-c", "2",
         "--json", jsonFile()},
        variables);
  EXPECT_EQ(wait(), 0) << out() << err() << contents(folder_ / "err.there");
  EXPECT_NE(out().find("# errors: 0  # steered: all\n"), std::string::npos) << out() << err();
  EXPECT_EQ(rows().at(0)["transport"], "tcp");
  // Who does not know the key gets nothing.
  auto host = nlohmann::json::parse(contents(file));
  host["key"] = "0123";
  std::ofstream(folder_ / "forged") << host;
  start({"--remote", folder_ / "forged", "-b", "64K", "-e", "64K"}, variables);
  EXPECT_EQ(wait(), 1) << out();
  EXPECT_NE(err().find("bench serve"), std::string::npos) << err();
  start({"--remote", folder_ / "none"}, variables);
  EXPECT_EQ(wait(), 2) << out();
  EXPECT_NE(err().find("there is no such file"), std::string::npos) << err();
  EXPECT_TRUE(running(server));
  ::kill(server, SIGKILL);
  ::waitpid(server, nullptr, 0);
}

/// Direct copies beside bare ones from GPU to GPU. Model time that is long beside this CPU's.
TEST_F(BenchRun, DirectCopiesAreNearlyBareOnes) {
  start({"-b",        "16M",    "-e",          "64M",       "-n",   "2",      "--batches",
         "3",         "-w",     "1",           "-c",        "0",    "-g",     "2",
         "--pattern", "oneway", "--same-node", "--compare", "bare", "--json", jsonFile()},
        {"EMUCUDA_DILATION=2000"});
  ASSERT_EQ(wait(), 0) << out() << err();
  EXPECT_NE(out().find("one process a rank: from GPU to GPU"), std::string::npos) << out();
  std::map<std::string, std::map<std::uint64_t, double>> times;
  for (const auto& row : rows()) {
    EXPECT_EQ(row["impl"] == "hoccl", row["path"] == "direct") << row;
    times[row["path"]][row["bytes"]] = row["time_us"];
  }
  for (const auto& [mebibytes, share] : {std::pair{16, 0.85}, {64, 0.95}}) {
    const std::uint64_t bytes = static_cast<std::uint64_t>(mebibytes) << 20;
    // FACTS 2: 363 GB/s at 16 MiB, 397 at most; through the host it would be 55.
    const double bare = times["steady"][bytes], rate = static_cast<double>(bytes) / bare / 1e3;
    EXPECT_GT(rate, 300) << out();
    EXPECT_LT(rate, 400) << out();
    EXPECT_GT(bare / times["direct"][bytes], share) << out();
  }
}

/// Each rank to the three others in rotation. If all of them sent to the same one at a time, the
/// other GPUs' links would stand idle: three copies would take as long as five or more.
TEST_F(BenchRun, AllGatherGoesInRotation) {
  launch({kProgram, "bench",       "allgather", "-g",        "4",      "-b",      "32M", "-e",
          "32M",    "-n",          "1",         "--batches", "3",      "-w",      "1",   "-c",
          "0",      "--same-node", "--compare", "bare",      "--json", jsonFile()},
         {"EMUCUDA_DILATION=2000"}, "out", "err", &pid_);
  ASSERT_EQ(wait(), 0) << out() << err();
  std::map<std::string, double> times;
  for (const auto& row : rows()) {
    if (row["in_place"] == true) times[row["path"]] = row["time_us"];
  }
  ASSERT_TRUE(times.count("direct") == 1 && times.count("steady") == 1) << out();
  EXPECT_GT(times["steady"] / times["direct"], 0.8) << out();
}

TEST_F(BenchRun, WrongBytesAreCountedAndFail) {
  // A stand-in that moves nothing leaves the poison in the receive buffer.
  start({"--impl", "nccl", "-b", "1000", "-e", "1000", "-n", "1", "--json", jsonFile()},
        {"NCCLSTANDIN_MOVE=0"});
  EXPECT_EQ(wait(), 1) << out() << err();
  // One checked transfer and one look after the timed ones.
  EXPECT_EQ(rows()[0]["errors"], 2000);
  EXPECT_NE(out().find("# errors: 2000\n"), std::string::npos) << out();
  EXPECT_NE(err().find("rank 1"), std::string::npos) << err();
}

TEST_F(BenchRun, SaysWhatWasNotSteered) {
  start({"-b", "4K", "-e", "4K", "-n", "2", "--batches", "1"});
  ASSERT_EQ(wait(), 0) << out() << err();
  EXPECT_NE(out().find("# steered: 0 of "), std::string::npos) << out();
  EXPECT_NE(out().find("# why not steered: "), std::string::npos) << out();
}

TEST_F(BenchRun, AKilledRankEndsTheRun) {
  start(kLong);
  const auto ranks = measuringRanks();
  ASSERT_EQ(ranks.size(), 2u);
  ::kill(ranks[1], SIGKILL);
  EXPECT_EQ(wait(20), 1) << out() << err();
  EXPECT_NE(err().find("was killed by signal 9"), std::string::npos) << err();
  EXPECT_NE(err().find(std::to_string(ranks[1])), std::string::npos) << err();
  EXPECT_NE(err().find("65536 bytes: "), std::string::npos) << err();
  EXPECT_FALSE(running(ranks[0]));
}

TEST_F(BenchRun, ASilentRankEndsTheRun) {
  std::vector<std::string> arguments = kLong;
  arguments.insert(arguments.end(), {"--timeout", "2"});
  start(arguments);
  const auto ranks = measuringRanks();
  ASSERT_EQ(ranks.size(), 2u);
  ::kill(ranks[1], SIGSTOP);
  EXPECT_EQ(wait(20), 1) << out() << err();
  // Whether the bench notices while it asks the rank or while it waits for it, the line says so.
  EXPECT_NE(err().find("(pid " + std::to_string(ranks[1]) + ")"), std::string::npos) << err();
  EXPECT_NE(err().find("silent for"), std::string::npos) << err();
  EXPECT_NE(err().find("65536 bytes: "), std::string::npos) << err();
  for (const pid_t pid : ranks) EXPECT_FALSE(running(pid));
}

TEST_F(BenchRun, RanksEndWithTheProgram) {
  start(kLong);
  const auto ranks = measuringRanks();
  ASSERT_EQ(ranks.size(), 2u);
  ::kill(pid_, SIGKILL);
  wait(10);
  for (const pid_t pid : ranks) EXPECT_TRUE(within(10, [&] { return !running(pid); })) << pid;
}

TEST_F(BenchRun, UsageErrorsRunNothing) {
  start({"-n", "0"});
  EXPECT_EQ(wait(), 2);
  EXPECT_EQ(out(), "");
  EXPECT_NE(err().find("--iters 0"), std::string::npos) << err();
}

}  // namespace
}  // namespace hoccl::bench
