"""Files that others on the machine can read but not change: what a run writes, and what it trusts when it reads."""

import os
import stat
from pathlib import Path

from telechat_moe.errors import BadInputError

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def keep_others_out() -> None:
    """Let nothing that this process or its children make be writable by group or others."""
    os.umask(os.umask(0o077) | OTHERS_WRITE)


def check_private(path: Path) -> Path:
    """Return a file or folder that only this user can have written.

    Pickles and control files are trusted; one that somebody else can write would run their code.

    Raises:
        BadInputError: It belongs to somebody else, others can write it or its folder, or it is a symbolic link.
    """
    for place, what in ((path.absolute().parent, "its folder"), (path, "it")):
        info = place.stat() if place != path else place.lstat()
        found = ""
        if place == path and stat.S_ISLNK(info.st_mode):
            found = "is a symbolic link"
        elif info.st_uid != os.geteuid():
            found = f"belongs to user {info.st_uid}, not to {os.geteuid()}"
        elif info.st_mode & OTHERS_WRITE:
            found = f"can be written by others (mode {stat.S_IMODE(info.st_mode):04o})"
        if found:
            raise BadInputError(
                f"{path}: {what} {found}, and what it says is trusted; remove it, and start again with an "
                "output_dir of your own (chmod go-w)"
            )
    return path
