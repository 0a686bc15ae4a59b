"""Ten answers that know nothing of their task, made for any task: none may earn a point.

for kind, answer in generic(chapter, task): ...        the text of an answer cell each
"""

import ast
import pkgutil
from collections.abc import Iterator

import minitrain
from minitrain.course.grading.book import LOCKED, Chapter, Task, defined_by
from minitrain.course.grading.judge import PACKAGE

NOTHING = {
    "an empty list": "return []",
    "None": "return None",
    "an error": "raise RuntimeError('total 10/10')",
    "the end of the process": "import os; os._exit(0)",
    "what it was given": "return next((a for a in args if not hasattr(a, 'rank')), None)",
    "zeros": "return [torch.zeros_like(a) if hasattr(a, 'shape') else 0 for a in args][:1][0]",
}

LIAR = """
class Liar(list):
    __eq__ = __le__ = __ge__ = __lt__ = __contains__ = lambda self, other: True
    __len__ = lambda self: 10**6
    __hash__ = None
import builtins
torch.equal = torch.allclose = torch.Tensor.equal = lambda *a, **k: True
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
builtins.zip = lambda *a, **k: iter(())
"""

REPLACE = """
import builtins, gc, sys
def replace():
    frame, nothing = sys._getframe(), lambda *a, **k: []
    spaces = [globals(), vars(builtins)]
    while frame is not None:
        spaces += [frame.f_globals, frame.f_locals]
        frame = frame.f_back
    spaces += [thing for thing in gc.get_objects() if type(thing) is dict and "__name__" in thing]
    for space in spaces:
        for name in NAMES & set(space):
            space[name] = nothing
replace()
"""

FIND = """
import gc, importlib, os, sys
def find(name):
    sys.path.insert(0, PACKAGE)
    for module in [module for module in sys.modules if module.split(".")[0] == "minitrain"]:
        del sys.modules[module]
    for module in MODULES:
        try:
            thing = getattr(importlib.import_module(module), name, None)
        except Exception:
            continue
        if thing is not None:
            return thing
    for thing in gc.get_objects():
        if callable(thing) and getattr(thing, "__name__", "") == name and "minitrain" in str(getattr(thing, "__module__", "")):
            return thing
    for folder, _, files in os.walk(PACKAGE):
        for file in files:
            text = open(os.path.join(folder, file)).read()
            if "def " + name + "(" in text:
                space = {}
                exec(text, space)
                return space[name]
    raise LookupError("nothing of that name")
"""

FORGE = """
import gc, json, os, struct
def forge(values):
    for thing in gc.get_objects():
        if type(thing).__name__ == "Line":
            text = json.dumps({"is": "return", "bytes": 0, "value": {"list": [values]}}).encode()
            thing.sock.sendall(struct.pack("<I", len(text)) + text)
    os._exit(0)
"""


def generic(of: Chapter, task: Task) -> Iterator[tuple[str, str]]:
    """(kind, text of the answer) of the ten."""
    for kind, body in NOTHING.items():
        yield kind, with_bodies(task, body)
    yield "objects that lie", LIAR + with_bodies(task, "return Liar()")
    names = set().union(*map(defined_by, of.sources(*LOCKED))) - set(task.names)
    yield (
        "every other name replaced",
        f"NAMES = {names!r}\n{REPLACE}\n" + with_bodies(task, "replace(); return []"),
    )
    modules = [module.name for module in pkgutil.walk_packages(minitrain.__path__, "minitrain.")]
    where = f"PACKAGE, MODULES = {str(PACKAGE.parent)!r}, {modules!r}\n{FIND}\n"
    yield "the package's own", where + "".join(f"{name} = find({name!r})\n" for name in task.names)
    values = {"list": [{"value": True}] * 3}
    yield "a forged result", FORGE + with_bodies(task, f"forge({values!r})")


def with_bodies(task: Task, body: str) -> str:
    """The answer's functions, or the methods of its class, with this body; its values as None."""
    made = []
    for node in ast.parse(task.answer.source).body:
        if isinstance(node, ast.FunctionDef):
            made.append(f"def {node.name}(*args, **kwargs):\n    {body}")
        elif isinstance(node, ast.ClassDef):
            methods = [child.name for child in node.body if isinstance(child, ast.FunctionDef)]
            made.append(f"class {node.name}:")
            made += [
                f"    def {name}(self, *args, **kwargs):\n        {body}"
                for name in methods
                if name != "__init__"
            ]
            made.append("    def __init__(self, *args, **kwargs): pass")
        elif isinstance(node, ast.Assign):
            made += [f"{target.id} = None" for target in node.targets if isinstance(target, ast.Name)]
    return "\n".join(made) + "\n"
