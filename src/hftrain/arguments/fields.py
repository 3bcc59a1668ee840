"""Every documented setting, grouped by concern, without behaviour."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hftrain.arguments.enums import (
    DebugOption,
    FSDPOption,
    HubStrategy,
    IntervalStrategy,
    OptimizerNames,
    SaveStrategy,
    SchedulerType,
    ShardedDDPOption,
)
from hftrain.arguments.options import flag_or_word, number_or_length, setting, several


@dataclass(kw_only=True, repr=False)
class DirectoryArguments:
    """Folders, the run's name, and flags for scripts. Source: the documented `TrainingArguments`."""

    output_dir: str | None = field(
        default=None,
        kw_only=False,
        metadata={"help": "Folder for checkpoints and predictions. Defaults to 'trainer_output'; '~' is expanded."},
    )
    overwrite_output_dir: bool = setting(False, "Write to output_dir even if it is not empty.")
    do_train: bool = setting(False, "For scripts: whether to train. The Trainer does not read it.")
    do_eval: bool = setting(False, "For scripts: whether to evaluate. Turned on if eval_strategy is not 'no'.")
    do_predict: bool = setting(False, "For scripts: whether to predict on a test set. The Trainer does not read it.")
    resume_from_checkpoint: str | None = setting(
        None,
        "'auto' resumes from the newest valid checkpoint in output_dir, or starts from the beginning if there is "
        "none. The Trainer ignores any other value: scripts can store the folder here that they pass to train().",
    )
    run_name: str | None = setting(None, "Name of the run in experiment trackers. Defaults to output_dir.")


@dataclass(kw_only=True, repr=False)
class EvaluationArguments:
    """Evaluation. Source: the documented `TrainingArguments`."""

    eval_strategy: IntervalStrategy | str = setting(
        "no", "When to evaluate during training: 'no', 'steps' (every eval_steps, and at the end) or 'epoch'."
    )
    eval_steps: float | None = setting(
        None,
        "Optimizer steps between evaluations. Below 1: a fraction of all steps; -1: only at the end. Defaults to "
        "logging_steps.",
        number_or_length,
    )
    eval_delay: float | None = setting(0, "Epochs or steps (the unit of eval_strategy) before the first evaluation.")
    eval_accumulation_steps: int | None = setting(
        None,
        "Prediction batches to keep on the device before moving them to the CPU. None moves all of them at the end.",
    )
    eval_do_concat_batches: bool = setting(
        True, "Concatenate the outputs of all batches; otherwise return one item per batch."
    )
    eval_on_start: bool = setting(False, "Evaluate once before the first training step.")
    eval_use_gather_object: bool | None = setting(False, "Gather nested non-tensor objects from all processes.")
    batch_eval_metrics: bool = setting(
        False,
        "Call compute_metrics for each batch, with compute_result=True for the last one, and keep no predictions.",
    )
    prediction_loss_only: bool = setting(False, "Return only the loss from evaluation and prediction.")
    include_for_metrics: list[str] = setting(
        list, "What to pass to compute_metrics in addition to predictions and labels: 'inputs', 'loss'."
    )
    label_names: list[str] | None = setting(
        None,
        "Input keys that are labels. Defaults to the arguments of the model's forward whose names contain 'label'.",
    )
    past_index: int = setting(-1, "Index of the output to pass to the next step as `mems`; -1 for none.")
    use_legacy_prediction_loop: bool = setting(False, "Refused: evaluation_loop has the same results.")
    jit_mode_eval: bool = setting(False, "Trace the model with torch.jit before evaluating.")
    bf16_full_eval: bool = setting(False, "Evaluate entirely in bfloat16.")
    fp16_full_eval: bool = setting(False, "Evaluate entirely in float16.")
    evaluation_strategy: IntervalStrategy | str | None = setting(None, "Old name of eval_strategy.")
    include_inputs_for_metrics: bool = setting(False, "Old form of include_for_metrics=['inputs'].")


@dataclass(kw_only=True, repr=False)
class BatchArguments:
    """Batch sizes and duration. Source: the documented `TrainingArguments`."""

    per_device_train_batch_size: int = setting(8, "Training samples per device and micro-batch.")
    per_device_eval_batch_size: int = setting(8, "Evaluation samples per device and batch.")
    gradient_accumulation_steps: int = setting(1, "Micro-batches per optimizer step.")
    num_train_epochs: float = setting(
        3.0, "Passes over the training data. A fractional value stops within the last one.", number_or_length
    )
    max_steps: int = setting(
        -1, "Optimizer steps to train for. If positive, overrides num_train_epochs.", number_or_length
    )
    auto_find_batch_size: bool | str = setting(
        False,
        "If memory runs out, split each batch into more micro-batches without changing the training result. "
        "'smaller_batch' restarts with half the batch size instead.",
        flag_or_word,
    )
    torch_empty_cache_steps: int | None = setting(
        None, "Empty the device's memory cache every this many optimizer steps; None never does."
    )
    average_tokens_across_devices: bool | None = setting(
        True,
        "Average the loss over the items of all processes, so that the mean is exact if ranks hold different "
        "numbers of items.",
    )
    per_gpu_train_batch_size: int | None = setting(None, "Old name of per_device_train_batch_size.")
    per_gpu_eval_batch_size: int | None = setting(None, "Old name of per_device_eval_batch_size.")


@dataclass(kw_only=True, repr=False)
class OptimizationArguments:
    """Optimizer and schedule. Source: the documented `TrainingArguments`."""

    learning_rate: float = setting(5e-5, "Base learning rate of the optimizer.")
    weight_decay: float = setting(0.0, "Weight decay; not applied to nn.LayerNorm, and by name to biases and norms.")
    adam_beta1: float = setting(0.9, "Adam's beta1, the decay rate of the first moment.")
    adam_beta2: float = setting(0.999, "Adam's beta2, the decay rate of the second moment.")
    adam_epsilon: float = setting(1e-8, "Adam's epsilon.")
    max_grad_norm: float = setting(1.0, "Maximum global norm for gradient clipping; 0 or None disables clipping.")
    optim: OptimizerNames | str = setting("adamw_torch", "Name of the optimizer.")
    optim_args: str | None = setting(None, "Additional arguments of the optimizer, as 'name=value, name=value'.")
    optim_target_modules: list[str] | str | None = setting(
        None,
        "Linear modules that a low-rank optimizer applies to: names, a regular expression, or 'all-linear'.",
        several,
    )
    lr_scheduler_type: SchedulerType | str = setting("linear", "Name of the learning-rate schedule.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(
        dict, "Additional arguments of the schedule: a dict or JSON text."
    )
    warmup_ratio: float = setting(0.0, "Fraction of all optimizer steps for which the learning rate rises from 0.")
    warmup_steps: float = setting(
        0,
        "Optimizer steps of warmup. Below 1: a fraction of all steps. If positive, overrides warmup_ratio.",
        number_or_length,
    )
    label_smoothing_factor: float = setting(
        0.0, "Label smoothing: the probability that is spread evenly over all labels."
    )
    neftune_noise_alpha: float | None = setting(
        None, "Scale of the NEFTune noise that is added to embeddings during training."
    )
    adafactor: bool = setting(False, "Old form of optim='adafactor'.")


@dataclass(kw_only=True, repr=False)
class ReportingArguments:
    """Logging and reporting. Source: the documented `TrainingArguments`."""

    log_level: str = setting(
        "passive",
        "Log level of main processes: debug, info, warning, error or critical; passive leaves the level as it is.",
    )
    log_level_replica: str = setting("warning", "Log level of all other processes; same choices as log_level.")
    log_on_each_node: bool = setting(
        True, "Treat the first process of every node as a main process, instead of only that of node 0."
    )
    logging_dir: str | None = setting(None, "TensorBoard folder. Defaults to a dated folder below output_dir/runs.")
    logging_strategy: IntervalStrategy | str = setting("steps", "When to log: 'no', 'steps' or 'epoch'.")
    logging_first_step: bool = setting(False, "Also log after the first optimizer step.")
    logging_steps: float = setting(
        500,
        "Optimizer steps between logs. Below 1: a fraction of all steps; -1: only at the end.",
        number_or_length,
    )
    logging_nan_inf_filter: bool = setting(
        True, "Replace NaN and infinite losses in the log with the mean of the finite ones since the last log."
    )
    report_to: list[str] | str | None = setting(
        None, "Experiment trackers to report to, 'all' or 'none'. Defaults to all that are installed.", several
    )
    disable_tqdm: bool | None = setting(
        None, "Hide the progress bars. None hides them if the log level is above warning."
    )
    skip_memory_metrics: bool = setting(True, "Do not measure memory use.")
    include_tokens_per_second: bool | None = setting(False, "Report tokens per second and device.")
    include_num_input_tokens_seen: bool | str = setting(
        False, "Count input tokens: True or 'all', 'non_padding', False or 'no'.", flag_or_word
    )
    debug: str | list[DebugOption] = setting("", "Debug modes: 'underflow_overflow', 'tpu_metrics_debug'.")
    project: str = setting("huggingface", "Trackio project.")
    trackio_space_id: str | None = setting("trackio", "Space that Trackio syncs to.")
    tpu_metrics_debug: bool = setting(False, "Old form of debug='tpu_metrics_debug'.")
    trackio_bucket_id: str | None = setting(
        None, "Bucket in which Trackio's Space stores its data; None leaves the choice to Trackio."
    )
    # transformers' argument parser can only read the types in this order.
    trackio_static_space_id: str | None | Literal[False] = setting(  # noqa: RUF036
        None, "Static Space to publish after the run; None or False publishes none."
    )


@dataclass(kw_only=True, repr=False)
class SavingArguments:
    """Saving. Source: the documented `TrainingArguments`."""

    save_strategy: SaveStrategy | str = setting("steps", "When to save checkpoints: 'no', 'steps', 'epoch' or 'best'.")
    save_steps: float = setting(
        500,
        "Optimizer steps between checkpoints. Below 1: a fraction of all steps; -1: never save.",
        number_or_length,
    )
    save_total_limit: int | None = setting(
        None, "Number of checkpoints to keep. Older ones are deleted, except the best one. None, 0 and -1 keep all."
    )
    save_safetensors: bool | None = setting(True, "Write safetensors files instead of pickled state dicts.")
    save_on_each_node: bool = setting(False, "Save on every node. Do not use it if the nodes share storage.")
    save_only_model: bool = setting(
        False, "Do not save the state of optimizer, schedule and random generators. Such a run cannot be resumed."
    )
    enable_jit_checkpoint: bool = setting(
        False, "Save on SIGTERM. Has no effect: every run that saves checkpoints does this."
    )
    restore_callback_states_from_checkpoint: bool = setting(
        False, "When resuming, replace callbacks with those saved in the checkpoint."
    )
    load_best_model_at_end: bool | None = setting(False, "Load the best checkpoint at the end of training.")
    metric_for_best_model: str | None = setting(
        None,
        "Metric that ranks checkpoints, with or without the prefix 'eval_'. Defaults to 'loss' with "
        "load_best_model_at_end.",
    )
    greater_is_better: bool | None = setting(
        None, "Whether a larger metric is better. Defaults to True unless the metric's name ends in 'loss'."
    )
    ignore_data_skip: bool = setting(False, "When resuming, do not skip the batches that were already used.")


@dataclass(kw_only=True, repr=False)
class DeviceArguments:
    """Devices, seeds and determinism. Source: the documented `TrainingArguments`."""

    use_cpu: bool = setting(False, "Use the CPU even if an accelerator is available.")
    seed: int = setting(42, "Random seed, set at the start of training.")
    data_seed: int | None = setting(None, "Random seed of the data samplers. Defaults to seed.")
    full_determinism: bool = setting(False, "Use deterministic algorithms. Slow; for debugging.")
    tf32: bool | None = setting(None, "Allow TF32 matrix multiplication; None leaves torch's setting.")
    tpu_num_cores: int | None = setting(None, "Number of TPU cores; set by the TPU launcher.")
    mp_parameters: str = setting("", "SageMaker model-parallel parameters; set by the SageMaker launcher.")
    no_cuda: bool = setting(False, "Old name of use_cpu.")
    use_mps_device: bool = setting(False, "No longer needed: MPS is used if it is available.")


@dataclass(kw_only=True, repr=False)
class DistributionArguments:
    """Distributed training and its engines. Source: the documented `TrainingArguments`."""

    local_rank: int = setting(-1, "Rank of this process on its node; set by the launcher.")
    ddp_backend: str | None = setting(None, "Communication backend, such as 'nccl' or 'gloo'.")
    ddp_find_unused_parameters: bool | None = setting(
        None,
        "find_unused_parameters of DistributedDataParallel. None uses the default of a strategy that is chosen by "
        "name; without a name, it means True, but False for a TaskModule and with gradient checkpointing.",
    )
    ddp_bucket_cap_mb: int | None = setting(None, "bucket_cap_mb of DistributedDataParallel, in MiB.")
    ddp_broadcast_buffers: bool | None = setting(
        None,
        "broadcast_buffers of DistributedDataParallel. None means False with gradient checkpointing, otherwise True.",
    )
    ddp_static_graph: bool | None = setting(
        None, "static_graph of DistributedDataParallel: every micro-batch runs the same operations."
    )
    ddp_timeout: int = setting(1800, "Timeout of collective operations in seconds.")
    fsdp: list[FSDPOption] | str | None = setting(
        "", "FSDP sharding strategy, optionally with 'offload' and 'auto_wrap'.", several
    )
    fsdp_config: dict[str, Any] | str | None = setting(
        None, "FSDP settings: a dict, JSON text or the path of a JSON file."
    )
    deepspeed: dict[str, Any] | str | None = setting(
        None, "DeepSpeed configuration: a dict, JSON text or the path of a JSON file."
    )
    accelerator_config: dict[str, Any] | str | None = setting(
        None,
        "How data loaders are shared between processes: a dict, JSON text, an AcceleratorConfig or the path of a "
        "JSON file. The attribute becomes an AcceleratorConfig; the Trainer reads the file.",
    )
    parallelism_config: Any = setting(None, "accelerate's ParallelismConfig.")
    ray_scope: str | None = setting("last", "Which of a trial's results Ray Tune compares.")
    xpu_backend: str | None = setting(None, "Old name of ddp_backend.")
    sharded_ddp: list[ShardedDDPOption] | str | None = setting("", "FairScale sharding; use fsdp instead.", several)
    fsdp_min_num_params: int = setting(0, "Old form of fsdp_config={'min_num_params': ...}.")
    fsdp_transformer_layer_cls_to_wrap: str | None = setting(
        None, "Old form of fsdp_config={'transformer_layer_cls_to_wrap': ...}."
    )


@dataclass(kw_only=True, repr=False)
class PrecisionArguments:
    """Precision, compilation and memory. Source: the documented `TrainingArguments`."""

    bf16: bool = setting(False, "Mixed precision with bfloat16.")
    fp16: bool = setting(False, "Mixed precision with float16 and loss scaling.")
    fp16_opt_level: str = setting("O1", "Apex optimization level, O0 to O3. Has no effect.")
    half_precision_backend: str = setting("auto", "Backend of mixed precision: 'auto', 'cuda_amp' or 'cpu_amp'.")
    use_ipex: bool = setting(False, "Intel Extension for PyTorch. Raises an error: Intel has discontinued it.")
    torch_compile: bool = setting(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = setting(None, "Backend of torch.compile; also turns on torch_compile.")
    torch_compile_mode: str | None = setting(None, "Mode of torch.compile; also turns on torch_compile.")
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Arguments of the model's gradient_checkpointing_enable: a dict or JSON text."
    )
    activation_checkpointing: bool | None = setting(None, "Alias of gradient_checkpointing; takes precedence over it.")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Alias of gradient_checkpointing_kwargs; takes precedence over it."
    )
    use_cache: bool | None = setting(
        None, "Set the model's config.use_cache, also for generation; None: off while training or evaluating."
    )
    use_liger_kernel: bool | None = setting(False, "Replace parts of the model with Liger kernels.")
    liger_kernel_config: dict[str, bool] | str | None = setting(
        None, "Which Liger kernels to use: a dict or JSON text."
    )
    fp16_backend: str = setting("auto", "Old name of half_precision_backend.")
    torchdynamo: str | None = setting(None, "Old name of torch_compile_backend.")


@dataclass(kw_only=True, repr=False)
class DataArguments:
    """Data loading. Source: the documented `TrainingArguments`."""

    dataloader_drop_last: bool = setting(False, "Drop the last batch if it is incomplete.")
    dataloader_num_workers: int = setting(0, "Data loader workers per rank; 0 loads in the training process.")
    dataloader_pin_memory: bool = setting(True, "Load batches into pinned memory. Turned off by use_cpu.")
    dataloader_persistent_workers: bool = setting(False, "Keep data loader workers alive between epochs.")
    dataloader_prefetch_factor: int | None = setting(None, "Batches that each data loader worker prefetches.")
    dataloader_timeout: float = setting(0, "Seconds to wait for a batch from a worker; 0 waits indefinitely.")
    dataloader_multiprocessing_context: str | None = setting(
        None, "Start method of workers: 'fork', 'spawn' or 'forkserver'; None uses Python's default."
    )
    dataloader_in_order: bool = setting(
        True, "Return batches in order. False raises an error, because a run could not be resumed exactly."
    )
    train_sampling_strategy: str = setting(
        "random", "Order of the training data: 'random', 'sequential' or 'group_by_length'."
    )
    remove_unused_columns: bool | None = setting(
        True, "Drop dataset columns that the model's forward does not accept; with a task, text columns."
    )
    group_by_length: bool = setting(False, "Put samples of similar length in the same batch.")
    length_column_name: str | None = setting("length", "Dataset column that contains the lengths for group_by_length.")


@dataclass(kw_only=True, repr=False)
class HubArguments:
    """The Hub. Source: the documented `TrainingArguments`."""

    push_to_hub: bool = setting(False, "Push the model to the Hub each time it is saved.")
    hub_model_id: str | None = setting(
        None, "Repository on the Hub. Defaults to the name of output_dir in the user's namespace."
    )
    hub_strategy: HubStrategy | str = setting(
        "every_save", "What to push and when: 'end', 'every_save', 'checkpoint' or 'all_checkpoints'."
    )
    hub_token: str | None = setting(None, "Access token. Defaults to the stored login.", repr=False)
    hub_private_repo: bool | None = setting(None, "Make a new repository private; None uses the owner's default.")
    hub_always_push: bool = setting(False, "Push even if the previous push has not finished.")
    hub_revision: str | None = setting(None, "Branch, tag or commit to push to.")
    push_to_hub_model_id: str | None = setting(None, "Old form of hub_model_id.")
    push_to_hub_organization: str | None = setting(None, "Old form of the owner in hub_model_id.")
    push_to_hub_token: str | None = setting(None, "Old name of hub_token.", repr=False)


# Dataclasses collect fields from the last base to the first: directories come first.
@dataclass(repr=False)
class ArgumentFields(
    HubArguments,
    DataArguments,
    PrecisionArguments,
    DistributionArguments,
    DeviceArguments,
    SavingArguments,
    ReportingArguments,
    OptimizationArguments,
    BatchArguments,
    EvaluationArguments,
    DirectoryArguments,
):
    """Every documented setting, grouped by concern in the bases."""

    # Settings that may be given as JSON text; a subclass's list adds its own to these.
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        "accelerator_config",
        "fsdp_config",
        "deepspeed",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
        "lr_scheduler_kwargs",
        "liger_kernel_config",
    ]
