// Memory, devices, streams, events, generators and waits of the simulated accelerator.
#include "sim.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

namespace sim {
namespace {

constexpr size_t kRegion = size_t(1) << 36;  // addresses of each device; memory is taken only where it is written
constexpr size_t kRounding = 512;
constexpr int kMaxDevices = 8;
constexpr size_t kMaxWatched = 64;  // older copies are taken to have happened
constexpr size_t kMaxStreams = 32;  // of the pool, where a GPU begins again with the first

int num_devices = 2;
std::atomic<size_t> memory_limit{size_t(8) << 30};
std::atomic<bool> late_copies{true};
std::atomic<bool> assignment_shares{true};
std::atomic<bool> in_use{false};
std::atomic<bool> is_forked{false};
std::recursive_mutex mutex;
using Lock = std::lock_guard<std::recursive_mutex>;

thread_local c10::DeviceIndex device_of_thread = 0;

void check_index(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < num_devices, "sim error: invalid device ordinal ", int(index), " of ", num_devices);
}

// ---- order -------------------------------------------------------------------------------------------------------

// The number of each stream's kernel or copy up to which all have happened before what comes next.
class Clock {
 public:
  uint64_t of(size_t stream) const { return stream < numbers_.size() ? numbers_[stream] : 0; }
  void reach(size_t stream, uint64_t number) {
    if (numbers_.size() <= stream) numbers_.resize(stream + 1);
    numbers_[stream] = std::max(numbers_[stream], number);
  }
  bool covers(const Clock& other) const {
    for (size_t stream = 0; stream < other.numbers_.size(); ++stream)
      if (other.numbers_[stream] > of(stream)) return false;
    return true;
  }
  void join(const Clock& other) {
    for (size_t stream = 0; stream < other.numbers_.size(); ++stream) reach(stream, other.numbers_[stream]);
  }

 private:
  std::vector<uint64_t> numbers_;
};

struct Pending {
  uint64_t number;
  bool for_device;
  std::function<void()> work;
};
struct Watched {
  c10::Storage pinned;
  const void* address;
  std::vector<char> bytes;
};
// What a kernel or a copy did with a block of memory.
struct Use {
  size_t stream;
  uint64_t number;
  std::string what;
  const char* did;
};
// Memory that was freed while other streams than its own still used it.
struct Debt {
  size_t size;
  std::vector<Use> uses;
};

size_t num_streams = 0;
struct Queue {
  std::deque<Pending> pending;
  std::deque<Watched> watched;
  std::deque<std::shared_ptr<Debt>> debts;  // of the blocks that the stream may be given again
  const size_t stream = num_streams++;      // its place in a clock
  uint64_t last = 0;                        // the number of the latest kernel or copy
  Clock clock;                              // of the latest kernel or copy
};
using StreamKey = std::pair<c10::DeviceIndex, c10::StreamId>;
std::map<StreamKey, Queue> queues;
std::array<c10::StreamId, kMaxDevices> last_stream{}, last_of_pool{};
thread_local std::array<c10::StreamId, kMaxDevices> stream_of_thread{};
std::atomic<int64_t> num_pending{0};
Clock host;  // what the host knows to have happened: one for all threads, as what they tell each other is not seen

StreamKey key_of(c10::Stream stream) { return {stream.device_index(), stream.id()}; }

bool is_over(const Use& use, const Clock& clock) {
  return use.number <= std::max(clock.of(use.stream), host.of(use.stream));
}
bool is_over(const Debt& debt, const Clock& clock) {
  return std::all_of(debt.uses.begin(), debt.uses.end(), [&](auto& use) { return is_over(use, clock); });
}

// ---- memory ------------------------------------------------------------------------------------------------------

using c10::CachingDeviceAllocator::DeviceStats;

struct Block {
  size_t size, requested;
  StreamKey home;                              // the stream that it was allocated on
  Use written;                                 // the last time, or the allocation
  std::vector<Use> read;                       // since then, the last time on each stream
  std::vector<std::shared_ptr<Debt>> debts;    // of its former owners, until it is first used
  std::set<StreamKey> recorded;                // record_stream
};
// A block that was freed and waits for the streams that were recorded.
struct Freed {
  size_t offset;
  Clock until;
};

struct Arena {
  char* address = nullptr;  // the protected half; the bytes follow at kRegion
  std::map<size_t, size_t> free_blocks;
  std::map<size_t, Block> used_blocks;  // by their offsets
  std::deque<Freed> freed_blocks;       // those of them that wait
  DeviceStats stats;
  size_t allocated = 0, reserved = 0;
  size_t num_allocations = 0;
};
std::array<Arena, kMaxDevices> arenas;

void make_arena(Arena& arena) {
  constexpr int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* start = mmap(nullptr, 2 * kRegion, PROT_NONE, flags, -1, 0);
  TORCH_CHECK(start != MAP_FAILED, "sim error: no address space for a device");
  arena.address = static_cast<char*>(start);
  TORCH_CHECK(mprotect(arena.address + kRegion, kRegion, PROT_READ | PROT_WRITE) == 0, "sim error: mprotect");
  arena.free_blocks[0] = kRegion;
}

int arena_of(const void* address) {
  auto* at = static_cast<const char*>(address);
  for (int index = 0; index < num_devices; ++index)
    if (arenas[index].address && at >= arenas[index].address && at < arenas[index].address + kRegion) return index;
  return -1;
}

constexpr size_t kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

void release(void* address);
void record_use(const void* address, c10::Stream stream);
void give_back(Arena& arena, size_t max_waiting);

struct SimAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    refuse_after_fork();
    in_use = true;
    auto index = device_of_thread;
    c10::Device device(kSim, index);
    if (num_bytes == 0) return {nullptr, nullptr, &release, device};
    Lock lock(mutex);
    auto& arena = arenas[index];
    if (!arena.address) make_arena(arena);
    size_t size = (num_bytes + kRounding - 1) / kRounding * kRounding;
    give_back(arena, arena.allocated + size > memory_limit ? 0 : kMaxWatched);
    if (arena.allocated + size > memory_limit) {
      ++arena.stats.num_ooms;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "SIM out of memory. Tried to allocate ", num_bytes, " bytes. Device ", int(index),
          " has a total capacity of ", memory_limit.load(), " bytes, of which ", memory_limit - std::min(memory_limit.load(), arena.allocated),
          " bytes are free.");
    }
    auto block = arena.free_blocks.begin();
    while (block->second < size) ++block;
    auto [offset, room] = *block;
    arena.free_blocks.erase(block);
    if (room > size) arena.free_blocks[offset + size] = room - size;
    auto home = key_of(current_stream(index));
    auto& queue = queues[home];
    Block made{size, num_bytes, home, {queue.stream, queue.last, "", "was allocated"}, {}, {}, {}};
    for (auto debt = queue.debts.begin(); debt != queue.debts.end();) {
      const bool has_passed = is_over(**debt, queue.clock);
      if (!has_passed && size <= (*debt)->size) made.debts.push_back(*debt);
      debt = has_passed ? queue.debts.erase(debt) : std::next(debt);
    }
    arena.used_blocks[offset] = std::move(made);
    std::memset(arena.address + kRegion + offset, 0xFF, size);
    arena.allocated += size;
    ++arena.num_allocations;
    arena.stats.allocation[kAll].increase(1);
    arena.stats.active[kAll].increase(1);
    arena.stats.allocated_bytes[kAll].increase(size);
    arena.stats.active_bytes[kAll].increase(size);
    arena.stats.requested_bytes[kAll].increase(num_bytes);
    if (arena.allocated > arena.reserved) {
      arena.stats.reserved_bytes[kAll].increase(arena.allocated - arena.reserved);
      arena.reserved = arena.allocated;
    }
    void* address = arena.address + offset;
    return {address, address, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t count) const override {
    std::memcpy(bytes_at(to), bytes_at(from), count);
  }
  bool initialized() override { return in_use; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(mutex);
    for (auto& arena : arenas) {
      arena.stats.reserved_bytes[kAll].decrease(arena.reserved - arena.allocated);
      arena.reserved = arena.allocated;
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override { record_use(data.get(), stream); }
  DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    check_index(index);
    Lock lock(mutex);
    return arenas[index].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override { each(index, [](auto& s) { s.reset_accumulated(); }); }
  void resetPeakStats(c10::DeviceIndex index) override { each(index, [](auto& s) { s.reset_peak(); }); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    check_index(index);
    Lock lock(mutex);
    size_t limit = memory_limit;
    return {limit - std::min(limit, arenas[index].allocated), limit};
  }

 private:
  template <typename Change>
  void each(c10::DeviceIndex index, Change change) {
    check_index(index);
    Lock lock(mutex);
    auto& stats = arenas[index].stats;
    for (auto* all : {&stats.allocation, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                      &stats.active_bytes, &stats.requested_bytes})
      change((*all)[kAll]);
  }
};
SimAllocator the_allocator;

void give_back(Arena& arena, size_t offset, size_t size) {
  std::memset(arena.address + kRegion + offset, 0xFF, size);
  arena.used_blocks.erase(offset);
  arena.allocated -= size;
  arena.stats.active[kAll].decrease(1);
  arena.stats.active_bytes[kAll].decrease(size);
  auto after = arena.free_blocks.lower_bound(offset);
  if (after != arena.free_blocks.end() && after->first == offset + size) {
    size += after->second;
    after = arena.free_blocks.erase(after);
  }
  if (after != arena.free_blocks.begin()) {
    auto before = std::prev(after);
    if (before->first + before->second == offset) {
      before->second += size;
      return;
    }
  }
  arena.free_blocks[offset] = size;
}

// Give back what the host knows to be free, and the oldest of more than `max_waiting`.
void give_back(Arena& arena, size_t max_waiting) {
  auto& waiting = arena.freed_blocks;
  for (auto freed = waiting.begin(); freed != waiting.end();) {
    if (waiting.size() <= max_waiting && !host.covers(freed->until)) {
      ++freed;
      continue;
    }
    give_back(arena, freed->offset, arena.used_blocks.at(freed->offset).size);
    freed = waiting.erase(freed);
  }
}

// As in CUDA's allocator, memory goes back to the stream that it was allocated on at once, unless others are recorded.
void release(void* address) {
  if (!address || is_forked) return;
  Lock lock(mutex);
  int index = arena_of(address);
  if (index < 0) return;
  auto& arena = arenas[index];
  size_t offset = static_cast<char*>(address) - arena.address;
  auto& block = arena.used_blocks.at(offset);
  arena.stats.allocation[kAll].decrease(1);
  arena.stats.allocated_bytes[kAll].decrease(block.size);
  arena.stats.requested_bytes[kAll].decrease(block.requested);
  Clock until;
  for (auto& key : block.recorded) until.reach(queues[key].stream, queues[key].last);
  auto& home = queues[block.home];
  auto debt = std::make_shared<Debt>(Debt{block.size, {}});
  block.read.push_back(std::move(block.written));
  for (auto& use : block.read)
    if (use.number > until.of(use.stream) && !is_over(use, home.clock)) debt->uses.push_back(std::move(use));
  if (!debt->uses.empty()) home.debts.push_back(std::move(debt));
  if (block.recorded.empty())
    give_back(arena, offset, block.size);
  else
    arena.freed_blocks.push_back({offset, std::move(until)});
}

Block* block_of(const void* address) {
  int index = arena_of(address);
  if (index < 0) return nullptr;
  auto& blocks = arenas[index].used_blocks;
  auto after = blocks.upper_bound(static_cast<const char*>(address) - arenas[index].address);
  return after == blocks.begin() ? nullptr : &std::prev(after)->second;
}

void record_use(const void* address, c10::Stream stream) {
  Lock lock(mutex);
  auto* block = block_of(address);
  if (block && block->home != key_of(stream)) block->recorded.insert(key_of(stream));
}

// ---- pinned memory -----------------------------------------------------------------------------------------------

std::map<const char*, size_t> pinned_blocks;

void release_pinned(void* address) {
  if (!is_forked) {
    Lock lock(mutex);
    pinned_blocks.erase(static_cast<char*>(address));
  }
  std::free(address);
}

struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t num_bytes) override {
    if (num_bytes == 0) return {nullptr, nullptr, &release_pinned, c10::kCPU};
    refuse_after_fork();
    void* address = nullptr;
    TORCH_CHECK(posix_memalign(&address, 64, num_bytes) == 0, "sim error: no pinned memory");
    std::memset(address, 0xFF, num_bytes);
    Lock lock(mutex);
    pinned_blocks[static_cast<char*>(address)] = num_bytes;
    return {address, address, &release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator the_pinned_allocator;

// ---- waits and races ---------------------------------------------------------------------------------------------

std::atomic<PyObject*> wait_listener{nullptr}, race_listener{nullptr};
std::atomic<int64_t> num_races{0};

// Never with `mutex` held: another thread may hold Python's lock and want it.
void tell(std::atomic<PyObject*>& to, const char* kind, const std::string& what) {
  if (!to) return;
  pybind11::gil_scoped_acquire gil;
  auto listener = pybind11::reinterpret_borrow<pybind11::object>(to.load());
  if (listener) listener(kind, what);
}

void set_listener(std::atomic<PyObject*>& to, pybind11::object listener) {
  auto* fresh = listener.is_none() ? nullptr : listener.release().ptr();
  Py_XDECREF(to.exchange(fresh));
}

void note_race(const char* kind, const std::string& what) {
  ++num_races;
  tell(race_listener, kind, what);
}

// ---- streams and events ------------------------------------------------------------------------------------------

constexpr uint64_t kEverything = ~uint64_t(0);

void run_pending(StreamKey key, uint64_t up_to, bool only_for_device) {
  if (num_pending == 0) return;
  std::vector<std::function<void()>> due;
  {
    Lock lock(mutex);
    auto& queue = queues[key].pending;
    for (auto item = queue.begin(); item != queue.end() && item->number <= up_to;) {
      if (only_for_device && !item->for_device) {
        ++item;
        continue;
      }
      due.push_back(std::move(item->work));
      item = queue.erase(item);
      --num_pending;
    }
  }
  for (auto& work : due) work();
}

// Count pinned buffers that have changed since a copy was queued that may still read them.
void note_changed(StreamKey key) {
  int num_changed = 0;
  {
    Lock lock(mutex);
    auto& all = queues[key].watched;
    for (auto watched = all.begin(); watched != all.end();) {
      const bool is_held = watched->pinned.use_count() > 1;
      const bool is_same = std::memcmp(watched->address, watched->bytes.data(), watched->bytes.size()) == 0;
      num_changed += is_held && !is_same;
      watched = is_held && is_same ? std::next(watched) : all.erase(watched);
    }
  }
  constexpr auto what = "changed before its copy to the device was known to be complete";
  while (num_changed-- > 0) note_race("pinned buffer", what);
}

void check_watched(StreamKey key) {
  note_changed(key);
  Lock lock(mutex);
  queues[key].watched.clear();
}

void wait_for(StreamKey key, uint64_t up_to) {
  {
    Lock lock(mutex);
    auto& queue = queues[key];
    host.reach(queue.stream, std::min(up_to, queue.last));
    if (up_to == kEverything) host.join(queue.clock);
  }
  run_pending(key, up_to, false);
  if (up_to == kEverything) check_watched(key);
}

struct Event {
  StreamKey stream{0, 0};
  uint64_t number = 0;
  Clock clock;
  bool recorded = false, asked = false;
  std::chrono::steady_clock::time_point time;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kSim, device_of_thread}; }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices); }
  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.has_index() ? device.index() : device_of_thread);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, with_index(device)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    device = with_index(device);
    Lock lock(mutex);
    auto next = last_of_pool[device.index()]++ % kMaxStreams;
    return c10::Stream(c10::Stream::UNSAFE, device, -1 - static_cast<c10::StreamId>(next));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    device = with_index(device);
    Lock lock(mutex);
    return c10::Stream(c10::Stream::UNSAFE, device, ++last_stream[device.index()]);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = current_stream(stream.device_index());
    stream_of_thread[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id() + 1); }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(mutex);
    auto& queue = queues[key_of(stream)];
    return host.of(queue.stream) == queue.last;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait("explicit", "stream");
    wait_for(key_of(stream), kEverything);
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    note_wait("explicit", "device");
    std::vector<StreamKey> keys;
    {
      Lock lock(mutex);
      for (auto& [key, queue] : queues)
        if (key.first == index) keys.push_back(key);
    }
    for (auto key : keys) wait_for(key, kEverything);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (!*event) *event = new Event;
    Lock lock(mutex);
    auto key = key_of(stream);
    auto& queue = queues[key];
    *static_cast<Event*>(*event) = {key, queue.last, queue.clock, true, false, std::chrono::steady_clock::now()};
  }
  void block(void* pointer, const c10::Stream& stream) const override {
    auto* event = static_cast<Event*>(pointer);
    if (!event || !event->recorded || event->stream == key_of(stream)) return;
    {
      Lock lock(mutex);
      queues[key_of(stream)].clock.join(event->clock);
    }
    run_pending(event->stream, event->number, true);
    if (num_pending > 0) enqueue(stream, false, [event = *event] { wait_for(event.stream, event.number); });
  }
  bool queryEvent(void* pointer) const override {
    auto* event = static_cast<Event*>(pointer);
    if (!event || !event->recorded) return true;
    if (is_done(*event)) return true;
    if (!event->asked) {
      event->asked = true;  // not yet; the device is done when asked again
      return false;
    }
    wait_for_event(*event);
    return true;
  }
  void synchronizeEvent(void* pointer) const override {
    auto* event = static_cast<Event*>(pointer);
    if (!event || !event->recorded) return;
    if (!is_done(*event)) note_wait("event", "event");
    wait_for_event(*event);
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    auto *a = static_cast<Event*>(first), *b = static_cast<Event*>(second);
    return std::chrono::duration<double, std::milli>(b->time - a->time).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), stream);
  }

 private:
  static c10::Device with_index(c10::Device device) {
    return device.has_index() ? device : c10::Device(kSim, device_of_thread);
  }
  static bool is_done(const Event& event) {
    Lock lock(mutex);
    return event.number <= host.of(queues[event.stream].stream);
  }
  static void wait_for_event(const Event& event) {
    {
      Lock lock(mutex);
      host.join(event.clock);
    }
    wait_for(event.stream, event.number);
  }
};

// ---- generators --------------------------------------------------------------------------------------------------

struct SimGenerator final : c10::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex index, at::Generator inner = at::detail::createCPUGenerator())
      : c10::GeneratorImpl({kSim, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { inner.set_offset(offset); }
  uint64_t get_offset() const override { return inner.get_offset(); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  SimGenerator* clone_impl() const override { return new SimGenerator(device().index(), inner.clone()); }
  at::Generator inner;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  void init() const override {}
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<SimGenerator>(index < 0 ? device_of_thread : index);
  }
  c10::Device getDeviceFromPtr(void* address) const override {
    return {kSim, static_cast<c10::DeviceIndex>(arena_of(address))};
  }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &the_pinned_allocator; }
  bool hasPrimaryContext(c10::DeviceIndex index) const override { return arenas[index].address != nullptr; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_current_device(index); }
  c10::DeviceIndex getCurrentDevice() const override { return device_of_thread; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = device_of_thread;
    set_current_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return index < 0 ? device_of_thread : exchangeDevice(index);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

int64_t count_races() {
  std::vector<StreamKey> keys;
  {
    Lock lock(mutex);
    for (auto& [key, queue] : queues) keys.push_back(key);
  }
  for (auto key : keys) note_changed(key);
  return num_races;
}

}  // namespace

// ---- what the other translation units call -----------------------------------------------------------------------

void* bytes_at(const void* address) {
  return address ? const_cast<char*>(static_cast<const char*>(address)) + kRegion : nullptr;
}
bool is_device_address(const void* address) { return arena_of(address) >= 0; }
c10::Allocator* allocator() { return &the_allocator; }
bool copies_are_late() { return late_copies; }
bool shares_on_assignment() { return assignment_shares; }
c10::DeviceIndex current_device() { return device_of_thread; }

void set_current_device(c10::DeviceIndex index) {
  if (index < 0) return;
  check_index(index);
  device_of_thread = index;
}

void refuse_after_fork() {
  TORCH_CHECK(
      !is_forked,
      "Cannot re-initialize SIM in forked subprocess. To use SIM with multiprocessing, you must use the 'spawn' start "
      "method");
}

void resize_bytes(c10::StorageImpl* storage, size_t num_bytes) {
  c10::DeviceGuard guard(storage->device());
  auto fresh = the_allocator.allocate(num_bytes);
  size_t kept = std::min(num_bytes, storage->nbytes());
  if (kept) {
    note_use(storage->data_ptr().get(), false, "resize_");
    note_use(fresh.get(), true, "resize_");
    std::memcpy(bytes_at(fresh.get()), bytes_at(storage->data_ptr().get()), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(num_bytes);
}

bool is_pinned(const void* address) {
  Lock lock(mutex);
  auto* at = static_cast<const char*>(address);
  auto after = pinned_blocks.upper_bound(at);
  if (after == pinned_blocks.begin()) return false;
  auto block = std::prev(after);
  return at < block->first + block->second;
}

c10::Stream current_stream(c10::DeviceIndex index) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, index), stream_of_thread[index]);
}

void enqueue(c10::Stream stream, bool for_device, std::function<void()> work) {
  Lock lock(mutex);
  auto& queue = queues[key_of(stream)];
  queue.pending.push_back({++queue.last, for_device, std::move(work)});
  queue.clock.reach(queue.stream, queue.last);
  ++num_pending;
}

void before_kernel(c10::DeviceIndex index) {
  auto key = key_of(current_stream(index));
  {
    Lock lock(mutex);
    auto& queue = queues[key];
    queue.clock.reach(queue.stream, ++queue.last);
    queue.clock.join(host);
  }
  run_pending(key, kEverything, true);
}

void meet(c10::Stream one, c10::Stream other) {
  Lock lock(mutex);
  auto &first = queues[key_of(one)].clock, &second = queues[key_of(other)].clock;
  first.join(second);
  second.join(first);
}

void note_use(const void* address, bool writes, const std::string& what) {
  std::vector<std::pair<const char*, std::string>> races;
  {
    Lock lock(mutex);
    auto* block = block_of(address);
    if (!block) return;
    auto& queue = queues[key_of(current_stream(block->home.first))];
    auto check = [&](const Use& earlier, const char* kind, const char* when) {
      if (is_over(earlier, queue.clock)) return;
      queue.clock.reach(earlier.stream, earlier.number);  // a wait that is missing counts once
      auto which = what + (writes ? " writes to" : " reads") + " memory that " + earlier.what + earlier.did;
      races.emplace_back(kind, which + " on another stream" + when);
    };
    for (auto& debt : block->debts)
      for (auto& use : debt->uses) check(use, "freed without record_stream", " before it was freed");
    block->debts.clear();
    check(block->written, writes ? "overwritten too early" : "read too early", "");
    Use use{queue.stream, queue.last, what, writes ? " wrote" : " read"};
    if (writes) {
      for (auto& earlier : block->read) check(earlier, "overwritten too early", "");
      block->read.clear();
      block->written = std::move(use);
    } else {
      auto same = std::find_if(block->read.begin(), block->read.end(), [&](auto& one) { return one.stream == use.stream; });
      if (same == block->read.end())
        block->read.push_back(std::move(use));
      else
        *same = std::move(use);
    }
  }
  for (auto& [kind, which] : races) note_race(kind, which);
}

void record_stream(const void* address, c10::Stream stream) { record_use(address, stream); }
void finish_stream(c10::Stream stream) { wait_for(key_of(stream), kEverything); }

void watch_pinned(c10::Stream stream, c10::Storage pinned, const void* address, size_t num_bytes) {
  Lock lock(mutex);
  auto& watched = queues[key_of(stream)].watched;
  while (!watched.empty() && (watched.size() >= kMaxWatched || watched.front().pinned.use_count() == 1))
    watched.pop_front();
  auto* bytes = static_cast<const char*>(address);
  watched.push_back({std::move(pinned), address, {bytes, bytes + num_bytes}});
}

void note_wait(const char* kind, const std::string& what) { tell(wait_listener, kind, what); }

const at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> generators = [] {
    std::vector<at::Generator> all;
    for (int each = 0; each < kMaxDevices; ++each)
      all.push_back(at::make_generator<SimGenerator>(static_cast<c10::DeviceIndex>(each)));
    return all;
  }();
  if (index < 0) index = device_of_thread;
  check_index(index);
  return generators[index];
}

at::Generator cpu_generator_of(const at::Generator& generator) {
  return static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

namespace {
void copy_state(at::CPUGeneratorImpl* to, at::CPUGeneratorImpl* from) {
  to->set_engine(from->engine());
  to->set_next_float_normal_sample(from->next_float_normal_sample());
  to->set_next_double_normal_sample(from->next_double_normal_sample());
}
at::CPUGeneratorImpl* cpu(const at::Generator& generator) {
  return static_cast<at::CPUGeneratorImpl*>(generator.unsafeGetGeneratorImpl());
}
std::recursive_mutex borrowing;
}  // namespace

BorrowedGenerator::BorrowedGenerator(c10::DeviceIndex index)
    : device_(cpu_generator_of(default_generator(index))), cpu_(at::detail::getDefaultCPUGenerator()) {
  borrowing.lock();
  kept_ = cpu_.clone();
  copy_state(cpu(cpu_), cpu(device_));
}
BorrowedGenerator::~BorrowedGenerator() {
  copy_state(cpu(device_), cpu(cpu_));
  copy_state(cpu(cpu_), cpu(kept_));
  borrowing.unlock();
}

namespace {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(kSim, &the_allocator)
struct Registered {
  Registered() {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::setHostAllocator(kSim, &the_pinned_allocator);
    pthread_atfork(nullptr, nullptr, [] { is_forked = in_use.load(); });
  }
} registered;
}  // namespace

void bind_collectives(pybind11::module_& m);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_collectives(m);
  m.def("set_device_count", [](int count) {
    TORCH_CHECK(count >= 1 && count <= kMaxDevices, "The number of devices must be 1 to ", kMaxDevices, ".");
    num_devices = count;
  });
  m.def("device_count", [] { return num_devices; });
  m.def("set_memory_limit", [](size_t num_bytes) { memory_limit = num_bytes; });
  m.def("memory_limit", [] { return memory_limit.load(); });
  m.def("set_late_copies", [](bool is_late) { late_copies = is_late; });
  m.def("late_copies", [] { return late_copies.load(); });
  m.def("set_assignment_shares", [](bool shares) { assignment_shares = shares; });
  m.def("set_wait_listener", [](pybind11::object listener) { set_listener(wait_listener, std::move(listener)); });
  m.def("set_race_listener", [](pybind11::object listener) { set_listener(race_listener, std::move(listener)); });
  m.def("num_races", &count_races);
  m.def("forget_races", [] {
    count_races();
    return num_races.exchange(0);
  });
  m.def("num_allocations", [](int index) { return arenas.at(index).num_allocations; });
  m.def("is_forked", [] { return is_forked.load(); });
  m.def("generator", [](int index) {
    auto* made = THPGenerator_initDefaultGenerator(default_generator(static_cast<c10::DeviceIndex>(index)));
    return pybind11::reinterpret_steal<pybind11::object>(made);
  });
}

}  // namespace sim
