"""Releases: overlays, the spliced line, the manifest and its digest."""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import patches
from patches import NEW, Overlay, PatchError, build
from patches.hooks import MARK
from tests.unit.patches.sources import ENVIRON, INDEXER, MODEL, REST, RUNNER

TREE = "ab" * 32

# A tree's environ.py in our own words: the two forms that upstream's call has had.
SOURCE = b"""import os


class Envs:
    SGLANG_EXAMPLE = None


envs = Envs()


def _handle_deprecated_envs():
    os.environ.pop("SGL_EXAMPLE", None)


_handle_deprecated_envs()  # at import

after = 1
"""
OLD_SOURCE = SOURCE.replace(b"_handle_deprecated_envs", b"_convert_SGL_to_SGLANG")


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("source", [SOURCE, OLD_SOURCE])
def test_the_line_goes_right_after_the_call_and_nothing_else_changes(source: bytes) -> None:
    release = build({**REST, ENVIRON: source}, TREE, "0.5.18")
    lines = release.files[f"python/{ENVIRON}"].decode().splitlines()
    at = next(number for number, line in enumerate(lines) if MARK in line)
    assert lines[at - 1].endswith("# at import")
    assert lines[at].startswith("import dsv4_probe.passport; dsv4_probe.passport.write(globals())")
    assert [line for line in lines if MARK not in line] == source.decode().splitlines()


@pytest.mark.parametrize(
    ("source", "count"),
    [
        (SOURCE.replace(b"\n_handle_deprecated_envs()", b"\n"), 0),
        (SOURCE + b"_handle_deprecated_envs()\n", 2),
        (SOURCE.replace(b"\n_handle_deprecated_envs()", b"\nif True:\n    _handle_deprecated_envs()"), 0),
    ],
)
def test_an_anchor_that_does_not_match_once_is_an_error_with_file_version_anchor_and_count(
    source: bytes, count: int
) -> None:
    with pytest.raises(PatchError) as error:
        build({**REST, ENVIRON: source}, TREE, "0.5.99")
    text = str(error.value)
    assert ENVIRON in text and "0.5.99" in text and "_handle_deprecated_envs" in text
    assert f"has {count} places" in text


def test_a_hooked_tree_is_recognised_and_gives_the_same_bytes() -> None:
    once = build({**REST, ENVIRON: SOURCE}, TREE, "0.5.18")
    hooked = {rel: once.files[f"python/{rel}"] for rel in (ENVIRON, *REST)}
    twice = build(hooked, TREE, "0.5.18")
    assert twice.files == once.files
    assert not once.manifest["files"][f"python/{ENVIRON}"]["base_hooked"]
    assert twice.manifest["files"][f"python/{ENVIRON}"]["base_hooked"]


def test_a_line_of_an_older_hook_is_replaced() -> None:
    call = b"_handle_deprecated_envs()  # at import\n"
    older = SOURCE.replace(call, call + f"import old; old.call()  {MARK} passport\n".encode())
    assert (
        build({**REST, ENVIRON: older}, TREE, "0.5.18").files
        == build({**REST, ENVIRON: SOURCE}, TREE, "0.5.18").files
    )


def test_line_endings_and_encoding_are_kept() -> None:
    source = SOURCE.replace(b"# at import", "# gr\u00fc\u00df".encode()).replace(b"\n", b"\r\n")
    result = build({**REST, ENVIRON: source}, TREE, "0.5.18").files[f"python/{ENVIRON}"]
    assert result.count(b"\r\n") == result.count(b"\n") == source.count(b"\n") + 1
    assert "gr\u00fc\u00df".encode() in result


def test_an_overlay_goes_in_first_and_the_hook_on_top() -> None:
    content = SOURCE.replace(b"after = 1", b"after = 2")
    release = build({**REST, ENVIRON: SOURCE}, TREE, "0.5.18", [Overlay(ENVIRON, content, sha(SOURCE))])
    result = release.files[f"python/{ENVIRON}"]
    assert b"after = 2" in result and MARK.encode() in result
    assert release.manifest["files"][f"python/{ENVIRON}"] == {
        "base": sha(SOURCE),
        "base_hooked": False,
        "hooks": ["passport"],
        "overlay": sha(content),
        "result": sha(result),
    }


def test_an_overlay_of_another_file_and_a_new_file() -> None:
    base = {**REST, ENVIRON: SOURCE, "sglang/a.py": b"a = 1\n"}
    overlays = [
        Overlay("sglang/a.py", b"a = 2\n", sha(b"a = 1\n")),
        Overlay("sglang/new.cuh", b"not python {", NEW),
    ]
    release = build(base, TREE, "0.5.18", overlays)
    assert release.files["python/sglang/a.py"] == b"a = 2\n"
    assert release.files["python/sglang/new.cuh"] == b"not python {"
    assert release.manifest["files"]["python/sglang/new.cuh"]["base"] is None


@pytest.mark.parametrize(
    ("overlay", "words"),
    [
        (Overlay("sglang/a.py", b"", "0" * 64), ["sglang/a.py", "0" * 64, sha(b"a = 1\n")]),
        (Overlay("sglang/a.py", b"", NEW), ["sglang/a.py", "new", sha(b"a = 1\n")]),
        (Overlay("sglang/missing.py", b"", "0" * 64), ["sglang/missing.py", "no such file", "'new'"]),
    ],
)
def test_an_overlay_whose_pin_does_not_hold_is_an_error(overlay: Overlay, words: list[str]) -> None:
    with pytest.raises(PatchError) as error:
        build({**REST, ENVIRON: SOURCE, "sglang/a.py": b"a = 1\n"}, TREE, "0.5.18", [overlay])
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "rel", ["/sglang/a.py", "sglang/../a.py", "dsv4_probe/passport.py", "sglang//a.py", ""]
)
def test_an_overlay_stays_inside_the_tree(rel: str) -> None:
    with pytest.raises(PatchError, match="plain path inside the tree"):
        Overlay(rel, b"", NEW)


def test_an_overlay_that_does_not_compile_is_an_error() -> None:
    with pytest.raises(PatchError, match=r"sglang/b\.py.*does not compile"):
        build({**REST, ENVIRON: SOURCE}, TREE, "0.5.18", [Overlay("sglang/b.py", b"def (:\n", NEW)])
    with pytest.raises(PatchError, match=r"environ\.py.*cannot|environ\.py.*not Python"):
        build({**REST, ENVIRON: SOURCE}, TREE, "0.5.18", [Overlay(ENVIRON, b"def (:\n", sha(SOURCE))])


def test_a_tree_without_a_hooked_file_is_an_error() -> None:
    with pytest.raises(PatchError, match="is missing in the tree"):
        build({}, TREE, "0.5.18")


def test_the_digest_is_the_manifest_and_the_manifest_is_every_byte() -> None:
    release = build({**REST, ENVIRON: SOURCE}, TREE, "0.5.18")
    text = json.dumps(release.manifest, sort_keys=True, separators=(",", ":")).encode()
    assert release.digest == sha(text)
    assert {rel: entry["result"] for rel, entry in release.manifest["files"].items()} == {
        rel: sha(content) for rel, content in release.files.items()
    }
    assert release.manifest["fleet"] == patches.__version__
    assert "python/dsv4_probe/passport.py" in release.files
    for other in (
        build({**REST, ENVIRON: SOURCE + b"b = 1\n"}, TREE, "0.5.18"),
        build({**REST, ENVIRON: SOURCE}, "cd" * 32, "0.5.18"),
        build({**REST, ENVIRON: SOURCE}, TREE, "0.5.19"),
    ):
        assert other.digest != release.digest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "patches", "build", *arguments],
        capture_output=True, text=True, timeout=60, check=False, cwd=Path(patches.__file__).parents[1],
    )  # fmt: skip


def test_the_command_writes_what_build_returns_and_prints_the_digest(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for rel, content in {**REST, ENVIRON: SOURCE}.items():
        (base / rel).parent.mkdir(parents=True, exist_ok=True)
        (base / rel).write_bytes(content)
    (tmp_path / "a.py").write_bytes(b"a = 2\n")
    common = ["--base", str(base), "--tree-digest", TREE, "--version", "0.5.18"]
    overlay = ["--overlay", f"sglang/a.py={tmp_path / 'a.py'}:new"]
    results = [run(*common, *overlay, "--out", str(tmp_path / out)) for out in ("one", "two")]
    expected = build({**REST, ENVIRON: SOURCE}, TREE, "0.5.18", [Overlay("sglang/a.py", b"a = 2\n", NEW)])
    for out, result in zip(("one", "two"), results, strict=True):
        assert (result.returncode, result.stdout.strip()) == (0, expected.digest), result.stderr
        root = tmp_path / out
        assert sha((root / "manifest.json").read_bytes()) == expected.digest
        written = {
            path.relative_to(root / "files").as_posix(): path.read_bytes()
            for path in (root / "files").rglob("*")
            if path.is_file()
        }
        assert written == expected.files
    again = run(*common, "--out", str(tmp_path / "one"))
    assert again.returncode == 2 and "not an empty directory" in again.stderr
    wrong = run(*common, "--overlay", f"sglang/a.py={tmp_path / 'a.py'}", "--out", str(tmp_path / "three"))
    assert wrong.returncode == 2 and "SHA256_OF_BASE" in wrong.stderr
    assert not (tmp_path / "three").exists()


def test_what_is_shipped_needs_only_what_a_server_has_and_runs_on_python_3_10() -> None:
    there = {"torch", "triton", "prometheus_client", *sys.stdlib_module_names}
    for path in sorted((Path(patches.__file__).parent / "dsv4_probe").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 10))):
            if isinstance(node, ast.Import):
                assert {alias.name.partition(".")[0] for alias in node.names} <= there, path
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert (node.module or "").partition(".")[0] in there, path


def lines_of(rel: str, source: bytes | None = None) -> list[str]:
    base = {**REST, ENVIRON: SOURCE, **({} if source is None else {rel: source})}
    return build(base, TREE, "0.5.18").files[f"python/{rel}"].decode().splitlines()


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


COMPUTE_Q = "q, weights = c4_indexer.compute_q(q_lora, positions, weights)"
REPLAY = "output = self.backend.replay(self._replay_graph_key, forward_batch)"


@pytest.mark.parametrize(
    ("rel", "before", "hook", "after"),
    [
        (MODEL, "qkv_a_ready = stream.record_event()", "qkv-a-made", "q_lora = self.second(x)"),
        (MODEL, "q_lora_ready = stream.record_event()", "q-lora-made", "with other(stream):"),
        (MODEL, "self._compute_kv_to_cache(x, qkv_a=qkv_a)", "qkv-a-read", "with other(stream):"),
        (MODEL, "attn_backend.forward_core_compressor(x, self)", "x-read", "return q_lora"),
        (INDEXER, "self.forward_indexer_compressor(x=x)", "overlap-compressed", "with other(stream):"),
        (INDEXER, COMPUTE_Q, "overlap-q-made", "return q, weights"),
        (INDEXER, "q, weights = c4_indexer.compute_q(q_lora, positions, 1)", "normal-q-made", "if x:"),
        (INDEXER, "self.forward_indexer_compressor(x=x)", "normal-compressed", "return q, weights"),
        (INDEXER, ")", "logits", "return logits"),
        (RUNNER, "shape_key = self.make(size)", "capture-begins", "# the capture itself"),
        (RUNNER, ")", "capture-ends", ""),
        (RUNNER, "self.load_batch(forward_batch)", "replay-begins", REPLAY),
        (RUNNER, REPLAY, "replay-ends", "done()"),
    ],
)
def test_each_call_stands_where_it_should(rel: str, before: str, hook: str, after: str) -> None:
    lines = lines_of(rel)
    [at] = [number for number, line in enumerate(lines) if line.endswith(f"{MARK} {hook}")]
    assert (lines[at - 1].strip(), lines[at + 1].strip()) == (before, after)
    assert indent(lines[at]) == indent(lines[at - 1])


@pytest.mark.parametrize("rel", [MODEL, INDEXER, RUNNER])
def test_nothing_but_whole_lines_is_added(rel: str) -> None:
    lines = lines_of(rel)
    assert [line for line in lines if MARK not in line] == REST[rel].decode().splitlines()
    assert len(lines) > len(REST[rel].decode().splitlines())
    assert all("import dsv4_probe.hooks; dsv4_probe.hooks." in line for line in lines if MARK in line)


def test_the_logits_hook_gets_the_arguments_of_the_call() -> None:
    [line] = [line for line in lines_of(INDEXER) if line.endswith("hook: logits")]
    arguments = "q[rows], cache, weights[rows], lengths[rows], table[rows], metadata, self.longest, False"
    assert f"logits_read(self, c4_indexer, fn, logits, {arguments})" in line


@pytest.mark.parametrize(
    ("rel", "old", "new", "hook", "count"),
    [
        (MODEL, b"_forward_prepare_multi_stream", b"_prepare", "qkv-a-made", 0),
        (MODEL, b"class MQALayer", b"class Attention", "qkv-a-made", 0),
        (MODEL, b"        return q_lora\n", b"        q_lora_ready = s.record_event()\n", "q-lora-made", 2),
        (INDEXER, b"                False,\n", b"", "logits", 0),
        (INDEXER, b"logits = other(", b"logits = fn(", "logits", 2),
        (RUNNER, b"self.backend.capture_one(", b"self.backend.capture(", "capture-begins", 0),
        (
            RUNNER,
            b"            done()\n",
            b"            output = self.backend.replay(1, 2)\n",
            "replay-begins",
            2,
        ),
    ],
)
def test_an_anchor_found_not_once_is_named(rel: str, old: bytes, new: bytes, hook: str, count: int) -> None:
    source = REST[rel].replace(old, new, 1)
    assert source != REST[rel]
    with pytest.raises(PatchError) as error:
        lines_of(rel, source)
    text = str(error.value)
    assert f"hook {hook}:" in text and rel in text and "0.5.18" in text and f"has {count} places" in text


def test_a_comment_in_an_argument_is_refused() -> None:
    source = REST[INDEXER].replace(
        b"                cache,\n", b"                (cache  # here\n                ),\n"
    )
    with pytest.raises(PatchError, match="comment"):
        lines_of(INDEXER, source)


def test_digest_and_version_come_from_the_tree_where_they_are_not_given(tmp_path: Path) -> None:
    base = tmp_path / "base"
    files = {**REST, ENVIRON: SOURCE, "sglang/_version.py": b"__version__ = version = '0.5.18'\n"}
    for rel, content in files.items():
        (base / rel).parent.mkdir(parents=True, exist_ok=True)
        (base / rel).write_bytes(content)
    (base / "sglang" / "__pycache__").mkdir()
    (base / "sglang" / "__pycache__" / "x.pyc").write_bytes(b"x")
    result = run("--base", str(base), "--out", str(tmp_path / "out"))
    lines = sorted(f"{sha(content)}  {rel}\n" for rel, content in files.items())
    expected = build(base, sha("".join(lines).encode()), "0.5.18")
    assert (result.returncode, result.stdout.strip()) == (0, expected.digest), result.stderr
    (base / "sglang" / "_version.py").unlink()
    result = run("--base", str(base), "--out", str(tmp_path / "other"))
    assert result.returncode == 2 and "give it with --version" in result.stderr
