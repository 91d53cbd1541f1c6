#pragma once

/// The emulated driver's own entry points, beside the driver API of cuda.h. Tests and the
/// benchmark's stand-ins look them up with dlsym in the loaded libcuda.so.1; a real driver does not
/// have them. Every duration named model is in the emulated GPU's nanoseconds: real time divided by
/// the dilation.

#include <cuda.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/// What was submitted to one device. Captured operations never run and are not counted.
struct HocclEmuCounters {
  uint64_t kernels;        ///< hocclEmuLaunchKernel and hocclEmuLaunchBody
  uint64_t sameDeviceD2D;  ///< copies within one device: kernels on the real driver
  uint64_t largeMemsets;   ///< memsets over 64 KiB: kernels on the real driver
  uint64_t smOps;          ///< the sum of the three above: everything that needs an SM
  uint64_t copiesH2D;      ///< host to device
  uint64_t copiesD2H;      ///< device to host
  uint64_t copiesP2P;  ///< device to another device, counted at the device whose stream it is on
  uint64_t bytesH2D;
  uint64_t bytesD2H;
  uint64_t bytesP2P;
  uint64_t memOps;         ///< stream write values and wait values, one each in a batch
  uint64_t h2dUnder32KiB;  ///< of copiesH2D: those of a size that HOCCL must not use
  uint64_t
      lateNanoseconds;  ///< model time by which moving bytes on this CPU outlasted the modelled
                        ///< copy; if it is not small beside the run, raise EMUCUDA_DILATION
  uint64_t
      inlinedH2D;  ///< of copiesH2D: those of up to 24 KiB, which go through the compute channel
  uint64_t freedWhileMapped;  ///< allocations freed while another process had them mapped
};
typedef struct HocclEmuCounters HocclEmuCounters;

/// This process's counters of a device (ordinal). CUDA_ERROR_INVALID_DEVICE for an unknown one.
CUresult hocclEmuGetCounters(CUdevice device, HocclEmuCounters* out);
/// The same, summed over all processes of this EMUCUDA_SESSION, ended ones included; so a test sees
/// what a mover process did. Without a session: this process's counters.
CUresult hocclEmuGetSessionCounters(CUdevice device, HocclEmuCounters* out);
/// A kernel that holds `sms` SMs (1 to 132) of the stream's device for the model time.
CUresult hocclEmuLaunchKernel(CUstream stream, uint64_t modelNanoseconds, int sms);
/// The same, and `body(argument)` runs on the emulator's thread when the kernel starts: the
/// kernel's effect on memory. It must not call the driver; hocclEmuHostView gives it the bytes of
/// device memory.
CUresult hocclEmuLaunchBody(CUstream stream, uint64_t modelNanoseconds, int sms,
                            void (*body)(void*), void* argument);
/// A kernel that holds `sms` SMs until the 64-bit word at `flag` (pinned, or the device's own
/// memory) is
/// >= `value`: an occupied GPU, or the one-warp wait kernel.
CUresult hocclEmuLaunchWaitKernel(CUstream stream, CUdeviceptr flag, uint64_t value, int sms);
/// Where the CPU can reach the bytes of a device or pinned pointer (a device pointer itself faults
/// when the CPU touches it, as on a GPU machine); valid until the memory is freed. NULL if unknown.
void* hocclEmuHostView(CUdeviceptr pointer);
/// Events of this process that have been created and not destroyed.
size_t hocclEmuEvents(void);
/// Real nanoseconds per model nanosecond.
double hocclEmuDilation(void);
/// Model nanoseconds since an arbitrary start, the same for all processes with the same dilation.
uint64_t hocclEmuNow(void);

/// What each stream of this process that holds work has at its head and why it does not begin, for
/// a person who looks at a hang: at most `capacity` bytes with the end of the text; returns its
/// length.
size_t hocclEmuDescribePending(char* out, size_t capacity);

#ifdef __cplusplus
}
#endif
