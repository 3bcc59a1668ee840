"""The documented settings of DeepSpeed, FSDP and XLA, as options of their strategies."""
