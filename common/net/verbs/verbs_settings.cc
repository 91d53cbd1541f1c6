#include "common/net/verbs/verbs_settings.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>

namespace hoccl {
namespace {

/// A variable's text and its name, HOCCL's ahead of NCCL's; no text where neither is set.
struct Named {
  std::optional<std::string> text;
  std::string variable;
};

Named pick(const std::string& own, const char* ownName, const char* ncclName) {
  if (!own.empty()) return {own, ownName};
  const char* nccl = std::getenv(ncclName);
  if (nccl && *nccl) return {std::string(nccl), ncclName};
  return {std::nullopt, ncclName};
}

std::optional<std::int64_t> parseNumber(std::string_view text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

/// -1, and the smallest integer in NCCL's own configuration, say "not set".
bool saysUnset(std::int64_t value) {
  return value == -1 || value == std::numeric_limits<std::int32_t>::min();
}

template <typename Number>
Status number(const Named& named, const char* what, std::int64_t lowest, std::int64_t highest,
              Number* out) {
  if (!named.text) return {};
  const std::optional<std::int64_t> value = parseNumber(*named.text);
  if (value && saysUnset(*value)) return {};
  if (!value || *value < lowest || *value > highest) {
    return Status::error(Code::InvalidConfig,
                         fmt::format("{}='{}' is no {}; allowed: {} to {}, or -1 for the default",
                                     named.variable, *named.text, what, lowest, highest));
  }
  *out = static_cast<Number>(*value);
  return {};
}

/// 0: off, 1: on, 2: auto, as NCCL writes them.
Status choice(const Named& named, const char* what, VerbsSettings::Choice* out) {
  int value = 2;
  if (Status status = number(named, what, 0, 2, &value); !status) return status;
  *out = value == 0   ? VerbsSettings::Choice::Off
         : value == 1 ? VerbsSettings::Choice::On
                      : VerbsSettings::Choice::Auto;
  return {};
}

}  // namespace

Status VerbsSettings::fromEnvironment(const Config& config, VerbsSettings* out) {
  VerbsSettings s;
  s.lastChanceMs = config.timeoutMs;
  if (const Named hca = pick(config.ibHca, "HOCCL_IB_HCA", "NCCL_IB_HCA"); hca.text) {
    s.hcaList = *hca.text;
    s.hcaVariable = hca.variable;
  }
  if (const Named gid = pick(config.ibGidIndex, "HOCCL_IB_GID_INDEX", "NCCL_IB_GID_INDEX");
      gid.text && !(parseNumber(*gid.text) && saysUnset(*parseNumber(*gid.text)))) {
    s.gidIndex = *gid.text;
    s.gidVariable = gid.variable;
  }
  if (config.qpsPerPeer != 0) {
    s.qpsPerPeer = static_cast<unsigned>(config.qpsPerPeer);
  } else if (Status status = number(pick("", "", "NCCL_IB_QPS_PER_CONNECTION"),
                                    "number of queue pairs", 1, kMostQps, &s.qpsPerPeer);
             !status) {
    return status;
  }
  struct Small {
    const std::string* own;
    const char *ownName, *ncclName, *what;
    std::int64_t lowest, highest;
    std::uint8_t* out;
    bool* said = nullptr;
  };
  const Small smalls[] = {
      {&config.ibTc, "HOCCL_IB_TC", "NCCL_IB_TC", "traffic class", 0, 255, &s.trafficClass,
       &s.trafficClassSaid},
      {&config.ibSl, "HOCCL_IB_SL", "NCCL_IB_SL", "service level", 0, 15, &s.serviceLevel,
       &s.serviceLevelSaid},
      {&config.ibTimeout, "HOCCL_IB_TIMEOUT", "NCCL_IB_TIMEOUT", "timeout exponent", 1, 31,
       &s.timeout},
      {&config.ibRetryCnt, "HOCCL_IB_RETRY_CNT", "NCCL_IB_RETRY_CNT", "retry count", 0, 7,
       &s.retryCount},
  };
  for (const Small& each : smalls) {
    const Named named = pick(*each.own, each.ownName, each.ncclName);
    const bool said =
        named.text && !(parseNumber(*named.text) && saysUnset(*parseNumber(*named.text)));
    if (each.said != nullptr) *each.said = said;
    if (Status status = number(named, each.what, each.lowest, each.highest, each.out); !status)
      return status;
  }
  if (Status status = number(pick(config.ibPkey, "HOCCL_IB_PKEY", "NCCL_IB_PKEY"),
                             "index of a partition key", 0, 65535, &s.pkeyIndex);
      !status) {
    return status;
  }
  if (Status status = number(pick("", "", "NCCL_IB_AR_THRESHOLD"), "number of bytes", 0,
                             std::int64_t{1} << 40, &s.adaptiveThreshold);
      !status) {
    return status;
  }
  if (Status status = choice(
          pick(config.ibAdaptiveRouting, "HOCCL_IB_ADAPTIVE_ROUTING", "NCCL_IB_ADAPTIVE_ROUTING"),
          "choice (0 off, 1 on, 2 automatic)", &s.adaptiveRouting);
      !status) {
    return status;
  }
  if (Status status = choice(pick(config.ibRelaxedOrdering, "HOCCL_IB_PCI_RELAXED_ORDERING",
                                  "NCCL_IB_PCI_RELAXED_ORDERING"),
                             "choice (0 off, 1 on, 2 automatic)", &s.relaxedOrdering);
      !status) {
    return status;
  }
  *out = std::move(s);
  return {};
}

Status VerbsSettings::takeTrafficClass(int value, bool infiniBand) {
  if (saysUnset(value)) return {};
  const bool asLevel = infiniBand && !serviceLevelSaid;
  const int highest = asLevel ? 15 : 255;
  if (value < 0 || value > highest) {
    return Status::error(
        Code::InvalidConfig,
        fmt::format(
            "ncclConfig.trafficClass={} is no {}; allowed: 0 to {}, or -1 for the default "
            "(HOCCL_IB_TC and HOCCL_IB_SL, else NCCL_IB_TC and NCCL_IB_SL, are ahead of it)",
            value, asLevel ? "service level (the NICs are InfiniBand's)" : "traffic class",
            highest));
  }
  if (!trafficClassSaid) trafficClass = static_cast<std::uint8_t>(value);
  if (asLevel) serviceLevel = static_cast<std::uint8_t>(value);
  return {};
}

}  // namespace hoccl
