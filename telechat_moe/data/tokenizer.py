"""Byte-level BPE: train, load, encode and decode.

Text goes to tokens and back without loss: there is no normalisation, and every byte is in the
alphabet. A text that spells a special token (``<|eod|>`` in a source file) is encoded as the plain
characters; only ``encode_documents`` puts real ends of documents.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from telechat_moe.errors import BadInputError, TelechatMoeError, UsageError
from telechat_moe.reading import read_object

EOD_TOKEN = "<|eod|>"
EOD_CANDIDATES = (EOD_TOKEN, "<|endoftext|>", "<|end_of_text|>", "<_end>", "<eod>", "</s>", "<eos>")
BASE_VOCAB = 257
"""The 256 bytes and the end of document: the smallest vocabulary that can be trained."""
PIECE_CHARACTERS = 1 << 20
# Between these two characters the byte-level pre-tokeniser always breaks, whatever is around.
_SAFE_BREAK = re.compile(r"(?<=\S\n)(?=\S)")


class Tokenizer:
    """A tokenizer with an end-of-document token.

    Attributes:
        vocab_size: One more than the largest token id.
        eod: Id of the token that ends a document.
        path: File that it was loaded from, if any.
        eos: Id of the ``eos_token`` of Hugging Face's files beside it; without them ``eod``.
        stops: Ids at which generation stops by default: ``eos``, and those of ``generation_config.json``.
    """

    def __init__(
        self,
        backend: Any,
        eod_token: str,
        path: Path | None = None,
        *,
        eos: int | None = None,
        stops: Iterable[int] = (),
    ) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True
        self._backend.no_padding()
        self._backend.no_truncation()
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_token = eod_token
        self.eod = int(vocabulary[eod_token])
        self.path = path
        self.eos = self.eod if eos is None else eos
        self.stops = frozenset({self.eos, *stops})
        added = backend.get_added_tokens_decoder().items()
        self.special = frozenset(i for i, token in added if token.special)
        state = json.loads(backend.to_str())
        pre_tokenizer = state.get("pre_tokenizer") or {}
        self._byte_level = (
            state.get("normalizer") is None
            and pre_tokenizer.get("type") == "ByteLevel"
            and not pre_tokenizer.get("add_prefix_space")
            and pre_tokenizer.get("use_regex", True)
            and all(token["special"] for token in state.get("added_tokens", []))
        )

    def encode(self, text: str) -> np.ndarray:
        """Return the tokens of a text, int32, without an end of document."""
        return self.encode_documents([text])[0][:-1]

    def encode_documents(
        self, texts: Sequence[str], piece_characters: int = PIECE_CHARACTERS
    ) -> list[np.ndarray]:
        """Return the tokens of each text, int32, each with the end of document appended.

        Args:
            piece_characters: Longer texts are encoded in pieces (in parallel and with less memory)
                where that cannot change the result.
        """
        split = [list(self._split(text, piece_characters)) for text in texts]
        pieces = list(chain.from_iterable(split))
        encoded = iter(self._backend.encode_batch_fast(pieces, add_special_tokens=False))
        end = np.array([self.eod], dtype=np.int32)
        return [
            np.concatenate([*(np.array(next(encoded).ids, dtype=np.int32) for _ in text), end])
            for text in split
        ]

    def encode_rendered(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of a text that a chat template wrote, and where they are in it.

        Here, and only here, a special token that the text spells is that token, as in transformers.

        Returns:
            int32 ``[N]``, and int64 ``[N, 2]``: first character of each, and the one after the last.
        """
        encoded = self._spelling.encode(text, add_special_tokens=False)
        return np.array(encoded.ids, np.int32), np.array(encoded.offsets, np.int64).reshape(-1, 2)

    @cached_property
    def _spelling(self) -> Any:
        """The same tokenizer, without the post-processor, which would leave spaces out of the places of tokens."""
        state = json.loads(self._backend.to_str()) | {"post_processor": None}
        return _library().Tokenizer.from_str(json.dumps(state))

    def name(self, token: int) -> str:
        """Return the text by which the vocabulary names a token id."""
        return self._backend.id_to_token(int(token))

    def _split(self, text: str, size: int) -> Iterator[str]:
        start = 0
        while self._byte_level and len(text) - start > size:
            match = _SAFE_BREAK.search(text, start + size)
            if match is None:
                break
            yield text[start : match.start()]
            start = match.start()
        yield text[start:]

    def decode(self, tokens: Iterable[int], *, skip_special: bool = False) -> str:
        """Return the text of tokens; bytes that are no whole character show as U+FFFD."""
        ids = [int(token) for token in tokens]
        return self._backend.decode(ids, skip_special_tokens=skip_special)

    def to_json(self) -> str:
        """Return the tokenizer as the text of a ``tokenizer.json``."""
        return self._backend.to_str(pretty=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE; the same texts give the same tokenizer.

    Args:
        vocab_size: Tokens to learn, :data:`BASE_VOCAB` or more: the end of document (id 0) and 256 bytes are included. A
            short text may give fewer.

    Raises:
        UsageError: ``vocab_size`` is below :data:`BASE_VOCAB`.
    """
    if vocab_size < BASE_VOCAB:
        raise UsageError(
            f"vocab_size is {vocab_size}; a byte-level tokenizer needs {BASE_VOCAB} or more"
        )
    library = _library()
    backend = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel
    backend.pre_tokenizer = byte_level(add_prefix_space=False, use_regex=True)
    backend.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=sorted(byte_level.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer=trainer)
    return Tokenizer(backend, EOD_TOKEN)


def load_tokenizer(path: str | os.PathLike[str], eod_token: str | None = None) -> Tokenizer:
    """Load a ``tokenizer.json``.

    Args:
        path: The file, or a folder that holds ``tokenizer.json``, such as that of a Hugging Face model.
        eod_token: Name of the end-of-document token; None takes that of the ``manifest.json`` beside the file, if ``data
            build`` wrote it, else looks for the usual ones, then for the ``eos_token`` of Hugging Face's files there.

    Raises:
        BadInputError: If the file is no tokenizer or has no end-of-document token.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "tokenizer.json"
    if not file.is_file():
        other = file.with_name("tokenizer.model").is_file()
        hint = "; tokenizer.model there can be saved as one by transformers' AutoTokenizer" * other
        raise BadInputError(
            f"{file}: no such file; expected a tokenizer.json of `tokenizers`{hint}"
        )
    library = _library()
    try:
        backend = library.Tokenizer.from_file(str(file))
    except Exception as error:
        raise BadInputError(f"{file}: not a tokenizer.json of `tokenizers`: {error}") from None
    eos_token = special_tokens(file.parent).get("eos_token")
    eod_token = eod_token or _built_with(file)
    names = (eod_token,) if eod_token else (*EOD_CANDIDATES, *filter(None, [eos_token]))
    for name in names:
        if backend.token_to_id(name) is not None:
            eos = backend.token_to_id(eos_token) if eos_token else None
            return Tokenizer(backend, name, file, eos=eos, stops=_stops(file.parent))
    added = sorted(token.content for token in backend.get_added_tokens_decoder().values())
    raise BadInputError(
        f"{file}: has no end-of-document token {' or '.join(names)}; its special tokens are "
        f"{', '.join(added[:12]) or 'none'}; name one with --eod-token"
    )


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the special tokens by the names (``eos_token`` ...) that Hugging Face's files in a folder have for them.

    Raises:
        BadInputError: Two files name different tokens.
    """
    names: dict[str, tuple[str, str]] = {}
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key, value in _read(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if not (key.endswith("_token") and isinstance(text, str) and text):
                continue
            other, first = names.setdefault(key, (text, file))
            if other != text:
                raise BadInputError(
                    f"{folder}: {key} is {other!r} in {first} and {text!r} in {file}; make them the same"
                )
    return {key: text for key, (text, _) in names.items()}


def _stops(folder: Path) -> list[int]:
    """Return the ids at which a Hugging Face model of a folder stops to generate, if it says so."""
    ids = _read(folder / "generation_config.json").get("eos_token_id")
    return [i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int]


def _built_with(file: Path) -> str | None:
    """Return the end-of-document token with which the dataset beside a tokenizer was built, if there is one."""
    tokenizer = _read(file.with_name("manifest.json")).get("tokenizer")
    return tokenizer.get("eod_token") if isinstance(tokenizer, dict) else None


def _read(path: Path) -> dict[str, Any]:
    """Return a JSON object; an empty one where there is none."""
    return read_object(path) if path.exists() else {}


def _library() -> Any:
    """Import `tokenizers`, which the base install lacks."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise TelechatMoeError(
            f"text needs the package `tokenizers` ({error}); pip install 'telechat-moe[train]'"
        ) from None
    return tokenizers
