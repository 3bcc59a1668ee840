"""Who may import whom: docs/design explains the rooms and their floors, this file enforces them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.source import FLOOR_OF, PACKAGE, ROOT, Module, is_type_checking, modules, walk_outside_functions

# What an import inside a function may be for: packages that are optional, or too heavy for `import hftrain`.
OPTIONAL_OR_HEAVY = frozenset(
    {
        "IPython",
        "accelerate",
        "apollo_torch",
        "azureml",
        "bitsandbytes",
        "clearml",
        "codecarbon",
        "comet_ml",
        "dagshub",
        "datasets",
        "deepspeed",
        "dvclive",
        "flytekit",
        "fsspec",
        "galore_torch",
        "huggingface_hub",
        "ipywidgets",
        "jinja2",
        "jsonargparse",
        "liger_kernel",
        "lightning_utilities",
        "lomo_optim",
        "PIL",
        "matplotlib",
        "mlflow",
        "optuna",
        "peft",
        "plotext",
        "plotly",
        "ray",
        "schedulefree",
        "shtab",
        "swanlab",
        "tensorboard",
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed",
        "torch.utils.tensorboard",
        "torch_xla",
        "torchao",
        "torchdata",
        "torchmetrics",
        "psutil",
        "tqdm.auto",
        "tqdm.notebook",
        "trackio",
        "transformers",
        "wandb",
        "yaml",
    }
)


@dataclass(frozen=True)
class Import:
    """One imported module: what is imported from it, and whether that happens on import or in a function."""

    module: Module
    node: ast.Import | ast.ImportFrom
    target: str
    names: tuple[str, ...]
    is_typing: bool
    is_in_function: bool

    @property
    def room(self) -> str:
        """The room of the package that is imported; empty for `hftrain` itself and for other packages."""
        package, _, rest = self.target.partition(".")
        return rest.split(".")[0] if package == "hftrain" else ""

    @property
    def is_ours(self) -> bool:
        """Whether the imported module belongs to this package."""
        return self.target.split(".")[0] == "hftrain"

    def __str__(self) -> str:
        return f"{self.module.at(self.node)}: {ast.unparse(self.node)}"


def imports_of(module: Module, known: frozenset[str]) -> Iterator[Import]:
    """Yield a module's imports; ``from package import submodule`` counts as an import of the submodule."""
    on_import = set(map(id, walk_outside_functions(module.tree)))
    typing = {id(n) for block in filter(is_type_checking, ast.walk(module.tree)) for n in ast.walk(block)}
    for node in ast.walk(module.tree):
        where = {"is_typing": id(node) in typing, "is_in_function": id(node) not in on_import}
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node, alias.name, (), **where)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names = [alias.name for alias in node.names]
            submodules = [name for name in names if f"{base}.{name}" in known]
            for name in submodules:
                yield Import(module, node, f"{base}.{name}", (name,), **where)
            if len(submodules) < len(names):
                yield Import(module, node, base, tuple(sorted(set(names) - set(submodules))), **where)


KNOWN = frozenset(module.name for module in modules())
IMPORTS = [found for module in modules() for found in imports_of(module, KNOWN)]


def check_floors(found: list[Import]) -> list[str]:
    return [
        f"{i} ({i.module.room} must not import {i.room})"
        for i in found
        if i.module.room and i.room and i.room != i.module.room and FLOOR_OF[i.room] >= FLOOR_OF[i.module.room]
    ]


def check_private_names(found: list[Import]) -> list[str]:
    """Name the imports of an underscore name, or of an underscore module of another room."""
    return [
        str(i)
        for i in found
        if i.is_ours
        and (
            any(name.startswith("_") and not name.startswith("__") for name in i.names)
            or (i.room != i.module.room and any(part.startswith("_") for part in i.target.split(".")))
        )
    ]


def check_function_imports(found: list[Import]) -> list[str]:
    """Name the imports inside functions that are not for an optional or heavy package."""

    def is_allowed(i: Import) -> bool:
        # Arguments are plain data that can be built without torch, so to them torch itself is heavy.
        packages = OPTIONAL_OR_HEAVY | ({"torch"} if i.module.room == "arguments" else set())
        return any(i.target == package or i.target.startswith(f"{package}.") for package in packages)

    return [str(i) for i in found if i.is_in_function and not is_allowed(i)]


def find_cycle(found: list[Import]) -> list[str]:
    """Return one cycle of modules that import each other, or nothing; a package's own children do not count."""
    edges: dict[str, set[str]] = {}
    for i in found:
        if i.is_ours and not i.is_typing:
            edges.setdefault(i.module.name, set()).add(i.target)
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for target in sorted(edges.get(name, ())):
                cycle = visit(target, [*path, name])
                if cycle:
                    return cycle
            done.add(name)
        return []

    return next((cycle for name in sorted(edges) if (cycle := visit(name, []))), [])


def private_attributes(module: Module) -> Iterator[str]:
    """Yield uses of an underscore name through a module of ours: ``registry._entry``."""
    ours = {
        (alias.asname or alias.name).split(".")[-1]
        for i in IMPORTS
        if i.module is module and i.is_ours and i.target in KNOWN
        for alias in i.node.names
        if (isinstance(i.node, ast.Import) and alias.name == i.target) or i.names == (alias.name,)
        if isinstance(i.node, ast.Import) or f"{i.node.module}.{alias.name}" in KNOWN
    }
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            owner = ast.unparse(node.value).split(".")[-1]
            if owner in ours:
                yield f"{module.at(node)}: {ast.unparse(node)}"


def test_rooms_all_have_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    assert rooms <= FLOOR_OF.keys(), "a new room needs a floor here and a line in docs/design"


def test_package_has_no_files_outside_rooms() -> None:
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]


def test_extras_do_not_know_each_other() -> None:
    """An extra is a file or a folder below `extras`; the core imports none, since its floors are below theirs."""
    guests = [(i, i.module.name.split(".")[2:3], i.target.split(".")[2:3]) for i in IMPORTS if i.room == "extras"]
    assert [str(i) for i, own, other in guests if i.module.room == "extras" and own != other] == []


def test_imports_are_absolute() -> None:
    relative = [i for i in IMPORTS if isinstance(i.node, ast.ImportFrom) and i.node.level]
    assert [str(i) for i in relative] == []


def test_imports_run_downwards() -> None:
    assert check_floors(IMPORTS) == []


def test_imports_never_reach_for_the_package_facade() -> None:
    assert [str(i) for i in IMPORTS if i.target == "hftrain"] == []


def test_imports_take_no_private_name() -> None:
    assert check_private_names(IMPORTS) == []
    assert [use for module in modules() for use in private_attributes(module)] == []


def test_imports_form_no_cycle() -> None:
    assert find_cycle(IMPORTS) == []


def test_imports_in_functions_are_for_optional_or_heavy_packages() -> None:
    assert check_function_imports(IMPORTS) == []


def test_dependencies_are_imported_and_every_plain_import_is_a_dependency() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {line.partition(">=")[0].replace("-", "_") for line in project["dependencies"]}
    foreign = [i for i in IMPORTS if i.target.split(".")[0] not in {"hftrain", *sys.stdlib_module_names}]
    # A task's metrics follow torchmetrics' protocol, and users import it.
    assert declared - {i.target.split(".")[0] for i in foreign} == {"torchmetrics"}
    plain = [i for i in foreign if not i.is_in_function and not i.is_typing]
    assert [str(i) for i in plain if i.target.split(".")[0] not in declared] == []


def test_arguments_load_no_torch() -> None:
    heavy = [i for i in IMPORTS if i.module.room == "arguments" and i.target.split(".")[0] == "torch"]
    assert [str(i) for i in heavy if not i.is_typing and not i.is_in_function] == []


def as_imports(name: str, text: str, **others: Any) -> list[Import]:
    """Read a made-up module, for the tests of the checks themselves."""
    module = Module(PACKAGE / (name.replace(".", "/") + ".py"), name, ast.parse(text))
    return list(imports_of(module, KNOWN | {name}))


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("hftrain.core.x", "from hftrain.optim import y"),
        ("hftrain.core.x", "import hftrain.arguments"),
        ("hftrain.precision.x", "from hftrain.strategies.ddp import DDPStrategy"),
        ("hftrain.strategies.x", "def f():\n    from hftrain.precision import y"),
        ("hftrain.task.x", "from hftrain.step.stepper import Stepper"),
        ("hftrain.loops.x", "if TYPE_CHECKING:\n    from hftrain.trainer.trainer import Trainer"),
    ],
)
def test_check_floors_sees_an_import_that_is_not_downwards(importer: str, text: str) -> None:
    assert len(check_floors(as_imports(importer, text))) == 1


@pytest.mark.parametrize("text", ["from hftrain.core.registry import _Entry", "from hftrain.core._inner import name"])
def test_check_private_names_sees_one(text: str) -> None:
    assert len(check_private_names(as_imports("hftrain.optim.x", text))) == 1


@pytest.mark.parametrize("text", ["def f():\n    import json", "class A:\n    def f(self):\n        import torch.nn"])
def test_check_function_imports_sees_one(text: str) -> None:
    assert len(check_function_imports(as_imports("hftrain.optim.x", text))) == 1


def test_find_cycle_sees_one() -> None:
    both = as_imports("hftrain.core.a", "import hftrain.core.b") + as_imports("hftrain.core.b", "import hftrain.core.a")
    assert find_cycle(both) == ["hftrain.core.a", "hftrain.core.b", "hftrain.core.a"]
