"""The defaults of a comparison. Imports nothing: `relpos compare --help` prints these values."""

# Sinusoids of amplitude 1 are much larger than token embeddings, which start with a deviation of 0.02; the authors of
# CABLE use an amplitude of 0.1.
SINUSOIDAL = "sinusoidal:amplitude=0.1"
ENCODINGS = ("alibi", "kerple_log", "clipped", "fire", "rope", "cable", SINUSOIDAL, "learned", "nope")
MULTIPLES = (1, 2, 4, 8, 16, 32)  # the lengths to evaluate, as multiples of the trained length
LONG = 8  # loss by position is measured at this multiple of the trained length, or at the longest length if shorter
SEEDS = 3
EVAL_TOKENS = 2**17
OUT = "runs/comparison"
WORKERS = 1
# With the same amount of data, small models learn more from many small steps than with the defaults of `relpos train`:
# rope, which has to learn to attend to near tokens, reaches alibi, which does so from the start.
LENGTH = 256
BATCH = 2
STEPS = 1200  # of each training, if neither steps nor tokens nor minutes are chosen
