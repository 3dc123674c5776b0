"""What ``shoal evaluate`` and ``shoal generate`` take, as key=value on the command line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shoal.config.schema import DtypeName
from shoal.config.text import TextDatasetType
from shoal.config.values import PositiveFloat, PositiveInt


@dataclass(frozen=True)
class GenerateConfig:
    """Answers of a trained model for a manifest of conversations or cuts, or for texts.

    pretrained_name is a run, one of its checkpoints, or a language model of Hugging Face. `inputs` is a manifest; a
    line of `output_manifest` is the conversation with the answer appended. A language model takes text data of any
    input_type (None guesses it from the columns), or a single `prompt`; seq_length is its longest
    document, None that of the model.
    batch_size counts conversations; max_new_tokens bounds each answer. Ranks that finish early wait for the others for
    timeout_minutes.
    """

    pretrained_name: str
    inputs: str | None = None
    prompt: str | None = None
    input_type: TextDatasetType | None = None
    seq_length: PositiveInt | None = None
    batch_size: PositiveInt = 64
    max_new_tokens: PositiveInt = 128
    output_manifest: str = "generations.jsonl"
    verbose: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: DtypeName = "bfloat16"
    timeout_minutes: PositiveFloat = 10.0
    extra_eos_tokens: tuple[str, ...] = ()
    system_prompt: str | None = None
    user_prompt: str | None = None


@dataclass(frozen=True)
class EvaluateConfig(GenerateConfig):
    """Generation over a manifest with transcripts, followed by the word error rate.

    A language model generates nothing here: its loss and perplexity are measured over `inputs`, or over the
    validation sets of its run.
    use_normalizer names the text normaliser applied to both sides before words are compared.
    """

    use_normalizer: Literal["english", "basic", "none"] = "english"
