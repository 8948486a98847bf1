"""The scores of one run on a task, without the checks and pictures of `relpos.evaluate`."""

from relpos.evaluation.evaluate_options import SAMPLES, EvaluateOptions
from relpos.evaluation.task_scoring import TaskQuestion


def score_task(run, task, lengths, samples=SAMPLES, seed=0, out=None, say=str):
    options = EvaluateOptions(run, task=task, lengths=lengths, samples=samples, seed=seed)
    return TaskQuestion(run, options, out, say).answer()
