"""The documentation's examples that push to the Hub, word for word but for the import."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from support import hub_models
from support.hub_server import HubServer
from support.tiny import Net, make_arguments, make_rows

from hftrain import CheckpointError, Trainer, TrainingArguments, set_seed

# huggingface_hub's own upload of large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore:evaluation_strategy is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:tokenizer is deprecated:FutureWarning")
def test_guide_pushes_the_best_model(hub: HubServer, tmp_cwd: Path) -> None:
    import transformers

    model, tokenizer = hub_models.make_model("bert"), hub_models.make_tokenizer()
    data_collator = transformers.DataCollatorWithPadding(tokenizer)
    dataset = {"train": hub_models.make_rows("bert", 32), "test": hub_models.make_rows("bert", 8, seed=2)}

    def compute_metrics(prediction: Any) -> dict[str, float]:
        return {"accuracy": float(numpy.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}

    training_args = TrainingArguments(
        output_dir="your-model",
        learning_rate=2e-5,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        num_train_epochs=2,
        weight_decay=0.01,
        evaluation_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        push_to_hub=True,
    )

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=dataset["train"],
        eval_dataset=dataset["test"],
        tokenizer=tokenizer,
        data_collator=data_collator,
        compute_metrics=compute_metrics,
    )

    trainer.train()

    assert list(hub.repos) == ["alice/your-model"]
    assert hub.messages[-1] == "End of training"
    pushed = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "training_args.bin"}
    assert hub.repo.files.keys() == {*pushed, "README.md"}
    best = Path(trainer.state.best_model_checkpoint or "")
    assert hub.repo.files["model.safetensors"] == (best / "model.safetensors").read_bytes()
    card = hub.repo.files["README.md"].decode()
    assert "library_name: transformers" in card
    assert "| training loss | epoch | step | loss | accuracy |" in card
    reloaded = transformers.AutoModelForSequenceClassification.from_pretrained("your-model")
    assert hub_models.same_weights(reloaded, trainer.model)


def train(**options: Any) -> Trainer:
    set_seed(3)
    args = make_arguments(Path("output_dir"), save_strategy="steps", save_steps=3, max_steps=6, **options)
    return Trainer(Net(dropout=0.5), args, train_dataset=make_rows())


def download(hub: HubServer, folder: Path) -> None:
    """Do what ``hf download alice/output_dir --include 'last-checkpoint/*' --local-dir FOLDER`` does."""
    for name, content in hub.repo.files.items():
        if name.startswith("last-checkpoint/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


@pytest.mark.parametrize("where", [".", "output_dir"])
def test_run_resumes_from_the_last_checkpoint_of_the_hub(hub: HubServer, tmp_cwd: Path, where: str) -> None:
    whole = train(push_to_hub=False)
    whole.train()
    shutil.rmtree("output_dir")

    class Stopped(Exception):
        pass

    trainer = train(push_to_hub=True, hub_strategy="checkpoint")
    get_batch_samples = trainer.get_batch_samples

    def stop_after_four(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.global_step == 4:
            raise Stopped
        return get_batch_samples(*args, **kwargs)

    trainer.get_batch_samples = stop_after_four
    with pytest.raises(Stopped):
        trainer.train()
    trainer.push_in_progress.result(30)
    shutil.rmtree("output_dir")
    download(hub, tmp_cwd / where)

    trainer = train(push_to_hub=True, hub_strategy="checkpoint")
    trainer.train(resume_from_checkpoint="last-checkpoint")

    assert trainer.state.global_step == 6
    assert hub_models.same_weights(trainer.model, whole.model)
    # The documentation's other form.
    if where == "output_dir":
        train(push_to_hub=False).train(resume_from_checkpoint="output_dir/last-checkpoint")


def test_last_checkpoint_that_is_nowhere_is_refused(tmp_cwd: Path) -> None:
    with pytest.raises(CheckpointError, match="last-checkpoint"):
        train().train(resume_from_checkpoint="last-checkpoint")
