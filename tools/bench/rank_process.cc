#include "tools/bench/rank_process.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>

#include "common/base/log.h"
#include "common/base/shared_memory.h"
#include "tools/bench/bare_copies.h"
#include "tools/bench/line_channel.h"
#include "tools/bench/rank_transfers.h"
#include "tools/bench/start_page.h"

namespace hoccl::bench {
namespace {

using Json = nlohmann::json;

Json deviceJson(const DeviceInfo& info) {
  return {{"name", info.name},        {"index", info.index},       {"count", info.count},
          {"cuda", info.cudaVersion}, {"emulated", info.emulated}, {"dilation", info.dilation}};
}

Shape shapeOf(const Json& command) { return {command.at("bytes"), command.at("inPlace")}; }

Status operationOf(const Json& command, OperationPlan* out) {
  HOCCL_RETURN_IF_ERROR(operationByName(command.at("op"), &out->operation));
  out->ranks = command.at("ranks");
  out->root = command.at("root");
  out->pattern = static_cast<Pattern>(command.at("pattern").get<int>());
  out->skew = command.at("skew");
  out->elementBytes = command.at("elementBytes");
  return {};
}

/// One rank's state between commands.
class RankProcess {
 public:
  explicit RankProcess(LineChannel* channel) : channel_(channel) {}

  Status execute(const Json& command, Json* answer, bool* finished) {
    const std::string what = command.at("do").get<std::string>();
    if (what == "open") return open(command, answer);
    if (what == "finish") {
      *finished = true;
      return transfers_ ? transfers_->close() : Status();
    }
    if (copies_) {
      if (what == "copies")
        return copies_->run(shapeOf(command), command.at("count"), command.at("steady"), answer);
    } else if (transfers_) {
      if (what == "uniqueId") return transfers_->uniqueId(answer);
      if (what == "connect") return transfers_->connect(command.at("id"));
      if (what == "prepare") return transfers_->prepare(shapeOf(command), command.at("number"));
      if (what == "transfer")
        return transfers_->transfer(shapeOf(command), command.at("count"), answer);
      if (what == "verify")
        return transfers_->verify(shapeOf(command), command.at("number"), answer);
      if (what == "launch")
        return transfers_->launch(shapeOf(command), command.at("burst"), command.at("count"),
                                  answer);
      if (what == "counts") return transfers_->counts(answer);
    }
    return Status::error(Code::Internal, fmt::format("a rank was asked to '{}'", what));
  }

 private:
  void stage(const std::string& text) {
    // A lost progress message is no failure: the answer that follows will show a dead channel.
    (void)channel_->send({{"stage", text}}, 1000);
  }

  Status open(const Json& command, Json* answer) {
    const std::string kind = command.at("kind");
    stage("loading the CUDA driver");
    const Status opened = device_.open(command.at("gpu"));
    if (kind == "probe" && !opened) {
      // For a probe a machine without a GPU is an answer, not a failure.
      (*answer)["problem"] = opened.message();
      return {};
    }
    if (!opened) return opened;
    (*answer)["device"] = deviceJson(device_.info());
    if (kind == "probe") return {};
    HOCCL_RETURN_IF_ERROR(SharedMemory::map(UniqueFd(kRankPageFd), kStartPageBytes, &page_));
    auto* start = static_cast<StartPage*>(page_.data());
    OperationPlan operation;
    HOCCL_RETURN_IF_ERROR(operationOf(command, &operation));
    if (kind == "bare") {
      copies_ = std::make_unique<BareCopies>(&device_, start, operation, command.at("rank"),
                                             command.at("betweenGpus"), command.at("timeoutMs"));
      stage("allocating the copies' buffers");
      return copies_->allocate(command.at("maxBytes"));
    }
    RankPlan plan;
    plan.rank = command.at("rank");
    plan.operation = operation;
    plan.meeting = command.at("meeting");
    plan.grouped = command.at("grouped");
    plan.dataType = command.at("dataType");
    plan.maxBytes = command.at("maxBytes");
    plan.offset = command.at("offset");
    plan.timeoutMs = command.at("timeoutMs");
    plan.wantSteering = command.at("wantSteering");
    plan.symmetric = command.at("symmetric");
    plan.ncclLibrary = command.at("ncclLibrary");
    stage("loading NCCL");
    transfers_ = std::make_unique<RankTransfers>(&device_, start, std::move(plan));
    return transfers_->open(answer);
  }

  LineChannel* channel_;
  SharedMemory page_;
  RankDevice device_;
  std::unique_ptr<BareCopies> copies_;
  std::unique_ptr<RankTransfers> transfers_;
};

}  // namespace

int runRankProcess(int parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) return 1;  // it died before the line above
  ::fcntl(kRankChannelFd, F_SETFD, FD_CLOEXEC);
  ::fcntl(kRankPageFd, F_SETFD, FD_CLOEXEC);
  setLogRole("bench rank");
  LineChannel channel{UniqueFd(kRankChannelFd)};
  RankProcess process(&channel);
  // Between commands the rank only waits for the bench, whose death ends it: the bound is generous.
  constexpr std::uint64_t kIdleMs = 24 * 3600 * 1000u;
  for (bool finished = false; !finished;) {
    Json command, answer = Json::object();
    Status status = channel.receive(&command, kIdleMs);
    if (!status) return 1;
    try {
      status = process.execute(command, &answer, &finished);
    } catch (const std::exception& error) {
      status = Status::error(Code::Internal, fmt::format("bad command: {}", error.what()));
    }
    if (status) {
      answer["ok"] = true;
    } else {
      answer = {{"error", status.message()}};
    }
    const Status sent = channel.send(answer, 10000);
    // Freeing memory or destroying a communicator under a stuck transfer could hang: leave at once.
    if (!status || !sent) std::_Exit(1);
  }
  return 0;
}

}  // namespace hoccl::bench
