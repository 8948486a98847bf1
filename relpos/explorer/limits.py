"""What one request, and the server as a whole, may use. Imports nothing."""

LENGTH = 65_536  # tokens, where the values are a function of the form
ENTRY_LENGTH = 16_384  # tokens, where they are computed from queries and keys
ROWS_LENGTH = 2_048  # tokens, where they need complete rows of all heads (CoPE, DAPE)
MAP_LENGTH = 2_048  # tokens up to which uniformity and context dependence of scores are measured
TEXT_BYTES = 1_000_000  # of a text
BODY_BYTES = 2 * TEXT_BYTES  # of a request
HEADS = 64  # of an encoding without a model
WRITTEN = 64  # tokens that a model writes at a time
WRITTEN_IN_ALL = 512  # and in all
SCENES = 32  # that are kept
SCENE_BYTES = 2**30  # of all scenes together
IDLE = 120.0  # seconds after which a scene that nobody looks at is dropped
WAITING = 256  # requests that wait for a worker
SECONDS = 60.0  # of computing per request
CSV_ENTRIES = 1_000_000
HEADS_DEFAULT, HEAD_DIM = 8, 64  # of an encoding without a model
