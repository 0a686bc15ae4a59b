"""Kernels of notebooks: no port that another program could take, and an interrupt ends them at once.

Jupyter picks free TCP ports, lets go of them and has the kernel bind them a second later: another program, or
another kernel, may have them by then, and the kernel "died before replying". Here a kernel talks over Unix
sockets in a private folder, which is removed with it: nobody else can have its addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile

from jupyter_client.manager import AsyncKernelManager, KernelManager
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError
from traitlets import CaselessStrEnum

QUIET = ["--log-level=ERROR"]  # without the kernel's remarks on every start


def private(manager: type[KernelManager]) -> type[KernelManager]:
    """`manager` with kernels over Unix sockets, whose addresses have at most 107 letters: a short folder."""

    class Private(manager):
        transport = CaselessStrEnum(["ipc"], default_value="ipc", config=True)

        def __init__(self, **given):
            self.folder = tempfile.TemporaryDirectory(prefix="kernel-")  # for its owner only
            super().__init__(connection_file=os.path.join(self.folder.name, "k.json"), **given)

    return Private


class Manager(private(KernelManager)):
    """As nbval uses it."""

    def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
        super().shutdown_kernel(now=now, restart=restart)
        if not restart:
            self.folder.cleanup()


class AsyncManager(private(AsyncKernelManager)):
    """As nbclient uses it, which ends with this call however a run ends."""

    async def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
        """Jupyter interrupts a kernel before it kills it: the kernel may have time to print that it was."""
        if now and self.has_kernel:
            await self.provisioner.kill(restart)
        await super().shutdown_kernel(now, restart)

    async def cleanup_resources(self, restart: bool = False) -> None:
        await super().cleanup_resources(restart)
        if not restart:
            self.folder.cleanup()


class Client(NotebookClient):
    """nbclient's, but for signals: it would stop the kernel, and then fail because there is none."""

    heard: tuple = ()

    def listen(self) -> None:
        self.work = asyncio.current_task()
        with contextlib.suppress(RuntimeError):  # not in the main thread: signals go elsewhere
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self.stop, number)

    def stop(self, number: int) -> None:
        if not self.heard:
            self.heard = (number,)
            self.shutdown_kernel = "immediate"
            self.work.cancel()

    async def async_execute_cell(self, *args, **kwargs):
        if self.heard:  # wait_for loses a cancellation that comes in the moment in which its wait is over
            raise asyncio.CancelledError
        return await super().async_execute_cell(*args, **kwargs)

    async def async_start_new_kernel(self, **kwargs) -> None:
        """Called when nbclient has put its own handlers of signals in place."""
        self.listen()
        await super().async_start_new_kernel(**kwargs)


def run(notebook, folder: str, **settings) -> None:
    """Every cell, from the first; outputs go into `notebook`. Raises nbclient's errors, KeyboardInterrupt."""
    resources = {"metadata": {"path": folder}}
    kernel = {"kernel_name": "python3", "kernel_manager_class": AsyncManager, "extra_arguments": QUIET}
    client = Client(notebook, resources=resources, **kernel, **settings)
    try:
        asyncio.run(client.async_execute())
    except (asyncio.CancelledError, DeadKernelError):  # nbclient may take a cancelled cell for a dead kernel
        if not client.heard:
            raise
        if client.heard == (signal.SIGTERM,):
            raise SystemExit(128 + signal.SIGTERM) from None
        raise KeyboardInterrupt from None
