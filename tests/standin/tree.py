"""The SGLang tree this interpreter would import, with as much of it really imported as stays light."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

# Executing their __init__ would pull in torch; environ.py needs only that they exist.
STUBS = ("sglang", "sglang.srt", "sglang.srt.debug_utils")
INDEXER = "sglang.srt.layers.attention.dsv4.indexer"
RUNNER = "sglang.srt.model_executor.runner.decode_cuda_graph_runner"


def _missing(reason: str) -> SystemExit:
    print(f"{sys.executable}: {reason}", file=sys.stderr, flush=True)
    return SystemExit(1)


@dataclass(frozen=True)
class Tree:
    """`package` is the directory `…/sglang` that was found; `environ` is None where a fault skipped it."""

    package: str
    version: str
    environ: ModuleType | None

    @classmethod
    def load(cls, with_environ: bool = True) -> Tree:
        """Find `sglang` as an import would and execute its `srt/environ.py`.

        Exits with 1 and the interpreter's own words where there is no tree; errors of the tree itself
        (a patch that does not run) pass through, as they would upstream.
        """
        spec = importlib.util.find_spec("sglang")
        if spec is None:
            raise _missing(
                "Error while finding module specification for 'sglang.launch_server' "
                "(ModuleNotFoundError: No module named 'sglang')"
            )
        places = list(spec.submodule_search_locations or [])
        if not any(os.path.isfile(os.path.join(place, "launch_server.py")) for place in places):
            raise _missing("No module named sglang.launch_server (ModuleNotFoundError)")
        for name in STUBS:
            _stub(name, [os.path.join(place, *name.split(".")[1:]) for place in places])
        environ = importlib.import_module("sglang.srt.environ") if with_environ else None
        version = str(importlib.import_module("sglang.version").__version__)
        return cls(package=places[0], version=version, environ=environ)

    def flag(self, name: str, default: bool = False) -> bool:
        """The environment variable as this tree parses it: by its declared field, else by its EnvBool."""
        if self.environ is None:
            return default
        field: Any = getattr(self.environ.envs, name, None)
        if field is None:
            field = self.environ.EnvBool(default)
            field.name = name
        return bool(field.get())

    def reads(self, module: str, name: str) -> bool:
        """Whether the code that Python would run for `module` holds `name` (comments do not count).

        Goes through the import system's own loader, so stale bytecode and syntax errors do here
        what they do to a real server.
        """
        path = os.path.join(self.package, *module.split(".")[1:]) + ".py"
        code = importlib.machinery.SourceFileLoader(module, path).get_code(module)
        return code is not None and _holds(code, name)


def _stub(name: str, places: list[str]) -> None:
    module = ModuleType(name)
    module.__path__ = places
    init = os.path.join(places[0], "__init__.py")
    module.__file__ = init if os.path.isfile(init) else None
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, origin=module.__file__, is_package=True)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _holds(code: CodeType, name: str) -> bool:
    if name in code.co_names:
        return True
    for constant in code.co_consts:
        if isinstance(constant, str) and name in constant:
            return True
        if isinstance(constant, tuple) and any(isinstance(item, str) and name in item for item in constant):
            return True
        if isinstance(constant, CodeType) and _holds(constant, name):
            return True
    return False
