"""A small run, but with everything whose state must survive: dropout, accumulation, epochs, moments of AdamW."""

SMALL_RUN = {
    "model.encoding": "cable",
    "model.dropout": 0.1,
    "data.tokenizer": "bpe-280",
    "data.length": 16,
    "run.steps": 9,
    "run.batch_size": 4,
    "run.micro_batch_size": 2,
    "run.log_every": 1,
    "run.eval_every": 4,
    "run.eval_windows": 4,
    "run.save_every": 3,
}
