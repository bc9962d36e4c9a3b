"""A model under training, and the log-probabilities it gives to sampled tokens.

A group's prompt is computed once and shared by its rows, exactly. Where the model's family allows it, the rows of some
groups are packed into one sequence, those of each group behind one copy of their prompt, unless `packing.shares_prompt`
says that a copy for each row is faster. Rows of other families are padded, and without gradient checkpointing the keys
and values of their prompt go into a cache that is repeated for every row, with gradients; a cache cannot be computed
again.
"""
# transformers has loose types; values from it are annotated here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar, TypedDict

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig

from kestrl._shared.spec.rules.adapter_rules import expert_problems
from kestrl.errors import UserInputError
from kestrl_learner.batch import kernels, packing
from kestrl_learner.batch.filling import Piece, Sizes, filled
from kestrl_learner.batch.packing import Kernel
from kestrl_learner.batch.rows import TrainGroup, TrainRow, cut, plain_group, rows_of_episodes
from kestrl_learner.model.base_weights import BaseWeights
from kestrl_learner.model.checkpointing import checkpoint_layers
from kestrl_learner.model.compiled_layers import TRIAL, Graphs, compile_layers, not_compiled
from kestrl_learner.model.head import logits_at_once, token_logprobs
from kestrl_learner.ranks.group import RankGroup
from kestrl_learner.ranks.sharding import shard_layers

TOKENS_PER_PASS = 16_384
"""Largest number of tokens of a forward pass, prompt and padding included; larger groups are split."""
CHECK_TOLERANCE = 1e-3


class ModelOptions(TypedDict, total=False):
    """Arguments of `TrainedModel` with a default, which it documents."""

    device: str
    gradient_checkpointing: bool
    checkpointed_layers: int | None
    activation_offload: bool
    compile_layers: bool
    tokens_per_pass: int
    group: RankGroup | None


class TrainedModel(ABC):
    """A causal language model under training.

    Args:
        path: Folder or Hugging Face id of the base model; only read.
        dtype: Of the base's weights: float32 or bfloat16.
        seed: Seed of what is initialised.
        device: torch device.
        gradient_checkpointing: Keeps the inputs of layers only and computes them again in the backward pass.
        checkpointed_layers: Number of the first layers to which this applies; None is all.
        activation_offload: Keeps these inputs in host memory until the backward pass.
        compile_layers: Compiles the layers, as `compiled_layers` does.
        tokens_per_pass: Largest number of tokens of a forward pass, padding included; on a CPU packed passes are
            smaller, by `packing.largest_pass`.
        group: The ranks over which the base's layers are sharded; None keeps them whole. Each loads the base in turn,
            so that the machine's memory holds one whole copy at a time. Every rank must then run forward and backward
            passes of the same kind in the same order.

    Raises:
        UserInputError: The base cannot be loaded, or its logits are not a linear function of the hidden states.
    """

    updates_together: ClassVar[bool | None] = None
    """Whether the optimiser updates all weights at once, with copies of them all; None is torch's choice."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        seed: int,
        device: str = "cpu",
        gradient_checkpointing: bool = False,
        checkpointed_layers: int | None = None,
        activation_offload: bool = False,
        compile_layers: bool = False,
        tokens_per_pass: int = TOKENS_PER_PASS,
        group: RankGroup | None = None,
    ) -> None:
        self.device = torch.device(device)
        with nullcontext() if group is None else group.turn():
            config, base = self._load(path, dtype, seed, group)
        self._shortest = 1 if group is None else 2
        """Least length of rows after a shared prompt. Rows of one token take no second pass, which ranks may not skip
        by themselves."""
        self._head: nn.Module = base.get_output_embeddings()
        self.vocabulary = int(config.get_text_config().vocab_size)
        self.network.eval()  # engines do not apply dropout
        self.tokens_per_pass = tokens_per_pass
        self._offloads = activation_offload
        if gradient_checkpointing:
            checkpoint_layers(self.network, checkpointed_layers)
        self._check_head()
        self._packs = packing.enable(base) and self._packs_exactly(base)
        self._kernel = self._sharing_kernel() if self._packs else None
        self._shares_prompts = not gradient_checkpointing and self._kernel is None
        """Whether a prompt is computed in a call of its own, and its cache repeated."""
        self.base_weights = BaseWeights(self.network, self.device)
        self.graphs = self._compiled(group) if compile_layers else None

    def _compiled(self, group: RankGroup | None) -> Graphs | None:
        if group is not None:
            return not_compiled("they are sharded over ranks")
        if not self._packs:
            return not_compiled("rows of this family are padded")
        return compile_layers(self.network, self._trial, next(self._body.parameters()).dtype)

    def _trial(self) -> Iterator[Tensor]:
        """Log-probabilities of a few rows by each kind of pass; the first has a gradient."""
        pieces = [Piece(0, TRIAL, TRIAL.rows)]
        yield self.pass_logprobs(pieces, 1.0, None)
        with torch.no_grad():
            without_gradient = self.pass_logprobs(pieces, 1.0, None)
        yield without_gradient

    def _refuse_config(self, config: Any, path: str) -> None:
        """Raises UserInputError if the configuration is that of a model which is not trained."""
        for problem in expert_problems(config.to_dict(), path):
            raise UserInputError(str(problem))

    def _load_base(self, path: str, config: Any, dtype: torch.dtype) -> Any:
        """The base model of transformers with its weights."""
        return AutoModelForCausalLM.from_pretrained(path, dtype=dtype, config=config)

    @abstractmethod
    def _trainable(self, base: Any) -> Any:
        """The network that is computed: the base with gradients for what is trained.

        Raises:
            UserInputError: It cannot be trained.
        """

    @abstractmethod
    def trained_state(self) -> dict[str, Tensor]:
        """The weights under training by name, float32 on the CPU, contiguous."""

    @abstractmethod
    def load_trained_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of `trained_state`."""

    def _load(self, path: str, dtype: str, seed: int, group: RankGroup | None) -> tuple[PretrainedConfig, Any]:
        """Loads the base and prepares it for training; returns its configuration and itself."""
        try:
            config = AutoConfig.from_pretrained(path)
            self._refuse_config(config, path)
            base = self._load_base(path, config, getattr(torch, dtype))
        except (OSError, ValueError) as error:
            raise UserInputError(f"spec.model.base: {path} cannot be loaded: {error}") from error
        torch.manual_seed(seed)
        self.network: Any = self._trainable(base)
        self._body: nn.Module = getattr(base, base.base_model_prefix)
        if group is not None:
            shard_layers(base, self._body, group.mesh)
        self.network.to(self.device)
        return config, base

    def _packs_exactly(self, base: Any) -> bool:
        """Whether packed rows have the states of separate rows; otherwise the model gets its attention back."""
        if kernels.exact(self._body, self.device):
            return True
        packing.disable(base)
        return False

    def _sharing_kernel(self) -> Kernel | None:
        """The kernel of packed rows that share a prompt; None if each is packed behind its own."""
        return kernels.sharing_kernel(self._body, self.device)

    def _check_head(self) -> None:
        """Checks that the head alone maps hidden states to logits (some families scale or cap them)."""
        ids = torch.arange(1, 9, device=self.device)[None]
        with torch.no_grad():
            logits = self.network(input_ids=ids).logits
            ours = self._head(self._body(input_ids=ids).last_hidden_state)
        if (logits - ours).abs().max() > CHECK_TOLERANCE:
            raise UserInputError(
                "spec.model.base: this family transforms its logits after the head, which is not supported"
            )

    def parameters(self) -> list[nn.Parameter]:
        """The parameters under training in a fixed order."""
        return [weight for weight in self.network.parameters() if weight.requires_grad]

    @contextmanager
    def with_trained_state(self, state: dict[str, Tensor]) -> Generator[None]:
        """Replaces the weights under training within the context."""
        saved = {name: weight.clone() for name, weight in self.trained_state().items()}
        self.load_trained_state(state)
        try:
            yield
        finally:
            self.load_trained_state(saved)

    def logprobs(
        self, group: TrainGroup, temperature: float, entropies: list[Tensor] | None = None
    ) -> Iterator[tuple[Sequence[TrainRow], Tensor]]:
        """Log-probabilities of the sampled tokens, some rows at a time; the rows of an episode come together.

        Args:
            group: Rows with their shared prompt.
            temperature: Divisor of the logits, as in the engine.
            entropies: If given, the entropies of the tokens' distributions are appended, one tensor for each part.

        Yields:
            Rows, and a tensor (sampled tokens of these rows,) in row order, with gradient unless it is disabled.
        """
        for pieces in self.passes([(0, group)]):
            yield pieces[0].rows, self.pass_logprobs(pieces, temperature, entropies)

    def passes(self, groups: Sequence[tuple[int, TrainGroup]], *, least_passes: int = 1) -> list[list[Piece]]:
        """The forward passes over groups: what each computes, with one piece for a group.

        Args:
            groups: Each with its number in the batch.
            least_passes: Number of passes below which groups are not put together, since each rank takes one.
        """
        unpacked = [
            [Piece(index, group, rows)]
            for index, group in groups
            if not self._packed(group.prompt)
            for rows in self._padded_parts(group)
        ]
        packed = [(index, group) for index, group in groups if self._packed(group.prompt)]
        return sorted(unpacked + self._packed_passes(packed, least_passes), key=lambda pieces: pieces[0].index)

    def tokens_of(self, pieces: Sequence[Piece]) -> int:
        """Tokens that a pass computes, padding included."""
        return sum(self._tokens(piece.group.prompt, piece.rows) for piece in pieces)

    def _tokens(self, prompt: array[int], rows: Sequence[TrainRow]) -> int:
        once = self.shares_prompt(prompt) or self._packed_behind_one(prompt, rows)
        repeated, shared = (0, len(prompt)) if once else (len(prompt), 0)
        lengths = [repeated + len(row.token_ids) for row in rows]
        return shared + (sum(lengths) if self._packed(prompt) else len(rows) * max(lengths))

    def _packed(self, prompt: array[int]) -> bool:
        """Whether the rows behind a prompt are packed."""
        return self._packs and not (self._shares_prompts and prompt)

    def _packed_behind_one(self, prompt: array[int], rows: Sequence[TrainRow]) -> bool:
        """Whether rows are packed behind one copy of their prompt. Where some rows are, any of them are."""
        lengths = [len(row.token_ids) for row in rows]
        return self._kernel is not None and packing.shares_prompt(len(prompt), lengths, self._device_type)

    def _packed_passes(self, groups: Sequence[tuple[int, TrainGroup]], least_passes: int) -> list[list[Piece]]:
        episodes = [rows_of_episodes(group) for _, group in groups]
        sizes = [self._sizes(group, parts) for (_, group), parts in zip(groups, episodes, strict=True)]
        joined = packing.largest_joined(self.tokens_per_pass, self._device_type)
        return [
            [
                Piece(*groups[number], [row for place in places for row in episodes[number][place]])
                for number, places in selection
            ]
            for selection in filled(sizes, joined=joined, least_passes=least_passes)
        ]

    def _sizes(self, group: TrainGroup, episodes: Sequence[Sequence[TrainRow]]) -> Sizes:
        before = len(group.prompt)
        repeated, shared = (0, before) if self._packed_behind_one(group.prompt, group.rows) else (before, 0)
        return Sizes(
            prompt=shared,
            episodes=[sum(repeated + len(row.token_ids) for row in rows) for rows in episodes],
            limit=packing.largest_pass(self.tokens_per_pass, self._device_type, shared),
        )

    @property
    def _device_type(self) -> str:
        return self.device.type

    def _padded_parts(self, group: TrainGroup) -> list[list[TrainRow]]:
        episodes = rows_of_episodes(group)
        own_prompt = 0 if self._shares_prompts else len(group.prompt)
        row_lengths = {id(rows): own_prompt + max(len(row.token_ids) for row in rows) for rows in episodes}
        episodes.sort(key=lambda rows: row_lengths[id(rows)])
        slices = cut(
            [row_lengths[id(rows)] for rows in episodes],
            prompt=len(group.prompt) if self._shares_prompts else 0,
            limit=self.tokens_per_pass,
            rows=[len(rows) for rows in episodes],
        )
        return [[row for episode in episodes[part] for row in episode] for part in slices]

    def shares_prompt(self, prompt: array[int]) -> bool:
        """Whether a pass computes a prompt once for its rows, in a call of its own."""
        return self._shares_prompts and bool(prompt)

    def empty_pass(self, *, shared: bool) -> None:
        """A pass over a few tokens that changes nothing: forward, and backward with a gradient of 0 unless gradients
        are disabled.

        Args:
            shared: Whether it has a shared prompt.
        """
        group = plain_group([[1, 1]], [1] if shared else [])
        logprobs = self.pass_logprobs([Piece(0, group, group.rows)], 1.0, None)
        if logprobs.requires_grad:
            (logprobs.sum() * 0.0).backward()

    def pass_logprobs(self, pieces: Sequence[Piece], temperature: float, entropies: list[Tensor] | None) -> Tensor:
        """Log-probabilities of the sampled tokens of one of `passes`, piece by piece in row order."""
        group, rows = pieces[0].group, pieces[0].rows
        if self._packed(group.prompt):
            sequence = packing.packed(
                [
                    (piece.group.prompt, piece.rows, self._packed_behind_one(piece.group.prompt, piece.rows))
                    for piece in pieces
                ]
            )
            with self._saving():
                hidden = self._packed_hidden(sequence)[self._places(sequence.states)]
            return self._token_logprobs(hidden, self._places(sequence.targets), temperature, entropies)
        shared = group.prompt if self._shares_prompts else array("i")
        ids, padding, sampled_places = self._padded(rows, group.prompt[len(shared) :])
        with self._saving():
            hidden = self._with_shared_prompt(shared, ids, padding) if shared else self._plain(ids, padding)
        return self._token_logprobs(
            hidden.flatten(0, 1)[sampled_places], ids.flatten()[sampled_places], temperature, entropies
        )

    def _packed_hidden(self, sequence: packing.Packed) -> Tensor:
        """Hidden states of rows in one sequence, (tokens, hidden)."""
        kernel = self._kernel or Kernel.ROWS
        return packing.packed_hidden(self._body, sequence.rows, self.device, kernel=kernel)

    def _token_logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: float, entropies: list[Tensor] | None
    ) -> Tensor:
        """Log-probabilities of tokens (N,) from the hidden states before them, (N, hidden)."""
        at_once = logits_at_once(self._device_type)
        return token_logprobs(self._head, hidden, targets, temperature, entropies, at_once=at_once)

    def _saving(self) -> AbstractContextManager[object]:
        """Decides where tensors are kept that a forward pass saves for its backward pass."""
        return save_on_cpu(pin_memory=self.device.type == "cuda") if self._offloads else nullcontext()

    def _places(self, places: Sequence[int]) -> Tensor:
        return torch.tensor(places, dtype=torch.long, device=self.device)

    def _padded(self, rows: Sequence[TrainRow], prompt: array[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Token ids, and mask of tokens that are not padding, each (rows, longest); places of the sampled tokens in the
        flattened ids, (sampled tokens,). Every row begins with the prompt.
        """
        before = len(prompt)
        width = max(self._shortest, before + max(len(row.token_ids) for row in rows))
        ids = torch.zeros((len(rows), width), dtype=torch.long)
        padding = torch.zeros((len(rows), width), dtype=torch.long)
        sampled_places: list[int] = []
        for index, row in enumerate(rows):
            end = before + len(row.token_ids)
            ids[index, :end] = torch.tensor([*prompt, *row.token_ids])
            padding[index, :end] = 1
            start = index * width + before
            sampled_places += [start + place for place, sampled in enumerate(row.mask) if sampled]
        places = torch.tensor(sampled_places, dtype=torch.long)
        return ids.to(self.device), padding.to(self.device), places.to(self.device)

    def _with_shared_prompt(self, prompt: array[int], ids: Tensor, padding: Tensor) -> Tensor:
        """Hidden states that predict each position of `ids`, shape (rows, longest, hidden)."""
        count, length = ids.shape[0], len(prompt)
        shared = torch.tensor([list(prompt)], device=self.device)
        cache = DynamicCache()
        first: Any = self._body(input_ids=shared, past_key_values=cache, use_cache=True)
        cache.batch_repeat_interleave(count)
        places = torch.arange(length, length + ids.shape[1] - 1, device=self.device)
        before = torch.ones((count, length), dtype=torch.long, device=self.device)
        last = first.last_hidden_state[:, -1:].expand(count, 1, -1)
        if ids.shape[1] == 1:
            return last
        suffix: Any = self._body(
            input_ids=ids[:, :-1],
            attention_mask=torch.cat([before, padding[:, :-1]], dim=1),
            position_ids=places[None].expand(count, -1),
            past_key_values=cache,
            use_cache=True,
        )
        return torch.cat([last, suffix.last_hidden_state], dim=1)

    def _plain(self, ids: Tensor, padding: Tensor) -> Tensor:
        """As `_with_shared_prompt`, for rows without a shared prompt; the first position is never a sampled token."""
        body: Any = self._body(input_ids=ids, attention_mask=padding, use_cache=False)
        states: Tensor = body.last_hidden_state
        return torch.cat([states[:, :1], states[:, :-1]], dim=1)
