"""Recognise speech with CTC: sounds and labels of unequal lengths, padded by a collator of the script's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import datasets
import numpy
import torch
import transformers
from support.script_parts import SPECIAL, WORDS, DataArguments, first, sentences, sounds, use, word_tokenizer
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclasses.dataclass
class SpeechArguments(DataArguments):
    even: bool = dataclasses.field(default=False, metadata={"help": "Give all samples one length."})
    freeze_feature_encoder: bool = True


@dataclasses.dataclass
class DataCollatorCTCWithPadding:
    """Pad sounds and labels separately; padded labels do not count."""

    extractor: Any
    tokenizer: Any
    padding: bool | str = "longest"

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        inputs = [{"input_values": feature["input_values"]} for feature in features]
        batch = self.extractor.pad(inputs, padding=self.padding, return_tensors="pt")
        labels = self.tokenizer.pad(
            [{"input_ids": feature["labels"]} for feature in features], padding=self.padding, return_tensors="pt"
        )
        batch["labels"] = labels["input_ids"].masked_fill(labels.attention_mask.ne(1), -100)
        if "attention_mask" in batch:
            batch["attention_mask"] = batch["attention_mask"].to(torch.long)
        return batch


def main() -> None:
    data_args, training_args = HfArgumentParser((SpeechArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = word_tokenizer(pairs=False)
    extractor = transformers.Wav2Vec2FeatureExtractor(feature_size=1, return_attention_mask=True)
    config = transformers.Wav2Vec2Config(
        vocab_size=len(SPECIAL) + len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, conv_dim=(8, 8), conv_stride=(8, 4), conv_kernel=(16, 4), num_feat_extract_layers=2,
        feat_extract_norm="layer", num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0,
        apply_spec_augment=False, ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForCTC(config)
    if data_args.freeze_feature_encoder:
        model.freeze_feature_encoder()

    def load(number: int, seed: int) -> datasets.Dataset:
        texts = [text[: 2 * (3 if data_args.even else 2 + index % 3) - 1] for index, text in
                 enumerate(sentences(number, 5, seed))]  # fmt: skip
        waves = sounds(number, 640, seed)
        if not data_args.even:
            waves = [wave[: 480 + 80 * (index % 3)] for index, wave in enumerate(waves)]
        return datasets.Dataset.from_dict({"audio": waves, "text": texts})

    def prepare(batch):
        inputs = extractor(numpy.array(batch["audio"]), sampling_rate=16000)
        batch["input_values"] = inputs.input_values[0]
        batch["input_length"] = len(batch["input_values"])
        batch["labels"] = tokenizer(batch["text"]).input_ids
        return batch

    sets = {
        name: load(number, seed).map(prepare, remove_columns=["audio", "text"])
        for name, number, seed in (("train", 16, 0), ("eval", 8, 1))
    }
    sets["train"] = sets["train"].filter(lambda length: length > 100, input_columns=["input_length"])

    def preprocess_logits_for_metrics(logits, labels):
        return torch.argmax(logits, dim=-1), labels

    def compute_metrics(pred):
        found = tokenizer.batch_decode(pred.predictions[0], skip_special_tokens=True)
        ids = numpy.where(pred.predictions[1] == -100, tokenizer.pad_token_id, pred.predictions[1])
        wanted = tokenizer.batch_decode(ids, skip_special_tokens=True)
        return {"wer": float(numpy.mean([one != two for one, two in zip(found, wanted, strict=True)]))}

    trainer = Trainer(
        model=model,
        data_collator=DataCollatorCTCWithPadding(extractor, tokenizer),
        args=training_args,
        compute_metrics=compute_metrics,
        train_dataset=first(sets["train"], data_args.max_train_samples),
        eval_dataset=first(sets["eval"], data_args.max_eval_samples),
        processing_class=extractor,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    use(trainer, tasks="automatic-speech-recognition", tags=["speech"], dataset="x")


if __name__ == "__main__":
    main()
