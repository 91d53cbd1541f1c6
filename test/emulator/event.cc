#include <cuda.h>

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "test/emulator/capture.h"
#include "test/emulator/context.h"
#include "test/emulator/engine.h"
#include "test/emulator/hoccl_emu.h"

namespace hoccl::emu {
namespace {

struct Event {
  unsigned flags = 0;
  // Below: guarded by the scheduler's lock.
  std::shared_ptr<EventRecord> record;  ///< the last recording; null: never recorded
  std::shared_ptr<Capture> captured;    ///< recorded inside this capture
};
using EventPtr = std::shared_ptr<Event>;

std::shared_mutex gMutex;
// Never destroyed: other threads may still use events while the process ends.
auto& table() {
  static auto* events = new std::unordered_map<CUevent, EventPtr>;
  return *events;
}

EventPtr eventFrom(CUevent handle) {
  std::shared_lock lock(gMutex);
  auto found = table().find(handle);
  return found == table().end() ? nullptr : found->second;
}

/// What an event's query or synchronisation looks at; an error for an event inside a capture.
CUresult currentRecord(CUevent handle, std::shared_ptr<EventRecord>* out) {
  const EventPtr event = eventFrom(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (const CUresult allowed = checkUnsafeCall(); allowed != CUDA_SUCCESS) return allowed;
  std::lock_guard lock(Scheduler::get().lock());
  if (event->captured != nullptr && !event->captured->ended) return CUDA_ERROR_CAPTURED_EVENT;
  *out = event->record;
  return CUDA_SUCCESS;
}

}  // namespace
}  // namespace hoccl::emu

using namespace hoccl::emu;

extern "C" {

CUresult cuEventCreate(CUevent* out, unsigned int flags) {
  return contextCall([&](Context&) -> CUresult {
    constexpr unsigned kKnown = CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING;
    if ((flags & CU_EVENT_INTERPROCESS) != 0) return CUDA_ERROR_NOT_SUPPORTED;
    if (out == nullptr || (flags & ~kKnown) != 0) return CUDA_ERROR_INVALID_VALUE;
    auto event = std::make_shared<Event>();
    event->flags = flags;
    *out = reinterpret_cast<CUevent>(event.get());
    std::unique_lock lock(gMutex);
    table().emplace(*out, std::move(event));
    return CUDA_SUCCESS;
  });
}

size_t hocclEmuEvents(void) {
  std::shared_lock lock(gMutex);
  return table().size();
}

CUresult cuEventDestroy_v2(CUevent handle) {
  return driverCall([&]() -> CUresult {
    std::unique_lock lock(gMutex);
    return table().erase(handle) != 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
  });
}

CUresult cuEventRecord(CUevent handle, CUstream streamHandle) {
  return streamCall(streamHandle, [&](Context&, const StreamPtr& stream) -> CUresult {
    const EventPtr event = eventFrom(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    {
      std::lock_guard lock(Scheduler::get().lock());
      if (stream->capture != nullptr) {
        if (stream->capture->invalidated) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        event->captured = stream->capture;
        return CUDA_SUCCESS;
      }
    }
    std::vector<Op> ops(1);
    ops[0].kind = OpKind::RecordEvent;
    ops[0].record = std::make_shared<EventRecord>();
    auto record = ops[0].record;
    if (const CUresult result = Scheduler::get().submit(stream, std::move(ops));
        result != CUDA_SUCCESS)
      return result;
    std::lock_guard lock(Scheduler::get().lock());
    event->record = std::move(record);
    event->captured = nullptr;
    return CUDA_SUCCESS;
  });
}

CUresult cuEventRecordWithFlags(CUevent event, CUstream stream, unsigned int flags) {
  return flags > CU_EVENT_RECORD_EXTERNAL ? CUDA_ERROR_INVALID_VALUE : cuEventRecord(event, stream);
}

CUresult cuStreamWaitEvent(CUstream streamHandle, CUevent handle, unsigned int flags) {
  return streamCall(streamHandle, [&](Context&, const StreamPtr& stream) -> CUresult {
    if (flags > CU_EVENT_WAIT_EXTERNAL) return CUDA_ERROR_INVALID_VALUE;
    const EventPtr event = eventFrom(handle);
    if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    std::vector<Op> ops(1);
    {
      std::lock_guard lock(Scheduler::get().lock());
      if (event->captured != nullptr && !event->captured->ended) {
        if (stream->capture == nullptr) joinCapture(event->captured, stream);
        return stream->capture == event->captured ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_MERGE;
      }
      if (stream->capture != nullptr) return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
      if (event->record == nullptr) return CUDA_SUCCESS;
      ops[0].record = event->record;
    }
    ops[0].kind = OpKind::WaitEvent;
    return Scheduler::get().submit(stream, std::move(ops));
  });
}

CUresult cuEventQuery(CUevent handle) {
  return driverCall([&]() -> CUresult {
    std::shared_ptr<EventRecord> record;
    if (const CUresult result = currentRecord(handle, &record); result != CUDA_SUCCESS)
      return result;
    return record == nullptr || Scheduler::get().recordDone(*record) ? CUDA_SUCCESS
                                                                     : CUDA_ERROR_NOT_READY;
  });
}

CUresult cuEventSynchronize(CUevent handle) {
  return driverCall([&]() -> CUresult {
    std::shared_ptr<EventRecord> record;
    if (const CUresult result = currentRecord(handle, &record); result != CUDA_SUCCESS)
      return result;
    if (record != nullptr) Scheduler::get().wait(record);
    return CUDA_SUCCESS;
  });
}

/// Model milliseconds between two recordings.
CUresult cuEventElapsedTime_v2(float* milliseconds, CUevent start, CUevent end) {
  return driverCall([&]() -> CUresult {
    if (milliseconds == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const EventPtr events[2] = {eventFrom(start), eventFrom(end)};
    std::int64_t at[2] = {};
    std::lock_guard lock(Scheduler::get().lock());
    for (int i = 0; i < 2; ++i) {
      if (events[i] == nullptr || events[i]->record == nullptr ||
          (events[i]->flags & CU_EVENT_DISABLE_TIMING) != 0)
        return CUDA_ERROR_INVALID_HANDLE;
      if (!events[i]->record->done) return CUDA_ERROR_NOT_READY;
      at[i] = events[i]->record->at;
    }
    *milliseconds =
        static_cast<float>(static_cast<double>(at[1] - at[0]) / settings().dilation / 1e6);
    return CUDA_SUCCESS;
  });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) {
  return cuEventElapsedTime_v2(milliseconds, start, end);
}

}  // extern "C"
