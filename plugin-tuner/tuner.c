/* NCCL's tuner: how many CTAs, at most, run what stays on NCCL's kernels (HOCCL_CTAS). In C, in the
 * shim: a few comparisons need no core, and a process that is only tuned loads none. NCCL's choice of
 * algorithm and protocol is left alone, but for LL128 between nodes while the net plugin takes device memory
 * through staging (HOCCL_NET_STAGING=1; docs/net-plugin.md says why). The interface is declared here from the facts of NCCL's public
 * headers, versions 2 to 6. */

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "plugin-tuner/shim.h"

/* NCCL has no more channels than that; the table in common/base/config.h says the same. */
#define MAX_CTAS 64
/* So many bytes give a CTA enough to do: with fewer, NCCL takes fewer itself (LL, 512 threads of 8
 * bytes). */
#define BYTES_PER_CTA 4096
/* Rows of the cost table: algorithms over CollNet, which take exactly the channels they are told. */
#define ALGORITHM_COLLNET_DIRECT 2
#define ALGORITHM_COLLNET_CHAIN 3
#define RULED_OUT (-1.0f)
/* A column of it. */
#define PROTOCOL_LL128 1

#define LOG_WARN 2
#define LOG_INFO 3
#define SUBSYSTEM_INIT 0x1ul
#define SUBSYSTEM_TUNING 0x40ul

typedef void (*Logger)(int level, unsigned long subsystems, const char* file, int line,
                       const char* format, ...);

/* Of one communicator. Nothing of the tuner is the process's. */
struct Tuner {
  int ctas;    /* 0: NCCL's own choice */
  int noLl128; /* where the network is used */
};

static int readCtas(Logger log) {
  const char* text = getenv("HOCCL_CTAS");
  if (!text) return 0;
  char* end;
  errno = 0;
  const long value = strtol(text, &end, 10);
  if (text[0] >= '0' && text[0] <= '9' && *end == '\0' && errno == 0 && value <= MAX_CTAS) {
    return (int)value;
  }
  if (log) {
    log(LOG_WARN, SUBSYSTEM_INIT | SUBSYSTEM_TUNING, "hoccl", 0,
        "TUNER/HOCCL : HOCCL_CTAS='%s' is not a number from 0 to %d; NCCL chooses the CTAs", text,
        MAX_CTAS);
  }
  return 0;
}

/* Never an error: without a tuner of its own the communicator gets NCCL's choice. */
static ncclResult_t begin(void** context, size_t nodes, Logger log, int version) {
  struct Tuner* tuner = calloc(1, sizeof *tuner);
  *context = tuner;
  if (!tuner) return ncclSuccess;
  tuner->ctas = readCtas(log);
  const char* const staging = getenv("HOCCL_NET_STAGING");
  tuner->noLl128 = nodes > 1 && version >= 3 && staging && strcmp(staging, "1") == 0;
  if (log && tuner->noLl128) {
    log(LOG_INFO, SUBSYSTEM_INIT | SUBSYSTEM_TUNING, "hoccl", 0,
        "TUNER/HOCCL : no LL128 between nodes (HOCCL_NET_STAGING=1)");
  }
  if (log) {
    if (tuner->ctas > 0) {
      log(LOG_INFO, SUBSYSTEM_INIT | SUBSYSTEM_TUNING, "hoccl", 0,
          "TUNER/HOCCL : HOCCL " HOCCL_VERSION ", tuner interface v%d, at most %d CTAs for NCCL's "
          "collectives (HOCCL_CTAS)",
          version, tuner->ctas);
    } else {
      log(LOG_INFO, SUBSYSTEM_INIT | SUBSYSTEM_TUNING, "hoccl", 0,
          "TUNER/HOCCL : HOCCL " HOCCL_VERSION ", tuner interface v%d, CTAs as NCCL chooses", version);
    }
  }
  return ncclSuccess;
}

static ncclResult_t end(void* context) {
  free(context);
  return ncclSuccess;
}

static void limit(const struct Tuner* tuner, size_t bytes, int* channels) {
  if (!tuner || tuner->ctas == 0 || !channels) return;
  const size_t useful = bytes / BYTES_PER_CTA > 0 ? bytes / BYTES_PER_CTA : 1;
  *channels = useful < (size_t)tuner->ctas ? (int)useful : tuner->ctas;
}

/* The table is one block of algorithms x protocols, whatever the type says. */
static int possible(float** table, int algorithms, int protocols, int algorithm) {
  if (!table || algorithm >= algorithms) return 0;
  const float* row = (const float*)table + (size_t)algorithm * (size_t)protocols;
  for (int p = 0; p < protocols; ++p) {
    if (row[p] != RULED_OUT) return 1;
  }
  return 0;
}

/* All ranks see the same nodes and have the same variables, so they rule out the same. */
static void ruleOutLl128(const struct Tuner* tuner, float** table, int algorithms, int protocols) {
  if (!tuner || !tuner->noLl128 || !table || protocols <= PROTOCOL_LL128) return;
  float* const costs = (float*)table;
  const int entries = algorithms * protocols;
  int others = 0;
  for (int i = 0; i < entries; ++i) {
    others += i % protocols != PROTOCOL_LL128 && costs[i] != RULED_OUT;
  }
  /* NCCL_PROTO=LL128: the net plugin takes no device memory then, and an empty table is an error. */
  if (others == 0) return;
  for (int a = 0; a < algorithms; ++a) costs[a * protocols + PROTOCOL_LL128] = RULED_OUT;
}

static ncclResult_t limitByTable(void* context, size_t bytes, float** table, int algorithms,
                                 int protocols, int* channels) {
  ruleOutLl128(context, table, algorithms, protocols);
  if (!possible(table, algorithms, protocols, ALGORITHM_COLLNET_DIRECT) &&
      !possible(table, algorithms, protocols, ALGORITHM_COLLNET_CHAIN)) {
    limit(context, bytes, channels);
  }
  return ncclSuccess;
}

/* --- Entry points. A collective's kind is NCCL's enum, an int here. */

static ncclResult_t initV2(size_t ranks, size_t nodes, Logger log, void** context) {
  (void)ranks;
  return begin(context, nodes, log, 2);
}
static ncclResult_t initV3(size_t ranks, size_t nodes, Logger log, void** context) {
  (void)ranks;
  return begin(context, nodes, log, 3);
}
static ncclResult_t initV4(size_t ranks, size_t nodes, Logger log, void** context) {
  (void)ranks;
  return begin(context, nodes, log, 4);
}
/* The domains of NVLink and the constants of NCCL's model are not looked at. */
static ncclResult_t initV5(void** context, uint64_t commId, size_t ranks, size_t nodes, Logger log,
                           void* domains, void* constants) {
  (void)commId, (void)ranks, (void)domains, (void)constants;
  return begin(context, nodes, log, 5);
}
static ncclResult_t initV6(void** context, uint64_t commId, size_t ranks, size_t nodes, Logger log,
                           void* domains, void* constants) {
  (void)commId, (void)ranks, (void)domains, (void)constants;
  return begin(context, nodes, log, 6);
}

static ncclResult_t infoV2(void* context, int kind, size_t bytes, int collnet, int nvls, int operations,
                           int* algorithm, int* protocol, int* channels) {
  (void)kind, (void)nvls, (void)operations, (void)algorithm, (void)protocol;
  if (!collnet) limit(context, bytes, channels);
  return ncclSuccess;
}
static ncclResult_t infoV3(void* context, int kind, size_t bytes, int operations, float** table,
                           int algorithms, int protocols, int* channels) {
  (void)kind, (void)operations;
  return limitByTable(context, bytes, table, algorithms, protocols, channels);
}
static ncclResult_t infoV4(void* context, int kind, size_t bytes, int operations, float** table,
                           int algorithms, int protocols, int registered, int* channels) {
  (void)kind, (void)operations, (void)registered;
  return limitByTable(context, bytes, table, algorithms, protocols, channels);
}

struct TunerV2 {
  const char* name;
  ncclResult_t (*init)(size_t, size_t, Logger, void**);
  ncclResult_t (*getCollInfo)(void*, int, size_t, int, int, int, int*, int*, int*);
  ncclResult_t (*destroy)(void*);
};
struct TunerV3 {
  const char* name;
  ncclResult_t (*init)(size_t, size_t, Logger, void**);
  ncclResult_t (*getCollInfo)(void*, int, size_t, int, float**, int, int, int*);
  ncclResult_t (*destroy)(void*);
};
struct TunerV4 {
  const char* name;
  ncclResult_t (*init)(size_t, size_t, Logger, void**);
  ncclResult_t (*getCollInfo)(void*, int, size_t, int, float**, int, int, int, int*);
  ncclResult_t (*destroy)(void*);
};
struct TunerV5 {
  const char* name;
  ncclResult_t (*init)(void**, uint64_t, size_t, size_t, Logger, void*, void*);
  ncclResult_t (*getCollInfo)(void*, int, size_t, int, float**, int, int, int, int*);
  ncclResult_t (*finalize)(void*);
};
struct TunerV6 {
  const char* name;
  ncclResult_t (*init)(void**, uint64_t, size_t, size_t, Logger, void*, void*);
  ncclResult_t (*getCollInfo)(void*, int, size_t, int, float**, int, int, int, int*);
  ncclResult_t (*finalize)(void*);
  ncclResult_t (*getChunkSize)(void*, int, size_t, int, int, int, size_t*);
};
_Static_assert(sizeof(struct TunerV2) == 4 * 8 && sizeof(struct TunerV3) == 4 * 8 &&
                   sizeof(struct TunerV4) == 4 * 8 && sizeof(struct TunerV5) == 4 * 8 &&
                   sizeof(struct TunerV6) == 5 * 8,
               "NCCL's tables of pointers");
_Static_assert(offsetof(struct TunerV6, getCollInfo) == 2 * 8 &&
                   offsetof(struct TunerV6, getChunkSize) == 4 * 8 && sizeof(ncclResult_t) == 4,
               "NCCL's tables of pointers");

/* Asked for by the net plugin, which takes device memory only where somebody keeps LL128 off. */
EXPORT extern const int hocclTunerRulesOutLl128;
const int hocclTunerRulesOutLl128 = 1;

static const char kName[] = "HOCCL";
EXPORT extern const struct TunerV2 ncclTunerPlugin_v2;
EXPORT extern const struct TunerV3 ncclTunerPlugin_v3;
EXPORT extern const struct TunerV4 ncclTunerPlugin_v4;
EXPORT extern const struct TunerV5 ncclTunerPlugin_v5;
EXPORT extern const struct TunerV6 ncclTunerPlugin_v6;
const struct TunerV2 ncclTunerPlugin_v2 = {kName, initV2, infoV2, end};
const struct TunerV3 ncclTunerPlugin_v3 = {kName, initV3, infoV3, end};
const struct TunerV4 ncclTunerPlugin_v4 = {kName, initV4, infoV4, end};
const struct TunerV5 ncclTunerPlugin_v5 = {kName, initV5, infoV4, end};
const struct TunerV6 ncclTunerPlugin_v6 = {kName, initV6, infoV4, end, NULL};
