"""Names of transformers' Trainer that only code copied from it uses: they act, or say that their feature is off."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hftrain.checkpoint.layout import PREFIX_CHECKPOINT_DIR
from hftrain.core.log import get_logger
from hftrain.core.nested import nested_numpify
from hftrain.trainer.memory import MemoryTracker
from hftrain.trainer.set_up_methods import SetUpMethods

logger = get_logger(__name__)


class CopiedNames(SetUpMethods):
    """Methods and attributes under the names of transformers; the loop calls none of them."""

    use_apex = use_cpu_amp = use_cuda_amp = use_amp = do_grad_scaling = False
    is_fsdp_xla_enabled = is_fsdp_xla_v1_enabled = is_fsdp_xla_v2_enabled = False
    is_distributed_loading_by_transformers = _loggers_initialized = False
    sharded_ddp = fsdp = scaler = _past = None

    @property
    def _memory_tracker(self) -> _Reporter:
        """Adds the memory report; evaluate() and predict() do it themselves."""
        return _Reporter(self._memory)

    @property
    def neftune_hook_handle(self) -> Any:
        """The hook that adds NEFTune's noise during a run."""
        return self._neftune_hook

    def _save_rng_state(self, output_dir: str) -> None:
        """Write this process's random numbers and its position in the data, for an own `_save_checkpoint`."""
        self._running_session("_save_rng_state").write_numbers(Path(output_dir))

    def _save_scaler(self, output_dir: str) -> None:
        """Do nothing: `_save_optimizer_and_scheduler` writes the loss scale."""

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Do nothing: `_load_optimizer_and_scheduler` reads the loss scale."""

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn about the keys that `load_state_dict` reported."""
        for kind in ("missing", "unexpected"):
            keys = getattr(load_result, f"{kind}_keys")
            if keys:
                logger.warning("There were %s keys in the checkpoint model loaded: %s.", kind, keys)

    def _sorted_checkpoints(
        self, output_dir: str | None = None, checkpoint_prefix: str = PREFIX_CHECKPOINT_DIR, use_mtime: bool = False
    ) -> list[str]:
        """List the checkpoints of a folder, oldest first; the best one is never the first to delete."""
        folder = self.output_dir if output_dir is None else Path(output_dir)
        start = f"{checkpoint_prefix}-"
        steps = {path: path.name.removeprefix(start) for path in folder.glob(f"{start}*") if path.is_dir()}
        found = [path for path, step in steps.items() if step.isdigit()]
        found.sort(key=os.path.getmtime if use_mtime else lambda path: int(steps[path]))
        best = folder / Path(self.state.best_model_checkpoint or "").name
        if best in found[:-2]:
            found.remove(best)
            found.insert(-1, best)
        return [str(path) for path in found]

    def _pad_across_processes(self, tensor: Any, pad_index: int = -100) -> Any:
        """Pad tensors to the longest of all processes along their second dimension. Collective."""
        return self.accelerator.pad_across_processes(tensor, dim=1, pad_index=pad_index)

    def _gather_and_numpify(self, tensors: Any, name: str | None = None) -> Any:
        """Concatenate the tensors of all processes, as NumPy arrays. Collective."""
        return nested_numpify(self._nested_gather(tensors, name))


class _Reporter:
    """transformers' tracker of memory, on the Trainer's own."""

    def __init__(self, memory: MemoryTracker) -> None:
        self._memory = memory

    def start(self) -> None:
        """Do nothing: the Trainer has started."""

    def stop_and_update_metrics(self, metrics: dict[str, Any] | None = None) -> None:
        """Add the report of a stage that is still running."""
        if metrics is not None:
            metrics.update(self._memory.stop())
