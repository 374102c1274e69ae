"""The folder of a run's checkpoints: what it holds, its lock, and how a save becomes visible.

::

    step-00000123/                 a checkpoint, complete
    .saving-step-00000123-*/       a save in progress, or one that was killed
    .replaced-step-00000123/       the old one, while a checkpoint of the same step replaces it
    .removing-step-00000122*/      one that is being removed
    .lock                          held by the process that saves
"""

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from telechat_moe.checkpoint import manifest
from telechat_moe.checkpoint.manifest import STEP_NAME
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError
from telechat_moe.files import lock, sync_folder

logger = logging.getLogger(__name__)

_LOCK_PATIENCE_S = 600.0


class CheckpointError(TelechatMoeError):
    """A checkpoint could not be written; earlier ones are untouched (exit code 1)."""


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the path of the complete checkpoint of a step."""
    return root / f"step-{step:08d}"


def publish(hidden: Path, path: Path) -> None:
    """Force a hidden folder to the disk and give it its name; one of that name is replaced."""
    replaced = path.with_name(f".replaced-{path.name}")
    sync_folder(hidden)
    if replaces := path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    hidden.rename(path)
    sync_folder(path.parent)
    if replaces:
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def locked(root: Path) -> Iterator[bool]:
    """Hold the lock of ROOT; yields False where the file system has no locks."""
    with (root / ".lock").open("a+b") as file:
        supported, waiting, deadline = True, False, time.monotonic() + _LOCK_PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"another process has been saving into {root} for {_LOCK_PATIENCE_S:.0f} s; "
                        "give each run its own output_dir"
                    ) from None
                if not waiting:
                    logger.warning("waiting for another process that is saving into %s", root)
                waiting = True
                time.sleep(0.05)
            except OSError:
                logger.warning("%s: no file locks; leftovers of killed saves are kept", root)
                supported = False
                break
        try:
            yield supported
        finally:
            if supported:
                fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def only_run(output: Path) -> Iterator[None]:
    """Keep other runs out of an output folder while this one lasts; the system drops the lock when the process dies.

    Raises:
        UsageError: Another run is alive.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / ".run.lock").open("a+")
    except OSError as error:
        raise BadInputError(
            f"cannot write into the output folder {output}: {error.strerror}"
        ) from error
    with file:
        try:
            lock(file.fileno())
        except BlockingIOError:
            file.seek(0)
            raise UsageError(
                f"{output}: another run (process {file.read().strip() or 'unknown'}) is writing here; wait "
                " for it or give this run its own output_dir"
            ) from None
        except OSError:
            logger.warning("%s: no file locks; two runs here would not notice each other", output)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def discard(hidden: Path) -> None:
    """Remove the folder of a save that failed, even while other ranks still write into it."""
    removing = hidden.with_name(hidden.name.replace(".saving-", ".removing-", 1))
    with suppress(OSError):  # under another name, no rank finds it to add a file meanwhile
        hidden.rename(removing)
        shutil.rmtree(removing, ignore_errors=True)


def remove_leftovers(root: Path) -> None:
    """Remove what killed saves left behind. Only the holder of the lock may call this."""
    for path in sorted(root.iterdir()):
        if path.name.startswith((".saving-step-", ".removing-step-")):
            shutil.rmtree(path, ignore_errors=True)
        elif path.name.startswith(".replaced-step-"):
            final = root / path.name.removeprefix(".replaced-")
            if final.exists():
                shutil.rmtree(path, ignore_errors=True)
            else:  # killed between the two renames of a replacement
                path.rename(final)
                sync_folder(root)


def remove_old(root: Path, step: int, keep_last: int) -> None:
    """Remove older checkpoints, counting as kept only those whose files are all there."""
    complete = 0
    for path in list_checkpoints(root):
        if step_of(path) > step:
            continue
        if complete < keep_last:
            complete += manifest.incomplete(path) is None
            continue
        hidden = root / f".removing-{path.name}"
        try:
            path.rename(hidden)
            shutil.rmtree(hidden)
        except OSError as error:
            logger.warning("cannot remove the old checkpoint %s: %s", path, error)


def step_of(path: Path) -> int:
    """Return the step that a folder is named after, -1 if it is none."""
    match = STEP_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def list_checkpoints(root: str | Path) -> list[Path]:
    """Return the folders of all checkpoints under ``root``, newest step first, unverified."""
    root = Path(root)
    try:
        folders = {p for p in root.iterdir() if STEP_NAME.fullmatch(p.name) and p.is_dir()}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInputError(f"cannot list the checkpoints in {root}: {error.strerror}") from error
    # A replacement that was killed between its two renames left the old one under a hidden name.
    hidden = {p for p in folders if p.name.startswith(".")}
    twice = {p for p in hidden if root / p.name.removeprefix(".replaced-") in folders}
    return sorted(folders - twice, key=step_of, reverse=True)
