"""granite-tsfm: TinyTimeMixer with its preprocessed data and its callback, in transformers' own Trainer."""

from __future__ import annotations

from typing import Any

import torch
from scripts.parts import ARGUMENTS, SeedEachStep, fit


def frame(count: int, *, seed: int) -> Any:
    """Return a table of a made-up series with two channels."""
    import pandas

    generator = torch.Generator().manual_seed(seed)
    walks = torch.randn(count, 2, generator=generator).cumsum(0).numpy()
    times = pandas.date_range("2024-01-01", periods=count, freq="h")
    return pandas.DataFrame({"time": times, "first": walks[:, 0], "second": walks[:, 1]})


def train(folder: str, **settings: Any) -> dict[str, Any]:
    """Train a forecaster."""
    from transformers import Trainer, TrainingArguments
    from tsfm_public import ForecastDFDataset, TimeSeriesPreprocessor, TinyTimeMixerConfig, TinyTimeMixerForPrediction
    from tsfm_public.toolkit.callbacks import TrackingCallback

    tool = TimeSeriesPreprocessor(
        timestamp_column="time",
        target_columns=["first", "second"],
        context_length=16,
        prediction_length=4,
        scaling=True,
        freq="h",
    ).train(frame(60, seed=1))
    data = [
        ForecastDFDataset(
            tool.preprocess(frame(count, seed=seed)),
            timestamp_column="time",
            target_columns=["first", "second"],
            context_length=16,
            prediction_length=4,
        )
        for count, seed in ((49, 1), (29, 2))
    ]
    torch.manual_seed(0)
    model = TinyTimeMixerForPrediction(
        TinyTimeMixerConfig(
            context_length=16,
            patch_length=4,
            patch_stride=4,
            num_input_channels=2,
            prediction_length=4,
            d_model=8,
            num_layers=1,
            decoder_num_layers=1,
            decoder_d_model=8,
        )
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(folder, **{**ARGUMENTS, **settings}),
        train_dataset=data[0],
        eval_dataset=data[1],
        callbacks=[SeedEachStep(), TrackingCallback()],
    )
    return fit(trainer)
