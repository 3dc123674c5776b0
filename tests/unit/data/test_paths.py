"""Brace expansion, paths beside a manifest, and what is refused."""

import pytest

from shoal.data.paths import beside, expand_braces, expand_paths, refuse_remote


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("a.tar", ["a.tar"]),
        ("a_{0..2}.tar", ["a_0.tar", "a_1.tar", "a_2.tar"]),
        ("a__OP_0..2_CL_.tar", ["a_0.tar", "a_1.tar", "a_2.tar"]),
        ("a_{008..010}.tar", ["a_008.tar", "a_009.tar", "a_010.tar"]),
        ("b{0..1}/a{3..4}", ["b0/a3", "b0/a4", "b1/a3", "b1/a4"]),
        ("a_{5..5}", ["a_5"]),
    ],
)
def test_expand_braces(pattern, paths):
    assert expand_braces(pattern) == paths


def test_a_list_expands_in_order():
    assert expand_paths(["x_{0..1}", "y"]) == ["x_0", "x_1", "y"]


def test_a_backward_range_is_refused_with_its_repair():
    with pytest.raises(ValueError, match=r"3\.\.1 runs backwards; write \{1\.\.3\}"):
        expand_braces("a_{3..1}")


def test_relative_paths_lie_beside_the_manifest():
    assert beside("/data/m.json", "wav/a.wav") == "/data/wav/a.wav"
    assert beside("/data/m.json", "/other/a.wav") == "/other/a.wav"


@pytest.mark.parametrize("path", ["pipe:cat x", "http://host/x.wav", "s3://bucket/x", "ais://bucket/x"])
def test_commands_and_urls_are_refused_unless_allowed(path):
    with pytest.raises(ValueError, match=r"m\.json:3.*--allow-commands"):
        refuse_remote(path, "m.json:3", allow_commands=False)
    refuse_remote(path, "m.json:3", allow_commands=True)
    refuse_remote("/a/file:with:colons.wav", "m.json:3", allow_commands=False)
