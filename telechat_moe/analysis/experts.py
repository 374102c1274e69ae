"""What the experts of a run learn, from its folder: loads that it recorded, and its checkpoints on a fixed text.

Shapes: U sequences, S tokens of a sequence, T = U * S, L MoE layers, K experts per token, E experts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from telechat_moe.analysis import statistics
from telechat_moe.analysis.report import ExpertReport, Favourite, LoadHistory, RouterState
from telechat_moe.checkpoint import folder
from telechat_moe.data import IndexedDataset, Tokenizer, load_tokenizer
from telechat_moe.data.conversations import bare
from telechat_moe.data.corpus import open_corpus
from telechat_moe.data.recipe import options_of, valid_prefixes
from telechat_moe.data.sample import collate
from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.moe.loads import loads_per_step
from telechat_moe.numerics import Array
from telechat_moe.recipe import Recipe, load
from telechat_moe.train import metrics
from telechat_moe.train.preflight import tokenizer_path

if TYPE_CHECKING:
    from telechat_moe.analysis.observe import Observation

DOCUMENTS = 8
"""Documents that are compared where the text has one source."""
LEAST = 3
"""Sequences that a domain must have."""
ONE_SOURCE = (
    "the text is one source with fewer than two documents of three sequences; give several with --text NAME=PATH, or "
    "several prefixes in telechat_moe.evaluation.data_path"
)
SECTIONS = ("routers", "flips", "specialisation", "co-activation", "succession", "favourites")
"""What is computed from checkpoints."""
Say = Callable[[str], None]


class ObservedText(NamedTuple):
    """A text to watch routers on.

    Attributes:
        description: What it is, for people.
        windows: int32 ``[n, width]`` of each domain.
    """

    description: str
    windows: dict[str, Array]


def analyse(
    run: Path,
    texts: Mapping[str, Sequence[str]] | None = None,
    *,
    sequences: int = 96,
    checkpoints: int = 5,
    permutations: int = 999,
    overrides: Sequence[str] = (),
    say: Say = lambda text: None,
) -> ExpertReport:
    """Return everything about the experts of a run.

    Args:
        run: Its ``output_dir``.
        texts: Files and folders of each domain; empty: the run's validation data.
        sequences: Sequences of the text, all domains together.
        checkpoints: At most so many of the run's checkpoints, the first and the last among them.
        overrides: Settings of its recipe to replace, such as where its data are now.

    Raises:
        BadInputError: The run has no recipe or no experts, or a file of it is damaged or of another run.
    """
    if not (run / "recipe.json").is_file():
        raise BadInputError(f"{run}: no recipe.json there; give the output_dir of a run")
    recipe = load(run / "recipe.json", overrides)
    config = recipe.model_config
    names = config.moe_layer_names
    if not names:
        raise BadInputError(f"{run}: the model of its recipe.json has no layer with experts")
    experts, top_k = config.n_routed_experts, config.num_experts_per_tok
    report = ExpertReport(run=str(run), layers=names, experts=experts, top_k=top_k)
    report.load = _loads(run, recipe, report.not_judged)
    if report.load is not None:
        report.judge_load()
    paths = folder.list_checkpoints(run / "checkpoints")[::-1]
    reason = f"{run / 'checkpoints'} holds none; a CheckpointMonitor in callbacks saves them"
    text = _text(recipe, texts or {}, sequences, report.not_judged) if paths else None
    if text is None:
        reason = report.not_judged.pop("text", reason)
        report.not_judged |= dict.fromkeys(SECTIONS, reason)
        return report
    _routers(report, recipe, _spread(paths, checkpoints), text, permutations, say)
    return report


def _loads(run: Path, recipe: Recipe, not_judged: dict[str, str]) -> LoadHistory | None:
    """Return the loads that a run recorded."""
    path, config = run / metrics.FILE, recipe.model_config
    records = metrics.read(path)
    due = [r for r in records if r["event"] == "expert_loads"]
    if not due:
        every = recipe.telechat_moe.moe.load_interval
        not_judged["load"] = (
            f"{path} has no record of it; telechat_moe.moe.load_interval is {every}, and a record is due every so many steps"
            if every
            else "telechat_moe.moe.load_interval is 0 in this run; a number of steps records it"
        )
        return None
    steps = [r for r in records if r["event"] == "step"]
    tokens = {r["step"]: r["tokens"] for r in steps}
    shape = len(config.moe_layer_names), config.n_routed_experts
    about = shape, config.num_experts_per_tok, str(path)
    loads = [loads_per_step(r, tokens, *about) for r in due]
    seconds = sum(float(r.get("seconds") or 0.0) for r in due)
    total = sum(float(r["seconds"] or 0.0) for r in steps)
    return LoadHistory(
        step_N=[r["step"] for r in due],
        load_NLE=np.stack(loads),
        recording_share=seconds / total if total else float("nan"),
    )


def _spread(paths: Sequence[Path], limit: int) -> list[Path]:
    """Return at most so many of the paths, evenly spread, the last among them."""
    places = np.linspace(len(paths) - 1, 0, min(max(limit, 1), len(paths))).round().astype(int)
    return [paths[i] for i in sorted(set(places.tolist()))]


def _text(
    recipe: Recipe, texts: Mapping[str, Sequence[str]], sequences: int, not_judged: dict[str, str]
) -> ObservedText | None:
    """Return the text to watch routers on; None, and why, if the run's validation data are not there."""
    options = options_of(recipe)
    width = recipe.model_config.seq_length + options.add_extra_token_to_sequence
    if texts:
        tokenizer = load_tokenizer(tokenizer_path(recipe))
        count = max(LEAST, sequences // len(texts))
        windows = {
            name: _windows(_encoded(paths, tokenizer, 4 * count * width), width, count, name)
            for name, paths in texts.items()
        }
        return ObservedText("texts given with --text", windows)
    try:
        prefixes = valid_prefixes(recipe)
        sources = {prefix: IndexedDataset(prefix) for prefix in prefixes}
        if len(sources) > 1:
            count = max(LEAST, sequences // len(sources))
            windows = {p: _windows([s.tokens], width, count, p) for p, s in sources.items()}
            return ObservedText("the validation data, a domain for each of their sources", windows)
        (prefix, source), *_ = sources.items()
        return _documents(recipe, prefix, source, width, sequences)
    except TelechatMoeError as error:
        not_judged["text"] = f"the validation data cannot be read ({error}); give --text NAME=PATH"
        return None


def _documents(
    recipe: Recipe, prefix: str, source: IndexedDataset, width: int, sequences: int
) -> ObservedText:
    """Return the longest documents of a source as domains; the whole source if there are not two long ones."""
    lengths = source.sequence_lengths
    longest = np.argsort(-lengths, kind="stable")[:DOCUMENTS]
    longest = np.sort(longest[lengths[longest] >= LEAST * width]).tolist()
    if len(longest) < 2:
        windows = {prefix: _windows([source.tokens], width, sequences, prefix)}
        return ObservedText(f"{prefix}, one source", windows)
    path, count = tokenizer_path(recipe), max(LEAST, sequences // len(longest))
    tokenizer = load_tokenizer(path) if path.is_file() else None
    size = width, count, prefix
    windows = {_name(i, source[i], tokenizer): _windows([source[i]], *size) for i in longest}
    description = f"{prefix}, a domain for each of its {len(longest)} longest documents"
    return ObservedText(description, windows)


def _name(number: int, tokens: Array, tokenizer: Tokenizer | None) -> str:
    """Return a name for a document: its number and how it begins."""
    begins = " ".join(tokenizer.decode(bare(tokens[:24])).split())[:44] if tokenizer else ""
    return f"document {number}" + (f": {begins}" if begins else "")


def _encoded(paths: Sequence[str], tokenizer: Tokenizer, enough: int) -> list[Array]:
    """Return the tokens of some files and folders, until there are enough."""
    documents: list[Array] = []
    for document in open_corpus(list(paths)).documents():
        documents += tokenizer.encode_documents([document.text])
        if sum(map(len, documents)) >= enough:
            break
    return documents


def _windows(documents: Iterable[Array], width: int, count: int, name: str) -> Array:
    """Cut documents, one after another, into sequences and return so many of them, evenly spread: int32 ``[n, width]``."""
    parts = list(documents)
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    available = len(tokens) // width
    if available < 1:
        raise BadInputError(
            f"{name}: {len(tokens)} tokens, fewer than a sequence of {width}; give more text"
        )
    places = np.unique(
        np.linspace(0, available - 1, min(count, available)).round().astype(np.int64)
    )
    return bare(tokens[: available * width].reshape(available, width)[places].astype(np.int32))


def _routers(
    report: ExpertReport,
    recipe: Recipe,
    paths: Sequence[Path],
    text: ObservedText,
    permutations: int,
    say: Say,
) -> None:
    """Watch the routers of some checkpoints on a text, and judge the last."""
    from telechat_moe.analysis.observe import Observer

    S, options = recipe.model_config.seq_length, options_of(recipe)
    window_UX = np.concatenate([*text.windows.values()])
    counts = [len(windows) for windows in text.windows.values()]
    domain_U = np.repeat(np.arange(len(counts)), counts)
    if window_UX.max() >= recipe.model_config.vocab_size:
        raise BadInputError(
            f"{text.description}: token {window_UX.max()}, but the model's vocab_size is {recipe.model_config.vocab_size}; the text "
            "must be encoded with the model's tokenizer"
        )
    report.text, report.tokens = text.description, len(window_UX) * S
    report.domains = dict(zip(text.windows, counts, strict=True))
    rows = min(recipe.runner_config.batch_size, len(window_UX))
    padded = window_UX[np.arange(-(-len(window_UX) // rows) * rows) % len(window_UX)]
    batches = [collate(part, S, options) for part in padded.reshape(-1, rows, padded.shape[1])]
    observer = Observer(recipe, rows)
    before: Observation | None = None
    for path in paths:
        say(f"computing {report.tokens:,} tokens with {path.name}")
        observer.load(path)
        observation = observer.run(batches, report.tokens)
        report.checkpoints.append(_state(folder.step_of(path), observation, before, report.experts))
        before = observation
    assert before is not None
    if len(paths) < 2:
        report.not_judged["flips"] = "the run has one checkpoint; flips compare two"
    say("counting what experts have in common")
    _judge(report, before.index_LTK, domain_U, permutations)
    token_T = np.concatenate([b["input_ids"].reshape(-1) for b in batches])[: report.tokens]
    _favourites(report, recipe, before.index_LTK, token_T)


def _judge(report: ExpertReport, index_LTK: Array, domain_U: Array, permutations: int) -> None:
    """Add specialisation and pairs of experts of the last checkpoint."""
    E = report.experts
    layers = list(index_LTK)
    if report.top_k > 1:
        report.together = [statistics.coactivation(index_TK, E) for index_TK in layers]
    else:
        report.not_judged["co-activation"] = "each token has one expert"
    report.following = [statistics.succession(a_TK, b_TK, E) for a_TK, b_TK in pairwise(layers)]
    if not report.following:
        report.not_judged["succession"] = "the model has one layer with experts"
    if len(report.domains) < 2:
        report.not_judged["specialisation"] = ONE_SOURCE
        return
    smallest_p = max(1 / statistics.arrangements(domain_U), 1 / (1 + permutations))
    if smallest_p >= statistics.ALPHA:
        report.not_judged["specialisation"] = (
            f"{len(domain_U)} sequences of {len(report.domains)} domains and {permutations} permutations cannot reach a "
            f"level of {statistics.ALPHA}; more text or permutations can"
        )
        return
    U = len(domain_U)
    counts_ULE = np.stack([statistics.chosen_counts(index_TK, U, E) for index_TK in layers], 1)
    report.specialisation = statistics.specialisation(counts_ULE, domain_U, permutations)


def _favourites(report: ExpertReport, recipe: Recipe, index_LTK: Array, token_T: Array) -> None:
    """Add the tokens that each expert of the last checkpoint prefers."""
    path = tokenizer_path(recipe)
    if not path.is_file():
        report.not_judged["favourites"] = f"{path} is not there to spell tokens"
        return
    tokenizer = load_tokenizer(path)
    report.favourites = [
        [
            [Favourite(tokenizer.decode([token]), times, ratio) for token, times, ratio in tokens]
            for tokens in statistics.favourites(token_T, index_TK, report.experts)
        ]
        for index_TK in index_LTK
    ]


def _state(
    step: int, observation: "Observation", before: "Observation | None", experts: int
) -> RouterState:
    """Return what the routers of a checkpoint do, in numbers."""
    load_LE = np.stack([np.bincount(i.ravel(), minlength=experts) for i in observation.index_LTK])
    pairs = zip(before.index_LTK, observation.index_LTK, strict=True) if before is not None else ()
    changes = [statistics.flips(one_TK, two_TK) for one_TK, two_TK in pairs]
    share_LT = observation.routed_LT / (observation.routed_LT + observation.shared_LT)
    return RouterState(
        step=step,
        overload=statistics.overload(load_LE).tolist(),
        entropy=observation.entropy_LT.mean(1).tolist(),
        margin=_nan_as_none(np.median(observation.margin_LT, 1)),
        margin_low=_nan_as_none(np.quantile(observation.margin_LT, 0.1, axis=1)),
        routed=(observation.routed_LT / observation.residual_LT).mean(1).tolist(),
        shared=_nan_as_none((observation.shared_LT / observation.residual_LT).mean(1)),
        routed_share=_nan_as_none(share_LT.mean(1)),
        flipped=[flipped for flipped, _ in changes] or None,
        replaced=[replaced for _, replaced in changes] or None,
    )


def _nan_as_none(numbers: Array) -> list[Any]:
    """Return numbers with None for NaN."""
    return [None if np.isnan(x) else float(x) for x in numbers]
