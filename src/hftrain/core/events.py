"""The training loop as pseudocode, with every event.

::

    on_init_end                                   Trainer(...) is ready
    train():
        on_train_begin
        evaluate()                                if eval_on_start
        for epoch in epochs:
            on_epoch_begin
            while micro-batches for one more step:
                on_step_begin
                for each micro-batch:
                    forward, loss, backward
                    on_substep_end                after all but the last
                clip gradients
                on_pre_optimizer_step
                optimizer step
                on_optimizer_step
                schedule step, zero gradients, step += 1
                on_step_end
                if control asks: log (on_log), evaluate (on_evaluate), save (on_save)
            on_epoch_end
            if control asks: log, evaluate, save
        on_train_end
    evaluate(): each batch: on_prediction_step; at the end on_log, then on_evaluate
    predict():  each batch: on_prediction_step; at the end on_predict
    a push to the Hub: on_push_begin before the model card is written
"""

from __future__ import annotations

EVENTS: tuple[str, ...] = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_substep_end",
    "on_step_end",
    "on_evaluate",
    "on_predict",
    "on_save",
    "on_log",
    "on_prediction_step",
    "on_push_begin",
)
