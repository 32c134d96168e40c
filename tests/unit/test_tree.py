"""What a tree declares, read from small sources in our own words, and what the checks say to it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

COLLECTIONS = Path(__file__).parents[2] / "collections"
sys.path.insert(0, str(COLLECTIONS))

from ansible_collections.dsv4.fleet.plugins.plugin_utils import tree  # noqa: E402  # the path comes first

ENVIRON = """
class EnvField: ...
class EnvBool(EnvField): ...
class EnvInt(EnvField): ...
class EnvFloat(EnvField): ...
class EnvStr(EnvField): ...
class EnvJSON(EnvField): ...
class Fallback: ...
class EnvBoolWithAlias(Fallback, EnvBool): ...
def computed(): ...
class Envs:
    SGLANG_OVERLAP = EnvBool(True)
    SGLANG_RENAMED = EnvBoolWithAlias(False, deprecated_name="SGLANG_FORMER")
    SGLANG_COUNT = EnvInt(3)
    SGLANG_RATE = EnvFloat(0.5)
    SGLANG_TEXT = EnvStr(None)
    SGLANG_TABLE = EnvJSON(None)
    SGLANG_LATE = EnvBool(computed)
    something_else = 3
"""

ACTIONS = """
import argparse
class DeprecatedAction(argparse.Action):
    def __init__(self, option_strings, dest, nargs=0, **kwargs): ...
class DeprecatedAliasAction(argparse.Action):
    def __init__(self, option_strings, dest, new_flag=None, **kwargs): ...
"""

SERVER_ARGS = """
COLOURS = ["red"] + ["blue"]
OPEN = ["one"]
def add_open(choices):
    OPEN.extend(choices)
class ServerArgs:
    model_path: A[str, Arg(help="m", aliases=["--model"])]
    host: A[str, "plain " "text"] = "127.0.0.1"
    port: A[int, f"with {1}"] = 30000
    ratio: A[float, "r"] = 0.5
    enable_it: A[bool, "b"] = False
    tp_size: A[int, Arg(help="t", cli_name="--tensor-size", aliases=["--tp"])] = 1
    colour: A[str, Arg(help="c", choices=COLOURS)] = "red"
    opened: A[str, Arg(help="o", choices=OPEN)] = "one"
    mode: A[Optional[Literal["a", "b"]], "l"] = None
    names: A[Optional[List[str]], "n"] = None
    sizes: A[List[int] | None, Arg(help="s", nargs="*")] = None
    maybe: A[Optional[bool], Arg(help="x", action=argparse.BooleanOptionalAction)] = None
    parsed: A[Optional[dict], Arg(help="p", type_parser=loads)] = None
    inner: A[int, Arg(help="h", no_cli=True)] = 3
    silent: Optional[int] = None
    graph_bs_decode: A[int, "g"] = 1
    graph_bs_prefill: A[int, "g"] = 1

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--config", type=str, help="a file")
        parser.add_argument("--listener", type=str, choices=computed(), help="l")
        parser.add_argument("--gone", action=DeprecatedAction, help="Note.")
        parser.add_argument("--old-port", action=DeprecatedAliasAction, new_flag="--port", dest="port",
                            type=int)
        parser.add_argument("--stale", action="store_true", help="(Deprecated: use --enable-it) Does.")
"""

FIELDS = """
class Parts:
    _NS_PATH = "parts"
    part: A[int, "in a namespace class"] = 1
class Other:
    unrelated: A[int, "not a record"] = 1
"""

FILES = {
    "sglang/srt/server_args.py": SERVER_ARGS,
    "sglang/srt/arg_groups/argparse_actions.py": ACTIONS,
    "sglang/srt/arg_groups/fields/parts.py": FIELDS,
    "sglang/srt/other.py": "class ServerArgs:\n    elsewhere: A[int, 'x'] = 1\n",
}
DECLARED = tree.launch_arguments(FILES)


def test_declared_environment_variables() -> None:
    declared = tree.declared_env(ENVIRON)
    assert {name: (item.type, item.default, item.computed) for name, item in declared.items()} == {
        "SGLANG_OVERLAP": ("bool", True, False),
        "SGLANG_RENAMED": ("bool", False, False),
        "SGLANG_COUNT": ("int", 3, False),
        "SGLANG_RATE": ("float", 0.5, False),
        "SGLANG_TEXT": ("str", None, False),
        "SGLANG_TABLE": ("json", None, False),
        "SGLANG_LATE": ("bool", None, True),
    }


@pytest.mark.parametrize("source", ["", "class Envs:\n    a = 1\n", "def ("])
def test_an_environ_without_declarations_is_an_error(source: str) -> None:
    with pytest.raises(tree.TreeError, match=r"environ\.py"):
        tree.declared_env(source)


def test_names_in_a_file() -> None:
    source = 'os.getenv("SGLANG_A1"); SGL_B; XSGLANG_C; sglang_d; "SGLANG_E-"'
    assert tree.names_in(source) == {"SGLANG_A1", "SGL_B", "SGLANG_E"}


@pytest.mark.parametrize(
    ("spelling", "expected"),
    [
        ("--model-path", {"takes": "one", "kind": "str", "dest": "model_path", "required": True}),
        ("--model", {"dest": "model_path"}),
        ("--host", {"takes": "one", "kind": "str", "required": False}),
        ("--port", {"takes": "one", "kind": "int"}),
        ("--ratio", {"kind": "float"}),
        ("--enable-it", {"takes": "none", "kind": "bool", "takes_value": False}),
        ("--tensor-size", {"dest": "tp_size"}),
        ("--tp", {"dest": "tp_size"}),
        ("--colour", {"choices": ("red", "blue"), "open_choices": False}),
        ("--opened", {"choices": ("one",), "open_choices": True}),
        ("--mode", {"takes": "one", "choices": ("a", "b")}),
        ("--names", {"takes": "many", "kind": "str", "takes_value": True}),
        ("--sizes", {"takes": "any", "kind": "int", "takes_value": False}),
        ("--maybe", {"takes": "none"}),
        ("--no-maybe", {"takes": "none", "dest": "maybe"}),
        ("--parsed", {"takes": "one", "kind": "other"}),
        ("--part", {"kind": "int"}),
        ("--listener", {"takes": "one", "choices": None}),
        ("--gone", {"takes": "none", "deprecated": "it has no effect any more"}),
        ("--old-port", {"takes": "one", "kind": "int", "dest": "port", "deprecated": "use --port"}),
        ("--stale", {"takes": "none", "deprecated": "(Deprecated: use --enable-it) Does."}),
    ],
)
def test_a_declared_argument(spelling: str, expected: dict[str, Any]) -> None:
    argument = DECLARED[spelling]
    assert {name: getattr(argument, name) for name in expected} == expected


@pytest.mark.parametrize("spelling", ["--tp-size", "--inner", "--silent", "--unrelated", "--elsewhere"])
def test_what_is_not_an_argument(spelling: str) -> None:
    assert spelling not in DECLARED


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("parser.add_argument(name)", "written out"),
        ('parser.add_argument("--x", action=Strange)', "Strange"),
        ('parser.add_argument("--port")', "twice"),
        ('parser.add_argument("--x", nargs=count)', "written out"),
    ],
)
def test_a_form_that_is_not_understood_is_an_error_with_file_and_line(line: str, words: str) -> None:
    files = {**FILES, "sglang/srt/server_args.py": f"{SERVER_ARGS}        {line}\n"}
    with pytest.raises(tree.TreeError, match=rf"server_args\.py:\d+.*{words}"):
        tree.launch_arguments(files)


def test_missing_files_are_an_error() -> None:
    with pytest.raises(tree.TreeError, match=r"server_args\.py is missing"):
        tree.launch_arguments({"sglang/srt/arg_groups/fields/parts.py": FIELDS})
    with pytest.raises(tree.TreeError, match="no launch argument"):
        tree.launch_arguments({"sglang/srt/server_args.py": "x = 1\n"})


def say(*arguments: str) -> list[tuple[str, str, str]]:
    return [
        (item.severity, item.name, item.text) for item in tree.check_launch_arguments(arguments, DECLARED)
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "m"],
        [
            "--model-path=m",
            "--port=1",
            "--host",
            "$HOME; 'x'#",
            "--ratio",
            "1e-3",
            "--enable-it",
            "--tp",
            "8",
        ],
        ["--model", "m", "--ratio", "-1", "--names", "a", "b c", "--sizes", "--no-maybe", "--colour", "blue"],
        ["--model", "m", "--parsed", '{"a": 1}', "--mode", "a", "--host", "- with a blank"],
        ["--config", "file.yaml"],
    ],
)
def test_right_arguments_pass(arguments: list[str]) -> None:
    assert say(*arguments) == []


M = ("--model", "m")


@pytest.mark.parametrize(
    ("arguments", "name", "words"),
    [
        (
            (*M, "--graph-bs", "3"),
            "--graph-bs",
            "ambiguous: it could be --graph-bs-decode, --graph-bs-prefill",
        ),
        ((*M, "--graph-bs=3"), "--graph-bs", "--graph-bs-decode, --graph-bs-prefill"),
        ((*M, "--hos", "x"), "--hos", "abbreviation of --host"),
        ((*M, "--prot", "1"), "--prot", "Close to it: --port"),
        ((*M, "-x"), "-x", "not an argument"),
        ((*M, "--port"), "--port", "needs a value"),
        ((*M, "--port", "--enable-it"), "--port", "needs a value"),
        ((*M, "--port", "x"), "--port", "whole number, found 'x'"),
        ((*M, "--ratio", "x"), "--ratio", "a number"),
        ((*M, "--enable-it", "true"), "true", "takes no more values"),
        ((*M, "--enable-it=1"), "--enable-it", "takes no value"),
        ((*M, "stray"), "stray", "takes no more values"),
        ((*M, "--names"), "--names", "needs a value"),
        ((*M, "--colour", "green"), "--colour", "red, blue"),
        ((*M, "--port", "1", "--port", "2"), "--port", "Keep one"),
        ((*M, "--tp", "1", "--tensor-size", "2"), "--tensor-size", "what --tp has set"),
        ((*M, "--help"), "--help", "prints the help"),
        ((*M, "--"), "--", "ends the arguments"),
        (("--port", "1"), "--model-path", "missing"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[str, ...], name: str, words: str) -> None:
    problems = say(*arguments)
    assert [problem[:2] for problem in problems] == [("error", name)], problems
    assert words in problems[0][2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gone",), "no effect"),
        (("--old-port", "3"), "use --port"),
        (("--stale",), "--enable-it"),
        (("--opened", "two"), "knows one"),
    ],
)
def test_what_may_still_work_is_a_warning(arguments: tuple[str, ...], words: str) -> None:
    [(severity, name, text)] = say(*M, *arguments)
    assert (severity, name) == ("warning", arguments[0]) and words in text


def test_values_and_names_are_told_apart_as_argparse_does() -> None:
    """The same lines, by argparse itself: what passes here parses there, and the other way round."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--sizes", nargs="*", type=int)
    parser.add_argument("--host")
    parser.add_argument("--ratio", type=float)
    declared = {
        name: DECLARED[name]
        for name in ("--model-path", "--model", "--names", "--sizes", "--host", "--ratio")
    }
    for value in (
        "-1",
        "-1.5",
        "-.5",
        "-",
        "a b",
        "-a b",
        "-x",
        "--model x",
        "--a=b c",
        "",
        "-1x",
        "--",
        "x=y",
        "-5 a",
    ):
        for line in (["--host", value], ["--names", "a", value], ["--ratio", "1", value]):
            try:
                _, extra = parser.parse_known_args(["--model", "m", *line])
                fine = not extra
            except (argparse.ArgumentError, SystemExit):
                fine = False
            if value == "--":
                continue  # refused here on purpose
            problems = tree.check_launch_arguments(["--model", "m", *line], declared)
            assert (not problems) == fine, (line, problems)


ENV = tree.declared_env(ENVIRON)
READ = {"SGLANG_READ_ELSEWHERE", "SGLANG_FORMER"}


def test_right_variables_pass() -> None:
    values = {
        "SGLANG_OVERLAP": "0",
        "SGLANG_COUNT": "-3",
        "SGLANG_RATE": "1e-3",
        "SGLANG_TEXT": "any $text; 'x' gr\u00fc\u00df",
        "SGLANG_TABLE": '{"a": 1}',
        "SGLANG_READ_ELSEWHERE": "what it likes",
        "NCCL_DEBUG": "INFO",
    }
    assert tree.check_environment(values, ENV, READ) == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("SGLANG_OVERLAPS", "0", "Close to it: SGLANG_OVERLAP"),
        ("SGLANG_NOBODY_KNOWS", "1", "nothing in the tree reads it"),
        ("sglang_overlap", "0", "Close to it: SGLANG_OVERLAP"),
        ("SGL_OVERLAP", "1", "overrule SGLANG_OVERLAP"),
        ("SGLANG_OVER\u200bLAP", "0", "U+200B"),
        ("SGLANG_OVERLAP\u00a0", "0", "U+00A0"),
        ("SGLANG_OVERLAP", "0\r", "U+000D"),
        ("SGLANG_TEXT", "a\ufeff", "U+FEFF"),
        ("SGLANG OVERLAP", "0", "no name"),
        ("SGLANG_OVERLAP", "off", "expected 1 or 0"),
        ("SGLANG_OVERLAP", "True", "expected 1 or 0"),
        ("SGLANG_OVERLAP", " 0", "expected 1 or 0"),
        ("SGLANG_OVERLAP", "", "expected 1 or 0"),
        ("SGLANG_RENAMED", "2", "expected 1 or 0"),
        ("SGLANG_LATE", "yes", "expected 1 or 0"),
        ("SGLANG_COUNT", "3.0", "whole number"),
        ("SGLANG_COUNT", "1_000", "whole number"),
        ("SGLANG_RATE", "half", "a number"),
        ("SGLANG_RATE", " 1", "a number"),
        ("SGLANG_TABLE", '{"a": }', "JSON"),
    ],
)
def test_wrong_variables_are_named(name: str, value: str, words: str) -> None:
    problems = tree.check_environment({name: value}, ENV, READ)
    assert [(item.severity, item.name) for item in problems] == [("error", name)], problems
    assert words in problems[0].text
