// The tuner, every version, as NCCL calls it. The table of costs has other dimensions than NCCL's
// own has today.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <nccl.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "test/conformance/processes.h"

namespace conformance {
namespace {

constexpr float kRuledOut = -1.0f;
constexpr int kUntouched = 0;  // what NCCL passes in: its own choice

std::vector<std::string> lines;
int warnings = 0;

void logger(int level, unsigned long, const char*, int, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  lines.emplace_back(text);
  warnings += level == 2 ? 1 : 0;
}
using Logger = void (*)(int, unsigned long, const char*, int, const char*, ...);

struct V2 {
  const char* name;
  ncclResult_t (*init)(std::size_t, std::size_t, Logger, void**);
  ncclResult_t (*getCollInfo)(void*, int, std::size_t, int, int, int, int*, int*, int*);
  ncclResult_t (*destroy)(void*);
};
struct V3 {
  const char* name;
  ncclResult_t (*init)(std::size_t, std::size_t, Logger, void**);
  ncclResult_t (*getCollInfo)(void*, int, std::size_t, int, float**, int, int, int*);
  ncclResult_t (*destroy)(void*);
};
struct V4 {
  const char* name;
  ncclResult_t (*init)(std::size_t, std::size_t, Logger, void**);
  ncclResult_t (*getCollInfo)(void*, int, std::size_t, int, float**, int, int, int, int*);
  ncclResult_t (*destroy)(void*);
};
struct V5 {
  const char* name;
  ncclResult_t (*init)(void**, std::uint64_t, std::size_t, std::size_t, Logger, void*, void*);
  ncclResult_t (*getCollInfo)(void*, int, std::size_t, int, float**, int, int, int, int*);
  ncclResult_t (*finalize)(void*);
};
struct V6 : V5 {
  ncclResult_t (*getChunkSize)(void*, int, std::size_t, int, int, int, std::size_t*);
};

class Table {
 public:
  Table(int algorithms, int protocols, float cost)
      : algorithms(algorithms),
        protocols(protocols),
        costs(static_cast<std::size_t>(algorithms * protocols), cost) {}
  void ruleOut(int algorithm) {
    for (int p = 0; p < protocols; ++p) {
      costs[static_cast<std::size_t>(algorithm * protocols + p)] = kRuledOut;
    }
  }
  int algorithms, protocols;
  std::vector<float> costs;
};

// One loaded tuner of one version.
class Tuner {
 public:
  explicit Tuner(int version) : version_(version) {
    library_ = ::dlopen(CONFORMANCE_TUNER, RTLD_NOW | RTLD_LOCAL);
    REQUIRE_SAYING(library_ != nullptr, ::dlerror());
    symbol_ = ::dlsym(library_, ("ncclTunerPlugin_v" + std::to_string(version)).c_str());
    REQUIRE(symbol_ != nullptr);
    REQUIRE(std::string(at<V2>()->name) == "HOCCL");
  }
  void* init(std::size_t nodes = 2) {
    void* context = nullptr;
    if (version_ <= 4) {
      REQUIRE_OK(at<V2>()->init(16, nodes, logger, &context));
    } else {
      int domains[3] = {};
      REQUIRE_OK(at<V5>()->init(&context, 7, 16, nodes, logger, domains, nullptr));
    }
    return context;
  }
  // The channels it says; the table must be as it was, or as it is expected to be.
  int ask(void* context, std::size_t bytes, Table table, bool collnet,
          const Table* expected = nullptr) {
    int channels = kUntouched;
    const std::vector<float> before = expected != nullptr ? expected->costs : table.costs;
    auto** const costs = reinterpret_cast<float**>(table.costs.data());
    if (version_ == 2) {
      int algorithm = -1, protocol = -1;
      REQUIRE_OK(at<V2>()->getCollInfo(context, 4, bytes, collnet ? 1 : 0, 0, 1, &algorithm,
                                       &protocol, &channels));
      REQUIRE(algorithm == -1 && protocol == -1);
    } else if (version_ == 3) {
      REQUIRE_OK(at<V3>()->getCollInfo(context, 4, bytes, 1, costs, table.algorithms,
                                       table.protocols, &channels));
    } else if (version_ == 4) {
      REQUIRE_OK(at<V4>()->getCollInfo(context, 4, bytes, 1, costs, table.algorithms,
                                       table.protocols, 0, &channels));
    } else {
      REQUIRE_OK(at<V5>()->getCollInfo(context, 4, bytes, 1, costs, table.algorithms,
                                       table.protocols, 0, &channels));
    }
    REQUIRE(table.costs == before);
    return channels;
  }
  void finalize(void* context) {
    REQUIRE_OK(version_ <= 4 ? at<V4>()->destroy(context) : at<V5>()->finalize(context));
  }
  void unload() { REQUIRE(::dlclose(library_) == 0); }

 private:
  template <typename Raw>
  [[nodiscard]] const Raw* at() const {
    return static_cast<const Raw*>(symbol_);
  }
  int version_;
  void* library_;
  void* symbol_;
};

Table usualTable() {
  Table table(9, 4, 12.5f);  // NCCL has 7 and 3
  table.ruleOut(2);
  table.ruleOut(3);
  table.costs[1] = kRuledOut;
  return table;
}

class TunerVersions : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Versions, TunerVersions, testing::Range(2, 7),
                         [](const auto& info) { return "v" + std::to_string(info.param); });

TEST_P(TunerVersions, CapsTheChannels) {
  const Outcome outcome = runAlone([] {
    ::setenv("HOCCL_CTAS", "4", 1);
    Tuner tuner(GetParam());
    void* const context = tuner.init();
    REQUIRE(lines.size() == 1 && lines[0].find("at most 4 CTAs") != std::string::npos);
    REQUIRE(tuner.ask(context, std::size_t{1} << 40, usualTable(), false) == 4);
    REQUIRE(tuner.ask(context, 1 << 20, usualTable(), false) == 4);
    REQUIRE(tuner.ask(context, 16384, usualTable(), false) == 4);
    REQUIRE(tuner.ask(context, 8192, usualTable(), false) == 2);
    REQUIRE(tuner.ask(context, 8, usualTable(), false) == 1);
    REQUIRE(tuner.ask(context, 0, usualTable(), false) == 1);
    // CollNet takes exactly the channels it is told, and may have fewer: left alone.
    Table collnet(9, 4, 12.5f);
    REQUIRE(tuner.ask(context, 1 << 20, collnet, true) == kUntouched);
    // A table that ends before CollNet's rows.
    REQUIRE(tuner.ask(context, 1 << 20, Table(2, 3, 1.0f), false) == 4);
    tuner.finalize(context);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// With device memory through the net plugin's staging, NCCL must not take LL128 between nodes.
TEST_P(TunerVersions, RulesOutLl128ForStaging) {
  const Outcome outcome = runAlone([] {
    ::setenv("HOCCL_NET_STAGING", "1", 1);
    Tuner tuner(GetParam());
    const Table given = usualTable();
    Table without = given;
    for (int a = 0; GetParam() >= 3 && a < given.algorithms; ++a) {
      without.costs[static_cast<std::size_t>(a * given.protocols + 1)] = kRuledOut;
    }
    void* const context = tuner.init();
    REQUIRE(tuner.ask(context, 1 << 20, given, false, &without) == kUntouched);
    tuner.finalize(context);
    // Nothing else is possible: NCCL_PROTO=LL128, with which the plugin takes no device memory.
    Table only(7, 3, kRuledOut);
    only.costs[1] = 3.0f;
    void* const forced = tuner.init();
    REQUIRE(tuner.ask(forced, 1 << 20, only, false) == kUntouched);
    tuner.finalize(forced);
    void* const oneNode = tuner.init(1);
    REQUIRE(tuner.ask(oneNode, 1 << 20, given, false) == kUntouched);
    tuner.finalize(oneNode);
    ::setenv("HOCCL_NET_STAGING", "0", 1);
    void* const off = tuner.init();
    REQUIRE(tuner.ask(off, 1 << 20, given, false) == kUntouched);
    tuner.finalize(off);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST_P(TunerVersions, LeavesAloneWithoutTheVariable) {
  const Outcome outcome = runAlone([] {
    ::unsetenv("HOCCL_CTAS");
    Tuner tuner(GetParam());
    void* const context = tuner.init();
    REQUIRE(warnings == 0);
    REQUIRE(tuner.ask(context, 1 << 20, usualTable(), false) == kUntouched);
    tuner.finalize(context);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

// One context for each communicator; ending one leaves the others, the library stays or goes.
TEST_P(TunerVersions, ContextsEndOneByOne) {
  const Outcome outcome = runAlone([] {
    for (int round = 0; round < 3; ++round) {
      ::setenv("HOCCL_CTAS", "3", 1);
      Tuner tuner(GetParam());
      void* const one = tuner.init();
      ::setenv("HOCCL_CTAS", "7", 1);
      void* const other = tuner.init();
      REQUIRE(tuner.ask(one, 1 << 20, usualTable(), false) == 3);
      tuner.finalize(one);
      REQUIRE(tuner.ask(other, 1 << 20, usualTable(), false) == 7);
      tuner.finalize(other);
      tuner.unload();
    }
    // Unloaded with a context that was never ended.
    Tuner tuner(GetParam());
    (void)tuner.init();
    tuner.unload();
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

TEST_P(TunerVersions, ABadVariableIsOneLineAndChangesNothing) {
  for (const char* value : {"65", "-1", "4x", "", " 4", "99999999999999999999"}) {
    const Outcome outcome = runAlone([value] {
      ::setenv("HOCCL_CTAS", value, 1);
      Tuner tuner(GetParam());
      void* const context = tuner.init();
      REQUIRE(warnings == 1);
      REQUIRE(lines[0].find("HOCCL_CTAS='" + std::string(value) + "'") != std::string::npos);
      REQUIRE(tuner.ask(context, 1 << 20, usualTable(), false) == kUntouched);
      tuner.finalize(context);
    });
    EXPECT_TRUE(outcome.ok()) << value << ": " << outcome.text();
  }
  for (const char* value : {"0", "1", "64"}) {
    const Outcome outcome = runAlone([value] {
      ::setenv("HOCCL_CTAS", value, 1);
      Tuner tuner(GetParam());
      void* const context = tuner.init();
      REQUIRE(warnings == 0);
      REQUIRE(tuner.ask(context, 1 << 30, usualTable(), false) == std::stoi(value));
      tuner.finalize(context);
    });
    EXPECT_TRUE(outcome.ok()) << value << ": " << outcome.text();
  }
}

TEST(TunerTables, ChunkSizesAreNccls) {
  const Outcome outcome = runAlone([] {
    void* const library = ::dlopen(CONFORMANCE_TUNER, RTLD_NOW | RTLD_LOCAL);
    REQUIRE(library != nullptr);
    const auto* const six = static_cast<const V6*>(::dlsym(library, "ncclTunerPlugin_v6"));
    REQUIRE(six != nullptr && six->getChunkSize == nullptr);
  });
  EXPECT_TRUE(outcome.ok()) << outcome.text();
}

}  // namespace
}  // namespace conformance
