"""The Hub: what is pushed, when, and the model card."""
