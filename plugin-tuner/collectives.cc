// Collectives as the sends and receives they consist of. Where input and output differ, a rank's
// own block goes through its mover as well: a copy within the device would be a kernel. Where that
// is allowed (HOCCL_OWN_BLOCK=kernel), the application's stream makes it.

#include "plugin-tuner/call_support.h"
#include "plugin-tuner/operations.h"
#include "plugin-tuner/steered_call.h"

namespace hoccl {
namespace {

const std::byte* at(const void* base, std::uint64_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}

/// One collective being put together. A side is a buffer of one block, or of one for each rank.
class Collective {
 public:
  Collective(ncclComm_t comm, cudaStream_t stream) : call_(comm, stream) {}

  bool takes(const char* name, Pairs pairs, ncclDataType_t type, std::size_t count) {
    return call_.takes(name, pairs, type, count);
  }
  [[nodiscard]] bool goesOn() const { return call_.result() == ncclSuccess; }
  [[nodiscard]] ncclResult_t result() const { return call_.result(); }
  [[nodiscard]] int rank() const { return call_.comm().rank; }
  [[nodiscard]] int ranks() const { return call_.comm().ranks; }
  [[nodiscard]] std::uint64_t block() const { return call_.bytes(); }

  bool input(const void* in, bool perRank) {
    perRankIn_ = perRank;
    return call_.exports(in, block() * (perRank ? static_cast<std::uint64_t>(ranks()) : 1), &in_);
  }
  bool output(void* out, bool perRank) {
    perRankOut_ = perRank;
    return call_.exports(out, block() * (perRank ? static_cast<std::uint64_t>(ranks()) : 1), &out_);
  }
  /// This rank's block for `peer`, and the block that comes from there.
  void send(int peer) { add(OpKind::Send, &in_, perRankIn_ ? peer : 0, peer); }
  void receive(int peer) { add(OpKind::Recv, &out_, perRankOut_ ? peer : 0, peer); }
  /// This rank's block for itself, which goes to nobody else.
  void ownBlock() {
    if (copyOwn()) return;
    send(rank());
    receive(rank());
  }
  /// This rank's block where all get the same, after the sends to the others: copied out for one of
  /// them and copied in both there and here.
  void ownBlockOfAll() {
    if (copyOwn()) return;
    // What goes directly from GPU to GPU passes no slots from which the own block could come.
    if (ranks() == 1 || call_.comm().direct[static_cast<std::size_t>(after(1))]) {
      return ownBlock();
    }
    add(OpKind::Mirror, &out_, perRankOut_ ? rank() : 0, after(1));
  }
  /// The other ranks in the order in which rank r sends to r+1, r+2, …, and receives from r-1, r-2,
  /// …, so that at no time all of them send to one.
  [[nodiscard]] int after(int distance) const { return (rank() + distance) % ranks(); }
  [[nodiscard]] int before(int distance) const { return (rank() - distance + ranks()) % ranks(); }
  void launch() { call_.launch(moved_); }

 private:
  bool copyOwn() {
    return call_.copyOwn(in_, perRankIn_ ? own() : 0, out_, perRankOut_ ? own() : 0);
  }
  [[nodiscard]] std::uint64_t own() const { return block() * static_cast<std::uint64_t>(rank()); }
  void add(OpKind kind, SteeredCall::Buffer* buffer, int blockIndex, int peer) {
    call_.add(kind, buffer, block() * static_cast<std::uint64_t>(blockIndex), peer, true);
    if (peer != rank() && kind != OpKind::Mirror) moved_ += block();
  }

  SteeredCall call_;
  SteeredCall::Buffer in_, out_;
  bool perRankIn_ = false, perRankOut_ = false;
  std::uint64_t moved_ = 0;
};

}  // namespace

bool allGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
               cudaStream_t stream, ncclResult_t* result) {
  const ErrnoKeeper keeper;
  Collective c(comm, stream);
  if (!c.takes("AllGather", {Pairs::Kind::All}, type, count)) return false;
  if (c.goesOn() && c.input(in, false) && c.output(out, true)) {
    for (int d = 1; d < c.ranks(); ++d) {
      c.send(c.after(d));
      c.receive(c.before(d));
    }
    if (in != at(out, c.block() * static_cast<std::uint64_t>(c.rank()))) c.ownBlockOfAll();
    c.launch();
  }
  *result = noteAnswer(c.result());
  return true;
}

bool allToAll(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
              cudaStream_t stream, ncclResult_t* result) {
  const ErrnoKeeper keeper;
  Collective c(comm, stream);
  if (!c.takes("AlltoAll", {Pairs::Kind::All}, type, count)) return false;
  if (c.goesOn() && c.input(in, true) && c.output(out, true)) {
    for (int d = 1; d < c.ranks(); ++d) {
      c.send(c.after(d));
      c.receive(c.before(d));
    }
    if (in != out) c.ownBlock();
    c.launch();
  }
  *result = noteAnswer(c.result());
  return true;
}

bool broadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
               ncclComm_t comm, cudaStream_t stream, ncclResult_t* result) {
  const ErrnoKeeper keeper;
  Collective c(comm, stream);
  if (!c.takes("Broadcast", {Pairs::Kind::Root, root}, type, count)) return false;
  if (c.goesOn() && c.rank() != root) {
    if (c.output(out, false)) {
      c.receive(root);
      c.launch();
    }
  } else if (c.goesOn() && c.input(in, false) && (in == out || c.output(out, false))) {
    for (int d = 1; d < c.ranks(); ++d) c.send(c.after(d));
    if (in != out) c.ownBlockOfAll();
    c.launch();
  }
  *result = noteAnswer(c.result());
  return true;
}

bool gather(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
            cudaStream_t stream, ncclResult_t* result) {
  const ErrnoKeeper keeper;
  Collective c(comm, stream);
  if (!c.takes("Gather", {Pairs::Kind::Root, root}, type, count)) return false;
  if (c.goesOn() && c.rank() != root) {
    if (c.input(in, false)) {
      c.send(root);
      c.launch();
    }
  } else if (c.goesOn() && c.output(out, true)) {
    const bool own = in != at(out, c.block() * static_cast<std::uint64_t>(root));
    if (!own || c.input(in, false)) {
      for (int d = 1; d < c.ranks(); ++d) c.receive(c.before(d));
      if (own) c.ownBlock();
      c.launch();
    }
  }
  *result = noteAnswer(c.result());
  return true;
}

bool scatter(const void* in, void* out, size_t count, ncclDataType_t type, int root,
             ncclComm_t comm, cudaStream_t stream, ncclResult_t* result) {
  const ErrnoKeeper keeper;
  Collective c(comm, stream);
  if (!c.takes("Scatter", {Pairs::Kind::Root, root}, type, count)) return false;
  if (c.goesOn() && c.rank() != root) {
    if (c.output(out, false)) {
      c.receive(root);
      c.launch();
    }
  } else if (c.goesOn() && c.input(in, true)) {
    const bool own = out != at(in, c.block() * static_cast<std::uint64_t>(root));
    if (!own || c.output(out, false)) {
      for (int d = 1; d < c.ranks(); ++d) c.send(c.after(d));
      if (own) c.ownBlock();
      c.launch();
    }
  }
  *result = noteAnswer(c.result());
  return true;
}

}  // namespace hoccl
