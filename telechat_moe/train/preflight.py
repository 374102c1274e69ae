"""Judge what a training run needs beside its recipe, before anything is compiled: files, folders, device, start.

``telechat-moe check`` and everything that trains call :func:`examine` or :func:`require`, so both say the same. Nothing
here imports mindspore, and of large files only headers, indices, sizes and the beginnings of some documents are read.
"""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from telechat_moe.checkpoint import folder, manifest
from telechat_moe.checkpoint.weights import ReadWeights, own_weights
from telechat_moe.data import IndexedDataset, Loader, load_tokenizer, open_recipe, open_valid
from telechat_moe.data.build import MANIFEST, fingerprint
from telechat_moe.data.conversations import ChatFormat, format_of
from telechat_moe.data.loader import Batches
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
from telechat_moe.recipe.swap import require_pool
from telechat_moe.sharding.recipe import mesh_of
from telechat_moe.sharding.shards import WeightShards
from telechat_moe.train.consumed import consumed_of, lr_batches, steps_left
from telechat_moe.train.start import Start, exists, folder_of, misfits, start_of
from telechat_moe.units import size_text

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
    """What was found ready.

    Attributes:
        start: How the run begins.
        loader: The training data, at the first sample.
    """

    start: Start
    loader: Batches


class EarlierRun(Problem):
    """`output_dir` holds another run, which a flag of the command must say something about."""


def refusal(
    problems: Sequence[Problem], not_judged: Mapping[str, str] | None = None
) -> TelechatMoeError:
    """Return the error of a run that lacks something: wrong usage where that is but a word on the run in `output_dir`."""
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
        shared: See :func:`open_loader`. Who follows leaves looking at the data to the reader.

    Raises:
        RecipeError: With everything that the run lacks.
        UsageError: It lacks nothing but a word on the other run that `output_dir` holds.
    """
    look = _Look(recipe, shared)
    ready = look.examine(resume, overwrite, weights)
    if ready is None:
        raise refusal(look.problems)
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
    """Return what a run begins with, or everything that it lacks; see :func:`require`.

    Args:
        problems: What is wrong with the recipe itself. What depends on that is not judged.
        notes: Receives what was not judged of the weights.
    """
    look = _Look(recipe, problems=problems)
    ready = look.examine(resume, overwrite, weights)
    if notes is not None:
        notes += look.notes
    return ready, look.problems


def machine(recipe: Recipe) -> list[Problem]:
    """Return why this machine cannot run a recipe, by any trainer: a device or a folder."""
    return [*_device(recipe), *_folders(recipe)]


def _device(recipe: Recipe) -> Iterator[Problem]:
    target = recipe.context.device_target
    if target != "CPU" and not list(Path("/dev").glob(_DEVICE_FILES[target])):
        found = f"{target}, but this machine has none (no /dev/{_DEVICE_FILES[target]})"
        expected = "a machine that has one, or CPU with runner_config.sink_mode False"
        yield recipe.problem("context.device_target", found, expected)


def memory(recipe: Recipe) -> Iterator[Problem]:
    """Yield that the memory of this machine cannot hold the weights and moments of a recipe that it trains alone."""
    if recipe.context.device_target != "CPU" or not isinstance(
        recipe.model.model_config, ModelConfig
    ):
        return
    least, there = least_bytes(recipe), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if least > there:
        found = f"a model whose weights and moments take {size_text(least)} at least, and this machine has {size_text(there)}"
        yield recipe.problem("model.model_config", found, "a smaller model")


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
        counts = [math.prod(end - begin for begin, end in x) for x in regions if x is not None]
        sizes[rank] = sum(2 * room(4 * count) for count in counts)
    rank = max(sizes, key=sizes.__getitem__)
    require_pool(recipe, sizes[rank], f"rank {rank}" if recipe.devices > 1 else "this process")


def _library(recipe: Recipe) -> Iterator[Problem]:
    """Yield what a recipe asks of the native library, where that is missing or cannot be loaded."""
    try:
        native.load()
        return
    except native.NativeError as error:
        why = str(error)
    own, at = recipe.telechat_moe, "telechat_moe.operators"
    dtype, stages = recipe.model_config.compute_dtype, recipe.parallel_config.pipeline_stage
    exchange = own.sharding.dispatcher
    chosen = {"default": own.operators.default} | own.operators.backends()
    needs: dict[str, tuple[object, bool]] = {
        **{f"{at}.{name}": (backend, backend == "fused") for name, backend in chosen.items()},
        "model.model_config.compute_dtype": (dtype, dtype in ("bfloat16", "bf16")),
        "telechat_moe.sharding.dispatcher": (exchange, exchange == "alltoallv"),
        "parallel_config.pipeline_stage": (stages, stages > 1),
        "optimizer.swap": (True, recipe.optimizer.swap),
        "swap_config.swap": (True, recipe.swap_config.swap),
    }
    for key, (value, is_needed) in needs.items():
        if is_needed:
            yield recipe.problem(key, f"{value}, but {why}", "another value, or the library")


def _folders(recipe: Recipe) -> Iterator[Problem]:
    root = folder_of(recipe).absolute()
    there = next(path for path in (root, *root.parents) if os.path.lexists(path))
    reason = f"{there} is not a folder"
    if there.is_dir():
        reason = "" if os.access(there, os.W_OK | os.X_OK) else f"{there} cannot be written"
    if len(max(root.parts, key=len).encode()) > _LONGEST_NAME:
        reason = f"{recipe.output_dir}: a name of more than {_LONGEST_NAME} bytes"
    if reason:
        yield recipe.problem("output_dir", reason, "a folder that can be made and written")
    pool = recipe.telechat_moe.swap
    if pool is not None and pool.pool_folder is not None:
        folder = Path(pool.pool_folder)
        if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
            found = f"{folder}, which is no folder that can be written"
            yield recipe.problem("telechat_moe.swap.pool_folder", found, "one, or remove the key")
    model = recipe.pretrained_model_dir
    if model and not exists(Path(model) / "config.json"):
        found = f"{model}: no config.json there"
        yield recipe.problem("pretrained_model_dir", found, "the Hugging Face folder of the model")


class _Look:
    """Collects what is wrong, beside the ``problems`` of the recipe itself."""

    def __init__(
        self, recipe: Recipe, shared: Shared = None, problems: Sequence[Problem] = ()
    ) -> None:
        self.recipe, self.shared, self.problems = recipe, shared, list[Problem]()
        self.missing = Missing(bool(problems))
        broken = {problem.key.partition(".")[0] for problem in problems}
        self.data_known = broken <= _NOT_OF_DATA
        self.model_known = not broken & {"", "model", "pretrained_model_dir"}
        self.notes: list[str] = []

    def examine(self, resume: bool, overwrite: bool, weights: ReadWeights) -> Ready | None:
        """See :func:`examine`."""
        recipe, loader = self.recipe, None
        if self.model_known and self.at("model", lambda: recipe.model_config) is None:
            return None
        self.problems += self.missing.until(_device(recipe))
        self.problems += self.missing.until(_folders(recipe))
        if self.model_known:
            self.problems += self.missing.until(_library(recipe))
        if not self.missing.allowed:
            self.at("telechat_moe.swap.pool_mib", lambda: _pool(recipe))
        with self.missing.skipped():
            if isinstance(recipe.model.model_config, ModelConfig):
                loader = self.data()
        start = self.at("output_dir", lambda: start_of(recipe, resume=resume, overwrite=overwrite))
        if start is not None:
            with self.missing.skipped():
                self.start(start, loader, weights)
        if self.problems or start is None or loader is None:
            return None
        return Ready(start, loader)

    def at(self, key: str, do: Callable[[], T]) -> T | None:
        """Do something; an error is a problem of the key, unless it names its own."""
        try:
            with self.missing.skipped():
                return do()
        except RecipeError as error:
            self.problems += error.problems
        except OtherModelError as error:
            self.problems += error.problems(self.recipe, key)
        except (TelechatMoeError, OSError) as error:
            found, _, expected = " ".join(str(error).split()).partition("; ")
            self.say(key, found, expected or "a file or folder that can be read")
            if isinstance(error, UsageError):
                self.problems[-1] = EarlierRun(**asdict(self.problems[-1]))
        except ValueError:
            if not self.missing.allowed:  # else a rule has said it
                raise
        return None

    def say(self, key: str, found: str, expected: str) -> None:
        self.problems.append(self.recipe.problem(key, found, expected))

    def data(self) -> Batches | None:
        """Open the training data; look at validation data and tokenizer, too."""
        if isinstance(self.shared, Subscriber):
            return open_loader(self.recipe, self.shared)
        recipe, section = self.recipe, self.recipe.train_dataset.data_loader.config
        own = recipe.telechat_moe
        name = "data_path" if section is None or section.data_path else "train_data_path"
        given = list(getattr(section, name, None) or ())
        loader = None
        if not self._files(f"{DATA}.config.{name}", given):
            self._corpus()
        elif self.data_known:
            key = f"{DATA}.config.{name}" if given else DATA
            loader = self.at(key, lambda: open_loader(recipe, self.shared))
            if own.sample is not None and given:
                key = "telechat_moe.sample"
                self.at(key, lambda: load_tokenizer(tokenizer_path(recipe)))
        if own.evaluation.interval and self._files(VALID, own.evaluation.data_path or ()):
            self.at(VALID, lambda: open_valid(recipe))
        return loader

    def _files(self, key: str, given: Sequence[str]) -> bool:
        """Look at the pairs of files that a `data_path` names, and at the manifests beside them; False: one is broken."""
        good = True
        for prefix in _prefixes(given):
            where = f"{key}.{given.index(prefix) if prefix in given else 0}"
            dataset = self.at(where, lambda prefix=prefix: IndexedDataset(prefix))
            if dataset is None:
                good = False
            elif not self._manifest(where, Path(prefix)):
                self._documents(where, dataset)
        return good

    def _documents(self, key: str, dataset: IndexedDataset) -> None:
        """Look at some documents of a dataset without manifest: tokens beyond the vocabulary, ends without end token."""
        data, size = (
            self.recipe.train_dataset.data_loader.config,
            self.recipe.model_config.vocab_size,
        )
        count = dataset.num_documents
        chosen = np.linspace(0, count - 1, min(count, _LOOK_AT)).astype(int)
        # The last sequence of each; of what other programs wrote a document may have several.
        last = dataset.document_indices[chosen + 1] - 1
        some = [tokens for i in last[last >= 0].tolist() if len(tokens := dataset[i])]
        most = max((int(tokens[:_LOOK_AT].max()) for tokens in some), default=0)
        if most >= size:
            found = f"{size}, but {dataset.prefix} holds token {most}"
            expected = f"at least {most + 1}, or data of the model's tokenizer"
            self.say("model.model_config.vocab_size", found, expected)
        ends = {int(tokens[-1]) for tokens in some}
        if data is None or not some or data.eod in ends:
            return
        for name in SampleOptions.of_eod:
            if getattr(data, name):
                found = f"{name} with eod {data.eod}, but none of {len(some)} documents of {dataset.prefix} ends with it"
                expected = f"the token that ends them ({min(ends)} ends some), or {name} False"
                self.say(f"{DATA}.config.eod", found, expected)
                return

    def _manifest(self, key: str, prefix: Path) -> bool:
        """Compare the tokenizer of a dataset with the recipe; False: no manifest tells it."""
        path, recipe = prefix.parent / MANIFEST, self.recipe
        if not exists(path):
            return False
        try:
            given = parse_json(path.read_bytes())
            size, eod = int(given["tokenizer"]["vocab_size"]), int(given["tokenizer"]["eod"])
            if prefix.name not in given:
                return False  # of another dataset in the same folder
            self._inputs(key, prefix, given)
        except (OSError, *MALFORMED) as error:
            found = f"{path}: cannot be read ({type(error).__name__}: {error})"
            self.say(key, found, "what `telechat-moe data build` wrote; build the dataset again")
            return True
        config, data = recipe.model_config, recipe.train_dataset.data_loader.config
        if size > config.vocab_size:
            found = f"{config.vocab_size}, but {prefix} has a vocabulary of {size} ({path})"
            expected = f"at least {size}, or data of the model's tokenizer"
            self.say("model.model_config.vocab_size", found, expected)
        if data is not None and data.eod not in (-1, eod):
            found = f"{data.eod}, but documents of {prefix} end with {eod} ({path})"
            self.say(f"{DATA}.config.eod", found, str(eod))
        return True

    def _inputs(self, key: str, prefix: Path, given: Mapping[str, Any]) -> None:
        """Compare what a dataset was built from with the recipe: its tokenizer, and how conversations are written."""
        inputs, own = given.get("inputs", {}), self.recipe.telechat_moe
        built = inputs.get("conversations")
        if (built is None) != (own.conversations is None):
            kinds = ("text", "conversations") if built is None else ("conversations", "text")
            found = f"{prefix} is built from {kinds[0]}, the recipe trains on {kinds[1]} (telechat_moe.conversations)"
            self.say(key, found, f"data of {kinds[1]}: `telechat-moe data build --recipe RECIPE`")
            return
        path = own.corpus.tokenizer
        if path and exists(Path(path)):  # else it cannot be compared
            at = "telechat_moe.corpus.tokenizer"
            tokenizer = self.at(at, lambda: load_tokenizer(path))
            if tokenizer is not None and "tokenizer" in inputs:
                digest = fingerprint(tokenizer)
                if digest != inputs["tokenizer"]:
                    found = f"{path} (sha256 {digest[:12]}), but {prefix} is built with {str(inputs['tokenizer'])[:12]}"
                    self.say(at, found, "the tokenizer of the data, or the data built again")
                    return
        if built and (chat := self.at("telechat_moe.conversations", self._format)) is not None:
            self._same_format(prefix, built, chat, len(given.get("too_long", ())))

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
        if now["message"] is not None:
            names += ["message", "variables"]
        for name in names:
            if now.get(name) != built.get(name):
                found = f"{name} {now.get(name)!r}, but {prefix} is built with {built.get(name)!r}"
                self.say("telechat_moe.conversations", found, "the same, or the data built again")
        if too_long and chat.longest > built["seq_length"]:
            found = f"{chat.longest}, but {prefix} is built for {built['seq_length']}, without {too_long} longer conversations"
            self.say(f"{DATA}.config.seq_length", found, "the same, or the data built again")

    def _corpus(self) -> None:
        """Look at what the data would be built from."""
        corpus = self.recipe.telechat_moe.corpus
        for index, path in enumerate(corpus.paths):
            if not exists(Path(path)):
                key = f"telechat_moe.corpus.paths.{index}"
                self.say(
                    key, f"{path}: no such file or folder", "text for `telechat-moe data build`"
                )
        if corpus.tokenizer:
            path = corpus.tokenizer
            self.at("telechat_moe.corpus.tokenizer", lambda: load_tokenizer(path))

    def start(self, start: Start, loader: Batches | None, weights: ReadWeights) -> None:
        """Look whether what the run starts with fits the recipe and its data."""
        recipe, path, choice = self.recipe, start.path, self.recipe.telechat_moe.resume_data
        if start.kind != "resume" and choice == "new":
            found = "new, but the run starts at step 0"
            self.say("telechat_moe.resume_data", found, "same, or a checkpoint to resume from")
        if path is None:
            return
        if not self.model_known:
            return
        if start.kind == "weights":
            given: dict[str, Any] = {"verify": False, "notes": self.notes}
            if self.at(start.key, lambda: weights(path, recipe.model_config, **given)) is not None:
                self.notes += end_tokens(recipe, path)
            return
        if problem := manifest.incomplete(path):
            text = " ".join(str(problem).split())
            self.say(start.key, text, "a checkpoint that is whole")
            return
        state = manifest.read(path)["state"]
        self.problems += (problems := misfits(recipe, path, state))
        if problems or "data" not in state:
            return
        step, training = folder.step_of(path), state.get("training", {})
        consumed = self.at(start.key, lambda: consumed_of(recipe, step, state))
        if consumed is None:
            return
        self.at("lr_schedule", lambda: lr_batches(recipe, consumed.lr_batches, training))
        if loader is None:
            return
        key = f"{DATA}.config"
        if self.at(key, lambda: [loader.load_state(state["data"], choice == "new")]) is None:
            return
        if not start.continues_run and not steps_left(recipe, loader, consumed.samples):
            found = f"{path} has done {step} steps, and the samples of the recipe give no other"
            self.say(
                start.key, found, "more samples in train_dataset.data_loader.sizes, or more epochs"
            )


def end_tokens(recipe: Recipe, weights: Path) -> list[str]:
    """Return a note if a model's config.json ends a text with other tokens than the recipe's data."""
    data, file = recipe.train_dataset.data_loader.config, weights / hugging_face.CONFIG
    if data is None or data.eod < 0 or not file.is_file():
        return []
    ends = hugging_face.read(file).end_tokens
    if not ends or data.eod in ends:
        return []
    found = f"{DATA}.config.eod {data.eod} ends the documents, {file} has eos_token_id {', '.join(map(str, ends))}"
    return [f"{found}: the data's tokenizer must be the model's"]


def _prefixes(given: Sequence[str]) -> Sequence[str]:
    """Return the prefixes of a `data_path`; none of one that is wrong, as a rule says."""
    with suppress(ValueError):
        return parse_data_path(given)[0] if given else ()
    return ()


def open_loader(recipe: Recipe, shared: Shared = None) -> Batches:
    """Open the training data of a recipe, or take its batches from another process of this host that does.

    Args:
        shared: With it the batches are given to the other processes, or come from one.

    Raises:
        BadInputError: The data are not there, broken or too few.
        RankDiedError: The process that reads them ended.
    """
    rows = recipe.micro_batch_samples
    given: dict[str, Any] = {"epochs": recipe.runner_config.epochs, "deal_to": dealt_to(recipe)}
    given["unit"] = recipe.batches.unit
    if isinstance(shared, Subscriber):
        return FollowingLoader(shared, rows, **given)
    # A pass is what the recipe asks for; Megatron's index holds 0.5 % more.
    data, given["epoch_samples"] = open_recipe(recipe), recipe.epoch_samples
    if len(data) < recipe.epoch_samples:
        raise BadInputError(
            f"{len(data)} samples, {DATA}.sizes asks for {recipe.epoch_samples}; at most {len(data)} there, or more data"
        )
    given["mark_sources"] = True
    if shared is None:
        return Loader(data, rows, **given)
    return SharedLoader(shared, data, rows, **given)


def dealt_to(recipe: Recipe) -> tuple[int, int] | None:
    """Return the data-parallel ranks and micro-batches to which the samples of a step are dealt; None: they are not."""
    if not recipe.telechat_moe.balance_attention:
        return None
    return mesh_of(recipe).dp, recipe.micro_batches


def data_notes(recipe: Recipe) -> list[str]:
    """Return what the build of a recipe's data said that a user should know, with their prefixes."""
    config = recipe.train_dataset.data_loader.config
    given = (config.data_path or config.train_data_path or []) if config else []
    told: list[str] = []
    for prefix in parse_data_path(given)[0] if given else ():
        with suppress(OSError, ValueError, AttributeError):
            about = parse_json((Path(prefix).parent / MANIFEST).read_bytes())
            told += [f"{prefix}: {note}" for note in about.get("notes", ())]
    return told


def tokenizer_path(recipe: Recipe) -> Path:
    """Return the path of the tokenizer that belongs to the training data."""
    config = recipe.train_dataset.data_loader.config
    given = (config.data_path or config.train_data_path or []) if config else []
    return Path(parse_data_path(given)[0][0]).parent / "tokenizer.json"
