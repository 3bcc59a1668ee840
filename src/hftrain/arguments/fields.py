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


def setting(default: Any, text: str, **more: Any) -> Any:
    """Return a dataclass field with its help text; a class as default is called for each instance."""
    kind = "default_factory" if isinstance(default, type) else "default"
    return field(metadata={"help": text}, **{kind: default}, **more)


@dataclass(kw_only=True, repr=False)
class DirectoryArguments:
    """Folders, the run's name, and flags for scripts. Source: the documented `TrainingArguments`."""

    output_dir: str | None = field(
        default=None,
        kw_only=False,
        metadata={"help": "Folder for checkpoints and predictions; 'trainer_output' if not given, '~' is expanded."},
    )
    overwrite_output_dir: bool = setting(False, "Write into output_dir although it is not empty.")
    do_train: bool = setting(False, "For scripts: whether to train. The Trainer does not read it.")
    do_eval: bool = setting(False, "For scripts: whether to evaluate; on as soon as eval_strategy is not 'no'.")
    do_predict: bool = setting(False, "For scripts: whether to predict on a test set. The Trainer does not read it.")
    resume_from_checkpoint: str | None = setting(
        None,
        "For scripts: the checkpoint folder to hand to train(). The Trainer itself reads it only if it is 'auto': "
        "resume the newest valid checkpoint in output_dir if there is one, else start from the beginning.",
    )
    run_name: str | None = setting(None, "The run's label in experiment trackers; output_dir if not given.")


@dataclass(kw_only=True, repr=False)
class EvaluationArguments:
    """Evaluation. Source: the documented `TrainingArguments`."""

    eval_strategy: IntervalStrategy | str = setting(
        "no", "When to evaluate while training: 'no', 'steps' (every eval_steps) or 'epoch'."
    )
    eval_steps: float | None = setting(
        None,
        "Optimizer updates between two evaluations, or below 1 a share of all; -1: at the end only; not given: "
        "logging_steps.",
    )
    eval_delay: float | None = setting(
        0, "Epochs or steps (following eval_strategy) to train before the first evaluation."
    )
    eval_accumulation_steps: int | None = setting(
        None, "Prediction batches to keep on the device before moving them to the CPU; None moves all at the end."
    )
    eval_do_concat_batches: bool = setting(True, "Join the outputs of all batches; otherwise keep one item per batch.")
    eval_on_start: bool = setting(False, "Evaluate once before the first training step.")
    eval_use_gather_object: bool | None = setting(False, "Gather nested non-tensor objects from all processes.")
    batch_eval_metrics: bool = setting(
        False, "Call compute_metrics per batch, with compute_result=True at the last, and keep no predictions."
    )
    prediction_loss_only: bool = setting(False, "Return only the loss from evaluation and prediction.")
    include_for_metrics: list[str] = setting(
        list, "What compute_metrics gets besides predictions and labels: 'inputs', 'loss'."
    )
    label_names: list[str] | None = setting(
        None, "Input keys that are labels; the arguments of the model's forward named like 'label' if not given."
    )
    past_index: int = setting(-1, "Position of the output that is fed back as `mems` at the next step; -1 for none.")
    use_legacy_prediction_loop: bool = setting(False, "Evaluate through prediction_loop instead of evaluation_loop.")
    jit_mode_eval: bool = setting(False, "Trace the model with torch.jit before evaluating.")
    bf16_full_eval: bool = setting(False, "Evaluate entirely in bfloat16.")
    fp16_full_eval: bool = setting(False, "Evaluate entirely in float16.")
    evaluation_strategy: IntervalStrategy | str | None = setting(None, "Old name of eval_strategy.")
    include_inputs_for_metrics: bool = setting(False, "Old form of include_for_metrics=['inputs'].")


@dataclass(kw_only=True, repr=False)
class BatchArguments:
    """Batch sizes and duration. Source: the documented `TrainingArguments`."""

    per_device_train_batch_size: int = setting(8, "Training samples per device and micro-step.")
    per_device_eval_batch_size: int = setting(8, "Evaluation samples per device and batch.")
    gradient_accumulation_steps: int = setting(1, "Micro-steps per optimizer update.")
    num_train_epochs: float = setting(3.0, "Passes over the training data; a fraction stops inside the last one.")
    max_steps: int = setting(-1, "Optimizer updates to train for; wins over num_train_epochs when positive.")
    auto_find_batch_size: bool | str = setting(
        False,
        "When memory runs out, split the batches into more micro-steps and keep the step as it is; "
        "'smaller_batch' starts again with batches of half the size instead.",
    )
    torch_empty_cache_steps: int | None = setting(
        None, "Optimizer updates between two releases of the device's cached memory; None never does."
    )
    average_tokens_across_devices: bool | None = setting(
        True, "Count the loss's items over all processes: exact means when ranks hold unequal numbers."
    )
    per_gpu_train_batch_size: int | None = setting(None, "Old name of per_device_train_batch_size.")
    per_gpu_eval_batch_size: int | None = setting(None, "Old name of per_device_eval_batch_size.")


@dataclass(kw_only=True, repr=False)
class OptimizationArguments:
    """Optimizer and schedule. Source: the documented `TrainingArguments`."""

    learning_rate: float = setting(5e-5, "The optimizer's base learning rate.")
    weight_decay: float = setting(0.0, "Decay of all weights but biases and normalization weights.")
    adam_beta1: float = setting(0.9, "Adam's first-moment decay.")
    adam_beta2: float = setting(0.999, "Adam's second-moment decay.")
    adam_epsilon: float = setting(1e-8, "Adam's epsilon.")
    max_grad_norm: float = setting(1.0, "Global gradient norm to clip to; 0 or None does not clip.")
    optim: OptimizerNames | str = setting("adamw_torch", "The optimizer's name.")
    optim_args: str | None = setting(None, "Extra optimizer arguments as 'name=value, name=value'.")
    optim_target_modules: list[str] | str | None = setting(
        None, "Linear modules that a low-rank optimizer treats: names, a regular expression, or 'all-linear'."
    )
    lr_scheduler_type: SchedulerType | str = setting("linear", "The learning-rate schedule's name.")
    lr_scheduler_kwargs: dict[str, Any] | str | None = setting(
        dict, "Extra arguments of the schedule, a dict or JSON text."
    )
    warmup_ratio: float = setting(0.0, "Share of all optimizer updates during which the learning rate rises from 0.")
    warmup_steps: float = setting(
        0, "Optimizer updates of warmup, or below 1 their share of all; wins over warmup_ratio when positive."
    )
    label_smoothing_factor: float = setting(0.0, "Probability moved from the true label to all labels alike.")
    neftune_noise_alpha: float | None = setting(None, "Strength of uniform noise on embeddings while training.")
    adafactor: bool = setting(False, "Old form of optim='adafactor'.")


@dataclass(kw_only=True, repr=False)
class ReportingArguments:
    """Logging and reporting. Source: the documented `TrainingArguments`."""

    log_level: str = setting(
        "passive", "Level on main processes: debug, info, warning, error, critical; passive leaves it alone."
    )
    log_level_replica: str = setting("warning", "Level on all other processes; choices as log_level.")
    log_on_each_node: bool = setting(True, "Treat the first process of every node as main, not only node 0's.")
    logging_dir: str | None = setting(None, "TensorBoard folder; a dated folder below output_dir/runs if not given.")
    logging_strategy: IntervalStrategy | str = setting("steps", "When to log: 'no', 'steps' or 'epoch'.")
    logging_first_step: bool = setting(False, "Also log after the first optimizer update.")
    logging_steps: float = setting(
        500, "Optimizer updates between two logs, or below 1 a share of all; -1: at the end only."
    )
    logging_nan_inf_filter: bool = setting(True, "Log the window's mean loss in place of NaN and infinity.")
    report_to: list[str] | str | None = setting(
        None, "Experiment trackers to report to, 'all' or 'none'; not given: all."
    )
    disable_tqdm: bool | None = setting(None, "Show no progress bars; None follows the log level.")
    skip_memory_metrics: bool = setting(True, "Do not measure memory.")
    include_tokens_per_second: bool | None = setting(False, "Report tokens per second and device.")
    include_num_input_tokens_seen: bool | str = setting(
        False, "Count input tokens: True or 'all', 'non_padding', False or 'no'."
    )
    debug: str | list[DebugOption] = setting("", "What to watch: 'underflow_overflow', 'tpu_metrics_debug'.")
    project: str = setting("huggingface", "Project name for Trackio.")
    trackio_space_id: str | None = setting("trackio", "Space that Trackio synchronises with.")
    tpu_metrics_debug: bool = setting(False, "Old form of debug='tpu_metrics_debug'.")
    trackio_bucket_id: str | None = setting(
        None, "Bucket that Trackio's Space keeps its data in; None is Trackio's own choice."
    )
    # In this order, which transformers' parser of arguments can read.
    trackio_static_space_id: str | None | Literal[False] = setting(  # noqa: RUF036
        None, "Static Space that shows the run once it has ended; None or False makes none."
    )


@dataclass(kw_only=True, repr=False)
class SavingArguments:
    """Saving. Source: the documented `TrainingArguments`."""

    save_strategy: SaveStrategy | str = setting("steps", "When to save: 'no', 'steps', 'epoch' or 'best'.")
    save_steps: float = setting(
        500, "Optimizer updates between two checkpoints, or below 1 a share of all; -1: never save."
    )
    save_total_limit: int | None = setting(
        None, "Checkpoints to keep; older ones are deleted, the best one never. None keeps all."
    )
    save_safetensors: bool | None = setting(True, "Write safetensors files instead of pickled state dicts.")
    save_on_each_node: bool = setting(False, "Save on every node; never with storage that the nodes share.")
    save_only_model: bool = setting(False, "Save no optimizer, schedule or random state; such a run cannot be resumed.")
    enable_jit_checkpoint: bool = setting(False, "Save on SIGTERM; every run that saves checkpoints does so anyway.")
    restore_callback_states_from_checkpoint: bool = setting(
        False, "On resume, replace callbacks by those saved in the checkpoint."
    )
    load_best_model_at_end: bool | None = setting(False, "Load the best checkpoint when training ends.")
    metric_for_best_model: str | None = setting(
        None, "Metric that ranks checkpoints, with or without 'eval_'; 'loss' with load_best_model_at_end."
    )
    greater_is_better: bool | None = setting(None, "Whether a larger metric is better; unless it ends in 'loss'.")
    ignore_data_skip: bool = setting(False, "On resume, do not skip the data already seen.")


@dataclass(kw_only=True, repr=False)
class DeviceArguments:
    """Devices, seeds and determinism. Source: the documented `TrainingArguments`."""

    use_cpu: bool = setting(False, "Stay on the CPU although an accelerator is present.")
    seed: int = setting(42, "Seed of every random generator, set when training starts.")
    data_seed: int | None = setting(None, "Seed of data samplers; seed if not given.")
    full_determinism: bool = setting(False, "Force deterministic algorithms; slow, for debugging.")
    tf32: bool | None = setting(None, "Allow TF32 matrix products; None leaves torch's setting.")
    tpu_num_cores: int | None = setting(None, "TPU cores, set by the TPU launcher.")
    mp_parameters: str = setting("", "SageMaker model-parallel parameters, set by the SageMaker launcher.")
    no_cuda: bool = setting(False, "Old name of use_cpu.")
    use_mps_device: bool = setting(False, "No longer needed: MPS is chosen by itself.")


@dataclass(kw_only=True, repr=False)
class DistributionArguments:
    """Distributed training and its engines. Source: the documented `TrainingArguments`."""

    local_rank: int = setting(-1, "This process's rank on its node, set by the launcher.")
    ddp_backend: str | None = setting(None, "Communication back-end, such as 'nccl' or 'gloo'.")
    ddp_find_unused_parameters: bool | None = setting(
        None, "Handed to DistributedDataParallel; None is False with gradient checkpointing, else True."
    )
    ddp_bucket_cap_mb: int | None = setting(None, "Handed to DistributedDataParallel, in mebibytes.")
    ddp_broadcast_buffers: bool | None = setting(
        None, "Handed to DistributedDataParallel; None is False with gradient checkpointing, else True."
    )
    ddp_static_graph: bool | None = setting(
        None, "static_graph of DistributedDataParallel: every micro-step runs the same operations."
    )
    ddp_timeout: int = setting(1800, "Seconds until a collective operation is given up.")
    fsdp: list[FSDPOption] | str | None = setting(
        "", "Fully sharded data parallel: a sharding, with 'offload' and 'auto_wrap' if wanted."
    )
    fsdp_config: dict[str, Any] | str | None = setting(
        None, "Settings of fully sharded data parallel: a dict, JSON text or a JSON file's path."
    )
    deepspeed: dict[str, Any] | str | None = setting(
        None, "DeepSpeed configuration: a dict, JSON text or a JSON file's path."
    )
    accelerator_config: dict[str, Any] | str | None = setting(
        None,
        "How loaders are shared between processes: a dict, JSON text, an AcceleratorConfig, which the attribute "
        "then is, or a JSON file's path, which the Trainer reads.",
    )
    parallelism_config: Any = setting(None, "accelerate's ParallelismConfig.")
    ray_scope: str | None = setting("last", "Which of a trial's results Ray Tune compares.")
    xpu_backend: str | None = setting(None, "Old name of ddp_backend.")
    sharded_ddp: list[ShardedDDPOption] | str | None = setting("", "FairScale's sharding; use fsdp instead.")
    fsdp_min_num_params: int = setting(0, "Old form of fsdp_config={'min_num_params': ...}.")
    fsdp_transformer_layer_cls_to_wrap: str | None = setting(
        None, "Old form of fsdp_config={'transformer_layer_cls_to_wrap': ...}."
    )


@dataclass(kw_only=True, repr=False)
class PrecisionArguments:
    """Precision, compilation and memory. Source: the documented `TrainingArguments`."""

    bf16: bool = setting(False, "Mixed precision with bfloat16.")
    fp16: bool = setting(False, "Mixed precision with float16 and loss scaling.")
    fp16_opt_level: str = setting("O1", "Apex's optimization level, O0 to O3; has no effect.")
    half_precision_backend: str = setting("auto", "What implements mixed precision: 'auto', 'cuda_amp' or 'cpu_amp'.")
    use_ipex: bool = setting(False, "Intel's extension for PyTorch, discontinued; refused.")
    torch_compile: bool = setting(False, "Compile the model with torch.compile.")
    torch_compile_backend: str | None = setting(None, "torch.compile's back-end; turns torch_compile on.")
    torch_compile_mode: str | None = setting(None, "torch.compile's mode; turns torch_compile on.")
    gradient_checkpointing: bool = setting(False, "Recompute activations in the backward pass to save memory.")
    gradient_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Arguments of the model's gradient_checkpointing_enable, a dict or JSON text."
    )
    activation_checkpointing: bool | None = setting(None, "Another name of gradient_checkpointing; wins over it.")
    activation_checkpointing_kwargs: dict[str, Any] | str | None = setting(
        None, "Another name of gradient_checkpointing_kwargs; wins over it."
    )
    use_cache: bool | None = setting(
        None, "Set the model's config.use_cache, also for generation; None leaves it as it is."
    )
    use_liger_kernel: bool | None = setting(False, "Replace parts of the model by Liger kernels.")
    liger_kernel_config: dict[str, bool] | None = setting(None, "Which Liger kernels to use, a dict or JSON text.")
    fp16_backend: str = setting("auto", "Old name of half_precision_backend.")
    torchdynamo: str | None = setting(None, "Old name of torch_compile_backend.")


@dataclass(kw_only=True, repr=False)
class DataArguments:
    """Data loading. Source: the documented `TrainingArguments`."""

    dataloader_drop_last: bool = setting(False, "Drop the last batch when it is not full.")
    dataloader_num_workers: int = setting(0, "Loading processes per rank; 0 loads in the training process.")
    dataloader_pin_memory: bool = setting(True, "Load into page-locked memory; off with use_cpu.")
    dataloader_persistent_workers: bool = setting(False, "Keep loading processes alive between epochs.")
    dataloader_prefetch_factor: int | None = setting(None, "Batches that each loading process prepares ahead.")
    dataloader_timeout: float = setting(0, "Seconds to wait for a batch of a loading process; 0 waits forever.")
    dataloader_multiprocessing_context: str | None = setting(
        None, "How loading processes start: 'fork', 'spawn' or 'forkserver'; None is Python's own choice."
    )
    dataloader_in_order: bool = setting(
        True, "Take batches in their order; False is refused: no resume could be exact."
    )
    train_sampling_strategy: str = setting(
        "random", "Order of the training data: 'random', 'sequential' or 'group_by_length'."
    )
    remove_unused_columns: bool | None = setting(
        True, "Drop dataset columns that the model's forward does not take; with a task, text columns."
    )
    group_by_length: bool = setting(False, "Put samples of similar length into the same batch.")
    length_column_name: str | None = setting("length", "Dataset column with the lengths for group_by_length.")


@dataclass(kw_only=True, repr=False)
class HubArguments:
    """The Hub. Source: the documented `TrainingArguments`."""

    push_to_hub: bool = setting(False, "Push the model to the Hub each time it is saved.")
    hub_model_id: str | None = setting(None, "The repository; the user's, named as output_dir, if not given.")
    hub_strategy: HubStrategy | str = setting(
        "every_save", "What to push, and when: 'end', 'every_save', 'checkpoint' or 'all_checkpoints'."
    )
    hub_token: str | None = setting(None, "Access token; the stored login if not given.", repr=False)
    hub_private_repo: bool | None = setting(None, "Make a new repository private; None follows the owner's default.")
    hub_always_push: bool = setting(False, "Push although the previous push has not ended.")
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
