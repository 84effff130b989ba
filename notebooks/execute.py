"""Runs notebooks in full and saves them with their outputs.

    uv run python notebooks/execute.py [NOTEBOOK...]

By default all of this folder. What differs from run to run without meaning anything
(times, versions) is not saved. The tests run the same notebooks with JAXACCEL_TINY=1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping

import nbclient
import nbformat


FOLDER = pathlib.Path(__file__).parent
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


@contextlib.contextmanager
def kernel(
    folder: pathlib.Path, environment: Mapping[str, str]
) -> Iterator[nbclient.NotebookClient]:
    """Starts a kernel, which ends with the block.

    Args:
      folder: where it runs.
      environment: of its process.

    Yields:
      The client through which `run` talks to it.
    """
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(),
        timeout=3600,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    with tempfile.TemporaryDirectory() as sockets:
        if os.name == "posix":
            # Over TCP a kernel can be listened to, and says so in a warning.
            manager = client.create_kernel_manager()
            manager.transport, manager.ip = "ipc", f"{sockets}/kernel"
        with client.setup_kernel(env=dict(environment)):
            yield client


def run(
    notebook: nbformat.NotebookNode, client: nbclient.NotebookClient
) -> nbformat.NotebookNode:
    """Runs a notebook from its first cell.

    Args:
      notebook: gets its new outputs, and no more metadata than Jupyter needs.
      client: of a `kernel`; names that an earlier notebook left there are still
        there, so only a fresh one gives outputs to save.

    Returns:
      The notebook.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    client.nb = notebook
    client.execute(cleanup_kc=False)
    notebook.metadata = nbformat.from_dict(METADATA)
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({})
    return notebook


def main() -> None:
    """Runs and saves the notebooks named on the command line."""
    parser = argparse.ArgumentParser(description="Runs notebooks and saves them.")
    parser.add_argument("notebooks", nargs="*", type=pathlib.Path)
    for path in parser.parse_args().notebooks or sorted(FOLDER.glob("*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with kernel(path.resolve().parent, os.environ) as client:
            nbformat.write(run(notebook, client), path)
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
