"""Globs: what they match, how keys are quoted, what is suggested."""

import pytest

from meshdsl.util.paths import join_path, matches, split_path, suggest

PATHS = ["params/wte", "params/layers/0/w1", "params/layers/1/w1", "batch/tokens", "params/'linear/~/w'/b"]


@pytest.mark.parametrize(
    ("glob", "path", "expected"),
    [
        ("batch", "batch", True),
        ("batch", "batch/tokens", False),
        ("*", "batch/tokens", False),
        ("batch/*", "batch/tokens", True),
        ("**", "batch/tokens", True),
        ("**", "", True),
        ("batch/**", "batch", True),
        ("params/**/w1", "params/w1", True),
        ("params/**/w1", "params/layers/0/w1", True),
        ("params/**/w1", "params/layers/0/w12", False),
        ("**/layers/**/w1", "params/layers/0/w1", True),
        ("params/layers/*/w1", "params/layers/0/w1", True),
        ("params/layer_*/w", "params/layer_10/w", True),
        ("params/'linear/~/w'/b", "params/'linear/~/w'/b", True),
        ('params/"linear/~/w"/b', "params/'linear/~/w'/b", True),
        ("params/*/b", "params/'linear/~/w'/b", True),
        ("params/linear/~/w/b", "params/'linear/~/w'/b", False),
        ("'*'", "w", False),
        ("'*'", "'*'", True),
        ("a.c", "abc", False),
        ("state/0/{mu,nu}/w", "state/0/nu/w", True),
        ("state/0/{mu,nu}/w", "state/0/xi/w", False),
        ("params/w_{up, gate*}/k", "params/w_gate_2/k", True),
        ("'{a}'", "'{a}'", True),
        ("'{a}'", "a", False),
        ("{a", "{a", True),
    ],
)
def test_matches(glob, path, expected):
    assert matches(glob, path) is expected


@pytest.mark.parametrize(
    "keys", [("a", "b"), ("linear/~/w", "b"), ("it's", '"'), ("*", "{a,b}", "a b", "back\\slash"), ("0",)]
)
def test_paths_of_any_keys_come_apart_again(keys):
    path = join_path(keys)
    assert len(split_path(path)) == len(keys)
    assert matches(path, path)
    assert join_path(keys) == "/".join(split_path(path))


def test_a_lone_quote_is_a_character():
    assert split_path("it's/b") == ("it's", "b")


@pytest.mark.parametrize(
    ("glob", "end"),
    [
        ("batch", "; did you mean 'batch/**'?"),
        ("w1", "; did you mean '**/w1'?"),
        ("params/**/w2", "; did you mean 'params/**/w1'?"),
        ("parms/wte", "; did you mean 'params/wte'?"),
        ("parms/*", "; did you mean 'params/*'?"),
        ("zzz", "; known: params, batch"),
    ],
)
def test_suggest(glob, end):
    assert suggest(glob, PATHS) == end
