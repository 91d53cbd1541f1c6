#include "test/e2e/rank/trial.h"

#include <dlfcn.h>

#include <array>
#include <cstring>

namespace e2e {
namespace {

/// What `source` has for `destination`.
Bytes blockOf(std::size_t bytes, int source, int destination, std::uint64_t round) {
  Bytes block(bytes);
  makePattern(seedOf(source, static_cast<std::uint64_t>(destination), round), block.data(), bytes);
  return block;
}

void place(Bytes* image, std::size_t index, const Bytes& block) {
  std::memcpy(image->data() + index * block.size(), block.data(), block.size());
}

}  // namespace

Region::Region(std::size_t bytes, std::size_t offset)
    : bytes_(bytes), offset_(offset), memory_(total()), device_(memory_.address()) {}

Region::~Region() {
  for (unsigned char* each : areas_) cuda().memFreeHost(each);
}

unsigned char* Region::area(std::size_t bytes) {
  void* memory = nullptr;
  REQUIRE_CU(cuda().memHostAlloc(&memory, bytes, 0));
  areas_.push_back(static_cast<unsigned char*>(memory));
  return areas_.back();
}

void Region::poison(CUstream stream) {
  if (!poison_) {
    poison_ = area(total());
    std::memset(poison_, kPoison, total());
  }
  REQUIRE_CU(cuda().copyToDevice(device_, poison_, total(), stream));
}

void Region::put(const Bytes& image, std::size_t at, CUstream stream) {
  if (image.empty()) return;
  unsigned char* source = area(image.size());
  std::memcpy(source, image.data(), image.size());
  REQUIRE_CU(cuda().copyToDevice(device_ + kGuard + offset_ + at, source, image.size(), stream));
}

std::size_t Region::fetch(CUstream stream) {
  fetched_.push_back(area(total()));
  REQUIRE_CU(cuda().copyToHost(fetched_.back(), device_, total(), stream));
  return fetched_.size() - 1;
}

void Region::require(const Bytes& image, std::size_t which, const std::string& what) const {
  const unsigned char* seen = fetched_[which];
  const std::size_t begin = kGuard + offset_, end = begin + bytes_;
  auto wanted = [&](std::size_t i) { return i >= begin && i < end ? image[i - begin] : kPoison; };
  if (std::memcmp(seen + begin, image.data(), bytes_) == 0) {
    std::size_t at = 0;
    while (at < total() && (seen[at] == kPoison || (at >= begin && at < end))) ++at;
    if (at == total()) return;
  }
  std::size_t first = total(), wrong = 0;
  for (std::size_t i = total(); i-- > 0;) {
    if (seen[i] == wanted(i)) continue;
    first = i;
    ++wrong;
  }
  failAt(__FILE__, __LINE__,
         fmt::format("{}: {} bytes are wrong, the first at {} of {}: {:#04x} for {:#04x}{}", what,
                     wrong, static_cast<long>(first) - static_cast<long>(begin), bytes_,
                     seen[first], wanted(first), seen[first] == kPoison ? " (poison)" : ""));
}

const char* nameOf(Kind kind) {
  switch (kind) {
    case Kind::AllGather:
      return "AllGather";
    case Kind::AlltoAll:
      return "AlltoAll";
    case Kind::Gather:
      return "Gather";
    case Kind::Scatter:
      return "Scatter";
    case Kind::Broadcast:
      return "Broadcast";
    case Kind::Bcast:
      return "Bcast";
  }
  return "?";
}

namespace {

/// Blocks of the input and the output of that rank; 0 where the operation has none.
std::size_t inBlocks(const Shape& s, int rank, int ranks) {
  switch (s.kind) {
    case Kind::AllGather:
    case Kind::Gather:
      return 1;
    case Kind::AlltoAll:
      return static_cast<std::size_t>(ranks);
    case Kind::Scatter:
      return rank == s.root ? static_cast<std::size_t>(ranks) : 0;
    case Kind::Broadcast:
    case Kind::Bcast:
      return rank == s.root ? 1 : 0;
  }
  return 0;
}
std::size_t outBlocks(const Shape& s, int rank, int ranks) {
  switch (s.kind) {
    case Kind::AllGather:
    case Kind::AlltoAll:
      return static_cast<std::size_t>(ranks);
    case Kind::Gather:
      return rank == s.root ? static_cast<std::size_t>(ranks) : 0;
    case Kind::Scatter:
    case Kind::Broadcast:
    case Kind::Bcast:
      return 1;
  }
  return 0;
}
/// Whether input and output of that rank are one buffer.
bool shares(const Shape& s, int rank) {
  if (s.kind == Kind::Bcast) return rank == s.root;
  return s.inPlace && (s.kind == Kind::AllGather || (hasRoot(s.kind) && rank == s.root));
}
std::size_t inBytes(const Shape& s, int rank, int ranks) {
  if (shares(s, rank) && s.kind != Kind::Scatter) return 0;
  return s.block * inBlocks(s, rank, ranks);
}
std::size_t outBytes(const Shape& s, int rank, int ranks) {
  if (shares(s, rank) && s.kind == Kind::Scatter) return 0;
  return s.block * outBlocks(s, rank, ranks);
}

}  // namespace

// Offsets that are odd, and differ between ranks and between the two sides.
Trial::Trial(const Shape& shape, int rank, int ranks)
    : shape_(shape),
      rank_(rank),
      ranks_(ranks),
      in_(inBytes(shape, rank, ranks), static_cast<std::size_t>(1 + 2 * rank)),
      out_(outBytes(shape, rank, ranks), static_cast<std::size_t>(3 + 4 * rank)) {}

bool Trial::reads() const { return inBlocks(shape_, rank_, ranks_) > 0; }
bool Trial::writes() const { return outBlocks(shape_, rank_, ranks_) > 0; }

unsigned char* Trial::input() const {
  if (!reads()) return nullptr;
  if (!shares(shape_, rank_) || shape_.kind == Kind::Scatter) return in_.data();
  const bool own = shape_.kind == Kind::AllGather || shape_.kind == Kind::Gather;
  return out_.data() + (own ? shape_.block * static_cast<std::size_t>(rank_) : 0);
}
unsigned char* Trial::output() const {
  if (!writes()) return nullptr;
  if (!shares(shape_, rank_) || shape_.kind != Kind::Scatter) return out_.data();
  return in_.data() + shape_.block * static_cast<std::size_t>(rank_);
}

void Trial::prepare(std::uint64_t round, CUstream stream) {
  round_ = round;
  const std::size_t block = shape_.block;
  auto from = [&](int source, int destination) {
    return blockOf(block, source, destination, round);
  };
  Bytes in(block * inBlocks(shape_, rank_, ranks_)), out(block * outBlocks(shape_, rank_, ranks_));
  for (std::size_t i = 0; i < inBlocks(shape_, rank_, ranks_); ++i) {
    place(&in, i, from(rank_, static_cast<int>(i)));
  }
  for (std::size_t i = 0; i < outBlocks(shape_, rank_, ranks_); ++i) {
    const int source = static_cast<int>(i);
    switch (shape_.kind) {
      case Kind::AllGather:
      case Kind::Gather:
        place(&out, i, from(source, 0));
        break;
      case Kind::AlltoAll:
        place(&out, i, from(source, rank_));
        break;
      case Kind::Scatter:
        place(&out, i, from(shape_.root, rank_));
        break;
      case Kind::Broadcast:
      case Kind::Bcast:
        place(&out, i, from(shape_.root, 0));
        break;
    }
  }
  in_.poison(stream);
  out_.poison(stream);
  if (!shares(shape_, rank_)) {
    in_.put(in, 0, stream);
    // Behind the call the input is destroyed.
    inImage_.assign(in.size(), Region::kPoison);
    outImage_ = out;
  } else if (shape_.kind == Kind::Scatter) {
    in_.put(in, 0, stream);
    inImage_ = in;
    outImage_.clear();
  } else {
    const bool own = shape_.kind == Kind::AllGather || shape_.kind == Kind::Gather;
    out_.put(in, own ? block * static_cast<std::size_t>(rank_) : 0, stream);
    inImage_.clear();
    outImage_ = out;
  }
}

ncclResult_t Trial::call(ncclComm_t comm, CUstream stream) {
  const NcclApi& api = nccl();
  const Shape& s = shape_;
  using AllCall = ncclResult_t (*)(const void*, void*, std::size_t, ncclDataType_t, ncclComm_t,
                                   cudaStream_t, const void*);
  using RootedCall = ncclResult_t (*)(const void*, void*, std::size_t, ncclDataType_t, int,
                                      ncclComm_t, cudaStream_t, const void*);
  void* form = nullptr;
  if (s.withConfig && s.kind != Kind::Bcast) {
    const std::string name = fmt::format("nccl{}Config", nameOf(s.kind));
    form = ::dlsym(RTLD_DEFAULT, name.c_str());
    REQUIRE(form, "{} is not to be found", name);
  }
  if (form && !hasRoot(s.kind)) {
    return reinterpret_cast<AllCall>(form)(input(), output(), s.block, ncclUint8, comm, stream,
                                           nullptr);
  }
  if (form) {
    return reinterpret_cast<RootedCall>(form)(input(), output(), s.block, ncclUint8, s.root, comm,
                                              stream, nullptr);
  }
  switch (s.kind) {
    case Kind::AllGather:
      return api.ncclAllGather(input(), output(), s.block, ncclUint8, comm, stream);
    case Kind::AlltoAll:
      return api.ncclAlltoAll(input(), output(), s.block, ncclUint8, comm, stream);
    case Kind::Gather:
      return api.ncclGather(input(), output(), s.block, ncclUint8, s.root, comm, stream);
    case Kind::Scatter:
      return api.ncclScatter(input(), output(), s.block, ncclUint8, s.root, comm, stream);
    case Kind::Broadcast:
      return api.ncclBroadcast(input(), output(), s.block, ncclUint8, s.root, comm, stream);
    case Kind::Bcast:
      return api.ncclBcast(output(), s.block, ncclUint8, s.root, comm, stream);
  }
  return ncclInvalidArgument;
}

void Trial::after(CUstream stream) {
  if (!shares(shape_, rank_)) in_.poison(stream);
  const std::size_t inFetch = in_.fetch(stream), outFetch = out_.fetch(stream);
  expected_.push_back({inFetch, outFetch, inImage_, outImage_, round_});
}

std::string Trial::what() const {
  return fmt::format("{}{}{} of {} bytes, root {}, rank {} of {}, round {}",
                     shape_.inPlace ? "in-place " : "", nameOf(shape_.kind),
                     shape_.withConfig ? "Config" : "", shape_.block, shape_.root, rank_, ranks_,
                     round_);
}

void Trial::check() {
  for (const Expected& each : expected_) {
    round_ = each.round;
    in_.require(each.in, each.inFetch, what() + ", input");
    out_.require(each.out, each.outFetch, what() + ", output");
  }
  expected_.clear();
}

void Trial::checkUntouched() {
  for (const Expected& each : expected_) {
    if (shares(shape_, rank_)) continue;
    out_.require(Bytes(out_.bytes(), Region::kPoison), each.outFetch,
                 what() + ", untouched output");
  }
  expected_.clear();
}

void Trial::run(ncclComm_t comm, std::uint64_t round, CUstream stream) {
  prepare(round, stream);
  REQUIRE_NCCL(call(comm, stream));
  after(stream);
  awaitStream(stream, what());
  check();
}

void Sum::prepare(CUstream stream) {
  Bytes image(kBytes);
  for (int i = 0; i < kNumbers; ++i) {
    const auto value = static_cast<float>(rank_ + i);
    std::memcpy(image.data() + static_cast<std::size_t>(i) * sizeof value, &value, sizeof value);
  }
  in_.put(image, 0, stream);
  out_.poison(stream);
}

void Sum::call(ncclComm_t comm, CUstream stream) {
  REQUIRE_NCCL(
      nccl().ncclAllReduce(in_.data(), out_.data(), kNumbers, ncclFloat32, ncclSum, comm, stream));
}

void Sum::check() const {
  Bytes image(kBytes);
  for (int i = 0; i < kNumbers; ++i) {
    const auto value = static_cast<float>(ranks_ * (ranks_ - 1) / 2 + ranks_ * i);
    std::memcpy(image.data() + static_cast<std::size_t>(i) * sizeof value, &value, sizeof value);
  }
  out_.require(image, which_, "AllReduce");
}

int rankOf(ncclComm_t comm) {
  int rank = -1;
  REQUIRE_NCCL(nccl().ncclCommUserRank(comm, &rank));
  return rank;
}
int ranksOf(ncclComm_t comm) {
  int ranks = 0;
  REQUIRE_NCCL(nccl().ncclCommCount(comm, &ranks));
  return ranks;
}

void traffic(ncclComm_t comm, std::uint64_t tag, CUstream stream, std::size_t bytes) {
  const int rank = rankOf(comm), ranks = ranksOf(comm);
  const int next = (rank + 1) % ranks, previous = (rank + ranks - 1) % ranks;
  Trial gather({.kind = Kind::AllGather, .block = bytes}, rank, ranks);
  Region out(bytes, 1), in(bytes, 3);
  Bytes sent(bytes), wanted(bytes);
  makePattern(seedOf(rank, 1000, tag), sent.data(), bytes);
  makePattern(seedOf(previous, 1000, tag), wanted.data(), bytes);
  gather.prepare(tag, stream);
  out.poison(stream);
  out.put(sent, 0, stream);
  in.poison(stream);
  REQUIRE_NCCL(gather.call(comm, stream));
  REQUIRE_NCCL(nccl().ncclGroupStart());
  REQUIRE_NCCL(nccl().ncclSend(out.data(), bytes, ncclUint8, next, comm, stream));
  REQUIRE_NCCL(nccl().ncclRecv(in.data(), bytes, ncclUint8, previous, comm, stream));
  REQUIRE_NCCL(nccl().ncclGroupEnd());
  gather.after(stream);
  out.poison(stream);
  const std::size_t which = in.fetch(stream);
  awaitStream(stream, fmt::format("traffic {}", tag));
  gather.check();
  in.require(wanted, which, fmt::format("traffic {}", tag));
}

void saySmOps(const Rank& rank, const std::string& name) {
  rank.barrier(name);
  say(name, std::to_string(smOps()));
  rank.barrier(name + "-seen");
}

}  // namespace e2e
