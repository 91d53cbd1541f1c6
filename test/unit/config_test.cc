#include "common/base/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <string>
#include <vector>

namespace hoccl {
namespace {

// Each test sees an environment without HOCCL_* but what it sets.
class ConfigTest : public ::testing::Test {
 protected:
  void SetUp() override { clear(); }
  void TearDown() override { clear(); }

  static void clear() {
    std::vector<std::string> names;
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const char* equals = std::strchr(*entry, '=');
      if (std::strncmp(*entry, "HOCCL_", 6) == 0 && equals != nullptr) {
        names.emplace_back(*entry, static_cast<std::size_t>(equals - *entry));
      }
    }
    for (const std::string& name : names) ::unsetenv(name.c_str());
  }

  // The error of `variable=value`, and that it left the configuration alone.
  static std::string problemOf(const char* variable, const char* value) {
    Config config = Config::defaults();
    const std::string before = config.get(variable);
    const Status status = config.set(variable, value);
    EXPECT_FALSE(status) << variable << "=" << value;
    EXPECT_EQ(status.code(), Code::InvalidConfig);
    EXPECT_EQ(config.get(variable), before);
    return status.message();
  }
};

#define EXPECT_CONTAINS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST_F(ConfigTest, TableIsSoundAndItsDefaultsAreAccepted) {
  std::set<std::string> names;
  for (const ConfigRow& row : configRows()) {
    EXPECT_TRUE(names.insert(row.variable).second) << row.variable << " twice";
    EXPECT_EQ(std::strncmp(row.variable, "HOCCL_", 6), 0) << row.variable;
    EXPECT_GT(std::strlen(row.help), 10u) << row.variable;
    Config config;
    const Status status = config.set(row.variable, row.defaultText);
    EXPECT_TRUE(status) << status.message();
    EXPECT_EQ(config.get(row.variable), row.defaultText) << "not the normal form";
    EXPECT_EQ(Config::defaults().get(row.variable), row.defaultText);
  }
  EXPECT_EQ(Config::defaults().minBytes, 64u << 10);
  EXPECT_EQ(Config::defaults().logLevel, "warn");
}

TEST_F(ConfigTest, EnvironmentOverlaysDefaults) {
  ::setenv("HOCCL_MIN_BYTES", "1.5MiB", 1);
  ::setenv("HOCCL_LOG", "debug", 1);
  ::setenv("HOCCL_MOVER_PATH", "/opt/hoccl-mover", 1);
  Config config;
  const Status status = Config::fromEnvironment(&config);
  ASSERT_TRUE(status) << status.message();
  EXPECT_EQ(config.minBytes, 1572864u);
  EXPECT_EQ(config.get("HOCCL_MIN_BYTES"), "1536KiB");
  EXPECT_EQ(config.logLevel, "debug");
  EXPECT_EQ(config.mover, "/opt/hoccl-mover");
  EXPECT_EQ(config.slots, Config::defaults().slots);
}

TEST_F(ConfigTest, UnknownVariableNamesTheNearest) {
  ::setenv("HOCCL_MIN_BYTE", "1M", 1);
  Config config = Config::defaults();
  config.slots = 3;
  const Status status = Config::fromEnvironment(&config);
  ASSERT_FALSE(status);
  EXPECT_EQ(status.code(), Code::InvalidConfig);
  EXPECT_CONTAINS(status.message(), "HOCCL_MIN_BYTE='1M'");
  EXPECT_CONTAINS(status.message(), "HOCCL_MIN_BYTES ");
  EXPECT_EQ(config.slots, 3u) << "a bad environment must change nothing";
}

TEST_F(ConfigTest, EveryOffenderIsNamed) {
  ::setenv("HOCCL_SLOTS", "0", 1);
  ::setenv("HOCCL_STEER", "yes", 1);
  ::setenv("HOCCL_NO_SUCH", "", 1);
  ::setenv("HOCCL_SPIN_US", "7", 1);
  Config config;
  EXPECT_EQ(Config::problemsOfEnvironment(&config).size(), 3u);
  const Status status = Config::fromEnvironment(&config);
  ASSERT_FALSE(status);
  for (const char* name : {"HOCCL_SLOTS='0'", "HOCCL_STEER='yes'", "HOCCL_NO_SUCH=''"}) {
    EXPECT_CONTAINS(status.message(), name);
  }
  EXPECT_EQ(status.message().find("HOCCL_SPIN_US='7'"), std::string::npos);
  EXPECT_EQ(status.message().find('\n'), std::string::npos) << "one line for the log";
}

TEST_F(ConfigTest, OutOfRangeSaysWhatIsAllowed) {
  EXPECT_CONTAINS(problemOf("HOCCL_SLOTS", "65"), "1 to 64");
  EXPECT_CONTAINS(problemOf("HOCCL_MIN_BYTES", "65535"), "64KiB to 1TiB");
  EXPECT_CONTAINS(problemOf("HOCCL_MIN_BYTES", "1025G"), "out of range");
  EXPECT_CONTAINS(problemOf("HOCCL_STEER", "2"), "0 or 1");
  EXPECT_CONTAINS(problemOf("HOCCL_LOG", "loud"), "error|warn|info|debug|off");
  Config config = Config::defaults();
  EXPECT_TRUE(config.set("HOCCL_SLOTS", "64"));
  EXPECT_TRUE(config.set("HOCCL_SLOTS", "1"));
  EXPECT_TRUE(config.set("HOCCL_MIN_BYTES", "1T"));
}

TEST_F(ConfigTest, MalformedNumbersAreRefused) {
  for (const char* value : {"8x", "8 ", " 8", "+8", "-1", "0x8", "8.0", "eight", "8,0", "1e3"}) {
    EXPECT_CONTAINS(problemOf("HOCCL_SLOTS", value), "not a whole number");
  }
  EXPECT_CONTAINS(problemOf("HOCCL_SLOTS", "18446744073709551616"), "64 bits");
  EXPECT_CONTAINS(problemOf("HOCCL_SLOTS", "99999999999999999999999999"), "64 bits");
}

TEST_F(ConfigTest, EmptyIsRefusedForNumbersAndChoicesOnly) {
  EXPECT_CONTAINS(problemOf("HOCCL_SLOTS", ""), "empty");
  EXPECT_CONTAINS(problemOf("HOCCL_SLOT_BYTES", ""), "empty");
  EXPECT_CONTAINS(problemOf("HOCCL_LOG", ""), "empty");
  Config config = Config::defaults();
  EXPECT_TRUE(config.set("HOCCL_LOG_FILE", ""));
}

TEST_F(ConfigTest, ChoiceMustMatchAsAWhole) {
  for (const char* value : {"war", "warn|info", "WARN", "|", "off "}) {
    EXPECT_CONTAINS(problemOf("HOCCL_LOG", value), "choices");
  }
  Config config = Config::defaults();
  for (const char* value : {"error", "off"}) EXPECT_TRUE(config.set("HOCCL_LOG", value));
}

TEST_F(ConfigTest, DigestDependsOnPolicyOnly) {
  Config one = Config::defaults();
  Config other = Config::defaults();
  EXPECT_EQ(one.policyDigest(), other.policyDigest());
  ASSERT_TRUE(other.set("HOCCL_STATS", "1"));
  ASSERT_TRUE(other.set("HOCCL_MOVER_PATH", "/elsewhere"));
  EXPECT_EQ(one.policyDigest(), other.policyDigest());
  for (const ConfigRow& row : configRows()) {
    if (!row.policy) continue;
    Config changed = Config::defaults();
    // A policy row of each kind has another value in its range.
    const std::string value = std::to_string(
        changed.get(row.variable) == std::to_string(row.lowest) ? row.highest : row.lowest);
    std::string text =
        changed.get(row.variable) == formatBytes(row.lowest) ? std::to_string(row.highest) : value;
    if (row.kind == ConfigKind::Choice) {
      const std::string choices(row.choices);  // the default is not the last one
      text = choices.substr(choices.rfind('|') + 1);
    }
    ASSERT_TRUE(changed.set(row.variable, text)) << row.variable;
    EXPECT_NE(changed.policyDigest(), one.policyDigest()) << row.variable;
    EXPECT_CONTAINS(changed.policyText(), std::string(row.variable) + "=");
  }
  EXPECT_CONTAINS(one.policyText(), "HOCCL_MIN_BYTES=65536");
  EXPECT_EQ(one.policyText().find("HOCCL_STATS"), std::string::npos);
}

TEST(ParseBytesTest, TakesNumbersWithAndWithoutUnits) {
  const std::pair<const char*, std::uint64_t> cases[] = {
      {"0", 0},
      {"4096", 4096},
      {"4096B", 4096},
      {"64KiB", 64u << 10},
      {"64kib", 64u << 10},
      {"64k", 64u << 10},
      {"1.5MiB", 1572864},
      {"2G", 2ull << 30},
      {"0.25GiB", 1ull << 28},
      {"1T", 1ull << 40},
      {"1.50000K", 1536},
      {"18446744073709551615", 18446744073709551615ull},
  };
  for (const auto& [text, bytes] : cases) {
    std::uint64_t got = 1;
    const Status status = parseBytes(text, &got);
    EXPECT_TRUE(status) << text << " " << status.message();
    EXPECT_EQ(got, bytes) << text;
  }
}

TEST(ParseBytesTest, RefusesTheRest) {
  for (const char* text : {"",
                           "K",
                           "KiB",
                           ".5K",
                           "5.K",
                           "1.2.3K",
                           "64KB",
                           "64 KiB",
                           "64KiB ",
                           "-1",
                           "+1",
                           "1e6",
                           "64Ki",
                           "0x10",
                           "1.5",
                           "1.3KiB",
                           "0.000001T",
                           "1.0000000000000000001K",
                           "18446744073709551616",
                           "16777216T",
                           "9999999999999999999999G",
                           "\xff",
                           "64K64K"}) {
    std::uint64_t got = 77;
    const Status status = parseBytes(text, &got);
    EXPECT_FALSE(status) << text;
    EXPECT_EQ(got, 77u) << text;
    EXPECT_FALSE(status.message().empty());
  }
}

TEST(FormatBytesTest, IsExactAndParsesBack) {
  EXPECT_EQ(formatBytes(0), "0");
  EXPECT_EQ(formatBytes(65536), "64KiB");
  EXPECT_EQ(formatBytes(65537), "65537");
  EXPECT_EQ(formatBytes(8u << 20), "8MiB");
  EXPECT_EQ(formatBytes(1ull << 40), "1TiB");
  for (std::uint64_t bytes : {1ull, 1024ull, 1536ull, 1ull << 30, (1ull << 40) + 1, ~0ull}) {
    std::uint64_t back = 0;
    ASSERT_TRUE(parseBytes(formatBytes(bytes), &back));
    EXPECT_EQ(back, bytes);
  }
}

}  // namespace
}  // namespace hoccl
