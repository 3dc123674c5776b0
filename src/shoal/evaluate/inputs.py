"""Reads what an evaluation runs on: a manifest of cuts, clips or conversations, or a YAML list of sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import yaml

from shoal.config.build import Report, convert
from shoal.config.errors import ConfigError
from shoal.config.speech import DatasetConfig, InputConfig
from shoal.config.values import FrozenDict
from shoal.data.audio import AudioOptions
from shoal.data.batch import MicroBatch
from shoal.data.conversation import Conversation, PromptEncoder
from shoal.data.dataset import StepDataset
from shoal.data.manifests import read_lines
from shoal.data.position import START, StepPlan
from shoal.data.sources import open_sources

Kind = Literal["lhotse_as_conversation", "nemo", "multimodal_conversation"]


def read_inputs(
    inputs: str,
    *,
    system_prompt: str | None = None,
    user_prompt: str | None = None,
    allow_commands: bool = False,
) -> list[Conversation]:
    """Returns all conversations in the order of the manifest; metadata only.

    Args:
        inputs: A lhotse cuts, NeMo or conversation manifest (JSON lines), or a YAML list like `data.*.input_cfg`.
        system_prompt: Put before each conversation that has none.
        user_prompt: The user's text before the audio of a cut; a tag or field `context` of the source wins.
        allow_commands: Whether cuts may name programs or addresses as their audio.

    Raises:
        ValueError: The file is missing, empty, or of no kind that is read here.
    """
    if not Path(inputs).is_file():
        raise ValueError(
            f"inputs = {inputs!r}: no such file; give a manifest (.jsonl) or a list of sources (.yaml)"
        )
    tags = {"system_prompt": system_prompt, "context": user_prompt}
    group = InputConfig(
        type="group",
        tags=FrozenDict({name: text for name, text in tags.items() if text}),
        input_cfg=_entries(inputs),
    )
    sources = open_sources(DatasetConfig(input_cfg=(group,)), key="inputs", allow_commands=allow_commands)
    found = [item for source in sources for shard in source.shards for item in shard.read()]
    if not found:
        raise ValueError(f"inputs = {inputs!r}: holds not one example")
    return found


def _entries(inputs: str) -> tuple[InputConfig, ...]:
    if Path(inputs).suffix in (".yaml", ".yml"):
        report = Report()
        raw = yaml.safe_load(Path(inputs).read_text())
        entries = convert(tuple[InputConfig, ...], raw, "inputs", report)
        if report.findings:
            raise ConfigError(report.findings)
        return cast(tuple[InputConfig, ...], entries)
    kind = _kind_of(inputs)
    if kind == "lhotse_as_conversation":
        return (InputConfig(type=kind, cuts_path=inputs),)
    return (InputConfig(type=kind, manifest_filepath=inputs),)


def _kind_of(manifest: str) -> Kind:
    first: dict[str, Any] = next((line for _, line in read_lines(manifest)), {})
    if "conversations" in first:
        return "multimodal_conversation"
    if "audio_filepath" in first:
        return "nemo"
    if {"recording", "tracks"} & first.keys():
        return "lhotse_as_conversation"
    raise ValueError(
        f"inputs = {manifest!r}: the first line has the keys {sorted(first)}; a manifest line has conversations, "
        "audio_filepath, or is a lhotse cut with its recording"
    )


class ConversationLoader:
    """Loads batches of conversations as micro-batches; unusable audio is an error, nothing is left out.

    Args:
        prompts: Encodes conversations.
        sample_rate: Samples per second of the model's audio.
        prompt_only: Leaves the final answer out, for generation.
    """

    def __init__(self, prompts: PromptEncoder, sample_rate: int, *, prompt_only: bool) -> None:
        options = AudioOptions(sample_rate)
        self._dataset = StepDataset(prompts, options, seed=0, on_bad_audio="error", prompt_only=prompt_only)

    def load(self, conversations: Sequence[Conversation]) -> MicroBatch:
        """Returns one micro-batch with a row per conversation, in their order.

        Raises:
            ValueError: Naming the sample that cannot be read or encoded.
        """
        step = self._dataset[StepPlan((tuple(conversations),), 0, START)]
        if step.error is not None:
            raise ValueError(step.error)
        return step.micro_batches[0]
