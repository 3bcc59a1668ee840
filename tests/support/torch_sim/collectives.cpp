// Collectives on the simulated accelerator: gloo's, on aliases of the device's memory, with what gloo lacks added.
#include "sim.h"

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace sim {
namespace {

using at::Tensor;
using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<Tensor>;
using Held = c10::intrusive_ptr<Work>;

Tensors aliases_of(const Tensors& tensors) {
  Tensors aliases;
  for (const auto& tensor : tensors) {
    if (tensor.device().type() == kSim) before_kernel(tensor.device().index());
    aliases.push_back(tensor.device().type() == kSim ? cpu_alias(tensor) : tensor);
  }
  return aliases;
}

std::vector<Tensors> aliases_of(const std::vector<Tensors>& lists) {
  std::vector<Tensors> aliases;
  for (const auto& tensors : lists) aliases.push_back(aliases_of(tensors));
  return aliases;
}

// The device is done; so is the future, for whoever goes on in it.
struct Done final : Work {
  Done(int rank, c10d::OpType kind, Tensors results) : Work(rank, kind), results_(std::move(results)) {
    std::vector<c10::Device> devices;
    if (!results_.empty() && results_[0].device().type() == kSim) devices.push_back(results_[0].device());
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    future_->markCompleted(c10::IValue(results_));
    finish();
  }
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  Tensors results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A message is on its way; its memory stays.
struct OnItsWay final : Work {
  OnItsWay(int rank, c10d::OpType kind, Held inner, Tensors kept)
      : Work(rank, kind), inner_(std::move(inner)), kept_(std::move(kept)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override { return inner_->wait(timeout); }
  void synchronize() override { inner_->wait(); }
  int sourceRank() const override { return inner_->sourceRank(); }

 private:
  Held inner_;
  Tensors kept_;
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
    auto aliases = aliases_of(tensors);
    inner_->broadcast(aliases, options)->wait();
    return done(c10d::OpType::BROADCAST, tensors);
  }
  Held allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    for (auto& alias : aliases_of(tensors)) reduce_all(alias, options.reduceOp);
    return done(c10d::OpType::ALLREDUCE, tensors);
  }
  Held allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }
  Held reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto aliases = aliases_of(tensors);
    auto asked = options;
    asked.reduceOp = summed(options.reduceOp);
    inner_->reduce(aliases, asked)->wait();
    if (options.reduceOp == c10d::ReduceOp::AVG && getRank() == options.rootRank)
      for (auto& alias : aliases) alias.div_(getSize());
    return done(c10d::OpType::REDUCE, tensors);
  }
  Held allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    auto into = aliases_of(outputs);
    auto from = aliases_of(inputs);
    for (size_t i = 0; i < into.size(); ++i)
      for (int rank = 0; rank < getSize(); ++rank) {  // their sizes may differ
        if (rank == getRank()) into[i][rank].copy_(from[i]);
        send_to_all(into[i][rank], rank);
      }
    return done(c10d::OpType::ALLGATHER, flat(outputs));
  }
  Held _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto aliases = aliases_of({output, input});
    inner_->_allgather_base(aliases[0], aliases[1], options)->wait();
    return done(c10d::OpType::_ALLGATHER_BASE, {output});
  }
  Held allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return done(c10d::OpType::COALESCED, outputs);
  }
  Held gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    auto into = aliases_of(outputs);
    auto from = aliases_of(inputs);
    inner_->gather(into, from, options)->wait();
    return done(c10d::OpType::GATHER, flat(outputs));
  }
  Held scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    auto into = aliases_of(outputs);
    auto from = aliases_of(inputs);
    inner_->scatter(into, from, options)->wait();
    return done(c10d::OpType::SCATTER, outputs);
  }
  Held reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto into = aliases_of(outputs);
    auto from = aliases_of(inputs);
    for (size_t i = 0; i < into.size(); ++i)
      for (int rank = 0; rank < getSize(); ++rank) {  // their sizes may differ
        auto part = from[i][rank].clone();
        reduce_all(part, options.reduceOp);
        if (rank == getRank()) into[i].copy_(part);
      }
    return done(c10d::OpType::REDUCE_SCATTER, outputs);
  }
  Held _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto aliases = aliases_of({output, input});
    auto all = aliases[1].clone(at::MemoryFormat::Contiguous).view({getSize(), -1});
    reduce_all(all, options.reduceOp);
    aliases[0].copy_(all[getRank()].view_as(aliases[0]));
    return done(c10d::OpType::_REDUCE_SCATTER_BASE, {output});
  }
  Held reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    for (size_t i = 0; i < outputs.size(); ++i) _reduce_scatter_base(outputs[i], inputs[i], options);
    return done(c10d::OpType::COALESCED, outputs);
  }
  Held alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    auto aliases = aliases_of({output, input});
    inner_->alltoall_base(aliases[0], aliases[1], output_sizes, input_sizes, options)->wait();
    return done(c10d::OpType::ALLTOALL_BASE, {output});
  }
  Held alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    auto into = aliases_of(outputs);
    Tensors parts;
    std::vector<int64_t> input_sizes, output_sizes;
    int64_t total = 0;
    for (const auto& alias : aliases_of(inputs)) {
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
    return done(c10d::OpType::ALLTOALL, outputs);
  }
  Held send(Tensors& tensors, int to, int tag) override {
    auto aliases = aliases_of(tensors);
    return c10::make_intrusive<OnItsWay>(getRank(), c10d::OpType::SEND, inner_->send(aliases, to, tag), tensors);
  }
  Held recv(Tensors& tensors, int from, int tag) override {
    auto aliases = aliases_of(tensors);
    return c10::make_intrusive<OnItsWay>(getRank(), c10d::OpType::RECV, inner_->recv(aliases, from, tag), tensors);
  }
  Held recvAnysource(Tensors& tensors, int tag) override {
    auto aliases = aliases_of(tensors);
    auto work = inner_->recvAnysource(aliases, tag);
    return c10::make_intrusive<OnItsWay>(getRank(), c10d::OpType::RECVANYSOURCE, work, tensors);
  }
  Held barrier(const c10d::BarrierOptions& options) override {
    auto asked = options;
    asked.device_ids.clear();
    asked.device.reset();
    inner_->barrier(asked)->wait();
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
  Held done(c10d::OpType kind, Tensors results) {
    return c10::make_intrusive<Done>(getRank(), kind, std::move(results));
  }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors all;
    for (const auto& tensors : lists) all.insert(all.end(), tensors.begin(), tensors.end());
    return all;
  }

  c10::intrusive_ptr<Backend> inner_;
};

}  // namespace

void bind_collectives(pybind11::module_& m) {
  m.def("collectives", [](const c10::intrusive_ptr<Backend>& inner) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<Collectives>(inner);
  }, pybind11::call_guard<pybind11::gil_scoped_release>());
}

}  // namespace sim
