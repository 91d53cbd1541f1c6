#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/base/status.h"
#include "common/net/verbs/gid_choice.h"
#include "common/net/verbs/verbs_library.h"
#include "common/net/verbs/verbs_settings.h"

namespace hoccl {

/// What a queue pair has to know of a port, this side's or the peer's.
struct PortAddress {
  ibv_gid gid{};
  std::uint16_t lid = 0;
  std::uint8_t linkLayer = IBV_LINK_LAYER_ETHERNET;
  std::uint8_t mtu = IBV_MTU_1024;  ///< enum ibv_mtu, active on the port
};

/// A port of a device that can be used: the opened device with a protection domain of its own.
/// Shared by the transport and its connections; released with the last of them.
class Nic {
 public:
  ~Nic();
  Nic(const Nic&) = delete;
  Nic& operator=(const Nic&) = delete;

  [[nodiscard]] const VerbsLibrary& library() const { return *library_; }
  [[nodiscard]] ibv_context* context() const { return context_; }
  [[nodiscard]] ibv_pd* pd() const { return pd_; }
  [[nodiscard]] const std::string& device() const { return device_; }
  [[nodiscard]] std::uint8_t port() const { return port_; }
  [[nodiscard]] const PortAddress& address() const { return address_; }
  [[nodiscard]] std::uint8_t gidIndex() const { return gidIndex_; }
  [[nodiscard]] std::uint32_t mostSendRequests() const { return mostRequests_; }
  [[nodiscard]] std::uint32_t mostCompletions() const { return mostCompletions_; }
  /// Of the port, as its width and speed say; 0 where they say nothing.
  [[nodiscard]] std::uint32_t speedMbps() const { return speedMbps_; }
  /// The same for all ports of an adapter and for no other (sys_image_guid); 0 where it has none.
  [[nodiscard]] std::uint64_t guid() const { return guid_; }
  /// Its folder in sysfs, links resolved; empty for a device without hardware (rxe).
  [[nodiscard]] const std::string& pciPath() const { return pciPath_; }
  /// "mlx5_0:1 (GID 10.0.0.1)".
  [[nodiscard]] std::string text() const;

 private:
  friend class NicOpener;
  Nic() = default;
  const VerbsLibrary* library_ = nullptr;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  std::string device_;
  std::uint8_t port_ = 1, gidIndex_ = 0;
  PortAddress address_;
  std::uint32_t mostRequests_ = 0, mostCompletions_ = 0;
  std::uint32_t speedMbps_ = 0;
  std::uint64_t guid_ = 0;
  std::string pciPath_;
};

/// Megabits a second of a port with that width and speed, in the encodings of PortInfo (InfiniBand
/// Architecture Specification, volume 1: LinkWidthActive, LinkSpeedActive and its extensions); 0:
/// unknown.
std::uint32_t portSpeedMbps(std::uint8_t width, std::uint8_t speed);

using Nics = std::vector<std::shared_ptr<const Nic>>;

/// A transport's most rails; of more devices the first in the order of their names are used.
inline constexpr std::size_t kMostRails = 8;

/// The ports the settings allow and that are active, in the order of their devices' names. None:
/// one line that says whether there are devices at all, which there are, or what is wrong with
/// each.
Status openNics(const VerbsLibrary& library, const VerbsSettings& settings, Nics* out);

/// "10.0.0.1" or "LID 5" of an InfiniBand port.
std::string addressText(const PortAddress& address);

}  // namespace hoccl
