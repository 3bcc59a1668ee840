"""Every command of the project: `nox -l` lists them, plain `nox` runs the CPU tests.

A session keeps its environment in `.nox/` and reuses it; `nox --no-reuse-existing-virtualenvs` builds it anew.
What follows `--` is handed on, to pytest or to the benchmarks: `nox -s tests -- tests/unit/core -k seed`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import nox
from nox.virtualenv import PassthroughEnv

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests"]
nox.options.reuse_venv = "yes"

ROOT = Path(__file__).parent
CONSTRAINTS = ("-c", "constraints.txt")
# In place of the torch of constraints.txt: each version of torch_xla wants the torch of its own.
XLA = ("torch==2.9.0", "torch_xla==2.9.0")

# Tests with one of these marks have a session of their own.
MARKS = (
    "slow", "guarantees", "distributed", "slurm", "mpi", "ray", "interop", "cuda", "mps", "xla", "sim", "deepspeed",
    "optimizers", "trackers", "remote", "clients", "machines", "browser", "bench",
)  # fmt: skip

# What `tests-oldest` runs.
OLDEST = (
    "tests/unit", "tests/loops", "tests/resume", "tests/distributed/test_fsdp.py",
    "tests/distributed/test_trainer_ddp.py", "tests/distributed/test_mesh_plain.py",
)  # fmt: skip

# What `tests-interop-oldest` runs: the other tests compare with the newest transformers' Trainer.
OLDEST_INTEROP = tuple(
    f"tests/interop/test_{name}.py"
    for name in ("models", "stateful_interop", "peft", "text_columns_interop", "grouping_interop")
)

# What `tests-newest-quick` runs of `tests-newest`, in about five minutes on two cores.
QUICK = (
    "tests/arch/test_foreign.py", "tests/loops", "tests/resume/test_exact.py", "tests/resume/test_numbers.py",
    "tests/unit/storage", "tests/unit/optim/test_fused.py", "tests/unit/task", "tests/unit/evaluation/test_settings.py",
    "tests/interop/test_models.py", "tests/interop/test_peft.py", "tests/interop/test_hooks_interop.py",
    "tests/distributed/test_trainer_ddp.py", "tests/distributed/test_mesh_context.py",
)  # fmt: skip

# Experiment trackers by what their installation costs.
QUICK_TRACKERS = ("tensorboard", "wandb", "codecarbon")
SLOW_TRACKERS = ("clearml", "comet_ml", "dagshub", "dvclive", "flyte", "mlflow", "swanlab", "trackio")

# One thread per process: the models are tiny, and processes share the cores.
ENV = {"OMP_NUM_THREADS": "1"}
# Each worker takes about a gigabyte of memory; the tests of a file stay together, as they share their fixtures.
WORKERS = ("-n", str(min(os.cpu_count() or 1, 4)), "--dist", "loadfile")
# Python's own timeout ends whatever Python can end. What hangs below it, in a library's lock, is ended by this one,
# which prints every thread's place; with workers, the other tests still run.
NO_HANG = ("-o", "faulthandler_timeout=600", "-o", "faulthandler_exit_on_timeout=true")

RUNS = Path("runs/quickstart")
TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node", "2")
DIGITS = "examples/digits.py"
STOP_AFTER = "200"
QUICKSTART = (
    ("Train a digit classifier.", ("python", DIGITS, "--output-dir", f"{RUNS}/uninterrupted")),
    (
        f"Train it again, and stop in the middle of an epoch (step {STOP_AFTER}).",
        ("python", DIGITS, "--output-dir", f"{RUNS}/resumed", "--stop-after-steps", STOP_AFTER),
    ),
    ("Resume from the checkpoint.", ("python", DIGITS, "--output-dir", f"{RUNS}/resumed", "--resume")),
    (
        "Train on two processes in bfloat16, with the same script.",
        (*TORCHRUN, DIGITS, "--output-dir", f"{RUNS}/two_processes", "--strategy", "ddp", "--precision", "bf16"),
    ),
    ("Compare the three runs.", ("python", ".ci/quickstart.py", str(RUNS), STOP_AFTER)),
)

BUILD_SITE = ("python", "-m", "sphinx", "-j", "auto", "-W", "--keep-going", "-q", "-b", "html", "docs", "docs/_build")
built_by: list[str] = []  # the session that has built the site

# Arguments that keep an example short; the others run as they are.
SHORTENED = {
    "autoencoder": ("--epochs", "2"),
    "char_language_model": ("--steps", "20"),
    "digits": ("--epochs", "1"),
    "images": ("--epochs", "1"),
    "text_classifier_drop_in": ("--epochs", "1"),
    "number_words": ("--steps", "150"),
    "transfer": ("--epochs", "3"),
}


def install(session: nox.Session, *extras: str) -> None:
    """Install the working tree with its extras, in the versions of constraints.txt."""
    session.install(*CONSTRAINTS, "-e", f".[{','.join(extras)}]")


def pytest(session: nox.Session, mark: str, *args: str) -> None:
    """Run the tests a mark expression selects; no test at all is a failure (pytest's exit status 5)."""
    if not mark.startswith("not "):
        args = ("-o", "testpaths=tests", *args)  # no doctest has a mark
    session.run("python", "-m", "pytest", "-m", mark, *args, *session.posargs, env=ENV)


def build_site(session: nox.Session) -> None:
    """Build the HTML in docs/_build, once in a run of nox."""
    if not built_by:
        session.run(*BUILD_SITE)
        built_by.append(session.name)


def has_tests_marked(mark: str) -> bool:
    """Tell, without importing anything, whether some test carries a mark."""
    return any(f"pytest.mark.{mark}" in path.read_text("utf-8") for path in Path("tests").rglob("test_*.py"))


def skip_unless_marked(session: nox.Session, mark: str, reason: str) -> None:
    """Skip a session, before anything is installed, while no test carries its mark."""
    if not has_tests_marked(mark):
        session.skip(f"no test is marked {mark!r}; {reason}")


def skip_unless_torch_says(session: nox.Session, question: str, reason: str) -> None:
    """Skip a session when the torch in its environment does not see the device."""
    answer = session.run("python", "-c", f"import torch; print({question})", silent=True)
    if str(answer).split()[-1:] != ["True"]:
        session.skip(f"{reason} ({question} is {answer!s:.200})")


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train on the handwritten digits, stop and resume, then train on two processes."""
    session.log("Installing hftrain and PyTorch takes a few minutes the first time.")
    session.log("pip prints nothing meanwhile. The training takes one or two minutes.")
    install(session, "examples")
    shutil.rmtree(RUNS, ignore_errors=True)
    for number, (title, command) in enumerate(QUICKSTART, 1):
        session.log(f"{number}/{len(QUICKSTART)}  {title}")
        # Without nox's own line for the command, which is longer than a terminal is wide.
        session.run(*command, env=ENV, log=False)


@nox.session
def flight(session: nox.Session) -> None:
    """Find the spoiled samples behind a spike, go on without them, and find where another run parts."""
    install(session, "examples")
    shutil.rmtree(RUNS / "flight", ignore_errors=True)
    script = str(ROOT / "examples/flight_log.py")
    a, b, found = (str(RUNS / "flight" / name) for name in ("a", "b", "exclude.json"))
    for command in (
        ("python", script, "--output-dir", a),
        ("hftrain", "blame", a, "--output", found),
        ("python", script, "--output-dir", b, "--dropout", "0.11", "--resume", f"{a}/checkpoint-60"),
        ("hftrain", "bisect", a, b, "--output", str(RUNS / "flight" / "bisect")),
        ("python", script, "--output-dir", a, "--resume", f"{a}/checkpoint-20", "--exclude", found),
    ):
        session.run(*command, env=ENV)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the unit, loop, resume, surface and architecture tests and the doctests on the CPU."""
    install(session, "test", "report")
    pytest(session, " and ".join(f"not {mark}" for mark in MARKS), *WORKERS, *NO_HANG)


@nox.session(name="tests-slow")
def tests_slow(session: nox.Session) -> None:
    """Run the long versions of tests whose short ones always run."""
    skip_unless_marked(session, "slow", "the short versions run in `tests`")
    install(session, "test", "examples")
    pytest(session, "slow and not bench")


@nox.session
def guarantees(session: nox.Session) -> None:
    """Run the long tests of the eleven guarantees; `tests` and `tests-distributed` run the short ones."""
    install(session, "test", "s3", "transformers", "peft")
    session.install(*CONSTRAINTS, "moto[server]")
    # A file takes minutes, so its tests are shared out one by one.
    pytest(session, "guarantees", *WORKERS, "--dist", "load")


@nox.session(name="tests-distributed")
def tests_distributed(session: nox.Session) -> None:
    """Run the tests that start several real processes (gloo, on the CPU)."""
    install(session, "test", "transformers", "peft")
    mark = "distributed and not interop and not cuda and not deepspeed and not xla and not slow and not guarantees"
    # Ranks wait for each other a third of the time.
    pytest(session, mark, *WORKERS, *NO_HANG)


def need_programs(session: nox.Session, packages: str, *programs: str) -> None:
    """Skip a session where a program is missing and cannot be installed: root can, on Debian."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])

    def missing() -> list[str]:
        return [name for name in programs if not shutil.which(name, path=path)]

    if missing() and shutil.which("apt-get") and os.geteuid() == 0:
        command = ("apt-get", "install", "--yes", "--no-install-recommends", *packages.split())
        session.run(*command, external=True, success_codes=range(256))
    if missing():
        session.skip(f"no {', '.join(missing())}; on Debian: apt-get install {packages}")


@nox.session(name="tests-slurm")
def tests_slurm(session: nox.Session) -> None:
    """Run the tests under a real SLURM of one machine, which they start and stop."""
    need_programs(session, "slurm-wlm munge", "munged", "slurmctld", "slurmd", "srun")
    install(session, "test")
    pytest(session, "slurm", "tests/distributed/test_slurm.py", *NO_HANG)


@nox.session(name="tests-mpi")
def tests_mpi(session: nox.Session) -> None:
    """Run the tests under the real mpirun of Open MPI and of MPICH."""
    need_programs(session, "openmpi-bin mpich", "mpirun.openmpi", "mpiexec.hydra")
    install(session, "test")
    pytest(session, "mpi", "tests/distributed/test_mpi.py", *NO_HANG)


@nox.session(name="tests-machines")
def tests_machines(session: nox.Session) -> None:
    """Run the tests on two machines that are made of network namespaces; needs Linux, iproute2 and root."""
    if sys.platform != "linux" or os.geteuid() != 0:
        session.skip("making network namespaces needs Linux and root")
    need_programs(session, "iproute2 util-linux", "ip", "unshare")
    install(session, "test")
    pytest(session, "machines", "tests/machines", *NO_HANG)


@nox.session(name="tests-ray")
def tests_ray(session: nox.Session) -> None:
    """Run the tests inside a real Ray: workers of Ray Train, and its Tune as a search's backend."""
    install(session, "test", "search")
    session.install(*CONSTRAINTS, "ray[train,tune]")
    files = ("tests/distributed/test_ray_train.py", "tests/unit/search/test_ray_tune.py")
    session.run("python", "-m", "pytest", *files, *NO_HANG, *session.posargs, env=ENV)


@nox.session(name="tests-interop")
def tests_interop(session: nox.Session) -> None:
    """Run the tests against the installed transformers and datasets."""
    install(session, "test", "transformers", "peft", "search")
    # What transformers' models and processors of images want.
    session.install(*CONSTRAINTS, "pillow", "scipy")
    pytest(session, "interop and not cuda and not slow", *WORKERS, *NO_HANG)


@nox.session(name="tests-interop-oldest", python="3.10")
def tests_interop_oldest(session: nox.Session) -> None:
    """Run tests of models, datasets and adapters with the oldest transformers, datasets and peft that are allowed."""
    if sys.platform != "linux":
        session.skip("the oldest versions are tested on Linux")
    extras = ".[test,transformers,peft]"
    install_without_cuda(session, "--resolution", "lowest-direct", "-e", extras, "pillow>=10", "scipy>=1.10")
    pytest(session, "interop and not slow", *WORKERS, *NO_HANG, *OLDEST_INTEROP)


@nox.session(name="tests-clients")
@nox.parametrize("environment", ["current", "previous", "pylate", "llamafactory", "axolotl", "swift"])
def tests_clients(session: nox.Session, environment: str) -> None:
    """Train with libraries that derive their trainers from transformers', once with its Trainer and once with ours.

    What the libraries require does not fit together, so each environment gets the versions of
    tests/clients/requirements-*.txt as they are. The results replace those in tests/clients/results, of which
    `python docs/tables.py` makes the tables of docs/clients.md.
    """
    need_programs(session, "gcc binutils", "gcc", "nm", "readelf")
    session.install("--no-deps", "-r", f"tests/clients/requirements-{environment}.txt", "-e", ".")
    # PyPI's torch for Linux is CUDA's, of which the CPU needs nothing else.
    session.run_install("python", ".ci/cpu_torch.py")
    results = {"CLIENTS_RESULTS": str(ROOT / "tests/clients/results")}
    # Many trainers share a process, which may run longer than a test that hangs elsewhere.
    no_hang = ("-o", "faulthandler_timeout=3600", "-o", "faulthandler_exit_on_timeout=true")
    # The plugin of an older anyio uses what pytest deprecates.
    files = ("-p", "no:anyio", "-m", "clients", "-k", environment, "tests/clients/test_clients.py")
    session.run("python", "-m", "pytest", *files, *no_hang, *session.posargs, env={**ENV, **results})


@nox.session(name="tests-cuda")
def tests_cuda(session: nox.Session) -> None:
    """Run the GPU tests; skipped where torch sees no GPU."""
    install(session, "test")
    skip_unless_torch_says(session, "torch.cuda.is_available()", "no GPU that torch can use")
    # It may want CUDA's compiler to be installed; without it its tests are skipped, with the reason.
    session.install(*CONSTRAINTS, "deepspeed", success_codes=(0, 1))
    pytest(session, "cuda and not bench")


@nox.session(name="tests-mps")
def tests_mps(session: nox.Session) -> None:
    """Run the Apple GPU tests; skipped where torch sees none."""
    install(session, "test")
    skip_unless_torch_says(session, "torch.backends.mps.is_available()", "no Apple GPU that torch can use")
    pytest(session, "mps and not bench")


def install_without_cuda(session: nox.Session, *what: str) -> None:
    """Install, with a torch whose PyPI build for Linux is CUDA's, without the gigabytes of CUDA.

    pip cannot leave out what a package requires; uv can. Elsewhere than in a test environment, use pip.
    """
    if not shutil.which("gcc"):
        session.skip("no gcc, which builds the stand-ins for CUDA's libraries (.ci/cpu_torch.py)")
    session.install(*CONSTRAINTS, "uv")
    python = str(Path(session.bin, "python"))
    options = ("--python", python, "--compile-bytecode", "--excludes", ".ci/no_cuda.txt")
    session.run_install("uv", "pip", "install", *options, *what)
    session.run_install("python", ".ci/cpu_torch.py")


@nox.session(name="tests-oldest", python="3.10")
def tests_oldest(session: nox.Session) -> None:
    """Run tests with Python 3.10 and the oldest version of each package that pyproject.toml allows."""
    if sys.platform != "linux":
        session.skip("the oldest versions are tested on Linux")
    install_without_cuda(session, "--resolution", "lowest-direct", "-e", ".[test]")
    marks = " and ".join(f"not {mark}" for mark in MARKS if mark != "distributed")
    pytest(session, marks, *WORKERS, *NO_HANG, *OLDEST)


def run_newest(session: nox.Session, *files: str) -> None:
    """Run tests with the versions that pip installs today: constraints.txt is left out, and reused packages updated."""
    packages = ("--upgrade", "-e", ".[test,report,transformers,peft,search]", "trl", "pillow", "scipy")
    if sys.platform == "linux":
        install_without_cuda(session, *packages)
    else:
        session.install(*packages)
    names = ("torch", "accelerate", "transformers", "datasets", "peft", "trl")
    versions = f"import importlib.metadata as m; print(*(f'{{n}} {{m.version(n)}}' for n in {names}), sep=', ')"
    session.run("python", "-c", versions, log=False)
    marks = " and ".join(f"not {mark}" for mark in MARKS if mark not in ("distributed", "interop"))
    pytest(session, marks, *WORKERS, *NO_HANG, *files)


@nox.session(name="tests-newest")
def tests_newest(session: nox.Session) -> None:
    """Run what `tests`, `tests-interop` and `tests-distributed` run, with the newest version of every package."""
    run_newest(session)


@nox.session(name="tests-newest-quick")
def tests_newest_quick(session: nox.Session) -> None:
    """Run the part of `tests-newest` in which new versions break most."""
    run_newest(session, *QUICK)


@nox.session(name="tests-python", python=["3.10", "3.12", "3.13"])
def tests_python(session: nox.Session) -> None:
    """Run what `tests` runs with another Python; each must be installed."""
    if sys.platform == "linux":
        install_without_cuda(session, *CONSTRAINTS, "-e", ".[test]")
    else:
        install(session, "test")
    pytest(session, " and ".join(f"not {mark}" for mark in MARKS), *WORKERS, *NO_HANG)


def install_xla(session: nox.Session) -> None:
    """Install torch_xla and the torch it was built for."""
    wheels = "sys.platform == 'linux' and platform.machine() == 'x86_64' and (3, 10) <= sys.version_info < (3, 14)"
    if "False" in str(session.run_install("python", "-c", f"import platform, sys; print({wheels})", silent=True)):
        session.skip("torch_xla 2.9 has wheels for Python 3.10 to 3.13 on Linux, x86_64")
    pins = Path(session.virtualenv.location, "constraints.txt")
    pinned = re.sub(r"(?m)^torch==.*$", "\n".join(XLA), Path("constraints.txt").read_text("utf-8"))
    pins.write_text(pinned, "utf-8")
    install_without_cuda(session, "-c", str(pins), "-e", ".[test,xla]")


@nox.session(name="tests-xla")
def tests_xla(session: nox.Session) -> None:
    """Run the torch_xla tests on one, two and four devices that it makes of the CPU.

    `nox --no-venv -s tests-xla` runs them in the environment it is called in, and installs nothing.
    """
    found = "import importlib.util; print(importlib.util.find_spec('torch_xla') is not None)"
    if not isinstance(session.virtualenv, PassthroughEnv):
        install_xla(session)
    elif "True" not in str(session.run("python", "-c", found, silent=True)):
        session.skip("torch_xla is not installed")
    # The other files need not be importable with that older torch, and cost time.
    files = [str(path) for path in Path("tests").rglob("test_*.py") if "pytest.mark.xla" in path.read_text("utf-8")]
    pytest(session, "xla", *files, *NO_HANG)


@nox.session(name="tests-sim")
def tests_sim(session: nox.Session) -> None:
    """Run the tests on a simulated accelerator, which is compiled once for each version of torch (two minutes)."""
    skip_unless_marked(session, "sim", "nothing would run on the simulated accelerator")
    need_programs(session, "g++ ninja-build", "g++", "ninja")
    install(session, "test", "transformers", "peft", "search")
    # With what is installed: it takes as long as the tests, so .ci/run does it beside something else.
    session.run_install("python", "-m", "tests.support.torch_sim.build")
    pytest(session, "sim and not slow", "tests/sim", *WORKERS, *NO_HANG)


@nox.session(name="tests-deepspeed")
def tests_deepspeed(session: nox.Session) -> None:
    """Run the DeepSpeed tests on the CPU: its launchers, and two processes with each stage of ZeRO."""
    install(session, "test", "deepspeed", "transformers", "peft")
    pytest(session, "deepspeed", *NO_HANG)


@nox.session(name="tests-optimizers")
def tests_optimizers(session: nox.Session) -> None:
    """Run the tests of optimizers that come with packages of their own."""
    install(session, "test", "optimizers")
    pytest(session, "optimizers and not slow", *WORKERS, *NO_HANG)


@nox.session(name="tests-trackers")
def tests_trackers(session: nox.Session) -> None:
    """Run the tests that train with real experiment trackers, offline: those that pip installs together quickly."""
    install(session, "test", *QUICK_TRACKERS)
    pytest(session, "trackers and not slow")


@nox.session(name="tests-trackers-all", venv_backend="uv")
def tests_trackers_all(session: nox.Session) -> None:
    """Run them with every tracker; needs uv, as pip takes very long to find versions that fit together."""
    install(session, "test", *QUICK_TRACKERS, *SLOW_TRACKERS)
    pytest(session, "trackers and not slow")


@nox.session(name="tests-loaders")
def tests_loaders(session: nox.Session) -> None:
    """Run the tests with the data of grain and WebDataset; they skip where these are not installed."""
    install(session, "test", "transformers")
    session.install(*CONSTRAINTS, "grain", "webdataset")
    pytest(session, "interop", "tests/interop/test_loader_packages.py")


@nox.session(name="tests-remote")
def tests_remote(session: nox.Session) -> None:
    """Run the tests against a real S3 server on the loopback, which fails on request."""
    install(session, "test", "s3")
    session.install(*CONSTRAINTS, "moto[server]")
    pytest(session, "remote and not guarantees and not bench", *NO_HANG)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    session.install(*CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    install(session, "types")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """Run the documentation's code blocks, check its links and build the HTML in docs/_build."""
    install(session, "docs", "examples", "search")
    session.run("python", "docs/check.py", env=ENV)
    build_site(session)


@nox.session(name="docs-browser")
def docs_browser(session: nox.Session) -> None:
    """Build the HTML and open every page in Chromium: width, contrast, console, network, search."""
    need_programs(session, "chromium", "chromium")
    install(session, "docs", "test", "report")
    session.install(*CONSTRAINTS, "playwright")
    build_site(session)
    pytest(session, "browser", "tests/browser", *NO_HANG)


@nox.session
def build(session: nox.Session) -> None:
    """Build sdist and wheel into dist/, check them, and try the wheel in an empty environment.

    `nox -s build -- --sizes` also prints what each extra adds to an installation.
    """
    session.install(*CONSTRAINTS, "build", "twine", "uv")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build", "--installer", "uv")
    built = sorted(str(path) for path in (ROOT / "dist").iterdir())
    session.run("twine", "check", "--strict", *built)
    empty = Path(session.create_tmp(), "empty")
    session.run("uv", "venv", "--clear", "--python", sys.executable, str(empty))
    python = str(next(path for path in (empty / "bin/python", empty / "Scripts/python.exe") if path.exists()))
    wheel = next(path for path in built if path.endswith(".whl"))
    session.run("uv", "pip", "install", "--quiet", "--python", python, *CONSTRAINTS, wheel)
    session.run(python, "-P" if sys.version_info >= (3, 11) else "-B", ".ci/try_wheel.py", external=True, env=ENV)
    if "--sizes" in session.posargs:
        session.run("python", ".ci/extra_sizes.py")


@nox.session
def release(session: nox.Session) -> None:
    """Build the version, install its wheel in an empty environment and run the README there; on a tag, check that too.

    On a commit with a tag, the tag names the version, CHANGELOG.md has its date, and nothing is uncommitted.
    """
    version = str(re.findall(r'^__version__ = "(.+)"', Path("src/hftrain/__init__.py").read_text("utf-8"), re.M)[0])
    heading = re.search(rf"^## {re.escape(version)} - (.+)$", Path("CHANGELOG.md").read_text("utf-8"), re.M)
    if heading is None:
        session.error(f"CHANGELOG.md has no heading `## {version} - <date>`. Write down what the version gives users.")
    tags = str(session.run("git", "tag", "--points-at", "HEAD", external=True, silent=True)).split()
    if tags and f"v{version}" not in tags:
        session.error(f"HEAD is tagged {tags}, but src/hftrain/__init__.py says {version}. Tag it v{version}.")
    if tags and not re.fullmatch(r"\d{4}-\d\d-\d\d", heading[1]):
        session.error(f"CHANGELOG.md says {heading[1]!r} where the date of {version} belongs, such as 2027-01-31.")
    if tags and session.run("git", "status", "--porcelain", external=True, silent=True):
        session.error("The working tree differs from the tagged commit. Commit or remove what `git status` lists.")
    build(session)
    session.log(f"dist/ holds hftrain {version}" + ("." if tags else "; HEAD has no tag yet, see docs/releasing.md."))


@nox.session
def examples(session: nox.Session) -> None:
    """Run every script in examples/, shortened where it takes long; those with a story as notebooks."""
    scripts = sorted(Path("examples").glob("*.py"))
    if not scripts:
        session.error("examples/ holds no script.")
    install(session, "examples")
    with session.chdir(session.create_tmp()):
        session.run("python", str(ROOT / "docs/notebooks.py"), "notebooks")
        notebooks = sorted(str(path) for path in Path("notebooks").glob("*.ipynb"))
        session.run("jupyter", "execute", *notebooks, env=ENV)
        for script in scripts:
            if f"notebooks/{script.stem}.ipynb" not in notebooks:
                session.run("python", str(ROOT / script), *SHORTENED.get(script.stem, ()), env=ENV)


@nox.session
def mutation(session: nox.Session) -> None:
    """Change single operators of the loss, the checkpoint and the feed, and count the changes that a test notices."""
    install(session, "test")
    session.install(*CONSTRAINTS, "cosmic-ray")
    session.run("python", ".ci/mutation.py", *session.posargs, env=ENV)


@nox.session
def figures(session: nox.Session) -> None:
    """Measure the overhead of a step, and write it into README.md and docs/performance.md; wants a quiet machine."""
    install(session, "transformers")
    session.install(*CONSTRAINTS, "lightning")
    session.run("python", "benchmarks/overhead.py", "--write", *session.posargs, env=ENV)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the tests that measure, then every script in benchmarks/ next to its peers; wants a quiet machine."""
    install(session, "test", "transformers")
    session.install(*CONSTRAINTS, "lightning")
    if has_tests_marked("bench"):
        session.run("python", "-m", "pytest", "-m", "bench", env=ENV)
    for script in sorted(Path("benchmarks").glob("[!_]*.py")):
        session.run("python", str(script), *session.posargs, env=ENV)
