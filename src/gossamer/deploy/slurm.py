"""A batch script for Slurm: one task is one node."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from gossamer.config import Experiment

_SCRIPT = r"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --ntasks={nodes}
#SBATCH --cpus-per-task=1
#SBATCH --output={name}-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
{directives}# {nodes} nodes of {name}, a task each. The job's folder must be on a file system that all machines share.
# Two minutes before the time is up, and on scancel --signal=TERM, the nodes stop in order. {again}
set -euo pipefail
umask 077
cd "${{SLURM_SUBMIT_DIR:?run by sbatch}}"
experiment={experiment}
job={job}
rm -rf "$job/keys" "$job/run"
mkdir -p "$job"
[ -s "$job/id" ] || od -A n -N 16 -t x1 /dev/urandom | tr -d " \n" > "$job/id"
run=$(cat "$job/id")
{down}
# Where each task is: only now is that known. The keys are for this job alone.
srun bash -c 'echo "$SLURM_PROCID $(hostname -f):$(({port} + SLURM_LOCALID))"' | sort -n > "$job/addresses"
mapfile -t addresses < <(cut -d " " -f 2 "$job/addresses")
{command} keys "$job/keys" --nodes {nodes} -o "$job/peers.yaml" "${{addresses[@]/#/--address=}}" -q

status=0
srun --kill-on-bad-exit=0 bash -c 'exec "$@" --rank "$SLURM_PROCID"' node \
    {command} node "$experiment" --peers "$job/peers.yaml" --keys "$job/keys" --out "$job/records" \
    --run "$run" {options}\
    || status=$?
rm -rf "$job/keys"
{command} collect "$job/records" -o "$job/run" --allow-missing
{command} report "$job/run"
exit "$status"
"""


_DOWN = r"""# The time in the queue is none of the run's: nobody has lived since the newest file of a record was written.
mkdir -p "$job/records"
down=$(find "$job/records" -type f -printf '%T@\n' | sort -n | tail -n 1)
"""
_GOES_ON = """\
A job that is put into
# the queue again goes on in its folder, from its nodes' checkpoints as far as there are any."""
_BEGINS_ANEW = """\
A job that is put into
# the queue again begins anew in a folder beside the first one's; what was recorded before is kept."""


def slurm_script(
    experiment: Experiment,
    file: str | Path,
    *,
    overrides: Sequence[str] = (),
    directives: tuple[str, ...] = (),
    command: str = "gossamer",
    port: int = 29_600,
) -> str:
    """The script for ``sbatch``.

    Args:
        experiment: what is run.
        file: the experiment file, as a path where the script runs.
        overrides: of its fields, as ``--set`` takes them.
        directives: further options of ``sbatch``, such as "--partition=long".
        command: how gossamer is called, as a shell reads it.
        port: of the first node on a machine; the others count on from there.
    """
    resumes = experiment.checkpoint.on
    return _SCRIPT.format(
        name=experiment.name,
        nodes=experiment.nodes,
        directives="".join(f"#SBATCH {each}\n" for each in directives),
        experiment=shlex.quote(str(file)),
        options="".join(f"--set {shlex.quote(each)} " for each in overrides)
        + ('--resume ${down:+"--down-since=$down"} ' if resumes else ""),
        down=_DOWN if resumes else "",
        again=_GOES_ON if resumes else _BEGINS_ANEW,
        job=f"runs/{experiment.name}/slurm-$SLURM_JOB_ID" + ("" if resumes else "-${SLURM_RESTART_COUNT:-0}"),
        command=command,
        port=port,
    )
