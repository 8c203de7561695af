"""Model files of runs on other machines: a file is executed only if the user of this machine passed or confirmed it.

A path in a message is never opened. The user passes a file of this machine, or confirms the coordinator's copy by its
SHA-256, which ``gnnfleet train`` printed on the first machine.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnnfleet.errors import ConfigError
from gnnfleet.nn.config import make_config
from gnnfleet.nn.custom_model import file_digest

MODEL_COPY = "confirmed_model.py"
_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_model_file(config: Mapping[str, Any]) -> bytes:
    """Read the source of a run's model file; empty for a built-in model."""
    file = make_config(str(config["model"]["name"])).file
    return b"" if file is None else file.read_bytes()


def confirm_model_file(
    config: Mapping[str, Any], source: bytes, *, model: str | None, sha256: str | None, folder: Path
) -> dict[str, Any]:
    """The config of a run on another machine, with a model file that this machine's user passed or confirmed.

    ``source`` is the coordinator's copy of the file. It is written to ``folder`` if ``sha256`` confirms it. Raises
    ConfigError if the run needs a model file that neither ``model`` nor ``sha256`` provides.
    """
    settings = dict(config["model"])
    sent = make_config(str(settings["name"]))
    if sent.file is None:
        if model is not None or sha256 is not None:
            option = "--model" if model is not None else "--model-sha256"
            raise ConfigError(f"the run trains the built-in model {sent.name}, which needs no file: leave out {option}")
        return dict(config)
    if model is not None and sha256 is not None:
        raise ConfigError("--model and --model-sha256 exclude each other: pass one of them")
    if model is not None:
        settings["name"] = _local_file(model, sent.factory, hashlib.sha256(source).hexdigest())
    else:
        settings["name"] = f"{_confirmed_copy(source, sent.label, sha256, folder)}:{sent.factory}"
    return {**config, "model": settings}


def _local_file(model: str, factory: str, expected: str) -> str:
    local = make_config(model)
    if local.file is None or local.factory != factory:
        raise ConfigError(
            f"the run's model is a file with the factory {factory!r}, found --model {model}: pass FILE.py:{factory}"
        )
    if (digest := file_digest(local.file)) != expected:
        raise ConfigError(
            f"{local.file} differs from the coordinator's model file (SHA-256 {digest[:12]}…, there {expected[:12]}…): "
            "all machines need the same file"
        )
    return local.name


def _confirmed_copy(source: bytes, label: str, sha256: str | None, folder: Path) -> Path:
    digest = hashlib.sha256(source).hexdigest()
    if sha256 is None:
        factory = label.rpartition(":")[2]
        raise ConfigError(
            f"the run needs the model file {label}, which is not executed without your consent: pass your copy with "
            f"--model FILE.py:{factory}, or accept the coordinator's with --model-sha256, if gnnfleet train printed "
            f"{digest} there"
        )
    if not _SHA256.fullmatch(sha256.lower()):
        raise ConfigError(
            f"--model-sha256 takes the 64 hexadecimal digits that gnnfleet train printed, found {sha256!r}"
        )
    if sha256.lower() != digest:
        raise ConfigError(
            f"the coordinator sent a model file with the SHA-256 {digest}, not the one you confirmed: nothing was "
            "executed; compare with what gnnfleet train printed on the first machine"
        )
    path = folder / MODEL_COPY
    path.write_bytes(source)
    return path


def check_model_path(config: Mapping[str, Any], local: frozenset[Path]) -> None:
    """Raise ConfigError if another rank named a model file that this rank's command line or run does not."""
    sent = make_config(str(config["model"]["name"])).file
    if sent is not None and sent not in local:
        raise ConfigError(
            f"rank 0 trains the model file {sent}, which this rank's own command line does not name: start every "
            f"machine with the same --model"
        )
