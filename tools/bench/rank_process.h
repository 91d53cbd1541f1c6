#pragma once

namespace hoccl::bench {

/// Descriptors the bench leaves open for a rank process.
inline constexpr int kRankChannelFd = 3;
inline constexpr int kRankPageFd = 4;

/// The life of a rank process: does what the bench asks over its channel until told to finish.
/// Returns the exit status. It is killed when the process `parent`, which started it, dies.
///
/// Messages are JSON objects, one a line. The bench sends {"do": "open" | "uniqueId" | "connect" |
/// "prepare" | "transfer" | "verify" | "launch" | "counts" | "copies" | "finish", …}; the rank
/// answers
/// {"ok": true, …} or {"error": text}, and before that any number of {"stage": text}.
int runRankProcess(int parent);

}  // namespace hoccl::bench
