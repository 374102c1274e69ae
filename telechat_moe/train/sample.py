"""Let the model write: continue prompts token by token."""

from collections.abc import Callable, Sequence
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor

from telechat_moe.data import Tokenizer, load_tokenizer
from telechat_moe.files import write_atomic
from telechat_moe.model import CausalLM, Logits
from telechat_moe.recipe import Recipe
from telechat_moe.train.preflight import tokenizer_path


def continue_prompts(
    model: CausalLM,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    seed: int = 0,
) -> list[str]:
    """Return a continuation of each prompt.

    All prompts go through the model together in a window of fixed length, so one graph is compiled;
    what follows a prompt's last token is hidden from it by the causal mask.

    Args:
        model: Its training flag is cleared for the run and put back.
        prompts: Beginnings; an empty one starts at the end-of-document token.
        temperature: 0 takes the most probable token.
        top_k: Candidates to draw from.
    """
    rows = [tokenizer.encode(prompt).tolist() or [tokenizer.eod] for prompt in prompts]
    limit = model.config.max_position_embeddings
    length = min(limit, max(len(row) for row in rows) + max_new_tokens)
    rows = [row[: length - 1] for row in rows]
    position = Tensor(np.tile(np.arange(length, dtype=np.int32), (len(rows), 1)))
    generator = np.random.default_rng(seed)
    training = model.training
    model.set_train(False)
    logits_cell = Logits(model)
    logits_cell.set_train(False)
    finished = [False] * len(rows)
    starts = [len(row) for row in rows]
    while not all(finished):
        ids = np.zeros((len(rows), length), np.int32)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = row
        logits_TV = logits_cell(Tensor(ids, ms.int32), position).asnumpy()
        logits_BSV = logits_TV.reshape(len(rows), length, -1)
        for i, row in enumerate(rows):
            if finished[i]:
                continue
            token = draw(logits_BSV[i, len(row) - 1], temperature, top_k, generator)
            row.append(token)
            full = len(row) >= length or len(row) - starts[i] >= max_new_tokens
            finished[i] = full or token == tokenizer.eod
    model.set_train(training)
    return [tokenizer.decode(r[n:], skip_special=True) for r, n in zip(rows, starts, strict=True)]


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


def write_sample(recipe: Recipe, model: CausalLM, say: Callable[[str], object]) -> None:
    """Write what the model makes of the recipe's prompts into ``sample.txt``, and say it; nothing without prompts."""
    section = recipe.telechat_moe.sample
    if section is None:
        return
    tokenizer, size = load_tokenizer(tokenizer_path(recipe)), section.max_new_tokens
    drawing = {"temperature": section.temperature, "top_k": section.top_k, "seed": recipe.seed}
    texts = continue_prompts(model, tokenizer, section.prompts, size, **drawing)
    lines = [p + t for p, t in zip(section.prompts, texts, strict=True)]
    text = "\n\n---\n\n".join(lines) + "\n"
    write_atomic(Path(recipe.output_dir) / "sample.txt", text)
    say(f"the model writes:\n\n{text}")
