"""What is said before an evaluation or a comparison begins, and defaults that follow the size of the run."""

import pytest

from relpos.comparison import duration
from relpos.comparison.compare import _quick
from relpos.comparison.compare_options import CompareOptions
from relpos.comparison.comparison import make_comparison
from relpos.evaluation import estimate
from relpos.evaluation.evaluate_options import EVAL_TOKENS, default_eval_tokens
from relpos.system.executors import LocalExecutor


class TestTheTimeOfReading:
    def test_is_that_of_a_machine_whose_time_per_token_is_linear_in_the_length(self, monkeypatch):
        now = 0.0

        def per_token(length):
            return 1e-4 + 3e-8 * length

        def read(length, count):
            nonlocal now
            now += count * length * per_token(length)

        monkeypatch.setattr(estimate.time, "perf_counter", lambda: now)
        work = {512: 40_000, 2048: 40_000, 16384: 32_768}
        expected = sum(tokens * per_token(length) for length, tokens in work.items())
        assert estimate.reading_seconds(work, read) == pytest.approx(expected)

    def test_is_not_measured_for_little_work_and_a_refused_length_counts_as_the_shortest(self, monkeypatch):
        assert estimate.reading_seconds({512: 1000}, pytest.fail) is None
        now = 0.0

        def read(length, count):
            nonlocal now
            if length > 512:
                raise ValueError("learned has 512 positions")
            now += count * length

        monkeypatch.setattr(estimate.time, "perf_counter", lambda: now)
        assert estimate.reading_seconds({512: 50_000, 4096: 50_000}, read) == 100_000
        assert estimate.reading_seconds({4096: 50_000}, read) is None

    @pytest.mark.heavy
    def test_of_a_comparison_with_learned_leaves_out_what_it_refuses(self, tmp_path):
        shared = {"model.preset": "pico", "data.length": 64, "run.steps": 2, "data.tokenizer": "bpe-300"}
        comparison = make_comparison(tmp_path, ["learned"], 1, [64, 4096], 4096, 2**17, settings=shared, last=True)
        assert duration.remaining_seconds(comparison, tmp_path, threads=1) > duration.START


class TestTokensToScore:
    def test_are_an_eighth_of_the_training_between_two_bounds(self):
        assert default_eval_tokens("windows", 60 * 8 * 512) == 30_720
        assert default_eval_tokens("windows", 1000) == 2**14
        assert default_eval_tokens("windows", 10**10) == EVAL_TOKENS["windows"]
        assert default_eval_tokens("windows", None) == EVAL_TOKENS["windows"]  # of a model that others trained
        assert default_eval_tokens("positions", 2**22) == 2**17
        assert default_eval_tokens("windows", 10**10, quick=True) == 2**14

    def test_of_a_comparison_follow_its_steps(self, tmp_path):
        for steps, tokens in ((30, 2**14), (1200, 76_800), (100_000, 2**17)):
            assert make_comparison(tmp_path / str(steps), ["nope"], settings={"run.steps": steps}).eval_tokens == tokens


def test_a_quick_comparison_is_small_and_what_is_given_wins():
    options = _quick(CompareOptions(None, quick=True))
    assert (options.encodings, options.seeds, options.steps) == (("alibi", "rope", "cable"), 2, 150)
    assert (options.lengths, options.positions, options.eval_tokens) == ([256, 1024, 4096], 1024, 2**14)
    options = _quick(CompareOptions(["fire"], quick=True, seeds=1, minutes=1, length=128))
    assert (options.encodings, options.seeds, options.steps, options.lengths) == (["fire"], 1, None, [128, 512, 2048])


def test_a_comparison_says_what_it_will_do_and_about_how_long(tmp_path, monkeypatch):
    comparison = make_comparison(
        tmp_path, ["nope", "alibi"], 2, [256, 512], eval_tokens=8192, settings={"run.steps": 100}, search=False
    )
    monkeypatch.setattr(duration, "_measure", lambda comparison, encoding, out: (20.0, 10.0, 5.0))
    text = duration.sentence(comparison, tmp_path, LocalExecutor(workers=2))
    # Four trials of 10 + 20 + 10 seconds, two of them with 5 more, for two workers.
    assert text == (
        "each trains on 51,200 tokens and is scored on 8,192 tokens at 256, 512; about 1:25 for what is left"
    )
