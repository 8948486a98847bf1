"""The laboratory: data, training, runs, evaluation, comparisons and synthetic tasks."""
