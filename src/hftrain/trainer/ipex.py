"""The Intel Extension for PyTorch, where an installed version fits torch's."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn

from hftrain.core.errors import MissingDependencyError, explain

if TYPE_CHECKING:
    from hftrain.trainer.trainer import Trainer

_PACKAGE = "intel_extension_for_pytorch"


def check_ipex() -> None:
    """Raise unless the extension is installed in torch's own version; nothing is imported.

    Importing one that was built for another version of torch ends the process.

    Raises:
        MissingDependencyError: It is absent, or of another version.
    """
    try:
        found = Version(version(_PACKAGE))
    except PackageNotFoundError:
        found = None
    wanted = Version(torch.__version__).release[:2]
    if found is not None and found.release[:2] == wanted:
        return
    needs = f"torch {torch.__version__} needs {_PACKAGE} {wanted[0]}.{wanted[1]}"
    raise MissingDependencyError(
        explain(
            "use_ipex=True was asked for.",
            f"{needs}, and {'it is not installed' if found is None else f'version {found} is'}.",
            "Leave use_ipex out: torch has taken over what the extension did (its last version is 2.8); torch_compile "
            "speeds up Intel's processors and GPUs.",
        )
    )


def optimize_with_ipex(trainer: Trainer, model: nn.Module, *, training: bool, dtype: torch.dtype | None) -> nn.Module:
    """Return the model as `ipex.optimize` makes it; with `training`, the trainer's optimizer is replaced too.

    Source: the documented `use_ipex`.
    """
    check_ipex()
    import intel_extension_for_pytorch as ipex

    compute = trainer.precision.policy.compute_dtype
    dtype = dtype or (compute if compute is torch.bfloat16 else torch.float32)
    options: dict[str, Any] = {"dtype": dtype, "level": "O1"}
    if training:
        model.train()
        model, trainer.optimizer = ipex.optimize(model, optimizer=trainer.optimizer, inplace=True, **options)
        return model
    model.eval()
    # Folding changes the weights, which tracing and a training that goes on cannot have.
    optimized: nn.Module = ipex.optimize(model, inplace=not trainer.is_in_train, conv_bn_folding=False, **options)
    return optimized
