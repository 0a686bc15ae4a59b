"""The README keeps its word: its example prints what it says, its links exist, its commands are targets."""
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()


def test_the_example_is_ten_lines_and_prints_what_the_readme_says(tmp_path):
    code = re.search(r"```python\n(.*?)```", TEXT, re.S).group(1)
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    script = tmp_path / "example.py"
    script.write_text(code)
    printed = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.strip() == re.search(r"# (\(4.0, \d+\)):", code).group(1)


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert target.startswith("http") or (ROOT / target).exists(), f"README links to {target}, which is not there"


def test_every_module_folder_is_on_the_map():
    for folder in (ROOT / "minitrain").iterdir():
        if folder.is_dir() and folder.name not in {"__pycache__", "grading"}:
            assert f"minitrain/{folder.name}" in TEXT, f"the map does not know {folder.name}"


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    for command in ("course", "test", "lab", "bench"):
        assert re.search(rf"^{command}:", makefile, re.M)
