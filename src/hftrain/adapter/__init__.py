"""Functions that read `TrainingArguments` and build the configs of other packages."""
