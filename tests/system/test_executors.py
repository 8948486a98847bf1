"""One interface, three executors: the same parts give the same files on this machine, on Ray and as jobs of submitit.

The parts here are a small module; tests/comparison/test_compare_on_ray.py runs trials of a comparison.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ray_cluster import two_machines
from typer.testing import CliRunner
from waiting import gone, wait_until

from relpos.cli import app
from relpos.cli.commands import ClusterOptions, make_executor, parse_memory, with_address
from relpos.system.executors import Executor, Exit, LocalExecutor, Part, Parts, Resources
from relpos.system.node import Event, bring_back, make_job, pack, run_part, unpack
from relpos.system.ray import RayExecutor
from relpos.system.slurm import FOLDER, SUFFIX, SlurmExecutor

pytestmark = pytest.mark.heavy

WORK = """
import os, sys, time
from pathlib import Path
from relpos.system.executors import end_with_parent

end_with_parent()
source, folder, what = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
print("threads", os.environ["OMP_NUM_THREADS"], flush=True)
(folder / "process").write_text(str(os.getpid()))
if what == "wait":
    (folder / "begun").write_text("")
    time.sleep(600)
if what == "fail":
    sys.exit(65)
earlier = folder / "earlier"
(folder / "sum").write_text(f"{sum(map(int, source.read_text().split()))} {earlier.exists()}")
(folder / "inner").mkdir(exist_ok=True)
(folder / "inner" / "done").write_text("yes")
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the module and a file that it reads, as the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("work.py").write_text(WORK)
    Path("numbers.txt").write_text("1 2 3")
    return tmp_path


@pytest.fixture(scope="module")
def cluster():
    with two_machines() as machines:
        yield machines


@pytest.fixture
def on_ray(cluster):
    cluster.repair()
    with RayExecutor(cluster.address) as executor:
        yield executor


def part(name: str, what: str = "work", root: Path = Path("out")) -> Part:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    arguments = (Path("numbers.txt"), folder, what)
    return Part("work", arguments, folder, folder / "log", (Path("numbers.txt"), Path("work.py")))


def until_ended(executor: Executor, count: int = 1) -> dict[str, Exit]:
    ended: dict[str, Exit] = {}
    wait_until(lambda: ended.update(executor.ended()) or len(ended) >= count)
    return ended


def files(folder: Path) -> dict[str, str]:
    """What a part has left; the number of its process differs."""
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    return {name: file.read_text() for name, file in found.items() if name != "process" and FOLDER not in name}


@pytest.fixture(params=["local", "ray", "ray in scratch folders", "submitit"])
def executor(request):
    if request.param == "local":
        with LocalExecutor(workers=2, cores=1) as executor:
            yield executor
    elif request.param == "submitit":
        with SlurmExecutor(cluster="local") as executor:
            yield executor
    else:
        cluster = request.getfixturevalue("cluster")
        cluster.repair()
        with RayExecutor(cluster.address, scratch="scratch" in request.param) as executor:
            yield executor


def test_any_executor_leaves_the_same_files_tells_how_parts_ended_and_stops(executor, here):
    """One part finds what an earlier one left, and has absolute paths; one fails; one is stopped."""
    resumed = part("resumed", root=here / "out")
    (resumed.writes / "earlier").write_text("x")
    resumed.log.write_text("before\n")
    executor.start("resumed", resumed)
    executor.start("failing", part("failing", "fail"))
    assert set(executor.running) == {"resumed", "failing"}
    ended = until_ended(executor, 2)
    codes = {name: (end.code, end.failure) for name, end in ended.items()}
    assert codes == {"resumed": (0, None), "failing": (65, None)}
    assert executor.running == []
    left = {"earlier": "x", "sum": "6 True", "log": "before\nthreads 1\n", "inner/done": "yes"}
    assert files(here / "out" / "resumed") == left
    assert files(here / "out" / "failing") == {"log": "threads 1\n"}
    executor.start("waiting", part("waiting", "wait"))
    scratch, folder = getattr(executor, "scratch", False), here / "out" / "waiting"
    wait_until(lambda: executor.ended() == {} and ("waiting" in executor.active if scratch else _begun(folder)))
    executor.stop()
    assert executor.running == []
    if not scratch:
        wait_until(lambda: gone(int((folder / "process").read_text())))


def test_what_is_ready_is_asked_only_when_a_place_is_free(here):
    """A comparison reads it from the records of all its trials."""
    asked = []

    class Counted(Parts):
        def ready(self):
            asked.append(len(self.executor.running))
            return super().ready()

    def stop(line: str) -> None:
        raise AssertionError(line)

    parts = Counted(LocalExecutor(2), {name: part(name) for name in ("a", "b", "c")}, stop)
    ends = dict(parts.run())
    assert {name: end.code for name, end in ends.items()} == dict.fromkeys("abc", 0)
    assert max(asked) < 2


def _begun(folder: Path) -> bool:
    return (folder / "begun").exists()


@pytest.mark.slow
class TestRay:
    def test_a_part_whose_machine_is_lost_waits_for_a_place_and_the_user_is_told(self, cluster, on_ray, here):
        for name in ("a", "b", "c"):
            on_ray.start(name, part(name, "wait"))
        wait_until(lambda: on_ray.ended() == {} and len(on_ray.active) == 2)
        cluster.kill()
        messages: list[str] = []
        wait_until(lambda: on_ray.ended() == {} and messages.extend(on_ray.messages()) is None and messages)
        assert len(messages) == 1
        assert "its machine ended or cannot be reached. Starting it again (1 of 3)" in messages[0]
        assert len(on_ray.running) == 3
        wait_until(lambda: on_ray.ended() == {} and len(on_ray.active) == 1)  # one core is left

    def test_a_part_that_is_lost_too_often_fails_with_a_sentence(self, cluster, here):
        cluster.repair()
        with RayExecutor(cluster.address, retries=0) as executor:
            for name in ("a", "b"):
                executor.start(name, part(name, "wait"))
            wait_until(lambda: executor.ended() == {} and len(executor.active) == 2)
            cluster.kill()
            (end,) = until_ended(executor).values()
        assert "it was lost 1 times" in end.reason()
        assert "its machine ended or cannot be reached" in end.reason()

    @pytest.mark.parametrize(
        ("resources", "sentence"),
        [
            (Resources(cores=64), "no machine of the Ray cluster has what one part needs, 64 cores: its machines have"),
            (Resources(gpus=2), "1 core, 2 GPUs"),
            (Resources(memory=2**50), "1.05e[+]06 GB of memory"),
        ],
    )
    def test_a_part_that_no_machine_can_run_is_refused_at_once(self, cluster, resources, sentence):
        with pytest.raises(ValueError, match=sentence):
            RayExecutor(cluster.address, resources)

    def test_waiting_for_ever_is_refused_too(self, cluster, on_ray, here, monkeypatch):
        monkeypatch.setattr("relpos.system.ray.CHECK", 0.0)
        monkeypatch.setattr("relpos.system.ray.PATIENCE", 1.0)
        for name in ("a", "b"):
            on_ray.start(name, part(name, "wait"))
        wait_until(lambda: on_ray.ended() == {} and len(on_ray.active) == 2)
        cluster.kill()
        cluster.kill()
        with pytest.raises(ValueError, match="no machine of the Ray cluster has what one part needs, 1 core"):
            until_ended(on_ray)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("127.0.0.1:1", "no Ray cluster answers at 127.0.0.1:1 .*refused"),
        ("nowhere.invalid:6379", "no Ray cluster answers at nowhere.invalid:6379"),
        ("somewhere", "'somewhere' is not the address of a Ray cluster: it looks like 10.0.0.1:6379"),
        ("ray://10.0.0.1:10001", "does not go through Ray's client"),
    ],
)
def test_a_wrong_address_is_a_sentence(address, sentence):
    with pytest.raises(ValueError, match=sentence):
        RayExecutor(address)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ray", "127.0.0.1:1"], "no Ray cluster answers at 127.0.0.1:1"),
        (["--slurm"], "this machine has no SLURM"),
        (["--slurm", "--ray"], "give --ray or --slurm, not both."),
        (["--gpus", "2"], "--memory and --gpus go with --ray or --slurm"),
        (["--ray", "local", "--memory", "much"], "--memory takes a size such as 8GB or 512MB, not 'much'."),
        (["--slurm-partition", "gpu"], "--slurm-partition, --slurm-minutes and --slurm-option go with --slurm."),
    ],
)
def test_the_command_says_what_is_wrong_and_makes_nothing(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))  # without sbatch
    done = CliRunner().invoke(app, ["compare", "--out", str(tmp_path / "out"), *arguments])
    assert isinstance(done.exception, ValueError)  # main prints it, and ends with 2
    assert str(done.exception).startswith(sentence)
    assert not (tmp_path / "out").exists()


class TestTheOptions:
    def test_ray_may_stand_without_an_address(self):
        assert with_address(["--ray"]) == ["--ray=auto"]
        assert with_address(["--ray", "--seeds", "3"]) == ["--ray=auto", "--seeds", "3"]
        assert with_address(["--ray", "run.steps=3"]) == ["--ray=auto", "run.steps=3"]
        assert with_address(["runs/a", "--ray", "runs/b"]) == ["runs/a", "--ray=auto", "runs/b"]
        for address in ("10.0.0.1:6379", "head.cluster:6379", "[fe80::1]:6379", "auto", "local", "ray://h:10001"):
            assert with_address(["--ray", address, "x=1"]) == ["--ray", address, "x=1"]

    def test_sizes_of_memory(self):
        sizes = {"8GB": 8 * 2**30, "1.5gb": 3 * 2**29, "512 MB": 2**29, "1000": 1000}
        assert {text: parse_memory(text) for text in sizes} == sizes

    def test_without_options_a_command_runs_as_before(self):
        assert make_executor(ClusterOptions()) is None
        executor = make_executor(ClusterOptions(), default_workers=1)
        assert isinstance(executor, LocalExecutor)
        assert (executor.places, executor.threads) == (1, os.cpu_count())

    @pytest.mark.parametrize(
        ("wrong", "sentence"),
        [({"cores": 0}, "at least 1 core, not 0"), ({"gpus": -1}, "0 or more, not -1"), ({"memory": 0}, "positive")],
    )
    def test_resources_that_cannot_be(self, wrong, sentence):
        with pytest.raises(ValueError, match=sentence):
            Resources(**wrong)

    def test_several_gpus_start_one_process_each_and_share_the_cores(self):
        resources = Resources(cores=8, gpus=4)
        assert resources.threads == 2
        training = Part("work", ("x",), Path(), Path("log"), distributed=True)
        assert training.command(1) == Part("work", ("x",), Path(), Path("log")).command(4) == ("-m", "work", "x")
        command = training.command(resources.gpus)
        assert command[:5] == ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
        assert command[5:] == ("-m", "work", "x")


class TestAMachine:
    """`run_part`, which Ray and SLURM call, in this process."""

    def test_without_the_folder_it_asks_for_the_files(self, here, tmp_path_factory, monkeypatch):
        job = make_job(part("a"), Resources())
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
        (here / "out/a/.shared").write_text("another folder of the same name")
        (event,) = run_part(job)
        assert event == Event(os.uname().nodename, missing=True)
        paths = [*job.part.reads, job.part.writes]
        began, *_, ended = events = list(run_part(job, pack(here, paths, [job.part.log])))
        assert (began, ended.exit.code) == (Event(os.uname().nodename), 0)
        assert b"".join(event.log for event in events) == b"threads 1\n"  # in several if the machine is slow
        assert "sum" not in files(here / "out/a")
        unpack(ended.files, Path("back"))
        assert files(Path("back/out/a"))["sum"] == "6 False"

    def test_files_come_back_the_oldest_first_and_complete(self, here):
        Path("far/out/a/inner").mkdir(parents=True)
        for age, name in enumerate(["record", "inner/weights", "log"]):
            Path("far/out/a", name).write_text(name)
            os.utime(Path("far/out/a", name), (10**9 - age, 10**9 - age))
        written: list[str] = []
        replace = os.replace

        def watched(source, target):
            written.append(str(Path(target).relative_to("out/a")))
            replace(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", watched)
            bring_back(pack(Path("far"), [Path("out/a")]), Path("out/a"))
        assert written == ["log", "inner/weights", "record"]
        assert files(Path("out/a")) == {name: name for name in written}


@pytest.mark.slow
class TestJobsOfSubmitit:
    """With submitit's local jobs: no SLURM here."""

    def test_a_command_that_was_killed_finds_its_job_again(self, here):
        first = SlurmExecutor(cluster="local")
        first.start("a", part("a", "wait"))
        wait_until((here / "out/a/begun").exists)
        number = (here / f"out/a/{FOLDER}/log{SUFFIX}").read_text()
        with SlurmExecutor(cluster="local") as second:
            second.start("a", part("a", "wait"))
            assert second.messages() == [f"a is job {number} of an earlier command: waiting for it"]
            os.kill(int((here / "out/a/process").read_text()), signal.SIGKILL)
            assert until_ended(second)["a"].code == -signal.SIGKILL
        first.stop()

    def test_a_job_that_disappears_is_submitted_again(self, here, monkeypatch):
        monkeypatch.setattr("relpos.system.slurm.CHECK", 0.0)
        monkeypatch.setattr("relpos.system.slurm.GONE", 0.5)
        messages: list[str] = []
        with SlurmExecutor(cluster="local", retries=1) as executor:

            def begun() -> bool:
                assert executor.ended() == {}
                messages.extend(executor.messages())
                return (here / "out/a/begun").exists()

            executor.start("a", part("a", "wait"))
            wait_until(begun)
            number = int((here / f"out/a/{FOLDER}/log{SUFFIX}").read_text())
            (here / "out/a/begun").unlink()
            kill_tree(number)
            wait_until(begun)
            assert messages == [f"job {number} of a disappeared. Submitting it again (1 of 1)"]
            kill_tree(int((here / f"out/a/{FOLDER}/log{SUFFIX}").read_text()))
            assert "its jobs disappeared 2 times" in until_ended(executor)["a"].reason()


class TestCommandsOfSlurm:
    """What we say to SLURM and how we read its answers, with shell scripts in place of its commands."""

    @pytest.fixture
    def slurm(self, here, monkeypatch):
        """Scripts that keep what they receive; the queue is what the file `queue` says."""
        scripts = {
            "sbatch": f"cp $1 {here}/script\necho Submitted batch job 7",
            "squeue": f"cat {here}/queue",
            "scancel": f"echo $@ >> {here}/cancelled",
            "srun": "true",
        }
        (here / "bin").mkdir()
        for name, script in scripts.items():
            (here / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (here / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{here / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.setattr("relpos.system.slurm.CHECK", 0.0)
        monkeypatch.setattr("relpos.system.slurm.STOP", 0.0)
        return here

    def test_a_job_asks_for_what_the_part_needs(self, slurm):
        (slurm / "queue").write_text("6|RUNNING|None\n7|PENDING|Priority\n")
        resources = Resources(cores=8, memory=24 * 2**30, gpus=2)
        with SlurmExecutor(resources, partition="gpu", minutes=240, options={"account": "lab"}) as executor:
            executor.start("a", part("a"))
            assert (executor.ended(), executor.active, executor.running) == ({}, [], ["a"])
            (slurm / "queue").write_text("7|RUNNING|None\n")
            assert (executor.ended(), executor.active) == ({}, ["a"])
        script = (slurm / "script").read_text()
        for line in [
            "cpus-per-task=8",
            "gpus-per-node=2",
            "mem=24GB",
            "time=240",
            "partition=gpu",
            "account=lab",
            "nodes=1",
        ]:
            assert f"#SBATCH --{line}\n" in script
        assert (slurm / "cancelled").read_text().split()[0] == "7"

    @pytest.mark.parametrize("reason", ["PartitionConfig", "QOSMaxCpuPerJobLimit"])
    def test_a_job_that_never_starts_is_refused(self, slurm, reason):
        (slurm / "queue").write_text(f"7|PENDING|{reason}\n")
        with SlurmExecutor(Resources(cores=64)) as executor:
            executor.start("a", part("a"))
            with pytest.raises(ValueError, match=f"never start a job that needs 64 cores \\({reason}\\): ask for less"):
                executor.ended()

    def test_what_sbatch_refuses_is_a_sentence(self, slurm):
        (slurm / "bin/sbatch").write_text("#!/bin/sh\necho sbatch: error: invalid partition specified: x >&2\nexit 1\n")
        with pytest.raises(ValueError, match=r"refused a job that needs 1 core: .*invalid partition specified: x"):
            SlurmExecutor(partition="x").start("a", part("a"))

    def test_a_controller_that_does_not_answer_loses_no_job(self, slurm, monkeypatch):
        monkeypatch.setattr("relpos.system.slurm.GONE", 1e-9)
        (slurm / "bin/squeue").write_text("#!/bin/sh\nexit 1\n")
        with SlurmExecutor() as executor:
            executor.start("a", part("a"))
            assert (executor.ended(), executor.messages()) == ({}, [])


def kill_tree(pid: int) -> None:
    """Kill a process and all below it, the lowest last: as a machine that fails."""
    children = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    os.kill(pid, signal.SIGKILL)
    for child in children.stdout.split():
        kill_tree(int(child))
