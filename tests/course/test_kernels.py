"""Kernels have addresses that nobody else can take, and end, however they end, with one line."""

import asyncio
import os
import runpy
import signal
import sys
import tempfile
import textwrap
from pathlib import Path

import nbformat
import nbval.kernel
import psutil
import pytest

from minitrain.course import kernels, notebook
from tests import patience


def chapter(path: Path, *cells: str) -> Path:
    cells = [nbformat.v4.new_code_cell(textwrap.dedent(cell).strip()) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=notebook.METADATA), path)
    return path


def test_a_kernel_has_no_port_that_was_free_before_and_its_end_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = chapter(
        tmp_path / "00_short.ipynb",
        """
        import ipykernel, json
        assert json.load(open(ipykernel.get_connection_file()))["transport"] == "ipc"
        """,
        "import os; os._exit(3)",
        "print('never')",
    )
    with pytest.raises(RuntimeError, match=r"^00_short.ipynb stopped in cell 2: its kernel ended \(exit\(\)"):
        notebook.execute(path, tmp_path / "out.ipynb")
    assert not list(tmp_path.glob("kernel-*")) and (tmp_path / "out.ipynb").exists()


def test_kernels_of_nbval_are_such_kernels(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(nbval.kernel, "KernelManager", None)
    runpy.run_path(notebook.CHAPTERS / "conftest.py")
    kernel = nbval.kernel.RunningKernel(nbval.kernel.CURRENT_ENV_KERNEL_NAME)
    assert type(kernel.km) is kernels.Manager and kernel.km.transport == "ipc" and kernel.is_alive()
    (folder,) = tmp_path.glob("kernel-*")
    assert folder.stat().st_mode & 0o777 == 0o700 and len(list(folder.iterdir())) > 1
    kernel.stop()
    assert not folder.exists()


INTERRUPTED = """
    import sys
    from pathlib import Path
    from minitrain.cli import main
    from minitrain.course import notebook
    notebook.CHAPTERS = Path(sys.argv.pop())
    sys.argv[1:] = ["run", "00", "--out", str(notebook.CHAPTERS / "out")]
    main.main()
"""


def test_an_interrupt_of_minitrain_run_is_one_line_at_most_and_ends_the_kernel(tmp_path):
    chapter(
        tmp_path / "00_long.ipynb",
        """
        import os, time
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        os.rename("pid", "running")
        time.sleep(1000)
        """,
    )
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-c", textwrap.dedent(INTERRUPTED), tmp_path]
    process = patience.start(command, env=os.environ | {"TMPDIR": str(tmp_path / "temporary")})
    patience.until((tmp_path / "running").exists, process.pid)
    process.send_signal(signal.SIGINT)
    out, err = patience.output_of(process)
    assert process.returncode == 130 and out == "" and len(err.strip().splitlines()) <= 1, out + err
    assert not psutil.pid_exists(int((tmp_path / "running").read_text()))
    assert not list((tmp_path / "temporary").iterdir()) and not list((tmp_path / "out").iterdir())


def test_an_interrupt_that_was_lost_in_a_cell_is_heard_before_the_next():
    client = kernels.Client(nbformat.v4.new_notebook())
    client.heard = (signal.SIGINT,)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(client.async_execute_cell(nbformat.v4.new_code_cell("1"), 0))
