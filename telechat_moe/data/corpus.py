"""Iterate over the documents of a corpus: text files, folders, .jsonl, .parquet, or the default corpus.

What is a document: a text file, one line of a ``.jsonl`` / ``.ndjson`` file (its ``text`` key), or one row of a
``.parquet`` file (its ``text`` column); the first two may be compressed (``.gz``, ``.zst``). Parquet and Zstandard need
``pyarrow``. A folder is read recursively in sorted order; hidden files and
folders are left out, links to folders are not followed, and files that are not UTF-8 text are
skipped and counted. A file that is named explicitly and is not text, or holds none, is an error.

The default corpus is the Python standard library's own sources, real text that is on every machine
that runs this: every ``*.py`` under ``sysconfig``'s stdlib path, without ``site-packages`` and
``dist-packages``, without test folders (``test``, ``tests``, ``idle_test``) and without
``_sysconfigdata*.py``, which is generated and names the machine. Python 3.11.7: 733 files, 12.1 MB.
"""

import codecs
import gzip
import io
import json
import logging
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from telechat_moe.data.conversations import conversation_text, docstring_conversations
from telechat_moe.errors import BadInputError, TelechatMoeError
from telechat_moe.reading import DuplicateKeyError, most_inflated, unique_keys

logger = logging.getLogger(__name__)

LINE_SUFFIXES = (".jsonl", ".ndjson")
PARQUET = ".parquet"
_ROWS = 1024
"""Rows of a Parquet file that are read at a time."""
_LONGEST_LINE = 1 << 26
PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__"})
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
TABLE_FOLDERS = frozenset({"encodings", "pydoc_data"})
"""Folders of the standard library with tables, a fifth of its bytes, which are no text to learn from."""


@dataclass(frozen=True)
class Document:
    """A document.

    Attributes:
        name: File (and line) that it comes from, relative to the corpus.
        text: Its text, exactly as stored.
        valid: It is of a file of validation data.
    """

    name: str
    text: str
    valid: bool = False


@dataclass(frozen=True)
class SourceFile:
    """A file of a corpus.

    Attributes:
        name: Path relative to the corpus.
        explicit: Named by the user, not found in a folder.
    """

    path: Path
    name: str
    explicit: bool

    @property
    def kind(self) -> str:
        """The ending of its name in lower case, without that of a compression."""
        return _plain_name(self.path.name)[1]


@dataclass
class Corpus:
    """A list of files whose documents can be iterated any number of times, in the same order.

    Attributes:
        label: What it is, for people and the manifest.
        text_key: Key of the text in ``.jsonl`` lines and ``.parquet`` rows.
        conversations: Documents are conversations, as ``conversation_text`` writes them: lines with messages under
            ``text_key``, or functions of the default corpus and their docstrings.
        ignored: Fields of conversations that are left out, with how often they occurred.
        valid_files: How many of the files, the last ones, are validation data; None: they are not told apart.
        skipped: Names of files found in folders that are not text, filled by ``documents``.
        empty: Number of empty documents that the last full iteration left out.
    """

    label: str
    files: list[SourceFile]
    text_key: str = "text"
    valid_files: int | None = None
    skipped: dict[str, str] = field(default_factory=dict[str, str])
    empty: int = 0
    conversations: bool = False
    ignored: dict[str, int] = field(default_factory=dict[str, int])

    def documents(self) -> Iterator[Document]:
        """Yield the documents that are not empty.

        Raises:
            BadInputError: If a file cannot be read; the message names file and line or byte.
        """
        self.skipped.clear()
        self.empty = 0
        first_valid = len(self.files) - (self.valid_files or 0)
        for number, source in enumerate(self.files):
            count = 0
            for document in self._read(source):
                if document.text:
                    count += 1
                    yield replace(document, valid=number >= first_valid)
                else:
                    self.empty += 1
            if source.explicit and not count:
                raise BadInputError(
                    f"{source.path}: holds no text; leave it out of --corpus and --valid"
                )

    def _read(self, source: SourceFile) -> Iterator[Document]:
        if source.kind in LINE_SUFFIXES:
            yield from self._read_lines(source)
            return
        if self.conversations and source.explicit:
            raise BadInputError(
                f"{source.path}: conversations are lines of {' or '.join(LINE_SUFFIXES)} files; expected "
                f'{{"{self.text_key}": [{{"role": "user", "content": "..."}}, ...]}} in each line'
            )
        if source.kind == PARQUET:
            yield from _read_rows(source, self.text_key)
            return
        data = _read_bytes(source)
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            if source.explicit:
                raise BadInputError(
                    f"{source.path}: not UTF-8 text: byte {error.start} is "
                    f"0x{data[error.start]:02x}; convert the file to UTF-8 or leave it out"
                ) from None
            self.skipped[source.name] = f"not UTF-8 at byte {error.start}"
            return
        if "\0" in text and not source.explicit:
            self.skipped[source.name] = "binary"
            return
        if self.conversations:
            for line, messages in docstring_conversations(text):
                yield Document(f"{source.name}:{line}", messages)
            return
        yield Document(source.name, text)

    def _read_lines(self, source: SourceFile) -> Iterator[Document]:
        number = 0
        with (
            _reading(source, lambda: f"after line {number}" if number else "at all"),
            _open(source) as stream,
        ):
            for number, line in enumerate(iter(lambda: stream.readline(_LONGEST_LINE + 1), b""), 1):
                location = f"{source.path}: line {number}"
                if len(line) > _LONGEST_LINE:
                    raise BadInputError(f"{location}: more than {_LONGEST_LINE:,} bytes; divide it")
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                if not line.strip():
                    continue
                value = _parse_line(location, line, self.text_key)
                if self.conversations:
                    text = conversation_text(location, value, self.text_key, self.ignored)
                else:
                    text = _text(location, value, self.text_key)
                yield Document(f"{source.name}:{number}", text)

    def warn_skipped(self) -> None:
        """Log how many files of folders were skipped, and the first of them."""
        if self.skipped:
            first = list(self.skipped.items())[:3]
            some = ", ".join(f"{name} ({reason})" for name, reason in first)
            ellipsis = ", ..." if len(self.skipped) > 3 else ""
            logger.warning(
                "skipped %d file(s) that are not text: %s%s", len(self.skipped), some, ellipsis
            )


def open_corpus(
    paths: Sequence[str | os.PathLike[str]] = (),
    *,
    extensions: Sequence[str] | None = None,
    text_key: str | None = None,
    conversations: bool = False,
    ignored: Sequence[str] = (),
    valid: Sequence[str | os.PathLike[str]] = (),
) -> Corpus:
    """List the files of a corpus.

    Args:
        paths: Files and folders; none means the default corpus.
        extensions: Take only files with these endings from folders (``.gz`` may follow); None
            takes all that are text.
        text_key: Key of the text or messages in ``.jsonl`` lines and ``.parquet`` rows; None: ``text`` or ``messages``.
        conversations: Take conversations, from ``.jsonl`` files only; see :class:`Corpus`.
        valid: Files and folders of validation data; none leaves it open which documents are.

    Raises:
        BadInputError: If a path does not exist, no file is found, or a file is to be in both.
    """
    if valid:
        how: dict[str, Any] = {"extensions": extensions, "text_key": text_key}
        how |= {"conversations": conversations, "ignored": ignored}
        return _both(open_corpus(paths, **how), open_corpus(valid, **how))
    paths = [path for path in paths if os.fspath(path)]
    if not paths:
        corpus = default_corpus()
        corpus.conversations, corpus.ignored = conversations, dict.fromkeys(ignored, 0)
        return corpus
    endings = LINE_SUFFIXES if conversations else None
    if extensions is not None:
        endings = tuple(f".{extension.lower().lstrip('.')}" for extension in extensions)
    files: list[SourceFile] = []
    listed: set[Path] = set()
    for root in map(Path, paths):
        if not root.exists():
            raise BadInputError(f"{root}: no such file or folder; check --corpus")
        if not (root.is_file() or root.is_dir()):  # a pipe or /dev/zero, which have no end
            raise BadInputError(f"{root}: no regular file or folder; check --corpus")
        for source in _list(root, endings):
            resolved = source.path.resolve()
            if resolved not in listed:
                listed.add(resolved)
                files.append(source)
    if not files:
        names = ", ".join(str(path) for path in paths)
        condition = f" ending in {', '.join(endings)}" if endings else ""
        raise BadInputError(f"{names}: no files{condition} found; check --corpus")
    label = ", ".join(Path(path).name or str(path) for path in paths)
    text_key = text_key or ("messages" if conversations else "text")
    return Corpus(
        label, files, text_key, conversations=conversations, ignored=dict.fromkeys(ignored, 0)
    )


def _both(train: Corpus, valid: Corpus) -> Corpus:
    train_paths = {source.path.resolve() for source in train.files}
    for source in valid.files:
        if source.path.resolve() in train_paths:
            raise BadInputError(
                f"{source.path}: is both in --corpus and in --valid; leave it out of one of them"
            )
    label = f"{train.label}; for validation {valid.label}"
    return replace(
        train, label=label, files=[*train.files, *valid.files], valid_files=len(valid.files)
    )


def default_corpus() -> Corpus:
    """Return the corpus of the Python standard library's sources, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _list(root, (".py",), PACKAGE_FOLDERS | TABLE_FOLDERS | TEST_FOLDERS)
    files = [source for source in files if not source.path.name.startswith("_sysconfigdata")]
    if not files:
        raise BadInputError(
            f"{root}: the sources of Python's standard library are not installed; give --corpus"
        )
    return Corpus(f"Python {sys.version.split()[0]} standard library", files)


def _list(
    root: Path, endings: tuple[str, ...] | None, left_out: frozenset[str] = frozenset()
) -> list[SourceFile]:
    """List a file or the files of a folder, sorted by relative path; some folders are left out."""
    if not root.is_dir():
        return [SourceFile(root, root.name, explicit=True)]
    files: list[tuple[tuple[str, ...], Path]] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and n not in left_out]
        for name in names:
            path = Path(folder, name)
            matches = endings is None or _plain_name(name)[0].endswith(endings)
            if matches and not name.startswith(".") and path.is_file():
                files.append((path.relative_to(root).parts, path))
    files.sort()
    return [SourceFile(path, "/".join(parts), explicit=False) for parts, path in files]


def _plain_name(name: str) -> tuple[str, str]:
    """Return a file's name in lower case without the ending of a compression, and its own ending."""
    plain = name.lower()
    for ending in (".gz", ".zst"):
        plain = plain.removesuffix(ending)
    return plain, Path(plain).suffix


def _open(source: SourceFile) -> gzip.GzipFile | io.BufferedReader:
    ending = source.path.suffix.lower()
    if ending == ".gz":
        return gzip.open(source.path, "rb")
    if ending == ".zst":
        stream = _arrow(source).CompressedInputStream(str(source.path), "zstd")
        return io.BufferedReader(stream, 1 << 20)
    return source.path.open("rb")


def _arrow(source: SourceFile) -> Any:
    """Import `pyarrow`, which the base install lacks."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TelechatMoeError(
            f"{source.path}: Parquet and Zstandard need the package `pyarrow` ({error}); pip install 'telechat-moe[data]'"
        ) from None
    return pyarrow


@contextmanager
def _reading(source: SourceFile, position: Callable[[], str]) -> Iterator[None]:
    """Turn an error of reading into one that names the file and how far it was read."""
    try:
        yield
    except EOFError:
        raise BadInputError(
            f"{source.path}: the gzip data ends {position()} without its end mark; the file is truncated"
        ) from None
    except (zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(f"{source.path}: broken gzip data {position()}: {error}") from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise BadInputError(f"{source.path}: cannot be read {position()}: {reason}") from None


def _read_bytes(source: SourceFile) -> bytes:
    data = bytearray()
    with _reading(source, lambda: f"after byte {len(data)}"), _open(source) as stream:
        compressed = source.path.suffix.lower() in (".gz", ".zst")
        limit = most_inflated(source.path.stat().st_size) if compressed else sys.maxsize
        while block := stream.read(1 << 20):
            data += block
            if len(data) > limit:
                raise BadInputError(
                    f"{source.path}: inflates to more than {limit:,} bytes; expected a text that shrinks less"
                )
    return bytes(data)


def _read_rows(source: SourceFile, key: str) -> Iterator[Document]:
    arrow, number = _arrow(source), 0
    try:
        with arrow.parquet.ParquetFile(source.path) as file:
            schema = file.schema_arrow
            if key not in schema.names:
                names = ", ".join(map(repr, schema.names[:8])) or "none"
                raise BadInputError(
                    f"{source.path}: has no column {key!r} (columns: {names}); choose one with --text-key"
                )
            kind = schema.field(key).type
            kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
            if str(kind) not in ("string", "large_string", "string_view"):
                raise BadInputError(
                    f"{source.path}: column {key!r} is {schema.field(key).type}, not text; choose another with --text-key"
                )
            for batch in file.iter_batches(_ROWS, columns=[key]):
                for value in batch.column(0):
                    number += 1
                    text = value.as_py()
                    if text is None:
                        raise BadInputError(f"{source.path}: row {number} has no {key!r} (null)")
                    yield Document(f"{source.name}:{number}", text)
    except UnicodeDecodeError as error:
        raise BadInputError(
            f"{source.path}: row {number}: not UTF-8 text: byte {error.start} of it"
        ) from None
    except (arrow.ArrowException, OSError) as error:
        raise BadInputError(
            f"{source.path}: cannot be read as Parquet after row {number}: {' '.join(str(error).split())}"
        ) from None


def _parse_line(location: str, line: bytes, key: str) -> dict[str, Any]:
    """Return the object of a line, which has the key."""
    try:
        value = json.loads(line.decode("utf-8"), object_pairs_hook=unique_keys)
    except UnicodeDecodeError as error:
        raise BadInputError(f"{location}: not UTF-8 text: byte {error.start} of the line") from None
    except DuplicateKeyError as error:
        raise BadInputError(
            f"{location}: {error}; which of its values counts cannot be told"
        ) from None
    except (RecursionError, ValueError) as error:
        fault = ": nested too deeply, or a number of thousands of digits"
        if isinstance(error, json.JSONDecodeError):
            fault = f" at column {error.colno}: {error.msg}"
        raise BadInputError(
            f"{location}: not JSON{fault}; each line must be one JSON object"
        ) from None
    if not isinstance(value, dict):
        raise BadInputError(
            f"{location}: a JSON {type(value).__name__}, expected an object with the key {key!r}"
        )
    if key not in value:
        keys = ", ".join(map(repr, list(value)[:8])) or "none"
        raise BadInputError(
            f"{location}: has no key {key!r} (keys: {keys}); choose one with --text-key"
        )
    return value


def _text(location: str, value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        keys = ", ".join(map(repr, list(value)[:8]))
        raise BadInputError(
            f"{location}: has {type(text).__name__}, not text, under {key!r} (keys: {keys}); choose one with --text-key"
        )
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInputError(
            f"{location}: character {error.start} of the text is half a surrogate pair, not a character"
        ) from None
    return text
