"""Names of transformers' arguments that only other libraries, and code copied from transformers, use."""

from __future__ import annotations

from typing import Any

from hftrain.arguments.processes import ArgumentProcesses


class CopiedNames(ArgumentProcesses):
    """Properties under the names of transformers."""

    @property
    def _n_gpu(self) -> int:
        """Same as `n_gpu`; a script that sets it to 1 trains on one device."""
        return self.n_gpu

    @_n_gpu.setter
    def _n_gpu(self, number: int) -> None:
        vars(self)["_chosen_n_gpu"] = number

    @property
    def mixed_precision(self) -> str:
        """The precision in the words of accelerate: ``"bf16"``, ``"fp16"`` or ``"no"``."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "no"

    @property
    def deepspeed_plugin(self) -> Any:
        """accelerate's description of DeepSpeed's settings, which needs DeepSpeed; None without `deepspeed`."""
        if "_deepspeed_plugin" not in vars(self):
            if not self.deepspeed:
                return None
            from accelerate import DeepSpeedPlugin

            vars(self)["_deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=self.deepspeed)
        return vars(self)["_deepspeed_plugin"]

    @deepspeed_plugin.setter
    def deepspeed_plugin(self, value: Any) -> None:
        vars(self)["_deepspeed_plugin"] = value
