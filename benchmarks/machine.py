"""Which machine and which commit a benchmark ran on."""

import os
import platform
import re
import subprocess
from pathlib import Path


def commit() -> str:
    """Return the commit that is checked out, with a + where files differ from it; nothing without git."""
    command = ["git", "describe", "--always", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def processor() -> str:
    """Return the kind of this machine's processor: its name, which alone may stand for several, family and model."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    fields = dict(re.findall(r"^(model name|cpu family|model)\s*: (.*)$", text, re.M))
    if len(fields) < 3:
        return platform.machine()
    return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"


def machine() -> str:
    """Return the processor, the cores that this process may use, and how busy the machine is."""
    return f"{processor()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}"
