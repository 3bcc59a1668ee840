"""DeepSpeed under each launcher, and without one; every precision with every stage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.forked import free_port

from hftrain.step.legality import legality_table

pytestmark = pytest.mark.deepspeed

ROWS = [row for row in legality_table() if row.device == "cpu" and row.strategy.startswith("deepspeed")]
TESTS = Path(__file__).parents[1]

PAIRS = """
import json, sys, warnings
sys.path.insert(0, {tests!r})
import torch
from torch import nn
from hftrain.core.errors import ConfigError
from hftrain.precision.registry import precisions
from hftrain.step.assemble import assemble_stepper
from hftrain.step.legality import check_legal
from hftrain.strategies.registry import create_strategy

def run(name, kind):
    strategy, precision = create_strategy(name, use_cpu=True), precisions.create(kind)
    try:
        check_legal(strategy, precision)
    except ConfigError as error:
        return str(error)
    strategy.launch()
    precision.open(strategy.device, strategy.scaler_factory)
    model, optimizer = strategy.setup(
        precision.convert(nn.Linear(4, 1)), lambda model: torch.optim.AdamW(model.parameters()), precision.policy
    )
    stepper = assemble_stepper(strategy=strategy, precision=precision, optimizer=optimizer, max_grad_norm=1.0)
    before = {{name: value.clone() for name, value in strategy.model_state(model).items()}}
    norms = []
    for _ in range(2):
        batch = strategy.to_device({{"x": torch.randn(2, 4)}})
        with stepper.autocast():
            loss = model(batch["x"]).float().square().mean()
        stepper.backward(loss)
        norm = stepper.clip()
        assert stepper.step()
        norms.append(float(norm))
        stepper.zero_grad()
    after = strategy.model_state(model)
    precision.close()
    strategy.close()
    assert not torch.distributed.is_initialized()
    return [sorted(after), torch.equal(after["weight"], before["weight"]), min(norms) > 0]

print("ANSWER" + json.dumps({{f"{{name}} {{kind}}": run(name, kind) for name, kind in {pairs!r}}}))
"""

TRAIN = """
import json, os, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from support.tiny import Net, make_arguments, make_rows
from hftrain import Trainer, set_seed

set_seed(0)
options = dict(per_device_train_batch_size=2, max_steps=2, gradient_accumulation_steps=2)
if "LAUNCHED_BY" not in os.environ:
    options["deepspeed"] = {{"zero_optimization": {{"stage": 2}}}}
trainer = Trainer(Net(), make_arguments(Path({folder!r}), optim="adamw_torch", **options), train_dataset=make_rows(16))
trainer.train()
engine = trainer.model_wrapped
answer = dict(
    world=trainer.strategy.world_size, local_rank=trainer.strategy.local_rank, stage=engine.zero_optimization_stage(),
    losses=[entry["loss"] for entry in trainer.state.log_history if "loss" in entry], argv=sys.argv[1:],
    clipping=engine.gradient_clipping(), accumulation=engine.gradient_accumulation_steps(),
    gathers=engine.zero_gather_16bit_weights_on_model_save(),
)
Path({folder!r}, f"answer_{{trainer.strategy.rank}}.json").write_text(json.dumps(answer))
"""


def run(command: list[str], **env: str) -> str:
    """Run a command where the environment's own commands are found, and return what it says."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    ended = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": path, **env},
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-10_000:]
    return ended.stdout


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script = tmp_path_factory.mktemp("pairs") / "pairs.py"
    script.write_text(PAIRS.format(tests=str(TESTS), pairs=[(row.strategy, row.precision) for row in ROWS]))
    (line,) = [line for line in run([sys.executable, str(script)]).splitlines() if "ANSWER" in line]
    answers: dict[str, Any] = json.loads(line.partition("ANSWER")[2])
    return answers


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.strategy}-{row.precision}")
def test_pair_trains_in_one_process_without_a_launcher_or_is_refused(pairs: dict[str, Any], row: Any) -> None:
    answer = pairs[f"{row.strategy} {row.precision}"]
    if row.reason is None:
        assert answer == [["bias", "weight"], False, True]
    else:
        assert row.reason in answer


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"answer_{rank}.json").read_text()) for rank in range(2)]


def test_deepspeeds_own_launcher_starts_two_processes(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(tests=str(TESTS), folder=str(tmp_path)))
    run(["deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), str(script)])
    first, second = answers(tmp_path)
    assert (first["world"], first["local_rank"], second["local_rank"]) == (2, 0, 1)
    # As the launcher hands it on, for scripts that parse it.
    assert second["argv"] == ["--local_rank=1"]
    assert first["losses"] == second["losses"]
    assert first["stage"] == 2


@pytest.mark.parametrize("form", ["file", "keys"])
def test_accelerates_configuration_decides_the_stage(tmp_path: Path, form: str) -> None:
    script, chosen = tmp_path / "train.py", tmp_path / "config.yaml"
    script.write_text(TRAIN.format(tests=str(TESTS), folder=str(tmp_path)))
    if form == "file":
        (tmp_path / "ds.json").write_text(
            json.dumps({"zero_optimization": {"stage": 3}, "train_batch_size": "auto", "gradient_clipping": "auto"})
        )
        keys = f" deepspeed_config_file: {tmp_path / 'ds.json'}\n zero3_init_flag: true\n"
    else:
        keys = (
            " gradient_accumulation_steps: 2\n gradient_clipping: 1.0\n offload_optimizer_device: none\n"
            " offload_param_device: none\n zero3_init_flag: true\n zero3_save_16bit_model: true\n zero_stage: 3\n"
        )
    chosen.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmachine_rank: 0\nnum_machines: 1\n"
        f"num_processes: 2\nmixed_precision: 'no'\nmain_process_port: 2962{len(form)}\ndeepspeed_config:\n{keys}"
    )
    run(["accelerate", "launch", "--config_file", str(chosen), str(script)], LAUNCHED_BY="accelerate")
    first, second = answers(tmp_path)
    assert first["world"] == 2
    assert first["losses"] == second["losses"]
    assert (first["stage"], first["clipping"], first["accumulation"]) == (3, 1.0, 2)
    assert first["gathers"] is (form == "keys")
