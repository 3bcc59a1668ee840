"""The clients: which library, in which environment, what of it is compared, and what is known to differ."""

from __future__ import annotations

from dataclasses import dataclass

ENVIRONMENTS = ("current", "previous", "pylate", "llamafactory", "axolotl", "swift")

# Weights whose gradient is only rounding: softmax does not change if all keys move together. Adam makes steps of it.
NO_GRADIENT = ("*.attention.self.key.bias",)


@dataclass(frozen=True)
class Client:
    """A trainer of a library, as one of the `scripts` trains it.

    Args:
        environment: Where it is installed, as requirements-ENVIRONMENT.txt says.
        library: The distribution's name.
        script: The module and the function.
        what: What the function trains, for the table.
        ignored: Patterns of logged names, and names of files, that are not compared.
        returned_only: Such names in what an evaluation returns.
        exception: What they are, for the table.
        accumulation: The numbers of micro-batches in a step.
        apart: Those with which the weights differ, for the reason that `exception` gives.
    """

    environment: str
    library: str
    script: str
    what: str = ""
    ignored: tuple[str, ...] = ()
    returned_only: tuple[str, ...] = ()
    exception: str = ""
    accumulation: tuple[int, ...] = (1, 2)
    apart: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.environment}-{self.script}"


def trl(script: str, what: str = "", *, environment: str = "current", truncated: bool = False) -> Client:
    ignored, exception = (("rewards/*", "logps/*"), REWARDS) if truncated else ((), "")
    return Client(environment, "trl", f"trl_texts.{script}", what, ignored, (), exception)


def generating(script: str, what: str = "") -> Client:
    return Client("current", "trl", f"trl_online.{script}", what, ignored=("eval_*",), exception=ANSWERS)


def sentences(script: str, what: str = "") -> Client:
    return Client("current", "sentence-transformers", script, what, returned_only=("epoch",), exception=EPOCH)


def factory(stage: str, what: str = "", *, per_token: bool = False) -> Client:
    ignored, exception = (("eval_loss",), TOKENS) if per_token else ((), "")
    script = f"llamafactory_stages.{stage}"
    return Client("llamafactory", "llamafactory", script, what or f"stage `{stage}`", ignored, (), exception)


def swift(script: str, what: str = "", *, per_token: bool = False) -> Client:
    ignored, exception = (("eval_loss",), TOKENS) if per_token else ((), "")
    return Client("swift", "ms-swift", f"swift_stages.{script}", what or f"stage `{script}`", ignored, (), exception)


def axolotl(script: str, what: str = "") -> Client:
    return Client(
        "axolotl", "axolotl", f"axolotl_configs.{script}", what, ("eval_*", "tokens/*", "tokens_state.json"), (), FIRST
    )


FIRST = "`eval_loss` is a mean over tokens; `tokens_state.json` is missing in checkpoints"
TOKENS = "`eval_loss` is a mean over tokens"
REWARDS = "logged `rewards/` and `logps/` of a step with a short batch"
UNEVEN = "`eval_loss` is a mean over series"
SUMMED = "transformers sums the losses of a step"
HALVED = "`grad_norm` with accumulation"
UNCLIPPED = "no `grad_norm` with `max_grad_norm=0`"
ANSWERS = "answers generated in evaluations differ"
EPOCH = "`evaluate()` also returns the epoch"

CLIENTS = (
    trl("sft"),
    trl("sft_answers", "loss of the answers only"),
    trl("sft_packing", "packed texts"),
    trl("sft_lora", "LoRA"),
    trl("dpo"),
    trl("dpo_lora", "LoRA"),
    trl("kto"),
    trl("kto_lora", "LoRA"),
    trl("orpo", truncated=True),
    trl("cpo", truncated=True),
    trl("gkd"),
    trl("reward"),
    trl("reward_lora", "LoRA"),
    generating("grpo"),
    generating("grpo_lora", "LoRA"),
    generating("rloo"),
    generating("rloo_lora", "LoRA"),
    sentences("sentence_transformer.train", "loss with weights of its own"),
    sentences("sentence_pairs.train"),
    sentences("cross_encoder.train"),
    sentences("sparse_encoder.train"),
    Client("current", "setfit", "setfit_text.train", accumulation=(1,)),
    Client("axolotl", "FlagEmbedding", "flag_embedding.embedder"),
    Client("axolotl", "FlagEmbedding", "flag_embedding.m3"),
    Client("axolotl", "FlagEmbedding", "flag_embedding.reranker"),
    Client("current", "chronos-forecasting", "chronos_series.train", "`fit`", ("eval_loss",), (), UNEVEN),
    Client(
        "current",
        "chronos-forecasting",
        "chronos_series.lora",
        "`fit`, LoRA",
        ("eval_loss",),
        (),
        UNEVEN,
    ),
    Client("current", "mlflow", "mlflow_runs.train", "`mlflow.transformers.autolog()`", exception=SUMMED, apart=(2,)),
    Client("previous", "adapters", "adapters_text.train", exception=SUMMED, apart=(2,)),
    Client("previous", "span-marker", "span_marker_text.train", "evaluated in one batch", exception=SUMMED, apart=(2,)),
    Client("axolotl", "gliner", "gliner_text.train"),
    Client("current", "granite-tsfm", "granite_series.train", "TinyTimeMixer"),
    Client(
        "current", "opacus", "opacus_private.train", "`loss_is_scaled_for_ga = True`", ("grad_norm",), (), UNCLIPPED
    ),
    Client("pylate", "pylate", "pylate_pairs.train", "ColBERT", ("grad_norm",), ("epoch",), f"{HALVED}; {EPOCH}"),
    factory("sft", per_token=True),
    factory("sft_lora", "stage `sft`, LoRA", per_token=True),
    factory("pt", per_token=True),
    factory("dpo"),
    factory("kto"),
    factory("rm"),
    axolotl("completion"),
    axolotl("packing", "packed texts"),
    axolotl("lora", "LoRA"),
    axolotl("dpo", "`rl: dpo`"),
    swift("sft", per_token=True),
    swift("sft_lora", "stage `sft`, LoRA", per_token=True),
    swift("epochs", "`max_epochs=1` of 4", per_token=True),
    swift("dpo"),
    swift("kto"),
    Client("axolotl", "trl", "trl_texts.prm", exception=SUMMED, apart=(2,)),
    trl("bco", environment="axolotl"),
)
