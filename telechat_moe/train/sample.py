"""Let the model write: continue prompts token by token."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from mindspore import Tensor

from telechat_moe.data import Tokenizer, load_tokenizer
from telechat_moe.files import write_atomic
from telechat_moe.model import CausalLM, Logits
from telechat_moe.recipe import Recipe
from telechat_moe.train.preflight import tokenizer_path

ChooseTokens = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[int]]
"""Return the next token of some rows of tokens: all rows, and the indices of those."""


class Drawing(NamedTuple):
    """How tokens are drawn.

    Attributes:
        max_new_tokens: How many a continuation has at most.
        temperature: 0 takes the most probable token.
        top_k: Candidates to draw from.
        seed: Of the generator.
    """

    max_new_tokens: int
    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0

    def generator(self) -> np.random.Generator:
        """Return a generator for one run over all prompts."""
        return np.random.default_rng(self.seed)

    def choose(self, logits: Iterable[np.ndarray], generator: np.random.Generator) -> list[int]:
        """Return a token for each row of logits."""
        return [draw(logits_V, self.temperature, self.top_k, generator) for logits_V in logits]


class PromptRows:
    """Prompts as rows of tokens, in a window of fixed length, so that one graph serves.

    Args:
        prompts: Beginnings; an empty one starts at the end-of-document token.
        limit: Tokens of the longest window.
        max_new_tokens: See :class:`Drawing`.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompts: Sequence[str], limit: int, max_new_tokens: int
    ) -> None:
        rows = [tokenizer.encode(prompt).tolist() or [tokenizer.eod] for prompt in prompts]
        self.tokenizer, self.max_new_tokens = tokenizer, max_new_tokens
        self.length = min(limit, max(len(row) for row in rows) + max_new_tokens)
        self.rows = [row[: self.length - 1] for row in rows]

    def continue_with(self, choose: ChooseTokens) -> list[str]:
        """Return a continuation of each prompt."""
        rows, starts = self.rows, [len(row) for row in self.rows]
        unfinished = list(range(len(rows)))
        while unfinished:
            tokens = choose(rows, unfinished)
            for i, token in zip(list(unfinished), tokens, strict=True):
                rows[i].append(token)
                full = len(rows[i]) >= self.length
                if (
                    full
                    or len(rows[i]) - starts[i] >= self.max_new_tokens
                    or token == self.tokenizer.eod
                ):
                    unfinished.remove(i)
        pairs = zip(rows, starts, strict=True)
        return [self.tokenizer.decode(row[n:], skip_special=True) for row, n in pairs]


def continue_prompts(
    model: CausalLM, tokenizer: Tokenizer, prompts: Sequence[str], drawing: Drawing
) -> list[str]:
    """Return a continuation of each prompt.

    All prompts go through the model together; what follows a prompt's last token is hidden from it by the causal mask.

    Args:
        model: Its training flag is cleared for the run and put back.
        prompts: See :class:`PromptRows`.
    """
    limit = model.config.max_position_embeddings
    prompt_rows = PromptRows(tokenizer, prompts, limit, drawing.max_new_tokens)
    length, generator = prompt_rows.length, drawing.generator()
    position = Tensor(np.tile(np.arange(length, dtype=np.int32), (len(prompts), 1)))
    training = model.training
    model.set_train(False)
    logits_cell = Logits(model)
    logits_cell.set_train(False)

    def choose(rows: Sequence[Sequence[int]], unfinished: Sequence[int]) -> list[int]:
        logits_TV = logits_cell(Tensor(padded(rows, length)), position).asnumpy()
        logits_BSV = logits_TV.reshape(len(rows), length, -1)
        return drawing.choose((logits_BSV[i, len(rows[i]) - 1] for i in unfinished), generator)

    texts = prompt_rows.continue_with(choose)
    model.set_train(training)
    return texts


def draw(
    logits_V: np.ndarray, temperature: float, top_k: int, generator: np.random.Generator
) -> int:
    """Draw one token among the ``top_k`` most probable, from ``softmax(logits / temperature)``."""
    if temperature == 0:
        return int(logits_V.argmax())
    best = np.argsort(-logits_V, kind="stable")[:top_k]
    x = logits_V[best].astype(np.float64) / temperature
    weight = np.exp(x - x.max())
    return int(generator.choice(best, p=weight / weight.sum()))


def padded(rows: Sequence[Sequence[int]], length: int) -> np.ndarray:
    """Return rows of tokens with zeros behind them, ``[rows, length]`` int32."""
    ids_BS = np.zeros((len(rows), length), np.int32)
    for i, row in enumerate(rows):
        ids_BS[i, : len(row)] = row
    return ids_BS


def write_sample(
    recipe: Recipe,
    continue_with: Callable[[Tokenizer, Sequence[str], Drawing], list[str]],
    say: Callable[[str], object],
    writes: bool = True,
) -> None:
    """Write what the model makes of the recipe's prompts into ``sample.txt``, and say it; nothing without prompts.

    Args:
        continue_with: Such as :func:`continue_prompts` of a model.
        writes: False: this process only takes part.
    """
    section = recipe.telechat_moe.sample
    if section is None:
        return
    drawing = Drawing(section.max_new_tokens, section.temperature, section.top_k, recipe.seed)
    texts = continue_with(load_tokenizer(tokenizer_path(recipe)), section.prompts, drawing)
    if not writes:
        return
    lines = [p + t for p, t in zip(section.prompts, texts, strict=True)]
    text = "\n\n---\n\n".join(lines) + "\n"
    write_atomic(Path(recipe.output_dir) / "sample.txt", text)
    say(f"the model writes:\n\n{text}")
