#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/fd.h"
#include "common/net/transport.h"

namespace hoccl {

/// Several transports as one. An address to connect to says which: "shm:…", "tcp:…" (`prefixed`).
class TransportSet final : public Transport {
 public:
  static Status create(std::unique_ptr<TransportSet>* out);
  Status add(std::unique_ptr<Transport> transport);

  static std::string prefixed(std::string_view transport, std::string_view address);
  /// Where that transport listens; empty if the set has none of that name.
  [[nodiscard]] std::string addressOf(std::string_view transport) const;

  [[nodiscard]] const char* name() const override { return "set"; }
  /// Of the first transport, prefixed.
  [[nodiscard]] const std::string& address() const override { return address_; }
  [[nodiscard]] int listenFd() const override { return epoll_.get(); }
  [[nodiscard]] std::unique_ptr<Handshake> accept() override;
  [[nodiscard]] Status connect(const PeerId& peer, const std::string& address,
                               std::unique_ptr<Handshake>* out) override;

 private:
  UniqueFd epoll_;
  std::string address_;
  std::vector<std::unique_ptr<Transport>> transports_;
};

}  // namespace hoccl
