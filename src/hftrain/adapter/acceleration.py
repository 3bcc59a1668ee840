"""What `Accelerator(...)` is told, so that it says the same as the arguments do."""

from __future__ import annotations

from typing import Any

from hftrain.adapter.data import read_accelerator_config

_LOADER_SETTINGS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")


def accelerator_settings(args: Any, policy: Any, *, device_type: str) -> tuple[str, dict[str, Any]]:
    """Return the mixed precision by accelerate's name, and the loader settings.

    Accelerate knows no fp16 on the CPU, which torch does: it is told "no" there.
    """
    sharing = read_accelerator_config(args)
    names = {"float16": "fp16", "bfloat16": "bf16"}
    mixed = names.get(str(policy.compute_dtype).removeprefix("torch."), "no") if policy.autocast else "no"
    if device_type == "cpu" and mixed == "fp16":
        mixed = "no"
    # As documented, the order is drawn from the seed; accelerate's own default draws it from the global generator.
    loading = {"use_seedable_sampler": True, **{k: sharing[k] for k in _LOADER_SETTINGS if k in sharing}}
    return mixed, {**loading, "data_seed": args.data_seed}
