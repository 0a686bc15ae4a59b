"""What pyproject.toml cannot say: a wheel takes chapters and exercises along, as one archive.

`minitrain init FOLDER` unpacks it (minitrain/course/home.py). An editable install has the clone.
"""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class WithCourse(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            sys.path.insert(0, str(ROOT))
            from minitrain.course.home import ARCHIVE, pack

            pack(ROOT, Path(self.build_lib, "minitrain", "course", ARCHIVE.name))


setup(cmdclass={"build_py": WithCourse})
