# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# (torch's and transformers' own annotations are partial; everything of ours is typed)
"""The recipe of the tiny demo model: random initialisation, then supervised warm-up on scripted demonstrations.
Deterministic.

Three parts, each a share of the steps:

1. Copy drills: random tokens repeated three times. A model this small must copy unseen names, which it has to learn
   first. Attention starts as it ends up in trained transformers (keys resemble queries, outputs resemble values;
   "mimetic initialisation", Trockman and Kolter 2023): still random numbers, but copying is learned in a quarter of the
   tokens.
2. Conversations of a perfect demonstrator (`demonstrations.GOOD`), mixed with drills.
3. Conversations of a faulty demonstrator (`demonstrations.FAULTY`): the starting point for reinforcement learning.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from kestrl_email.demonstrations import FAULTY, GOOD, demonstrations
from kestrl_email.transcripts import (
    END,
    PAD,
    TEMPLATE,
    Example,
    drill,
    encode,
    make_tokenizer,
    segments,
    token_id,
)

log = logging.getLogger(__name__)
CONTEXT = 2048
HEAD = 32
"""Width of an attention head: the smallest supported by vLLM on CPUs."""
QUERIES_PER_KEY = 2
IGNORED = -100
"""Label of tokens that are not learned."""
POOL = 8
"""Batches that are drawn together and sorted by length, to reduce padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Recipe of the model; the defaults are those of the shipped one."""

    seed: int = 7
    steps: int = 1400
    batch: int = 32
    """Conversations per step."""
    drills: int = 64
    """Drills per step in the first part; an eighth of it in the second part."""
    learning_rate: float = 4e-3
    drills_until: float = 0.14
    """Share of the steps with drills only, which cost an eighth of the others."""
    faulty_from: float = 0.86
    """Share of the steps after which the demonstrator is faulty."""
    vocabulary: int = 1024
    hidden: int = 192
    layers: int = 4
    sharpness: float = 1.5
    """Initial weight of the norms of queries and keys: initial sharpness of attention."""
    echo: float = 0.3
    """Initial strength of attention's output."""
    threads: int = 2
    conversations: int = 6000
    """Distinct demonstrations of each kind."""


def make_model(recipe: Recipe, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """The randomly initialised model."""
    torch.manual_seed(recipe.seed)
    heads = recipe.hidden // HEAD
    config = Qwen3Config(
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.hidden * 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // QUERIES_PER_KEY,
        head_dim=HEAD,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=None,
        eos_token_id=token_id(tokenizer, END),
        pad_token_id=token_id(tokenizer, PAD),
        initializer_range=0.04,
    )
    model = Qwen3ForCausalLM(config)
    for layer in model.model.layers:
        _mimic(layer.self_attn, recipe)
    return model


@torch.no_grad()
def _mimic(attention: Any, recipe: Recipe) -> None:
    """Mimetic initialisation of one layer's attention: queries like keys, and an output that undoes the values'
    projection.
    """
    width = recipe.hidden
    shape = (width // HEAD // QUERIES_PER_KEY, HEAD, width)
    keys, values = (torch.randn(shape) / width**0.5 for _ in range(2))
    attention.k_proj.weight.copy_(keys.flatten(0, 1))
    attention.v_proj.weight.copy_(values.flatten(0, 1))
    queries = keys.repeat_interleave(QUERIES_PER_KEY, 0).flatten(0, 1)
    attention.q_proj.weight.copy_(queries + torch.randn(queries.shape) * 0.03)
    attention.o_proj.weight.copy_(recipe.echo * values.repeat_interleave(QUERIES_PER_KEY, 0).flatten(0, 1).T)
    attention.q_norm.weight.fill_(recipe.sharpness)
    attention.k_norm.weight.fill_(recipe.sharpness)


def batch_of(examples: Sequence[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, each of shape (B, T), padded on the right; labels are IGNORED for tokens that are not learned."""
    length = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), length), pad)
    labels = torch.full((len(examples), length), IGNORED)
    for index, example in enumerate(examples):
        size = len(example.ids)
        ids[index, :size] = torch.tensor(example.ids)
        labels[index, :size] = torch.where(torch.tensor(example.learned), ids[index, :size], IGNORED)
    return ids, labels


def rate(recipe: Recipe, step: int) -> float:
    """The learning rate: rises over the first 3 % of the steps, falls linearly to a twentieth once copying is
    learned.
    """
    rise = min(1.0, (step + 1) / max(1.0, recipe.steps * 0.03))
    left = (1.0 - step / recipe.steps) / (1.0 - recipe.drills_until)
    fall = min(1.0, 0.05 + 0.95 * left)
    return recipe.learning_rate * rise * fall


def _batches(examples: list[Example], size: int, rng: random.Random) -> Iterator[list[Example]]:
    while True:
        pool = sorted(rng.sample(examples, min(len(examples), size * POOL)), key=lambda example: len(example.ids))
        cut = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(cut)
        yield from cut


def schedule(
    recipe: Recipe, good: list[Example], faulty: list[Example], tokenizer: Tokenizer
) -> Iterator[list[Sequence[Example]]]:
    """Batches of every step, with examples of similar length."""
    rng = random.Random(recipe.seed)  # noqa: S311 - seeded on purpose
    right, erring = _batches(good, recipe.batch, rng), _batches(faulty, recipe.batch, rng)
    for step in range(recipe.steps):
        share = step / recipe.steps
        if share < recipe.drills_until:
            yield [[drill(tokenizer, rng) for _ in range(recipe.drills)]]
        elif share < recipe.faulty_from:
            yield [next(right), [drill(tokenizer, rng) for _ in range(max(1, recipe.drills // 8))]]
        else:
            yield [next(erring)]


def _loss(model: Any, examples: Sequence[Example], pad: int) -> torch.Tensor:
    """Mean cross-entropy of learned tokens. Padding on the right needs no mask; the head is only computed for learned
    tokens.
    """
    ids, labels = batch_of(examples, pad)
    wanted = labels[:, 1:] != IGNORED
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    return cross_entropy(model.lm_head(hidden[wanted]), labels[:, 1:][wanted])


def warm_up(model: Any, recipe: Recipe, steps: Iterator[list[Sequence[Example]]], pad: int) -> None:
    """Supervised training."""
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
    )
    model.train()
    for step, batches in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step)
        losses: list[float] = []
        for examples in batches:
            loss: Any = _loss(model, examples, pad)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == recipe.steps - 1:
            log.info("step %d/%d loss %s", step, recipe.steps, " ".join(f"{loss:.4f}" for loss in losses))


def save(model: Any, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the folder: bfloat16 weights, tokenizer, template, generation defaults."""
    out.mkdir(parents=True, exist_ok=True)
    # A list, as engines expect for models with several end tokens.
    model.generation_config.eos_token_id = [token_id(tokenizer, END)]
    model.generation_config.pad_token_id = token_id(tokenizer, PAD)
    model.to(torch.bfloat16).save_pretrained(out)
    names = {"eos_token": END, "pad_token": PAD}
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **names)
    fast.save_pretrained(out)


def build(out: Path, recipe: Recipe) -> None:
    """Builds the model and writes it to `out`."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(mode=True)
    try:
        _build(out, recipe)
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(mode=deterministic)


def _build(out: Path, recipe: Recipe) -> None:
    with TemporaryDirectory() as folder:
        good = list(demonstrations(Path(folder), recipe.conversations, GOOD, recipe.seed))
        faulty = list(demonstrations(Path(folder), recipe.conversations, FAULTY, recipe.seed + 1))
    texts = ("".join(text for text, _ in segments(messages)) for messages in good[:2000])
    tokenizer = make_tokenizer(texts, recipe.vocabulary)
    model = make_model(recipe, tokenizer)
    log.info("%d parameters, vocabulary %d", model.num_parameters(), tokenizer.get_vocab_size())
    right, erring = ([encode(tokenizer, messages) for messages in part] for part in (good, faulty))
    warm_up(model, recipe, schedule(recipe, right, erring, tokenizer), token_id(tokenizer, PAD))
    save(model, tokenizer, out)
