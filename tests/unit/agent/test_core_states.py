"""What a script is, what a state names, and what an interpreter would import instead of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent import check, inspect, python_env, states, systemd
from agent.errors import AgentError

from tests.unit.agent.made_up import MadeUpHost


def test_a_state_is_the_script_without_its_own_line() -> None:
    text = b"#!/bin/bash\nexport DSV4_FLEET_STATE=%s\nexec a\n"
    assert states.state_of(text % b"1") == states.state_of(text % b"2") == states.state_of(b"#!/bin/bash\nexec a\n")
    assert states.state_of(b"#!/bin/bash\nexec b\n") != states.state_of(b"#!/bin/bash\nexec a\n")


@pytest.mark.parametrize(
    ("script", "last"),
    [
        ("a\nexec b\n", "exec b"),
        ("exec b \\\n  --c d \\\n  --e 'f g'\n# the end\n\n", "exec b   --c d   --e 'f g'"),
        ("exec b 'two\nlines'\n", "exec b 'two\nlines'"),
        ("exec b $'it\\'s\nnext'\n", "exec b $'it\\'s\nnext'"),
        ('exec b "a \\" # b"\n', 'exec b "a \\" # b"'),
        ("exec b # don't\n", "exec b"),
        ("# isn't\nexec b\n", "exec b"),
        ("exec b\nexport LATE=1\n", "export LATE=1"),
        ("python3 -m server &\nwait\n", "wait"),
    ],
)
def test_the_last_command_is_found_whatever_is_quoted_or_commented(script: str, last: str) -> None:
    assert list(states.commands(script))[-1] == last


def test_a_kept_state_that_was_tampered_with_is_refused(host: MadeUpHost) -> None:
    target = host.target("a")
    host.change(target)
    store = states.Store(host.worker())
    Path(store.path(target["state"]), "script").write_text("#!/bin/bash\nexec evil\n")
    with pytest.raises(AgentError, match="damaged"):
        store.load(target["state"])


def test_the_units_digest_covers_text_paths_and_order() -> None:
    one, two = {"path": "/a.conf", "text": "x"}, {"path": "/b.conf", "text": "y"}
    digests = {
        systemd.unit_digest("u", [one, two]), systemd.unit_digest("u", [two, one]), systemd.unit_digest("u", [one]),
        systemd.unit_digest("v", [one, two]), systemd.unit_digest("u", [one, {"path": "/b.conf", "text": "z"}]),
        systemd.unit_digest("u", [one, {"path": "/c.conf", "text": "y"}]),
    }  # fmt: skip
    assert len(digests) == 6


@pytest.mark.parametrize(
    "make",
    [
        lambda d: (d / "sglang").mkdir(),
        lambda d: ((d / "sglang").mkdir(), (d / "sglang/__init__.py").write_text("")),
        lambda d: (d / "sglang.py").write_text(""),
        lambda d: (d / "sglang.cpython-311-x86_64-linux-gnu.so").write_text(""),
        lambda d: (d / "dsv4_probe").mkdir(),
    ],
    ids=["empty folder", "complete tree", "module", "native module", "our package"],
)  # fmt: skip
def test_whatever_would_be_imported_in_the_releases_place_is_a_stray(tmp_path: Path, make: object) -> None:
    tree = tmp_path / "base/python"
    (tree / "sglang").mkdir(parents=True)
    work = tmp_path / "work"
    work.mkdir()
    (work / "sglang_notes").mkdir()
    assert callable(make)
    make(work)
    assert len(python_env.stray([str(work)], str(tree))) == 1
    assert python_env.stray([str(tree)], str(tree)) == [], "the tree itself is none"


def test_the_fingerprint_sees_what_is_installed(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    (site / "torch-2.0.dist-info").mkdir(parents=True)
    (site / "torch-2.0.dist-info/RECORD").write_text("a,sha256=1,1\n")
    before = python_env.fingerprint("/usr/bin/python3", "3.11.2", [str(site)])
    assert before == python_env.fingerprint("/usr/bin/python3", "3.11.2", [str(site)])
    (site / "torch-2.0.dist-info/RECORD").write_text("a,sha256=2,1\n")
    changed = python_env.fingerprint("/usr/bin/python3", "3.11.2", [str(site)])
    (site / "__editable__.sglang.pth").write_text("/somewhere\n")
    editable = python_env.fingerprint("/usr/bin/python3", "3.11.2", [str(site)])
    assert len({before, changed, editable, python_env.fingerprint("/usr/bin/python3", "3.11.3", [str(site)])}) == 4


def test_values_that_look_secret_are_not_shown() -> None:
    shown = inspect.visible_arguments(
        ["s", "--api-key", "k1", "--admin-api-key=k2", "--max-total-tokens", "7", "--tokenizer", "t"]
    )
    assert shown == [
        "s",
        "--api-key",
        "(secret)",
        "--admin-api-key=(secret)",
        "--max-total-tokens",
        "7",
        "--tokenizer",
        "t",
    ]
    assert inspect.visible({"SGLANG_API_KEY": "k", "SGLANG_NUM_TOKENS": "7", "DSV4_FLEET_SECRETS": "d"}) == {
        "SGLANG_API_KEY": "(secret)", "SGLANG_NUM_TOKENS": "7", "DSV4_FLEET_SECRETS": "d",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("unit", "../x.service"), ("unit", "x"), ("unit", "a b.service"), ("script", "serve.sh"), ("script", "/a/../b"),
        ("port", True), ("port", 0), ("port", "30002"), ("host", "localhost"), ("role", "router"), ("routers", None),
        ("tree", ""), ("routers", [{}]),
    ],
)  # fmt: skip
def test_a_worker_that_cannot_be_meant_is_refused(host: MadeUpHost, field: str, value: object) -> None:
    with pytest.raises(AgentError, match=f"worker.{field}"):
        check.worker({**host.worker(), field: value})


def test_a_bootstrap_port_of_zero_is_none(host: MadeUpHost) -> None:
    assert check.worker({**host.worker(), "bootstrap_port": 0})["bootstrap_port"] is None


def test_inspect_says_what_is_there_and_writes_only_its_cache(host: MadeUpHost, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.inspect.proc.process", host._process)
    before = {str(path) for path in host.root.rglob("*")}
    request = {
        "worker": {**host.worker(), "routers": []},
        "secrets": {},
        "tree_files": ["sglang/srt/*.py"],
        "known_trees": [],
    }
    answer = inspect.inspect(request, host)  # type: ignore[arg-type]  # it is all of systemd that is asked
    assert answer["script"]["kind"] == "file" and answer["script"]["mode"] == "0750" and answer["script"]["declared"] is None
    assert answer["tree"]["version"] == "0.5.18" and list(answer["tree"]["content"]) == ["sglang/srt/environ.py"]
    assert answer["host"]["needs_host_key"] and answer["baseline"] is False and answer["transaction"] is None
    assert answer["process"]["pid"] == host.pid and answer["health"]["status"] is None
    new = {str(path) for path in host.root.rglob("*")} - before
    assert all(path.startswith(str(host.root / "run")) for path in new), new
    known = inspect.inspect({**request, "known_trees": [answer["tree"]["digest"]]}, host)  # type: ignore[arg-type]  # as above
    assert "content" not in known["tree"] and "names" not in known["tree"]
    fast = inspect.inspect({**request, "fast": True}, host)  # type: ignore[arg-type]  # as above
    assert not {"tree", "python", "health", "routers"} & set(fast)
    assert os.path.exists(host.script)
