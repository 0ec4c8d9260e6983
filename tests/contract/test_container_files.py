"""The files for containers: linted by the tools of their trade, and true to what our command understands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from tdai_supervisor.cli.arguments import parser

TOOLS = Path(sys.executable).parent
STYLE = "{extends: default, rules: {line-length: {max: 120}}}"


def lint(tool: str, *words: str | Path) -> None:
    """Run a linter of the test environment; it must have nothing to say against the file."""
    program = TOOLS / tool
    if not program.exists():
        pytest.skip(f"{tool} is not made for this machine")
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, timeout=15)
    assert done.returncode == 0, done.stdout + done.stderr


def containers(checkout: Path) -> list[dict[str, Any]]:
    """Every container of the Deployment."""
    documents = YAML(typ="safe").load_all((checkout / "container/kubernetes.yaml").read_text())
    deployment = next(d for d in documents if d["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    return [*pod["initContainers"], *pod["containers"]]


def test_linters_are_content(checkout: Path) -> None:
    """hadolint for the Containerfile, yamllint and the schemas of Kubernetes for the manifest."""
    lint("hadolint", checkout / "container/Containerfile")
    lint("yamllint", "-d", STYLE, checkout / "container/kubernetes.yaml")
    lint("kubernetes-validate", "--strict", checkout / "container/kubernetes.yaml")


def test_what_they_run_is_understood(checkout: Path) -> None:
    """Every argument list and probe is a command line of ours; everything that is copied exists."""
    words = [c["args"] for c in containers(checkout)]
    for container in containers(checkout):
        probes = [container.get(f"{p}Probe", {}).get("exec", {}).get("command") for p in ("startup", "readiness")]
        words += [probe[1:] for probe in probes if probe]
    text = (checkout / "container/Containerfile").read_text()
    found = re.findall(r"memory-tencentdb-ctl gateway (install) (--with-node) (--package)", text)
    words += [["gateway", *found[0], "x"]]
    assert len(words) == 5
    for line in words:
        parser().parse_args(line)
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
        assert all((checkout / name).exists() for name in source.split())


def test_nothing_in_the_pod_is_more_than_it_needs(checkout: Path) -> None:
    """Not root, nothing writable but data and /tmp, no capability, no secret but from a Secret."""
    for container in containers(checkout):
        confined = container["securityContext"]
        assert confined["readOnlyRootFilesystem"] is True
        assert confined["allowPrivilegeEscalation"] is False
        assert confined["capabilities"] == {"drop": ["ALL"]}
        assert {m["mountPath"] for m in container["volumeMounts"]} == {"/data", "/tmp"}
        for variable in container["env"]:
            if "KEY" in variable["name"]:
                assert "secretKeyRef" in variable["valueFrom"]
