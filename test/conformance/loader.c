/* A plain C program that loads the net plugin as NCCL does: by the value of NCCL_NET_PLUGIN,
 * version 11, whose table is declared here once more and from nothing else. The argument says how
 * it ends. */

#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

struct Config {
  int trafficClass;
};
struct Net {
  const char* name;
  int (*init)(void**, uint64_t, struct Config*,
              void (*)(int, unsigned long, const char*, int, const char*, ...),
              int (*)(void**, int, void*, int64_t, void*));
  int (*devices)(int*);
  int (*getProperties)(int, void*);
  int (*listen)(void*, int, void*, void**);
  int (*connect)(void*, int, void*, void**, void**);
  int (*accept)(void*, void**, void**);
  int (*regMr)(void*, void*, size_t, int, void**);
  int (*regMrDmaBuf)(void*, void*, size_t, int, uint64_t, int, void**);
  int (*deregMr)(void*, void*);
  int (*isend)(void*, void*, size_t, int, void*, void*, void**);
  int (*irecv)(void*, int, void**, size_t*, int*, void**, void**, void**);
  int (*iflush)(void*, int, void**, int*, void**, void**);
  int (*test)(void*, int*, int*);
  int (*closeSend)(void*);
  int (*closeRecv)(void*);
  int (*closeListen)(void*);
  int (*getDeviceMr)(void*, void*, void**);
  int (*irecvConsumed)(void*, int, void*);
  int (*makeVDevice)(int*, void*);
  int (*finalize)(void*);
  int (*setNetAttr)(void*, void*);
};

#define NEED(condition)                                               \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      exit(1);                                                        \
    }                                                                 \
  } while (0)

static void logLine(int level, unsigned long subsystems, const char* file, int line,
                    const char* format, ...) {
  (void)level, (void)subsystems, (void)file, (void)line;
  va_list arguments;
  va_start(arguments, format);
  vprintf(format, arguments);
  va_end(arguments);
  printf("\n");
}

static int noProfiler(void** event, int type, void* parent, int64_t plugin, void* extra) {
  (void)event, (void)type, (void)parent, (void)plugin, (void)extra;
  return 0;
}

/* NCCL's rule: the name itself, then libnccl-net-NAME.so unless it has a '/' or is lib*.so. */
static void* openPlugin(const char* name) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library) return library;
  const size_t length = strlen(name);
  if (!strchr(name, '/') &&
      (strncmp(name, "lib", 3) != 0 || length < 3 || strcmp(name + length - 3, ".so") != 0)) {
    char full[256];
    snprintf(full, sizeof full, "libnccl-net-%s.so", name);
    library = dlopen(full, RTLD_NOW | RTLD_LOCAL);
  }
  if (!library) fprintf(stderr, "%s\n", dlerror());
  return library;
}

struct Link {
  void *context, *listener, *sends, *receives;
};

static void makeLink(const struct Net* net, struct Link* link) {
  char handle[128];
  struct Config config = {-1};
  NEED(net->init(&link->context, 1, &config, logLine, noProfiler) == 0);
  int count = 0;
  NEED(net->devices(&count) == 0 && count > 0);
  NEED(net->listen(link->context, 0, handle, &link->listener) == 0);
  link->sends = link->receives = NULL;
  while (!link->sends || !link->receives) {
    if (!link->sends) NEED(net->connect(link->context, 0, handle, &link->sends, NULL) == 0);
    if (!link->receives) NEED(net->accept(link->listener, &link->receives, NULL) == 0);
  }
}

static void exchange(const struct Net* net, struct Link* link, size_t bytes) {
  char* from = malloc(bytes);
  char* to = calloc(bytes, 1);
  for (size_t i = 0; i < bytes; ++i) from[i] = (char)(i * 31 + 7);
  void *send = NULL, *receive = NULL, *place = to, *none = NULL;
  int tag = 4;
  while (!receive) {
    NEED(net->irecv(link->receives, 1, &place, &bytes, &tag, &none, &none, &receive) == 0);
  }
  while (!send) NEED(net->isend(link->sends, from, bytes, tag, NULL, NULL, &send) == 0);
  int sent = 0, received = 0, size = 0;
  while (!sent || !received) {
    if (!sent) NEED(net->test(send, &sent, NULL) == 0);
    if (!received) NEED(net->test(receive, &received, &size) == 0);
    sched_yield();
  }
  NEED((size_t)size == bytes && memcmp(from, to, bytes) == 0);
  free(from);
  free(to);
}

static void closeLink(const struct Net* net, struct Link* link) {
  NEED(net->closeSend(link->sends) == 0);
  NEED(net->closeRecv(link->receives) == 0);
  NEED(net->closeListen(link->listener) == 0);
  NEED(net->finalize(link->context) == 0);
}

int main(int argc, char** argv) {
  const char* how = argc > 1 ? argv[1] : "close";
  const char* name = getenv("NCCL_NET_PLUGIN");
  NEED(name);
  setvbuf(stdout, NULL, _IONBF, 0);
  void* library = openPlugin(name);
  if (!library) return 4;
  const struct Net* net = dlsym(library, "ncclNetPlugin_v11");
  NEED(net && net->finalize);
  struct Link link;
  makeLink(net, &link);
  exchange(net, &link, 8);
  exchange(net, &link, 1000000);
  if (strcmp(how, "close") == 0) {
    closeLink(net, &link);
    NEED(dlclose(library) == 0);
    return 0;
  }
  if (strcmp(how, "leak") == 0) return 0; /* exit from main with all open */
  if (strcmp(how, "exit") == 0) exit(0);
  if (strcmp(how, "finalize") == 0) { /* connections left open, the library unloaded */
    NEED(net->finalize(link.context) == 0);
    NEED(dlclose(library) == 0);
    usleep(50000);
    return 0;
  }
  if (strcmp(how, "unload") == 0) {
    /* The library unloaded with all open and its threads asleep in it; then they are woken. */
    NEED(dlclose(library) == 0);
    for (int fd = 3; fd < 64; ++fd) (void)shutdown(fd, SHUT_RDWR);
    usleep(100000);
    return 0;
  }
  if (strcmp(how, "again") == 0) { /* unloaded and loaded again */
    closeLink(net, &link);
    for (int i = 0; i < 10; ++i) {
      NEED(dlclose(library) == 0);
      NEED((library = openPlugin(name)) != NULL);
      NEED((net = dlsym(library, "ncclNetPlugin_v11")) != NULL);
      makeLink(net, &link);
      exchange(net, &link, 70000);
      closeLink(net, &link);
    }
    return 0;
  }
  if (strcmp(how, "fork") == 0) {
    for (int way = 0; way < 3; ++way) {
      const pid_t child = fork();
      if (child == 0) {
        if (way == 0) _exit(0);
        if (way == 1) exit(0);
        execl("/bin/true", "true", (char*)NULL);
        _exit(9);
      }
      exchange(net, &link, 200000); /* the parent goes on meanwhile */
      int status = -1;
      NEED(waitpid(child, &status, 0) == child && status == 0);
      exchange(net, &link, 200000);
    }
    closeLink(net, &link);
    return 0;
  }
  if (strcmp(how, "exec") == 0) execl("/bin/true", "true", (char*)NULL);
  return 5;
}
