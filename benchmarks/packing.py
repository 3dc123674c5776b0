"""What packing speech gains: useful tokens per CPU second, packed against padded, on real lengths, one thread.

Lengths and words are those of the telephone prompts that the quickstart fetches (0.2 to 73 seconds); the audio
is noise of those lengths and the model a small SALM with random weights and a frozen encoder, because what a step
costs depends on neither. The data pipeline composes the micro-batches of every way from the same shuffled clips and
the same `batch_tokens`; each way runs forward and backward over all of them, in turn, in one process. Losses are
compared, so that all are known to do the same work. Decoding and collating are not timed.

    useful tokens = positions of the language model that hold text or audio, the same in both ways
    rate          = useful tokens / median over repetitions of user plus system seconds of forward and backward
    gain          = rate(packed) / rate(padded)
    ideal gain    = positions(padded) / useful tokens
    share         = gain / ideal gain, at least 0.9

`whole step` has the speech encoder in it, whose work on a clip is the same either way and which therefore lowers every
gain (`encoder_share` says how much of the packed step it is); `language model` times what comes after the splice.
`bucketed` pads clips of like length together, the best that padding can do.

    python benchmarks/packing.py [--clips 568] [--repetitions 3] [--check] [--results FOLDER]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402 (needs the lines above)
import torch  # noqa: E402

from benchmarks.provenance import provenance  # noqa: E402
from shoal.config.speech import DatasetConfig, ModalityAdapterConfig, PerceptionConfig  # noqa: E402
from shoal.data.conversation import Conversation, EncodedPrompt, TextTurn  # noqa: E402
from shoal.data.dataset import Loaded, collate  # noqa: E402
from shoal.data.micro_batches import MicroBatchStream  # noqa: E402

RESULTS = Path(__file__).parent / "results"
DEBIAN = ROOT / "third_party" / "debian"
SOUNDS = DEBIAN / "usr/share/asterisk/sounds/en_US_f_Allison"
TEXTS = DEBIAN / "usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz"
BYTES_PER_SECOND = 8000  # of G.722 at 64 kbit/s
RATE, FRAME_SECONDS = 16000, 0.08
BATCH_TOKENS = 1024
TARGET = 0.9
TOLERANCE = 1e-3
VOCAB, PLACEHOLDER = 512, 600
LLM: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
WAYS: dict[str, dict[str, Any]] = {
    "packed": {"packed": True},
    "padded": {"packed": False},
    "bucketed": {"packed": False, "use_bucketing": True, "num_buckets": 8},
}


class Words:
    """One token per word; the transcript is supervised."""

    placeholder_id, pad_id = PLACEHOLDER, 0

    def encode(self, conversation: Conversation) -> EncodedPrompt:
        ids: list[int] = []
        mask: list[bool] = []
        for turn in conversation.turns:
            text = isinstance(turn, TextTurn)
            found = turn.text.split() if isinstance(turn, TextTurn) else [""]
            ids += [1 + sum(map(ord, word)) % (VOCAB - 1) if text else PLACEHOLDER for word in found]
            mask += [text and turn.role == "assistant"] * len(found)
        return EncodedPrompt(tuple(ids), tuple(mask))

    def encode_prompt_only(self, conversation: Conversation) -> EncodedPrompt:
        return self.encode(conversation)


def clips(count: int) -> list[tuple[str, float, str]]:
    """Name, seconds and words of the real prompts, evenly spaced over their sorted names."""
    if not TEXTS.is_file():
        raise SystemExit(f"{TEXTS} is missing; run: python scripts/quickstart/fetch.py")
    texts = {}
    for line in gzip.decompress(TEXTS.read_bytes()).decode("utf-8").splitlines():
        key, _, text = line.partition(":")
        texts[key.strip()] = re.sub(r"\[.*?\]", "", text).strip()
    found = []
    for path in sorted(SOUNDS.rglob("*.g722")):
        key = path.relative_to(SOUNDS).with_suffix("").as_posix()
        if texts.get(key) and path.stat().st_size:
            found.append((key, path.stat().st_size / BYTES_PER_SECOND, texts[key]))
    count = min(count, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def micro_batches(some: Sequence[tuple[str, float, str]], folder: Path, way: str) -> list[dict[str, Any]]:
    """What the data pipeline composes of the clips in one way, loaded with noise of their lengths."""
    manifest = folder / "manifest.json"
    manifest.write_text(
        "".join(
            json.dumps({"audio_filepath": f"{name}.wav", "duration": round(seconds, 4), "text": words}) + "\n"
            for name, seconds, words in some
        )
    )
    options = dict(WAYS[way])
    packed = bool(options.pop("packed"))
    config = DatasetConfig(
        manifest_filepath=str(manifest),
        batch_tokens=BATCH_TOKENS,
        token_equivalent_duration=FRAME_SECONDS,
        oversize="alone",
        shuffle=True,
        **options,
    )
    stream = MicroBatchStream(config, Words(), shuffle=True, packed=packed)
    batches = []
    for items in stream.epoch(0, 0).batches:
        assert all(isinstance(item, Conversation) for item in items)
        batches.append(collate([_loaded(item) for item in items], 0, seed=0, epoch=0))
    return batches


def _loaded(conversation: Any) -> Loaded:
    generator = np.random.default_rng(len(conversation.id))
    audios = tuple(
        0.1 * generator.standard_normal(round(turn.cut.duration * RATE)).astype(np.float32)
        for turn in conversation.audio_turns
    )
    return Loaded(conversation, audios, Words().encode(conversation))


def salm(packed: bool) -> Any:
    """A small SALM with a frozen encoder, as the examples train it, that reads windows of a second."""
    from transformers import LlamaConfig, LlamaForCausalLM, WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    from shoal.kernels.attention_hf import PACKED_ATTENTION, register_attention
    from shoal.speech.perception import AudioPerception
    from shoal.speech.salm import SALM

    register_attention()
    torch.manual_seed(0)
    llm = LlamaForCausalLM._from_config(
        LlamaConfig(**LLM), attn_implementation=PACKED_ATTENTION if packed else "sdpa"
    )
    encoder = WhisperEncoder._from_config(
        WhisperConfig(
            d_model=32,
            encoder_layers=1,
            encoder_attention_heads=2,
            encoder_ffn_dim=64,
            max_source_positions=50,
        )
    )
    perception = AudioPerception(
        encoder,
        None,
        PerceptionConfig(modality_adapter=ModalityAdapterConfig(stack_frames=4)),
        LLM["hidden_size"],
        chunk_seconds=1.0,
    )
    encoder.requires_grad_(False)
    return SALM(llm, perception, placeholder_id=PLACEHOLDER, packed=packed).eval()


@dataclass
class Pass:
    """One pass over all micro-batches: seconds of everything and of the language model, sums, positions."""

    seconds: float = 0.0
    llm_seconds: float = 0.0
    loss: float = 0.0
    tokens: int = 0
    useful: int = 0
    positions: int = 0


def run(model: Any, batches: Sequence[dict[str, Any]]) -> Pass:
    """Forward and backward over all micro-batches.

    The language model is timed from the spliced embeddings on, and back to them.
    """
    total, marks = Pass(), [0.0, 0.0]

    def entered(module: Any, arguments: Any, keywords: dict[str, Any]) -> None:
        def left(gradient: Any) -> None:
            marks[1] = _cpu_seconds()

        keywords["inputs_embeds"].register_hook(left)
        marks[0] = _cpu_seconds()

    handle = model.llm.base_model.register_forward_pre_hook(entered, with_kwargs=True)
    for batch in batches:
        began = _cpu_seconds()
        out = model(batch)
        out["loss_sum"].backward()
        total.seconds += _cpu_seconds() - began
        total.llm_seconds += marks[1] - marks[0]
        total.loss += float(out["loss_sum"].detach())
        total.tokens += int(out["num_tokens"])
        total.useful += int(out["num_real_positions"])
        total.positions += int(out["num_positions"])
    handle.remove()
    model.zero_grad()
    return total


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(some: Sequence[tuple[str, float, str]], repetitions: int) -> dict[str, Any]:
    """All ways in turn; returns rates and gains."""
    with tempfile.TemporaryDirectory() as folder:
        batches = {way: micro_batches(some, Path(folder), way) for way in WAYS}
    models = {way: salm(WAYS[way]["packed"]) for way in WAYS}
    for way in WAYS:
        run(models[way], batches[way][:1])
    passes: dict[str, list[Pass]] = {way: [] for way in WAYS}
    for repetition in range(repetitions):
        for way in list(WAYS) if repetition % 2 == 0 else reversed(WAYS):
            passes[way].append(run(models[way], batches[way]))
    refuse_different_work({way: done[0] for way, done in passes.items()})
    packed = passes["packed"]
    encoder = 1 - statistics.median(one.llm_seconds / one.seconds for one in packed)
    return {
        "encoder_share": encoder,
        "micro_batches": {way: len(found) for way, found in batches.items()},
        "whole step": gains(passes, lambda one: one.seconds),
        "language model": gains(passes, lambda one: one.llm_seconds),
    }


def refuse_different_work(first: dict[str, Pass]) -> None:
    """Stops when the ways do not see the same tokens or get other losses."""
    packed = first["packed"]
    for way, one in first.items():
        same = (one.useful, one.tokens) == (packed.useful, packed.tokens)
        if not same or abs(one.loss - packed.loss) > TOLERANCE * packed.loss:
            raise SystemExit(f"{way}: {one} against {packed}: these do not do the same work")


def gains(passes: dict[str, list[Pass]], seconds: Callable[[Pass], float]) -> dict[str, Any]:
    """Rates of every way, and gain, ideal gain and share against each padded one."""
    useful = passes["packed"][0].useful
    cpu = {way: statistics.median(seconds(one) for one in done) for way, done in passes.items()}
    rates = {way: useful / value for way, value in cpu.items()}
    against = {}
    for way, done in passes.items():
        if way != "packed":
            gain, ideal = rates["packed"] / rates[way], done[0].positions / useful
            padding = 1 - useful / done[0].positions
            against[way] = {
                "gain": gain,
                "ideal_gain": ideal,
                "share": gain / ideal,
                "padding_share": padding,
            }
    return {
        "useful_tokens": useful,
        "cpu_seconds": cpu,
        "useful_tokens_per_cpu_second": rates,
        "against": against,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clips", type=int, default=568, help="how many of the real prompts")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--check", action="store_true", help="exit with 1 when a share is below the target")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of packing.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    some = clips(options.clips)
    measured = measure(some, options.repetitions)
    lengths = sorted(seconds for _, seconds, _ in some)
    for what in ("whole step", "language model"):
        for way, found in measured[what]["against"].items():
            print(
                f"{what:<15} packed against {way:<9} {found['gain']:.2f} times the useful tokens per CPU second, "
                f"ideal {found['ideal_gain']:.2f} ({found['padding_share']:.0%} padding): {found['share']:.2f} of it"
            )
    result = {
        **provenance(__doc__ or ""),
        "clips": len(some),
        "seconds": {
            "total": round(sum(lengths), 1),
            "shortest": lengths[0],
            "median": lengths[len(lengths) // 2],
            "longest": lengths[-1],
        },
        "batch_tokens": BATCH_TOKENS,
        "repetitions": options.repetitions,
        "target": TARGET,
        "measured": measured,
    }
    options.results.mkdir(exist_ok=True)
    (options.results / "packing.json").write_text(json.dumps(result, indent=2) + "\n")
    shares = [
        one["share"]
        for what in ("whole step", "language model")
        for one in measured[what]["against"].values()
    ]
    return int(min(shares) < TARGET and options.check)


if __name__ == "__main__":
    sys.exit(main())
