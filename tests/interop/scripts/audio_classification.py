"""Classify sounds, cut at random to one length."""

from __future__ import annotations

import datasets
import numpy
import transformers
from support.script_parts import DataArguments, first, sounds, use
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

LENGTH = 400


def load(number: int, seed: int) -> datasets.Dataset:
    rows = {"audio": sounds(number, LENGTH, seed), "label": [index % 2 for index in range(number)]}
    return datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=["low", "high"]))


def small(**options):
    return transformers.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, conv_dim=(8, 8),
        conv_stride=(8, 4), conv_kernel=(16, 4), num_feat_extract_layers=2, feat_extract_norm="layer",
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, hidden_dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
        classifier_proj_size=8, **options,
    )  # fmt: skip


def main() -> None:
    data_args, training_args = HfArgumentParser((DataArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    raw = datasets.DatasetDict(train=load(16, 0), eval=load(8, 1))
    feature_extractor = transformers.Wav2Vec2FeatureExtractor(feature_size=1, sampling_rate=16000, padding_value=0.0)
    model_input_name = feature_extractor.model_input_names[0]
    labels = raw["train"].features["label"].names
    model = transformers.Wav2Vec2ForSequenceClassification(small(
        num_labels=len(labels), label2id={name: str(index) for index, name in enumerate(labels)},
        id2label={str(index): name for index, name in enumerate(labels)},
    ))  # fmt: skip
    model.freeze_feature_encoder()

    def transforms(batch):
        inputs = feature_extractor([numpy.array(audio) for audio in batch["audio"]], sampling_rate=16000)
        return {model_input_name: inputs.get(model_input_name), "labels": list(batch["label"])}

    def compute_metrics(eval_pred):
        predictions = numpy.argmax(eval_pred.predictions, axis=1)
        return {"accuracy": float((predictions == eval_pred.label_ids).mean())}

    training_args.remove_unused_columns = False
    train_dataset = first(raw["train"], data_args.max_train_samples)
    train_dataset.set_transform(transforms, output_all_columns=False)
    raw["eval"].set_transform(transforms, output_all_columns=False)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=raw["eval"],
        compute_metrics=compute_metrics,
        processing_class=feature_extractor,
    )
    use(trainer, tasks="audio-classification")


if __name__ == "__main__":
    main()
