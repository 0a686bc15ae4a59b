"""minitrain: how large language models are trained on many machines, one readable module per technique.

    ranks/        N ranks: launch, collectives, the ledger; a grid of them, and how tensors are cut
    attention  precision  data_parallel  tensor_parallel  context  pipeline  moe  memory  checkpoint
                  the techniques
    model/        a GPT as a list of layers, with data/ and training/
    plan/         a layout as plain values; formulas, predictions and machines (no torch)
    compose/      where all techniques meet: parallelize, Run, Trainer
    systems/      the survey: published systems as policies on these engines; the replay on machines
    cli/          the command line            course/    chapters and exercises

Two rooms and one class have short names: `from minitrain import Ledger, collectives, launch`.
"""

import sys
from importlib import import_module

if sys.platform == "win32":  # no fork, no file locks
    raise ImportError("minitrain runs on Linux and macOS; on Windows start it inside WSL")

_SHORT = {"collectives": "minitrain.ranks.collectives", "launch": "minitrain.ranks.launch"}


def __getattr__(name: str):
    """The short names, loaded (and torch with them) when they are first asked for."""
    if name in _SHORT:
        return import_module(_SHORT[name])
    if name == "Ledger":
        return import_module("minitrain.ranks.ledger").Ledger
    raise AttributeError(f"module 'minitrain' has no attribute {name!r}")
