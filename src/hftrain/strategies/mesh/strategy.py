"""Train on a mesh of processes: replicas, shards, tensor, context and pipeline ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.optim import Optimizer

from hftrain.core.errors import ConfigError, HFTrainError, StrategyError
from hftrain.core.launcher import read_launch
from hftrain.core.notes import add_note
from hftrain.core.parameters import is_weightless
from hftrain.core.tree import tensors_of
from hftrain.core.types import PrecisionPolicy, Shard
from hftrain.strategies.base import MakeOptimizer, Placed
from hftrain.strategies.fsdp.states import pieces
from hftrain.strategies.fsdp.strategy import FSDPStrategy
from hftrain.strategies.mesh.blocks import prove_blocks
from hftrain.strategies.mesh.context import find_blocks, share_sequence, split_context
from hftrain.strategies.mesh.layout import Layout, forget_meshes, layout_of
from hftrain.strategies.mesh.loss import find_head, share_loss
from hftrain.strategies.mesh.moves import Apart, seed_apart
from hftrain.strategies.mesh.pipeline import Pipeline, StagesScaler, clip_grad_norm, optimizer_pieces, whole_tensors
from hftrain.strategies.mesh.plans import Placing, find_plan, install, placings
from hftrain.strategies.mesh.proof import Proof
from hftrain.strategies.mesh.sequence import find_layers
from hftrain.strategies.mesh.styles import Colwise, TensorRanks
from hftrain.strategies.ranks import DataRanks

# Notes on errors of the model's own code, which may not expect that ranks compute parts of it.
_ON_TENSOR_RANKS = (
    "On tensor ranks, each has a part of the heads and widths that the plan splits, and this model's code may count "
    "the whole. Split what is added to those parts, too (a bias of each head: 'colwise'), or leave the modules out."
)
_IN_A_STAGE = (
    "A stage of a pipeline runs the whole model's code. Layers of other stages return their input, and parameters that "
    "only others have are on the meta device. Put layers that change shapes into an nn.Sequential; if the model reads "
    "the parameters of a part without calling it, use pp_size=1."
)


class MeshStrategy(FSDPStrategy):
    """Train on a mesh: data ranks that share or copy the parameters, and ranks that share layers, sequences or stages.

    The ranks of one data coordinate get the same batch and compute its loss together; data ranks average gradients as
    they do with `FSDPStrategy`, of which this is the general case.

    Args:
        tp_size: Ranks that share each layer (tensor parallelism).
        cp_size: Ranks that share each sequence (context parallelism).
        pp_size: Stages of the pipeline.
        dp_replicate: Copies of the sharded model.
        dp_shard: Data ranks that share each parameter, its gradient and its optimizer state.
        uses: The dimensions that a preset's name promises; the one without a size takes the processes that are left.
        plan: Styles by module names, in which ``*`` stands for one part of a name; they come before the model's own.
        sequence_parallel: Whether tensor ranks also share the activations between the layers, along the sequence.
        loss_parallel: Whether the ranks share the loss of a causal language model: no rank holds all logits, and its
            outputs have none while it trains.
        attention: How context ranks see the whole sequence: ``"ulysses"`` exchanges parts of the sequence for heads,
            ``"gather"`` collects keys and values; ``"auto"`` takes the first where the ranks divide the heads.
        schedule: The pipeline's: ``"gpipe"`` or ``"1f1b"``; see `Pipeline`.
        num_micro_batches: How many micro-batches the pipeline cuts a batch into; None: one for each stage.
        **options: See `FSDPStrategy`.

    Raises:
        ConfigError: The sizes do not fit the processes; see also `FSDPStrategy`.
    """

    name = "mesh"

    def __init__(
        self,
        *,
        tp_size: int | None = None,
        cp_size: int | None = None,
        pp_size: int | None = None,
        dp_replicate: int | None = None,
        dp_shard: int | None = None,
        uses: Sequence[str] = ("dp_shard",),
        plan: Mapping[str, Any] | None = None,
        sequence_parallel: bool = False,
        loss_parallel: bool = False,
        attention: str = "auto",
        schedule: str = "gpipe",
        num_micro_batches: int | None = None,
        **options: Any,
    ) -> None:
        launch = read_launch()
        sizes: dict[str, Any] = {"tp": tp_size, "cp": cp_size, "pp": pp_size}
        sizes |= {"dp_replicate": dp_replicate, "dp_shard": dp_shard}
        # `hftrain plan` runs the script as one process, and tells what other sizes would do.
        constraints, machine = {} if is_weightless() else sizes, launch.local_world_size
        self.layout: Layout = layout_of(launch.world_size, constraints, uses=uses, machine_size=machine)
        self.plan_by_name = plan
        self.sequence_parallel, self.loss_parallel = sequence_parallel, loss_parallel
        self.attention, self.schedule, self.num_micro_batches = attention, schedule, num_micro_batches
        self._pipeline: Pipeline | None = None
        self._proof = Proof()
        super().__init__(**options)
        self.sizes = self.layout.sizes
        coordinate = self.layout.coordinate(self.rank)
        data_rank = coordinate["dp_replicate"] * self.layout.dp_shard + coordinate["dp_shard"]
        copy = (coordinate["pp"] * self.layout.cp + coordinate["cp"]) * self.layout.tp + coordinate["tp"]
        self._data = DataRanks(self, rank=data_rank, world_size=self.layout.data_size, copy=copy)

    @property
    def data(self) -> DataRanks:
        return self._data

    def launch(self) -> None:
        super().launch()
        self._meshes = self.layout.meshes(self.device_type)
        self._data.group = self._meshes.samples["data"].get_group()

    def close(self) -> None:
        super().close()
        forget_meshes()

    def setup(self, model: nn.Module, make_optimizer: MakeOptimizer | None, policy: PrecisionPolicy) -> Placed:
        """Place a model on the mesh and create its optimizer. Collective; mutates the model.

        Raises:
            ConfigError: The ranks cannot share the model; see also `FSDPStrategy.setup`.
        """
        wrapper, optimizer = super().setup(model, make_optimizer, policy)
        if self._pipeline is not None and hasattr(optimizer, "make_projector"):
            problem = f"Cannot use {type(optimizer).__name__} with pp_size={self.layout.pp}."
            reason = "Stages cannot put the projections of their gradients together in a checkpoint."
            raise ConfigError(problem, reason, "Use strategy='tp' or 'fsdp', or optim='adamw_torch'.")
        if optimizer is not None and self.layout.tp > 1:
            group = self._meshes.parameters["tp"].get_group()
            self._proof.check_in_first_update(lambda: self.unwrap(wrapper), optimizer, group)
        if hasattr(model, "generate"):  # which may call parts of the model before the whole
            register_fsdp_forward_method(model, "generate")
        return wrapper, optimizer

    def unwrap(self, model: nn.Module) -> nn.Module:
        model = super().unwrap(model)
        return self.unwrap(model.module) if isinstance(model, Pipeline) else model

    def scaler_factory(self, device: torch.device) -> GradScaler:
        return StagesScaler(device.type) if self.layout.pp > 1 else super().scaler_factory(device)

    def called(self, model: nn.Module) -> nn.Module:
        return model if model.training else self._pipeline_of(model) or model

    def has_outputs(self, model: nn.Module) -> bool | None:
        pipeline = self._pipeline_of(model)
        if pipeline is None or not model.training:
            return True
        return pipeline.stage.has_head if pipeline.stage.is_last else None

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        # A pipeline exchanges gradients after its last micro-batch.
        with nullcontext() if self._pipeline is not None else super().no_sync(model):
            yield

    def clip_grad_norm(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        if self._pipeline is not None:
            return clip_grad_norm(self._pipeline, list(parameters), max_norm, norm_type)
        return super().clip_grad_norm(parameters, max_norm, norm_type)

    def model_state(self, model: nn.Module) -> dict[str, Any]:
        if self._pipeline_of(model) is None:
            return super().model_state(model)
        return {name: value.detach().cpu() for name, value in self.full_tensors(model) if self.is_main}

    def model_shards(self, model: nn.Module) -> dict[str, Shard] | None:
        pipeline = self._pipeline_of(model)
        if pipeline is None:
            return super().model_shards(model)
        owners, stage = pipeline.plan.owners, pipeline.stage.index
        own = {name: value for name, value in self.own_state(model).items() if owners.get(name, (0,))[0] == stage}
        return pieces(own, is_main=self._is_writer())

    def full_tensors(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        pipeline = self._pipeline_of(model)
        return super().full_tensors(model) if pipeline is None else whole_tensors(pipeline, self.device)

    def optimizer_shards(
        self, model: nn.Module, optimizer: Optimizer
    ) -> tuple[dict[str, Any], dict[str, Shard]] | None:
        pipeline = self._pipeline_of(model)
        if pipeline is None:
            return super().optimizer_shards(model, optimizer)
        return optimizer_pieces(pipeline, optimizer, is_writer=self._is_writer())

    def split_objects(self, states: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Shard]]:
        plain, found = super().split_objects(states)
        if self._pipeline is not None:  # of tied copies, the first stage writes
            owners, stage = self._pipeline.plan.owners, self._pipeline.stage.index
            found = {path: x for path, x in found.items() if owners.get(json.loads(path)[-1], (stage,))[0] == stage}
        return plain, found

    # -- implementation ------------------------------------------------------------------------------------------

    def _check_options(self) -> None:
        super()._check_options()
        options = {"cp_size": self.layout.cp > 1, "loss_parallel": self.loss_parallel, "offload": self.offload}
        options |= {"state_dict_type='FULL_STATE_DICT'": self.state_dict_type == "FULL_STATE_DICT"}
        options |= {"sequence_parallel": self.sequence_parallel}
        conflicts = [name for name, is_asked in options.items() if is_asked]
        if self.layout.pp > 1 and conflicts:
            reason = f"Gradients of a pipeline with {conflicts[0]} are not proved."
            raise ConfigError(
                f"Cannot use pp_size={self.layout.pp} with {conflicts[0]}.", reason, "Leave one of the two out."
            )
        self._group_size = self.layout.shard_size

    def _is_writer(self) -> bool:
        """Return whether this process writes what all ranks of its stage hold whole."""
        return not any(at for dim, at in self.layout.coordinate(self.rank).items() if dim != "pp")

    def _pipeline_of(self, model: nn.Module) -> Pipeline | None:
        pipeline = self._pipeline
        return pipeline if pipeline is not None and self.unwrap(model) is pipeline.module else None

    def _split_root(self, model: nn.Module) -> nn.Module | None:
        return self._pipeline_of(model) or super()._split_root(model)

    def _held_elsewhere(self, model: nn.Module) -> set[nn.Parameter]:
        if self._pipeline is None:
            return set()
        own = {id(parameter) for _, parameter in self._pipeline.own_parameters()}
        return {parameter for parameter in model.parameters() if id(parameter) not in own}

    def _share_buffers(self, model: nn.Module) -> None:
        if self._pipeline_of(model) is None:
            return super()._share_buffers(model)
        # Those of other stages are on the meta device, where a broadcast waits for nobody.
        for dim in ("replicate", "shard", "tp"):
            for buffer in (each for each in model.buffers() if not each.is_meta):
                dist.broadcast(buffer, group=self._meshes.parameters[dim].get_group(), group_src=0)
        return None

    def _units(self, model: nn.Module) -> list[nn.Module]:
        units = super()._units(model)
        if self._pipeline is None:
            return units
        elsewhere = self._held_elsewhere(model)
        stage_units = [unit for unit in units if elsewhere.isdisjoint(unit.parameters())]
        # Of the whole model, a stage's outputs have no gradient that would let FSDP take those of the parameters.
        return stage_units or self._pipeline.stage.layers()

    def _split(self, model: nn.Module, units: list[nn.Module], policy: PrecisionPolicy, weights: Any) -> nn.Module:
        root = super()._split(model, units, policy, weights)
        if self._pipeline is not None:
            root = self._pipeline
            # Stages have layers of their own, which must not draw the same numbers.
            torch.manual_seed(seed_apart(torch.initial_seed(), root.stage.index))
            unique = {id(parameter) for _, parameter in root.own_parameters(once=True)}
            for _, parameter in root.own_parameters():
                parameter.is_copy = id(parameter) not in unique  # type: ignore[attr-defined]
        if self.data.world_size < self.world_size:
            self._prove_same_batch(root)
        return root

    def _mesh(self) -> DeviceMesh:
        held = self._meshes.parameters
        return held["replicate", "shard"] if held["replicate"].size() > 1 else held["shard"]

    def _share_out(self, model: nn.Module) -> None:
        """Share the model's layers, sequences and stages among the ranks that do not differ in data."""
        meshes, layout = self._meshes, self.layout
        # What refuses a model comes before what changes it.
        tensor_plan: list[Placing] = []
        if layout.tp > 1:
            mesh = meshes.parameters["tp"]
            given = self.plan_by_name
            if given is None and self.parallelize is not None:
                given = self.parallelize(mesh)
            tensor_plan = placings(model, find_plan(model, given), layout.tp, given or ())
        shares_sequence = self.sequence_parallel and layout.tp > 1
        parent, layers = find_layers(model, self.layer_classes) if shares_sequence else (model, [])
        blocks = find_blocks(layers, tensor_plan) if shares_sequence else ()
        head = find_head(model) if self.loss_parallel else None
        if layout.pp > 1:
            stages = {"schedule": self.schedule, "num_micro_batches": self.num_micro_batches}
            self._pipeline = Pipeline(model, meshes.parameters["pp"].get_group(), **stages)
            model.register_forward_hook(partial(_explain, _IN_A_STAGE), always_call=True)
        context = meshes.samples["cp"] if layout.cp > 1 else None
        if context is not None:
            multiple = layout.tp if shares_sequence else 1
            options: Any = {"kind": self.attention, "layer_classes": self.layer_classes, "device": self.device}
            split_context(model, context, multiple=multiple, **options)
        if tensor_plan:
            ranks = TensorRanks(mesh=mesh, apart=Apart(int(mesh.get_local_rank()), self.device), proof=self._proof)
            inner = replace(ranks)
            if context is None and not shares_sequence:
                prove_blocks(tensor_plan, self._proof)
            install(tensor_plan, ranks, inner, layers)
            if shares_sequence:
                share_sequence(parent, layers, blocks, inner)
            model.register_forward_pre_hook(lambda *_: ranks.apart.close())  # after an error
            model.register_forward_hook(lambda *_: ranks.check_met())
            model.register_forward_hook(partial(_explain, _ON_TENSOR_RANKS), always_call=True)
        if head is not None:
            has_parts = any(each.module is head and isinstance(each.style, Colwise) for each in tensor_plan)
            share_loss(model, head, vocabulary=meshes.parameters["tp"] if has_parts else None, sequence=context)

    def _prove_same_batch(self, model: nn.Module) -> None:
        """Check in the first forward pass that the ranks of one data coordinate get the same batch."""

        def check(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            handle.remove()
            tensors = [tensor for tensor in tensors_of((args, kwargs)) if not tensor.is_meta]
            sums = [f"{list(tensor.shape)}: {tensor.detach().double().sum().item()}" for tensor in tensors]
            readers: dict[int, list[Any]] = {}
            for data_rank, fingerprint in self.gather_object([self.data.rank, sums]):
                if readers.setdefault(data_rank, fingerprint) != fingerprint:
                    raise StrategyError(
                        f"The ranks of data coordinate {data_rank} got different batches:",
                        "they share the model's layers, sequences or stages, so they must read the same samples.",
                        "Shard data over strategy.data.rank and strategy.data.world_size, not over all processes; seed "
                        "random augmentation alike on all of them.",
                    )

        handle = model.register_forward_pre_hook(check, with_kwargs=True)


def _explain(text: str, *_: Any) -> None:
    """Add to an error of the model's own code what may have caused it: torch calls this while it is raised."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and not isinstance(error, HFTrainError):
        add_note(error, text)
