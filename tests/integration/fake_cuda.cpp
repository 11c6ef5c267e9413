// Two answers that torch asks of a CUDA build or driver, for fake_cuda.py. Compiled twice:
//   -DPRELOAD  loaded before torch: autograd needs no streams on any device.
//   else       loaded after it: device "cuda" is number 0, and switching to it does nothing.
#ifdef PRELOAD
#include <c10/core/DeviceType.h>
namespace at::accelerator {
__attribute__((visibility("default"))) bool isAccelerator(c10::DeviceType) { return false; }
}  // namespace at::accelerator
#else
#include <c10/core/impl/DeviceGuardImplInterface.h>
struct Guard final : public c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
#endif
