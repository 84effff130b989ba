"""The import rule, the size limits and the lazy imports, checked on the sources."""

import ast
import dataclasses
import functools
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parent.parent
SOURCES = sorted(
    path
    for package in ("pallas_kernels", "jaxaccel")
    for path in (ROOT / package).rglob("*.py")
)
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# A package imports what stands on an earlier line, and itself. `cache` and `data`
# share a line and so do not import each other; `quant` is below both.
LAYERS = (
    ("pallas_kernels",),
    ("core",),
    ("quant",),
    ("cache", "data"),
    ("nn",),
    ("models",),
    ("training", "decoding"),
    ("systems",),
    ("reports",),
    ("config",),
    ("benchmarks",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: i for i, row in enumerate(LAYERS) for name in row}

# Each of these is imported in one file, which owns it.
OWNED = ("grain", "orbax", "safetensors", "tensorboardX", "tokenizers")
KERNEL_IMPORTS = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
# What the benchmarks compare with, imported where it happens to be installed.
PEERS = {"fla", "tokamax", "torch"}
PEER_FILES = ("specs.py", "torch_peer.py")
# Kernel bodies and the code that launches them read better in one piece.
KERNEL_FILE_LIMIT, FILE_LIMIT, FUNCTION_LIMIT = 900, 600, 120
FORBIDDEN_NAMES = ("utils.py", "helpers.py")


def relative(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(module: str) -> str | None:
    """The row of LAYERS that a module stands in; `None` for what is not ours."""
    parts = module.split(".")
    if parts[0] == "pallas_kernels":
        return "pallas_kernels"
    if parts[0] == "jaxaccel":
        return parts[1] if len(parts) > 1 else None
    return None


@dataclasses.dataclass
class Facts:
    """What the rules look at in a file.

    Attributes:
      imports: (line, module); `from a import b` gives a.b and a.
      relative_imports: lines.
      functions: (line, name, lines).
      broad_handlers: lines of `except` clauses that catch everything.
      lines: of the file.
    """

    imports: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    relative_imports: list[int] = dataclasses.field(default_factory=list)
    functions: list[tuple[int, str, int]] = dataclasses.field(default_factory=list)
    broad_handlers: list[int] = dataclasses.field(default_factory=list)
    lines: int = 0


@functools.cache
def facts(path: pathlib.Path) -> Facts:
    """Reads a file; once for all tests."""
    text = path.read_text()
    found = Facts(lines=text.count("\n"))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                found.relative_imports.append(node.lineno)
            module = node.module or ""
            names = [module, *(f"{module}.{alias.name}" for alias in node.names)]
            found.imports += [(node.lineno, name) for name in names]
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            found.functions.append((node.lineno, node.name, length))
        elif isinstance(node, ast.ExceptHandler):
            kind = node.type
            if kind is None or (
                isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")
            ):
                found.broad_handlers.append(node.lineno)
    return found


def is_kernel_file(path: pathlib.Path) -> bool:
    return path.name.startswith("kernel")


# Each rule is one test over all files that names every place: a test a file and rule
# would be some two thousand, which take longer to start than to run.


def test_imports_go_one_way():
    wrong = []
    for path in SOURCES:
        name = relative(path)
        wrong += [
            f"{name}:{line} imports relatively" for line in facts(path).relative_imports
        ]
        here = package_of(".".join(path.relative_to(ROOT).with_suffix("").parts))
        if here is None or here == "__init__":
            continue
        if here not in LEVEL:
            wrong.append(f"{name}: add {here!r} to LAYERS")
            continue
        for line, module in facts(path).imports:
            there = package_of(module)
            if there is None or there == here or there not in LEVEL:
                continue
            if LEVEL[there] >= LEVEL[here]:
                wrong.append(f"{name}:{line}: {here} must not import {there}")
    assert wrong == []


def test_third_party_imports_stand_where_they_belong():
    wrong = []
    for path in SOURCES:
        name = relative(path)
        peers = PEERS if path.name in PEER_FILES else set()
        in_config = name.startswith("jaxaccel/config/") or name == "jaxaccel/cli.py"
        for line, module in facts(path).imports:
            top = module.split(".")[0]
            if name.startswith("pallas_kernels/") and top not in KERNEL_IMPORTS | peers:
                wrong.append(f"{name}:{line} imports {top}")
            if top == "gin" and not in_config:
                wrong.append(
                    f"{name}:{line}: gin belongs to jaxaccel/config and cli.py"
                )
            if module.startswith("jax._src") and not name.startswith(
                "pallas_kernels/_common/"
            ):
                wrong.append(
                    f"{name}:{line}: jax._src belongs to pallas_kernels/_common"
                )
    assert wrong == []


@pytest.mark.parametrize("package", OWNED)
def test_a_library_is_imported_in_the_one_file_that_owns_it(package):
    owners = {
        relative(path)
        for path in SOURCES
        for _, module in facts(path).imports
        if module.split(".")[0] == package
    }
    assert len(owners) == 1, f"{package} is imported in {sorted(owners)}"


def test_files_and_functions_stay_short():
    wrong = []
    for path in SOURCES + TESTS:
        found, name = facts(path), relative(path)
        limit = KERNEL_FILE_LIMIT if is_kernel_file(path) else FILE_LIMIT
        if found.lines >= limit:
            wrong.append(f"{name} has {found.lines} lines, limit {limit}")
        if is_kernel_file(path):
            continue
        wrong += [
            f"{name}:{line}: {function} has {length} lines"
            for line, function, length in found.functions
            if length >= FUNCTION_LIMIT
        ]
    assert wrong == []


def test_no_broad_except_and_no_catch_all_file():
    wrong = []
    for path in SOURCES + TESTS:
        name = relative(path)
        if path.name in FORBIDDEN_NAMES:
            wrong.append(f"{name} has a name that says nothing")
        wrong += [
            f"{name}:{line} catches everything" for line in facts(path).broad_handlers
        ]
    assert wrong == []


def test_kernels_write_in_place_by_the_one_way_that_no_fusion_breaks():
    """A reference of another file has none of the barriers of `in_place.update`."""
    names = {"new_ref", "input_output_aliases"}

    def makes_one(path):
        for node in ast.walk(ast.parse(path.read_text())):
            kinds = (ast.Attribute, ast.alias, ast.keyword, ast.Name)
            if isinstance(node, kinds):
                found = {getattr(node, x, None) for x in ("attr", "name", "arg", "id")}
                if found & names:
                    return True
        return False

    made = {relative(path) for path in SOURCES if makes_one(path)}
    assert made == {"pallas_kernels/_common/in_place.py"}


def test_every_op_has_its_parts():
    from pallas_kernels import _OPS

    for op in _OPS:
        folder = ROOT / "pallas_kernels" / op
        for part in ("README.md", "reference.py", "api.py", "specs.py"):
            assert (folder / part).is_file(), f"{op} lacks {part}"
        test = ROOT / "tests" / "kernels" / f"test_{op}.py"
        assert test.is_file(), f"{op} lacks {relative(test)}"


def test_importing_the_packages_loads_nothing_heavy():
    heavy = ("flax", "gin", "grain", "optax", "orbax", "safetensors", "tokenizers")
    code = (
        "import sys, jaxaccel, pallas_kernels\n"
        f"bad = [m for m in {heavy!r} if m in sys.modules]\n"
        "bad += [m for m in sys.modules if 'mosaic_gpu' in m and 'pallas' in m]\n"
        "print(bad)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


IMPORT_BUDGET_SECONDS = 0.3


def test_importing_the_packages_is_quick():
    code = (
        "import time, jax\n"
        "start = time.process_time()\n"
        "import jaxaccel, pallas_kernels\n"
        "print(time.process_time() - start)"
    )
    # CPU seconds, the best of three: other processes share the machine.
    seconds = min(
        float(
            subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True
            ).stdout
        )
        for _ in range(3)
    )
    assert seconds <= IMPORT_BUDGET_SECONDS
