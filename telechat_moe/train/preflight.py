"""Judge what a training run needs beside its recipe, before anything is compiled: files, folders, device, start.

``telechat-moe check`` and everything that trains call :func:`examine` or :func:`require`, so both say the same. Nothing
here imports mindspore, and of large files only headers, indices, sizes and the beginnings of some documents are read.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from telechat_moe.checkpoint import folder, manifest
from telechat_moe.checkpoint.weights import ReadWeights, own_weights
from telechat_moe.data import IndexedDataset, Loader, load_tokenizer, open_recipe, open_valid
from telechat_moe.data.build import MANIFEST, fingerprint
from telechat_moe.data.conversations import ChatFormat, format_of
from telechat_moe.data.loader import Batches
from telechat_moe.data.recipe import sources_of
from telechat_moe.data.sample import SampleOptions
from telechat_moe.data.shared import FollowingLoader, Publisher, SharedLoader, Subscriber
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError
from telechat_moe.graph.swapping import room
from telechat_moe.ops import native
from telechat_moe.reading import MALFORMED, parse_json
from telechat_moe.recipe import ModelConfig, Problem, Recipe, RecipeError, hugging_face
from telechat_moe.recipe.arithmetic import least_bytes
from telechat_moe.recipe.data_path import parse_data_path
from telechat_moe.recipe.hugging_face import OtherModelError
from telechat_moe.recipe.problems import Missing
from telechat_moe.recipe.rules.data import MEGATRON
from telechat_moe.recipe.swap import require_pool
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.sharding.shards import WeightShards, elements
from telechat_moe.train.consumed import consumed_of, lr_batches, steps_left
from telechat_moe.train.start import RunStart, exists, folder_of, misfits, start_of
from telechat_moe.units import size_text
from telechat_moe.versions import cann_problem

T = TypeVar("T")
Shared = Publisher | Subscriber | None
"""This process's end of what the processes of a host share; None: it reads for itself only."""
DATA = "train_dataset.data_loader"
VALID = "telechat_moe.evaluation.data_path"
_LONGEST_NAME = 255
_LOOK_AT = 1000
"""Documents, and tokens of each, that are looked at."""
_NOT_OF_DATA = frozenset(
    {
        *("callbacks", "context", "load_checkpoint", "lr_schedule", "optimizer", "output_dir"),
        *("pretrained_model_dir", "resume_training", "runner_wrapper", "trainer"),
    }
)
"""Sections and keys that say nothing about the data."""
_DEVICE_FILES = {"Ascend": "davinci[0-9]*", "GPU": "nvidia[0-9]*"}


@dataclass(frozen=True)
class Ready:
    """The start of a run that passed all checks, and its training data, at the first sample."""

    start: RunStart
    loader: Batches


class EarlierRun(Problem):
    """The problem that `output_dir` holds another run and neither --resume nor --overwrite is given."""


def refusal(
    problems: Sequence[Problem], not_judged: Mapping[str, str] | None = None
) -> TelechatMoeError:
    """Return the error that names problems: UsageError if only --resume or --overwrite is missing, else RecipeError."""
    if all(isinstance(problem, EarlierRun) for problem in problems):
        return UsageError(str(problems[0]))
    return RecipeError(problems, not_judged)


def require(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    weights: ReadWeights = own_weights,
    shared: Shared = None,
) -> Ready:
    """Return what a run begins with.

    Args:
        resume, overwrite: See :func:`telechat_moe.train.start.start_of`.
        weights: What reads `load_checkpoint`.
        shared: See :func:`open_loader`. Followers skip data checks.

    Raises:
        RecipeError: The run cannot begin; lists every problem.
        UsageError: `output_dir` holds another run; pass --resume or --overwrite.
    """
    preflight = Preflight(recipe, shared)
    ready = preflight.examine(resume, overwrite, weights)
    if ready is None:
        raise refusal(preflight.problems)
    return ready


def examine(
    recipe: Recipe,
    problems: Sequence[Problem] = (),
    *,
    resume: bool = False,
    overwrite: bool = False,
    weights: ReadWeights = own_weights,
    notes: list[str] | None = None,
) -> tuple[Ready | None, list[Problem]]:
    """Return what a run begins with, or every problem that keeps it from beginning; see :func:`require`.

    Args:
        problems: What is wrong with the recipe itself. What depends on that is not judged.
        notes: Receives what was not judged of the weights.
    """
    preflight = Preflight(recipe, problems=problems)
    ready = preflight.examine(resume, overwrite, weights)
    if notes is not None:
        notes += preflight.notes
    return ready, preflight.problems


def machine(recipe: Recipe) -> list[Problem]:
    """Return why this machine cannot run a recipe in MindFormers' trainer: a device, a folder, or what its data loader needs."""
    return [*_device(recipe), *_cann(recipe), *_folders(recipe), *index_builder(recipe)]


def index_builder(recipe: Recipe) -> Iterator[Problem]:
    """Yield why `make` cannot build what MindFormers' Megatron loader compiles when it starts: it asks the first python3 of PATH.

    `make` says by itself what it would do; a helper that is already there needs nothing.
    """
    spec, loader = find_spec("mindformers"), recipe.train_dataset.data_loader.type
    if spec is None or spec.origin is None or loader != MEGATRON:
        return
    source = Path(spec.origin).parent / "dataset" / "blended_datasets"
    key, finding = f"{DATA}.type", f"{loader}, for which MindFormers compiles a helper"
    try:
        command = ["make", "-n", "-C", str(source)]
        planned = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    except OSError:
        yield recipe.problem(key, f"{finding}, and PATH has no make", "make and g++ installed")
        return
    if "helpers.cpp" in planned and "-I" not in planned:
        finding += f" with pybind11 of the first python3 in PATH; {shutil.which('python3') or 'PATH'} has none"
        expected = (
            f"{Path(sys.executable).parent} first in PATH, or `python3 -m pip install pybind11`"
        )
        yield recipe.problem(key, finding, expected)


def lacks_device(recipe: Recipe) -> bool:
    """Return whether this machine has no device of the kind that a recipe names."""
    target = recipe.context.device_target
    return target != "CPU" and not list(Path("/dev").glob(_DEVICE_FILES[target]))


def _device(recipe: Recipe) -> Iterator[Problem]:
    target = recipe.context.device_target
    if lacks_device(recipe):
        finding = f"{target}, but this machine has none (no /dev/{_DEVICE_FILES[target]})"
        expected = "a machine that has one; `telechat-moe dryrun` compiles the recipe here, --set context.device_target=CPU trains it"
        yield recipe.problem("context.device_target", finding, expected)


def _cann(recipe: Recipe) -> Iterator[Problem]:
    """Yield that CANN does not fit MindSpore, which itself only warns of it."""
    if recipe.context.device_target == "Ascend" and (problem := cann_problem()):
        finding, _, expected = problem.partition(". Install ")
        yield recipe.problem("context.device_target", f"Ascend, but {finding}", expected)


def memory(recipe: Recipe) -> Iterator[Problem]:
    """Yield that the memory of this machine cannot hold the weights and moments of a recipe that it trains alone."""
    is_known = isinstance(recipe.model.model_config, ModelConfig)
    if recipe.context.device_target != "CPU" or not is_known:
        return
    needed, capacity = least_bytes(recipe), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > capacity:
        finding = f"a model whose weights and moments take {size_text(needed)} at least, and this machine has {size_text(capacity)}"
        yield recipe.problem("model.model_config", finding, "a smaller model")


def _pool(recipe: Recipe) -> None:
    """Require that the moments that a process swaps are no more than the recipe allows; activations are known when compiled.

    Raises:
        RecipeError: They are.
    """
    pool = recipe.telechat_moe.swap
    if not recipe.optimizer.swap or pool is None or pool.pool_mib is None:
        return
    shards, sizes = WeightShards.of(recipe), dict[int, int]()
    for rank in range(recipe.devices):
        regions = [shards.shard(rank, w.name) for w in shards.weights.values() if w.trained]
        sizes[rank] = sum(2 * room(4 * elements(x)) for x in regions if x is not None)
    rank = max(sizes, key=sizes.__getitem__)
    require_pool(recipe, sizes[rank], f"rank {rank}" if recipe.devices > 1 else "this process")


def _library(recipe: Recipe) -> Iterator[Problem]:
    """Yield what a recipe asks of the native library on CPU, where that is missing or cannot be loaded."""
    if recipe.context.device_target != "CPU":
        return
    try:
        native.load()
        return
    except native.NativeError as error:
        reason = str(error)
    operators, exchange = recipe.telechat_moe.operators, recipe.telechat_moe.sharding.dispatcher
    dtype, stages = recipe.model_config.compute_dtype, recipe.parallel_config.pipeline_stage
    chosen = {"default": operators.default} | operators.backends()
    needs: dict[str, tuple[object, bool]] = {
        **{f"telechat_moe.operators.{n}": (b, b == "fused") for n, b in chosen.items()},
        "model.model_config.compute_dtype": (dtype, dtype in ("bfloat16", "bf16")),
        "telechat_moe.sharding.dispatcher": (exchange, exchange == "alltoallv"),
        "parallel_config.pipeline_stage": (stages, stages > 1),
        "optimizer.swap": (True, recipe.optimizer.swap),
        "swap_config.swap": (True, recipe.swap_config.swap),
    }
    for key, (value, is_needed) in needs.items():
        if is_needed:
            yield recipe.problem(key, f"{value}, but {reason}", "another value, or the library")


def _folders(recipe: Recipe) -> Iterator[Problem]:
    root = folder_of(recipe).absolute()
    existing = next(path for path in (root, *root.parents) if os.path.lexists(path))
    reason = f"{existing} is not a folder"
    if existing.is_dir():
        reason = "" if os.access(existing, os.W_OK | os.X_OK) else f"{existing} cannot be written"
    if len(max(root.parts, key=len).encode()) > _LONGEST_NAME:
        reason = f"{recipe.output_dir}: a name of more than {_LONGEST_NAME} bytes"
    if reason:
        yield recipe.problem("output_dir", reason, "a folder that can be made and written")
    pool = recipe.telechat_moe.swap
    if pool is not None and pool.pool_folder is not None:
        folder = Path(pool.pool_folder)
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            finding = f"{folder}, which is no folder that can be written"
            yield recipe.problem("telechat_moe.swap.pool_folder", finding, "one, or remove the key")
    model = recipe.pretrained_model_dir
    if model and not exists(Path(model) / "config.json"):
        finding, expected = f"{model}: no config.json there", "the Hugging Face folder of the model"
        yield recipe.problem("pretrained_model_dir", finding, expected)


class Preflight:
    """The checks before a run: they collect what is wrong, beside the ``problems`` of the recipe itself."""

    def __init__(
        self, recipe: Recipe, shared: Shared = None, problems: Sequence[Problem] = ()
    ) -> None:
        self.recipe, self.shared, self.problems = recipe, shared, list[Problem]()
        self.missing = Missing(bool(problems))
        broken = {problem.key.partition(".")[0] for problem in problems}
        self.judges_data = broken <= _NOT_OF_DATA
        self.judges_model = not broken & {"", "model", "pretrained_model_dir"}
        self.notes: list[str] = []

    def examine(self, resume: bool, overwrite: bool, weights: ReadWeights) -> Ready | None:
        """Run all checks; see :func:`examine`."""
        recipe, loader = self.recipe, None
        if self.judges_model and self.attempt("model", lambda: recipe.model_config) is None:
            return None
        self.problems += self.missing.until(_device(recipe))
        self.problems += self.missing.until(_cann(recipe))
        self.problems += self.missing.until(_folders(recipe))
        if self.judges_model:
            self.problems += self.missing.until(_library(recipe))
        if not self.missing.allowed:
            self.attempt("telechat_moe.swap.pool_mib", lambda: _pool(recipe))
        with self.missing.skipped():
            if isinstance(recipe.model.model_config, ModelConfig):
                loader = self._data()
        start = self.attempt(
            "output_dir", lambda: start_of(recipe, resume=resume, overwrite=overwrite)
        )
        if start is not None:
            with self.missing.skipped():
                self._start(start, loader, weights)
        if self.problems or start is None or loader is None:
            return None
        return Ready(start, loader)

    def attempt(self, key: str, action: Callable[[], T]) -> T | None:
        """Return what an action returns; an error of it becomes a problem of the key, unless it names its own."""
        try:
            with self.missing.skipped():
                return action()
        except RecipeError as error:
            self.problems += error.problems
        except OtherModelError as error:
            self.problems += error.problems(self.recipe, key)
        except (TelechatMoeError, OSError) as error:
            finding, _, expected = " ".join(str(error).split()).partition("; ")
            self.add(key, finding, expected or "a file or folder that can be read")
            if isinstance(error, UsageError):
                self.problems[-1] = EarlierRun(**asdict(self.problems[-1]))
        except ValueError:
            if not self.missing.allowed:  # else a rule has said it
                raise
        return None

    def add(self, key: str, finding: str, expected: str) -> None:
        """Add the problem of a key: what was found, and what was expected."""
        self.problems.append(self.recipe.problem(key, finding, expected))

    def _data(self) -> Batches | None:
        """Open the training data, and check validation data and tokenizer."""
        if isinstance(self.shared, Subscriber):
            return open_loader(self.recipe, self.shared)
        recipe, section = self.recipe, self.recipe.train_dataset.data_loader.config
        name = "data_path" if section is None or section.data_path else "train_data_path"
        data_path = list(getattr(section, name, None) or ())
        loader = None
        if not self._files(f"{DATA}.config.{name}", data_path):
            self._corpus()
        elif self.judges_data:
            key = f"{DATA}.config.{name}" if data_path else DATA
            loader = self.attempt(key, lambda: open_loader(recipe, self.shared))
            if data_path:
                self.tokenizer()
        self.validation()
        return loader

    def tokenizer(self) -> None:
        """Check the tokenizer of the text that the model writes."""
        if self.recipe.telechat_moe.sample is not None:
            path = tokenizer_path(self.recipe)
            self.attempt("telechat_moe.sample", lambda: load_tokenizer(path))

    def validation(self) -> None:
        """Check the validation data."""
        evaluation = self.recipe.telechat_moe.evaluation
        if evaluation.interval and self._files(VALID, evaluation.data_path or ()):
            self.attempt(VALID, lambda: open_valid(self.recipe))

    def _files(self, key: str, data_path: Sequence[str]) -> bool:
        """Check the pairs of files of a `data_path` and the manifests beside them; return False if one is broken."""
        prefixes: Sequence[str] = ()
        with suppress(ValueError):  # a rule names the mistake
            prefixes = parse_data_path(data_path)[0] if data_path else ()
        good = True
        for prefix in prefixes:
            place = f"{key}.{data_path.index(prefix) if prefix in data_path else 0}"
            dataset = self.attempt(place, lambda prefix=prefix: IndexedDataset(prefix))
            if dataset is None:
                good = False
            elif not self._manifest(place, Path(prefix)):
                self._documents(place, dataset)
        return good

    def _documents(self, key: str, dataset: IndexedDataset) -> None:
        """Check some documents of a dataset without manifest: tokens beyond the vocabulary, ends without end token."""
        data, count = self.recipe.train_dataset.data_loader.config, dataset.num_documents
        size = self.recipe.model_config.vocab_size
        chosen = np.linspace(0, count - 1, min(count, _LOOK_AT)).astype(int)
        # The last sequence of each; of what other programs wrote a document may have several.
        last = dataset.document_indices[chosen + 1] - 1
        some = [tokens for i in last[last >= 0].tolist() if len(tokens := dataset[i])]
        largest = max((int(tokens[:_LOOK_AT].max()) for tokens in some), default=0)
        if largest >= size:
            finding = f"{size}, but {dataset.prefix} holds token {largest}"
            expected = f"at least {largest + 1}, or data of the model's tokenizer"
            self.add("model.model_config.vocab_size", finding, expected)
        ends = {int(tokens[-1]) for tokens in some}
        if data is None or not some or data.eod in ends:
            return
        for name in SampleOptions.of_eod:
            if getattr(data, name):
                finding = f"{name} with eod {data.eod}, but none of {len(some)} documents of {dataset.prefix} ends with it"
                expected = f"the token that ends them ({min(ends)} ends some), or {name} False"
                self.add(f"{DATA}.config.eod", finding, expected)
                return

    def _manifest(self, key: str, prefix: Path) -> bool:
        """Compare the tokenizer of a dataset with the recipe; return False if no manifest tells it."""
        path, recipe = prefix.parent / MANIFEST, self.recipe
        if not exists(path):
            return False
        try:
            build_manifest = parse_json(path.read_bytes())
            tokenizer = build_manifest["tokenizer"]
            size, eod = int(tokenizer["vocab_size"]), int(tokenizer["eod"])
            if prefix.name not in build_manifest:
                return False  # of another dataset in the same folder
            self._inputs(key, prefix, build_manifest)
        except (OSError, *MALFORMED) as error:
            finding = f"{path}: cannot be read ({type(error).__name__}: {error})"
            self.add(key, finding, "what `telechat-moe data build` wrote; build the dataset again")
            return True
        config, data = recipe.model_config, recipe.train_dataset.data_loader.config
        if size > config.vocab_size:
            finding = f"{config.vocab_size}, but {prefix} has a vocabulary of {size} ({path})"
            expected = f"at least {size}, or data of the model's tokenizer"
            self.add("model.model_config.vocab_size", finding, expected)
        if data is not None and data.eod not in (-1, eod):
            finding = f"{data.eod}, but documents of {prefix} end with {eod} ({path})"
            self.add(f"{DATA}.config.eod", finding, str(eod))
        return True

    def _inputs(self, key: str, prefix: Path, build_manifest: Mapping[str, Any]) -> None:
        """Compare what a dataset was built from with the recipe: its tokenizer, and how conversations are written."""
        inputs, settings = build_manifest.get("inputs", {}), self.recipe.telechat_moe
        built = inputs.get("conversations")
        if (built is None) != (settings.conversations is None):
            kinds = ("text", "conversations") if built is None else ("conversations", "text")
            finding = f"{prefix} is built from {kinds[0]}, the recipe trains on {kinds[1]} (telechat_moe.conversations)"
            self.add(key, finding, f"data of {kinds[1]}: `telechat-moe data build --recipe RECIPE`")
            return
        path = settings.corpus.tokenizer
        if path and exists(Path(path)):  # else it cannot be compared
            tokenizer_key = "telechat_moe.corpus.tokenizer"
            tokenizer = self.attempt(tokenizer_key, lambda: load_tokenizer(path))
            if tokenizer is not None and "tokenizer" in inputs:
                digest = fingerprint(tokenizer)
                if digest != inputs["tokenizer"]:
                    finding = f"{path} (sha256 {digest[:12]}), but {prefix} is built with {str(inputs['tokenizer'])[:12]}"
                    self.add(
                        tokenizer_key, finding, "the tokenizer of the data, or the data built again"
                    )
                    return
        if built and (chat := self.attempt("telechat_moe.conversations", self._format)) is not None:
            self._same_format(prefix, built, chat, len(build_manifest.get("too_long", ())))

    def _format(self) -> ChatFormat | None:
        """Return how the recipe writes conversations, without a chat template that is not on this machine."""
        recipe = self.recipe
        section, path = recipe.telechat_moe.conversations, recipe.telechat_moe.corpus.tokenizer
        data = recipe.train_dataset.data_loader.config
        if section is None or data is None:
            return None
        if section.message is None and not (path and exists(Path(path))):
            roles, ignored = tuple(section.loss_roles), tuple(section.ignore_fields)
            return ChatFormat(roles, data.seq_length, ignored=ignored)
        return format_of(recipe)

    def _same_format(
        self, prefix: Path, built: Mapping[str, Any], chat: ChatFormat, too_long: int
    ) -> None:
        now, names = chat.identity(), ["loss_roles", "ignore_fields"]
        expected = "the same, or the data built again"
        if now["message"] is not None:
            names += ["message", "variables"]
        for name in names:
            if now.get(name) != built.get(name):
                finding = (
                    f"{name} {now.get(name)!r}, but {prefix} is built with {built.get(name)!r}"
                )
                self.add("telechat_moe.conversations", finding, expected)
        if too_long and chat.longest > built["seq_length"]:
            finding = f"{chat.longest}, but {prefix} is built for {built['seq_length']}, without {too_long} longer conversations"
            self.add(f"{DATA}.config.seq_length", finding, expected)

    def _corpus(self) -> None:
        """Check what the data would be built from."""
        corpus = self.recipe.telechat_moe.corpus
        for index, path in enumerate(corpus.paths):
            if not exists(Path(path)):
                finding = f"{path}: no such file or folder"
                expected = "text for `telechat-moe data build`"
                self.add(f"telechat_moe.corpus.paths.{index}", finding, expected)
        if corpus.tokenizer:
            path = corpus.tokenizer
            self.attempt("telechat_moe.corpus.tokenizer", lambda: load_tokenizer(path))

    def _start(self, start: RunStart, loader: Batches | None, weights: ReadWeights) -> None:
        """Check that what the run starts with fits the recipe and its data."""
        recipe, path, choice = self.recipe, start.path, self.recipe.telechat_moe.resume_data
        if start.kind != "resume" and choice == "new":
            finding = "new, but the run starts at step 0"
            self.add("telechat_moe.resume_data", finding, "same, or a checkpoint to resume from")
        if path is None or not self.judges_model:
            return
        if start.kind == "weights":
            config, notes = recipe.model_config, self.notes
            read = partial(weights, path, config, verify=False, notes=notes)
            if self.attempt(start.key, read) is not None:
                self.notes += end_tokens(recipe, path)
            return
        if problem := manifest.incomplete(path):
            text = " ".join(str(problem).split())
            self.add(start.key, text, "a checkpoint that is whole")
            return
        state = manifest.read(path)["state"]
        self.problems += (problems := misfits(recipe, path, state))
        if problems or "data" not in state:
            return
        step, training = folder.step_of(path), state.get("training", {})
        consumed = self.attempt(start.key, lambda: consumed_of(recipe, step, state))
        if consumed is None:
            return
        self.attempt("lr_schedule", lambda: lr_batches(recipe, consumed.lr_batches, training))
        if loader is None:
            return
        key = f"{DATA}.config"
        if self.attempt(key, lambda: [loader.load_state(state["data"], choice == "new")]) is None:
            return
        if not start.continues_run and not steps_left(recipe, loader, consumed.samples):
            finding = f"{path} has done {step} steps, and the samples of the recipe give no other"
            self.add(start.key, finding, f"more samples in {DATA}.sizes, or more epochs")


def end_tokens(recipe: Recipe, weights: Path) -> list[str]:
    """Return a note if a model's config.json ends a text with other tokens than the recipe's data."""
    data, file = recipe.train_dataset.data_loader.config, weights / hugging_face.CONFIG
    if data is None or data.eod < 0 or not file.is_file():
        return []
    ends = hugging_face.read(file).end_tokens
    if not ends or data.eod in ends:
        return []
    finding = f"{DATA}.config.eod {data.eod} ends the documents, {file} has eos_token_id {', '.join(map(str, ends))}"
    return [f"{finding}: the data's tokenizer must be the model's"]


def open_loader(recipe: Recipe, shared: Shared = None, *, marks: bool = True) -> Batches:
    """Open the training data of a recipe, or take its batches from another process of this host that does.

    Args:
        shared: With it the batches are given to the other processes, or come from one.
        marks: Of several sources each marks its samples (:mod:`telechat_moe.model.by_source`).

    Raises:
        BadInputError: The data are not there, broken or too few.
        RankDiedError: The process that reads them ended.
    """
    rows = recipe.micro_batch_samples
    settings: dict[str, Any] = {"deal_to": dealt_to(recipe), "unit": recipe.batches.unit}
    settings["epochs"] = recipe.runner_config.epochs
    if isinstance(shared, Subscriber):
        return FollowingLoader(shared, rows, **settings)
    # A pass is what the recipe asks for; Megatron's index holds 0.5 % more.
    data = open_recipe(recipe)
    settings |= {"epoch_samples": recipe.epoch_samples, "mark_sources": marks}
    if len(data) < recipe.epoch_samples:
        raise BadInputError(
            f"{len(data)} samples, {DATA}.sizes asks for {recipe.epoch_samples}; at most {len(data)} there, or more data"
        )
    if shared is None:
        return Loader(data, rows, **settings)
    return SharedLoader(shared, data, rows, **settings)


def dealt_to(recipe: Recipe) -> tuple[int, int] | None:
    """Return the data-parallel ranks and micro-batches to which the samples of a step are dealt; None: they are not."""
    if not recipe.telechat_moe.balance_attention:
        return None
    return mesh_of(recipe).dp, recipe.micro_batches


def data_notes(recipe: Recipe) -> list[str]:
    """Return the notes for the user that the build of a recipe's data left in its manifests, with their prefixes."""
    notes: list[str] = []
    for prefix in sources_of(recipe):
        with suppress(OSError, ValueError, AttributeError):
            build_manifest = parse_json((Path(prefix).parent / MANIFEST).read_bytes())
            notes += [f"{prefix}: {note}" for note in build_manifest.get("notes", ())]
    return notes


def tokenizer_path(recipe: Recipe) -> Path:
    """Return the path of the tokenizer that belongs to the training data."""
    return Path(sources_of(recipe)[0]).parent / "tokenizer.json"
