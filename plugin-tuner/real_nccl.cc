#include "plugin-tuner/real_nccl.h"

namespace hoccl {
namespace {
thread_local int depth = 0;
}

RealNccl realNccl;

bool insideReal() { return depth > 0; }
RealCall::RealCall() { ++depth; }
RealCall::~RealCall() { --depth; }

}  // namespace hoccl
