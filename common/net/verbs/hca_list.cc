#include "common/net/verbs/hca_list.h"

#include <charconv>

namespace hoccl {
namespace {

bool takePrefix(std::string_view* text, char c) {
  if (text->empty() || text->front() != c) return false;
  text->remove_prefix(1);
  return true;
}

bool names(std::string_view entry, bool exact, std::string_view device, unsigned port) {
  const std::size_t colon = entry.find(':');
  const std::string_view name = entry.substr(0, colon);
  if (name.empty() || (exact ? device != name : device.substr(0, name.size()) != name))
    return false;
  if (colon == std::string_view::npos) return true;
  const std::string_view text = entry.substr(colon + 1);
  unsigned wanted = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), wanted);
  return error == std::errc() && end == text.data() + text.size() && wanted == port;
}

}  // namespace

bool hcaAllowed(std::string_view list, std::string_view device, unsigned port) {
  if (list.empty()) return true;
  const bool exclude = takePrefix(&list, '^');
  const bool exact = takePrefix(&list, '=');
  bool named = false;
  while (!list.empty() && !named) {
    const std::size_t comma = list.find(',');
    named = names(list.substr(0, comma), exact, device, port);
    if (comma == std::string_view::npos) break;
    list.remove_prefix(comma + 1);
  }
  return named != exclude;
}

}  // namespace hoccl
