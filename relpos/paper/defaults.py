"""The defaults of the paper's figures. Imports nothing: `relpos figures --help` prints these values."""

OUT = "figures"
RUNS = "runs"
STEPS = 240  # per model; steps and not minutes, so that everyone gets the same picture
