"""`Seq2SeqTrainer`: evaluation and prediction with generated tokens."""
