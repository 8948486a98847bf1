"""The folder of a run: its settings, checkpoints, log and model card, and opening it."""
