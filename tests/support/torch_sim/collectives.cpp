// Collectives on the simulated accelerator: gloo's, on aliases of the device's memory, with what gloo lacks added.
#include "sim.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <memory>
#include <optional>

namespace sim {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Held = c10::intrusive_ptr<Work>;

// A collective on the device runs on a stream of its group; who needs it waits for it there. Until then its tensors stay.
class Running {
 public:
  Running(const c10::Stream& stream, Tensors kept) : kept_(std::move(kept)), done_(kSim), stream_(stream) {
    done_.record(stream);
  }
  // Nobody has waited: the memory stays until the stream is done.
  ~Running() {
    for (const auto& tensor : kept_) record_stream(tensor.storage().data(), stream_);
  }
  bool is_over() { return done_.query(); }
  void wait() {
    done_.block(current_stream(stream_.device_index()));
    kept_.clear();
  }

 private:
  Tensors kept_;
  c10::Event done_;
  c10::Stream stream_;
};

// The device is done; so is the future, for whoever goes on in it.
struct Done final : Work {
  Done(int rank, c10d::OpType kind, Tensors results, std::unique_ptr<Running> running)
      : Work(rank, kind), results_(std::move(results)), running_(std::move(running)) {
    std::vector<c10::Device> devices;
    if (!results_.empty() && results_[0].device().type() == kSim) devices.push_back(results_[0].device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future_->markCompleted(c10::IValue(results_));
    finish();
  }
  bool isCompleted() override { return !running_ || running_->is_over(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    if (running_) running_->wait();
  }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors results_;
  std::unique_ptr<Running> running_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message is on its way.
struct OnItsWay final : Work {
  OnItsWay(int rank, c10d::OpType kind, Held inner, std::unique_ptr<Running> running)
      : Work(rank, kind), inner_(std::move(inner)), running_(std::move(running)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (running_) running_->wait();
    return inner_->wait(timeout);
  }
  void synchronize() override { wait(kNoTimeout); }
  int sourceRank() const override { return inner_->sourceRank(); }

 private:
  Held inner_;
  std::unique_ptr<Running> running_;
};

class Collectives final : public Backend {
 public:
  explicit Collectives(c10::intrusive_ptr<Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  // Gloo's threads end first, and may need Python's lock to let go of what they hold.
  ~Collectives() override {
    if (!PyGILState_Check()) return;
    pybind11::gil_scoped_release released;
    inner_.reset();
  }
  const std::string getBackendName() const override { return "simccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { inner_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }

  Held broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    auto aliases = aliases_of(tensors, true);
    inner_->broadcast(aliases, options)->wait();
    return done(c10d::OpType::BROADCAST, tensors);
  }
  Held allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    for (auto& alias : aliases_of(tensors, true)) reduce_all(alias, options.reduceOp);
    return done(c10d::OpType::ALLREDUCE, tensors);
  }
  Held allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Held reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto aliases = aliases_of(tensors, true);
    auto asked = options;
    asked.reduceOp = summed(options.reduceOp);
    inner_->reduce(aliases, asked)->wait();
    if (options.reduceOp == c10d::ReduceOp::AVG && getRank() == options.rootRank)
      for (auto& alias : aliases) alias.div_(getSize());
    return done(c10d::OpType::REDUCE, tensors);
  }
  Held allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    auto into = aliases_of(outputs, true);
    auto from = aliases_of(inputs, false);
    for (size_t i = 0; i < into.size(); ++i)
      for (int rank = 0; rank < getSize(); ++rank) {  // their sizes may differ
        if (rank == getRank()) into[i][rank].copy_(from[i]);
        send_to_all(into[i][rank], rank);
      }
    return done(c10d::OpType::ALLGATHER, flat(outputs), inputs);
  }
  Held _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors aliases{alias_of(output, true), alias_of(input, false)};
    inner_->_allgather_base(aliases[0], aliases[1], options)->wait();
    return done(c10d::OpType::_ALLGATHER_BASE, {output}, {input});
  }
  Held allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return done(c10d::OpType::COALESCED, outputs, inputs);
  }
  Held gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto into = aliases_of(outputs, true);
    auto from = aliases_of(inputs, false);
    inner_->gather(into, from, options)->wait();
    return done(c10d::OpType::GATHER, flat(outputs), inputs);
  }
  Held scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto into = aliases_of(outputs, true);
    auto from = aliases_of(inputs, false);
    inner_->scatter(into, from, options)->wait();
    return done(c10d::OpType::SCATTER, outputs, flat(inputs));
  }
  Held reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto into = aliases_of(outputs, true);
    auto from = aliases_of(inputs, false);
    for (size_t i = 0; i < into.size(); ++i)
      for (int rank = 0; rank < getSize(); ++rank) {  // their sizes may differ
        auto part = from[i][rank].clone();
        reduce_all(part, options.reduceOp);
        if (rank == getRank()) into[i].copy_(part);
      }
    return done(c10d::OpType::REDUCE_SCATTER, outputs, flat(inputs));
  }
  Held _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors aliases{alias_of(output, true), alias_of(input, false)};
    auto all = aliases[1].clone(at::MemoryFormat::Contiguous).view({getSize(), -1});
    reduce_all(all, options.reduceOp);
    aliases[0].copy_(all[getRank()].view_as(aliases[0]));
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output}, {input});
  }
  Held reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
    return done(c10d::OpType::COALESCED, outputs, inputs);
  }
  Held alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    Tensors aliases{alias_of(output, true), alias_of(input, false)};
    inner_->alltoall_base(aliases[0], aliases[1], output_sizes, input_sizes, options)->wait();
    return done(c10d::OpType::ALLTOALL_BASE, {output}, {input});
  }
  Held alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto into = aliases_of(outputs, true);
    Tensors parts;
    std::vector<int64_t> input_sizes, output_sizes;
    int64_t total = 0;
    for (const auto& alias : aliases_of(inputs, false)) {
      parts.push_back(alias.reshape({-1}));
      input_sizes.push_back(alias.numel());
    }
    for (const auto& alias : into) {
      output_sizes.push_back(alias.numel());
      total += alias.numel();
    }
    auto from = at::cat(parts);
    auto all = at::empty({total}, from.options());
    inner_->alltoall_base(all, from, output_sizes, input_sizes, options)->wait();
    int64_t at = 0;
    for (auto& alias : into) {
      alias.copy_(all.narrow(0, at, alias.numel()).view_as(alias));
      at += alias.numel();
    }
    return done(c10d::OpType::ALLTOALL, outputs, inputs);
  }
  Held send(Tensors& tensors, int to, int tag) override {
    auto aliases = aliases_of(tensors, false);
    return on_its_way(c10d::OpType::SEND, inner_->send(aliases, to, tag), tensors);
  }
  Held recv(Tensors& tensors, int from, int tag) override {
    auto aliases = aliases_of(tensors, true);
    return on_its_way(c10d::OpType::RECV, inner_->recv(aliases, from, tag), tensors);
  }
  Held recvAnysource(Tensors& tensors, int tag) override {
    auto aliases = aliases_of(tensors, true);
    return on_its_way(c10d::OpType::RECVANYSOURCE, inner_->recvAnysource(aliases, tag), tensors);
  }
  Held barrier(const c10d::BarrierOptions& options) override {
    auto asked = options;
    asked.device_ids.clear();
    asked.device.reset();
    inner_->barrier(asked)->wait();
    finish_stream(current_stream(current_device()));
    return done(c10d::OpType::BARRIER, {});
  }

 private:
  static c10d::ReduceOp summed(const c10d::ReduceOp& op) {
    return op == c10d::ReduceOp::AVG ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }
  void reduce_all(Tensor& tensor, const c10d::ReduceOp& op) {
    Tensors tensors{tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = summed(op);
    inner_->allreduce(tensors, options)->wait();
    if (op == c10d::ReduceOp::AVG) tensor.div_(getSize());
  }
  void send_to_all(Tensor& tensor, int rank) {
    Tensors tensors{tensor};
    c10d::BroadcastOptions options;
    options.rootRank = rank;
    inner_->broadcast(tensors, options)->wait();
  }
  c10::Stream stream_of(c10::Device device) {
    auto known = streams_.find(device.index());
    if (known != streams_.end()) return known->second;
    c10::impl::VirtualGuardImpl guard(kSim);
    return streams_.emplace(device.index(), guard.getNewStream(device)).first->second;
  }
  // For the collective that is about to run, after what the current stream has done.
  Tensor alias_of(const Tensor& tensor, bool is_written) {
    if (tensor.device().type() != kSim) return tensor;
    auto index = tensor.device().index();
    before_kernel(index);
    c10::Event ready(kSim);
    ready.record(current_stream(index));
    c10::StreamGuard guard(stream_of(tensor.device()));
    ready.block(current_stream(index));
    before_kernel(index);
    note_use(tensor, is_written, "a collective");
    return cpu_alias(tensor);
  }
  Tensors aliases_of(const Tensors& tensors, bool are_written) {
    Tensors aliases;
    for (const auto& tensor : tensors) aliases.push_back(alias_of(tensor, are_written));
    return aliases;
  }
  std::vector<Tensors> aliases_of(const std::vector<Tensors>& lists, bool are_written) {
    std::vector<Tensors> aliases;
    for (const auto& tensors : lists) aliases.push_back(aliases_of(tensors, are_written));
    return aliases;
  }
  std::unique_ptr<Running> running(const Tensors& tensors) {
    for (const auto& tensor : tensors)
      if (tensor.device().type() == kSim) return std::make_unique<Running>(stream_of(tensor.device()), tensors);
    return nullptr;
  }
  Held on_its_way(c10d::OpType kind, Held inner, const Tensors& tensors) {
    return c10::make_intrusive<OnItsWay>(getRank(), kind, std::move(inner), running(tensors));
  }
  Held done(c10d::OpType kind, Tensors results, const Tensors& others = {}) {
    auto all = results;
    all.insert(all.end(), others.begin(), others.end());
    std::optional<c10::StreamGuard> guard;
    if (!results.empty() && results[0].device().type() == kSim) guard.emplace(stream_of(results[0].device()));
    return c10::make_intrusive<Done>(getRank(), kind, std::move(results), running(all));
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
    return all;
  }

  c10::intrusive_ptr<Backend> inner_;
  std::map<c10::DeviceIndex, c10::Stream> streams_;
};

}  // namespace

void bind_collectives(pybind11::module_& m) {
  m.def("collectives", [](const c10::intrusive_ptr<Backend>& inner) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<Collectives>(inner);
  }, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace sim
