"""Recognise speech with an encoder-decoder (Whisper), evaluated by what it generates."""

from __future__ import annotations

import dataclasses
from typing import Any

import datasets
import numpy
import torch
import transformers
from support.script_parts import SPECIAL, WORDS, DataArguments, first, sentences, sounds, use, word_tokenizer
from transformers import HfArgumentParser, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed


@dataclasses.dataclass
class DataCollatorSpeechSeq2SeqWithPadding:
    """Stack the spectra and pad the labels, from which the first token is cut if all begin with it."""

    tokenizer: Any
    decoder_start_token_id: int

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        batch = {
            "input_features": torch.tensor(
                numpy.array([row["input_features"] for row in features]), dtype=torch.float32
            )
        }
        padded = self.tokenizer.pad([{"input_ids": row["labels"]} for row in features], return_tensors="pt")
        labels = padded["input_ids"].masked_fill(padded.attention_mask.ne(1), -100)
        if (labels[:, 0] == self.decoder_start_token_id).all().cpu().item():
            labels = labels[:, 1:]
        batch["labels"] = labels
        return batch


def main() -> None:
    parser = HfArgumentParser((DataArguments, Seq2SeqTrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    tokenizer = word_tokenizer()
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=8, sampling_rate=16000, hop_length=320, chunk_length=1, n_fft=400
    )
    config = transformers.WhisperConfig(
        vocab_size=len(SPECIAL) + len(WORDS), num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, dropout=0.0,
        max_source_positions=25, max_target_positions=16, pad_token_id=0, bos_token_id=2, eos_token_id=3,
        decoder_start_token_id=2, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    model.generation_config.forced_decoder_ids = None

    def load(number: int, seed: int) -> datasets.Dataset:
        return datasets.Dataset.from_dict({"audio": sounds(number, 900, seed), "text": sentences(number, 4, seed)})

    def prepare(batch):
        inputs = extractor(numpy.array(batch["audio"]), sampling_rate=16000)
        batch["input_features"] = inputs["input_features"][0]
        batch["labels"] = tokenizer(batch["text"]).input_ids
        return batch

    sets = {
        name: load(number, seed).map(prepare, remove_columns=["audio", "text"])
        for name, number, seed in (("train", 8, 0), ("eval", 4, 1))
    }

    def compute_metrics(pred):
        label_ids = numpy.where(pred.label_ids == -100, tokenizer.pad_token_id, pred.label_ids)
        found = tokenizer.batch_decode(pred.predictions, skip_special_tokens=True)
        wanted = tokenizer.batch_decode(label_ids, skip_special_tokens=True)
        return {"wer": float(numpy.mean([one != two for one, two in zip(found, wanted, strict=True)])),
                "words": sum(len(text.split()) for text in found)}  # fmt: skip

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=first(sets["train"], data_args.max_train_samples),
        eval_dataset=first(sets["eval"], data_args.max_eval_samples),
        processing_class=extractor,
        data_collator=DataCollatorSpeechSeq2SeqWithPadding(tokenizer, config.decoder_start_token_id),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    lengths = {"max_length": training_args.generation_max_length, "num_beams": training_args.generation_num_beams}
    use(trainer, evaluating=lengths, finetuned_from="tiny-whisper", tasks="automatic-speech-recognition")


if __name__ == "__main__":
    main()
