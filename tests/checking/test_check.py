"""`relpos.check` on models, modules, functions, paths and things that are none; its report and its command."""

import json
import os
import subprocess
import sys

import pytest
import torch
from small_models import saved, small_model
from torch import nn
from torch.nn import functional as F
from typer.testing import CliRunner

import relpos
from relpos.checking.check_options import TESTS
from relpos.checking.findings import FAILED, NOT_TESTED, PASSED, WrongPositionError
from relpos.cli import app


class Port(nn.Module):
    """A small decoder in plain PyTorch; `wrong` is the mistake of its author."""

    def __init__(self, wrong=""):
        super().__init__()
        self.wrong, self.heads, self.size = wrong, 4, 8
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 32)
        self.qkv = nn.ModuleList(nn.Linear(32, 96, bias=False) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in range(2))
        self.head = nn.Linear(32, 50, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def rotated(self, x):
        angle = torch.arange(x.shape[2])[:, None] * 10_000 ** -(torch.arange(4) / 4)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for project, out in zip(self.qkv, self.out, strict=True):
            q, k, v = project(x).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
            q, k = self.rotated(q), self.rotated(k)
            if self.wrong == "batch":
                k = k.mean(0, keepdim=True).expand_as(k)
            scores = q @ k.transpose(-1, -2) / self.size**0.5
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2 if self.wrong == "mask" else 1)
            weights = scores.masked_fill(future, -torch.inf).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).flatten(2))
        return self.head(x)


def status(report):
    return {finding.test: finding.status for finding in report.findings}


class TestModules:
    def test_a_port_in_plain_torch_passes_what_can_be_tested(self):
        report = relpos.check(Port())
        assert not report.failed
        found = status(report)
        assert found["causality"] == found["batch"] == found["shift"] == PASSED
        assert found["cache"] == NOT_TESTED  # it has none, and that is listed

    @pytest.mark.parametrize(("wrong", "test"), [("mask", "causality"), ("batch", "batch")])
    def test_a_mistake_is_found(self, wrong, test):
        report = relpos.check(Port(wrong))
        assert report.failed
        assert report.findings[0].test == test
        with pytest.raises(WrongPositionError, match=report.findings[0].title):
            report.assert_right()

    def test_the_mask_of_a_port_is_named(self):
        assert relpos.check(Port("mask")).faults == ["causal mask shifted"]

    def test_a_forward_that_fails_is_a_finding(self):
        class Broken(Port):
            def forward(self, input_ids):
                raise RuntimeError("no kernel for this machine")

        report = relpos.check(Broken())
        assert report.failed
        assert "no kernel for this machine" in report.findings[0].words
        assert {finding.status for finding in report.findings[1:]} == {NOT_TESTED}

    def test_the_model_is_left_as_it_was(self):
        model = small_model("llama").train()
        relpos.check(model)
        assert model.training
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


class TestFunctions:
    def test_causal_attention_passes(self):
        report = relpos.check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        assert status(report)["causality"] == PASSED
        assert not report.failed

    def test_a_mask_that_is_off_by_one_is_named(self):
        def attention(q, k, v):
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2)
            return scores.masked_fill(future, -torch.inf).softmax(-1) @ v

        assert relpos.check(attention).faults == ["causal mask shifted"]


def port_of_ids(ids, weights, wrong=""):
    """A decoder of one layer as a function of token ids, written with einsum."""
    embed, *projections = weights
    x = embed[ids]  # (batch, length, width)
    q, k, v = (torch.einsum("btd,hed->bthe", x, w.view(4, 8, 32)) for w in projections)
    angle = torch.arange(ids.shape[1])[:, None] * 10_000 ** -(torch.arange(4) / 4)
    wave = torch.polar(torch.ones_like(angle), angle)[:, None]

    def rotated(y):
        turned = torch.complex(y[..., :4], y[..., 4:]) * wave
        return torch.cat([turned.real, turned.imag], -1)

    scores = torch.einsum("bihe,bjhe->bhij", rotated(q), k if wrong == "keys" else rotated(k))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = (scores + ~future if wrong == "mask" else scores.masked_fill(future, -torch.inf)).softmax(-1)
    return {"logits": (x + torch.einsum("bhij,bjhe->bihe", weights, v).flatten(2)) @ embed.T}


class TestFunctionsOfTokens:
    weights = [
        torch.randn(shape, generator=torch.Generator().manual_seed(0)) / 4 for shape in [(50, 32), *[(32, 32)] * 3]
    ]

    @pytest.mark.parametrize(("wrong", "faults"), [("", []), ("keys", ["keys unrotated"]), ("mask", ["boolean mask"])])
    def test_what_is_wrong_is_named(self, wrong, faults):
        def port(ids):
            return port_of_ids(ids, self.weights, wrong)

        report = relpos.check(port)
        assert report.subject == "port"
        assert report.faults == faults
        assert status(report)["rotation"] == (FAILED if wrong == "keys" else PASSED)

    def test_what_it_rotates_is_said(self):
        report = relpos.check(lambda ids: port_of_ids(ids, self.weights), only=["rotation"])
        assert "8 of 8 dimensions, half layout, theta 10,000" in report.findings[0].words


class CachedPort(Port):
    """The same with a cache of its own; positions after the first call are off by `offset`."""

    def __init__(self, offset=0):
        super().__init__()
        self.offset, self.start = offset, 0

    def rotated(self, x):
        angle = (self.start + torch.arange(x.shape[2]))[:, None] * 10_000 ** -(torch.arange(4) / 4)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def forward(self, input_ids, cache=None):
        if cache is None:
            return super().forward(input_ids)
        x, past = self.embed(input_ids), len(cache[0])  # a single token
        self.start = past + (self.offset if past else 0)
        for project, out, kept in zip(self.qkv, self.out, cache, strict=True):
            q, k, v = project(x).unflatten(-1, (3, self.heads, self.size)).permute(2, 0, 3, 1, 4)
            kept.append((self.rotated(k), v))
            k, v = (torch.cat(each, 2) for each in zip(*kept, strict=True))
            weights = (self.rotated(q) @ k.transpose(-1, -2) / self.size**0.5).softmax(-1)
            x = x + out((weights @ v).transpose(1, 2).flatten(2))
        self.start = 0
        return self.head(x)

    def decode(self, ids):
        cache = [[], []]
        return torch.cat([self(token, cache) for token in ids.split(1, 1)], 1)


@pytest.mark.parametrize(("offset", "faults"), [(0, []), (1, ["cache shifted"])])
def test_a_cache_of_a_ports_own_is_compared_by_its_decode(offset, faults):
    port = CachedPort(offset)
    report = relpos.check(port, decode=port.decode, only=["cache"])
    assert report.faults == faults
    assert status(report)["cache"] == (FAILED if faults else PASSED)


@pytest.mark.parametrize(
    ("output", "exit_status", "words"),
    [
        (lambda x: x * float("nan"), 1, "not finite"),
        (lambda x: x.mean(1), 2, "not one row per token"),
        (lambda x: "text", 2, "it returns str"),
        (lambda x: (x, None), 0, ""),
    ],
)
def test_outputs_that_cannot_be_read_are_said(output, exit_status, words):
    table = torch.randn(50, 8)

    def model(ids):
        return output(table[ids].cumsum(1))

    report = relpos.check(model)
    assert report.exit_status == exit_status
    assert words in report.findings[0].words


class TestPrecision:
    @pytest.mark.parametrize("family", ["llama", "gpt_neox", "gemma3_text", "modernbert"])
    def test_half_precision_is_no_fault_and_stays_as_it_was(self, family):
        model = small_model(family)
        frequencies = {id(buffer): buffer.clone() for buffer in model.buffers()}
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        values = [parameter.clone() for parameter in model.parameters()]
        report = relpos.check(model)
        assert not report.failed, report.summary
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))
        assert all(torch.equal(buffer, frequencies[id(buffer)]) for buffer in model.buffers())

    def test_positions_in_the_dtype_of_the_model_are_a_fault_in_half_precision_only(self):
        model = small_model("llama")
        model.model.rotary_emb.register_forward_pre_hook(
            lambda module, arguments, keywords: (
                arguments,
                {**keywords, "position_ids": keywords["position_ids"].to(arguments[0].dtype)},
            ),
            with_kwargs=True,
        )
        assert not relpos.check(model).failed
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
        report = relpos.check(model)
        assert [finding.test for finding in report.findings if finding.status == FAILED] == ["precision"]
        assert report.faults == ["bfloat16 positions"]

    def test_a_cast_that_rounds_the_frequencies_is_one(self):
        model = small_model("llama", head_dim=16)
        model.to(torch.bfloat16)  # with its buffers
        assert relpos.check(model).faults[0] == "bfloat16 frequencies"


class TestCommand:
    def invoke(self, *arguments):
        return CliRunner().invoke(app, ["check", *map(str, arguments)])

    def test_writes_the_report_in_three_forms(self, tmp_path):
        folder = saved(small_model("qwen3"), tmp_path / "model")
        files = [tmp_path / f"report{suffix}" for suffix in (".json", ".html", ".md")]
        done = self.invoke(folder, "--json", files[0], "--html", files[1], "--markdown", files[2])
        assert done.exit_code == 0, done.output
        report = json.loads(files[0].read_text())
        assert report["failed"] is False
        assert {finding["status"] for finding in report["findings"]} <= {PASSED, FAILED, NOT_TESTED}
        page = files[1].read_text()
        assert "prefers-color-scheme: dark" in page
        assert "http" not in page.replace("http-equiv", "")
        assert "rotation as configured" in files[2].read_text()

    def test_the_page_of_a_failed_check_has_the_differences_by_position(self):
        report = relpos.check(Port("batch"))
        page = report.to_html()
        assert "<polyline" in page
        assert "difference by position" in page
        assert len(report.to_json()["findings"][0]["differences"]) == 32

    def test_lists_the_faults(self):
        done = self.invoke("--faults")
        assert done.exit_code == 0
        assert "bfloat16 positions" in done.output

    def test_only_makes_the_tests_that_are_asked_for(self, tmp_path):
        folder = saved(small_model("qwen3"), tmp_path / "model")
        done = self.invoke(folder, "--only", "batch,shift")
        assert done.exit_code == 0
        assert "rotation" not in done.output

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ({"model": None}, "nothing to check"),
            ({"model": "/nowhere"}, "no folder /nowhere"),
            ({"model": 3}, "not int"),
            ({"model": "x", "only": ["rotations"]}, "rotations"),
            ({"model": "x", "quick": True, "full": True}, "exclude each other"),
        ],
    )
    def test_bad_input_gets_a_sentence(self, arguments, sentence):
        with pytest.raises((ValueError, TypeError, OSError), match=sentence):
            relpos.check(**arguments)


def test_all_tests_are_listed_in_the_options():
    from relpos.checking import configured, fingerprints, rotations, trained

    made = {test.name for part in (rotations, configured, fingerprints, trained) for test in part.TESTS}
    assert made | {"ports"} == set(TESTS)


class TestPlugin:
    """In a process of its own, by the name of the module: this repository need not be installed anew for it."""

    def run_pytest(self, folder, *arguments):
        plugin = ["-p", "no:cacheprovider", "-p", "relpos.checking.pytest_plugin"]
        command = [sys.executable, "-m", "pytest", "-q", *plugin, *map(str, arguments)]
        alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        return subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, check=False)

    @pytest.mark.heavy
    def test_a_model_is_a_test(self, tmp_path):
        folder = saved(small_model("qwen3"), tmp_path / "model")
        (tmp_path / "tests").mkdir()
        done = self.run_pytest(tmp_path, "tests", "--relpos-check", folder)
        assert done.returncode == 0, done.stdout
        assert "1 passed" in done.stdout

    @pytest.mark.heavy
    def test_a_model_that_cannot_be_opened_fails(self, tmp_path):
        (tmp_path / "tests").mkdir()
        done = self.run_pytest(tmp_path, "tests", "--relpos-check", tmp_path / "nothing")
        assert done.returncode == 1
        assert "there is no folder" in done.stdout
