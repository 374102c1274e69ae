"""Turn a corpus into OUT/train.bin/.idx, OUT/valid.bin/.idx, OUT/tokenizer.json, OUT/manifest.json.

The documents are read once to hash them, which decides the split and the text that the tokenizer
learns from, and once to be tokenised, in shards of about ``scan.SHARD_BYTES`` of text. Shards, tokenizer
and a half-done merge live in OUT/.partial until the end: a build that was killed is resumed
with the shards that are missing. The files appear in OUT by renaming, complete, the manifest last. Equal
inputs give equal files, bit for bit.
"""

import contextlib
import errno
import hashlib
import logging
import os
import platform
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.data.chat_template import notes
from telechat_moe.data.conversations import STORED, ChatFormat, FieldCheck
from telechat_moe.data.corpus import Corpus, Document, open_corpus
from telechat_moe.data.indexed import (
    IndexedDataset,
    bin_path,
    idx_path,
    token_dtype,
    write_index,
    write_indexed,
)
from telechat_moe.data.scan import CorpusScan, hash64, learn_from, scan_corpus
from telechat_moe.data.tokenizer import BASE_VOCAB, Tokenizer, load_tokenizer, train_tokenizer
from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError
from telechat_moe.files import (
    Progress,
    checksum,
    json_bytes,
    locked,
    sync_file,
    sync_folder,
    write_atomic,
)
from telechat_moe.reading import json_or_none

logger = logging.getLogger(__name__)

FORMAT = 1
SIDES = ("train", "valid")
PARTIAL = ".partial"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class BuildResult:
    """What a build did.

    Attributes:
        reused: The dataset was there already and nothing was done.
        shards: Shards of the build; 0 where it was reused.
        resumed_shards: Shards that an earlier, interrupted build had finished.
        skipped: Files of folders that are not text, with the reason.
    """

    out: Path
    manifest: dict[str, Any]
    reused: bool
    shards: int
    resumed_shards: int
    skipped: dict[str, str]


def build(
    out: str | os.PathLike[str],
    corpus: Corpus | None = None,
    *,
    vocab_size: int = 2048,
    tokenizer: Tokenizer | None = None,
    valid_fraction: float = 0.05,
    seed: int = 1234,
    conversations: ChatFormat | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> BuildResult:
    """Build a dataset, resume a build that was interrupted, or reuse the dataset that is there.

    Args:
        corpus: What :func:`telechat_moe.data.corpus.open_corpus` returned; None: the Python standard library's sources.
        vocab_size: Tokens of the tokenizer that is trained on the training documents.
        tokenizer: The tokenizer to use instead of training one.
        valid_fraction: Share of the documents for validation where the corpus has no files for it, below 1; 0: none, else
            at least one.
        conversations: How the conversations of the corpus are written; None: it is text.
        force: Replace a dataset in ``out`` that was made from other inputs.

    Raises:
        BadInputError: If the corpus cannot be read.
        UsageError: If ``out`` holds another dataset and ``force`` is not given.
        TelechatMoeError: If the disk is full, or another build is writing to ``out``.
    """
    if not 0 <= valid_fraction < 1:
        raise UsageError(f"valid_fraction is {valid_fraction}; expected 0 or more and below 1")
    if tokenizer is None and conversations is not None:
        raise UsageError("conversations need the tokenizer of the model; give --tokenizer")
    if tokenizer is None and vocab_size < BASE_VOCAB:
        raise UsageError(f"vocab_size is {vocab_size}; expected {BASE_VOCAB} or more")
    out, corpus = Path(out), corpus or open_corpus()
    with _full_disk_named(out), _locked(out):
        scan = _scan(corpus, conversations, progress)
        inputs = {
            "format": FORMAT,
            "corpus": scan.identity,
            "documents": len(scan.hashes),
            "vocab_size": None if tokenizer else vocab_size,
            "tokenizer": fingerprint(tokenizer) if tokenizer else None,
            "eod_token": tokenizer.eod_token if tokenizer else None,
            "valid_fraction": None if scan.named_valid is not None else valid_fraction,
            "seed": seed,
            **_named_valid(scan, corpus),
            **_format_identity(conversations, tokenizer),
        }
        job = _Job(out, corpus, scan, inputs, progress, conversations)
        if (manifest := job.finished(force)) is not None:
            return BuildResult(out, manifest, True, 0, 0, dict(corpus.skipped))
        job.begin()
        return job.run(job.tokenizer(tokenizer, vocab_size))


def _scan(corpus: Corpus, chat: ChatFormat | None, progress: Progress | None) -> CorpusScan:
    """Read the corpus once; refuse fields of conversations that nothing reads, or that are to be ignored and are not there."""
    fields = FieldCheck(chat) if chat is not None else None
    scan = scan_corpus(corpus, progress, fields.look if fields else None)
    corpus.warn_skipped()
    if fields is not None:
        fields.refuse(corpus.label)
    if absent := [name for name, count in corpus.ignored.items() if not count]:
        raise BadInputError(
            f"{corpus.label}: telechat_moe.conversations.ignore_fields names {', '.join(absent)}, which no line has; "
            "remove it there"
        )
    return scan


def _format_identity(chat: ChatFormat | None, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if chat is None or tokenizer is None:
        return {}
    stops = {"stops": sorted(tokenizer.stops)} if chat.template else {}
    return {"conversations": chat.identity() | stops}


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return the hash by which a manifest knows a tokenizer."""
    return hashlib.sha256(tokenizer.to_json().encode()).hexdigest()


def _named_valid(scan: CorpusScan, corpus: Corpus) -> dict[str, int]:
    """Return how many documents are of files of validation data, if there are any; log how many of them are repeated."""
    if scan.named_valid is None:
        return {}
    train, valid = scan.hashes[~scan.named_valid], scan.hashes[scan.named_valid]
    if repeated := int(np.isin(valid, train).sum()):
        logger.warning(
            "%d of %d validation documents are in the training data, too (%s)",
            repeated, len(valid), corpus.label,
        )  # fmt: skip
    return {"valid_documents": len(valid)}


class _Job:
    def __init__(
        self,
        out: Path,
        corpus: Corpus,
        scan: CorpusScan,
        inputs: dict[str, Any],
        progress: Progress | None,
        chat: ChatFormat | None = None,
    ) -> None:
        self.out, self.corpus, self.scan, self.inputs = out, corpus, scan, inputs
        self.progress: Progress = progress or (lambda *_: None)
        self.chat = chat
        self.partial = out / PARTIAL
        self.valid = scan.valid(inputs["valid_fraction"] or 0.0, inputs["seed"])
        self.sides = SIDES if self.valid.any() else SIDES[:1]

    def finished(self, force: bool) -> dict[str, Any] | None:
        """Return the manifest of a dataset in ``out`` that needs no work."""
        manifest = _read_manifest(self.out)
        if manifest is None:
            self._refuse_foreign_files(force)
            return None
        inputs = manifest["inputs"]
        keys = sorted({*self.inputs, *inputs})
        if differing := [k for k in keys if inputs.get(k) != self.inputs.get(k)]:
            if force:
                return None
            lines = [f"{k}: {inputs.get(k)} there, {self.inputs.get(k)} now" for k in differing]
            raise UsageError(
                f"{self.out} holds a dataset made from other inputs ({'; '.join(lines)}); "
                "give --force to replace it, or another --out"
            )
        try:
            verify(self.out)
        except BadInputError as error:
            logger.warning("%s; building it again", error)
            return None
        shutil.rmtree(self.partial, ignore_errors=True)
        return manifest

    def _refuse_foreign_files(self, force: bool) -> None:
        names = [path.name for side in SIDES for path in _pair(self.out / side) if path.exists()]
        if names and not force and json_or_none(self.partial / "inputs.json") != self.inputs:
            raise UsageError(
                f"{self.out} holds {', '.join(names)} but no {MANIFEST} that belongs to them; "
                "give --force to replace them, or another --out"
            )

    def begin(self) -> None:
        """Make the folder of unfinished files, and remove what a build of other inputs left there."""
        if json_or_none(self.partial / "inputs.json") != self.inputs:
            shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True, exist_ok=True)
        write_atomic(self.partial / "inputs.json", json_bytes(self.inputs))

    def run(self, tokenizer: Tokenizer) -> BuildResult:
        """Do what is missing and publish the files."""
        dtype = STORED if self.chat else token_dtype(tokenizer.vocab_size)
        shard_of = self.scan.shards()
        count = int(shard_of[-1]) + 1
        finished = [shard for shard in range(count) if self._is_done(shard)]
        if finished:
            logger.info("%d of %d shards were finished before; going on", len(finished), count)
        self._tokenise(tokenizer, dtype, shard_of, set(finished))
        sides = {side: self._merge(side, count, dtype) for side in self.sides}
        manifest = self._manifest(tokenizer, dtype, sides)
        self._publish(manifest)
        skipped = dict(self.corpus.skipped)
        return BuildResult(self.out, manifest, False, count, len(finished), skipped)

    def tokenizer(self, chosen: Tokenizer | None, vocab_size: int) -> Tokenizer:
        """Return the tokenizer of the build, which is trained on the training documents if none was chosen."""
        path = self.partial / "tokenizer.json"
        if not path.exists():
            write_atomic(path, (chosen or self._train(vocab_size)).to_json())
        return chosen or load_tokenizer(path)

    def _train(self, vocab_size: int) -> Tokenizer:
        learn = self.scan.learned_from(self.valid)
        total = int(learn.sum())

        def texts() -> Iterator[str]:
            documents = (d for i, d in enumerate(self.corpus.documents()) if learn[i])
            for count, document in enumerate(documents, 1):
                yield from learn_from(document.text)
                self.progress("learning the tokenizer", count, total)

        return train_tokenizer(texts(), vocab_size)

    def _shard(self, shard: int, side: str) -> Path:
        return self.partial / f"shard-{shard:06d}.{side}"

    def _mark(self, shard: int) -> Path:
        return self.partial / f"shard-{shard:06d}.json"

    def _is_done(self, shard: int) -> bool:
        mark = json_or_none(self._mark(shard))
        if mark is None:
            return False
        return all(
            path.is_file() and checksum(path)["sha256"] == mark.get(path.name)
            for side in self.sides
            for path in _pair(self._shard(shard, side))
        )

    def _tokenise(
        self, tokenizer: Tokenizer, dtype: np.dtype[Any], shard_of: np.ndarray, finished: set[int]
    ) -> None:
        """Write the shards that are not done."""
        waiting, last = list[Document](), len(shard_of) - 1
        for ordinal, document in enumerate(self.corpus.documents()):
            data = document.text.encode()
            if ordinal > last or hash64(data) != self.scan.hashes[ordinal]:
                problem = "changed while the dataset was being built; build it again"
                raise BadInputError(f"{document.name} {problem}")
            shard = int(shard_of[ordinal])
            if shard not in finished:
                waiting.append(document)
                if ordinal == last or shard_of[ordinal + 1] != shard:
                    valid = self.valid[ordinal + 1 - len(waiting) : ordinal + 1]
                    self._write_shard(shard, tokenizer, waiting, valid, dtype)
                    waiting = []
            self.progress("tokenising documents", ordinal + 1, len(shard_of))

    def _write_shard(
        self,
        shard: int,
        tokenizer: Tokenizer,
        read: list[Document],
        valid: np.ndarray,
        dtype: np.dtype[Any],
    ) -> None:
        """Write a shard's documents, then the mark that says that it is done."""
        mark: dict[str, Any] = {}
        names, texts = [d.name for d in read], [d.text for d in read]
        if self.chat is None:
            documents = tokenizer.encode_documents(texts)
        else:
            counts, longest = Counter[str](), self.chat.longest
            encoded = self.chat.encode(tokenizer, names, texts, counts)
            short = [document for document in encoded if len(document.stored) <= longest]
            mark["too_long"] = [
                [names[d.source], n] for d in encoded if (n := len(d.stored)) > longest
            ]
            mark["counts"] = counts
            documents = [document.stored for document in short]
            valid = valid[np.array([document.source for document in short], int)]
        for side in self.sides:
            of_side = [documents[i] for i in np.flatnonzero(valid == (side == "valid"))]
            prefix = self._shard(shard, side)
            write_indexed(prefix, of_side, dtype)
            mark |= {path.name: checksum(path)["sha256"] for path in _pair(prefix)}
        write_atomic(self._mark(shard), json_bytes(mark))

    def _merge(self, side: str, shards: int, dtype: np.dtype[Any]) -> dict[str, Any]:
        """Join the shards of one side in PARTIAL/SIDE.bin and .idx; return their description."""
        prefix = self.partial / side
        lengths: list[np.ndarray] = []
        with bin_path(prefix).open("wb") as stream:
            for shard in range(shards):
                part = IndexedDataset(self._shard(shard, side))
                stream.write(part.tokens.data)
                lengths.append(np.array(part.sequence_lengths))
            sync_file(stream)
        joined = np.concatenate(lengths)
        write_index(idx_path(prefix), joined, dtype)
        return {
            "documents": len(joined),
            "tokens": int(joined.sum(dtype=np.int64)),
            "text_bytes": int(self.scan.sizes[self.valid == (side == "valid")].sum()),
        }

    def _manifest(
        self, tokenizer: Tokenizer, dtype: np.dtype[Any], sides: dict[str, Any]
    ) -> dict[str, Any]:
        from tokenizers import __version__ as tokenizers_version

        files = [path for side in self.sides for path in _pair(self.partial / side)]
        files.append(self.partial / "tokenizer.json")
        if self.chat is not None:
            marks = [json_or_none(path) for path in sorted(self.partial.glob("shard-*.json"))]
            sides["too_long"] = [entry for mark in marks for entry in mark["too_long"]]
            counts = sum((Counter(mark.get("counts", {})) for mark in marks), Counter[str]())
            sides["conversations"] = dict(sorted(counts.items()))
            sides["notes"] = notes(counts, tokenizer)
            if not sides[SIDES[0]]["documents"]:
                raise BadInputError(
                    f"{self.corpus.label}: none of its conversations for training has at most {self.chat.longest} tokens "
                    f"({len(sides['too_long'])} have more); raise seq_length"
                )
        return {
            "inputs": self.inputs,
            "corpus": {
                "label": self.corpus.label,
                "files": len(self.corpus.files),
                "skipped_files": len(self.corpus.skipped),
                "empty_documents": self.corpus.empty,
                "documents": len(self.scan.sizes),
                "text_bytes": int(self.scan.sizes.sum()),
            },
            "tokenizer": {
                "vocab_size": tokenizer.vocab_size,
                "eod": tokenizer.eod,
                "eod_token": tokenizer.eod_token,
            },
            "dtype": str(dtype),
            **sides,
            "sha256": {path.name: checksum(path)["sha256"] for path in files},
            "versions": {"python": platform.python_version(), "tokenizers": tokenizers_version},
        }

    def _publish(self, manifest: dict[str, Any]) -> None:
        """Move the finished files to OUT; the manifest says that all are there."""
        (self.out / MANIFEST).unlink(missing_ok=True)
        for side in set(SIDES) - set(self.sides):
            for path in _pair(self.out / side):
                path.unlink(missing_ok=True)
        # The tokenizer is copied, not moved: a build that is killed here needs it to resume.
        shutil.copyfile(self.partial / "tokenizer.json", self.partial / "tokenizer.copy")
        (self.partial / "tokenizer.copy").replace(self.out / "tokenizer.json")
        for side in self.sides:
            for path in _pair(self.partial / side):
                path.replace(self.out / path.name)
        write_atomic(self.partial / MANIFEST, json_bytes(manifest))
        (self.partial / MANIFEST).replace(self.out / MANIFEST)
        sync_folder(self.out)
        shutil.rmtree(self.partial, ignore_errors=True)


def verify(out: str | os.PathLike[str]) -> dict[str, Any]:
    """Compare the files of a dataset with the checksums in its manifest, and return the manifest.

    Raises:
        BadInputError: If a file is missing or differs; the message names it.
    """
    folder = Path(out)
    manifest = _read_manifest(folder)
    if manifest is None:
        raise BadInputError(f"{folder / MANIFEST}: no such file; build the dataset first")
    for name, expected in manifest["sha256"].items():
        path = folder / name
        if not path.is_file():
            raise BadInputError(f"{path}: missing, though {MANIFEST} lists it")
        if (digest := checksum(path)["sha256"]) != expected:
            problem = f"its sha256 is {digest}, {MANIFEST} says {expected}"
            raise BadInputError(f"{path}: damaged: {problem}")
    return manifest


def _pair(prefix: Path) -> tuple[Path, Path]:
    return bin_path(prefix), idx_path(prefix)


def _read_manifest(out: Path) -> dict[str, Any] | None:
    path = out / MANIFEST
    if not path.exists():
        return None
    manifest = json_or_none(path)
    if not isinstance(manifest, dict) or not {"inputs", "sha256"} <= set(manifest):
        raise BadInputError(
            f"{path}: not a manifest of a dataset; remove it or choose another --out"
        )
    return manifest


@contextlib.contextmanager
def _locked(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageError(f"{out} is not a folder; give another --out") from None
    with locked(out, TelechatMoeError(f"another build is writing to {out}; wait for it")):
        yield


@contextlib.contextmanager
def _full_disk_named(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise TelechatMoeError(
            f"no space left on the disk of {out} while building the dataset; free some and give "
            "the same command again: what is finished is kept"
        ) from None
