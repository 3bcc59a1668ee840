"""The documented configuration files and commands of `accelerate launch`: what they say arrives.

What accelerate's launcher would put into the processes' environment is made by its own functions, and read by ours.
The files for several GPUs (on one machine in place of two) and for FSDP are launched for real as well, with two
processes on the CPU; those for DeepSpeed are in tests/deepspeed/test_launches.py.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from support.distributed import run_command
from support.tiny import make_arguments

from hftrain.adapter.strategy import precision_request, strategy_request
from hftrain.task.compilation import CompileConfig

COMMON = """
compute_environment: LOCAL_MACHINE
downcast_bf16: 'no'
machine_rank: 0 #change rank as per the node
main_training_function: main
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
FILES = {
    "multi_gpu": """
distributed_type: MULTI_GPU
gpu_ids: all
main_process_ip: 192.168.20.1
main_process_port: 9898
mixed_precision: fp16
num_machines: 2
num_processes: 8
""",
    "fsdp": """
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
mixed_precision: bf16
num_machines: 1
num_processes: 2
""",
}
FLAGS = """--num_processes=2 --use_fsdp --mixed_precision=bf16 --fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP
    --fsdp_transformer_layer_cls_to_wrap="BertLayer" --fsdp_sharding_strategy=1
    --fsdp_state_dict_type=FULL_STATE_DICT"""
SCRIPT_LINE = """./examples/pytorch/text-classification/run_glue.py --model_name_or_path google-bert/bert-base-cased
    --task_name mrpc --do_train --do_eval --max_seq_length 128 --per_device_train_batch_size 16 --learning_rate 5e-5
    --num_train_epochs 3 --output_dir out/mrpc/ --overwrite_output_dir"""
FSDP = {"sharding": "full_shard", "layer_classes": ["BertLayer"], "state_dict_type": "FULL_STATE_DICT"}


def parsed(line: str) -> Any:
    """Return the launcher's arguments after it has read and checked its configuration file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    return _validate_launch_command(launch_command_parser().parse_args(shlex.split(line)))[0]


def write(folder: Path, name: str) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(COMMON + FILES[name])
    return path


def enter(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *, world_size: int) -> None:
    """Become the first process that the launcher starts."""
    for name, value in {**environment, "WORLD_SIZE": str(world_size), "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(autouse=True)
def no_port_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)


def test_several_gpus_on_two_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate.utils.launch import prepare_multi_gpu_env

    args = parsed(f"--config_file {write(tmp_path, 'multi_gpu')} {SCRIPT_LINE}")
    environment = prepare_multi_gpu_env(args)
    meets_at = args.rdzv_endpoint or f"{args.master_addr}:{args.master_port}"
    assert (args.nproc_per_node, args.nnodes, meets_at) == ("4", "2", "192.168.20.1:9898")
    enter(monkeypatch, environment, world_size=8)
    assert strategy_request(make_arguments(tmp_path), None, is_checkpointing=False)[0] == "ddp"
    assert precision_request(make_arguments(tmp_path), None)[0] == "fp16"
    assert CompileConfig.of(make_arguments(tmp_path)) is None


@pytest.mark.parametrize("line", ["--config_file {}", FLAGS])
def test_fsdp_from_a_file_and_from_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    from accelerate.utils.launch import prepare_multi_gpu_env

    line = line.replace("{}", str(write(tmp_path, "fsdp")))
    if line == FLAGS:
        # Flags fill in a file, and by themselves the cache folder's: an empty one stands for "none was made".
        monkeypatch.setattr("accelerate.commands.launch.default_config_file", str(tmp_path / "none.yaml"))
    args = parsed(f"{line} {SCRIPT_LINE}")
    enter(monkeypatch, prepare_multi_gpu_env(args), world_size=2)
    name, options = strategy_request(make_arguments(tmp_path), None, is_checkpointing=False)
    assert (name, args.training_script_args[:2]) == ("fsdp", ["--model_name_or_path", "google-bert/bert-base-cased"])
    assert {key: options[key] for key in FSDP} == FSDP
    assert (options["offload"], options["auto_wrap"]) == (False, True)
    assert options["forward_prefetch"] is (line != FLAGS)
    assert precision_request(make_arguments(tmp_path), None)[0] == "bf16"


# -- for real ----------------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from torch import nn
from support.tiny import Net, make_arguments, make_rows
from hftrain import Trainer, set_seed


class BertLayer(nn.Sequential):
    pass


set_seed(0)
model = Net()
model.layers = nn.Sequential(*[BertLayer(layer) if isinstance(layer, nn.Linear) else layer for layer in model.layers])
trainer = Trainer(model, make_arguments(Path("out"), max_steps=2), train_dataset=make_rows(16))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
answer = [trainer.strategy.name, trainer.strategy.world_size, trainer.precision.policy.name, losses]
Path(f"answer_{{trainer.strategy.rank}}.json").write_text(json.dumps(answer))
"""
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli"]


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "expected"), [("multi_gpu", ["ddp", 2, "fp16"]), ("fsdp", ["fsdp", 2, "bf16"])])
def test_file_in_accelerates_folder_starts_two_processes_that_train_as_it_says(
    tmp_path: Path, name: str, expected: list[Any]
) -> None:
    env = {"HF_HOME": str(tmp_path / "cache")}
    ended, output = run_command([*ACCELERATE, "config", "default"], tmp_path, env)
    assert ended == 0, output
    config = tmp_path / "cache/accelerate/default_config.yaml"
    assert config.is_file(), "what `accelerate config` makes is where `accelerate launch` looks"
    alone = "num_machines: 1\nnum_processes: 2\nmixed_precision: fp16\ndistributed_type: MULTI_GPU\ngpu_ids: all\n"
    config.write_text(COMMON + (alone if name == "multi_gpu" else FILES[name]))
    (tmp_path / "script.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    ended, output = run_command([*ACCELERATE, "launch", "--main_process_port", "0", "script.py"], tmp_path, env)
    assert ended == 0, output
    first, second = (json.loads((tmp_path / f"answer_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first[:3] == expected
    assert len(first[3]) == 2


@pytest.mark.distributed
def test_second_process_that_is_not_started_on_a_cpu_is_missed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(tests=str(Path(__file__).parents[1])))
    env = {"HF_HOME": str(tmp_path / "cache")}
    launch = [*ACCELERATE, "launch", "--cpu", "--num_processes"]
    ended, output = run_command([*launch, "2", "script.py"], tmp_path, env)
    assert ended != 0
    assert "It started only this process" in output
    assert not list(tmp_path.glob("answer_*"))
    ended, output = run_command([*launch, "1", "script.py"], tmp_path, env)
    assert ended == 0, output
    assert json.loads((tmp_path / "answer_0.json").read_text())[:2] == ["single", 1]
