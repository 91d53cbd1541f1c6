#include "tools/bench/net_command.h"

#include <fmt/format.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <ctime>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "common/base/host_identity.h"
#include "common/base/log.h"
#include "common/base/version.h"
#include "common/net/tcp/interfaces.h"
#include "tools/bench/host_facts.h"
#include "tools/bench/net_link.h"
#include "tools/bench/report.h"
#include "tools/bench/statistics.h"

namespace hoccl::bench {
namespace {

constexpr int kUsage = 2, kFailed = 1;
constexpr int kPings = 5000, kMessages = 100'000, kWarmPings = 500;
/// A batch moves about so much, and no more than kMaxIterations payloads.
constexpr std::uint64_t kBatchBytes = 512u << 20;
constexpr std::uint64_t kMaxIterations = 2000;
constexpr std::uint64_t kMaxBytes = 16ull << 30;

struct Settings {
  std::vector<std::uint64_t> sizes;
  std::vector<std::string> over{"sockets", "tcp", "shm"};
  std::vector<std::string> figures{"latency", "messages", "bandwidth"};
  int batches = 5;
  NetPair pair;
};

struct NetRow {
  std::string impl, op, transport;
  std::uint64_t bytes = 0;
  int iterations = 0;
  std::vector<double> timesUs;  ///< of one payload or message, by batch
  std::vector<double> cpuUs;    ///< CPU time of both processes for it, by batch
  [[nodiscard]] double timeUs() const { return median(timesUs); }
};

Status bad(std::string text) { return Status::error(Code::InvalidArgument, std::move(text)); }

Status numberOption(const char* option, const std::optional<long long>& given, long long lowest,
                    long long highest, long long* value) {
  if (!given) return {};
  if (*given < lowest || *given > highest) {
    return bad(fmt::format("{} {}: allowed are {} to {}", option, *given, lowest, highest));
  }
  *value = *given;
  return {};
}

Status sizeOption(const char* option, const std::string& text, std::uint64_t* value) {
  if (text.empty()) return {};
  if (Status status = parseBytes(text, value); !status) {
    return bad(fmt::format("{} {}: {}", option, text, status.message()));
  }
  if (*value < 1 || *value > kMaxBytes) {
    return bad(
        fmt::format("{} {}: allowed are 1 byte to {}", option, text, formatBytes(kMaxBytes)));
  }
  return {};
}

Status complete(const NetCommandLine& line, Settings* out) {
  if (Status s = Config::fromEnvironment(&out->pair.config); !s) return s;
  if (Status s = BundleOptions::fromEnvironment(out->pair.config, &out->pair.options); !s) return s;
  long long factor = 4, batches = 5, threads = out->pair.options.threads,
            sockets = out->pair.options.socketsPerThread;
  if (Status s = numberOption("--stepfactor", line.factor, 2, 1024, &factor); !s) return s;
  if (Status s = numberOption("--batches", line.batches, 1, 101, &batches); !s) return s;
  if (Status s = numberOption("--threads", line.threads, 1, 16, &threads); !s) return s;
  if (Status s = numberOption("--sockets", line.sockets, 1, 16, &sockets); !s) return s;
  if (threads * sockets > BundleOptions::kMaxSockets) {
    return bad(fmt::format("--threads {} with --sockets {}: more than {} sockets", threads, sockets,
                           BundleOptions::kMaxSockets));
  }
  out->pair.options.threads = static_cast<unsigned>(threads);
  out->pair.options.socketsPerThread = static_cast<unsigned>(sockets);
  out->batches = static_cast<int>(batches);
  std::uint64_t first = 64 << 10, last = 256 << 20;
  if (Status s = sizeOption("--minbytes", line.minBytes, &first); !s) return s;
  if (Status s = sizeOption("--maxbytes", line.maxBytes, &last); !s) return s;
  if (line.maxBytes.empty()) last = std::max(first, last);
  if (line.minBytes.empty()) first = std::min(first, last);
  if (first > last) {
    return bad(fmt::format("--minbytes {} is larger than --maxbytes {}", first, last));
  }
  for (std::uint64_t bytes = first; bytes <= last; bytes *= static_cast<std::uint64_t>(factor)) {
    out->sizes.push_back(bytes);
  }
  if (!line.over.empty()) out->over = line.over;
  for (const std::string& over : out->over) {
    if (over != "sockets" && over != "tcp" && over != "shm" && over != "verbs") {
      return bad(fmt::format("--over {}: allowed are sockets, tcp, shm and verbs", over));
    }
  }
  if (!line.figures.empty()) out->figures = line.figures;
  for (const std::string& figure : out->figures) {
    if (figure != "latency" && figure != "messages" && figure != "bandwidth") {
      return bad(fmt::format("--figures {}: allowed are latency, messages and bandwidth", figure));
    }
  }
  const std::string address = line.address.empty() ? "127.0.0.1" : line.address;
  if (Status s = SocketAddress::parse(address, &out->pair.local); !s) {
    return bad(fmt::format("--address: {}", s.message()));
  }
  return {};
}

/// What both processes do, in the same order.
class NetRun {
 public:
  explicit NetRun(Settings settings) : settings_(std::move(settings)) {}

  Status run() {
    const std::uint64_t most = settings_.sizes.back();
    struct Way {
      const char *impl, *transport;
      Status (*make)(const NetPair&, std::uint64_t, std::unique_ptr<NetLink>*);
      std::unique_ptr<NetLink> link;
    };
    std::vector<Way> ways;
    for (const std::string& over : settings_.over) {
      if (over == "sockets") ways.push_back({"bare", "sockets", makeBareLink, nullptr});
      if (over == "tcp") ways.push_back({"hoccl", "tcp", makeTcpLink, nullptr});
      if (over == "shm") ways.push_back({"hoccl", "shm", makeShmLink, nullptr});
      if (over == "verbs") ways.push_back({"hoccl", "verbs", makeVerbsLink, nullptr});
    }
    for (Way& way : ways) {
      if (Status status = way.make(settings_.pair, most, &way.link); !status) return status;
    }
    // Batches of the ways in turn, so that what else happens on the machine meets all of them.
    auto measure = [&](const char* op, std::uint64_t bytes, int iterations, double parts,
                       auto&& once) -> Status {
      std::vector<NetRow> rows;
      for (const Way& way : ways)
        rows.push_back({way.impl, op, way.transport, bytes, iterations, {}, {}});
      for (int batch = -1; batch < settings_.batches; ++batch) {  // one to warm up
        for (std::size_t i = 0; i < ways.size(); ++i) {
          double seconds = 0;
          const double cpuBefore = cpuSeconds();
          if (Status status = once(*ways[i].link, &seconds); !status) {
            return status.inContext(fmt::format("{} of {}", op, ways[i].transport));
          }
          double cpu = cpuSeconds() - cpuBefore, theirs = 0;
          const NetPair& pair = settings_.pair;
          if (Status s = pair.side == 1 ? tell(pair, &cpu, sizeof cpu)
                                        : hear(pair, &theirs, sizeof theirs);
              !s) {
            return s;
          }
          if (batch < 0) continue;
          rows[i].timesUs.push_back(seconds * 1e6 / parts);
          rows[i].cpuUs.push_back((cpu + theirs) * 1e6 / parts);
        }
      }
      for (NetRow& row : rows) {
        if (settings_.pair.side == 0) print(row);
        rows_.push_back(std::move(row));
      }
      return {};
    };
    const auto asked = [this](const char* figure) {
      return std::find(settings_.figures.begin(), settings_.figures.end(), figure) !=
             settings_.figures.end();
    };
    if (asked("latency")) {
      const auto once = [](NetLink& link, double* s) { return link.pingPong(kPings, s); };
      if (Status s = measure("latency", 8, kPings, 2.0 * kPings, once); !s) return s;
    }
    if (asked("messages")) {
      const auto once = [](NetLink& link, double* s) { return link.burst(kMessages, s); };
      if (Status s = measure("messages", 8, kMessages, kMessages, once); !s) return s;
    }
    if (!asked("bandwidth")) return {};
    for (const std::uint64_t bytes : settings_.sizes) {
      const int iterations =
          static_cast<int>(std::clamp<std::uint64_t>(kBatchBytes / bytes, 2, kMaxIterations));
      if (Status s =
              measure("bandwidth", bytes, iterations, iterations,
                      [&](NetLink& link, double* s) { return link.stream(bytes, iterations, s); });
          !s) {
        return s;
      }
    }
    return {};
  }
  [[nodiscard]] const std::vector<NetRow>& rows() const { return rows_; }

 private:
  static double cpuSeconds() {
    timespec used;
    ::clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) * 1e-9;
  }
  static void print(const NetRow& row) {
    const double us = row.timeUs();
    const double cpuUs = median(row.cpuUs);
    const auto bytes = static_cast<unsigned long long>(row.bytes);
    if (row.op == "bandwidth") {
      std::printf("%-10s %-8s %12llu %12.1f %12.3f %14s %12.1f\n", row.op.c_str(),
                  row.transport.c_str(), bytes, us, static_cast<double>(row.bytes) / us * 1e-3, "-",
                  cpuUs);
    } else {
      std::printf("%-10s %-8s %12llu %12.3f %12s %14.0f %12.3f\n", row.op.c_str(),
                  row.transport.c_str(), bytes, us, "-", 1e6 / us, cpuUs);
    }
    std::fflush(stdout);
  }

  Settings settings_;
  std::vector<NetRow> rows_;
};

/// How the tcp transport stands against bare sockets, by size.
void printRatios(const std::vector<NetRow>& rows) {
  std::map<std::pair<std::string, std::uint64_t>, double> bare;
  for (const NetRow& row : rows) {
    if (row.impl == "bare") bare[{row.op, row.bytes}] = row.timeUs();
  }
  if (bare.empty()) return;
  std::printf("# tcp against bare sockets (above 1: faster):");
  for (const NetRow& row : rows) {
    if (row.transport != "tcp" || bare.count({row.op, row.bytes}) == 0) continue;
    std::printf(" %s %s %.2f", row.op.c_str(), formatBytes(row.bytes).c_str(),
                bare[{row.op, row.bytes}] / row.timeUs());
  }
  std::printf("\n");
}

nlohmann::ordered_json jsonOf(const Settings& settings, const std::vector<NetRow>& rows,
                              const std::string& command) {
  RunHeader header;
  header.op = "net";
  header.version = versionText();
  header.commit = commitText();
  header.host = shortHostName();
  header.kernel = kernelText();
  header.device = "cpu";
  header.timestamp = timestampText();
  header.command = command;
  nlohmann::ordered_json report = reportJson(header, {});
  report["header"]["threads"] = settings.pair.options.threads;
  report["header"]["sockets_per_thread"] = settings.pair.options.socketsPerThread;
  report["header"]["address"] = settings.pair.local.text();
  report["header"]["cpus"] = ::sysconf(_SC_NPROCESSORS_ONLN);
  for (const NetRow& row : rows) {
    nlohmann::ordered_json json;
    json["schema"] = report["header"]["schema"];
    json["impl"] = row.impl;
    json["op"] = "net_" + row.op;
    json["transport"] = row.transport;
    json["bytes"] = row.bytes;
    json["iters"] = row.iterations * static_cast<int>(row.timesUs.size());
    json["time_us"] = row.timeUs();
    const bool payload = row.op == "bandwidth";
    json["algbw_gbs"] =
        payload ? nlohmann::ordered_json(static_cast<double>(row.bytes) / row.timeUs() * 1e-3)
                : nlohmann::ordered_json();
    json["messages_per_s"] =
        payload ? nlohmann::ordered_json() : nlohmann::ordered_json(1e6 / row.timeUs());
    json["cpu_us"] = median(row.cpuUs);
    json["batches_us"] = row.timesUs;
    report["rows"].push_back(json);
  }
  return report;
}

}  // namespace

CLI::App* addNetCommand(CLI::App& bench, const std::shared_ptr<NetCommandLine>& line) {
  CLI::App* net = bench.add_subcommand(
      "net", "latency, message rate and bandwidth of the transports, without a GPU");
  net->add_option("-b,--minbytes", line->minBytes, "smallest payload (default 64KiB)");
  net->add_option("-e,--maxbytes", line->maxBytes, "largest payload (default 256MiB)");
  net->add_option("-f,--stepfactor", line->factor, "factor from size to size (default 4)");
  net->add_option("--batches", line->batches, "timed batches a figure, of which the median (5)");
  net->add_option("--threads", line->threads,
                  "socket threads (default: HOCCL_SOCKET_NTHREADS, NCCL_SOCKET_NTHREADS)");
  net->add_option("--sockets", line->sockets,
                  "sockets a thread (default: HOCCL_NSOCKS_PERTHREAD, NCCL_NSOCKS_PERTHREAD)");
  net->add_option("--address", line->address, "this host's address to use (default 127.0.0.1)");
  net->add_option("--over", line->over, "what is measured: sockets, tcp, shm (the default), verbs")
      ->delimiter(',');
  net->add_option("--figures", line->figures, "of latency, messages, bandwidth (default all)")
      ->delimiter(',');
  net->add_option("--json", line->jsonFile, "write the rows to this file");
  return net;
}

int runNetBench(const NetCommandLine& line, const std::string& command) {
  setLogRole("bench");
  auto fail = [](int code, const Status& status) {
    std::fprintf(stderr, "hoccl bench net: %s\n", status.message().c_str());
    return code;
  };
  Settings settings;
  if (Status status = complete(line, &settings); !status) return fail(kUsage, status);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
    return fail(kFailed, Status::fromErrno("socketpair", errno));
  }
  std::fflush(stdout);
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return fail(kFailed, Status::fromErrno("fork", errno));
  ::close(ends[child == 0 ? 0 : 1]);
  settings.pair.side = child == 0 ? 1 : 0;
  settings.pair.talk = ends[child == 0 ? 1 : 0];
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(kFailed);
    const Status status = NetRun(std::move(settings)).run();
    if (!status)
      std::fprintf(stderr, "hoccl bench net: receiving side: %s\n", status.message().c_str());
    ::_exit(status ? 0 : kFailed);
  }
  const BundleOptions& options = settings.pair.options;
  std::printf(
      "# hoccl bench net: %u thread(s) of %u socket(s) a side, between two processes at %s\n",
      options.threads, options.socketsPerThread, settings.pair.local.text().c_str());
  std::printf("# %-8s %-8s %12s %12s %12s %14s %12s\n", "figure", "over", "bytes", "us", "GB/s",
              "messages/s", "CPU us");
  std::fflush(stdout);
  NetRun run(settings);
  const Status status = run.run();
  ::close(settings.pair.talk);
  if (!status) ::kill(child, SIGKILL);
  int state = 0;
  while (::waitpid(child, &state, 0) < 0 && errno == EINTR) {
  }
  if (!status) return fail(kFailed, status);
  if (settings.over.size() > 1) printRatios(run.rows());
  if (!line.jsonFile.empty()) {
    if (Status s = writeJson(line.jsonFile, jsonOf(settings, run.rows(), command)); !s) {
      return fail(kFailed, s);
    }
  }
  return WIFEXITED(state) ? WEXITSTATUS(state) : kFailed;
}

}  // namespace hoccl::bench
