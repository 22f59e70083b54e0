// Lets PyTorch's autograd engine run backward passes of tensors on device "cuda" on a machine without a GPU.
//
// The tensors are FakeTensors: they have a device but no memory, so nothing is ever launched. The engine still asks two
// parts of PyTorch about the device: the device guard (current device and stream) and the CUDA hooks (is CUDA available).
// Without a GPU the guard is missing or fails, and the hooks return false. begin_fake_cuda() replaces both, end_fake_cuda()
// restores them.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

namespace {

// One device with one stream. Every switch is a no-op.
struct FakeGuard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device device) const override { return device; }
  c10::Device getDevice() const override { return c10::Device(c10::DeviceType::CUDA, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
};

struct FakeHooks final : public at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool isBuilt() const { return true; }      // virtual in PyTorch's class, but not yet in version 2.6
  bool isAvailable() const { return true; }  // likewise
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};

// PyTorch creates its hooks object once and offers no way to replace it. FakeHooks has no data members, so the object
// becomes a FakeHooks when its pointer to the table of virtual functions is exchanged.
static_assert(sizeof(FakeHooks) == sizeof(at::CUDAHooksInterface));

FakeGuard fake_guard;
FakeHooks fake_hooks;
const c10::impl::DeviceGuardImplInterface* previous_guard = nullptr;
void* previous_table = nullptr;

auto& guard_of_cuda() {
  return c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)];
}

void* hooks_of_cuda() {
  return const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
}

}  // namespace

extern "C" void begin_fake_cuda() {
  previous_guard = guard_of_cuda().exchange(&fake_guard);
  std::memcpy(&previous_table, hooks_of_cuda(), sizeof(void*));
  std::memcpy(hooks_of_cuda(), static_cast<void*>(&fake_hooks), sizeof(void*));
}

extern "C" void end_fake_cuda() {
  guard_of_cuda().store(previous_guard);
  std::memcpy(hooks_of_cuda(), &previous_table, sizeof(void*));
}
