"""The notebook of a first run, in a kernel of Jupyter's, which has an event loop."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebooks" / "first_run.ipynb"


@pytest.mark.long
@pytest.mark.slots
@pytest.mark.server
@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first cell to a resumed run, its report and the exported weights."""
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    for name in ("PREFECT_API_URL", "TRIALFLOW_HOME"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    # A command that fails, and a warning of Python's, do not end a notebook.
    streams = [out.text for each in shown.values() for out in each if out.output_type == "stream"]
    assert [text for text in streams if "error" in text or "Warning" in text] == []
    (resumed,) = [str(each) for source, each in shown.items() if "trial=first.trial" in source]
    assert "starting from checkpoint" in resumed
    assert "(400, {'loss': " in resumed
    (report,) = [str(each) for source, each in shown.items() if "srcdoc" in source]
    assert "text/html" in report
    assert (tmp_path / "model.safetensors").exists()
