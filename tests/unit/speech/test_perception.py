"""AudioPerception: lengths, chunking, padding, frozen parts, checkpointing, SpecAugment."""

import logging
from typing import Any

import pytest
import torch
from transformers import (
    ParakeetCTCConfig,
    ParakeetFeatureExtractor,
    WhisperConfig,
    WhisperFeatureExtractor,
)

from shoal.config.speech import ModalityAdapterConfig, PerceptionConfig, SpecAugmentConfig
from shoal.models.meta import parameters_on_meta
from shoal.speech.encoders import encoder_spec
from shoal.speech.perception import AudioPerception
from tests.tiny import HIDDEN, tiny_encoder, tiny_llama, tiny_parakeet, tiny_whisper

KINDS = ["whisper", "parakeet"]


def perception(kind: Any, *, chunk: float | None = None, seed: int = 0, **config: Any) -> AudioPerception:
    torch.manual_seed(seed)
    settings = PerceptionConfig(**config)
    return AudioPerception(tiny_encoder(kind), None, settings, HIDDEN, chunk_seconds=chunk).eval()


def audio(*lengths: int, seed: int = 0, width: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lens = torch.tensor(lengths)
    noise = 0.1 * torch.randn(len(lengths), max(lengths), generator=generator)
    noise = torch.nn.functional.pad(noise, (0, (width or max(lengths)) - max(lengths)))
    return noise * (torch.arange(noise.shape[1]) < lens[:, None]), lens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "adapter",
    [
        ModalityAdapterConfig(),
        ModalityAdapterConfig(stack_frames=4),
        ModalityAdapterConfig(kind="mlp", stack_frames=3, d_model=24),
        ModalityAdapterConfig(kind="conformer", d_model=16, n_layers=1, n_heads=2),
    ],
)
def test_a_clip_gives_the_same_alone_and_in_any_batch(kind: str, adapter: ModalityAdapterConfig) -> None:
    model = perception(kind, modality_adapter=adapter)
    audios, lens = audio(16000, 5000, 41234, 0, 700, width=50000)
    together, lengths = model(audios, lens)
    assert lengths.tolist() == model.output_lengths(lens).tolist()
    assert lengths[3] == 0
    for row in (0, 1, 2, 4):
        alone, length = model(audios[row : row + 1, : lens[row]], lens[row : row + 1])
        assert int(length) == int(lengths[row]) > 0
        torch.testing.assert_close(together[row, :length], alone[0, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "expected"), [("whisper", 50), ("parakeet", 13)])
def test_lengths_of_one_second(kind: str, expected: int) -> None:
    model = perception(kind)
    assert model.output_lengths(torch.tensor([16000])).tolist() == [expected]
    assert model.token_equivalent_duration == pytest.approx({"whisper": 0.02, "parakeet": 0.08}[kind])


def test_parakeet_counts_the_frames_that_transformers_masks() -> None:
    model = tiny_parakeet()
    lens = torch.arange(1, 200)
    front = perception("parakeet").speech_encoder
    expected = model._get_subsampling_output_length(lens)
    assert front.output_lengths(lens * 160).tolist() == expected.tolist()


def test_a_clip_longer_than_whispers_window_is_encoded_whole() -> None:
    """62.455 s of audio are 6245 mel frames and 3123 encoded ones; nothing is cut off at the window."""
    torch.manual_seed(0)
    encoder = tiny_whisper(max_source_positions=1500, encoder_layers=1)
    model = AudioPerception(encoder, None, PerceptionConfig(), HIDDEN).eval()
    audios, lens = audio(999280)
    assert model.preprocessor(audios, lens)[1].tolist() == [6245]
    embeddings, lengths = model(audios, lens)
    assert lengths.tolist() == [3123]
    changed = audios.clone()
    changed[:, 990000:] = 0.0
    moved = (model(changed, lens)[0] - embeddings).abs().amax(-1)[0]
    assert moved[3100:].max() > 1e-3
    assert moved[:2999].max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_frames_are_those_of_transformers_own_pipeline(kind: str) -> None:
    """Feature extractor and encoder of transformers, on clips of unequal lengths in one batch."""
    model = perception(kind)
    audios, lens = audio(16000, 9000, 12345)
    arrays = [row[:length].numpy() for row, length in zip(audios, lens.tolist(), strict=True)]
    extractor = WhisperFeatureExtractor(chunk_length=1) if kind == "whisper" else ParakeetFeatureExtractor()
    inputs = extractor(arrays, sampling_rate=16000, return_tensors="pt")
    expected = model.encoder(**inputs).last_hidden_state
    hidden, lengths = model._encode(*model.preprocessor(audios, lens))
    for row, length in enumerate(lengths.tolist()):
        assert length > 0
        torch.testing.assert_close(hidden[row, :length], expected[row, :length], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_are_encoded_alone_and_joined_in_order(kind: str) -> None:
    """A short tail stays with the chunk before it, an empty clip gives nothing."""
    whole, chunked = perception(kind), perception(kind, chunk=0.5)
    audios, lens = audio(20000, 8000, 16100, 0)
    joined, lengths = chunked(audios, lens)
    assert lengths.tolist() == chunked.output_lengths(lens).tolist()
    for row, spans in enumerate(
        [[(0, 8000), (8000, 16000), (16000, 20000)], [(0, 8000)], [(0, 8000), (8000, 16100)], []]
    ):
        parts = [whole(audios[row : row + 1, a:b], torch.tensor([b - a])) for a, b in spans]
        pieces = [embeddings[0, : int(length)] for embeddings, length in parts]
        expected = torch.cat(pieces) if pieces else torch.zeros(0, HIDDEN)
        assert int(lengths[row]) == len(expected)
        torch.testing.assert_close(joined[row, : len(expected)], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seconds", [0.0, -1.0, 0.01])
def test_chunks_without_features_are_refused(seconds: float) -> None:
    with pytest.raises(
        ValueError, match=r"encoder_chunk_size_seconds = .*at least two feature frames \(0.02 s"
    ):
        perception("parakeet", chunk=seconds)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_changes_neither_numbers_nor_names(kind: str) -> None:
    plain, checkpointed = perception(kind).train(), perception(kind).train()
    recomputed = []
    checkpointed.set_activation_checkpointing(True)
    for layer in checkpointed.speech_encoder.layers():
        layer.self_attn.register_forward_hook(lambda *_: recomputed.append(1))
    audios, lens = audio(16000, 9000)
    for model in (plain, checkpointed):
        model(audios, lens)[0].square().sum().backward()
    assert len(recomputed) == 4, "each of the two layers runs once more in backward"
    for (name, one), (other_name, other) in zip(
        plain.named_parameters(), checkpointed.named_parameters(), strict=True
    ):
        assert name == other_name
        if one.requires_grad:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_a_frozen_encoder_keeps_no_graph_and_no_batch_statistics() -> None:
    model = perception("parakeet").train()
    model.encoder.requires_grad_(False)  # after train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    audios, lens = audio(16000)
    hidden, _ = model._encode(model.preprocessor(audios, lens)[0], torch.tensor([100]))
    assert hidden.grad_fn is None
    model(audios, lens)[0].sum().backward()
    assert model.proj.weight.grad.abs().sum() > 0
    assert not model.encoder.training and model.proj.training
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert not model.train().encoder.training


def test_layerdrop_is_switched_off_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = AudioPerception(tiny_parakeet(layerdrop=0.9), None, PerceptionConfig(), HIDDEN).train()
    assert "layerdrop 0.9 set to 0" in caplog.text
    ran = []
    for layer in model.speech_encoder.layers():
        layer.register_forward_hook(lambda *_: ran.append(1))
    for _ in range(5):
        model(*audio(16000))
    assert len(ran) == 10


def test_spec_augment_depends_on_seed_and_clip_alone() -> None:
    config = SpecAugmentConfig(freq_masks=2, freq_width=20, time_masks=3, time_width=0.3)
    model = perception("parakeet", spec_augment=config).train()
    assert model.spec_augment is not None
    audios, lens = audio(16000, 16000, 8000)
    mel, mel_lens = model.preprocessor(audios, lens)
    torch.manual_seed(1)
    masked = model.spec_augment(mel, mel_lens, torch.tensor([3, 4, 3]))
    state = torch.random.get_rng_state()
    again = model.spec_augment(mel[[2, 0]], mel_lens[[2, 0]], torch.tensor([3, 3]))
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(masked[0], again[1]) and torch.equal(masked[2], again[0])
    assert not torch.equal(masked[0] == 0, masked[1] == 0)
    hidden = masked[0, :100] == 0
    bands, spans = hidden.all(0), hidden.all(1)
    assert 0 < int(bands.sum()) <= 40 and 0 < int(spans.sum()) <= 90
    assert torch.equal(hidden, bands[None] | spans[:, None])
    with pytest.raises(ValueError, match="needs one seed per clip"):
        model(audios, lens)
    assert torch.equal(model.eval()(audios, lens)[0], model(audios, lens, torch.tensor([1, 2, 3]))[0])


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_may_stand_on_meta_and_buffers_stay_right(kind: str) -> None:
    real = perception(kind)
    encoder = tiny_encoder(kind)  # type: ignore[arg-type]
    spec = encoder_spec(encoder.config)

    with parameters_on_meta():
        model = AudioPerception(spec.build(torch.float32), None, PerceptionConfig(), HIDDEN).eval()
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    model.load_state_dict(real.state_dict(), assign=True)
    audios, lens = audio(16000, 5000)
    torch.testing.assert_close(model(audios, lens)[0], real(audios, lens)[0], rtol=0, atol=0)


def test_encoder_specs_name_class_and_prefix() -> None:
    whisper = encoder_spec(WhisperConfig(architectures=["WhisperForConditionalGeneration"]))
    assert whisper.model_class.__name__ == "WhisperEncoder"
    assert whisper.checkpoint_prefix == "model.encoder."
    parakeet = encoder_spec(ParakeetCTCConfig(), {"num_hidden_layers": 3})
    assert parakeet.model_class.__name__ == "ParakeetEncoder"
    assert parakeet.checkpoint_prefix == "encoder."
    assert parakeet.config.num_hidden_layers == 3
    with pytest.raises(
        ValueError, match="perception.encoder.n_layers = 3: ParakeetEncoderConfig has no such key"
    ):
        encoder_spec(ParakeetCTCConfig(), {"n_layers": 3})


def test_other_families_and_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="model_type = 'llama' has no supported speech encoder"):
        encoder_spec(tiny_llama().config)
    with pytest.raises(ValueError, match="LlamaForCausalLM is not supported"):
        AudioPerception(tiny_llama(), None, PerceptionConfig(), HIDDEN)
    with pytest.raises(ValueError, match="output_dim = 31: the LLM's hidden size is 32"):
        perception("whisper", output_dim=31)
    with pytest.raises(ValueError, match="d_model = 5: the identity adapter passes on frames of width 16"):
        perception("whisper", modality_adapter=ModalityAdapterConfig(d_model=5))
