"""Every notebook runs on a tiny problem, and is saved as a full run left it."""

import ast
import os
import pathlib
import re
import runpy
import tempfile

import nbformat
import pytest


ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_IMAGE_BYTES = 300_000

# Where people's files lie: /home/..., /tmp/..., C:\...
MACHINE_PATH = re.compile(
    r"(?<![\w./])/(home|Users|root|tmp|var|private|usr|opt|mnt|work|data)/"
    r"|\b[A-Z]:\\\\?\w"
)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    return [output for cell in code_cells(notebook) for output in cell.outputs]


def text_of(output):
    """What a reader sees of an output, images aside."""
    data = output.get("data", {})
    texts = [data[kind] for kind in data if not kind.startswith("image/")]
    return "\n".join([output.get("text", ""), *texts])


def check_no_noise(notebook):
    for output in outputs(notebook):
        assert output.output_type != "error", "\n".join(output.traceback)
        assert output.get("name") != "stderr", output.text


@pytest.fixture(scope="module")
def execute():
    return runpy.run_path(str(FOLDER / "execute.py"))


@pytest.fixture(scope="module")
def temporary(tmp_path_factory):
    """Where the kernel makes its temporary files."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(scope="module")
def kernel(execute, temporary):
    """In tiny mode, and with none of the suite's eight fake devices.

    One for all: starting it and importing what each imports takes seconds.
    """
    environment = {
        **os.environ,
        "JAXACCEL_TINY": "1",
        # Nearly all of the time is compilation; these make it shorter.
        "XLA_FLAGS": (
            "--xla_backend_optimization_level=0 --xla_cpu_opt_preset=FAST_COMPILE "
            "--xla_cpu_parallel_codegen_split_count=1 "
            "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
        ),
        "JAX_DEFAULT_PRNG_IMPL": "rbg",
        "JAX_ENABLE_COMPILATION_CACHE": "0",
        "IPYTHONDIR": str(temporary / "ipython"),
        "TMPDIR": str(temporary),
    }
    # From the root here; execute.py, which saves the notebooks, runs them in their own.
    with execute["kernel"](ROOT, environment) as client:
        begin = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(BEGIN)])
        execute["run"](begin, client)
        yield client


# As `tests/conftest.py` does it for the other tests.
BEGIN = """\
import gc
from tests.staging import put_numpy
gc.set_threshold(20_000)
put_numpy()
"""

# Leaves what a new kernel has: no names, and the setting that a notebook changes.
FORGET = """\
%reset -f
import gc, sys
if "jax" in sys.modules:
    sys.modules["jax"].config.update("jax_default_matmul_precision", None)
gc.collect()
del gc, sys
"""


# This takes longer than the 5 s that the suite allows itself: it compiles a whole run
# (initialisation, training step, evaluation, prefill, decoding).
@every_notebook
def test_runs_in_tiny_mode(path, execute, kernel, temporary):
    notebook = nbformat.read(path, as_version=4)
    forget = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(FORGET)])
    try:
        execute["run"](notebook, kernel)
    finally:
        execute["run"](forget, kernel)
    check_no_noise(notebook)
    # A notebook must clear up behind itself.
    left = [p.name for p in temporary.iterdir()]
    assert [name for name in left if name != "ipython"] == []


@every_notebook
def test_is_saved_with_the_outputs_of_one_whole_run(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    counts = [cell.execution_count for cell in cells]
    assert counts == list(range(1, len(cells) + 1))
    check_no_noise(notebook)
    images = [
        output.get("data", {}).get("image/png", "") for output in outputs(notebook)
    ]
    assert any(images), "no figure is saved"
    assert sum(map(len, images)) * 3 / 4 < MOST_IMAGE_BYTES


@every_notebook
def test_ends_in_an_assertion(path):
    last = nbformat.read(path, as_version=4).cells[-1]
    assert last.cell_type == "code"
    nodes = ast.walk(ast.parse(last.source))
    assert any(isinstance(node, ast.Assert) for node in nodes)


@every_notebook
def test_says_nothing_of_the_machine_it_ran_on(path):
    notebook = nbformat.read(path, as_version=4)
    texts = [text_of(output) for output in outputs(notebook)]
    for text in [*texts, *(cell.source for cell in notebook.cells)]:
        found = MACHINE_PATH.search(text)
        assert found is None, text[found.start() : found.start() + 80]
        for place in (ROOT, pathlib.Path.home(), tempfile.gettempdir()):
            assert f"{place}/" not in text
    # Times and versions would change with every run; execute.py leaves them out.
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    assert all(not cell.metadata for cell in notebook.cells)


@pytest.mark.parametrize(
    "text",
    ["/home/ann/x", "at '/tmp/tmpab12/metrics'", r"C:\Users\ann", "(/root/run)"],
)
def test_a_path_of_a_machine_is_found(text):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize(
    "text", ["experiments/gdn/tiny.gin", "runs/tmp/x", "https://x.org/home/", "a / b/"]
)
def test_other_slashes_are_let_through(text):
    assert not MACHINE_PATH.search(text)
