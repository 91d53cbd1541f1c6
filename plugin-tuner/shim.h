#ifndef HOCCL_PLUGIN_TUNER_SHIM_H_
#define HOCCL_PLUGIN_TUNER_SHIM_H_

/* What the files of the preloaded library share. */

#include <stdatomic.h>

#include "plugin-tuner/core_api.h"

#define EXPORT __attribute__((visibility("default")))

/* The core's table; null until the process has made a communicator. */
extern _Atomic(const struct HocclCoreApi*) hocclLoadedCore;

#endif
