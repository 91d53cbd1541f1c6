// Random operations from a seed, every byte checked.

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <map>

#include "test/e2e/rank/soak_memory.h"
#include "test/e2e/rank/soak_plan.h"

namespace e2e {
namespace {

using namespace soak;
using Clock = std::chrono::steady_clock;

// Subjects of random numbers that are this rank's own business.
constexpr std::uint64_t kMine = 100, kMemory = 200;
constexpr std::size_t kMargin = Cells::kMargin;

double secondsSince(Clock::time_point began) {
  return std::chrono::duration<double>(Clock::now() - began).count();
}

class Soak {
 public:
  explicit Soak(const Rank& rank);
  void run();

 private:
  /// This rank's share of an operation of the group.
  struct Part {
    Operation op;
    Share share;
    int rank = 0, ranks = 0;
    std::size_t stream = 0;
    Cell *in = nullptr, *out = nullptr;
    CUdeviceptr input = 0, output = 0;  ///< what NCCL is given
    CUdeviceptr window = 0;             ///< the output buffer's first byte
    bool keepsInput = false;            ///< checked instead of destroyed
    Check outCheck, inCheck;
  };
  /// A call, once or (a send to itself, between ranks of a pair) one of two of its part.
  struct Call {
    Part* part;
    bool sends;
  };

  void communicators();
  void doGroup(const Group& group);
  Part partOf(const Operation& op, std::uint64_t group, Random& random);
  void prepare(Part& part, Random& random);
  [[nodiscard]] std::vector<Call> callsOf(std::vector<Part>& parts, Random& random) const;
  void make(const Call& call, Random& random);
  void finish(Part& part);
  Page page(std::size_t bytes);
  /// Pauses, waits and frees between groups.
  void meanwhile(Random& random);
  void comesTo(Cell& cell, std::size_t stream);
  /// With trace=1, a line on standard output.
  void trace(const Group& group, const std::vector<Part>& parts, const char* what) const;
  void plantIfAsked(Part& part);
  [[noreturn]] void fail(const std::string& what);

  const Rank& rank_;
  std::uint64_t operations_;
  Plan plan_;
  int patienceMs_;
  long plant_;
  bool plantInGuard_, traced_;
  Clock::time_point began_ = Clock::now();
  std::vector<ncclComm_t> comms_;
  std::vector<CUstream> streams_;
  Pages pages_;
  Random memoryRandom_;
  Cells cells_;
  Checks checks_;
  std::uint64_t current_ = 0, steered_ = 0, calls_ = 0;
};

Soak::Soak(const Rank& rank)
    : rank_(rank),
      operations_(std::stoull(rank.argument("operations", "1000"))),
      plan_(std::stoull(rank.argument("seed", "1")), std::stoi(rank.argument("nodes", "2"))),
      patienceMs_(std::stoi(rank.argument("patienceMs", "60000"))),
      plant_(std::stol(rank.argument("plant", "-1"))),
      plantInGuard_(rank.argument("plantIn", "payload") == "guard"),
      traced_(rank.argument("trace", "0") == "1"),
      comms_(plan_.members().size(), nullptr),
      memoryRandom_((cuda(), plan_.seed()), kMemory, static_cast<std::uint64_t>(rank.rank)),
      cells_(memoryRandom_),
      checks_([this](const std::string& what) { fail(what); }) {
  REQUIRE(rank.ranks == Plan::kRanks, "{} ranks", rank.ranks);
}

void Soak::fail(const std::string& what) {
  std::string states;
  for (std::size_t i = 0; i < comms_.size(); ++i) {
    ncclResult_t state = ncclSuccess;
    if (!comms_[i]) continue;
    const ncclResult_t asked = nccl().ncclCommGetAsyncError(comms_[i], &state);
    if (asked == ncclSuccess && state == ncclSuccess) continue;
    states += fmt::format("; communicator {} is in error {}: {}", i, static_cast<int>(state),
                          nccl().ncclGetLastError(comms_[i]));
  }
  failAt(__FILE__, __LINE__,
         fmt::format("seed {}, rank {}, {} operations issued: {}{}", plan_.seed(), rank_.rank,
                     current_, what, states));
}

#define SOAK_NCCL(call)                                                   \
  do {                                                                    \
    const ncclResult_t result_ = (call);                                  \
    if (result_ != ncclSuccess)                                           \
      fail(fmt::format(#call " returned {}", static_cast<int>(result_))); \
  } while (0)

void Soak::communicators() {
  ncclComm_t world = comms_[0] = rank_.communicator();
  const int half = rank_.rank % 2;
  REQUIRE_NCCL(nccl().ncclCommSplit(world, half, rank_.rank,
                                    &comms_[static_cast<std::size_t>(1 + half)], nullptr));
  const std::vector<int>& three = plan_.members()[3];
  const bool member = std::find(three.begin(), three.end(), rank_.rank) != three.end();
  REQUIRE_NCCL(nccl().ncclCommSplit(world, member ? 0 : NCCL_SPLIT_NOCOLOR,
                                    rank_.ranks - rank_.rank, &comms_[3], nullptr));
}

Page Soak::page(std::size_t bytes) {
  for (;;) {
    if (Page page = pages_.take(bytes)) return page;
    checks_.await(false, patienceMs_);
  }
}

/// The cell's next use is on that stream, behind its last one.
void Soak::comesTo(Cell& cell, std::size_t stream) {
  if (cell.last && cell.stream != streams_[stream]) await(streams_[stream], cell.last);
  cell.stream = streams_[stream];
}

Soak::Part Soak::partOf(const Operation& op, std::uint64_t group, Random& random) {
  Part part;
  part.op = op;
  const std::vector<int>& members = plan_.members()[op.communicator];
  part.ranks = static_cast<int>(members.size());
  part.rank =
      static_cast<int>(std::find(members.begin(), members.end(), rank_.rank) - members.begin());
  if (part.rank == part.ranks) return part;
  part.share = shareOf(op, part.rank, part.ranks);
  part.stream = random.below(streams_.size());
  const auto take = [&] { return &cells_.take(group, random); };
  if (part.share.writes) part.out = take();
  if (part.share.reads && !part.share.shared) part.in = take();
  return part;
}

void Soak::prepare(Part& part, Random& random) {
  const Share& share = part.share;
  const std::size_t block = part.op.bytes;
  CUstream stream = streams_[part.stream];
  const std::string what = fmt::format("{}, here rank {} of {} on stream {}", part.op.text(),
                                       part.rank, part.ranks, part.stream);
  if (share.writes) {
    Check& check = part.outCheck;
    comesTo(*part.out, part.stream);
    const std::size_t bytes = block * share.expected.size();
    const std::size_t guard = random.oneIn(16) ? kMargin / 2 : 64 + random.below(256);
    part.window = part.out->address + kMargin / 2 + random.below(kMargin / 2);
    check.before = check.after = guard;
    check.block = block;
    check.expected = share.expected;
    check.what = what;
    check.seen = page(bytes + 2 * guard);
    REQUIRE_CU(cuda().copyToDevice(part.window - guard, poisonPage(), bytes + 2 * guard, stream));
    part.output = part.window + share.outputAt * block;
  }
  if (share.reads) {
    const std::size_t bytes = block * share.input.size();
    if (share.shared) {
      part.input = part.window + share.inputAt * block;
    } else {
      comesTo(*part.in, part.stream);
      part.input = part.in->address + kMargin / 2 + random.below(kMargin / 2);
      part.keepsInput = random.oneIn(8);
    }
    if (bytes > 0) {
      Page image = page(bytes);
      for (std::size_t i = 0; i < share.input.size(); ++i) {
        makePattern(share.input[i], image.get() + i * block, block);
      }
      REQUIRE_CU(cuda().copyToDevice(part.input, image.get(), bytes, stream));
      (share.writes ? part.outCheck : part.inCheck).inputs.push_back(std::move(image));
    }
    if (part.in) {
      Check& check = part.inCheck;
      check.what = what + " (its input)";
      check.block = block;
      if (part.keepsInput) {
        for (const std::uint64_t seed : share.input) check.expected.push_back({seed});
        check.seen = page(bytes);
      }
    }
  }
}

std::vector<Soak::Call> Soak::callsOf(std::vector<Part>& parts, Random& random) const {
  std::vector<Call> calls;
  for (Part& part : parts) {
    const bool two = isPointToPoint(part.op.what);
    if (!two) calls.push_back({&part, false});
    if (two && part.share.reads) calls.push_back({&part, true});
    if (two && part.share.writes) calls.push_back({&part, false});
  }
  // What NCCL does not match with each other may come in any order within a group.
  const auto independent = [](const Call& a, const Call& b) {
    const Operation &x = a.part->op, &y = b.part->op;
    if (x.communicator != y.communicator) return true;
    if (!isPointToPoint(x.what) || !isPointToPoint(y.what)) return false;
    return a.sends != b.sends || x.root != y.root || x.peer != y.peer || x.what != y.what;
  };
  for (std::size_t i = random.oneIn(2) ? 0 : 4 * calls.size(); i > 0 && calls.size() > 1; --i) {
    const std::size_t at = random.below(calls.size() - 1);
    if (independent(calls[at], calls[at + 1])) std::swap(calls[at], calls[at + 1]);
  }
  return calls;
}

void Soak::make(const Call& call, Random& random) {
  const Part& part = *call.part;
  const Operation& op = part.op;
  ncclComm_t comm = comms_[op.communicator];
  CUstream stream = streams_[part.stream];
  ncclDataType_t type = ncclUint8;
  std::size_t count = op.bytes;
  // Both sides of a pair have as many bytes, not always the same type.
  if (isPointToPoint(op.what) && count % sizeof(double) == 0 && random.oneIn(2)) {
    type = ncclFloat64;
    count /= sizeof(double);
  }
  const void* in = reinterpret_cast<const void*>(part.input);
  void* out = reinterpret_cast<void*>(part.output);
  const NcclApi& api = nccl();
  ++calls_;
  if (plan_.steered(op)) ++steered_;
  switch (op.what) {
    case What::Pair:
    case What::Self: {
      const int peer = op.what == What::Self ? op.root : call.sends ? op.peer : op.root;
      if (call.sends) {
        SOAK_NCCL(api.ncclSend(in, count, type, peer, comm, stream));
      } else {
        SOAK_NCCL(api.ncclRecv(out, count, type, peer, comm, stream));
      }
      break;
    }
    case What::AllGather:
      SOAK_NCCL(api.ncclAllGather(in, out, count, type, comm, stream));
      break;
    case What::AlltoAll:
      SOAK_NCCL(api.ncclAlltoAll(in, out, count, type, comm, stream));
      break;
    case What::Gather:
      SOAK_NCCL(api.ncclGather(in, out, count, type, op.root, comm, stream));
      break;
    case What::Scatter:
      SOAK_NCCL(api.ncclScatter(in, out, count, type, op.root, comm, stream));
      break;
    case What::Broadcast:
      SOAK_NCCL(api.ncclBroadcast(in, out, count, type, op.root, comm, stream));
      break;
    case What::Bcast:
      SOAK_NCCL(api.ncclBcast(out, count, type, op.root, comm, stream));
      break;
    case What::AllReduce:
      SOAK_NCCL(api.ncclAllReduce(in, out, count, type, ncclSum, comm, stream));
      break;
  }
}

/// The fault that shows that checks see one.
void Soak::plantIfAsked(Part& part) {
  const std::size_t bytes = part.op.bytes * part.share.expected.size();
  if (plant_ < 0 || bytes == 0 || part.op.number < static_cast<std::uint64_t>(plant_)) return;
  plant_ = -1;
  Page wrong = page(1);
  const CUdeviceptr last = part.window + bytes - 1;
  REQUIRE_CU(cuda().copyToHost(wrong.get(), last, 1, streams_[part.stream]));
  awaitStream(streams_[part.stream], "a planted fault");
  *wrong = static_cast<unsigned char>(plantInGuard_ ? ~kPoison : *wrong ^ 0x10);
  REQUIRE_CU(
      cuda().copyToDevice(last + (plantInGuard_ ? 1 : 0), wrong.get(), 1, streams_[part.stream]));
  part.outCheck.inputs.push_back(std::move(wrong));
  say("planted", std::to_string(part.op.number));
}

/// Right behind the group: destroys or fetches, so that a wait at the wrong place shows.
void Soak::finish(Part& part) {
  CUstream stream = streams_[part.stream];
  if (part.in) {
    const std::size_t bytes = part.op.bytes * part.share.input.size();
    if (bytes > 0 && part.keepsInput) {
      REQUIRE_CU(cuda().copyToHost(part.inCheck.seen.get(), part.input, bytes, stream));
    } else if (bytes > 0) {
      REQUIRE_CU(cuda().copyToDevice(part.input, poisonPage(), bytes, stream));
    }
  }
  if (!part.out) return;
  plantIfAsked(part);
  const Check& check = part.outCheck;
  const std::size_t total = check.before + check.block * check.expected.size() + check.after;
  std::memset(check.seen.get(), 0, total);
  REQUIRE_CU(cuda().copyToHost(check.seen.get(), part.window - check.before, total, stream));
}

void Soak::doGroup(const Group& group) {
  Random random(plan_.seed(), kMine + static_cast<std::uint64_t>(rank_.rank), group.number);
  meanwhile(random);
  std::vector<Part> parts;
  for (const Operation& op : group.operations) {
    Part part = partOf(op, group.number, random);
    if (part.share.reads || part.share.writes) parts.push_back(std::move(part));
  }
  for (Part& part : parts) prepare(part, random);
  if (traced_) trace(group, parts, "begins");
  const int depth = !group.grouped ? 0 : random.oneIn(8) ? 2 : 1;
  for (int i = 0; i < depth; ++i) SOAK_NCCL(nccl().ncclGroupStart());
  for (const Call& call : callsOf(parts, random)) {
    if (random.oneIn(200)) ::usleep(static_cast<useconds_t>(random.below(1000)));
    make(call, random);
  }
  for (int i = 0; i < depth; ++i) SOAK_NCCL(nccl().ncclGroupEnd());
  if (traced_) trace(group, {}, "is issued");
  for (Part& part : parts) finish(part);
  std::map<std::size_t, Mark> marks;
  for (Part& part : parts) {
    if (!marks[part.stream]) marks[part.stream] = markOf(streams_[part.stream]);
  }
  for (Part& part : parts) {
    const Mark& mark = marks[part.stream];
    for (auto [cell, check] :
         {std::pair{part.in, &part.inCheck}, std::pair{part.out, &part.outCheck}}) {
      if (!cell) continue;
      cell->last = mark;
      check->fetched = mark;
      if (check->seen || !check->inputs.empty()) checks_.add(std::move(*check));
    }
  }
  current_ = group.operations.back().number + 1;
}

void Soak::trace(const Group& group, const std::vector<Part>& parts, const char* what) const {
  std::string text = fmt::format("{:.3f} group {}{} {}", secondsSince(began_), group.number,
                                 group.grouped ? "" : " (one call)", what);
  for (const Part& part : parts) {
    text += fmt::format("; {}, {} on stream {}, in {:#x} out {:#x}", part.op.text(),
                        plan_.steered(part.op) ? "steered" : "NCCL's", part.stream, part.input,
                        part.output);
  }
  say("trace", text);
}

void Soak::meanwhile(Random& random) {
  if (random.oneIn(16)) ::usleep(static_cast<useconds_t>(random.below(1000)));
  if (random.oneIn(400)) ::usleep(static_cast<useconds_t>(random.below(20'000)));
  checks_.make();
  if (random.oneIn(100)) checks_.await(true, patienceMs_);
  if (!random.oneIn(60)) return;
  if (traced_) say("trace", fmt::format("{:.3f} frees", secondsSince(began_)));
  cells_.replaceOne(random);
  if (traced_) say("trace", fmt::format("{:.3f} has freed", secondsSince(began_)));
}

void Soak::run() {
  streams_ = {nullptr,     CU_STREAM_LEGACY, CU_STREAM_PER_THREAD,
              newStream(), newStream(),      newStream()};
  CUstream blocking = nullptr;
  REQUIRE_CU(cuda().streamCreate(&blocking, CU_STREAM_DEFAULT));
  streams_.push_back(blocking);
  communicators();
  constexpr std::chrono::seconds kBetweenReports{5};
  began_ = Clock::now();
  auto reported = began_;
  for (Group group = plan_.next(); group.operations.front().number < operations_;
       group = plan_.next()) {
    doGroup(group);
    if (Clock::now() - reported < kBetweenReports) continue;
    reported = Clock::now();
    say("progress", fmt::format("{} operations in {:.0f} s", current_, secondsSince(began_)));
  }
  checks_.await(true, patienceMs_);
  say("done",
      fmt::format("{} operations in {:.1f} s, {:.1f} GB checked, {} allocations freed", current_,
                  secondsSince(began_), static_cast<double>(checks_.bytes()) / 1e9, cells_.replaced()));
  for (std::size_t i = 0; i < comms_.size(); ++i) {
    ncclResult_t state = ncclSuccess;
    if (comms_[i]) SOAK_NCCL(nccl().ncclCommGetAsyncError(comms_[i], &state));
    if (state != ncclSuccess) fail("a communicator ended in error");
  }
  rank_.barrier("checked");
  say("calls", std::to_string(calls_));
  say("expectedSteered", std::to_string(steered_));
  sayStats();
  if (cuda().sessionCounters) {
    HocclEmuCounters counters{};
    REQUIRE_CU(cuda().sessionCounters(0, &counters));
    say("freedWhileMapped", std::to_string(counters.freedWhileMapped));
  }
  for (std::size_t i = comms_.size(); i-- > 0;) {
    if (comms_[i]) REQUIRE_NCCL(nccl().ncclCommDestroy(comms_[i]));
  }
}

void runSoak(const Rank& rank) { Soak(rank).run(); }

}  // namespace

const std::vector<Scenario> kSoakScenarios = {{"soak", runSoak}};

}  // namespace e2e
