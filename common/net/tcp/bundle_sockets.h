#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/base/fd.h"
#include "common/net/tcp/bundle.h"

namespace hoccl {

/// The connected sockets of a bundle.
struct BundleSockets {
  UniqueFd control, life;
  std::vector<UniqueFd> data;
};

/// A bundle over them; its workers run.
Status makeBundle(BundleSockets sockets, const BundleOptions& options, std::string peerText,
                  FrameSink* dataSink, std::unique_ptr<Bundle>* out);

/// Options of every socket of a bundle (no delay), or of the life socket, which finds out that the
/// peer's host is gone within `timeoutMs`.
Status tuneSocket(int fd);
Status tuneLifeSocket(int fd, std::uint64_t timeoutMs);

}  // namespace hoccl
