"""The release that a tree gets, through the controller's cache: what its instruments read may be set."""

from __future__ import annotations

import pytest
from ansible_collections.dsv4.fleet.plugins.plugin_utils import store
from ansible_collections.dsv4.fleet.plugins.plugin_utils import tree as upstream
from ansible_collections.dsv4.fleet.plugins.plugin_utils.remote import pack_text

from tests.unit.patches.sources import ENVIRON, REST

SOURCE = b"class Envs:\n    SGLANG_EXAMPLE = EnvBool(True)\n\n\n_handle_deprecated_envs()\n"
SETTINGS = {
    "SGLANG_DSV4_GE_DIFF_EVERY": "8",
    "SGLANG_DSV4_GE_DIFF_LAYERS": "0-3,10",
    "SGLANG_DSV4_GE_DIFF_MAX_MB": "256",
    "SGLANG_DSV4_ALIAS_AUDIT": "1",
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> tuple[store.Store, store.Tree]:
    """A cache, and a tree in it as a host answers with it."""
    cache = store.Store(tmp_path_factory.mktemp("cache"))
    files = {**REST, ENVIRON: SOURCE}
    content = {rel: pack_text(data) for rel, data in files.items()}
    seen = {"digest": "ab" * 32, "version": "0.5.18", "names": ["SGLANG_EXAMPLE"], "content": content}
    return cache, cache.tree(seen, list(files))


def said(names: frozenset[str], values: dict[str, str]) -> list[tuple[str, str]]:
    return [(one.name, one.text) for one in upstream.check_environment(values, {}, names)]


def test_what_the_instruments_read_may_be_set_where_the_release_carries_them(tree: tuple[store.Store, store.Tree]) -> None:
    cache, base = tree
    names = store.names_read(base, store.release_files(cache.release(base, [])))
    assert said(names, SETTINGS) == []
    without = store.names_read(base, {})
    assert [name for name, _ in said(without, SETTINGS)] == list(SETTINGS)


def test_a_misspelt_one_is_refused_with_the_right_one(tree: tuple[store.Store, store.Tree]) -> None:
    cache, base = tree
    names = store.names_read(base, store.release_files(cache.release(base, [])))
    [(name, text)] = said(names, {"SGLANG_DSV4_GE_DIFF_EVRY": "8"})
    assert name == "SGLANG_DSV4_GE_DIFF_EVRY" and "Close to it: SGLANG_DSV4_GE_DIFF_EVERY" in text


def test_a_release_is_built_once(tree: tuple[store.Store, store.Tree], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, base = tree
    first = cache.release(base, [])
    monkeypatch.setattr(store.Store, "_build", lambda *_: pytest.fail("built again"))
    assert cache.release(base, []) == first
