#include "common/base/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>

namespace hoccl {
namespace {

TEST(SharedMemoryTest, IsZeroedSizedAndSharedWithAChild) {
  SharedMemory memory;
  ASSERT_TRUE(SharedMemory::create("test", 5000, &memory));
  ASSERT_TRUE(memory.valid());
  EXPECT_EQ(memory.size(), 5000u);
  auto* bytes = static_cast<unsigned char*>(memory.data());
  for (std::size_t i = 0; i < memory.size(); ++i) ASSERT_EQ(bytes[i], 0);
  const pid_t child = ::fork();
  if (child == 0) {
    bytes[4999] = 42;
    ::_exit(0);
  }
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_EQ(bytes[4999], 42);
}

TEST(SharedMemoryTest, ASecondMappingSeesTheSameBytes) {
  SharedMemory one, other;
  ASSERT_TRUE(SharedMemory::create("test", 4096, &one));
  const Status status = SharedMemory::map(UniqueFd(::dup(one.fd())), 4096, &other);
  ASSERT_TRUE(status) << status.message();
  EXPECT_NE(one.data(), other.data());
  std::memcpy(one.data(), "hello", 6);
  EXPECT_STREQ(static_cast<char*>(other.data()), "hello");
}

TEST(SharedMemoryTest, SizeIsSealedAndDescriptorCloseOnExec) {
  SharedMemory memory;
  ASSERT_TRUE(SharedMemory::create("test", 4096, &memory));
  EXPECT_NE(::ftruncate(memory.fd(), 0), 0);
  EXPECT_NE(::ftruncate(memory.fd(), 8192), 0);
  EXPECT_TRUE(::fcntl(memory.fd(), F_GETFD) & FD_CLOEXEC);
}

TEST(SharedMemoryTest, RefusesBadSizesAndForeignDescriptors) {
  SharedMemory memory, out;
  EXPECT_FALSE(SharedMemory::create("test", 0, &out));
  ASSERT_TRUE(SharedMemory::create("test", 4096, &memory));
  const Status wrongSize = SharedMemory::map(UniqueFd(::dup(memory.fd())), 8192, &out);
  EXPECT_EQ(wrongSize.code(), Code::InvalidArgument);
  EXPECT_NE(wrongSize.message().find("4096 bytes where 8192"), std::string::npos);
  // The right size, but the sender could still shrink it under us.
  UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), 4096), 0);
  EXPECT_FALSE(SharedMemory::map(std::move(unsealed), 4096, &out));
  EXPECT_FALSE(SharedMemory::map(UniqueFd(::open("/dev/null", O_RDWR)), 4096, &out));
  EXPECT_FALSE(SharedMemory::map(UniqueFd(), 4096, &out));
  EXPECT_FALSE(out.valid());
}

TEST(SharedMemoryTest, MoveLeavesTheSourceEmptyAndClosesOnce) {
  SharedMemory one;
  ASSERT_TRUE(SharedMemory::create("test", 4096, &one));
  const int fd = one.fd();
  void* data = one.data();
  SharedMemory other(std::move(one));
  EXPECT_FALSE(one.valid());
  EXPECT_EQ(one.fd(), -1);
  EXPECT_EQ(other.data(), data);
  SharedMemory third;
  ASSERT_TRUE(SharedMemory::create("test", 64, &third));
  third = std::move(other);
  EXPECT_EQ(third.fd(), fd);
  third.reset();
  EXPECT_FALSE(third.valid());
  EXPECT_EQ(::fcntl(fd, F_GETFD), -1);
}

TEST(UniqueFdTest, OwnsAndReleases) {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);
  UniqueFd write(ends[1]);
  {
    UniqueFd read(ends[0]);
    UniqueFd moved(std::move(read));
    EXPECT_FALSE(read);
    EXPECT_EQ(moved.get(), ends[0]);
  }
  EXPECT_EQ(::fcntl(ends[0], F_GETFD), -1);
  const int raw = write.release();
  EXPECT_FALSE(write.valid());
  EXPECT_NE(::fcntl(raw, F_GETFD), -1);
  ::close(raw);
}

TEST(SharedMemoryTest, ALimitOnFileSizesIsNamedAndKillsNobody) {
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) ::_exit(2);
    SharedMemory memory;
    const Status status = SharedMemory::create("test", 2 << 20, &memory);
    const bool named = !status && status.message().find("ulimit -f") != std::string::npos;
    ::_exit(named && SharedMemory::create("test", 1 << 20, &memory) ? 0 : 1);
  }
  int ended = 0;
  ASSERT_EQ(::waitpid(child, &ended, 0), child);
  ASSERT_TRUE(WIFEXITED(ended)) << "killed by signal " << WTERMSIG(ended);
  EXPECT_EQ(WEXITSTATUS(ended), 0);
}

}  // namespace
}  // namespace hoccl
