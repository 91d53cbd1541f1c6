#pragma once

#include <memory>

#include "common/gpu/driver.h"

namespace hoccl {

/// Makes a GPU look at what its streams wait for.
///
/// A stream that waits for a value in memory looks at it again only every 9 us, unless something
/// else is submitted to its engine meanwhile, by whatever process. So whoever has written a value
/// rings: a memory operation that nobody needs, on the engine of the kernels, where streams wait.
/// docs/facts.md, "When a waiting stream looks again".
class Doorbell {
 public:
  virtual ~Doorbell() = default;
  /// Does nothing (`rang` false) while the last ring is under way. Where kernels run that is until
  /// the end of a time slice, but beside them streams look again at once anyway.
  virtual Status ring(bool* rang) = 0;
};

/// On a stream of its own in the current context, which never copies and so stays on the engine of
/// the kernels.
Status makeStreamDoorbell(const Driver* driver, std::unique_ptr<Doorbell>* out);

}  // namespace hoccl
