// Autocast of the simulated accelerator, with the lists that torch has for all devices, and CUDA's own additions.
#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>

using at::Scalar;
using at::ScalarType;
using at::IntArrayRef;
using at::Tensor;

namespace {

Tensor no_binary_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(
      false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\nUse "
      "binary_cross_entropy_with_logits instead.");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FP32)
#undef FP32
#define SET_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(SET_DTYPE)
#undef SET_DTYPE
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE
  m.impl("binary_cross_entropy", &no_binary_cross_entropy);
}
