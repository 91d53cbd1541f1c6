#pragma once

#include <cstddef>

namespace hoccl {

/// One edge of a state machine: taken when the subject is in `from` and `when` holds; `then` runs
/// before the state changes. Written as a table, so that the machine can be read and tested whole.
template <typename State, typename Subject>
struct Transition {
  State from;
  State to;
  bool (*when)(const Subject&);
  void (*then)(Subject&);
};

/// Takes the first edge that applies, again and again until none does. Returns whether any was taken.
/// Subject has a member `state`.
template <typename State, typename Subject, std::size_t N>
bool advance(const Transition<State, Subject> (&table)[N], Subject& subject) {
  bool moved = false;
  for (std::size_t i = 0; i < N;) {
    const Transition<State, Subject>& edge = table[i];
    if (subject.state != edge.from || !edge.when(subject)) {
      ++i;
      continue;
    }
    edge.then(subject);
    subject.state = edge.to;
    moved = true;
    i = 0;
  }
  return moved;
}

}  // namespace hoccl
