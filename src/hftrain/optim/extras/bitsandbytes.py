"""bitsandbytes' optimizers: averages in 8 or 32 bits, paged or not."""

from __future__ import annotations

from typing import Any

from torch import nn

from hftrain.core.log import get_logger
from hftrain.optim.optimizers import OptimizerClass, OptimizerConfig, load, read_options

logger = get_logger(__name__)


def adamw(config: OptimizerConfig, model: nn.Module | None, *, bits: int, is_paged: bool = False) -> OptimizerClass:
    """Return AdamW. Source: Dettmers et al., 2022, arXiv 2110.02861."""
    options = read_options(config, {"min_8bit_size": int})
    settings = {"betas": config.betas, "eps": config.eps, "is_paged": is_paged, **options}
    return _from_package("AdamW", config, model, bits=bits, **settings)


def lion(config: OptimizerConfig, model: nn.Module | None, *, bits: int, is_paged: bool = False) -> OptimizerClass:
    """Return Lion, which has no eps. Source: Chen et al., 2023, arXiv 2302.06675."""
    options = read_options(config, {"min_8bit_size": int})
    return _from_package("Lion", config, model, bits=bits, betas=config.betas, is_paged=is_paged, **options)


def ademamix(config: OptimizerConfig, model: nn.Module | None, *, bits: int, is_paged: bool = False) -> OptimizerClass:
    """Return AdEMAMix, whose options also replace Adam's factors.

    Source: Pagliardini et al., 2024, arXiv 2409.03137.
    """
    numbers = dict.fromkeys(("beta1", "beta2", "beta3", "alpha", "eps"), float)
    counts = dict.fromkeys(("t_alpha", "t_beta3", "min_8bit_size"), int)
    options = read_options(config, {**numbers, **counts})
    defaults = {"beta1": config.betas[0], "beta2": config.betas[1], "beta3": 0.9999}
    betas = tuple(options.pop(name, default) for name, default in defaults.items())
    settings = {"betas": betas, "alpha": 5.0, "eps": config.eps, "is_paged": is_paged, **options}
    return _from_package("AdEMAMix", config, model, bits=bits, **settings)


def rmsprop(config: OptimizerConfig, model: nn.Module | None, *, bits: int) -> OptimizerClass:
    """Return RMSprop, which takes everything but the learning rate from the options."""
    hints = {**dict.fromkeys(("alpha", "eps", "momentum"), float), "min_8bit_size": int}
    return _from_package("RMSprop", config, model, bits=bits, **read_options(config, hints))


def _from_package(
    name: str, config: OptimizerConfig, model: nn.Module | None, *, bits: int, **settings: Any
) -> OptimizerClass:
    cls = load(f"bitsandbytes.optim:{name}", "bitsandbytes>=0.44", config, extra="bitsandbytes")
    if bits == 8 and model is not None:
        cls = _with_full_embeddings(cls, model)
    return cls, {"lr": config.learning_rate, "optim_bits": bits, **settings}


def _with_full_embeddings(cls: Any, model: nn.Module) -> Any:
    """Keep the averages of embeddings in 32 bits; 8-bit training is unstable otherwise.

    bitsandbytes' own manager of such overrides is global: it would keep the model alive until the process ends, and
    it identifies a parameter by its id, which a later model's parameter may reuse.
    """
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    if not embeddings:
        return cls
    count = sum(module.weight.numel() for module in embeddings)
    logger.info("%s keeps the averages of %d embedding parameters in 32 bits.", cls.__name__, count)

    def get_config(self: Any, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = cls.get_config(self, gindex, pindex, group)
        parameter = self.param_groups[gindex]["params"][pindex]
        is_embedding = any(parameter is module.weight for module in embeddings)
        return {**config, "optim_bits": 32} if is_embedding else config

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "get_config": get_config})
