#include "tools/bench/report.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>

namespace hoccl::bench {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kSchema = 1;

template <typename T>
Json orNull(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

std::string cell(const std::optional<double>& value, int decimals) {
  return value ? fmt::format("{:.{}f}", *value, decimals) : "-";
}

std::string cell(const std::optional<std::uint64_t>& value) {
  return value ? std::to_string(*value) : "-";
}

const char* placeName(bool inPlace) { return inPlace ? "in" : "out"; }

constexpr const char* kRowFormat =
    "{:>12} {:>12} {:>9} {:>5} {:>11} {:>8} {:>8} {:>8} {:>10} {:>8} {:>8} {:>8}  {}\n";

}  // namespace

std::optional<double> Row::algbwGbs() const {
  if (!timeUs || *timeUs <= 0) return std::nullopt;
  return static_cast<double>(bytes) / *timeUs / 1e3;
}

std::optional<double> Row::busbwGbs() const {
  const auto algbw = algbwGbs();
  return algbw ? std::optional(*algbw * busFactor) : std::nullopt;
}

std::string tableHeading() {
  return fmt::format(fmt::runtime(kRowFormat), "#      bytes", "count", "type", "place", "time",
                     "algbw", "busbw", "#wrong", "launch", "p99", "idle", "kernels", "path") +
         fmt::format(fmt::runtime(kRowFormat), "#           ", "", "", "", "(us)", "(GB/s)",
                     "(GB/s)", "", "(us)", "(us)", "(us)", "", "");
}

std::string tableRow(const Row& row) {
  return fmt::format(fmt::runtime(kRowFormat), row.bytes, row.count, row.dtype,
                     placeName(row.inPlace), cell(row.timeUs, 2), cell(row.algbwGbs(), 2),
                     cell(row.busbwGbs(), 2), cell(row.errors), cell(row.launchUs, 2),
                     cell(row.launchP99Us, 2), cell(row.launchIdleUs, 2), cell(row.kernels),
                     row.path.empty() ? "-" : row.path);
}

std::string comparisonTable(const std::string& about, const std::vector<Row>& ours,
                            const std::vector<Row>& theirs) {
  if (ours.empty() || theirs.empty()) return "";
  constexpr const char* format = "{:>12} {:>5} {:>11} {:>11} {:>12} {:>13} {:>13} {:>14} {:>7}\n";
  const std::string &a = ours.front().impl, &b = theirs.front().impl;
  std::string text = fmt::format("#\n# {} against {}{}{}\n", a, b, about.empty() ? "" : " ", about);
  text += fmt::format(format, "#      bytes", "place", a + "(us)", b + "(us)", a + "(GB/s)",
                      b + "(GB/s)", a + " launch", b + " launch", "ratio");
  for (const Row& our : ours)
    for (const Row& their : theirs) {
      if (our.bytes != their.bytes || our.inPlace != their.inPlace) continue;
      const auto mine = our.algbwGbs(), other = their.algbwGbs();
      text += fmt::format(format, our.bytes, placeName(our.inPlace), cell(our.timeUs, 2),
                          cell(their.timeUs, 2), cell(mine, 2), cell(other, 2),
                          cell(our.launchUs, 2), cell(their.launchUs, 2),
                          mine && other ? fmt::format("{:.2f}", *mine / *other) : "-");
    }
  return text;
}

std::string ncclVersionText(int version) {
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::string summaryLine(std::optional<std::uint64_t> errors, const PathCounts* paths) {
  std::string line = "# errors: " + (errors ? std::to_string(*errors) : std::string("unchecked"));
  if (paths) {
    line += "  # steered: ";
    if (!paths->known) {
      line += "unknown";
    } else if (paths->total == 0) {
      line += "no operation";
    } else if (paths->steered == paths->total) {
      line += "all";
    } else {
      line += fmt::format("{} of {}", paths->steered, paths->total);
    }
  }
  return line + "\n";
}

Json rowJson(const Row& row) {
  Json json;
  json["schema"] = kSchema;
  json["impl"] = row.impl;
  json["op"] = row.op;
  json["path"] = row.path.empty() ? Json(nullptr) : Json(row.path);
  json["transport"] = orNull(row.transport);
  json["device"] = row.device;
  json["emulated"] = row.emulated;
  json["ranks"] = row.ranks;
  json["bytes"] = row.bytes;
  json["dtype"] = row.dtype;
  json["in_place"] = row.inPlace;
  json["iters"] = row.iters;
  json["time_us"] = orNull(row.timeUs);
  json["algbw_gbs"] = orNull(row.algbwGbs());
  json["busbw_gbs"] = orNull(row.busbwGbs());
  json["errors"] = orNull(row.errors);
  json["launch_us"] = orNull(row.launchUs);
  json["launch_p99_us"] = orNull(row.launchP99Us);
  json["launch_idle_us"] = orNull(row.launchIdleUs);
  json["kernels"] = orNull(row.kernels);
  return json;
}

Json reportJson(const RunHeader& header, const std::vector<Row>& rows) {
  auto textOrNull = [](const std::string& text) { return text.empty() ? Json() : Json(text); };
  Json report;
  Json& head = report["header"];
  head["schema"] = kSchema;
  head["program"] = "hoccl bench " + header.op;
  head["version"] = header.version;
  head["commit"] = textOrNull(header.commit);
  head["timestamp"] = textOrNull(header.timestamp);
  head["command"] = textOrNull(header.command);
  head["host"] = textOrNull(header.host);
  head["kernel"] = textOrNull(header.kernel);
  head["driver"] = textOrNull(header.driver);
  head["cuda"] = header.cudaVersion ? Json(header.cudaVersion) : Json();
  head["nccl"] = textOrNull(header.nccl);
  head["device"] = textOrNull(header.device);
  head["emulated"] = header.emulated;
  head["dilation"] = header.emulated ? Json(header.dilation) : Json();
  report["rows"] = Json::array();
  for (const Row& row : rows) report["rows"].push_back(rowJson(row));
  return report;
}

Status writeJson(const std::string& path, const Json& report) {
  const std::string partial = fmt::format("{}.{}.part", path, ::getpid());
  {
    std::ofstream file(partial);
    file << report.dump(2) << '\n';
    file.close();
    if (!file) {
      const int error = errno;
      ::unlink(partial.c_str());
      return Status::fromErrno("--json: cannot write " + partial, error);
    }
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(partial.c_str());
    return Status::fromErrno("--json: cannot rename to " + path, error);
  }
  return {};
}

}  // namespace hoccl::bench
