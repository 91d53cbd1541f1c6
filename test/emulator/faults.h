#pragma once

namespace hoccl::emu {

/// Sleeps a random time up to EMUCUDA_DELAY_US: calls whose moment another process or thread might
/// wrongly rely on begin with it.
void delayCall();
/// EMUCUDA_REFUSE_IPC_OPEN says that this import fails.
bool refuseImport();

}  // namespace hoccl::emu
