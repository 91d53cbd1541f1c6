#include "plugin-tuner/real_nccl.h"

#include "plugin-tuner/open_group.h"

namespace hoccl {
namespace {
thread_local int depth = 0;
}

RealNccl realNccl;

bool insideReal() { return depth > 0; }
RealCall::RealCall() { ++depth; }
RealCall::~RealCall() { --depth; }

void enterReal() {
  if (depth++ == 0) openGroup().real = true;
}

ncclResult_t leaveReal(ncclResult_t result) {
  --depth;
  return noteResult(result);
}

}  // namespace hoccl
