"""Copy a trained run into the zoo: python zoo/pack.py RUN zoo/NAME

Keeps what is needed to open the run, with its weights in float16, and writes its model card with the perplexity that
the weights have in float16. The card is then kept as it is: later evaluations do not change it.
"""

import shutil
import sys
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from relpos.evaluation.evaluation import evaluate
from relpos.runs.results import ABOUT, CARD, EVALUATION, MARK, RESULT
from relpos.runs.run import open_run

FILES = (
    "config.json",
    "generation_config.json",
    "modeling_relpos.py",
    "tokenizer.json",
    "tokenizer_config.json",
    RESULT,
)
WEIGHTS = "model.safetensors"
TOKENS = 2**14  # scored at each length
HALF = "The weights are stored in float16; relpos opens them in float32."


def pack(run: Path, out: Path) -> None:
    """Write the files of a run that are needed to open it, and its model card."""
    out.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        shutil.copyfile(run / name, out / name)
    about = yaml.safe_load((run / ABOUT).read_text(encoding="utf-8"))
    about["run"]["out"] = str(out)
    (out / ABOUT).write_text(yaml.safe_dump(about, sort_keys=False, allow_unicode=True), encoding="utf-8")
    tensors = {name: tensor.half() for name, tensor in load_file(run / WEIGHTS).items()}
    save_file(tensors, out / WEIGHTS, metadata={"format": "pt"})
    (out / CARD).unlink(missing_ok=True)
    opened = open_run(out)
    trained = opened.trained_length
    assert trained is not None
    lengths = [trained] if opened.encoding == "learned" else [trained, 4 * trained, 16 * trained]
    evaluate(opened, lengths, eval_tokens=TOKENS)
    card = (out / CARD).read_text(encoding="utf-8")
    (out / CARD).write_text(
        card.replace(f"{MARK}\n\n", "").replace("## Results\n", f"{HALF}\n\n## Results\n"), encoding="utf-8"
    )
    shutil.rmtree(out / EVALUATION)


if __name__ == "__main__":
    torch.set_num_threads(1)
    pack(Path(sys.argv[1]), Path(sys.argv[2]))
