"""The only room that reads `TrainingArguments`: pure functions that fill the other rooms' configs."""
