"""The recipe of the tiny demo model: random initialisation, then supervised warm-up on scripted demonstrations. Deterministic.

What decides whether two million parameters can copy a name they have never seen:

* The tokenizer splits letters, digits, white space and punctuation apart, so that a word is the same tokens in a question and in JSON.
* Copying is taught first: drills that repeat random tokens, with the loss on the repeats.

The last part of the transcripts comes from a demonstrator that errs (`demonstrations.FAULTY`): where the shipped model starts.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from kestrl_email.data import TOOLS
from kestrl_email.demonstrations import FAULTY, GOOD, Messages, demonstrations
from kestrl_email.tools import ReadEmail, ReturnFinalAnswer, SearchEmails

log = logging.getLogger(__name__)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
PIECES = r"\p{L}+(?:_\p{L}+)*|\p{N}|[^\p{L}\p{N}\s]+(?: [^\p{L}\p{N}\s]+)*|\s"
"""A word or identifier, one digit, a run of punctuation (with the blanks inside it, as in `": "`), or one white space."""
CONTEXT = 2048
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
PARAMETERS = {
    "search_emails": ("keywords", "from_addr", "to_addr", "sent_after", "sent_before", "max_results"),
    "read_email": ("message_id",),
    "return_final_answer": ("answer", "sources"),
}
assert tuple(PARAMETERS) == TOOLS
assert {SearchEmails, ReadEmail, ReturnFinalAnswer}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the model is made; the defaults made the shipped one."""

    seed: int = 7
    steps: int = 700
    batch: int = 40
    """Sequences a step."""
    learning_rate: float = 4e-3
    drills_until: float = 0.18
    """Share of the steps with nothing but copy drills."""
    faulty_from: float = 0.82
    """From this share of the steps on, the demonstrator errs."""
    vocabulary: int = 1024
    hidden: int = 192
    layers: int = 4
    threads: int = 2
    conversations: int = 6000
    """Distinct demonstrations of each kind."""


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and whether each is learned from."""

    ids: list[int]
    learned: list[bool]


def make_tokenizer(texts: Iterator[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE in which a word is the same tokens wherever it stands."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=3,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    return tokenizer


def call_text(call: dict[str, Any]) -> str:
    """A tool call as the model writes it."""
    return "<tool_call>\n" + json.dumps(call, ensure_ascii=False) + "\n</tool_call>"


def segments(messages: Messages) -> Iterator[tuple[str, bool]]:
    """A conversation as the pieces a rollout tokenises one by one, and whether the model writes the piece."""
    tools = "".join(f"\n{name}({', '.join(parameters)})" for name, parameters in PARAMETERS.items())
    for position, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "system":
            yield "<|im_start|>system\n", False
            yield content, False
            yield f"\nTools:{tools}<|im_end|>\n", False
        elif role == "user":
            yield "<|im_start|>user\n", False
            yield content, False
            yield "<|im_end|>\n", False
        elif role == "assistant":
            yield "<|im_start|>assistant\n", False
            yield "".join(call_text(call) for call in message["tool_calls"]) + "<|im_end|>", True
            if position < len(messages) - 1:
                yield "\n", False
        else:
            yield "<|im_start|>user\n<tool_response>\n", False
            yield content, False
            yield "\n</tool_response><|im_end|>\n", False


def encode(tokenizer: Tokenizer, messages: Messages) -> Example:
    """A conversation as an example: learned where the model writes."""
    ids: list[int] = []
    learned: list[bool] = []
    for text, writes in segments(messages):
        piece = tokenizer.encode(text, add_special_tokens=False).ids
        ids += piece
        learned += [writes] * len(piece)
    return Example(ids, learned)


def drill(tokenizer: Tokenizer, rng: random.Random) -> Example:
    """A random run of ordinary tokens, said three times: learned from are the repeats."""
    ordinary = tokenizer.get_vocab_size() - len(SPECIAL) - len(MARKERS)
    run = [rng.randrange(ordinary) for _ in range(rng.randint(3, 16))]
    return Example(run * 3, [False] * len(run) + [True] * (2 * len(run)))


def make_model(recipe: Recipe, tokenizer: Tokenizer) -> Qwen3ForCausalLM:
    """The randomly initialised model."""
    torch.manual_seed(recipe.seed)
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    size = -(-tokenizer.get_vocab_size() // 64) * 64
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.hidden * 3,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.hidden // 32,
        num_key_value_heads=recipe.hidden // 64,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rope_theta=10000.0,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=pad,
        initializer_range=0.04,
    )
    return Qwen3ForCausalLM(config)


def batch_of(examples: Sequence[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels, each (B, T); labels are -100 where nothing is learned."""
    length = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), length), pad)
    labels = torch.full((len(examples), length), -100)
    for index, example in enumerate(examples):
        size = len(example.ids)
        ids[index, :size] = torch.tensor(example.ids)
        labels[index, :size] = torch.where(torch.tensor(example.learned), ids[index, :size], -100)
    return ids, labels


def rate(recipe: Recipe, step: int) -> float:
    """Linear rise over the first 3 %, cosine-free linear fall to a twentieth over the last half."""
    share = step / recipe.steps
    rise = min(1.0, (step + 1) / max(1, recipe.steps * 0.03))
    fall = 1.0 if share < 0.5 else 1.0 - 0.95 * (share - 0.5) / 0.5
    return recipe.learning_rate * rise * fall


def schedule(
    recipe: Recipe, good: list[Example], faulty: list[Example], tokenizer: Tokenizer
) -> Iterator[list[Example]]:
    """The examples of every step: drills, then good transcripts, then faulty ones."""
    rng = random.Random(recipe.seed)  # noqa: S311 - seeded on purpose
    for step in range(recipe.steps):
        share = step / recipe.steps
        if share < recipe.drills_until:
            yield [drill(tokenizer, rng) for _ in range(recipe.batch * 5)]
        elif share < recipe.faulty_from:
            yield rng.sample(good, recipe.batch)
        else:
            yield rng.sample(faulty, recipe.batch)


def warm_up(model: Qwen3ForCausalLM, recipe: Recipe, batches: Iterator[list[Example]], pad: int) -> None:
    """Supervised training on the batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    model.train()
    for step, examples in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(recipe, step)
        ids, labels = batch_of(examples, pad)
        logits = model(input_ids=ids, attention_mask=(ids != pad).long()).logits[:, :-1]
        targets = labels[:, 1:]
        wanted = targets != -100
        loss = torch.nn.functional.cross_entropy(logits[wanted], targets[wanted])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0 or step == recipe.steps - 1:
            log.info("step %d/%d loss %.4f", step, recipe.steps, loss.item())


def save(model: Qwen3ForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Writes the folder: bfloat16 weights, tokenizer, template, generation defaults."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config.update(
        eos_token_id=[tokenizer.token_to_id("<|im_end|>")], pad_token_id=tokenizer.token_to_id("<|endoftext|>")
    )
    model.to(torch.bfloat16).save_pretrained(out)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(out)


def build(out: Path, recipe: Recipe) -> None:
    """Makes the model from nothing and writes it to `out`."""
    torch.set_num_threads(recipe.threads)
    torch.use_deterministic_algorithms(mode=True)
    with TemporaryDirectory() as folder:
        good = list(demonstrations(Path(folder), recipe.conversations, GOOD, recipe.seed))
        faulty = list(demonstrations(Path(folder), recipe.conversations, FAULTY, recipe.seed + 1))
    words = ("".join(text for text, _ in segments(messages)) for messages in good[:2000])
    tokenizer = make_tokenizer(words, recipe.vocabulary)
    model = make_model(recipe, tokenizer)
    log.info(
        "%d parameters, vocabulary %d", sum(weight.numel() for weight in model.parameters()), tokenizer.get_vocab_size()
    )
    encoded = [[encode(tokenizer, messages) for messages in part] for part in (good, faulty)]
    log.info("longest conversation %d tokens", max(len(example.ids) for example in encoded[1]))
    pad = tokenizer.token_to_id("<|endoftext|>")
    warm_up(model, recipe, schedule(recipe, encoded[0], encoded[1], tokenizer), pad)
    save(model, tokenizer, out)
