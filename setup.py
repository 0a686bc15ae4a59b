"""What pyproject.toml cannot say: a wheel takes chapters and exercises along, as one archive, and its README
has whole links, once the project has an address ([tool.minitrain] there).

`minitrain init FOLDER` unpacks it (minitrain/course/home.py). An editable install has the clone.
"""

import re
import sys
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
ADDRESS, VERSION = SETTINGS["tool"]["minitrain"]["address"], SETTINGS["project"]["version"]


def with_whole_links(text: str, address: str, version: str) -> str:
    """Links and pictures of a page of the repository, for a reader who has the page alone."""
    for before, kind in (r"\]\(", "blob"), (r"src(?:set)?=\"", "raw"):
        text = re.sub(rf"({before})(?!https?:|#)", rf"\1{address}/{kind}/v{version}/", text)
    return text


class WithCourse(build_py):
    def run(self):
        super().run()
        if not self.editable_mode:
            sys.path.insert(0, str(ROOT))
            from minitrain.course.home import ARCHIVE, pack

            pack(ROOT, Path(self.build_lib, "minitrain", "course", ARCHIVE.name))


page = (ROOT / "README.md").read_text()
setup(
    cmdclass={"build_py": WithCourse},
    long_description=with_whole_links(page, ADDRESS, VERSION) if ADDRESS else page,
    long_description_content_type="text/markdown",
    project_urls={"Source": ADDRESS, "Changes": f"{ADDRESS}/blob/v{VERSION}/CHANGELOG.md"} if ADDRESS else {},
)
