"""The tests run in two processes at once (pytest-xdist). What they must not share is set apart here."""

import os
import tempfile
from pathlib import Path

PORTS = 100  # that Gradio tries, from its first one on


def part_company() -> None:
    """Before anything imports mlx or gradio. Where the tests run in one process, nothing changes."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return
    # MLX takes a kernel that another process is still writing for a finished one.
    kernels = Path(tempfile.gettempdir(), f"mlx_spec-tests-{os.getuid()}-{worker}")
    kernels.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = tempfile.tempdir = str(kernels)
    os.environ["GRADIO_SERVER_PORT"] = str(7860 + PORTS * (1 + int(worker.removeprefix("gw"))))
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # two processes of two threads wait for each other
