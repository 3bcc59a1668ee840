"""Train with DeepSpeed's engine; the ZeRO stage sets whether optimizer state, gradients and parameters are sharded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from hftrain.core.devices import move
from hftrain.core.errors import StrategyError
from hftrain.core.extras import require
from hftrain.core.log import warn_once
from hftrain.core.parameters import is_partitioned
from hftrain.core.types import Owns, PrecisionPolicy, Shard
from hftrain.strategies.base import MakeOptimizer, Placed
from hftrain.strategies.checks import check_trainable
from hftrain.strategies.deepspeed import states
from hftrain.strategies.deepspeed.config import (
    HALVES,
    Fill,
    check_keys,
    check_offload,
    check_with_deepspeed,
    fill,
    find,
    find_auto,
    hidden_size,
    model_values,
    precision_values,
    read_config,
    refused,
    with_preset,
)
from hftrain.strategies.lockstep import SplittingStrategy
from hftrain.strategies.trainable_parameters import FixedParameters

# Filled by `plan`, once the run's number of updates is known.
_PLANNED = ("scheduler.params.total_num_steps", "scheduler.params.warmup_num_steps")
_GATHERS = "zero_optimization.stage3_gather_16bit_weights_on_model_save"


class DeepSpeedStrategy(SplittingStrategy):
    """Train with DeepSpeed; its engine runs backward, clipping, loss scaling and the update.

    ZeRO stage 0 shards nothing, stage 1 the optimizer state, stage 2 also the gradients and stage 3 also the
    parameters. A Trainer fills the config's "auto" values from the arguments; without a Trainer, set every value.

    Args:
        config: A DeepSpeed config or the path of one; None builds one from `stage` and `offload`.
        stage: The ZeRO stage; None uses the config's, or 2 without a config.
        offload: Keep the optimizer state, and with stage 3 the parameters, in host memory.
        **options: See `DistributedStrategy`. `place_model` is not used: DeepSpeed's engine places the model.

    Attributes:
        config: The current config, with all values filled that are known so far.
        makes: What the config defines instead of the Trainer: ``"optimizer"``, ``"scheduler"``.
        schedule: The schedule that the config defines; None before `setup` or if it defines none.

    Raises:
        ConfigError: The config cannot be read, contradicts `stage`, or has settings that DeepSpeed would ignore.
        MissingDependencyError: DeepSpeed is not installed.

    Source: the documented `deepspeed`; Rajbhandari et al., ZeRO, 2020.
    """

    name = "deepspeed"
    saves_in_background = restores_in_a_run = saves_objects = False
    owns = Owns.BACKWARD | Owns.STEP | Owns.CLIP | Owns.SCALING | Owns.ACCUMULATION | Owns.CASTING

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | str | Path | None = None,
        stage: int | None = None,
        offload: bool = False,
        **options: Any,
    ) -> None:
        require("deepspeed>=0.16", feature="strategy='deepspeed'", extra="deepspeed")
        super().__init__(**options)
        base = None if config is None else read_config(config)
        self._user_config = with_preset(base, stage=stage, offload=offload)
        check_keys(self._user_config)
        check_offload(self._user_config)
        self.config = read_config(self._user_config)
        self.makes = frozenset({"optimizer", "scheduler"} & {key for key, value in self._user_config.items() if value})
        self.schedule: Any = None
        self._engine: Any = None
        self._plugin: Any = None
        self._sets_local_rank = False

    @classmethod
    def refuses(cls, policy: PrecisionPolicy, device_type: str) -> str | None:
        if policy.compute_dtype == torch.float16 and device_type == "cpu":
            return "DeepSpeed has no float16 on most CPUs; 'bf16' works"
        return super().refuses(policy, device_type)

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.config["zero_optimization"].get("stage", 0))

    # -- the config ----------------------------------------------------------------------------------------------

    def fill_config(self, values: Iterable[Fill], *, half: str | None = None) -> None:
        """Fill the original config with a run's values; replaces `config`.

        Args:
            half: ``"bf16"`` or ``"fp16"`` if the run computes in it.

        Raises:
            ConfigError: The config contradicts the run; the error lists all contradictions.
        """
        config = read_config(self._user_config)
        fill(config, [*values, *precision_values(config, half)])
        self.config = config

    def plan(self, *, num_steps: int, num_warmup_steps: int) -> None:
        # DeepSpeed rejects a warm-up of 0 steps and turns 1 into 2. Keep an explicit 0, so that DeepSpeed reports it.
        least = 0 if find(self.config, _PLANNED[1]) == 0 else 1
        values = (num_steps, max(least, num_warmup_steps))
        planned = zip(_PLANNED, values, strict=True)
        fill(self.config, [Fill(key=key, value=value, name=key.rpartition(".")[2]) for key, value in planned])

    def plan_clipping(self, max_norm: float | None) -> None:
        if max_norm is not None:
            fill(self.config, [Fill(key="gradient_clipping", value=max_norm, name="max_grad_norm", creates=True)])

    def check_model(self, model: nn.Module) -> None:
        """Raise if the config cannot be completed for a model; touches no device.

        Raises:
            ConfigError: An "auto" value cannot be determined, DeepSpeed rejects a setting, no parameter requires a
                gradient, a requirement of NVMe offload is missing, or another strategy has sharded the model.
        """
        if self.stage != 3 or not is_partitioned(model):
            super().check_model(model)
        config = read_config(self.config)
        fill(config, model_values(model))
        unset = [key for key in find_auto(config) if key not in _PLANNED]
        if unset:
            reason = f'Nothing says what "auto" means for {", ".join(unset)}.'
            if hidden_size(model) is None:
                reason += f" {type(model).__name__} has no config with a hidden_size."
            raise refused(reason, "Write numbers in the config, or leave the keys out.")
        check_with_deepspeed(config, model, world_size=self.world_size)
        check_trainable(model, name=self.name)

    # -- processes -----------------------------------------------------------------------------------------------

    def launch(self) -> None:
        if self._device is not None:
            return
        super().launch()
        if "LOCAL_RANK" not in os.environ:
            # DeepSpeed reads it even if no launcher set it.
            os.environ["LOCAL_RANK"], self._sets_local_rank = str(self.local_rank), True
        try:
            states.join_processes(device_type=self.device_type, backend=self.backend)
        except StrategyError:
            self.close()
            raise

    def close(self) -> None:
        self._release()
        is_over = self._owns_group
        super().close()
        if is_over and "deepspeed" in sys.modules:
            states.forget_groups()
        if self._sets_local_rank:
            os.environ.pop("LOCAL_RANK", None)
            self._sets_local_rank = False

    def scaler_factory(self, device: torch.device) -> GradScaler:
        """Return a disabled scaler, because the engine scales the loss."""
        return GradScaler(device.type, enabled=False)

    def accelerator_options(self) -> dict[str, Any]:
        if self._plugin is None:
            from accelerate import DeepSpeedPlugin

            self._plugin = DeepSpeedPlugin(hf_ds_config=read_config(self.config))
        return {**super().accelerator_options(), "deepspeed_plugin": self._plugin}

    # -- the model -----------------------------------------------------------------------------------------------

    def building(self) -> AbstractContextManager[Any]:
        """Return the context in which to build a model; with stage 3, each layer is sharded when it is created."""
        if self.stage != 3 or self._device is None:
            return nullcontext()
        import deepspeed

        context: AbstractContextManager[Any] = deepspeed.zero.Init(config_dict_or_path=self._for_inference())
        return context

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer | None, policy: PrecisionPolicy) -> Placed:
        """Create an engine for a model, with the given or the config's optimizer. Collective; mutates the model.

        Returns:
            The engine and its inner optimizer, whose groups hold the learning rates. Their parameters may be
            DeepSpeed's own tensors.
        """
        if make_optimizer is None:
            return super().setup(model, None, policy)
        model = self.unwrap(model)
        self.check_model(model)
        self._release()
        config = read_config(self.config)
        half = next((name for name, dtype in HALVES.items() if dtype == policy.compute_dtype), None)
        fill(config, [*model_values(model), *precision_values(config, half)])
        if "train_batch_size" not in config:
            config.setdefault("train_micro_batch_size_per_gpu", 1)  # without a Trainer; only its timers read it
        # Accept any optimizer: the user has chosen it.
        config = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **config}
        optimizer = None if "optimizer" in self.makes else make_optimizer(model)
        engine = self._engine = self._initialize(model, optimizer, config)
        self._parameters = FixedParameters(self.unwrap(engine), engine="DeepSpeed")
        # Otherwise it counts micro-steps, and the last update of an epoch may have fewer.
        engine.set_gradient_accumulation_boundary(True)
        # The loop steps the schedule at the end of each update, as with other strategies.
        self.schedule, engine.lr_scheduler = engine.lr_scheduler, None
        return engine, engine.basic_optimizer

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device; with stage 3, shard it instead. Collective; mutates the model."""
        if is_partitioned(model):
            return model
        if self.stage != 3:
            return move(model, self.device)
        self._release()
        self._engine = self._initialize(model, None, self._for_inference())
        return model

    def unwrap(self, model: nn.Module) -> nn.Module:
        model = super().unwrap(model)
        deepspeed = sys.modules.get("deepspeed")
        if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine):
            return self.unwrap(model.module)
        return model

    def for_evaluation(self, model: nn.Module) -> nn.Module:
        """Return the model without its engine, with rank 0's buffers. Collective; mutates the buffers.

        With stage 3 its forward passes are collective: call `finish_forwards` after the last batch.
        """
        module = self.unwrap(model)
        if self._engine is not None:
            self._share_buffers(module)
            if is_partitioned(module):
                self._start_lockstep(module)
        return module

    # -- the step ------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Mark a micro-step that is not the last one of its update."""
        self._engine.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self._engine.set_gradient_accumulation_boundary(True)

    def backward(self, loss: torch.Tensor, **options: Any) -> None:
        """Accumulate the gradients of an already weighted loss. Collective."""
        self._engine.backward(loss, scale_wrt_gas=False, **options)

    def step(self) -> bool:
        """Clip, update the parameters and drop the gradients; return False if an overflow skipped it. Collective."""
        self._parameters.check()
        self._engine.step()
        return bool(self._engine.was_step_applied())

    def zero_grad(self) -> None:
        """Do nothing, because `step` drops the gradients and the engine owns their buffers."""

    @property
    def last_norm(self) -> Any:
        """The gradient norm of the last update, read when it is converted to a float; None if unknown."""
        # Stage 0 in float32 does not report the norm.
        return None if states.is_plain(self._engine) else states.LastNorm(self._engine)

    # -- states --------------------------------------------------------------------------------------------------

    def full_tensors(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in states.gathered_tensors(self.unwrap(model)):
            yield name, tensor.detach().clone()

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        """Return the full model state in the engine's compute dtype. Collective.

        With stage 3 it is gathered on the main process if the config sets `stage3_gather_16bit_weights_on_model_save`;
        otherwise it is empty.
        """
        module = self.unwrap(model)
        if not is_partitioned(module):
            return module.state_dict()
        if not find(self.config, _GATHERS):
            warn_once(
                "ZeRO-3 splits the model, and the config's stage3_gather_16bit_weights_on_model_save is not true: "
                "each process writes its rows to model_shard-*.safetensors, and no model.safetensors is written."
            )
            return {}
        with states.released_parameters(self._engine):
            return states.whole_of(module, is_main=self.is_main)

    def model_shards(self, model: nn.Module) -> dict[str, Shard] | None:
        bare = self.unwrap(model)
        if not is_partitioned(bare) or find(self.config, _GATHERS):
            return None
        with states.released_parameters(self._engine):
            return states.rows_of(bare, rank=self.rank, world_size=self.world_size)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> Any:
        bare = self.unwrap(model)
        if is_partitioned(bare):
            with states.released_parameters(self._engine):
                return states.load_whole(bare, state, is_main=self.is_main)
        return bare.load_state_dict(state, strict=strict)

    def optimizer_state(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
        return optimizer.state_dict() if states.is_plain(self._engine) else states.take_state(self._engine)

    def optimizer_shards(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[dict[str, Any], dict[str, Shard]] | None:
        if self.stage == 0:
            return None
        return states.split_off(states.take_state(self._engine), rank=self.rank, world_size=self.world_size)

    def load_optimizer_state(self, model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
        if states.is_plain(self._engine) and "deepspeed" not in state:
            super().load_optimizer_state(model, optimizer, state)
        else:
            states.put_state(self._engine, state, rank=self.rank, world_size=self.world_size)

    # -- implementation ------------------------------------------------------------------------------------------

    def _initialize(self, model: nn.Module, optimizer: Optimizer | None, config: dict[str, Any]) -> Any:
        import deepspeed

        parameters = None
        if optimizer is None and "optimizer" in config:
            parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        states.split_for_nvme(model, config)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=parameters, config=config)
        half = next((name for name in HALVES if find(config, f"{name}.enabled")), None)
        if half is not None:
            self._cast_floats_to(HALVES[half])
        return engine

    def _cast_floats_to(self, dtype: torch.dtype) -> None:
        move = self._move

        def move_and_cast(tensor: torch.Tensor) -> torch.Tensor:
            tensor = move(tensor)
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        self._move = move_and_cast

    def _for_inference(self) -> dict[str, Any]:
        config = read_config(self.config)
        config["zero_optimization"] = {k: v for k, v in config["zero_optimization"].items() if v != "auto"}
        return {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}

    def _release(self) -> None:
        """Destroy the engine and remove its hooks from the model."""
        engine, self._engine = self._engine, None
        if engine is not None:
            for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
                hook.remove()
            engine.destroy()
