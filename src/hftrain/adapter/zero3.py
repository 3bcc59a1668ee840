"""Models that are split among processes while they are built, after the arguments and before the Trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hftrain.adapter.deepspeed import deepspeed_options, run_values
from hftrain.core.errors import ConfigError
from hftrain.core.optional import is_available
from hftrain.strategies.deepspeed.strategy import DeepSpeedStrategy


class HfDeepSpeedConfig:
    """Let transformers models that are built from now on be split by ZeRO-3 layer by layer, so that none is ever whole.

    Keep the object for as long as models are built: without it they are whole again. With another stage of ZeRO it
    changes nothing. The processes meet when it is made. Collective.

    Args:
        config_or_args: The training arguments, whose `deepspeed` counts, or a DeepSpeed config as a dict or a path.

    Attributes:
        config: The DeepSpeed config, its "auto" values filled from the arguments or left out.

    Raises:
        ConfigError: The arguments hold no DeepSpeed config, or it cannot be used.
        MissingDependencyError: DeepSpeed is not installed.

    Source: the documented `HfDeepSpeedConfig`.
    """

    def __init__(self, config_or_args: Any) -> None:
        args = config_or_args if hasattr(config_or_args, "per_device_train_batch_size") else None
        given = config_or_args if args is None else deepspeed_options(args)["config"]
        if not given:
            raise ConfigError(
                "Cannot make a HfDeepSpeedConfig from these arguments:",
                "they hold no DeepSpeed config.",
                "Set deepspeed to a dict or the path of a JSON file, or pass that instead of the arguments.",
            )
        options = {} if args is None else {"use_cpu": args.use_cpu, "backend": args.ddp_backend}
        self._strategy = DeepSpeedStrategy(config=given, **options)
        if args is not None:
            half = "bf16" if args.bf16 else "fp16" if args.fp16 else None
            self._strategy.fill_config(run_values(args, world_size=self._strategy.world_size), half=half)
        self.config = _without_auto(self._strategy.config)
        if "train_batch_size" not in self.config:
            self.config.setdefault("train_micro_batch_size_per_gpu", 1)
        self._strategy.launch()
        if is_available("transformers"):
            from transformers.integrations.deepspeed import set_hf_deepspeed_config

            # Held weakly: what is built after this object is gone is whole.
            hold: Callable[[Any], Any] = set_hf_deepspeed_config
            hold(self)

    def is_zero3(self) -> bool:
        """Tell whether parameters are split."""
        return self._strategy.stage == 3


def _without_auto(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {key: _without_auto(value) for key, value in config.items() if value != "auto"}
