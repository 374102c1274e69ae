"""MindFormers 2.1.0 unpacked beside the installed one, for questions to its own code in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

VERSION = "2.1.0"


def unpack(folder: Path) -> Path:
    """Download and unpack the wheel without what it requires; return the folder with `mindformers` and `configs`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
    subprocess.run([*command, f"mindformers=={VERSION}"], check=True)
    (wheel,) = folder.glob("mindformers-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def dynamic_recipes(package: Path) -> dict[str, str]:
    """Return the shipped recipes of mode 1 by name."""
    texts = {p.name: p.read_text("utf-8") for p in sorted((package / "configs").glob("*/*.yaml"))}
    return {name: text for name, text in texts.items() if "\nparallelism:" in text}


def ask(package: Path, program: str, question: Any, folder: Path) -> Any:
    """Run a program that has `question` and sets `answer`, with MindFormers 2.1.0 to import."""
    paths = [folder / "question.json", folder / "answer.json"]
    paths[0].write_text(json.dumps(question), "utf-8")
    text = (
        f"import json\nquestion = json.load(open({str(paths[0])!r}, encoding='utf-8'))\n{program}\n"
        f"json.dump(answer, open({str(paths[1])!r}, 'w', encoding='utf-8'))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(package), "GLOG_v": "3"}
    subprocess.run(
        [sys.executable, "-c", text], check=True, env=environment, cwd=folder, capture_output=True
    )
    return json.loads(paths[1].read_text("utf-8"))
