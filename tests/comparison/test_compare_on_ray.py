"""A comparison on a Ray cluster, with a machine and the driver killed in the middle: the table of one without Ray."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from ray_cluster import TwoMachines, two_machines
from small_run import SMALL_RUN
from waiting import gone, wait_until

import relpos
from relpos.comparison.compare import DONE, DRIVER, FAILED, LOCK, LOG, run_trials
from relpos.comparison.comparison import Trial, finished, load_comparison, make_comparison, read_record
from relpos.comparison.summary import make_table, read_records
from relpos.system.executors import LocalExecutor, Part
from relpos.system.files import Lock
from relpos.system.ray import RayExecutor

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("world"), pytest.mark.slow]
ENCODINGS, SEEDS, LENGTHS = ["alibi", "rope", "cable"], 2, [16, 32]
TIMES = {"seconds", "tokens_per_second", "peak_memory_bytes"}  # what differs between any two runs


@pytest.fixture(scope="module")
def settings(world):
    shared = {key: value for key, value in SMALL_RUN.items() if key != "model.encoding"}
    return {**shared, "data.source": str(world / "text.txt"), "run.steps": 30, "run.save_every": 5}


@pytest.fixture(scope="module")
def cluster(world):
    with two_machines() as machines:  # its processes use the cache of this test
        yield machines


@pytest.fixture(scope="module")
def alone(world, settings):
    """The comparison without Ray, with the same number of threads."""
    out = world / "alone"
    make_comparison(out, ENCODINGS, SEEDS, LENGTHS, settings=settings)
    assert run_trials(out, executor=LocalExecutor(workers=2, cores=1)) == {}
    return out


def measured(entry):
    """A record without times, and without the folder that it is in."""
    if isinstance(entry, dict):
        return {key: measured(value) for key, value in entry.items() if key not in {*TIMES, "run"}}
    return [measured(value) for value in entry] if isinstance(entry, list) else entry


def assert_same(out: Path, alone: Path) -> None:
    """The tables are equal, and so is every weight and every number that is not a time."""
    comparison = load_comparison(out)
    table, straight = (make_table(comparison, read_records(comparison, folder)) for folder in (out, alone))
    assert table == straight
    assert [len(row) for row in table.values()] == [2, 2, 2]
    for trial in comparison.trials():
        files = [folder / trial.name / "model.safetensors" for folder in (out, alone)]
        assert files[0].read_bytes() == files[1].read_bytes()
        one, two = (read_record(folder, trial) for folder in (out, alone))
        assert measured(one["windows"]) == measured(two["windows"])
        assert measured(one.get("positions")) == measured(two.get("positions"))
        assert one["machine"]["threads"] == 1


def trains(out: Path) -> list[str]:
    """The trials that have a checkpoint and no record."""
    names = [trial.name for trial in load_comparison(out).trials()]
    return [
        name for name in names if list((out / name).glob("checkpoint-*")) and not (out / name / "trial.json").exists()
    ]


def complete(out: Path) -> list[str]:
    """The trials for which nothing is left to do."""
    comparison = load_comparison(out)
    return [trial.name for trial in comparison.trials() if finished(read_record(out, trial), comparison, trial)]


def killed_in_the_middle(out: Path, cluster: TwoMachines, scratch: bool) -> list[str]:
    """Run the comparison; once both machines train, one of them is killed. Returns what was printed."""
    cluster.repair()
    said: list[str] = []

    with RayExecutor(cluster.address, scratch=scratch) as executor:

        def kill() -> None:
            busy = (lambda: len(executor.active) == 2) if scratch else (lambda: len(trains(out)) == 2)
            wait_until(busy)
            cluster.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        assert run_trials(out, say=said.append, executor=executor) == {}
        thread.join()
    return said


@pytest.mark.parametrize("scratch", [False, True])
def test_a_machine_that_is_killed_in_the_middle_changes_nothing(scratch, world, settings, cluster, alone):
    """Also where the machines do not see the folder."""
    out = world / f"on-ray-{scratch}"
    make_comparison(out, ENCODINGS, SEEDS, LENGTHS, settings=settings)
    said = killed_in_the_middle(out, cluster, scratch)
    lost = [line for line in said if "Starting it again (1 of 3)" in line]
    assert lost
    assert_same(out, alone)
    if not scratch:  # from a checkpoint in the folder, which both machines see
        assert len(lost) == 1
        assert (out / lost[0].split()[0] / LOG).read_text().count("\nresuming from") == 1
        return
    for trial in load_comparison(out).trials():
        assert "\nstarting\n" in (out / trial.name / LOG).read_text()
        names = ({file.name for file in (folder / trial.name).iterdir()} for folder in (out, alone))
        assert next(names) - {LOCK, ".lock"} == next(names) - {LOCK, ".lock"}


def test_a_driver_that_was_killed_is_rerun_and_resumes(world, settings, cluster, alone):
    cluster.repair()
    out = world / "driver"
    make_comparison(out, ENCODINGS, SEEDS, LENGTHS, settings=settings)
    command = [sys.executable, "-m", "relpos.cli", "compare", "--out", str(out), "--ray", cluster.address]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: complete(out) and trains(out))
    finally:
        first.kill()
        first.wait()
    names = trains(out)
    processes = [int((out / name / LOCK).read_text().split()[1]) for name in names]
    wait_until(lambda: all(gone(pid) for pid in processes))  # the parts end with the driver
    before = {name: (out / name / "trial.json").stat().st_mtime_ns for name in complete(out)}
    assert 1 <= len(before) < 6
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert "perplexity by length" in again.stdout
    assert {name: (out / name / "trial.json").stat().st_mtime_ns for name in before} == before
    assert_same(out, alone)


@pytest.mark.parametrize("scratch", [False, True])
def test_an_evaluation_in_parts_on_the_cluster_is_that_of_one_process(scratch, world, cluster, alone, tmp_path):
    cluster.repair()
    runs = [alone / "alibi-s0", alone / "rope-s0"]
    expected = relpos.evaluate(runs, lengths=LENGTHS, out=tmp_path / "alone")
    with RayExecutor(cluster.address, scratch=scratch) as executor:
        evaluation = relpos.evaluate(runs, lengths=LENGTHS, out=tmp_path / "on-ray", executor=executor)
    assert measured(evaluation.results) == measured(expected.results)
    assert evaluation.pictures[0].read_bytes() == expected.pictures[0].read_bytes()
    assert len(list((tmp_path / "on-ray").glob("*/parts/*.jsonl"))) == 4


def test_ctrl_c_ends_the_trials_on_the_cluster(world, settings, cluster):
    cluster.repair()
    out = world / "stopped"
    make_comparison(out, ["alibi"], 1, LENGTHS, settings=settings)
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from relpos.cli import main; main()"
    )
    driver = subprocess.Popen([sys.executable, "-c", code, "compare", "--out", str(out), "--ray", cluster.address])
    lock = out / "alibi-s0" / LOCK
    wait_until(lambda: lock.exists() and lock.read_text())
    pid = int(lock.read_text().split()[1])
    driver.send_signal(signal.SIGINT)
    try:
        wait_until(lambda: driver.poll() is not None)
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == 130
    assert gone(pid)
    assert read_record(out, Trial("alibi", 0)) == {}


def test_a_second_driver_is_refused(world, settings):
    out = world / "twice"
    make_comparison(out, ["alibi"], 1, LENGTHS, settings=settings)

    class Cluster(LocalExecutor):
        exclusive = True

    with Lock(out, DRIVER), pytest.raises(ValueError, match="are handed to a cluster by process"):
        run_trials(out, executor=Cluster())


def test_a_trial_with_two_processes_is_recorded_once(world, settings):
    """As with two GPUs: torchrun starts the trial; here over gloo, on the CPU."""
    out, trial = world / "two-processes", Trial("alibi", 0)
    make_comparison(out, ["alibi", "rope"], 1, LENGTHS, settings=settings)
    (out / "rope-s0" / "log.jsonl").mkdir(parents=True)  # where its log would be written

    def run(encoding: str) -> int:
        folder = out / Trial(encoding, 0).name
        part = Part("relpos.comparison.compare", (out, encoding, "0", "1"), folder, folder / LOG, distributed=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *map(str, part.command(gpus=2))]
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as process:
            return process.wait()

    assert run("alibi") == DONE
    record = read_record(out, trial)
    assert (record["attempts"], record["error"]) == (1, None)
    about = (out / trial.name / "run.yaml").read_text()
    assert "processes: 2" in about
    assert json.loads((out / trial.name / "result.json").read_text())["step"] == settings["run.steps"]
    assert run("alibi") == DONE  # nothing is left to do
    assert run("rope") not in (DONE, FAILED)  # torchrun has a code of its own
    assert "log.jsonl" in read_record(out, Trial("rope", 0))["error"]
