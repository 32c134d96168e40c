"""The node image: Debian with systemd, sshd and Python, the router, and the SGLang base tree.

It is built from Debian's packages, since no image registry may be assumed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
from pathlib import Path

from tests.local.downloads import sglang_tree, unpack
from tests.local.podman import podman
from tests.local.process import run
from tests.local.settings import CACHE, DEBIAN, IMAGE_NAME, LocalError, router_wheels, sglang_wheel

LABEL = "dsv4.image"

PACKAGES = (
    "systemd,systemd-sysv,dbus,openssh-server,sudo,bash,procps,iproute2,curl,ca-certificates,"
    # the stand-in engine and the agent's host
    "python3,python3-setproctitle,python3-aiohttp,python3-yaml,"
    # what the router's launcher imports, with orjson by its wheel
    "python3-uvicorn,python3-fastapi"
)

#: Files of the image itself, by path.
FILES = {
    "/opt/sglang-router/bin/sglang-router": (
        0o755,
        "#!/usr/bin/python3 -I\n"
        "import sys\n"
        'sys.path.insert(0, "/opt/sglang-router")\n'
        "from sglang_router.cli import main\n"
        'sys.argv[0] = "sglang-router"\n'
        "sys.exit(main())\n",
    ),
    # Many short sessions of Ansible at once are ordinary here; names of clients are not looked up.
    "/etc/ssh/sshd_config.d/dsv4.conf": (
        0o644,
        "HostKey /etc/ssh/ssh_host_ed25519_key\nMaxStartups 100\nMaxSessions 100\nUseDNS no\nPasswordAuthentication no\n",
    ),
    # journald's default may take a tenth of the disk for each node.
    "/etc/systemd/journald.conf.d/dsv4.conf": (0o644, "[Journal]\nSystemMaxUse=64M\nRuntimeMaxUse=64M\n"),
}

#: Run inside the root directory ($1) after the packages: units that have no sense in a container,
#: and keys that every container would share.
CUSTOMIZE = r"""
set -eu
rm -f "$1"/etc/ssh/ssh_host_*
: > "$1/etc/machine-id"
rm -rf "$1"/usr/share/doc/* "$1"/usr/share/man/* "$1"/usr/share/locale/* "$1"/var/cache/apt/* "$1"/var/lib/apt/lists/*
chroot "$1" systemctl mask --quiet apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    systemd-resolved.service systemd-networkd.service systemd-timesyncd.service getty.target console-getty.service
"""


def tag() -> str:
    """The image's name with the digest of all that goes into it; DSV4_NODE_IMAGE names another image."""
    own = os.environ.get("DSV4_NODE_IMAGE")
    if own:
        return own
    inputs = repr((DEBIAN, PACKAGES, FILES, CUSTOMIZE, sglang_wheel(), router_wheels()))
    return f"{IMAGE_NAME}:{hashlib.sha256(inputs.encode()).hexdigest()[:12]}"


def ensure() -> str:
    """Build the image unless it is there; its name."""
    name = tag()
    if podman("image", "exists", name, check=False).rc == 0:
        return name
    if os.environ.get("DSV4_NODE_IMAGE"):
        raise LocalError(
            f"found no image {name} (DSV4_NODE_IMAGE) in podman's store: load it, or unset the variable to build one"
        )
    packages = [unpack(wheel, package) / package for package, wheel in router_wheels().items()]
    tree = sglang_tree() / "sglang"
    print(f"building the node image {name} from Debian's packages (about a minute)", flush=True)
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        rootfs = Path(scratch, "rootfs.tar")
        files = Path(scratch, "files")
        for path, (mode, text) in FILES.items():
            target = files / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            target.chmod(mode)
        script = Path(scratch, "customize")
        script.write_text("#!/bin/sh" + CUSTOMIZE, encoding="utf-8")
        script.chmod(0o755)
        hooks = [
            'mkdir -p "$1/opt/sglang-router" "$1/root/sglang-dsv4/python"',
            *(f"copy-in {shlex.quote(str(package))} /opt/sglang-router" for package in packages),
            f"copy-in {shlex.quote(str(tree))} /root/sglang-dsv4/python",
            *(f"copy-in {shlex.quote(str(top))} /" for top in sorted(files.iterdir())),
            f'{shlex.quote(str(script))} "$1"',
        ]
        mirror = [os.environ["DSV4_DEBIAN_MIRROR"]] if os.environ.get("DSV4_DEBIAN_MIRROR") else []
        try:
            run(
                [
                    "mmdebstrap",
                    "--variant=minbase",
                    f"--include={PACKAGES}",
                    *(f"--customize-hook={hook}" for hook in hooks),
                    DEBIAN,
                    str(rootfs),
                    *mirror,
                ],
                timeout=900,
            )
        except LocalError as error:
            raise LocalError(
                "could not build the node image from Debian's packages. If the archive cannot be reached from here, "
                "name a mirror with DSV4_DEBIAN_MIRROR=URL, or an image of your own (systemd, sshd, python3, see "
                f"tests/local/image.py) with DSV4_NODE_IMAGE=NAME.\n{error}"
            ) from error
        podman("import", "--change", f"LABEL {LABEL}=node", str(rootfs), name, timeout=300)
    return name
