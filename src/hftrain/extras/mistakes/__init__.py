"""What to do about errors of a step, a dataset or a collator: notes on the error, made when there is one."""
