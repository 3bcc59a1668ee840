"""Write the tables that follow from the code into the pages: ``python docs/tables.py``; ``--check`` only compares.

A table stands between ``<!-- table: NAME -->`` and ``<!-- end of table -->``.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import typing
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hftrain
from hftrain import (
    Precision,
    Seq2SeqTrainingArguments,
    Strategy,
    Trainer,
    TrainingArguments,
    precisions,
    strategies,
)
from hftrain.core import events
from hftrain.optim.optimizers import optimizers
from hftrain.step.legality import LegalityRow, legality_table

DOCS = Path(__file__).resolve().parent
SURFACE = DOCS.parent / "tests/documented/documented_surface.json"
CLIENTS = DOCS.parent / "tests/clients/results"
MESHES = DOCS.parent / "tests/support/meshes.json"
PLACE = re.compile(r"(?P<start><!-- table: (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end of table -->)", re.DOTALL)

# Older settings with a value that differs from their default.
OLD_SETTINGS = {
    "evaluation_strategy": "epoch",
    "no_cuda": True,
    "per_gpu_train_batch_size": 4,
    "per_gpu_eval_batch_size": 4,
    "fp16_backend": "cpu_amp",
    "xpu_backend": "gloo",
    "torchdynamo": "eager",
    "adafactor": True,
    "include_inputs_for_metrics": True,
    "tpu_metrics_debug": True,
    "use_mps_device": True,
    "sharded_ddp": "simple",
    "fsdp_min_num_params": 100,
    "fsdp_transformer_layer_cls_to_wrap": "Block",
    "push_to_hub_token": "...",
    "push_to_hub_model_id": "name",
    "push_to_hub_organization": "owner",
}


# The arguments by subject, in the order of the page; those of OLD_SETTINGS are left out.
SUBJECTS = {
    "Output folder and run name": ("output_dir", "overwrite_output_dir", "run_name"),
    "Training length": ("num_train_epochs", "max_steps"),
    "Batches": (
        "per_device_train_batch_size",
        "per_device_eval_batch_size",
        "gradient_accumulation_steps",
        "auto_find_batch_size",
        "average_tokens_across_devices",
    ),
    "Data loading": (
        "train_sampling_strategy",
        "group_by_length",
        "length_column_name",
        "remove_unused_columns",
        "label_names",
        "dataloader_num_workers",
        "dataloader_drop_last",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "dataloader_timeout",
        "dataloader_multiprocessing_context",
        "dataloader_in_order",
        "accelerator_config",
    ),
    "Optimizer": (
        "optim",
        "optim_args",
        "optim_target_modules",
        "learning_rate",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
    ),
    "Learning-rate schedule": ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
    "Regularization": ("label_smoothing_factor", "neftune_noise_alpha"),
    "Precision": (
        "bf16",
        "fp16",
        "tf32",
        "bf16_full_eval",
        "fp16_full_eval",
        "half_precision_backend",
        "fp16_opt_level",
    ),
    "Compilation and memory": (
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing",
        "activation_checkpointing_kwargs",
        "use_cache",
        "use_liger_kernel",
        "liger_kernel_config",
        "torch_empty_cache_steps",
        "jit_mode_eval",
        "use_ipex",
    ),
    "Logging": (
        "logging_strategy",
        "logging_steps",
        "logging_first_step",
        "logging_nan_inf_filter",
        "log_level",
        "log_level_replica",
        "log_on_each_node",
        "disable_tqdm",
        "include_num_input_tokens_seen",
        "include_tokens_per_second",
        "skip_memory_metrics",
        "debug",
    ),
    "Experiment trackers": (
        "report_to",
        "logging_dir",
        "project",
        "trackio_space_id",
        "trackio_bucket_id",
        "trackio_static_space_id",
    ),
    "Evaluation": (
        "eval_strategy",
        "eval_steps",
        "eval_delay",
        "eval_on_start",
        "prediction_loss_only",
        "include_for_metrics",
        "batch_eval_metrics",
        "eval_accumulation_steps",
        "eval_do_concat_batches",
        "eval_use_gather_object",
        "past_index",
        "use_legacy_prediction_loop",
    ),
    "Saving and resuming": (
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "save_only_model",
        "save_safetensors",
        "save_on_each_node",
        "load_best_model_at_end",
        "metric_for_best_model",
        "greater_is_better",
        "resume_from_checkpoint",
        "ignore_data_skip",
        "restore_callback_states_from_checkpoint",
        "enable_jit_checkpoint",
    ),
    "Seeds and determinism": ("seed", "data_seed", "full_determinism"),
    "Devices and distributed training": (
        "use_cpu",
        "local_rank",
        "ddp_backend",
        "ddp_timeout",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "fsdp",
        "fsdp_config",
        "deepspeed",
        "parallelism_config",
        "tpu_num_cores",
        "mp_parameters",
    ),
    "Hugging Face Hub": (
        "push_to_hub",
        "hub_model_id",
        "hub_strategy",
        "hub_token",
        "hub_private_repo",
        "hub_always_push",
        "hub_revision",
    ),
    "Generation (Seq2SeqTrainingArguments)": (
        "predict_with_generate",
        "generation_max_length",
        "generation_num_beams",
        "generation_config",
        "sortish_sampler",
    ),
    "Scripts and hyperparameter search": ("do_train", "do_eval", "do_predict", "ray_scope"),
}

# The guides to some of the subjects.
GUIDES = {
    "Optimizer": "[Optimizers](optimizers.md)",
    "Precision": "[Precision](precision.md)",
    "Compilation and memory": "[Compilation and memory](memory.md)",
    "Logging": "[Logs and metrics](numbers.md)",
    "Experiment trackers": "[Experiment trackers](trackers.md)",
    "Evaluation": "[Evaluation](evaluation.md)",
    "Saving and resuming": "[Checkpoints](checkpoints.md), [Resuming](resuming.md)",
    "Devices and distributed training": (
        "[Strategies](strategy.md), [Distributed training](distributed.md), [FSDP](fsdp.md), [DeepSpeed](deepspeed.md)"
    ),
    "Hugging Face Hub": "[Hugging Face Hub](hub.md)",
    "Generation (Seq2SeqTrainingArguments)": "[Sequence-to-sequence models](seq2seq.md)",
    "Scripts and hyperparameter search": "[Hyperparameter search](hyperparameter_search.md)",
}


# The Trainer's methods that train(), evaluate() and predict() call through the instance.
HOOKS = (
    "get_train_dataloader",
    "get_eval_dataloader",
    "get_test_dataloader",
    "create_optimizer_and_scheduler",
    "create_optimizer",
    "create_scheduler",
    "get_batch_samples",
    "training_step",
    "compute_loss",
    "compute_loss_context_manager",
    "evaluate",
    "evaluation_loop",
    "prediction_step",
    "log",
    "save_model",
)


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Lay out a Markdown table."""
    head = list(columns)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def code(words: Iterable[object]) -> str:
    """Set words in code style, separated by commas."""
    return ", ".join(f"`{word}`" for word in words)


def is_ours(target: Callable[..., object]) -> bool:
    """Tell whether a registered class is hftrain's own, and not that of another installed package."""
    return target.__module__.startswith("hftrain.")


def loop_table() -> str:
    """Show the loop as pseudocode, as `hftrain.core.events` tells it."""
    text = textwrap.dedent((events.__doc__ or "").partition("::\n")[2]).strip("\n")
    return f"```text\n{text}\n```\n"


def strategies_table() -> str:
    """List the strategies by name."""
    names = [name for name in strategies.names() if is_ours(strategies.resolve(name)[0])]
    rows = [(f"`{name}`", strategies.summary(name), f"`{strategies.resolve(name)[0].__name__}`") for name in names]
    return table(("name", "what it is", "class"), rows)


def precisions_table() -> str:
    """List the precisions by name, with their policies."""
    rows = []
    for name in precisions.names():
        if is_ours(precisions.resolve(name)[0]):
            policy = precisions.create(name).policy
            dtypes = (policy.param_dtype, policy.compute_dtype, policy.reduce_dtype)
            flags = ("yes" if flag else "no" for flag in (policy.autocast, policy.loss_scaling))
            rows.append((f"`{name}`", *(str(dtype).removeprefix("torch.") for dtype in dtypes), *flags))
    columns = ("name", "parameters", "operations", "gradients exchanged in", "autocast", "loss scaled")
    return table(columns, rows)


def legality(find: Callable[[LegalityRow], str | None]) -> tuple[list[str], dict[str, tuple[str, ...]], str]:
    """Return the devices, the verdicts by the key that `find` gives a row (None to leave it out), and the reasons."""
    rows = [
        (key, row)
        for row in legality_table()
        if is_ours(strategies.resolve(row.strategy)[0]) and is_ours(precisions.resolve(row.precision)[0])
        if (key := find(row)) is not None
    ]
    reasons = list(dict.fromkeys(row.reason for _, row in rows if row.reason))
    verdicts: dict[str, tuple[str, ...]] = {}
    for key, row in rows:
        verdict = "yes" if row.reason is None else f"no ({reasons.index(row.reason) + 1})"
        verdicts[key] = (*verdicts.get(key, ()), verdict)
    notes = "\n".join(f"{number}. {reason}." for number, reason in enumerate(reasons, 1))
    return list(dict.fromkeys(row.device for _, row in rows)), verdicts, notes


def pairs_table() -> str:
    """Show which strategy works with which precision on which device; names with equal verdicts share a row."""
    devices, verdicts, notes = legality(lambda row: f"{row.strategy} {row.precision}")
    by_strategy: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for key, found in verdicts.items():
        strategy, precision = key.split()
        by_strategy.setdefault(strategy, {}).setdefault(found, []).append(precision)
    alike: dict[str, list[str]] = {}
    for strategy, groups in by_strategy.items():
        alike.setdefault(str(groups), []).append(strategy)
    rows = [
        (code(names) if number == 0 else "", code(group), *found)
        for names in alike.values()
        for number, (found, group) in enumerate(by_strategy[names[0]].items())
    ]
    return f"{table(('strategy', 'precision', *devices), rows)}\n{notes}\n"


def devices_table() -> str:
    """Show which precision works on which device, where no strategy has a say."""
    devices, verdicts, notes = legality(lambda row: f"`{row.precision}`" if row.strategy == "single" else None)
    return f"{table(('precision', *devices), ((key, *found) for key, found in verdicts.items()))}\n{notes}\n"


def optimizers_table() -> str:
    """List the optimizers by the package they come from."""
    by_package: dict[str, list[str]] = {}
    for name in optimizers.names():
        by_package.setdefault(optimizers.summary(name), []).append(name)
    return table(("package", "`optim`"), [(f"`{package}`", code(names)) for package, names in by_package.items()])


def renames_table() -> str:
    """List older settings with what they are called today, as the warnings say it."""
    rows = []
    for name, value in OLD_SETTINGS.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            TrainingArguments("out", **{name: value})
        message = next(str(warning.message) for warning in caught if warning.category is FutureWarning)
        new = message.partition(" Use ")[2].removesuffix(" instead.")
        rows.append((f"`{name}={value!r}`", new if new.startswith("nothing") else f"`{new}`"))
    return table(("older form", "today"), rows)


def describe(function: Callable[..., object]) -> tuple[str, str]:
    """Return a method's arguments and the first paragraph of its docstring, without the source."""
    arguments = code(name for name in inspect.signature(function).parameters if name != "self")
    paragraph = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
    return arguments, paragraph.partition(" Source:")[0].replace("``", "`")


def hooks_table() -> str:
    """List the Trainer's methods that train(), evaluate() and predict() call, so that an override takes effect."""
    rows = [(f"`{name}`", *describe(getattr(Trainer, name))) for name in HOOKS]
    return table(("method", "arguments", "what it does"), rows)


def contract_table(base: type) -> str:
    """List the public members of a base class, in the order they are written."""
    rows = []
    for name, member in vars(base).items():
        if not name.startswith("_") and isinstance(member, property):
            rows.append((f"`{name}`", "(property)", describe(member.fget)[1]))
        elif not name.startswith("_") and inspect.isroutine(getattr(base, name)):
            rows.append((f"`{name}`", *describe(getattr(base, name))))
    return table(("member", "arguments", "what it does"), rows)


def readers(fields: frozenset[str]) -> dict[str, list[str]]:
    """Map each field to the modules that read it: as an attribute of arguments, or by its name."""
    found: dict[str, list[str]] = {}
    package = Path(inspect.getfile(hftrain)).parent
    for path in sorted(package.glob("**/*.py")):
        module = ".".join(path.relative_to(package).with_suffix("").parts)
        # Those hold all names: they check and convert, and read none for a purpose.
        if module.startswith("arguments.") and module != "arguments.processes":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            owner = ast.unparse(node.value).split(".")[-1] if isinstance(node, ast.Attribute) else ""
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
            is_read = owner in ("args", "arguments") or (owner == "self" and module == "arguments.processes")
            is_named = isinstance(node, ast.Constant) and module.startswith(("adapter.", "core.state"))
            if (
                isinstance(name, str)
                and name in fields
                and (is_read or is_named)
                and module not in found.setdefault(name, [])
            ):
                found[name].append(module)
    return found


def argument_entries() -> dict[str, str]:
    """Map each field of the arguments to its entry: name, type, default, description."""
    versions = json.loads(SURFACE.read_text(encoding="utf-8"))["versions"]
    documented = {
        name: {each["name"]: each for each in version["classes"]["Seq2SeqTrainingArguments"]["__init__"]["parameters"]}
        for name, version in versions.items()
    }
    types = typing.get_type_hints(Seq2SeqTrainingArguments)
    entries = {}
    for field in dataclasses.fields(Seq2SeqTrainingArguments):
        default = field.default if field.default is not dataclasses.MISSING else field.default_factory()
        older = documented["4.24"].get(field.name, {}).get("default", default)
        kind = re.sub(r"(\w+\.)+|<class '|'>", "", inspect.formatannotation(types[field.name])).replace(" | ", " or ")
        facts = [kind, f"default `{default!r}`" + (f" (4.24: `{older!r}`)" if older != default else "")]
        entries[field.name] = f"`{field.name}`\n: {', '.join(facts)}\n: {field.metadata['help']}\n"
    return entries


def arguments_table() -> str:
    """List the fields of the arguments: a heading and a list for each subject, the older names at the end."""
    entries = argument_entries()
    subjects = {**SUBJECTS, "Older names": tuple(name for name in entries if name in OLD_SETTINGS)}
    listed = [name for names in subjects.values() for name in names]
    if sorted(listed) != sorted(entries):
        unlisted = sorted({*listed} ^ {*entries}) or "one is there twice"
        raise ValueError(f"Put each of these under one subject: {unlisted}.")
    text = ""
    for title, names in subjects.items():
        guide = f"Guide: {GUIDES[title]}.\n\n" if title in GUIDES else ""
        text += f"\n### {title}\n\n{guide}" + "\n".join(entries[name] for name in names)
    return f"{text}\n"


def readers_table() -> str:
    """List the modules that read each argument, by name; older names are read by none."""
    names = [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.name not in OLD_SETTINGS]
    used = readers(frozenset(names))
    return table(("argument", "read by"), ((f"`{name}`", code(used.get(name, ())) or "-") for name in sorted(names)))


def client_results() -> list[dict[str, Any]]:
    """Return what the last `nox -s tests-clients` found, by library."""
    found = [each for path in CLIENTS.glob("*.json") for each in json.loads(path.read_text("utf-8")).values()]
    return sorted(found, key=lambda each: (each["library"].lower(), each["trainer"], each["what"]))


def clients_table() -> str:
    """List the trainers of libraries that train as with transformers' Trainer, with the largest difference."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for each in client_results():
        versions = (each["versions"][name].partition("+")[0] for name in (each["library"], "transformers"))
        groups.setdefault((each["library"], *versions, each["exception"]), []).append(each)
    rows = []
    for (*library, exception), results in groups.items():
        trainers: dict[str, list[str]] = {}
        for each in results:
            trainers.setdefault(f"`{each['trainer']}`", []).append(each["what"])
        names = (
            f"{name} ({'also ' * ('' in whats)}{'; '.join(filter(None, whats))})" if any(whats) else name
            for name, whats in trainers.items()
        )
        gaps = ([gap for each in results if (gap := each["gaps"].get(number)) is not None] for number in ("1", "2"))
        found = (f"{max(gap):.0e}".replace("0e+00", "0") if gap else "not offered" for gap in gaps)
        rows.append((*library, ", ".join(names), *found, exception))
    return table(("Library", "Version", "transformers", "Trainers", "No accumulation", "2 steps", "Exception"), rows)


def client_hooks_list() -> str:
    """List the Trainer's methods that those trainers override."""
    return f"{code(sorted({name for each in client_results() for name in each['overridden']}))}\n"


def meshes_table() -> str:
    """List the meshes and the models whose numbers tests compare with one process; meshes with the same go together."""
    proofs = json.loads(MESHES.read_text("utf-8"))
    refused = {(mesh, model) for each in proofs["refused"] for mesh in each["meshes"] for model in each["models"]}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in proofs["meshes"]:
        cells = tuple("refused" if (name, model) in refused else "proved" for model in proofs["models"])
        groups.setdefault(cells, []).append(name)
    rows = (("; ".join(names), *cells) for cells, names in groups.items())
    return table(("Meshes", *proofs["models"].values()), rows)


def mesh_refusals_table() -> str:
    """List what is refused, in the words of the error."""
    proofs = json.loads(MESHES.read_text("utf-8"))
    rows = (
        (", ".join(proofs["models"][model] for model in each["models"]), "; ".join(each["meshes"]), each["says"])
        for each in proofs["refused"]
    )
    return table(("Model", "Meshes", "Reason"), rows)


def architectures_table() -> str:
    """List the types of transformers' models, together those that the same meshes train as one process does."""
    proved = json.loads(MESHES.read_text("utf-8"))["architectures"]
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in sorted({name for names in proved.values() for name in names}):
        groups.setdefault(tuple(mesh for mesh in proved if name in proved[mesh]), []).append(name)
    largest_first = sorted(groups, key=lambda meshes: -len(groups[meshes]))
    rows = (("; ".join(meshes), ", ".join(f"`{name}`" for name in groups[meshes])) for meshes in largest_first)
    return table(("Meshes", "`config.model_type`"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "clients": clients_table,
    "client-hooks": client_hooks_list,
    "meshes": meshes_table,
    "mesh-refusals": mesh_refusals_table,
    "mesh-architectures": architectures_table,
    "arguments": arguments_table,
    "argument-readers": readers_table,
    "loop": loop_table,
    "hooks": hooks_table,
    "strategies": strategies_table,
    "precisions": precisions_table,
    "pairs": pairs_table,
    "devices": devices_table,
    "strategy-contract": lambda: contract_table(Strategy),
    "precision-contract": lambda: contract_table(Precision),
    "optimizers": optimizers_table,
    "renames": renames_table,
}


def fill(text: str) -> str:
    """Return a page's text with its tables rewritten."""
    return PLACE.sub(lambda found: found["start"] + TABLES[found["name"]]() + found["end"], text)


def main(*, only_checks: bool) -> int:
    """Write every page, or name the stale ones; return the exit status."""
    stale = []
    for path in sorted(DOCS.glob("**/*.md")):
        old = path.read_text(encoding="utf-8")
        new = fill(old)
        if new != old:
            stale.append(path.name)
            if not only_checks:
                path.write_text(new, encoding="utf-8")
    print(f"{'Stale' if only_checks else 'Written'}: {', '.join(stale) or 'none'}")
    return 1 if stale and only_checks else 0


if __name__ == "__main__":
    raise SystemExit(main(only_checks="--check" in sys.argv[1:]))
