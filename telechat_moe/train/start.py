"""How a run begins: what `load_checkpoint`, `resume_training`, ``--resume`` and ``--overwrite`` ask for together.

docs/checkpoints.md has the table of all combinations.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from telechat_moe.checkpoint import checkpoint, folder, manifest
from telechat_moe.errors import BadInputError, UsageError
from telechat_moe.reading import real_path
from telechat_moe.recipe import Problem, Recipe, RecipeError

STATE_VERSION = 1

# Settings of the model section that say how it is laid out, not what it computes.
LAYOUT_KEYS = ("batch_size", "offset", "pp_interleave_num")


@dataclass(frozen=True)
class RunStart:
    """How a run begins.

    Attributes:
        kind: ``random``: with random weights. ``weights``: with the weights at ``path``, at step 0. ``resume``: with
            step, weights, moments and place in the data of the checkpoint ``path``.
        key: Setting that decided.
        path: Weights or checkpoint; None: none.
        newest: ``path`` was found as the newest of its folder; if it turns out to be broken, the one before is used.
        continues_run: ``path`` is of the run in `output_dir`, which goes on.
        note: What is not read because of that; empty: nothing.
    """

    kind: Literal["random", "weights", "resume"]
    key: str = ""
    path: Path | None = None
    newest: bool = False
    continues_run: bool = False
    note: str = ""

    def load(
        self, warn: Any = None, open_checkpoint: checkpoint.OpenCheckpoint = checkpoint.load
    ) -> checkpoint.Checkpoint:
        """Load the checkpoint to resume from, every byte verified.

        Raises:
            BadInputError: It is broken, and there is none before it that may be used instead.
        """
        assert self.path is not None
        root, newest = self.path.parent, None
        if self.newest:
            newest = checkpoint.latest(root, warn=warn, open_checkpoint=open_checkpoint)
        return newest or open_checkpoint(self.path)


def folder_of(recipe: Recipe) -> Path:
    """Return the folder of a run's checkpoints."""
    return Path(recipe.output_dir) / "checkpoints"


def start_of(recipe: Recipe, *, resume: bool = False, overwrite: bool = False) -> RunStart:
    """Return how a run begins; nothing is read but the names of files, their sizes and ``checkpoint.json``.

    Args:
        resume: The run in `output_dir` goes on, if there is one.
        overwrite: The run in `output_dir` does not count.

    Raises:
        RecipeError: What the recipe asks for is not there.
        BadInputError: All checkpoints of a folder are broken.
        UsageError: `output_dir` holds another run, and neither ``resume`` nor ``overwrite`` is set.
    """
    root = folder_of(recipe)
    newest = None if overwrite else _newest(root)
    if newest and (resume or (recipe.resume_training is True and not recipe.load_checkpoint)):
        unread = recipe.load_checkpoint or isinstance(recipe.resume_training, str)
        note = "load_checkpoint and resume_training are not read: " if unread else ""
        note += f"the run in {recipe.output_dir} goes on" if unread else ""
        key = "output_dir" if resume else "resume_training"
        return RunStart("resume", key, newest, newest=True, continues_run=True, note=note)
    start = _start_of_recipe(recipe, root)
    if overwrite and start.kind == "resume" and _is_in(start.path, root):
        finding = f"{start.path} is of the run that --overwrite removes"
        raise RecipeError([recipe.problem(start.key, finding, "--resume, or another output_dir")])
    if newest and not (start.kind == "resume" and _same_path(start.path, newest)):
        raise UsageError(
            f"{root} holds checkpoints of an earlier run (newest {newest.name}); continue from them with --resume, "
            "train from the start with --overwrite, or write elsewhere, as with --set output_dir=output/mine"
        )
    return (
        RunStart("resume", start.key, newest, start.newest, continues_run=True) if newest else start
    )


def _start_of_recipe(recipe: Recipe, root: Path) -> RunStart:
    """Return how a run begins by the settings of the recipe alone."""
    named, source = recipe.resume_training, recipe.load_checkpoint
    if not source and not named:
        model = Path(recipe.pretrained_model_dir)  # as MindFormers does
        if recipe.pretrained_model_dir and exists(model) and list(model.glob("*.safetensors")):
            return RunStart("weights", "pretrained_model_dir", model)
        return RunStart("random")
    key = "resume_training" if isinstance(named, str) or not source else "load_checkpoint"

    def refuse(finding: str, expected: str, suggestion: str = "") -> RecipeError:
        return RecipeError([recipe.problem(key, finding, expected, suggestion)])

    path = _named(recipe, named, root) if isinstance(named, str) else Path(source or root)
    if not source and named is True and not folder.list_checkpoints(root):
        finding = f"True, but {root} holds no checkpoint and load_checkpoint is empty"
        raise refuse(finding, "a checkpoint in load_checkpoint, or False")
    if not exists(path):
        expected = "weights, or a checkpoint such as RUN/checkpoints/step-00001000"
        raise refuse(f"{path}: no such file or folder", expected)
    newest = None if isinstance(named, str) else _newest(path)
    if path.is_dir() and newest is None and folder.list_checkpoints(path / "checkpoints"):
        raise refuse(f"{path} is the folder of a run", "its checkpoints", str(path / "checkpoints"))
    chosen = newest or path
    if not named:
        return RunStart("weights", key, chosen)
    if not (chosen / manifest.FILE).is_file():
        finding = f"{path} with resume_training {named}: it holds no {manifest.FILE}, so no step and no optimizer state"
        expected = "a checkpoint of a run of this package, or resume_training: False to start from weights alone"
        raise refuse(finding, expected)
    return RunStart("resume", key, chosen, newest=newest is not None)


def _named(recipe: Recipe, name: str, root: Path) -> Path:
    """Return the checkpoint that a text in `resume_training` names."""
    if not recipe.load_checkpoint:
        return root / name if exists(root / name) else Path(name)
    source = Path(recipe.load_checkpoint)
    path = source if source.name == name or not exists(source) else source / name
    if exists(path) and not _is_in(path, source):
        finding = f"{name} is not in load_checkpoint ({source})"
        expected = "the name of a checkpoint in that folder, or a path and load_checkpoint empty"
        raise RecipeError([recipe.problem("resume_training", finding, expected)])
    return path


def _newest(root: Path) -> Path | None:
    """Return the newest checkpoint in a folder whose files are all there; None if it holds none at all.

    Raises:
        BadInputError: All are broken.
    """
    paths = folder.list_checkpoints(root) if exists(root) and root.is_dir() else []
    broken: list[str] = []
    for path in paths:
        problem = manifest.incomplete(path)
        if problem is None:
            return path
        broken.append(str(problem))
    if broken:
        raise BadInputError(
            f"no usable checkpoint in {root}, all {len(broken)} are broken:\n" + "\n".join(broken)
        )
    return None


def exists(path: Path) -> bool:
    """Return whether a path exists; one that is too long for a file does not."""
    try:
        return path.exists()
    except OSError:
        return False


def _is_in(path: Path | None, folder: Path) -> bool:
    return path is not None and real_path(path).is_relative_to(real_path(folder))


def _same_path(a: Path | None, b: Path) -> bool:
    return a is not None and real_path(a) == real_path(b)


def misfits(recipe: Recipe, path: Path, state: Mapping[str, Any]) -> list[Problem]:
    """Return why a run of a recipe cannot go on from a checkpoint: another version, or another model.

    Args:
        state: What the checkpoint holds besides tensors.
    """
    if state.get("version") != STATE_VERSION:
        finding = f"{path} has state version {state.get('version')}: another version of telechat-moe wrote it"
        return [recipe.problem("resume_training", finding, f"expected version {STATE_VERSION}")]
    before, now = (
        {k: v for k, v in config.items() if k not in LAYOUT_KEYS}
        for config in (state["model_config"], asdict(recipe.model_config))
    )
    expected = f"what {path} was trained with, or another output_dir for a start with other values"
    problems: list[Problem] = []
    for change in checkpoint.diff_config(before, now):
        key, _, finding = change.partition(": ")
        problems.append(recipe.problem(f"model.model_config.{key}", finding, expected))
    return problems
