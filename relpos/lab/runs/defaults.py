"""The defaults of a training run. Imports nothing: `relpos train --help` prints these values."""

PRESET = "nano"
ENCODING = "kerple_log"
CORPUS = "sotu"
LENGTH = 512  # tokens in a window
BATCH = 8  # windows per step
STEPS = 200
SEED = 0
# Of a run that starts from a model.
START_LR = 1e-4
START_POSITION_LR = 3e-4

TASK_LENGTH = 64  # the same of a run on a task
TASK_BATCH = 32
TASK_STEPS = 2000
