"""Promise: every notebook of the examples runs from its first cell to its last, in an empty folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples" / "notebooks").glob("*.ipynb"))


def test_there_are_five_notebooks() -> None:
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_top_to_bottom(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    if "from peft import" in notebook.read_text("utf-8"):
        pytest.importorskip("peft")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYDEVD_DISABLE_FILE_VALIDATION", "1")
    book = nbformat.read(notebook, as_version=4)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    assert printed, "a notebook that shows nothing"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_kept_notebook_has_its_output_and_no_path_of_a_machine(notebook: Path) -> None:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    assert any(cell.get("outputs") for cell in cells)
    assert all(cell["outputs"] == [] or "error" not in {out["output_type"] for out in cell["outputs"]}
               for cell in cells if cell["cell_type"] == "code")  # fmt: skip
    assert not any(place in notebook.read_text("utf-8") for place in ("/home/", "/root/", "/work/"))
