"""The model card: a draft in `README.md` about the training; text of other authors is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hftrain.core.extras import installed_versions
from hftrain.storage.files import write_text

_BEGIN = "<!-- Written by hftrain. What stands between these two comments is replaced at each push. -->"
_END = "<!-- End of what hftrain wrote. -->"
_TAGS = ("generated_from_trainer", "hftrain")
_PACKAGES = ("hftrain", "torch", "transformers", "datasets", "tokenizers", "accelerate")
_NO_METRICS = ("runtime", "samples_per_second", "steps_per_second")


@dataclass(frozen=True, kw_only=True, slots=True)
class CardFacts:
    """The content of a model card.

    Args:
        datasets: Display names of the datasets; `dataset_args` names a part of each.
    """

    model_name: str
    library_name: str
    language: Any = None
    license: str | None = None
    tags: Sequence[str] = ()
    finetuned_from: str | None = None
    tasks: Sequence[str] = ()
    dataset_tags: Sequence[str] = ()
    datasets: Sequence[str] = ()
    dataset_args: Sequence[Any] = ()
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    log_history: Sequence[Mapping[str, Any]] = ()


def write_card(path: Path, facts: CardFacts) -> None:
    """Write a model card, or update our section of an existing one.

    Other text is kept, and so is metadata that `facts` does not provide. Tags are added to existing ones.
    """
    from huggingface_hub import ModelCard

    card = ModelCard.load(path, ignore_metadata_errors=True) if path.is_file() else ModelCard("---\n{}\n---\n")
    text = f"{_BEGIN}\n\n{_body(facts)}\n{_END}\n"
    head, begin, remainder = card.text.partition(_BEGIN)
    _, end, tail = remainder.partition(_END + "\n")
    if begin and end:
        text = head + text + tail
    elif card.text.strip():
        text = f"{card.text.rstrip()}\n\n{text}"
    _fill_metadata(card.data, facts)
    card.text = text if text.startswith("\n") else f"\n{text}"
    write_text(path, str(card))


def _fill_metadata(data: Any, facts: CardFacts) -> None:
    """Write the facts to a card's metadata; existing values are kept if none is given."""
    values = {
        "language": facts.language,
        "license": facts.license,
        "base_model": facts.finetuned_from,
        "datasets": list(facts.dataset_tags),
        "pipeline_tag": facts.tasks[0] if facts.tasks else None,
        "model_name": facts.model_name,
    }
    for name, value in values.items():
        if value:
            setattr(data, name, value)
    data.library_name = data.library_name or facts.library_name
    old_tags = [data.tags] if isinstance(data.tags, str) else data.tags or []
    data.tags = list(dict.fromkeys([*old_tags, *facts.tags, *_TAGS]))
    data.eval_results = _results(facts) or data.eval_results


def _results(facts: CardFacts) -> list[Any]:
    """Return the last evaluation in the Hub's format; empty without a task and a dataset."""
    from huggingface_hub import EvalResult

    if not facts.tasks or not (facts.datasets or facts.dataset_tags):
        return []
    names = list(facts.datasets) or list(facts.dataset_tags)
    kinds = list(facts.dataset_tags) or names
    metrics = _last_evaluation(facts.log_history)
    return [
        EvalResult(
            task_type=task,
            dataset_type=kinds[min(index, len(kinds) - 1)],
            dataset_name=name,
            dataset_args=facts.dataset_args[index] if index < len(facts.dataset_args) else None,
            metric_type=metric,
            metric_name=metric.replace("_", " ").capitalize(),
            metric_value=value,
        )
        for task in facts.tasks
        for index, name in enumerate(names)
        for metric, value in metrics.items()
        if metric != "loss"
    ]


def _body(facts: CardFacts) -> str:
    origin = "trained" if facts.finetuned_from is None else f"fine-tuned from `{facts.finetuned_from}`"
    names = list(facts.datasets) or list(facts.dataset_tags)
    described = [f"{name} ({arg})" for name, arg in zip(names, facts.dataset_args, strict=False)]
    data = " and ".join(described + names[len(described) :]) or "an unnamed dataset"
    lines = [f"# {facts.model_name}", "", f"This model was {origin} on {data}. Please check and complete this draft."]
    metrics = _last_evaluation(facts.log_history)
    if metrics:
        lines += ["", "Its last evaluation gave:", ""]
        lines += [f"- {name}: {_text(value)}" for name, value in metrics.items()]
    lines += ["", "## Training", "", "### Hyper-parameters", ""]
    lines += [f"- {name}: {_text(value)}" for name, value in facts.hyperparameters.items()]
    table = _table(facts.log_history)
    lines += ["", "### Results", "", *table] if table else []
    versions = installed_versions(*_PACKAGES)
    lines += ["", "### Framework versions", "", *(f"- {name} {number}" for name, number in versions.items()), ""]
    return "\n".join(lines)


def _table(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table with one row per evaluation, and the last training loss logged before it."""
    # Several evaluation sets have separate log entries at the same step.
    merged: dict[Any, dict[str, Any]] = {}
    loss: Any = "no log"
    for entry in history:
        loss, step = entry.get("loss", loss), entry.get("step")
        if metrics := _metrics(entry):
            row = {"training loss": loss, "epoch": entry.get("epoch"), "step": step, **metrics}
            merged.setdefault(step, {}).update(row)
    columns = list(dict.fromkeys(name for row in merged.values() for name in row))
    if not columns:
        return []
    body = [[_text(row.get(name, "")) for name in columns] for row in merged.values()]
    return [_row(columns), _row([":---:"] * len(columns)), *(_row(cells) for cells in body)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _last_evaluation(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return next((metrics for entry in reversed(history) if (metrics := _metrics(entry))), {})


def _metrics(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the evaluation metrics of a log entry, without speeds."""
    metrics = {name.removeprefix("eval_"): value for name, value in entry.items() if name.startswith("eval_")}
    return {name: value for name, value in metrics.items() if not name.endswith(_NO_METRICS)}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
