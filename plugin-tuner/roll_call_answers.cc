#include "plugin-tuner/roll_call_answers.h"

#include <time.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "common/base/log.h"
#include "plugin-tuner/comm_setup.h"

namespace hoccl {
namespace {

constexpr timespec kNap{0, 100'000};

}  // namespace

RollCallAnswers& RollCallAnswers::ofThisProcess() {
  static auto* const instance = new RollCallAnswers;
  return *instance;
}

/// A forked child shares the sockets and must not read from them.
bool RollCallAnswers::inherited() const { return process_ != 0 && process_ != ::getpid(); }

void RollCallAnswers::report(const Answer& answer, const Status& status) {
  if (status) return;
  logWarn("rank {} of {} could not tell the others that it is in no part of the split: {}",
          answer.rank, answer.ranks, status.message());
}

void RollCallAnswers::give(const RollCall& call) {
  tend();
  Answer answer{answerRollCall(call), call.rank, call.ranks};
  const std::string color(reinterpret_cast<const char*>(&call.color), sizeof call.color);
  if (Status status = answer.agreement->start(1, color); !status) return report(answer, status);
  while (answer.agreement->poll() == Agreement::State::Pending && !answer.agreement->said()) {
    ::nanosleep(&kNap, nullptr);
  }
  const std::lock_guard lock(mutex_);
  if (inherited()) answers_.clear();
  process_ = ::getpid();
  answers_.push_back(std::move(answer));
}

void RollCallAnswers::tend() {
  const std::lock_guard lock(mutex_);
  if (inherited()) return;
  std::erase_if(answers_, [](const Answer& answer) {
    if (answer.agreement->poll() == Agreement::State::Pending) return false;
    report(answer, answer.agreement->status());
    return true;
  });
}

void RollCallAnswers::finish() {
  for (bool pending = true; pending;) {
    tend();
    {
      const std::lock_guard lock(mutex_);
      pending = !inherited() && !answers_.empty();
    }
    if (pending) ::nanosleep(&kNap, nullptr);
  }
}

}  // namespace hoccl
