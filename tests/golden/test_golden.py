"""Golden scripts: for every flag set, the environment that bash ends up with and the command that it would run.

A file each in ``flags/``, named by the flags that are on. ``DSV4_UPDATE_GOLDEN=1`` writes them anew; then read the
difference, line by line.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import yaml
from ansible.parsing.dataloader import DataLoader
from ansible.template import Templar
from ansible_collections.dsv4.fleet.plugins.plugin_utils import flags, render, script, wanted

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent / "flags"
TABLE = flags.table(yaml.safe_load((ROOT / "roles/sglang_serve/vars/main.yml").read_text())["__sglang_serve_flags"])
SETS = [on for count in range(len(TABLE) + 1) for on in itertools.combinations([row.short for row in TABLE], count)]
RELEASE, UNIT, FINGERPRINT = "r" * 64, "u" * 64, "f" * 64


NASTY = 'it\'s $HOME; # "x"'


def inputs(
    on: tuple[str, ...], role: str, secret: bool, extra: dict[str, str] | None = None, model: str = NASTY
) -> wanted.Inputs:
    worker = {
        "name": f"{role}1",
        "role": role,
        "unit": f"sglang-dsv4-{role}.service",
        "script": f"/root/sglang-dsv4/serve_dsv4_{role}.sh",
    }
    effective = {row.short: flags.Effective(row.short in on, "test") for row in TABLE}
    return wanted.Inputs(
        worker=worker,
        table=TABLE,
        resolved=flags.Resolved(effective, {}, []),
        extra=extra or {},
        command=["python3", "-m", "sglang.launch_server"],
        arguments=["--tp", "4", "--served-model-name", model],
        secrets_digest="5" * 64 if secret else "none",
        has_secret_env=secret,
        has_secret_arguments=secret,
        unit={"stop_timeout_s": 660, "restart_delay_s": 5, "start_limit_burst": 3, "start_limit_interval_s": 600},
    )


def rendered(one: wanted.Inputs) -> tuple[str, dict[str, object]]:
    variables = wanted.script_variables(one, RELEASE, UNIT, FINGERPRINT)
    path = ROOT / "templates" / f"serve_dsv4_{one.worker['role']}.sh.j2"
    text = render.template(Templar(loader=DataLoader()), path, {"dsv4_script": variables})
    return text, variables


@pytest.mark.parametrize("on", SETS, ids=lambda on: "+".join(on) or "none")
def test_flag_set(on: tuple[str, ...]) -> None:
    one = inputs(on, "decode", secret=False)
    text, variables = rendered(one)
    done = wanted.finish(text, variables, one)
    ran = script.run(str(done["script"]))
    # The state is a digest of the whole text, comments too; everything that it stands for is in the file.
    environment = {**ran.environment, "DSV4_FLEET_STATE": "(the digest)"}
    lines = [f"{name}={value}" for name, value in sorted(environment.items())] + [
        f"cd {ran.directory}",
        f"exec {ran.command}",
    ]
    path = HERE / f"{'+'.join(on) or 'none'}.txt"
    if os.environ.get("DSV4_UPDATE_GOLDEN"):
        path.write_text("\n".join(lines) + "\n")
    assert path.read_text().splitlines() == lines
    for row in TABLE:
        assert ran.environment[row.env] == ("1" if row.short in on else "0")


def test_no_golden_file_is_left_over() -> None:
    assert sorted(path.stem for path in HERE.iterdir()) == sorted("+".join(on) or "none" for on in SETS)


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize("secret", [False, True])
def test_bash_and_shellcheck_are_content(role: str, secret: bool, tmp_path: pathlib.Path) -> None:
    one = inputs(("ge_diff",), role, secret, {"SGLANG_X": "a b; c"}, model="deepseek")
    text, variables = rendered(one)
    path = tmp_path / "serve.sh"
    path.write_text(str(wanted.finish(text, variables, one)["script"]))
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.defpath}")
    assert shellcheck, "found no shellcheck beside the interpreter, expected the one of requirements.txt"
    done = subprocess.run([shellcheck, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_secrets_are_named_by_digest_only() -> None:
    one = inputs((), "decode", secret=True)
    text, _ = rendered(one)
    assert f"source /var/lib/dsv4/units/sglang-dsv4-decode.service/secrets/{'5' * 64}/env" in text
    assert f"--config /var/lib/dsv4/units/sglang-dsv4-decode.service/secrets/{'5' * 64}/args.yaml" in text.replace(" \\\n  ", " ")


def test_the_same_inputs_give_the_same_bytes() -> None:
    one = inputs(("ge_diff",), "decode", secret=False)
    assert rendered(one)[0] == rendered(one)[0]


def test_a_template_with_carriage_returns_is_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "serve.sh.j2"
    path.write_bytes((ROOT / "templates/serve_dsv4_decode.sh.j2").read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(flags.SettingError, match="carriage returns"):
        render.template(Templar(loader=DataLoader()), path, {})


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            (
                "export {{ name }}={{ value | quote }}\n{% endfor %}\n\n# The release",
                "export {{ name }}={{ value }}{% endfor %}\n\n# The release",
            ),
            "expected '0'",
        ),
        (
            ("{{ value | quote }}\n{% endfor %}\n{% endif %}", "{{ value }}\n{% endfor %}\n{% endif %}"),
            "SGLANG_X|before any exec",
        ),
        (("exec {{", "{{"), "expected the script to end in exec"),
        (("cd {{ dsv4_script.directory | quote }}", "cd /root/sglang-dsv4"), "working directory"),
        (("export DSV4", "DSV4"), "DSV4_FLEET_STATE"),
    ],
    ids=["glued exports", "unquoted value", "no exec", "another directory", "no state line"],
)
def test_a_spoilt_template_is_refused(spoil: tuple[str, str], says: str, tmp_path: pathlib.Path) -> None:
    source = (ROOT / "templates/serve_dsv4_decode.sh.j2").read_text()
    if spoil[0] == "export DSV4":
        spoil = ("export {{ name }}={{ value | quote }}", "{{ name }}={{ value | quote }}")
    assert spoil[0] in source
    path = tmp_path / "serve.sh.j2"
    path.write_text(source.replace(spoil[0], spoil[1], 1))
    one = inputs((), "decode", secret=False, extra={"SGLANG_X": "a b; c"})
    variables = wanted.script_variables(one, RELEASE, UNIT, FINGERPRINT)
    with pytest.raises(flags.SettingError, match=says):
        wanted.finish(render.template(Templar(loader=DataLoader()), path, {"dsv4_script": variables}), variables, one)


def test_the_unit_verifies(tmp_path: pathlib.Path) -> None:
    one = inputs((), "decode", secret=False)
    text = render.template(
        Templar(loader=DataLoader()),
        ROOT / "templates/sglang-dsv4.service.j2",
        {"dsv4_unit": wanted.unit_variables(one)},
    )
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    assert settings["KillMode"] == "mixed"
    assert int(settings["TimeoutStopSec"]) >= 600
    assert settings["ExecStart"] == one.worker["script"]
    assert settings["RuntimeDirectory"] == "dsv4/sglang-dsv4-decode"
    assert int(settings["StartLimitBurst"]) > 0
