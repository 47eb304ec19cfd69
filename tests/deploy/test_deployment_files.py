"""Files for Slurm, Docker Compose and Kollaps: what they say, and that it works as far as it can be tried here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from fleet import SETTINGS, free_addresses

import gossamer
from gossamer import Experiment
from gossamer.cli import main
from gossamer.deploy.compose import write_compose
from gossamer.deploy.kollaps import kollaps_xml
from gossamer.deploy.node import as_deployed
from gossamer.deploy.package import Package
from gossamer.deploy.shaping import tc_commands, write_tc
from gossamer.deploy.slurm import slurm_script
from gossamer.errors import BadInput
from gossamer.network import Kollaps
from gossamer.results.run import load_run
from gossamer.runtime.processes.security.keys import make_keys
from gossamer.runtime.processes.security.peers import Peer, Peers
from gossamer.runtime.processes.security.trust import Security, key_file
from network.kernel import lab, missing

UNIFORM = {
    "name": "uniform",
    "latency_s": 0.02,
    "jitter_s": 0.001,
    "loss": 0.01,
    "uplink_mbps": 20,
    "downlink_mbps": 35.5,
}
STAR = {
    "name": "star",
    "uplink_mbps": [10, 20, 30, 40],
    "downlink_mbps": 50,
    "latency_s": [0.001, 0.002, 0.003, 0.0041],
    "loss": [0.0, 0.1, 0.0, 0.2],
}
STRAGGLERS = {"name": "stragglers", "bandwidth_mbps": 60, "latency_s": 0.002, "count": 2, "factor": 5}


def experiment(network: Any, **changes: Any) -> Experiment:
    return Experiment.of({**SETTINGS, "network": network, "gather": {"timeout_s": 1.0}, **changes})


def matrix(folder: Path) -> dict[str, Any]:
    (folder / "latency.csv").write_text("0,10,20,30\n11,0,21,31\n12,13,0,32\n14,15,16,0\n")
    (folder / "mbps.csv").write_text("0,1,2,3\n4,0,5,6\n7,8,0,9\n10,11,12,0\n")
    return {
        "name": "matrix",
        "latency_ms": str(folder / "latency.csv"),
        "bandwidth_mbps": str(folder / "mbps.csv"),
        "uplink_mbps": 100,
    }


@pytest.mark.parametrize(
    "network", [UNIFORM, STAR, STRAGGLERS, "matrix"], ids=["uniform", "star", "stragglers", "matrix"]
)
def test_a_network_written_for_kollaps_is_the_same_when_it_is_read(network: Any, tmp_path: Path) -> None:
    made = experiment(matrix(tmp_path) if network == "matrix" else network)
    file = tmp_path / "topology.xml"
    file.write_text(kollaps_xml(made))
    before = made.network.conditions(4, made.seed)
    after = Kollaps(path=file).conditions(4, made.seed)
    limit = np.where(np.isinf(before.rates[:8]), 1e12 / 8, before.rates[:8])
    assert np.allclose(after.rates[:8], limit)
    for source in range(4):
        for to in range(4):
            if source == to:
                continue
            one, other = before.path(source, to), after.path(source, to)
            assert one is not None
            assert other is not None
            assert (other.links[0], other.links[-1]) == (source, 4 + to)
            assert other.latency_s == pytest.approx(one.latency_s)
            assert other.jitter_s == pytest.approx(one.jitter_s)
            assert other.loss == pytest.approx(one.loss, abs=1e-12)
            inner = min([1e12 / 8, *(float(after.rates[link]) for link in other.links[1:-1])])
            assert inner == pytest.approx(min(one.rate, 1e12 / 8))


def test_a_kollaps_file_stays_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "own.xml").write_text(kollaps_xml(experiment(UNIFORM)).replace("switch", "centre"))
    own = experiment({"name": "kollaps", "path": str(tmp_path / "own.xml")})
    assert kollaps_xml(own) == (tmp_path / "own.xml").read_text()


def test_networks_that_kollaps_can_not_be_told_are_refused(tmp_path: Path) -> None:
    shared = {**matrix(tmp_path), "shared": True, "placement": "blocks"}
    with pytest.raises(BadInput, match="network: nodes 0 and 2 share a link with nodes 0 and 3"):
        (tmp_path / "latency.csv").write_text("0,10\n11,0\n")
        (tmp_path / "mbps.csv").write_text("0,1\n2,0\n")
        kollaps_xml(experiment(shared))
    varying = {
        "name": "varying",
        "base": UNIFORM,
        "rate_changes": [{"at_s": 1.0, "factor": 0.5}],
    }
    with pytest.raises(BadInput, match="network: varying changes with time"):
        kollaps_xml(experiment(varying))


def test_a_compose_folder_has_a_service_and_a_key_for_each_node(tmp_path: Path) -> None:
    written = write_compose(experiment(UNIFORM), tmp_path / "deployment", subnet="10.9.0.0/24")
    assert all(path.exists() for path in written)
    said = yaml.safe_load((tmp_path / "deployment" / "compose.yaml").read_text())
    peers = Peers.load(tmp_path / "deployment" / "experiment" / "peers.yaml")
    assert len(said["services"]) == len(peers) == 4
    runs = {service["environment"]["RUN"] for service in said["services"].values()}
    assert re.fullmatch(r"\$\{RUN:-[0-9a-f]{32}\}", runs.pop())
    assert not runs
    for rank, (name, service) in enumerate(said["services"].items()):
        assert name == f"node-{rank}"
        assert service["command"] == [str(rank)]
        assert service["networks"]["links"]["ipv4_address"] == peers.addresses[rank][0]
        mounted = {volume.split(":")[1]: volume.split(":")[0] for volume in service["volumes"]}
        assert set(mounted) == {"/experiment", f"/keys/node-{rank}.pem", "/records"}  # nobody else's key
        for source in mounted.values():
            assert (tmp_path / "deployment" / source).exists()
        Security(key_file(tmp_path / "deployment" / "keys", rank), peers, rank)
    assert Experiment.load(tmp_path / "deployment" / "experiment" / "experiment.yaml").nodes == 4
    with pytest.raises(BadInput, match="--out .*deployment: there already"):
        write_compose(experiment(UNIFORM), tmp_path / "deployment")
    with pytest.raises(BadInput, match="--subnet: 10.9.0.0/29 has no room for 4 nodes"):
        write_compose(experiment(UNIFORM), tmp_path / "other", subnet="10.9.0.0/29")


def test_links_without_limit_are_not_shaped(tmp_path: Path) -> None:
    write_compose(experiment("uniform"), tmp_path / "deployment")
    assert not (tmp_path / "deployment" / "experiment" / "links").exists()


def run_cli(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["gossamer", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def test_a_container_installs_the_sources_that_gossamer_runs_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment(UNIFORM).save(tmp_path / "experiment.yaml")
    run_cli(monkeypatch, tmp_path, "deploy", "compose", "experiment.yaml", "-o", "a folder")
    place = tmp_path / "a folder"
    said = (place / "Dockerfile").read_text().splitlines()
    assert said.index("COPY package package") < said.index("ARG GOSSAMER=./package")
    root = Path(gossamer.__file__).parents[2]
    for name in ("pyproject.toml", "README.md", "LICENSE", "src/gossamer/deploy/compose.py"):
        assert (place / "package" / name).read_bytes() == (root / name).read_bytes()
    assert not [*place.rglob("__pycache__"), *place.rglob("*.egg-info")]
    assert "gossamer collect 'a folder/records' -o RUN" in capsys.readouterr().out


def test_a_container_installs_the_wheel_that_is_told(tmp_path: Path) -> None:
    wheel = tmp_path / "gossamer-9.9-py3-none-any.whl"
    with pytest.raises(BadInput, match=r"--wheel .*9.9-py3-none-any.whl: accepted: a wheel"):
        write_compose(experiment(UNIFORM), tmp_path / "deployment", wheel=wheel)
    assert not (tmp_path / "deployment").exists()
    wheel.write_bytes(b"a wheel")
    write_compose(experiment(UNIFORM), tmp_path / "deployment", wheel=wheel)
    assert (tmp_path / "deployment" / "package" / wheel.name).read_bytes() == b"a wheel"
    said = (tmp_path / "deployment" / "Dockerfile").read_text()
    assert f"ARG GOSSAMER=./package/{wheel.name}\n" in said


def test_without_sources_a_container_installs_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gossamer, "__file__", "/usr/lib/python3/site-packages/gossamer/__init__.py")
    assert Package.of() == Package(f"gossamer=={gossamer.__version__}", {})


def test_a_container_takes_its_key_and_is_its_node(tmp_path: Path) -> None:
    """What stands in for the program says how it was called; tc is not there, or may not."""
    write_compose(experiment(UNIFORM), tmp_path / "deployment")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "gossamer").write_text('#!/bin/sh\necho "$@"\nls -l "$8"\numask\n')
    (tools / "tc").write_text("#!/bin/sh\nexit 2\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "EXPERIMENT_FOLDER": str(tmp_path / "deployment" / "experiment"),
        "KEY_FOLDER": str(tmp_path / "deployment" / "keys"),
        "RECORDS": str(tmp_path / "records"),
        "RUN": "the second",
    }
    entry = tmp_path / "deployment" / "entry.sh"
    done = subprocess.run(["sh", entry, "2"], env=environment, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("node experiment.yaml --rank 2 --peers peers.yaml --keys /")
    assert done.stdout.splitlines()[0].endswith(f"--out {tmp_path / 'records'} --run the second")
    assert "-rw------- 1 " in done.stdout
    assert "node-2.pem" in done.stdout
    assert done.stdout.endswith("0022\n")  # records are for whoever collects them
    assert "the link is not shaped" in done.stderr


def test_the_kernel_takes_the_commands_for_a_link() -> None:
    """Where it has no netem, the rates alone."""
    if reason := missing():
        pytest.skip(reason)
    with lab() as made:
        for name in ("one", "other"):
            made.host(name)
        made.switch("switch")
        for name in ("one", "other"):
            made.link(name, "switch", np.inf, np.inf)
        hosts = [made.address("one"), made.address("other"), "10.77.0.77", "10.77.0.78"]
        lines = tc_commands(experiment(UNIFORM), 0, hosts, device="v1a")

        def tc(*words: str, given: str = "") -> subprocess.CompletedProcess[str]:
            command = ["ip", "netns", "exec", f"{made.prefix}one", "tc", *words]
            return subprocess.run(command, input=given, capture_output=True, text=True, timeout=20)

        done = tc("-force", "-batch", "-", given="\n".join(lines))
        problems = [line for line in done.stderr.splitlines() if not line.startswith("Command failed")]
        assert set(problems) <= {"Error: Specified qdisc kind is unknown."}
        delayed = not problems
        classes = tc("class", "show", "dev", "v1a").stdout
        assert classes.count("rate 5Mbit ceil 20Mbit") == 3
        assert classes.count("rate 20Mbit ceil 20Mbit") == 1
        assert tc("filter", "show", "dev", "v1a").stdout.count("flowid") == 3
        assert tc("qdisc", "show", "dev", "v1a").stdout.count("netem") == 3 * delayed


def slurm_tools(folder: Path, port: int) -> dict[str, str]:
    """An srun that runs all tasks here, and a machine's name."""
    tools = folder / "tools"
    tools.mkdir()
    (tools / "srun").write_text(
        "#!/bin/bash\nstatus=0\npids=()\nwhile [[ $1 == -* ]]; do shift; done\n"
        'for ((task = 0; task < SLURM_NTASKS; task++)); do\n  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & pids+=($!)\ndone\n'
        'for pid in "${pids[@]}"; do wait "$pid" || status=$?; done\nexit $status\n'
    )
    (tools / "hostname").write_text("#!/bin/sh\necho 127.0.0.1\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_JOB_ID": "17",
        "SLURM_NTASKS": "2",
    }


def test_what_needs_somebody_over_all_nodes_is_refused() -> None:
    asked = experiment(
        "uniform",
        stop={"rounds": 2, "target": {"metric": "test_loss", "value": 1}},
        evaluation={"nodes": "average"},
        engine={"name": "processes", "restart": "always"},
    )
    with pytest.raises(BadInput) as refused:
        as_deployed(asked)
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "stop.target",
        "evaluation.nodes",
        "engine.restart",
    ]
    assert as_deployed(experiment(UNIFORM)).network == experiment("uniform").network
    assert as_deployed(experiment(UNIFORM), shape=True).network == experiment(UNIFORM).network


def test_a_batch_script_is_one_for_sbatch(tmp_path: Path) -> None:
    script = tmp_path / "job.slurm"
    script.write_text(
        slurm_script(
            experiment("uniform"),
            "my experiment.yaml",
            overrides=["seed=2"],
            directives=("--partition=long",),
        )
    )
    lines = script.read_text().splitlines()
    assert '    --run "$run" --set seed=2 \\' in lines
    assert lines[0] == "#!/bin/bash"
    directives = [line for line in lines if line.startswith("#SBATCH ")]
    assert {"#SBATCH --ntasks=4", "#SBATCH --requeue", "#SBATCH --partition=long"} <= set(directives)
    assert lines.index(directives[-1]) < lines.index("set -euo pipefail")
    assert "experiment='my experiment.yaml'" in lines
    assert subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=20).stderr == ""


def test_a_job_that_is_queued_again_goes_on_where_there_are_checkpoints(tmp_path: Path) -> None:
    """What stands in for the program says how it was called. Time in the queue is none of the run's."""
    environment = slurm_tools(tmp_path, 29_600)
    (tmp_path / "gossamer").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "gossamer").chmod(0o755)
    called = []
    for checkpoint in ({}, {"every_rounds": 3}):
        script = slurm_script(
            experiment("uniform", nodes=2, checkpoint=checkpoint),
            "e.yaml",
            command=str(tmp_path / "gossamer"),
        )
        for again in ("0", "1"):
            if again == "1" and checkpoint:  # what the first attempt left
                left = tmp_path / "runs" / "deployed" / "slurm-17" / "records" / "some" / "rows"
                left.parent.mkdir(parents=True)
                for number, when in enumerate((1500.0, 1600.5)):
                    left.with_suffix(f".{number}").touch()
                    os.utime(left.with_suffix(f".{number}"), (when, when))
            done = subprocess.run(
                ["bash", "-c", script],
                env={**environment, "SLURM_RESTART_COUNT": again},
                capture_output=True,
                text=True,
                timeout=20,
            )
            called.append([line for line in done.stdout.splitlines() if line.startswith("node ")])
    places = [
        {
            re.search(r"--out (\S+) --run \w{32} (--resume )?(--down-since=\S+ )?--rank", line)[1]
            for line in each
        }
        for each in called
    ]
    assert places == [
        {"runs/deployed/slurm-17-0/records"},
        {"runs/deployed/slurm-17-1/records"},
        {"runs/deployed/slurm-17/records"},
        {"runs/deployed/slurm-17/records"},
    ]
    runs = [{line.split("--run ")[1].split()[0] for line in each} for each in called]
    assert [len(each) for each in runs] == [1] * 4
    assert runs[0] != runs[1] != runs[2] == runs[3]
    assert ["--resume" in line for each in called for line in each] == [False] * 4 + [True] * 4
    assert ["--down-since" in line for each in called for line in each] == [False] * 6 + [True] * 2
    assert all("--down-since=1600.5000000000 " in line for line in called[3])


@pytest.mark.slow
def test_a_batch_script_runs_all_tasks_and_collects(tmp_path: Path) -> None:
    port = int(free_addresses(1)[0].rpartition(":")[2])
    experiment("uniform", nodes=2, gather={}).save(tmp_path / "experiment.yaml")
    script = slurm_script(
        experiment("uniform", nodes=2), "experiment.yaml", command=f"{sys.executable} -m gossamer", port=port
    )
    (tmp_path / "job.slurm").write_text(script)
    done = subprocess.run(
        ["bash", tmp_path / "job.slurm"],
        env=slurm_tools(tmp_path, port),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    run = load_run(tmp_path / "runs" / "deployed" / "slurm-17-0" / "run")
    assert (run.status, run.lost, run.metrics["node"].max()) == ("done", [], 1)
    assert not (run.path.parent / "keys").exists()


def peers_at(folder: Path, *addresses: str) -> Peers:
    certificates = make_keys(folder / "keys", range(len(addresses)))
    return Peers(Peer.of(rank, addresses[rank], der) for rank, der in certificates.items())


def test_commands_of_the_kernel_are_written_for_each_node_of_a_peers_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = [f"10.0.0.{rank + 1}" for rank in range(4)]
    peers_at(tmp_path, *(f"{host}:29600" for host in hosts)).save(tmp_path / "peers.yaml")
    described = experiment(STAR)
    described.save(tmp_path / "experiment.yaml")
    words = ["deploy", "tc", "experiment.yaml", "--peers", "peers.yaml", "--device", "v1", "-o", "links"]
    run_cli(monkeypatch, tmp_path, *words)
    for rank in range(4):
        said = (tmp_path / "links" / f"node-{rank}.tc").read_text().splitlines()
        assert said == tc_commands(described, rank, hosts, "v1")


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (["10.0.0.1:9", "10.0.0.2:9", "10.0.0.3:9", "[2001:db8::1]:9"], "node 3: at 2001:db8::1"),
        (["10.0.0.1:9", "10.0.0.2:9", "10.0.0.2:10", "10.0.0.3:9"], "node 1: at 10.0.0.2"),
        (["10.0.0.1:9", "10.0.0.2:9"], "nodes: 4, but the peers file has 2"),
    ],
)
def test_the_kernel_can_shape_only_what_has_an_address_of_its_own(
    addresses: list[str], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=re.escape(reason)):
        write_tc(experiment(STAR), peers_at(tmp_path, *addresses), tmp_path / "links")
    assert not (tmp_path / "links").exists()
