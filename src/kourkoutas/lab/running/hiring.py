"""Which crew makes the runs, from the words of a command line."""

from __future__ import annotations

from kourkoutas.lab.running import memory, pool
from kourkoutas.lab.running.crew import Hire, Limits

RAY_RETRIES = (
    2  # machines of a cluster come and go; what is killed on one machine mostly lacked memory, and would again
)


def choose(
    *,
    ray: str | None = None,
    workers: int | None = None,
    cpus_per_run: float | None = None,
    gpus_per_run: float | None = None,
    storage: str | None = None,
    retries: int | None = None,
    timeout: float | None = None,
    memory_per_run: float | None = None,
) -> tuple[Hire, int]:
    """(who gets the crew, how often a lost run is made again)."""
    limits = Limits(timeout, memory_per_run)
    if retries is not None and retries < 0:
        raise ValueError(f"--retries must be 0 or above; got {retries}")
    if ray is None:
        if memory_per_run is not None and not memory.measurable():
            raise ValueError(
                f"--memory {memory_per_run:g}: this system does not tell how much memory a process holds; leave it out"
            )
        given = {"--cpus-per-run": cpus_per_run, "--gpus-per-run": gpus_per_run, "--storage": storage}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} {value} is for runs on a Ray cluster: add --ray, or leave it out")
        return pool.hire(workers, limits), retries or 0
    if workers is not None:
        raise ValueError(
            f"--workers {workers} is for processes of this machine; with --ray the nodes and --cpus-per-run say how "
            "many runs are made at once: leave it out"
        )
    from kourkoutas.lab.running import ray as cluster

    hire = cluster.hire(
        ray,
        cpus=1.0 if cpus_per_run is None else cpus_per_run,
        gpus=0.0 if gpus_per_run is None else gpus_per_run,
        storage=storage,
        limits=limits,
    )
    return hire, RAY_RETRIES if retries is None else retries
