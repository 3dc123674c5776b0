"""Dropout of modules that does not depend on the layout: every mask is a function of which tokens are seen.

`replace_dropout` swaps the class of each `nn.Dropout` below a trainable module, in place, before anything is sharded.
The modules share one `DropoutState`, which knows two things:

- which step it is: `dropout_step` surrounds all forwards and backwards of one optimizer step;
- which tokens the tensors hold: each forward publishes the sample and the position of every token, so that a token
  keeps its mask in another batch, in a pack, and on another rank.

Whatever draws from torch's generator instead (attention probabilities, `F.dropout` in a model's code) is seeded per
global micro-batch. That is the same on every data-parallel layout and on no other, hence `refuse_generator_dropout`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from shoal.config.seeds import derive_key
from shoal.kernels.dropout import counter_dropout, token_keys

Kind = Literal["text", "encoder", "adapter"]
"""Which tokens a module sees: those of the language model's rows, the frames of the speech encoder, or the frames
that the modality adapter gets."""

_ATTENTION = ("attn_dropout", "attention_dropout", "attn_drop")
"""What transformers calls a dropout module of attention probabilities; fused attention only reads its `p`."""


@dataclass(frozen=True)
class _Tokens:
    """Samples [R] of rows of any width, or keys [R, L] of rows whose width is known."""

    samples: Tensor
    keys: Tensor | None


class DropoutState:
    """What the dropout modules of one trainable module know about the step and its tokens.

    Attributes:
        modules: The dropout modules by their names in the trainable module.
        data_parallel_only: Whether ranks differ in nothing but the micro-batches they run.
    """

    def __init__(self, *, data_parallel_only: bool = True) -> None:
        self.modules: dict[str, CounterDropout] = {}
        self.data_parallel_only = data_parallel_only
        self._tokens: dict[str, _Tokens] = {}

    def publish_text(self, samples: Tensor, positions: Tensor) -> None:
        """Says which tokens the language model is about to see.

        Args:
            samples: Seed of the sample of each token, int64 [R, L], or of each row, [R, 1].
            positions: Position of each token in its sample, [R, L] int64. Those of padding do not matter.
        """
        self._tokens["text"] = _Tokens(samples, token_keys(samples, positions))

    def publish_frames(self, kind: Literal["encoder", "adapter"], seeds: Tensor) -> None:
        """Says which clips the speech encoder or what follows it is about to see.

        Args:
            kind: Whose rows they are.
            seeds: Seed of each clip, or of each piece of one, int64 [R]. Positions are frames in a row.
        """
        self._tokens[kind] = _Tokens(seeds, None)

    def replaying(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Context managers around a checkpointed layer's forward and its recomputation.

        The recomputation sees the tokens of its forward, whatever has been published since.
        """
        return nullcontext(), self._seeing(dict(self._tokens))

    @contextmanager
    def _seeing(self, tokens: dict[str, _Tokens]) -> Iterator[None]:
        current, self._tokens = self._tokens, tokens
        try:
            yield
        finally:
            self._tokens = current

    @contextmanager
    def step(self, seed: int, step: int) -> Iterator[None]:
        """Sets the step for all forwards and backwards inside."""
        for name, module in self.modules.items():
            module.key = torch.tensor(derive_key("dropout", seed, step, name))
        try:
            yield
        finally:
            for module in self.modules.values():
                module.key = None

    def keys(self, module: CounterDropout, shape: torch.Size) -> Tensor:
        """Returns the key of each token of a tensor [..., F] of that shape, int64 of the shape without F.

        Raises:
            ValueError: The tensor does not hold all the tokens of its rows, so nothing says which they are.
        """
        tokens = self._tokens.get(module.kind)
        if tokens is None:
            raise RuntimeError(
                f"{module.name}: dropout ran before anything said which tokens it sees; the forward of the trainable "
                "module publishes them, see shoal.models.dropout"
            )
        keys = tokens.keys
        if keys is None:
            rows = tokens.samples[:, None]
            keys = token_keys(rows, torch.arange(shape[1] if len(shape) > 1 else 1, device=rows.device))
        else:
            keys = _part(keys, *module.token_part)
        if shape[:-1] == keys.shape:
            return keys
        # Some layers flatten rows and tokens. Experts do too, but after they have picked tokens.
        if len(shape) == 2 and tokens.keys is not None and shape[0] == keys.numel() and not module.in_expert:
            return keys.flatten()
        raise ValueError(
            f"{module.name}: dropout p = {module.p} of a tensor {list(shape)}: one of [rows, tokens, features] with "
            f"rows and tokens {list(keys.shape)}, so that each token keeps its mask on every layout; repair: set this "
            "dropout to 0, or leave the layer out of the adapter's target_modules"
        )


def _part(keys: Tensor, rank: int, size: int) -> Tensor:
    """A rank's share of tokens [R, L] when `size` ranks hold ceil(L / size) each, the last ones padded."""
    if size == 1:
        return keys
    length = -(-keys.shape[1] // size)
    return F.pad(keys, (0, length * size - keys.shape[1]))[:, rank * length : (rank + 1) * length]


class CounterDropout(nn.Dropout):
    """Drops elements by a hash of (run seed, step, module name, sample, token position, feature).

    In eval mode and with p = 0 it is the identity. A 4-dimensional tensor holds attention probabilities, which are
    drawn from torch's generator.

    Attributes:
        state: Shared by all dropout modules of a trainable module.
        name: Full name in the trainable module.
        kind: Which tokens it sees.
        in_expert: Whether it stands in an expert, whose input is a selection of tokens.
        key: Hash of the step and the name, int64 scalar; None outside of a step.
        feature_start: Index of this rank's first feature among those of the unsharded tensor.
        token_part: (rank, number of ranks) when ranks hold parts of the rows, as sequence parallelism cuts them.
    """

    state: DropoutState
    name: str
    kind: Kind
    in_expert: bool
    key: Tensor | None
    feature_start: int
    token_part: tuple[int, int]

    def forward(self, input: Tensor) -> Tensor:
        """Returns a tensor like `input`.

        Raises:
            RuntimeError: No step is set, or nobody has said which tokens are seen.
            ValueError: The tensor's shape says nothing about its tokens, or it holds attention probabilities and
                the layout is more than data-parallel.
        """
        if not self.training or self.p == 0.0:
            return input
        if self.key is None:
            raise RuntimeError(
                f"{self.name}: dropout p = {self.p} in training needs to know the step; run forward and backward "
                "inside shoal.models.dropout.dropout_step, or call model.eval()"
            )
        if input.dim() == 4:
            if not self.state.data_parallel_only:
                raise ValueError(_refusal(self.name, self.p))
            return F.dropout(input, self.p, training=True)
        tokens = self.state.keys(self, input.shape)
        return counter_dropout(input, self.p, self.key, tokens, self.feature_start)


def replace_dropout(
    module: nn.Module, *, perception: str | None = None, data_parallel_only: bool = True
) -> DropoutState | None:
    """Makes every `nn.Dropout` below `module` independent of the layout, in place; names and `p` stay.

    Must run before activation checkpointing, compilation and sharding. Returns None without any; otherwise the
    state, which becomes the attribute `dropout_state` of `module` and of each submodule that declares one.

    Args:
        module: The trainable module.
        perception: Name of the submodule whose rows are clips.
        data_parallel_only: Whether ranks differ in nothing but the micro-batches they run.
    """
    state = DropoutState(data_parallel_only=data_parallel_only)
    for name, submodule in module.named_modules():
        if type(submodule) is nn.Dropout:
            state.modules[name] = _replace(submodule, name, state, perception)
    if not state.modules:
        return None
    for submodule in module.modules():
        if hasattr(submodule, "dropout_state") or submodule is module:
            submodule.dropout_state = state  # type: ignore[assignment]
    return state


def _replace(module: nn.Dropout, name: str, state: DropoutState, perception: str | None) -> CounterDropout:
    module.__class__ = CounterDropout
    assert isinstance(module, CounterDropout)  # narrows the type: the class has been swapped in place
    module.state, module.name, module.key = state, name, None
    module.kind = _kind(name, perception)
    module.in_expert = ".experts." in f".{name}."
    module.feature_start, module.token_part = 0, (0, 1)
    return module


def _kind(name: str, perception: str | None) -> Kind:
    if perception is None or not name.startswith(f"{perception}."):
        return "text"
    return "encoder" if name.startswith(f"{perception}.encoder.") else "adapter"


def tokens_of(micro_batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Returns sample seed and position of every token of a micro-batch of text, int64 [B, S] each.

    Rows count from their first column, the documents of a pack from their own first token. Padding behind the last
    document of a pack counts as part of it.
    """
    seeds, ids = micro_batch["sample_seeds"], micro_batch["input_ids"]
    places = torch.arange(ids.shape[1], device=ids.device)
    if "cu_seqlens" not in micro_batch:
        return seeds[:, None].expand_as(ids), places.expand_as(ids)
    ends = micro_batch["cu_seqlens"][1:].to(places.dtype)
    document = torch.searchsorted(ends, places, right=True).clamp(max=len(ends) - 1)
    return seeds[document][None], micro_batch["position_ids"]


def dropout_step(module: nn.Module, seed: int, step: int) -> AbstractContextManager[None]:
    """Surrounds all forwards and backwards of one optimizer step of a trainable module.

    Args:
        module: What `replace_dropout` was called with, or any other module, for which it does nothing.
        seed: Seed of the run.
        step: Number of optimizer steps taken so far.
    """
    state = getattr(module, "dropout_state", None)
    return state.step(seed, step) if isinstance(state, DropoutState) else nullcontext()


def refuse_generator_dropout(module: nn.Module, axes: str) -> None:
    """Refuses dropout that draws from torch's generator, for layouts on which ranks would draw different masks.

    These are attention probabilities and `F.dropout` in a model's code, which read a number of their module whose
    name has "drop" in it; and dropout modules other than `nn.Dropout`. Frozen parts that stay in eval mode pass.

    Args:
        module: The trainable module; `requires_grad` is final. Its mode is as before afterwards.
        axes: What the layout has, such as "tp_size = 2", for the message.

    Raises:
        ValueError: Naming every such module, its value and the repair.
    """
    was_training = module.training
    module.train()  # which parts stay in eval mode is for the modules to say
    found = [
        _refusal(f"{name}.{key}" if name else key, p)
        for name, submodule in module.named_modules()
        if submodule.training
        for key, p in _generator_dropouts(name, submodule)
    ]
    module.train(was_training)
    if found:
        raise ValueError(f"with {axes}:\n" + "\n".join(found))


def _generator_dropouts(name: str, module: nn.Module) -> Iterator[tuple[str, float]]:
    if isinstance(module, _DropoutNd):
        counted = isinstance(module, CounterDropout) and name.rpartition(".")[2] not in _ATTENTION
        if module.p > 0.0 and not counted:
            yield "p", module.p
        return
    for key, value in vars(module).items():
        if "drop" in key and isinstance(value, float) and value > 0.0:
            yield key, value


def _refusal(name: str, p: float) -> str:
    return (
        f"{name}: dropout {p} is drawn from torch's generator, so its mask would depend on the layout; 0 with tp_size, "
        "cp_size or pp_size > 1; repair: set it to 0 in the model's configuration"
    )
