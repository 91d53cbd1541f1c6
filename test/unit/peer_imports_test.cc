// What a mover knows of a peer's memory (PeerImports), and what it has told a peer of its own
// (ToldPeer).

#include "common/runtime/peer_imports.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>

namespace hoccl {
namespace {

void tell(PeerImports& imports, std::uint64_t allocation) {
  BufferRef ref{};
  ref.allocationId = allocation;
  ref.allocationBase = 0x1000 * allocation;
  ref.allocationBytes = 4096;
  std::memset(ref.ipcHandle, static_cast<int>(allocation), sizeof ref.ipcHandle);
  Message parts[HandlePart::kParts];
  PeerImports::describe(ref, &parts);
  for (const Message& part : parts) ASSERT_TRUE(imports.tell(part));
}

/// Told of allocation `n`, which is mapped at 0x1000 times `n` and not in use any more.
void useOnce(PeerImports& imports, std::uint64_t n) {
  bool fresh = false;
  tell(imports, n);
  PeerImport* import = imports.acquire(n, &fresh);
  imports.settle(import, 0x1000 * n);
  imports.release(import);
}

TEST(PeerImports, ADescriptionArrivesWhole) {
  PeerImports imports(4);
  tell(imports, 3);
  bool fresh = false;
  PeerImport* import = imports.acquire(3, &fresh);
  ASSERT_NE(import, nullptr);
  EXPECT_TRUE(fresh);
  EXPECT_EQ(import->buffer.allocationBase, 0x3000u);
  EXPECT_EQ(import->buffer.allocationBytes, 4096u);
  for (unsigned char c : import->buffer.ipcHandle) EXPECT_EQ(c, 3);
  EXPECT_EQ(imports.acquire(3, &fresh), import);
  EXPECT_FALSE(fresh);
  EXPECT_EQ(imports.acquire(4, &fresh), nullptr);
}

TEST(PeerImports, WhatIsForgottenGoesWhenItsLastUserHasGone) {
  PeerImports imports(4);
  tell(imports, 3);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0, allocation = 0;
  PeerImport* import = imports.acquire(3, &fresh);
  const std::uint64_t first = import->serial;
  imports.forget(3);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "it is just being mapped";
  ASSERT_EQ(imports.find(first), import);
  imports.settle(import, 0x5000);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "it has a user";
  EXPECT_FALSE(imports.nextForgotten(&allocation));
  imports.release(import);
  ASSERT_TRUE(imports.nextUnmap(&address, &serial, &which));
  EXPECT_EQ(address, 0x5000u);
  EXPECT_EQ(serial, first);
  EXPECT_FALSE(imports.nextForgotten(&allocation)) << "it is not unmapped yet";
  imports.unmapped(serial);
  ASSERT_TRUE(imports.nextForgotten(&allocation));
  EXPECT_EQ(allocation, 3u);
  // Told again, it is another one.
  tell(imports, 3);
  ASSERT_NE(imports.acquire(3, &fresh), nullptr);
  EXPECT_TRUE(fresh);
}

TEST(PeerImports, NoMoreThanTheCapacityStaysMapped) {
  PeerImports imports(2);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0;
  for (std::uint64_t n = 1; n <= 3; ++n) {
    useOnce(imports, n);
  }
  ASSERT_TRUE(imports.nextUnmap(&address, &serial, &which));
  EXPECT_EQ(address, 0x1000u) << "the one used longest ago";
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which));
  imports.acquire(1, &fresh);
  EXPECT_TRUE(fresh) << "it is known, and has to be mapped anew";
}

/// The control thread maps a span when it comes, needed or not, and could not do so again.
TEST(PeerImports, SpansStayUntilThePeerWantsThemBackAndThenGoEvenUnused) {
  PeerImports imports(1);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0, allocation = 0;
  const std::uint64_t used = spanId(1, 1), unused = spanId(2, 1);
  for (std::uint64_t id : {used, unused, std::uint64_t{3}}) tell(imports, id);
  PeerImport* import = imports.acquire(used, &fresh);
  EXPECT_EQ(import->buffer.kind, BufferKind::Span);
  imports.settle(import, 0x5000);
  imports.release(import);
  import = imports.acquire(3, &fresh);
  imports.settle(import, 0x6000);
  imports.release(import);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "a span counts for no capacity";
  for (std::uint64_t id : {used, unused}) {
    imports.forget(id);
    ASSERT_TRUE(imports.nextUnmap(&address, &serial, &which));
    EXPECT_EQ(which.kind, BufferKind::Span);
    EXPECT_EQ(which.allocationId, id);
    EXPECT_NE(serial, 0u);
    EXPECT_FALSE(imports.nextForgotten(&allocation)) << "it is not unmapped yet";
    imports.unmapped(serial);
    ASSERT_TRUE(imports.nextForgotten(&allocation));
    EXPECT_EQ(allocation, id);
  }
}

TEST(ToldPeer, KnowsOfASpanOnceItHasBeenHandedOver) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = true, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  EXPECT_EQ(told.share(span), ToldPeer::State::Sharing);
  told.shared(span, SpanShare::Whole, &tell, &forget);
  EXPECT_TRUE(tell && !forget);
  EXPECT_EQ(told.share(span), ToldPeer::State::Told);
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::Ask);
  std::uint64_t ticket = 0;
  EXPECT_TRUE(told.answered(span, &ticket));
  EXPECT_EQ(ticket, 7u);
}

TEST(ToldPeer, ASpanThatCouldNotBeHandedOverIsNotTriedAgainNorAskedFor) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = true, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  told.shared(span, SpanShare::Nothing, &tell, &forget);
  EXPECT_TRUE(!tell && !forget);
  EXPECT_EQ(told.share(span), ToldPeer::State::Refused);
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::NotTold);
  EXPECT_FALSE(told.waits());
}

TEST(ToldPeer, ASpanForWhichItHadNoEarIsTriedAgain) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = true, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  told.shared(span, SpanShare::Later, &tell, &forget);
  EXPECT_TRUE(!tell && !forget);
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::NotTold);
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
}

/// It may map that part, or have it in its socket, and keeps the memory so.
TEST(ToldPeer, ASpanOfWhichItHasAPartIsAskedFor) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = false, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  told.shared(span, SpanShare::Part, &tell, &forget);
  EXPECT_TRUE(tell && !forget);
  EXPECT_NE(told.share(span), ToldPeer::State::Told) << "nobody may copy there";
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::Ask);
  EXPECT_TRUE(told.waits());
}

/// Its memory may be on the way: the peer is asked when it can have all of it, and a drop waits.
TEST(ToldPeer, ASpanTakenBackWhileItIsHandedOverIsAskedForBehindThat) {
  for (SpanShare share :
       {SpanShare::Whole, SpanShare::Nothing, SpanShare::Later, SpanShare::Part}) {
    ToldPeer told;
    const std::uint64_t span = spanId(1, 1);
    bool tell = false, forget = false;
    EXPECT_EQ(told.share(span), ToldPeer::State::New);
    EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::Later);
    EXPECT_TRUE(told.waits());
    told.shared(span, share, &tell, &forget);
    EXPECT_TRUE(tell && forget) << "whatever has arrived has to go";
    std::uint64_t ticket = 0;
    EXPECT_TRUE(told.answered(span, &ticket));
    EXPECT_EQ(ticket, 7u);
  }
}

TEST(ToldPeer, APeerThatHasGoneHoldsNoSpan) {
  ToldPeer told;
  const std::uint64_t span = spanId(1, 1);
  bool tell = true, forget = true;
  EXPECT_EQ(told.share(span), ToldPeer::State::New);
  EXPECT_EQ(told.takeBack(span, 7), ToldPeer::TakenBack::Later);
  std::uint64_t ticket = 0;
  EXPECT_TRUE(told.nextVoid(&ticket));
  EXPECT_EQ(ticket, 7u);
  EXPECT_FALSE(told.nextVoid(&ticket));
  told.shared(span, SpanShare::Whole, &tell, &forget);
  EXPECT_TRUE(!tell && !forget);
}

/// Nothing else would have the loop look again: the peer's free waits.
TEST(PeerImports, WhatIsWantedBackGoesWithItsLastUse) {
  PeerImports imports(2);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0;
  tell(imports, 1);
  PeerImport* import = imports.acquire(1, &fresh);
  imports.settle(import, 0x5000);
  imports.forget(1);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which));
  EXPECT_FALSE(imports.work());
  imports.release(import);
  EXPECT_TRUE(imports.work());
  EXPECT_TRUE(imports.nextUnmap(&address, &serial, &which));
}

TEST(PeerImports, WhatCannotBeMappedTakesNothingOfTheCapacity) {
  PeerImports imports(1);
  bool fresh = false;
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0;
  for (std::uint64_t n = 1; n <= 2; ++n) {
    tell(imports, n);
    PeerImport* import = imports.acquire(n, &fresh);
    imports.settle(import, n == 1 ? 0 : 0x5000);
    imports.release(import);
  }
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "there is only one";
}

/// Nor does what the peer has taken back, unmapped or not.
TEST(PeerImports, WhatIsWantedBackTakesNothingOfTheCapacity) {
  PeerImports imports(1);
  CUdeviceptr address = 0;
  BufferRef which;
  std::uint64_t serial = 0;
  for (std::uint64_t n = 1; n <= 2; ++n) {
    useOnce(imports, n);
    if (n == 1) imports.forget(n);
  }
  ASSERT_TRUE(imports.nextUnmap(&address, &serial, &which));
  EXPECT_EQ(address, 0x1000u);
  EXPECT_FALSE(imports.nextUnmap(&address, &serial, &which)) << "there is only one";
}

TEST(PeerImports, WhatCannotBeMappedIsTriedOnce) {
  PeerImports imports(2);
  tell(imports, 1);
  bool fresh = false;
  PeerImport* import = imports.acquire(1, &fresh);
  imports.settle(import, 0);
  imports.release(import);
  EXPECT_EQ(imports.acquire(1, &fresh)->state, PeerImport::State::Failed);
  EXPECT_FALSE(fresh);
}

}  // namespace
}  // namespace hoccl
