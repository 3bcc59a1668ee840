// The simulated accelerator: what its translation units share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <string>

namespace sim {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

// Addresses: a tensor's pointer lies in a region that nobody may touch; its bytes lie at a constant distance from it.
void* bytes_at(const void* address);
bool is_device_address(const void* address);
c10::Allocator* allocator();
void resize_bytes(c10::StorageImpl* storage, size_t num_bytes);

// Devices.
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
void refuse_after_fork();

// Pinned host memory.
bool is_pinned(const void* address);

// Streams: what was queued happens at the next wait of the host, or before the next kernel that needs it.
bool copies_are_late();
c10::Stream current_stream(c10::DeviceIndex index);
// Queue work for the stream; the device needs its result when `for_device`, the host otherwise.
void enqueue(c10::Stream stream, bool for_device, std::function<void()> work);
void before_kernel(c10::DeviceIndex index);  // what the stream's next kernel may read is there
void finish_stream(c10::Stream stream);      // the host has waited for the stream
void meet(c10::Stream one, c10::Stream other);  // each waits for the other
// The current stream's latest kernel or copy reads the memory, or writes to it: a race, unless it has waited for those
// of other streams.
void note_use(const void* address, bool writes, const std::string& what);
void note_use(const at::Tensor& tensor, bool writes, const std::string& what);
// The memory must not be given out again before the stream has come this far.
void record_stream(const void* address, c10::Stream stream);
// The pinned bytes must stay as they are until the host has waited for the stream.
void watch_pinned(c10::Stream stream, c10::Storage pinned, const void* address, size_t num_bytes);

// Waits of the host, by kind.
void note_wait(const char* kind, const std::string& what);

// Random numbers.
const at::Generator& default_generator(c10::DeviceIndex index);
at::Generator cpu_generator_of(const at::Generator& generator);
// While it lives, the CPU's default generator draws what the device's would.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(c10::DeviceIndex index);
  ~BorrowedGenerator();
  BorrowedGenerator(const BorrowedGenerator&) = delete;
  BorrowedGenerator& operator=(const BorrowedGenerator&) = delete;

 private:
  at::Generator device_, cpu_, kept_;
};

// A CPU tensor over the bytes of a tensor of the device, which must live as long.
at::Tensor cpu_alias(const at::Tensor& tensor);

// What `torch._has_compatible_shallow_copy_type` answers for two tensors of the device.
bool shares_on_assignment();

}  // namespace sim
