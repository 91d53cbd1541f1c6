// Whether fmt.cc has all that this {fmt} needs: some of each thing that the project formats.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstdio>
#include <iterator>
#include <string>
#include <vector>

int main(int arguments, char** values) {
  const std::vector<std::string> words(values, values + arguments);
  const double number = arguments / 3.0;
  std::string text =
      fmt::format("{:>8} {:#018x} {:.2f} {} {} {:<5} {}", words[0], 1234567ull << arguments, number,
                  number, static_cast<float>(number), arguments > 1, fmt::join(words, ", "));
  text += fmt::format(fmt::runtime("{:>12.3g} {}"), number, fmt::ptr(values));
  fmt::memory_buffer line;
  fmt::format_to(std::back_inserter(line), "{} {:c} {:+d}", text, 'x', -arguments);
  fmt::print(stderr, "{}\n", fmt::to_string(line));
  return 0;
}
