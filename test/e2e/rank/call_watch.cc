#include "test/e2e/rank/call_watch.h"

#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <link.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstddef>
#include <iterator>

#include "test/e2e/rank/check.h"

namespace e2e {
namespace {

constexpr int kFrames = 48;

struct Library {
  const char* name;
  std::uintptr_t begin, end;
};
// Innermost decides. Filled before anything is counted.
Library gHoccl[] = {{"libhoccl.so", 0, 0}, {"libnccl-tuner-hoccl.so", 0, 0}};
Library gOthers[] = {{"libcuda.so.1", 0, 0}, {"libnccl.so.2", 0, 0}};

enum class Event { Allocation, Lock, SystemCall };

// The executable's own thread-local memory needs no allocation.
thread_local bool tWatching = false;
thread_local CallWatch::Counts tCounts;

int locate(dl_phdr_info* info, std::size_t, void*) {
  const char* slash = ::strrchr(info->dlpi_name, '/');
  const char* file = slash ? slash + 1 : info->dlpi_name;
  auto note = [&](Library& library) {
    if (::strcmp(file, library.name) != 0) return;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& header = info->dlpi_phdr[i];
      if (header.p_type != PT_LOAD) continue;
      const std::uintptr_t begin = info->dlpi_addr + header.p_vaddr;
      if (!library.begin || begin < library.begin) library.begin = begin;
      if (begin + header.p_memsz > library.end) library.end = begin + header.p_memsz;
    }
  };
  for (Library& library : gHoccl) note(library);
  for (Library& library : gOthers) note(library);
  return 0;
}

bool within(const Library& library, const void* address) {
  const auto value = reinterpret_cast<std::uintptr_t>(address);
  return value >= library.begin && value < library.end;
}

/// An event of this thread. What looking at the stack does itself does not count.
void note(Event event, long number = 0) {
  if (!tWatching) return;
  tWatching = false;
  ++tCounts.seen;
  void* frames[kFrames];
  const int depth = ::backtrace(frames, kFrames);
  bool hoccl = false, other = false;
  for (int i = 0; i < depth && !hoccl && !other; ++i) {
    for (const Library& library : gOthers) other = other || within(library, frames[i]);
    for (const Library& library : gHoccl) hoccl = hoccl || within(library, frames[i]);
  }
  if (hoccl) {
    switch (event) {
      case Event::Allocation:
        ++tCounts.allocations;
        break;
      case Event::Lock:
        ++tCounts.locks;
        break;
      case Event::SystemCall:
        if (tCounts.systemCalls++ == 0) tCounts.firstSystemCall = number;
        break;
    }
  }
  tWatching = true;
}

}  // namespace

#if defined(__x86_64__)

// The one place whose system calls the filter lets through.
asm(R"(
  .text
  .globl e2eRawSystemCall
  .hidden e2eRawSystemCall
  .type e2eRawSystemCall, @function
e2eRawSystemCall:
  .cfi_startproc
  movq %rdi, %rax
  movq %rsi, %rdi
  movq %rdx, %rsi
  movq %rcx, %rdx
  movq %r8, %r10
  movq %r9, %r8
  movq 8(%rsp), %r9
  syscall
  .globl e2eRawSystemCallEnd
  .hidden e2eRawSystemCallEnd
e2eRawSystemCallEnd:
  ret
  .cfi_endproc
  .size e2eRawSystemCall, .-e2eRawSystemCall
)");
extern "C" long e2eRawSystemCall(long number, long a, long b, long c, long d, long e, long f);
extern "C" const char e2eRawSystemCallEnd[];

namespace {

/// The kernel did not make the call: count it, then make it.
void onSystemCall(int, siginfo_t* info, void* context) {
  const int savedErrno = errno;
  auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  note(Event::SystemCall, info->si_syscall);
  registers[REG_RAX] =
      e2eRawSystemCall(info->si_syscall, registers[REG_RDI], registers[REG_RSI], registers[REG_RDX],
                       registers[REG_R10], registers[REG_R8], registers[REG_R9]);
  errno = savedErrno;
}

}  // namespace

bool CallWatch::watchSystemCalls() {
  struct sigaction action {};
  action.sa_sigaction = onSystemCall;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  if (::sigaction(SIGSYS, &action, nullptr) != 0) return false;
  // seccomp sees the address behind the instruction.
  const auto allowed = reinterpret_cast<std::uintptr_t>(e2eRawSystemCallEnd);
  constexpr std::uint32_t kAddress = offsetof(seccomp_data, instruction_pointer);
  const sock_filter filter[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, arch)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AUDIT_ARCH_X86_64, 0, 10),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kAddress),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(allowed), 0, 2),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, kAddress + 4),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(allowed >> 32), 6, 0),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_rt_sigreturn, 4, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 3, 0),
      // A thread of the stand-in NCCL would begin in the handler.
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 2, 0),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone3, 1, 0),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog program{static_cast<unsigned short>(std::size(filter)),
                           const_cast<sock_filter*>(filter)};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

#else

bool CallWatch::watchSystemCalls() { return false; }

#endif

void CallWatch::start() {
  ::dl_iterate_phdr(locate, nullptr);
  for (const Library& library : gHoccl) REQUIRE(library.begin, "{} is not loaded", library.name);
  for (const Library& library : gOthers) REQUIRE(library.begin, "{} is not loaded", library.name);
  void* frames[4];
  ::backtrace(frames, 4);  // its first call loads a library
  tCounts = {};
  tWatching = true;
}

CallWatch::Counts CallWatch::stop() {
  tWatching = false;
  return tCounts;
}

#if !HOCCL_SANITIZED
namespace {
using LockFunction = int (*)(pthread_mutex_t*);
LockFunction realLock() {
  static const auto function =
      reinterpret_cast<LockFunction>(::dlsym(RTLD_NEXT, "pthread_mutex_lock"));
  return function;
}
}  // namespace
#endif

}  // namespace e2e

// What the whole process calls instead of the C library's. A sanitizer has its own.
#if !HOCCL_SANITIZED
#define EXPORT __attribute__((visibility("default")))
extern "C" {

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* memory, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

EXPORT void* malloc(size_t bytes) {
  e2e::note(e2e::Event::Allocation);
  return __libc_malloc(bytes);
}
EXPORT void* calloc(size_t count, size_t bytes) {
  e2e::note(e2e::Event::Allocation);
  return __libc_calloc(count, bytes);
}
EXPORT void* realloc(void* memory, size_t bytes) {
  e2e::note(e2e::Event::Allocation);
  return __libc_realloc(memory, bytes);
}
EXPORT void* aligned_alloc(size_t alignment, size_t bytes) {
  e2e::note(e2e::Event::Allocation);
  return __libc_memalign(alignment, bytes);
}
EXPORT int posix_memalign(void** out, size_t alignment, size_t bytes) {
  e2e::note(e2e::Event::Allocation);
  *out = __libc_memalign(alignment, bytes);
  return *out ? 0 : ENOMEM;
}
EXPORT int pthread_mutex_lock(pthread_mutex_t* mutex) {
  e2e::note(e2e::Event::Lock);
  return e2e::realLock()(mutex);
}

}  // extern "C"
#endif
