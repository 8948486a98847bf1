"""A model as a subject: a run, a checkpoint, or what others trained, as `relpos.open` takes them."""

import threading
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from relpos.encodings.registry import names
from relpos.explorer import limits
from relpos.explorer.documents import Inputs
from relpos.explorer.model_scenes import Anatomy, ModelScene
from relpos.explorer.scenes import Scene
from relpos.explorer.subjects import LENGTH, Subject, check_entries, encoding_json, integer
from relpos.runs.results import read_evaluations

if TYPE_CHECKING:
    from relpos.runs.run import Run


class ModelSubject(Subject):
    """A model.

    Args:
        identity: Its place on the command line.
        run: The model.
        length: Tokens by default; the trained length if None.
        text: Text to be read at first; held-out text if None.
    """

    def __init__(self, identity: str, run: "Run", length: int | None = None, text: str | None = None) -> None:
        super().__init__(identity, run.folder.name)
        self.run, self.text = run, text
        self.lock = threading.Lock()
        self.anatomy = Anatomy(run)
        self.inputs = Inputs(run, self.lock)
        self.inputs.documents()  # reads the corpus before the server starts, so that the first view is fast
        self.trained_length = run.trained_length
        self.length = length or min(self.trained_length or LENGTH, 1024)

    @property
    def can_write(self) -> bool:
        """Whether it predicts the next token, so that it can write on."""
        return bool(self.run.family.causal and self.run.tokenizer is not None and self.run.model.can_generate())

    def as_json(self) -> dict[str, Any]:
        anatomy = self.anatomy
        about = encoding_json(anatomy.name) if anatomy.name in names() else {}
        return {
            "id": self.id,
            "name": self.name,
            "kind": "model",
            "encoding": anatomy.name,
            "family": self.run.family.title,
            "layers": anatomy.depth,
            "heads": anatomy.heads,
            "head_dim": anatomy.head_dim,
            "key_heads": anatomy.key_heads,
            "causal": anatomy.causal,
            "trained_length": self.trained_length,
            "shows": list(anatomy.shows),
            "default_show": anatomy.default_show,
            "reads_text": self.run.tokenizer is not None,
            "can_write": self.can_write,
            "documents": self.inputs.documents(),
            "default": self.complete({}),
            "evaluation": bool(self.evaluation()["curves"]),
            "formula": about.get("formula"),
            "paper": about.get("paper"),
            "caption": f"{self.run.family.title} with {anatomy.name}: {anatomy.depth} layers, {anatomy.heads} heads.",
            "parameters": [],
        }

    @cached_property
    def _default_input(self) -> dict[str, Any]:
        if self.text is not None:
            return self.inputs.check({"kind": "text", "text": self.text})
        return self.inputs.default(self.length)

    def complete(self, request: Mapping[str, Any]) -> dict[str, Any]:
        check_entries(request, ("subject", "encoding", "length", "input", "seed", "parameters", "heads", "causal"))
        if request.get("parameters"):
            raise ValueError("a trained model has its own parameters: leave them out.")
        for name, own in (("heads", self.anatomy.heads), ("causal", self.anatomy.causal)):
            if request.get(name, own) not in (own, None):
                raise ValueError(f"{name} of this model is {own}: leave it out.")
        given = request.get("input")
        return {
            "subject": self.id,
            "encoding": self.anatomy.name,
            "length": integer("length", request.get("length", self.length), 1, limits.LENGTH),
            "input": self._default_input if given is None else self.inputs.check(given),
            "seed": integer("seed", request.get("seed", 0), 0, 2**31 - 1),
            "parameters": {},
            "heads": self.anatomy.heads,
            "causal": self.anatomy.causal,
        }

    def scene(self, request: Mapping[str, Any]) -> Scene:
        return ModelScene(request, self.run, self.anatomy, self.inputs, self.lock)

    def written(self, scene: Scene, tokens: int) -> dict[str, Any]:
        """The description of the scene in which the model has written on.

        Args:
            scene: A scene of this model.
            tokens: How many tokens it writes.

        Raises:
            ValueError: It cannot write, or has written enough.
        """
        if not self.can_write:
            raise ValueError(f"{self.name} does not predict the next token, so it cannot write.")
        request, given = scene.request, scene.request["input"]
        count, before, of = tokens, scene.length, given
        if given["kind"] == "written":
            of, before, count = given["of"], given["length"], given["tokens"] + tokens
        if before + count > limits.ENTRY_LENGTH or count > limits.WRITTEN_IN_ALL:
            raise ValueError(
                f"the model has written enough: at most {limits.WRITTEN_IN_ALL} tokens at a time are kept."
            )
        writing = {"kind": "written", "of": of, "length": before, "tokens": count}
        return self.complete({**request, "length": before + count, "input": writing})

    def evaluation(self) -> dict[str, Any]:
        curves = []
        for evaluation in read_evaluations(self.run.evaluation):
            rows: list[Any] = [row for row in evaluation.get("rows", []) if row.get("error") is None]
            if not rows or not all("perplexity" in row for row in rows):
                continue
            curves.append(
                {
                    "label": " ".join(filter(None, [self.anatomy.name, str(evaluation.get("rope_scaling") or "")])),
                    "protocol": evaluation.get("protocol"),
                    "lengths": [row["length"] for row in rows],
                    **{name: [row.get(name) for row in rows] for name in ("perplexity", "low", "high")},
                }
            )
        return {"curves": curves, "trained_length": self.trained_length}
