"""``shoal evaluate`` of a language model: loss and perplexity per supervised token over whole data sets.

Under a launcher each rank holds the whole model and reads its share; sums and counts are added once at the end, so
the figures do not depend on the number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.config.evaluate import EvaluateConfig, GenerateConfig
from shoal.config.llm import LLMConfig
from shoal.config.text import TextDatasetConfig
from shoal.data.chat import pad_id_of
from shoal.data.stream import ValidationLoader
from shoal.data.text import open_documents
from shoal.data.text_corpus import HEADER
from shoal.data.text_loaders import text_validation_loader
from shoal.data.text_rows import Row, open_rows
from shoal.mesh.collectives import all_reduce_sum
from shoal.mesh.init import DistInfo, initialize_distributed
from shoal.models.causal_lm import CausalLM
from shoal.models.meta import cast_stored
from shoal.train.llm_trained import TrainedLM, load_trained_llm
from shoal.train.modules import perplexity
from shoal.train.step import agree_on_step, to_device

_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "auto": None}


@dataclass(frozen=True)
class SetResult:
    """Figures of one data set; loss is in nats per supervised token."""

    name: str
    loss: float
    perplexity: float
    accuracy: float
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.name:<16} loss {self.loss:.6f}  ppl {self.perplexity:.4f}  acc {self.accuracy:.4f}  "
            f"({self.num_tokens:,} tokens)"
        )


def run_llm_evaluation(config: EvaluateConfig) -> int:
    """Prints loss and perplexity of every set and writes them as JSON lines.

    The sets are the file or folder `inputs`, or the validation sets of the run.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: The model or the data is refused, or nothing is supervised; on every rank.
    """
    session, trained = open_llm(config)
    positions = getattr(trained.model.llm.config.get_text_config(), "max_position_embeddings", None)
    sets = data_sets(config, trained.config, positions)
    results = evaluate_sets(trained, sets, config.batch_size, session)
    if session.rank == 0:
        print("\n".join(map(str, results)), flush=True)
        text = "".join(json.dumps(asdict(result)) + "\n" for result in results)
        Path(config.output_manifest).parent.mkdir(parents=True, exist_ok=True)
        Path(config.output_manifest).write_text(text, encoding="utf-8")
    return 0


def open_llm(config: GenerateConfig) -> tuple[DistInfo, TrainedLM]:
    """Opens the process group and the model, on this rank's device in the wanted dtype."""
    info = initialize_distributed(
        _BACKENDS[config.device],  # type: ignore[arg-type]
        config.timeout_minutes,
    )
    trained = load_trained_llm(config.pretrained_name)
    cast_stored(trained.model, getattr(torch, config.dtype))
    return info, replace(trained, model=trained.model.to(info.device).eval())


def data_sets(
    config: GenerateConfig, run: LLMConfig, positions: int | None
) -> Mapping[str, TextDatasetConfig]:
    """The sets to evaluate, by name; `positions` is the longest document of the model.

    Raises:
        ValueError: Neither inputs nor a run with validation sets.
    """
    if config.inputs is None:
        if not run.validation_datasets:
            raise ValueError(
                f"inputs: not given, and {config.pretrained_name!r} has no validation sets; give inputs=FILE"
            )
        return dict(sorted(run.validation_datasets.items()))
    dataset = input_set(config, config.inputs)
    if dataset.seq_length is None and dataset.type in ("text", "tokens"):
        # Long texts are cut where the model's positions end, instead of asking for positions it never saw.
        dataset = replace(dataset, seq_length=positions)
    return {Path(config.inputs).stem or config.inputs: dataset}


def input_set(config: GenerateConfig, inputs: str) -> TextDatasetConfig:
    """What `inputs` holds: as `input_type` says, else what the columns of its first row look like."""
    dataset = TextDatasetConfig(path=inputs, type=config.input_type or "text", seq_length=config.seq_length)
    if (Path(inputs) / HEADER).is_file():
        return replace(dataset, type="tokens")
    if config.input_type is None and Path(inputs).suffix not in (".txt", ".md"):
        dataset = replace(dataset, **_guess(open_rows(dataset, "inputs")[0], inputs))
    return dataset


def _guess(row: Row, inputs: str) -> dict[str, Any]:
    if "messages" in row or "conversations" in row:
        return {"type": "chat", "messages_column": "messages" if "messages" in row else "conversations"}
    if "answer" in row:
        mapping = {name: name for name in ("context", "question", "answer") if name in row}
        return {"type": "instruction", "column_mapping": mapping}
    if "text" in row:
        return {"type": "text"}
    raise ValueError(
        f"inputs = {inputs!r}: its columns are {', '.join(row)}; messages, question and answer, or text are read. "
        "Give input_type=squad, hellaswag, ..."
    )


def evaluate_sets(
    trained: TrainedLM, sets: Mapping[str, TextDatasetConfig], batch_size: int, session: DistInfo
) -> list[SetResult]:
    """Evaluates every set on all ranks together; collective.

    Raises:
        ValueError: A set is refused or supervises nothing.
    """
    run = replace(
        trained.config,
        validation_dataloader=replace(trained.config.validation_dataloader, batch_size=batch_size),
    )
    pad_id = 0 if trained.tokenizer is None else pad_id_of(trained.tokenizer)
    loaders = {}
    for name, dataset in sets.items():
        loaders[name] = text_validation_loader(
            run,
            dataset,
            open_documents(dataset, trained.tokenizer, name),
            key=name,
            pad_id=pad_id,
            dp_rank=session.rank,
            dp_size=session.world_size,
        )
    return [_evaluate(trained.model, name, loader, session) for name, loader in loaders.items()]


@torch.no_grad()
def _evaluate(model: CausalLM, name: str, loader: ValidationLoader, session: DistInfo) -> SetResult:
    group = dist.group.WORLD if session.world_size > 1 else None
    sums = torch.zeros(3, dtype=torch.float64, device=session.device)
    for step in loader:
        agree_on_step(step, group, session.device)
        for micro_batch in step.micro_batches:
            out = model(to_device(micro_batch, session.device))
            sums += torch.stack([out[key].double() for key in ("loss_sum", "num_correct", "num_tokens")])
    loss, correct, tokens = all_reduce_sum(sums, group).tolist()
    if not tokens:
        raise ValueError(f"{name}: not one supervised token")
    return SetResult(name, loss / tokens, perplexity(loss / tokens), correct / tokens, int(tokens))
