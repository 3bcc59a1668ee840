"""The only package that reads `TrainingArguments`: pure functions that build the other packages' configs."""
