#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "common/base/status.h"

namespace hoccl::bench {

/// One line of the table and one object of the JSON file. Empty: not measured.
struct Row {
  std::string impl;  ///< hoccl, nccl, nccl-ce or bare
  std::string op;    ///< the operation's name
  std::string path;  ///< staged, nccl, copy-engine, …; for bare: steady, single; "" when unknown
  std::optional<std::string> transport;
  std::string device;
  bool emulated = false;
  int ranks = 0;
  std::uint64_t bytes = 0;
  std::uint64_t count = 0;  ///< elements the call is given, as in nccl-tests
  bool inPlace = false;
  std::string dtype;
  int iters = 0;  ///< timed iterations, all batches together
  std::optional<double> timeUs;
  double busFactor = 1;  ///< busbw / algbw
  std::optional<std::uint64_t> errors;
  std::optional<double> launchUs, launchP99Us, launchIdleUs;
  std::optional<std::uint64_t> kernels;

  /// GB/s (1e9 bytes a second), as nccl-tests defines them.
  [[nodiscard]] std::optional<double> algbwGbs() const;
  [[nodiscard]] std::optional<double> busbwGbs() const;
};

/// What the figures were taken on; the JSON file's header object.
struct RunHeader {
  std::string op, version, commit, host, kernel, driver, device, nccl, timestamp, command;
  int cudaVersion = 0;
  bool emulated = false;
  double dilation = 1;
};

std::string tableHeading();
std::string tableRow(const Row& row);
/// Sizes (in place and out of place apart) that both sides have, side by side with the ratio of
/// their bandwidths (ours over theirs). `about` says more about the other side than its rows' impl,
/// "over NET/Socket".
std::string comparisonTable(const std::string& about, const std::vector<Row>& ours,
                            const std::vector<Row>& theirs);
/// 22809 as "2.28.9".
std::string ncclVersionText(int version);

/// Operations by path, summed over ranks.
struct PathCounts {
  std::uint64_t steered = 0, total = 0;
  bool known = false;
};
/// "# errors: 0  # steered: all" and its variants; without `paths` only the errors.
std::string summaryLine(std::optional<std::uint64_t> errors, const PathCounts* paths);

nlohmann::ordered_json rowJson(const Row& row);
nlohmann::ordered_json reportJson(const RunHeader& header, const std::vector<Row>& rows);
/// Writes the file whole: under another name first, then renamed.
Status writeJson(const std::string& path, const nlohmann::ordered_json& report);

}  // namespace hoccl::bench
